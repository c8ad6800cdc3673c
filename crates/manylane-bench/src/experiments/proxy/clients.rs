//! Clients, on one thread: as many connections as wanted, each with one request at a time.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use manylane_sys::timer::Timer;
use mio::net::TcpStream;
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};

use super::servers::{ANSWER_LEN, CLOSE, KEEP, REQUEST_LEN, STREAM};

/// Connections that are asked for at a time: a flood of SYNs would be dropped.
const CONNECTING_MAX: usize = 512;
/// Timeout until all connections are there.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a run goes on until a first answer: on a busy machine, the proxy may not have had a CPU
/// meanwhile.
const FIRST_ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time of a request that the histogram tells.
const LATENCY_MAX: Duration = Duration::from_secs(60);

/// Paced requests are sent in bursts this far apart: clients that looked all the time when the next
/// one is due would take the CPU from the servers.
const PACE_TICK: Duration = Duration::from_micros(200);
/// The token of its timer.
const PACE: Token = Token(usize::MAX);

/// What the connections do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Traffic {
    /// One request after the other, each on a connection that lives on.
    KeepAlive,
    /// The same at so many requests per second; their time counts from when their burst was due.
    Paced(f64),
    /// A connection for each request, which the server closes.
    Connect,
    /// Bytes from the server, without an end.
    Stream,
}

/// What has come of it.
pub(super) struct Outcome {
    pub(super) elapsed: Duration,
    /// Requests that were answered, and connections that broke.
    pub(super) requests: u64,
    pub(super) failed: u64,
    /// Bytes that were received.
    pub(super) bytes: u64,
    pub(super) latency: Histogram<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Connecting,
    Idle,
    /// Bytes of the answer that are missing.
    Waiting(usize),
}

struct Connection {
    stream: TcpStream,
    state: State,
    /// When its request was due.
    since: Instant,
}

/// The connections.
pub(super) struct Clients {
    poll: Poll,
    events: Events,
    /// Wakes for the next burst.
    pace: Timer,
    to: SocketAddr,
    traffic: Traffic,
    connections: Vec<Connection>,
    idle: Vec<usize>,
    buffer: Vec<u8>,
    outcome: Outcome,
}

impl Clients {
    /// Makes the connections, in the network namespace of the calling thread.
    pub(super) fn connect(to: SocketAddr, connections: usize, traffic: Traffic) -> Result<Clients> {
        let mut clients = Clients {
            poll: Poll::new()?,
            events: Events::with_capacity(1024),
            pace: Timer::new()?,
            to,
            traffic,
            connections: Vec::with_capacity(connections),
            idle: Vec::new(),
            buffer: vec![0; 256 << 10],
            outcome: Outcome::new()?,
        };
        clients.poll.registry().register(
            &mut SourceFd(&clients.pace.as_fd().as_raw_fd()),
            PACE,
            Interest::READABLE,
        )?;
        let start = Instant::now();
        while clients.idle.len() < connections {
            let connecting = clients.connections.len() - clients.idle.len();
            for _ in connecting..CONNECTING_MAX.min(connections - clients.idle.len()) {
                let at = clients.connections.len();
                let connection = clients.open(at).context("cannot connect to the proxy")?;
                clients.connections.push(connection);
            }
            clients.wait(Duration::from_millis(100))?;
            let ready: Vec<usize> = clients.events.iter().map(|event| event.token().0).collect();
            for at in ready {
                let connection = &mut clients.connections[at];
                if connection.state == State::Connecting {
                    connection.stream.peer_addr().context("cannot connect to the proxy")?;
                    connection.state = State::Idle;
                    clients.idle.push(at);
                }
            }
            ensure!(
                start.elapsed() < CONNECT_TIMEOUT,
                "{} of {connections} connections to the proxy",
                clients.idle.len()
            );
        }
        Ok(clients)
    }

    fn open(&self, at: usize) -> std::io::Result<Connection> {
        let mut stream = TcpStream::connect(self.to)?;
        self.poll.registry().register(&mut stream, Token(at), Interest::READABLE | Interest::WRITABLE)?;
        stream.set_nodelay(true)?;
        Ok(Connection { stream, state: State::Connecting, since: Instant::now() })
    }

    fn wait(&mut self, timeout: Duration) -> Result<()> {
        match self.poll.poll(&mut self.events, Some(timeout)) {
            Err(err) if err.kind() != ErrorKind::Interrupted => Err(err.into()),
            _ => Ok(()),
        }
    }

