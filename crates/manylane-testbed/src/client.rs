//! A client that asks by schedule and measures answers: an open loop.
//!
//! Request n is due at n divided by the rate, whatever became of those before it. Its latency
//! counts from then, so a server that stalls, or a client that falls behind, shows in the figures.

mod payload;
mod tracker;

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use manylane_sys::measure::{Epoll, reduce_timer_slack};
use manylane_sys::sock::{self, Buffer};

pub use payload::{Expect, MAX_PAYLOAD, Pattern, Payload, SEQ_HEADER_LEN, SeqPayload, fill_pattern};
pub use tracker::{FifoTracker, ReplyStatus, RequestCounts, SeqTracker};

/// What to ask, how often, and what to expect.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The server.
    pub to: SocketAddr,
    /// Requests per second, over all flows.
    pub rate: f64,
    /// Requests in all; `None` for as many as fit the duration.
    pub count: Option<u64>,
    /// How long to ask; `None` for until the count is reached.
    pub duration: Option<Duration>,
    /// Size of a request when no bytes are given.
    pub size: usize,
    /// Sources, each with a port of its own; requests go round them.
    pub flows: usize,
    /// Bytes of every request; `None` for bytes of our own.
    pub payload: Option<Payload>,
    /// What the server should answer.
    pub expect: Expect,
    /// How long to wait for an answer.
    pub timeout: Duration,
}

/// What came of it.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// What became of the requests.
    pub counts: RequestCounts,
    /// Nanoseconds from when a request was due to its answer; answers in time only.
    pub latency: Histogram<u64>,
    /// How far behind its schedule the client itself was, in nanoseconds: latencies include it.
    pub send_lag: Histogram<u64>,
    /// Requests that the kernel did not take.
    pub unsent: u64,
    /// Times the kernel said that nobody listens there.
    pub refused: u64,
    /// How long requests were sent.
    pub send_duration: Duration,
}

/// Requests that are sent before answers are looked at again, so that no answer waits long to be
/// seen.
const BURST: usize = 16;
/// Sockets that one look at the watch reports.
const EPOLL_EVENTS_MAX: usize = 64;
/// A pause is never longer than this, so that a request to stop is seen.
const POLL_TIMEOUT_MAX: Duration = Duration::from_millis(20);
/// Receive buffer of each flow.
const RECV_BUFFER: usize = 1 << 20;
/// Highest latency that the histogram tells apart.
const LATENCY_MAX_NS: u64 = 3_600_000_000_000;

/// Asks as planned until all is asked and answered, or timed out, or `stop` is set. `progress` is
/// told about ten times a second how it stands.
///
/// # Errors
/// When sockets cannot be made, or the kernel refuses what cannot be counted as a loss.
pub fn run(plan: &Plan, stop: &AtomicBool, mut progress: impl FnMut(&RequestCounts)) -> Result<Outcome> {
    reduce_timer_slack();
    let mut client = Client::open(plan)?;
    let start = Instant::now();
    let mut told = start;
    loop {
        let now = start.elapsed();
        let due = client.send_due(now, start)?;
        let next = if stop.load(Ordering::Relaxed) { None } else { due };
        let all_settled = client.tracker.expire(nanos(start.elapsed()));
        if next.is_none() && all_settled {
            break;
        }
        if next.is_none() && client.send_duration.is_none() {
            client.send_duration = Some(start.elapsed());
        }
        let wait =
            next.map_or(POLL_TIMEOUT_MAX, |next| next.saturating_sub(start.elapsed()).min(POLL_TIMEOUT_MAX));
        client.recv_replies(wait, start)?;
        if told.elapsed() >= Duration::from_millis(100) {
            told = Instant::now();
            progress(&client.tracker.counts());
        }
        if stop.load(Ordering::Relaxed) {
            client.finished = true;
        }
    }
    let asking = client.send_duration.unwrap_or_else(|| start.elapsed());
    // Answers beyond those expected may still be on their way: they are to be counted too.
    client.recv_replies(Duration::from_millis(1), start)?;
    Ok(Outcome {
        counts: client.tracker.counts(),
        latency: client.latency,
        send_lag: client.send_lag,
        unsent: client.unsent,
        refused: client.refused,
        send_duration: asking,
    })
}

