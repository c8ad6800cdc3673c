//! The generator: one thread that never sleeps, one socket.
//!
//! *Open loop*: request n is due at its time in the schedule, whatever happened to earlier ones,
//! and its latency counts from then. So a stall of the server is not hidden by a client that waits
//! for it (no coordinated omission). *Ping-pong*: the next request is sent when the reply has
//! arrived.
//!
//! Requests carry their number. Replies to requests of an earlier series are ignored.

use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use manylane_measure::named_enum;
use manylane_sys::errno::ENOBUFS;
use manylane_sys::sock::{self, Buffer};

use super::cpu_layout::Cpus;
use crate::{Setup, run_pinned};

/// Bytes of the number in a request.
pub const SEQ_LEN: usize = 8;
/// Timeout of a reply.
const REPLY_TIMEOUT: Duration = Duration::from_millis(100);
/// Maximum number of pending requests, a power of two. Older ones are lost.
const IN_FLIGHT_MAX: usize = 1 << 16;
/// Maximum number of requests that are sent before replies are polled.
const BURST_MAX: usize = 8;
/// Polls for a reply between two readings of the clock, in a ping-pong.
const POLLS_PER_CLOCK_READ: u32 = 256;
const RECV_BUFFER_BYTES: usize = 16 << 20;
/// Highest time of the histogram: ten seconds.
const LATENCY_MAX_NS: u64 = 10_000_000_000;

named_enum! {
    /// Intervals between the requests of an open loop.
    pub enum Arrivals {
        /// Equal intervals.
        Even = "even",
        /// Random intervals, as from many independent clients (a Poisson process).
        Poisson = "poisson",
    }
}

/// Result of a series of requests.
#[derive(Debug)]
pub struct RequestStats {
    /// Requests that were due.
    pub requests: u64,
    /// Replies in time.
    pub replies: u64,
    /// Nanoseconds from when a request was due to its reply.
    pub latency: Histogram<u64>,
    /// Delay of the generator behind its own schedule, in nanoseconds, which is included in
    /// latencies.
    pub send_lag: Histogram<u64>,
    /// Duration of sending.
    pub elapsed: Duration,
}

impl RequestStats {
    /// An empty result.
    pub fn new() -> Result<Self> {
        let histogram = || Histogram::new_with_bounds(1, LATENCY_MAX_NS, 3);
        Ok(Self {
            requests: 0,
            replies: 0,
            latency: histogram()?,
            send_lag: histogram()?,
            elapsed: Duration::ZERO,
        })
    }

