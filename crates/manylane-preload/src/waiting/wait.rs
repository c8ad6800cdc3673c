//! Common parts of all waits: wait mode and deadline of a thread that waits for one socket.
//!
//! A thread that waits for a socket with lanes waits for its own lane, in slices. After each slice
//! it polls the lanes whose owners do not wait (`coverage.rs`). With one receiving thread the wait
//! is the program's own call.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use libc::{c_int, timespec};
use manylane_ipc::report::Reason;
use manylane_sys::tick;

use crate::base::real;
use crate::base::settings::WAIT_SLICE_MS;
use crate::fds::sock_fds::is_managed;
use crate::group::{coverage, sampling};
use crate::lanes::{fallback, members, single_receiver};
use crate::shared::sock::{BUSY, MULTI_LANE, Member, OBSERVING, POLLS, Shared, Sock, WAITS_ON};
use crate::shared::thread;
use crate::xdp::queues;

/// Heartbeats of which only the first two check the clock, to spare datagrams that cost.
const CLOCK_CHECK_INTERVAL: u32 = 16;

/// Wait of a thread for one socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitMode {
    /// The program's own wait.
    Native,
    /// In slices, on this lane. `is_due`: other lanes must be polled first.
    Sliced { lane: usize, is_due: bool },
}

/// The calling thread is about to wait for `sock`.
#[inline]
pub(crate) fn start_wait(sock: &'static Sock, shared: &Shared, fd: c_int) -> WaitMode {
    if !is_managed(shared) {
        return WaitMode::Native;
    }
    let Some(member) = members::member(sock, shared, fd) else { return WaitMode::Native };
    sampling::after_work(sock, shared, member);
    let kind = member.kind.load(Ordering::Relaxed);
    if kind & POLLS == 0 {
        member.kind.store(kind | POLLS, Ordering::Relaxed);
    }
    if !queues::is_open(shared) && single_receiver::start_wait_of(shared, member) {
        return WaitMode::Native;
    }
    let lane = match shared.mode() {
        MULTI_LANE => member.own_lane(),
        OBSERVING => Some(0),
        _ => None,
    };
    member.state.store(lane.map_or(BUSY, |lane| WAITS_ON + lane as u32), Ordering::Release);
    if lane.is_none() && !is_managed(shared) {
        return WaitMode::Native;
    }
    WaitMode::Sliced { lane: lane.unwrap_or(0), is_due: is_poll_due(sock, shared, Some(member)) }
}

/// The calling thread is about to wait for `sock` but for no lane: a socket with other receivers
/// becomes plain. True if its lanes still hold datagrams, which no wait would report.
pub(crate) fn start_unsliced(sock: &'static Sock, shared: &Shared, fd: c_int) -> bool {
    if start_wait(sock, shared, fd) == WaitMode::Native {
        return false;
    }
    fallback::fall_back(sock, fd, Reason::Events);
    coverage::poll_other_lanes(sock, shared, fd, 0)
}

/// The wait of the calling thread for `sock`, if it started one, does not take place.
pub(crate) fn cancel_wait(sock: &Sock, shared: &Shared) {
    if let Some(member) = thread::member(sock, shared) {
        member.finish_wait();
    }
}

/// The calling thread has waited for `sock`.
#[inline]
pub(crate) fn finish_wait(sock: &Sock, shared: &Shared) {
    if let Some(member) = thread::member(sock, shared) {
        member.finish_wait();
        member.beat();
    }
}

/// True if a wait that reports events, but no datagram of `sock`, must poll the other lanes before
/// it returns. Otherwise a descriptor that is always ready would hide them for ever. At most once
/// in a slice. If datagrams of another socket are reported, only some waits check the clock.
pub(crate) fn is_poll_overdue(shared: &Shared, member: Option<&Member>, datagrams: bool) -> bool {
    if shared.mode() != MULTI_LANE {
        return false;
    }
    let Some(member) = member else { return false };
    // A wait is one heartbeat, and may come with a receive, which is another one.
    let skips = datagrams && member.heartbeat.load(Ordering::Relaxed) % CLOCK_CHECK_INTERVAL >= 2;
    !skips
        && tick::coarse_ms().wrapping_sub(member.polled_at_ms.load(Ordering::Relaxed)) >= WAIT_SLICE_MS as u32
}

/// True if other lanes must be polled before a wait: they hold older datagrams, or had one at the
/// last poll.
pub(crate) fn is_poll_due(sock: &'static Sock, shared: &Shared, member: Option<&Member>) -> bool {
    shared.retired.load(Ordering::Acquire) | shared.drain_first.load(Ordering::Acquire) != 0
        || queues::has_leftovers(sock, shared)
        || member.is_some_and(|member| member.found_in_other_lanes.load(Ordering::Relaxed) != 0)
}

/// End of a wait, which may be unbounded.
#[derive(Clone, Copy)]
pub(crate) struct Deadline {
    instant: Option<Instant>,
    /// The program did not give it in milliseconds.
    is_exact: bool,
}

impl Deadline {
    /// From a timeout of poll(2).
    pub(crate) fn from_ms(ms: c_int) -> Self {
        let end = u64::try_from(ms).ok().map(|ms| Instant::now() + Duration::from_millis(ms));
        Self { instant: end, is_exact: false }
    }

    /// From a timeout of ppoll(2); none: no bound. None if the kernel refuses it.
    pub(crate) fn from_timespec(time: Option<&timespec>) -> Option<Self> {
        let end = match time {
            Some(time) => {
                let nanos = u32::try_from(time.tv_nsec).ok().filter(|nanos| *nanos < 1_000_000_000)?;
                let span = Duration::new(u64::try_from(time.tv_sec).ok()?, nanos);
                // A time beyond the range of the clock is no bound.
                Instant::now().checked_add(span)
            }
            None => None,
        };
        Some(Self { instant: end, is_exact: true })
    }

    /// True if milliseconds are too coarse for it.
    pub(crate) fn is_exact(&self) -> bool {
        self.is_exact
    }

    /// The remaining time, at most a slice; zero if it is over.
    pub(crate) fn slice(&self) -> Duration {
        let slice = Duration::from_millis(WAIT_SLICE_MS as u64);
        self.remaining().map_or(slice, |left| left.min(slice))
    }

    /// The remaining time for poll(2), rounded up: a wait must not end early.
    pub(crate) fn remaining_ms(&self) -> c_int {
        let ms = |left: Duration| c_int::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(c_int::MAX);
        self.remaining().map_or(-1, ms)
    }

    /// Calls `wait` with the remaining time for ppoll(2).
    pub(crate) fn with_timespec<T>(&self, wait: impl FnOnce(*const timespec) -> T) -> T {
        let left = self.remaining().map(timespec_of);
        wait(real::or_null(left.as_ref()))
    }

    /// The remaining time; none without a bound.
    pub(crate) fn remaining(&self) -> Option<Duration> {
        self.instant.map(|end| end.saturating_duration_since(Instant::now()))
    }
}

pub(crate) fn timespec_of(time: Duration) -> timespec {
    timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) }
}