/// Requests that carry their number are told apart by it, all others by their order in the flow.
enum Tracker {
    Seq(SeqTracker, SeqPayload),
    Fifo(FifoTracker, Pattern),
}

impl Tracker {
    fn expire(&mut self, now_ns: u64) -> bool {
        match self {
            Self::Seq(ledger, _) => ledger.expire(now_ns),
            Self::Fifo(ledger, _) => ledger.expire(now_ns),
        }
    }

    fn counts(&self) -> RequestCounts {
        match self {
            Self::Seq(ledger, _) => ledger.counts(),
            Self::Fifo(ledger, _) => ledger.counts(),
        }
    }
}

struct Client<'a> {
    plan: &'a Plan,
    flows: Vec<UdpSocket>,
    epoll: Epoll,
    tracker: Tracker,
    request: Vec<u8>,
    buffer: Vec<u8>,
    latency: Histogram<u64>,
    send_lag: Histogram<u64>,
    /// Requests whose turn has come, sent or not.
    scheduled: u64,
    unsent: u64,
    refused: u64,
    finished: bool,
    send_duration: Option<Duration>,
}

impl<'a> Client<'a> {
    fn open(plan: &'a Plan) -> Result<Self> {
        ensure!(plan.rate > 0.0, "the rate must be above 0");
        ensure!(plan.flows > 0, "at least one flow is needed");
        ensure!(
            plan.count.is_some() || plan.duration.is_some(),
            "without a count or a duration this would never end"
        );
        let watch = Epoll::new(EPOLL_EVENTS_MAX).context("cannot watch sockets")?;
        let any: SocketAddr =
            if plan.to.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0_u16; 8], 0).into() };
        let mut flows = Vec::with_capacity(plan.flows);
        for flow in 0..plan.flows {
            let socket = UdpSocket::bind(any).with_context(|| {
                format!("cannot open flow {flow} of {}: see `ulimit -n` and --flows", plan.flows)
            })?;
            socket.connect(plan.to).with_context(|| format!("cannot reach {}", plan.to))?;
            socket.set_nonblocking(true)?;
            // Answers that we are too slow to take are no loss of the server's. The system's limit
            // may be less.
            let _ = sock::set_buffer(socket.as_fd(), Buffer::Receive, RECV_BUFFER);
            watch.add(&socket, flow as u64)?;
            flows.push(socket);
        }
        let request =
            plan.payload.as_ref().map_or_else(|| fill_pattern(plan.size), |given| given.bytes().to_vec());
        Ok(Self {
            plan,
            flows,
            epoll: watch,
            tracker: new_tracker(plan, &request),
            request,
            buffer: vec![0; MAX_PAYLOAD + 1],
            latency: Histogram::new_with_bounds(1, LATENCY_MAX_NS, 3)?,
            send_lag: Histogram::new_with_bounds(1, LATENCY_MAX_NS, 3)?,
            scheduled: 0,
            unsent: 0,
            refused: 0,
            finished: false,
            send_duration: None,
        })
    }

    /// Sends what is due, at most a burst, and says when the next request is; `None` after the
    /// last.
    fn send_due(&mut self, now: Duration, start: Instant) -> Result<Option<Duration>> {
        for _ in 0..BURST {
            let due = match self.next_due() {
                Some(due) if due <= now => due,
                other => return Ok(other),
            };
            self.send_request(due, start)?;
        }
        Ok(self.next_due())
    }

    fn next_due(&mut self) -> Option<Duration> {
        let due = Duration::from_secs_f64(self.scheduled as f64 / self.plan.rate);
        let over = self.plan.count.is_some_and(|count| self.scheduled >= count)
            || self.plan.duration.is_some_and(|duration| due >= duration);
        self.finished |= over;
        (!self.finished).then_some(due)
    }

    fn send_request(&mut self, due: Duration, start: Instant) -> Result<()> {
        let flow = (self.scheduled % self.flows.len() as u64) as usize;
        self.scheduled += 1;
        if let Tracker::Seq(ledger, form) = &self.tracker {
            // The number it will get if the kernel takes it.
            form.write(ledger.counts().asked, &mut self.request);
        }
        // A refusal that the kernel reports here is about an earlier request; it is reported once.
        let mut sent = self.flows[flow].send(&self.request);
        if matches!(&sent, Err(err) if err.kind() == io::ErrorKind::ConnectionRefused) {
            self.refused += 1;
            sent = self.flows[flow].send(&self.request);
        }
        match sent {
            Ok(_) => {
                self.send_lag.saturating_record(nanos(start.elapsed().saturating_sub(due)));
                match &mut self.tracker {
                    Tracker::Seq(ledger, _) => {
                        ledger.record_request(nanos(due));
                    }
                    Tracker::Fifo(ledger, _) => ledger.record_request(flow, nanos(due)),
                }
            }
            Err(err) => {
                self.unsent += 1;
                let passing = [io::ErrorKind::WouldBlock, io::ErrorKind::ConnectionRefused];
                let no_buffers = err.raw_os_error() == Some(ENOBUFS);
                if !passing.contains(&err.kind()) && !no_buffers && err.kind() != io::ErrorKind::Interrupted {
                    let size = self.request.len();
                    return Err(err).with_context(|| format!("cannot send {size} bytes to {}", self.plan.to));
                }
            }
        }
        Ok(())
    }

    /// Waits at most `wait` for answers and enters all that are there.
    fn recv_replies(&mut self, wait: Duration, start: Instant) -> Result<()> {
        let ready: Vec<u64> = self.epoll.wait(wait).context("cannot wait for answers")?.collect();
        for flow in ready {
            let flow = flow as usize;
            for _ in 0..BURST {
                match self.flows[flow].recv(&mut self.buffer) {
                    Ok(len) => self.handle_reply(flow, len, nanos(start.elapsed())),
                    Err(err) if err.kind() == io::ErrorKind::ConnectionRefused => self.refused += 1,
                    // Anything else is over by the next look, or it is "nothing there".
                    Err(_) => break,
                }
            }
        }
        Ok(())
    }

    fn handle_reply(&mut self, flow: usize, len: usize, now_ns: u64) {
        let answer = &self.buffer[..len];
        let verdict = match &mut self.tracker {
            Tracker::Seq(ledger, form) => match form.read(answer) {
                Some((number, right)) => ledger.record_reply(number, right, now_ns),
                None => {
                    ledger.record_unexpected();
                    return;
                }
            },
            Tracker::Fifo(ledger, expected) => ledger.record_reply(flow, expected.matches(answer), now_ns),
        };
        if let ReplyStatus::OnTime(latency) = verdict {
            self.latency.saturating_record(latency.max(1));
        }
    }
}