    /// Requests per second.
    #[must_use]
    pub fn offered_pps(&self) -> f64 {
        self.requests as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// Share of requests without a reply.
    #[must_use]
    pub fn loss(&self) -> f64 {
        if self.requests == 0 { 0.0 } else { 1.0 - self.replies as f64 / self.requests as f64 }
    }
}

/// The generator's socket.
pub struct Generator {
    socket: UdpSocket,
    payload: Vec<u8>,
    buffer: Vec<u8>,
    /// The next request's number, unique over all series.
    next_seq: u64,
    /// Due time of each pending request, by its number.
    due: Vec<Duration>,
    /// The server is on the same CPU, so that polling yields to it.
    should_yield: bool,
    /// Timeout of a reply.
    reply_timeout: Duration,
    /// State of the random number generator.
    rng_state: u64,
}

impl Generator {
    /// A socket on the sending side of `setup`, for requests of `size` bytes to `to`.
    pub fn open(setup: &Setup, to: SocketAddr, size: usize) -> Result<Self> {
        ensure!(size >= SEQ_LEN, "invalid size {size} of a request: expected at least {SEQ_LEN} bytes");
        let any: SocketAddr = if to.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0_u16; 8], 0).into() };
        let open = || -> Result<UdpSocket> {
            let socket = UdpSocket::bind(any)?;
            socket.connect(to)?;
            socket.set_nonblocking(true)?;
            let _ = sock::set_buffer(socket.as_fd(), Buffer::Receive, RECV_BUFFER_BYTES);
            Ok(socket)
        };
        let socket = match setup.hosts() {
            Some((sender, _)) => sender.run(open),
            None => open(),
        };
        let socket = socket.with_context(|| format!("cannot reach {to}"))?;
        let due = vec![Duration::ZERO; IN_FLIGHT_MAX];
        let buffer = vec![0; size + 1];
        Ok(Self {
            socket,
            payload: vec![0; size],
            buffer,
            next_seq: 1,
            due,
            should_yield: false,
            reply_timeout: REPLY_TIMEOUT,
            rng_state: 0x9e37_79b9_7f4a_7c15,
        })
    }

    /// Runs `work` on a thread that is pinned to the generator's CPU.
    pub fn run_pinned<T: Send>(
        &mut self,
        cpus: Cpus,
        work: impl FnOnce(&mut Self) -> Result<T> + Send,
    ) -> Result<T> {
        self.should_yield = cpus.generator.is_none() || cpus.generator == cpus.server;
        run_pinned(cpus.generator, || work(self))
    }

    /// Sends `rate` requests per second for `duration`.
    pub fn open_loop(
        &mut self,
        rate: f64,
        arrivals: Arrivals,
        duration: Duration,
        stop: &AtomicBool,
    ) -> Result<RequestStats> {
        let mut asked = RequestStats::new()?;
        let (base, start) = (self.next_seq, Instant::now());
        let mut due = Duration::ZERO;
        while due < duration && !stop.load(Ordering::Relaxed) {
            for _ in 0..BURST_MAX {
                let now = start.elapsed();
                if due > now || due >= duration {
                    break;
                }
                asked.send_lag.saturating_record(nanos(now - due));
                self.send_request(due, &mut asked)?;
                due += self.interarrival(rate, arrivals, due, asked.requests);
            }
            if !self.recv_replies(base, start, &mut asked)? {
                self.spin_or_yield();
            }
        }
        asked.elapsed = start.elapsed();
        while asked.replies < asked.requests && start.elapsed() < asked.elapsed + self.reply_timeout {
            if !self.recv_replies(base, start, &mut asked)? {
                self.spin_or_yield();
            }
        }
        Ok(asked)
    }

    /// Sends each request when the last reply has arrived, or has timed out.
    pub fn ping_pong(&mut self, duration: Duration, stop: &AtomicBool) -> Result<RequestStats> {
        let mut asked = RequestStats::new()?;
        let start = Instant::now();
        loop {
            let now = start.elapsed();
            if now >= duration || stop.load(Ordering::Relaxed) {
                asked.elapsed = now;
                return Ok(asked);
            }
            let base = self.next_seq;
            self.send_request(now, &mut asked)?;
            let mut polls = 0_u32;
            while !self.recv_replies(base, start, &mut asked)? {
                polls += 1;
                if polls.is_multiple_of(POLLS_PER_CLOCK_READ) && start.elapsed() > now + self.reply_timeout {
                    break;
                }
                self.spin_or_yield();
            }
        }
    }

    fn spin_or_yield(&self) {
        if self.should_yield { thread::yield_now() } else { std::hint::spin_loop() }
    }

    /// Interval between the request due at `due`, with this number, and the next one.
    fn interarrival(&mut self, rate: f64, arrivals: Arrivals, due: Duration, number: u64) -> Duration {
        match arrivals {
            // Computed from the start, so that rounding errors do not add up.
            Arrivals::Even => Duration::from_secs_f64(number as f64 / rate).saturating_sub(due),
            Arrivals::Poisson => {
                self.rng_state ^= self.rng_state << 13;
                self.rng_state ^= self.rng_state >> 7;
                self.rng_state ^= self.rng_state << 17;
                let share = ((self.rng_state >> 11) as f64 + 1.0) / (1_u64 << 53) as f64;
                Duration::from_secs_f64(-share.ln() / rate)
            }
        }
    }

    /// Sends the next request. One that the kernel does not accept counts as sent and not
    /// answered.
    fn send_request(&mut self, due: Duration, asked: &mut RequestStats) -> Result<()> {
        let number = self.next_seq;
        self.next_seq += 1;
        asked.requests += 1;
        self.due[number as usize % IN_FLIGHT_MAX] = due;
        self.payload[..SEQ_LEN].copy_from_slice(&number.to_le_bytes());
        match self.socket.send(&self.payload) {
            Ok(_) => Ok(()),
            Err(err) if is_transient(&err) => Ok(()),
            Err(err) => Err(err).context("cannot send a request"),
        }
    }

    /// Receives the replies that have arrived, to requests from `base` on. Returns true if there
    /// were any.
    fn recv_replies(&mut self, base: u64, start: Instant, asked: &mut RequestStats) -> Result<bool> {
        let mut some = false;
        for _ in 0..BURST_MAX {
            let len = match self.socket.recv(&mut self.buffer) {
                Ok(len) => len,
                Err(err) if is_transient(&err) => break,
                Err(err) => return Err(err).context("cannot receive a reply"),
            };
            let now = start.elapsed();
            let Some(number) = self.buffer[..len].first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
            else {
                continue;
            };
            if len != self.payload.len()
                || number < base
                || number >= self.next_seq
                || self.next_seq - number > IN_FLIGHT_MAX as u64
            {
                continue;
            }
            let due = &mut self.due[number as usize % IN_FLIGHT_MAX];
            // A duplicate reply.
            if *due == Duration::MAX {
                continue;
            }
            asked.latency.saturating_record(nanos(now.saturating_sub(*due)).max(1));
            *due = Duration::MAX;
            asked.replies += 1;
            some = true;
        }
        Ok(some)
    }
}

