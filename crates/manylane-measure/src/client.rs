//! A client that sends requests by schedule and measures replies: an open loop.
//!
//! Request n is due at n divided by the rate, whatever happened to earlier requests. Its latency
//! counts from then, so that a stall of the server, or a client that falls behind, shows in the
//! figures.

mod payload;
mod plan;
mod sockets;
mod tracker;
mod transport;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Result, ensure};
use hdrhistogram::Histogram;
use manylane_sys::tick::reduce_timer_slack;
pub use payload::{Expect, PAYLOAD_LEN_MAX, Pattern, Payload, SEQ_HEADER_LEN, SeqPayload, fill_pattern};
pub use plan::Plan;
use sockets::Sockets;
pub use tracker::{FifoTracker, ReplyStatus, RequestCounts, SeqTracker};
pub use transport::{OnReply, Transport};

/// The result.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The outcomes of the requests.
    pub counts: RequestCounts,
    /// Nanoseconds from when a request was due to its reply; replies in time only.
    pub latency: Histogram<u64>,
    /// Delay of the client behind its own schedule, in nanoseconds, which is included in
    /// latencies.
    pub send_lag: Histogram<u64>,
    /// Requests that the kernel did not accept.
    pub unsent: u64,
    /// Number of ECONNREFUSED errors: no socket listens there.
    pub refused: u64,
    /// Duration of sending.
    pub send_duration: Duration,
}

/// Maximum number of requests that are sent before replies are polled again.
const BURST_REQUESTS: usize = 16;
/// Maximum length of a wait, so that a request to stop is noticed.
const POLL_TIMEOUT_MAX: Duration = Duration::from_millis(20);
/// Highest latency of the histogram.
const LATENCY_MAX_NS: u64 = 3_600_000_000_000;

/// Sends as planned until all requests are sent and answered or have timed out, or until `stop` is
/// set. Calls `progress` about ten times a second.
///
/// # Errors
/// Fails if sockets cannot be created, or on an error that cannot be counted as a loss.
pub fn run(plan: &Plan, stop: &AtomicBool, progress: impl FnMut(&RequestCounts)) -> Result<Outcome> {
    run_over(&mut Sockets::open(plan)?, plan, stop, progress)
}

/// As [`run`], with flows of the caller: `plan.flows` of them.
///
/// # Errors
/// Fails on an error that cannot be counted as a loss.
pub fn run_over(
    transport: &mut dyn Transport,
    plan: &Plan,
    stop: &AtomicBool,
    mut progress: impl FnMut(&RequestCounts),
) -> Result<Outcome> {
    reduce_timer_slack();
    let mut client = Client::new(plan, transport)?;
    let mut told = client.start;
    loop {
        let due = client.send_due()?;
        let next = if stop.load(Ordering::Relaxed) { None } else { due };
        let all_settled = client.replies.tracker.expire(nanos(client.start.elapsed()));
        if next.is_none() && all_settled {
            break;
        }
        if next.is_none() && client.send_duration.is_none() {
            client.send_duration = Some(client.start.elapsed());
        }
        let wait_max = if plan.busy_poll { Duration::ZERO } else { POLL_TIMEOUT_MAX };
        let wait = next.map_or(wait_max, |next| next.saturating_sub(client.start.elapsed()).min(wait_max));
        client.recv_replies(wait)?;
        if told.elapsed() >= Duration::from_millis(100) {
            told = Instant::now();
            progress(&client.replies.tracker.counts());
        }
        if stop.load(Ordering::Relaxed) {
            client.finished = true;
        }
    }
    let send_duration = client.send_duration.unwrap_or_else(|| client.start.elapsed());
    // Duplicate replies may still be on the way, and have to be counted, too.
    for _ in 0..BURST_REQUESTS {
        if client.recv_replies(Duration::from_millis(1))? == 0 {
            break;
        }
    }
    Ok(Outcome {
        counts: client.replies.tracker.counts(),
        latency: client.replies.latency,
        send_lag: client.send_lag,
        unsent: client.unsent,
        refused: client.transport.refused(),
        send_duration,
    })
}

/// Requests with a number are matched by it, all others by their order in the flow.
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

/// What became of the requests.
struct Replies {
    tracker: Tracker,
    latency: Histogram<u64>,
}

struct Client<'a> {
    plan: &'a Plan,
    transport: &'a mut dyn Transport,
    replies: Replies,
    start: Instant,
    request: Vec<u8>,
    send_lag: Histogram<u64>,
    /// Requests that were due, sent or not.
    scheduled: u64,
    unsent: u64,
    finished: bool,
    send_duration: Option<Duration>,
}

impl<'a> Client<'a> {
    fn new(plan: &'a Plan, transport: &'a mut dyn Transport) -> Result<Self> {
        ensure!(plan.rate > 0.0, "the rate must be above 0");
        ensure!(plan.flows > 0, "expected at least one flow");
        ensure!(plan.count.is_some() || plan.duration.is_some(), "expected a count or a duration");
        let request =
            plan.payload.as_ref().map_or_else(|| fill_pattern(plan.size), |given| given.bytes().to_vec());
        let latency = Histogram::new_with_bounds(1, LATENCY_MAX_NS, 3)?;
        Ok(Self {
            plan,
            transport,
            replies: Replies { tracker: new_tracker(plan, &request), latency },
            request,
            send_lag: Histogram::new_with_bounds(1, LATENCY_MAX_NS, 3)?,
            scheduled: 0,
            unsent: 0,
            finished: false,
            send_duration: None,
            start: Instant::now(),
        })
    }