/// `ENOBUFS` on every architecture of Linux but Alpha, MIPS and SPARC, where it then ends the run.
const ENOBUFS: i32 = 105;

fn new_tracker(plan: &Plan, request: &[u8]) -> Tracker {
    let timeout_ns = nanos(plan.timeout);
    match &plan.expect {
        Expect::Echo if plan.payload.is_none() && plan.size >= SEQ_HEADER_LEN => {
            let clock = SystemTime::UNIX_EPOCH.elapsed().map_or(0, nanos);
            let mark = clock.rotate_left(20) ^ u64::from(std::process::id());
            Tracker::Seq(SeqTracker::new(timeout_ns), SeqPayload { run_id: mark, size: plan.size })
        }
        Expect::Bytes(expected) => Tracker::Fifo(FifoTracker::new(plan.flows, timeout_ns), expected.clone()),
        _ => Tracker::Fifo(FifoTracker::new(plan.flows, timeout_ns), Pattern::exact(request)),
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(to: SocketAddr) -> Plan {
        Plan {
            to,
            rate: 4000.0,
            count: Some(2000),
            duration: None,
            size: 32,
            flows: 3,
            payload: None,
            expect: Expect::Echo,
            timeout: Duration::from_secs(2),
        }
    }

    /// A server that answers with what `answer` makes of each request, until it is dropped.
    struct Server(SocketAddr);

    impl Server {
        fn start(mut answer: impl FnMut(u64, &[u8]) -> Vec<Vec<u8>> + Send + 'static) -> Self {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            sock::set_buffer(socket.as_fd(), Buffer::Receive, 4 << 20).unwrap();
            let addr = socket.local_addr().unwrap();
            std::thread::spawn(move || {
                let mut buffer = [0; 2048];
                let mut number = 0;
                while let Ok((len, peer)) = socket.recv_from(&mut buffer) {
                    if len == 0 {
                        return;
                    }
                    for reply in answer(number, &buffer[..len]) {
                        socket.send_to(&reply, peer).unwrap();
                    }
                    number += 1;
                }
            });
            Self(addr)
        }
    }

    impl Drop for Server {
        fn drop(&mut self) {
            let _ = UdpSocket::bind("127.0.0.1:0").unwrap().send_to(&[], self.0);
        }
    }

    fn run_plan(plan: &Plan) -> Outcome {
        run(plan, &AtomicBool::new(false), |_| ()).unwrap()
    }

    #[test]
    fn every_request_is_answered_and_timed() {
        let server = Server::start(|_, request| vec![request.to_vec()]);
        for size in [32, 8] {
            let outcome = run_plan(&Plan { size, ..plan(server.0) });
            assert_eq!(outcome.counts.asked, 2000);
            assert_eq!(outcome.counts.answered, 2000, "{:?}", outcome.counts);
            assert_eq!(outcome.latency.len(), 2000);
            assert!(outcome.send_duration >= Duration::from_millis(490), "{:?}", outcome.send_duration);
        }
    }

    #[test]
    fn losses_duplicates_and_wrong_answers_are_told_apart() {
        let server = Server::start(|number, request| match number % 10 {
            0 => vec![],
            1 => vec![request.to_vec(); 2],
            2 => vec![[request, b"x"].concat()],
            3 => vec![b"stray".to_vec(), request.to_vec()],
            _ => vec![request.to_vec()],
        });
        let tally = run_plan(&plan(server.0)).counts;
        assert_eq!((tally.asked, tally.answered), (2000, 1600), "{tally:?}");
        assert_eq!((tally.lost, tally.wrong), (200, 200), "{tally:?}");
        assert_eq!((tally.duplicates, tally.unexpected), (200, 200), "{tally:?}");
    }

    #[test]
    fn a_stall_of_the_server_shows_in_the_latency_of_those_behind_it() {
        let server = Server::start(|number, request| {
            if number == 500 {
                std::thread::sleep(Duration::from_millis(100));
            }
            vec![request.to_vec()]
        });
        // 100 ms at 2000 per second: 200 requests wait, which every receive buffer holds.
        let outcome = run_plan(&Plan { count: Some(1000), rate: 2000.0, ..plan(server.0) });
        assert_eq!(outcome.counts.answered, 1000);
        let slow = outcome.latency.count_between(40_000_000, LATENCY_MAX_NS);
        assert!(slow >= 80, "{slow} requests slower than 40 ms");
    }

    #[test]
    fn nobody_there_is_loss_and_not_an_error() {
        let gone = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let timeout = Duration::from_millis(50);
        let outcome = run_plan(&Plan { count: Some(100), timeout, ..plan(gone) });
        assert_eq!(outcome.counts.answered, 0);
        assert_eq!(outcome.counts.asked + outcome.unsent, 100);
        assert!(outcome.refused > 0);
    }

    #[test]
    fn a_plan_without_an_end_is_refused() {
        let endless = Plan { count: None, ..plan(([127, 0, 0, 1], 9).into()) };
        assert!(run(&endless, &AtomicBool::new(false), |_| ()).is_err());
    }
}