/// Errors that say nothing about the socket.
fn is_transient(err: &std::io::Error) -> bool {
    matches!(err.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionRefused)
        || err.raw_os_error() == Some(ENOBUFS)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use manylane_test_support::wait_for;

    use super::*;

    static NOT_STOPPED: AtomicBool = AtomicBool::new(false);
    /// Longer than any reply takes.
    const TEST_TIMEOUT: Duration = Duration::from_secs(60);

    /// A server that sends what `answer` returns for each request: the number of replies, and to
    /// which request.
    fn server(mut answer: impl FnMut(u64) -> (usize, u64) + Send + 'static) -> SocketAddr {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let addr = socket.local_addr().unwrap();
        // Room for all requests that are due while it does not run.
        let _ = sock::set_buffer(socket.as_fd(), Buffer::Receive, RECV_BUFFER_BYTES);
        thread::spawn(move || {
            let (mut buffer, mut requests) = ([0; 64], Vec::new());
            while let Ok((len, peer)) = socket.recv_from(&mut buffer) {
                requests.push(buffer[..len].to_vec());
                let (replies, to) = answer(requests.len() as u64 - 1);
                for _ in 0..replies {
                    socket.send_to(&requests[to as usize], peer).unwrap();
                }
            }
        });
        addr
    }

    fn generator(to: SocketAddr) -> Generator {
        let mut generator = Generator::open(&Setup::loopback(None), to, 20).unwrap();
        (generator.should_yield, generator.reply_timeout) = (true, TEST_TIMEOUT);
        generator
    }

    #[test]
    fn every_request_is_sent_in_order_and_counted_once() {
        let mut generator = generator(server(|number| (1 + (number % 2) as usize, number)));
        for arrivals in [Arrivals::Even, Arrivals::Poisson] {
            let got =
                generator.open_loop(5_000.0, arrivals, Duration::from_millis(200), &NOT_STOPPED).unwrap();
            assert_eq!(
                (got.replies, got.latency.len(), got.send_lag.len()),
                (got.requests, got.requests, got.requests)
            );
            if arrivals == Arrivals::Even {
                assert_eq!(got.requests, 1000);
            } else {
                // Six times the square root of the expected number.
                assert!((800..1200).contains(&got.requests), "{}", got.requests);
            }
        }
    }

    #[test]
    fn a_stall_delays_every_request_due_during_it() {
        const STALL: Duration = Duration::from_millis(50);
        let mut generator = generator(server(|number| {
            if number == 100 {
                thread::sleep(STALL);
            }
            (1, number)
        }));
        let got =
            generator.open_loop(4_000.0, Arrivals::Even, Duration::from_millis(100), &NOT_STOPPED).unwrap();
        assert_eq!((got.requests, got.replies), (400, 400));
        // Requests of its first half waited for half of it or more.
        let slow = got.latency.count_between(nanos(STALL / 2), LATENCY_MAX_NS);
        assert!(slow >= 100, "{slow}");
    }

    #[test]
    fn ping_pong_has_one_request_in_flight() {
        // The server ends it with request 49, so that no timeout is needed.
        let stop = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&stop);
        let mut generator = generator(server(move |number| {
            ends.store(number == 49, Ordering::Relaxed);
            (1, number)
        }));
        let got = generator.ping_pong(TEST_TIMEOUT, &stop).unwrap();
        assert_eq!((got.requests, got.replies, got.latency.len()), (50, 50, 50));
    }

    #[test]
    fn a_late_reply_is_not_counted_for_the_next_request() {
        // Requests, and replies in time.
        let counts = || {
            let stop = Arc::new(AtomicBool::new(false));
            let ends = Arc::clone(&stop);
            // Request 3 is answered when 4 arrives, which gets no reply; 5 gets one.
            let mut generator = generator(server(move |number| {
                ends.fetch_or(number >= 5, Ordering::Relaxed);
                (usize::from(number != 3), if number == 4 { 3 } else { number })
            }));
            generator.reply_timeout = 10 * REPLY_TIMEOUT;
            let got = generator.ping_pong(TEST_TIMEOUT, &stop).unwrap();
            // The late reply can only add to the four, and only if nothing else was late.
            assert!(got.requests != 6 || got.replies <= 4, "{} replies", got.replies);
            (got.requests, got.replies)
        };
        // Again, as long as the server had no CPU for a timeout.
        wait_for("six requests and four replies", counts, |counts| *counts == (6, 4));
    }
}