    /// Sends and receives for this time, and until something was answered.
    pub(super) fn run(&mut self, duration: Duration) -> Result<Outcome> {
        self.outcome = Outcome::new()?;
        let start = Instant::now();
        let end = start + duration;
        let mut paced = 0_u64;
        loop {
            let now = Instant::now();
            let is_answered = self.outcome.requests > 0 || self.outcome.bytes > 0;
            if now >= end && (is_answered || now >= end + FIRST_ANSWER_TIMEOUT) {
                break;
            }
            let timeout = end.saturating_duration_since(now).max(Duration::from_millis(1));
            if let Traffic::Paced(rate) = self.traffic {
                let burst = rate * PACE_TICK.as_secs_f64();
                let due = |number: u64| start + PACE_TICK.mul_f64((number as f64 / burst).ceil());
                while due(paced) <= now
                    && let Some(at) = self.idle.pop()
                {
                    self.ask(at, due(paced));
                    paced += 1;
                }
                if !self.idle.is_empty() {
                    self.pace.start(due(paced).saturating_duration_since(now));
                }
            } else {
                while let Some(at) = self.idle.pop() {
                    self.ask(at, now);
                }
            }
            self.wait(timeout)?;
            let ready: Vec<Token> = self.events.iter().map(mio::event::Event::token).collect();
            for at in ready.into_iter().filter(|token| *token != PACE) {
                self.turn(at.0)?;
            }
        }
        let mut outcome = std::mem::replace(&mut self.outcome, Outcome::new()?);
        outcome.elapsed = start.elapsed();
        ensure!(outcome.requests > 0 || outcome.bytes > 0, "no request was answered");
        Ok(outcome)
    }

    /// Sends a request.
    fn ask(&mut self, at: usize, due: Instant) {
        let kind = match self.traffic {
            Traffic::KeepAlive | Traffic::Paced(_) => KEEP,
            Traffic::Connect => CLOSE,
            Traffic::Stream => STREAM,
        };
        let connection = &mut self.connections[at];
        connection.since = due;
        connection.state = State::Waiting(ANSWER_LEN);
        // An error shows when the answer is read.
        _ = connection.stream.write(&[kind; REQUEST_LEN]);
    }

    /// Reads what has come.
    fn turn(&mut self, at: usize) -> Result<()> {
        let connection = &mut self.connections[at];
        if connection.state == State::Connecting {
            if connection.stream.peer_addr().is_ok() {
                let since = connection.since;
                self.ask(at, since);
            } else if let Ok(Some(_)) | Err(_) = connection.stream.take_error() {
                self.fail(at)?;
            }
            return Ok(());
        }
        while let State::Waiting(missing) = self.connections[at].state {
            let connection = &mut self.connections[at];
            match connection.stream.read(&mut self.buffer) {
                Ok(0) if missing == 0 => {
                    self.answered(at);
                    return self.renew(at);
                }
                Ok(0) => return self.fail(at),
                Ok(read) => {
                    self.outcome.bytes += read as u64;
                    if self.traffic == Traffic::Stream {
                        continue;
                    }
                    let missing = missing.saturating_sub(read);
                    connection.state = State::Waiting(missing);
                    if missing == 0 && self.traffic != Traffic::Connect {
                        self.answered(at);
                        self.connections[at].state = State::Idle;
                        self.idle.push(at);
                    }
                }
                Err(err) if err.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(_) => return self.fail(at),
            }
        }
        Ok(())
    }

    fn answered(&mut self, at: usize) {
        self.outcome.requests += 1;
        let nanos = u64::try_from(self.connections[at].since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.outcome.latency.saturating_record(nanos);
    }

    fn fail(&mut self, at: usize) -> Result<()> {
        self.outcome.failed += 1;
        self.renew(at)
    }

    /// Makes the connection again.
    fn renew(&mut self, at: usize) -> Result<()> {
        let fresh = self.open(at).context("cannot connect to the proxy")?;
        self.connections[at] = fresh;
        Ok(())
    }
}

impl Outcome {
    fn new() -> Result<Outcome> {
        let latency = Histogram::new_with_bounds(1, LATENCY_MAX.as_nanos() as u64, 3)?;
        Ok(Outcome { elapsed: Duration::ZERO, requests: 0, failed: 0, bytes: 0, latency })
    }
}
