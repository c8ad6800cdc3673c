//! The loop of one thread: waits, forwards what lanes receive, sends back what servers answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use manylane::tcp::Time;
use manylane::{Lane, Received};
use manylane_sys::epoll::Epoll;

use super::counters::UdpLaneCounters;
use super::key::{PayloadKey, Route, SessionKey};
use super::sessions::Sessions;
use crate::counters::add;
use crate::lane::Result;
use crate::settings::Shared;

/// Sockets that a wait reports.
const EVENTS_MAX: usize = 256;
/// Batches of a lane before answers have their turn.
const BATCHES_MAX: usize = 4;
/// Longest wait: the time within which a thread notices that it has to stop.
const TICK: Duration = Duration::from_millis(100);
/// Time without datagrams after which a proxy that is stopped ends.
const DRAIN_QUIET: Duration = Duration::from_secs(1);
/// Failed receives in a row after which the thread ends.
const ERRORS_MAX: u32 = 1000;
/// Tokens of lanes begin here, above those of sessions.
const LANES: u64 = 1 << 32;

/// A thread's share of the sessions: a lane of each address that the proxy listens at.
pub struct UdpProxy {
    /// Closed before the lanes, whose descriptors it has.
    epoll: Epoll,
    sessions: Sessions,
    lanes: Vec<Lane>,
    shared: Arc<Shared>,
    counters: Arc<UdpLaneCounters>,
    key: Option<PayloadKey>,
    /// What the last wait has reported: lanes and sessions.
    ready_lanes: Vec<usize>,
    ready_sessions: Vec<u32>,
    errors: u32,
    start: Instant,
    now: Time,
    /// When sessions that are still open are cut off, and when the proxy was stopped.
    ends: Option<(Time, Time)>,
}

impl UdpProxy {
    /// The proxy of these lanes. With a `key`, all datagrams with the same bytes there are one
    /// session, and have to come to the lanes of one thread: see [`PayloadKey::steering`].
    ///
    /// # Errors
    /// If the process has no descriptor left.
    pub fn new(
        lanes: Vec<Lane>,
        shared: Arc<Shared>,
        counters: Arc<UdpLaneCounters>,
        key: Option<PayloadKey>,
    ) -> Result<Self> {
        let epoll = Epoll::new(EVENTS_MAX)?;
        for (at, lane) in lanes.iter().enumerate() {
            epoll.add(lane, LANES + at as u64)?;
        }
        Ok(Self {
            epoll,
            sessions: Sessions::new(Arc::clone(&shared), Arc::clone(&counters)),
            ready_lanes: Vec::with_capacity(lanes.len()),
            ready_sessions: Vec::with_capacity(EVENTS_MAX),
            lanes,
            shared,
            counters,
            key,
            errors: 0,
            start: Instant::now(),
            now: Time(0),
            ends: None,
        })
    }

    /// Serves until the proxy is stopped, and sessions are quiet or the drain timeout is over.
    ///
    /// # Errors
    /// If the system refuses to wait, or a lane keeps failing.
    pub fn run(&mut self) -> Result<()> {
        while self.step()? {}
        Ok(())
    }

    /// Waits once, and does what is to be done. False when it has ended.
    fn step(&mut self) -> Result<bool> {
        self.wait()?;
        let drain_timeout = self.sessions.refresh().options.drain_timeout;
        for at in 0..self.ready_lanes.len() {
            self.receive(self.ready_lanes[at])?;
        }
        if !self.ready_sessions.is_empty() {
            self.answer();
        }
        self.sessions.expire(self.now);
        if self.ends.is_none() && self.shared.is_stopping() {
            self.sessions.stop();
            self.ends = Some((self.now + drain_timeout, self.now));
        }
        let Some((ends, stopped)) = self.ends else { return Ok(true) };
        let is_quiet = self.now >= self.sessions.active().max(stopped) + DRAIN_QUIET;
        if !self.sessions.is_empty() && !is_quiet && self.now < ends {
            return Ok(true);
        }
        let quiet = u64::try_from(DRAIN_QUIET.as_micros()).unwrap_or(u64::MAX);
        self.sessions.end_all(Time(self.now.0.saturating_sub(quiet)));
        Ok(false)
    }

    /// Sleeps until a lane or a session is ready, or the next deadline.
    fn wait(&mut self) -> Result<()> {
        let next = self.sessions.next_deadline();
        let timeout = next.map_or(TICK, |next| next.since(self.now).min(TICK));
        self.ready_lanes.clear();
        self.ready_sessions.clear();
        for token in self.epoll.wait(timeout)? {
            match token.checked_sub(LANES) {
                Some(lane) => self.ready_lanes.push(lane as usize),
                None => self.ready_sessions.push(token as u32),
            }
        }
        self.now = Time(u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX));
        Ok(())
    }

    /// Forwards the datagrams in the queue of a lane, a few batches at most.
    fn receive(&mut self, at: usize) -> Result<()> {
        let Self { lanes, sessions, epoll, counters, key, now, .. } = self;
        let Some(lane) = lanes.get_mut(at) else { return Ok(()) };
        let is_wildcard = lane.local_addr().ip().is_unspecified();
        for _ in 0..BATCHES_MAX {
            let batch = match lane.recv() {
                Ok(Received { batch, .. }) => batch,
                Err(err) if self.errors == ERRORS_MAX => return Err(err.into()),
                Err(_) => {
                    self.errors += 1;
                    return Ok(());
                }
            };
            self.errors = 0;
            if batch.is_empty() {
                break;
            }
            add(&counters.datagrams, batch.len() as u64);
            for datagram in batch {
                if datagram.is_truncated() {
                    add(&counters.truncated, 1);
                    continue;
                }
                let local = is_wildcard.then(|| datagram.local());
                let route = Route { lane: at, client: datagram.peer(), local };
                match SessionKey::new(*key, route, datagram.payload()) {
                    Some(session) => sessions.forward(epoll, session, route, datagram.payload(), *now),
                    None => add(&counters.too_short, 1),
                }
            }
        }
        Ok(())
    }

    /// Sends what servers have answered, in one batch for each lane.
    fn answer(&mut self) {
        let Self { lanes, sessions, ready_sessions, counters, now, .. } = self;
        for (at, lane) in lanes.iter_mut().enumerate() {
            let mut out = lane.sender();
            let mut answers = 0;
            for session in ready_sessions.iter() {
                answers += sessions.read_answers(*session, at, &mut out, *now);
            }
            let sent = out.flush().sent;
            add(&counters.answers_sent, sent);
            add(&counters.answers_lost, answers.saturating_sub(sent));
        }
    }
}