    /// Sends the requests that are due, at most a burst, and returns when the next one is; `None`
    /// after the last.
    fn send_due(&mut self) -> Result<Option<Duration>> {
        let now = self.start.elapsed();
        let mut next = self.next_due();
        for _ in 0..BURST_REQUESTS {
            let Some(due) = next.filter(|due| *due <= now) else { break };
            self.send_request(due)?;
            next = self.next_due();
        }
        Ok(next)
    }

    fn next_due(&mut self) -> Option<Duration> {
        let due = Duration::from_secs_f64(self.scheduled as f64 / self.plan.rate);
        let over = self.plan.count.is_some_and(|count| self.scheduled >= count)
            || self.plan.duration.is_some_and(|duration| due >= duration);
        self.finished |= over;
        (!self.finished).then_some(due)
    }

    fn send_request(&mut self, due: Duration) -> Result<()> {
        let flow = (self.scheduled % self.plan.flows as u64) as usize;
        self.scheduled += 1;
        if let Tracker::Seq(tracker, form) = &self.replies.tracker {
            // The number that it gets if it is accepted.
            form.write(tracker.counts().asked, &mut self.request);
        }
        if !self.transport.send(flow, &self.request)? {
            self.unsent += 1;
            return Ok(());
        }
        self.send_lag.saturating_record(nanos(self.start.elapsed().saturating_sub(due)));
        match &mut self.replies.tracker {
            Tracker::Seq(tracker, _) => {
                tracker.record_request(nanos(due));
            }
            Tracker::Fifo(tracker, _) => tracker.record_request(flow, nanos(due)),
        }
        Ok(())
    }

    /// Waits at most `wait` for replies, and records them. Returns 0 only if there was none.
    fn recv_replies(&mut self, wait: Duration) -> Result<usize> {
        let Self { transport, replies, start, .. } = self;
        transport.recv(wait, &mut |flow, reply| replies.record(flow, reply, nanos(start.elapsed())))
    }
}

impl Replies {
    fn record(&mut self, flow: usize, reply: &[u8], now_ns: u64) {
        let status = match &mut self.tracker {
            Tracker::Seq(tracker, form) => match form.read(reply) {
                Some((number, right)) => tracker.record_reply(number, right, now_ns),
                None => {
                    tracker.record_unexpected();
                    return;
                }
            },
            Tracker::Fifo(tracker, expected) => tracker.record_reply(flow, expected.matches(reply), now_ns),
        };
        if let ReplyStatus::OnTime(latency) = status {
            self.latency.saturating_record(latency.max(1));
        }
    }
}

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
    use std::net::{SocketAddr, UdpSocket};
    use std::os::fd::AsFd;

    use manylane_sys::busy_poll;
    use manylane_sys::sock::{self, Buffer};

    use super::*;

    fn plan(to: SocketAddr) -> Plan {
        Plan {
            to,
            from: None,
            rate: 4000.0,
            count: Some(2000),
            duration: None,
            size: 32,
            flows: 3,
            payload: None,
            expect: Expect::Echo,
            // It ends earlier when all are answered, as long as the server may have no CPU.
            timeout: Duration::from_secs(120),
            busy_poll: false,
        }
    }

    /// A server that replies with the result of `answer` for each request, until it is dropped.
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
    fn every_request_is_answered_with_busy_polling() {
        let server = Server::start(|_, request| vec![request.to_vec()]);
        let plan = Plan { busy_poll: true, ..plan(server.0) };
        match run(&plan, &AtomicBool::new(false), |_| ()) {
            Ok(Outcome { counts, .. }) => {
                assert_eq!((counts.asked, counts.answered), (2000, 2000), "{counts:?}");
            }
            Err(err) => {
                assert_eq!(err.to_string(), "cannot poll devices: it needs CAP_NET_ADMIN");
                busy_poll::probe().unwrap_err();
            }
        }
    }

    #[test]
    fn losses_duplicates_and_wrong_replies_are_distinguished() {
        let server = Server::start(|number, request| match number % 10 {
            0 => vec![],
            1 => vec![request.to_vec(); 2],
            2 => vec![[request, b"x"].concat()],
            3 => vec![b"stray".to_vec(), request.to_vec()],
            _ => vec![request.to_vec()],
        });
        let plan = Plan { timeout: Duration::from_secs(2), ..plan(server.0) };
        // Again, up to ten times, as long as replies were late because the server had no CPU.
        let mut tallies = (0..10).map(|_| run_plan(&plan).counts);
        let tally = tallies.find(|tally| tally.lost == 200).expect("200 lost in one of ten runs");
        assert_eq!((tally.asked, tally.answered), (2000, 1600), "{tally:?}");
        assert_eq!((tally.lost, tally.wrong), (200, 200), "{tally:?}");
        assert_eq!((tally.duplicates, tally.unexpected), (200, 200), "{tally:?}");
    }

    #[test]
    fn a_server_stall_shows_in_the_latency_of_queued_requests() {
        let server = Server::start(|number, request| {
            if number == 500 {
                std::thread::sleep(Duration::from_millis(100));
            }
            vec![request.to_vec()]
        });
        // 100 ms at 2000 per second: 200 requests are queued, which every receive buffer can hold.
        let outcome = run_plan(&Plan { count: Some(1000), rate: 2000.0, ..plan(server.0) });
        assert_eq!(outcome.counts.answered, 1000);
        let slow = outcome.latency.count_between(40_000_000, LATENCY_MAX_NS);
        assert!(slow >= 80, "{slow} requests slower than 40 ms");
    }

    #[test]
    fn an_absent_server_is_loss_and_not_an_error() {
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
