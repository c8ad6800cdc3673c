//! The delay before a sleep: a thread with a lane that finds no datagram delays for a moment, so
//! that more than one datagram arrives.
//!
//! A sleep with its wake-up costs many times what a datagram costs, and lanes multiply sleeps:
//! each lane wakes a thread of its own. So a thread that has emptied its lane may first sleep for
//! a fraction of a millisecond in which no datagram wakes it, and then wait as the program asked.
//! The rule is that of the library's own lanes ([`manylane_policy::rx_coalesce`]), with the
//! datagrams between one sleep and the next as the size of a batch. In addition, the delay has to
//! pay on this machine: the first delays and sleeps of a process are measured, and what each brings
//! is counted. A delay that costs more per datagram than a sleep is given up, and tried now and
//! then.
//!
//! [`before_sleep`] does all of it, for poll, select, epoll and blocking receives alike:
//! 1. Only while a socket has lanes and more than one owner, or has queues ([`can_coalesce`]).
//!    Only in a wait that may last longer than the delay.
//! 2. Only if there is nothing to return at once: the caller polls first.
//! 3. The delay ends at a common beat, so that lanes that share a CPU wake it once. A signal ends
//!    it as it would have ended the wait. Then the caller waits as before, for the rest of its
//!    time.
//!
//! During the delay, the thread counts as waiting on its lane: the lane is covered. The length of
//! a delay follows from its measured cost, unless `--rx-usecs` sets it.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use libc::{c_int, timespec};
use manylane_policy::rx_coalesce::RxCoalesce;
use manylane_sys::{cpu, tick};

use crate::base::state;
use crate::shared::sock::{MULTI_LANE, Shared};
use crate::xdp::queues;

/// Length of a delay as a multiple of what it costs its thread: delays use at most half a percent
/// of a CPU. The interrupt and the scheduler are not counted, and cost several times as much. So
/// do the system calls of a program that receives one datagram at a time: a delay that brings it
/// two or three datagrams saves nothing.
const DELAY_COST_FACTOR: u32 = 200;
const DELAY_MIN: Duration = Duration::from_micros(50);
const DELAY_MAX: Duration = Duration::from_micros(500);

/// Delays that are measured, and their length until then.
const COST_SAMPLES: u32 = 16;
const DELAY_INITIAL: Duration = Duration::from_micros(200);

/// One in n of the delays that would not pay is tried, to measure again what it brings.
const PROBE_INTERVAL: u32 = 64;
/// Units per datagram in averages.
const AVERAGE_SCALE: u64 = 8;

/// CPU nanoseconds of the first delays, or of the first sleeps, of this process, and their number.
struct Cost {
    nanos: AtomicU64,
    samples: AtomicU32,
}

static DELAY_COST: Cost = Cost { nanos: AtomicU64::new(0), samples: AtomicU32::new(0) };
static SLEEP_COST: Cost = Cost { nanos: AtomicU64::new(0), samples: AtomicU32::new(0) };

impl Cost {
    /// The average, once it is known.
    fn average(&self) -> Option<u64> {
        let samples = self.samples.load(Ordering::Relaxed);
        (samples >= COST_SAMPLES).then(|| self.nanos.load(Ordering::Relaxed) / u64::from(samples))
    }

    fn add(&self, cost: Duration) {
        self.nanos.fetch_add(cost.as_nanos() as u64, Ordering::Relaxed);
        self.samples.fetch_add(1, Ordering::Relaxed);
    }
}

struct ThreadCoalesce {
    coalesce: Cell<Option<RxCoalesce>>,
    /// Datagrams since the last sleep or delay.
    received: Cell<usize>,
    /// The last one was a delay.
    was_delayed: Cell<bool>,
    /// Average datagrams per sleep and per delay, in units of 1/[`AVERAGE_SCALE`].
    per_sleep: Cell<u64>,
    per_delay: Cell<u64>,
    /// Delays skipped as not worthwhile since the last one was tried.
    skipped: Cell<u32>,
    /// CPU time at the start of a measured sleep.
    sleep_start: Cell<Option<Duration>>,
}

thread_local! {
    // Constant and without a destructor: needs neither the heap nor a registration.
    static THREAD_COALESCE: ThreadCoalesce = const {
        ThreadCoalesce {
            coalesce: Cell::new(None),
            received: Cell::new(0),
            was_delayed: Cell::new(false),
            per_sleep: Cell::new(0),
            per_delay: Cell::new(0),
            skipped: Cell::new(0),
            sleep_start: Cell::new(None),
        }
    };
}

/// True if a delay may pay for this socket: at least two lanes have owners, or queues are open.
#[inline]
pub(crate) fn can_coalesce(shared: &Shared) -> bool {
    let owned = |owner: &&AtomicU32| owner.load(Ordering::Relaxed) != 0;
    (shared.mode() == MULTI_LANE && shared.owner.iter().filter(owned).nth(1).is_some())
        || queues::is_open(shared)
}

/// Counts datagrams that the calling thread received from lanes.
#[inline]
pub(crate) fn add_received(datagrams: u64) {
    THREAD_COALESCE.with(|thread| {
        thread.received.set(thread.received.get().saturating_add(datagrams as usize));
        if let Some(since) = thread.sleep_start.take() {
            SLEEP_COST.add(cpu::thread_cpu_time().saturating_sub(since));
        }
    });
}

impl ThreadCoalesce {
    /// A sleep or a delay is over, and has brought `datagrams`.
    fn add_sample(&self, datagrams: usize) {
        let average = if self.was_delayed.get() { &self.per_delay } else { &self.per_sleep };
        let some = (datagrams as u64).min(1 << 20) * AVERAGE_SCALE;
        average.set(match average.get() {
            0 => some,
            before => before - before / AVERAGE_SCALE + some / AVERAGE_SCALE,
        });
    }

    /// True if a delay pays. Also true while that is not known, and now and then to probe.
    fn is_worthwhile(&self) -> bool {
        let (Some(delay), Some(sleep)) = (DELAY_COST.average(), SLEEP_COST.average()) else { return true };
        if is_cheaper((delay, self.per_delay.get()), (sleep, self.per_sleep.get())) {
            return true;
        }
        self.skipped.set((self.skipped.get() + 1) % PROBE_INTERVAL);
        self.skipped.get() == 0
    }
}

/// True if `one` way of waiting costs less per datagram than the `other`. Each is the cost of a
/// wait, and what it brings on average. Also true if that is not known for one of them.
fn is_cheaper(one: (u64, u64), other: (u64, u64)) -> bool {
    one.1 == 0 || other.1 == 0 || one.0.saturating_mul(other.1) < other.0.saturating_mul(one.1)
}

/// The current length of a delay; zero if delays are off.
fn max_delay() -> Duration {
    if let Some(coalesce) = state::settings().and_then(|settings| settings.rx_coalesce) {
        return coalesce;
    }
    DELAY_COST.average().map_or(DELAY_INITIAL, |cost| {
        (Duration::from_nanos(cost) * DELAY_COST_FACTOR).clamp(DELAY_MIN, DELAY_MAX)
    })
}

/// The calling thread is about to sleep in a wait of at most `left`. Returns the result of the
/// wait if `poll` found one or something ended the delay. None: the wait goes on as if there had
/// been no delay.
///
/// `lane` is the descriptor whose receive buffer limits what may queue up during a delay. `sleep`
/// sleeps for the given time.
pub(crate) fn before_sleep<T>(
    lane: c_int,
    left: Option<Duration>,
    poll: impl FnOnce() -> Option<T>,
    sleep: impl FnOnce(timespec) -> Option<T>,
) -> Option<T> {
    THREAD_COALESCE.with(|thread| {
        let mut coalesce = thread.coalesce.get().unwrap_or_else(|| {
            RxCoalesce::new(max_delay(), usize::MAX, rcvbuf_messages(lane)).with_average()
        });
        // Do not poll if no delay can follow.
        let may = coalesce.can_delay() && left.is_none_or(|left| left > coalesce.max_delay());
        if may && let Some(found) = poll() {
            return Some(found);
        }
        let datagrams = thread.received.take();
        thread.add_sample(datagrams);
        let delay = coalesce.next_delay(datagrams);
        if delay.is_some() && coalesce.max_delay() != max_delay() {
            coalesce.set_max_delay(max_delay());
        }
        thread.coalesce.set(Some(coalesce));
        let is_asked_for = state::settings().is_some_and(|settings| settings.rx_coalesce.is_some());
        let delay = delay.filter(|_| may && (is_asked_for || thread.is_worthwhile()));
        thread.was_delayed.set(delay.is_some());
        let Some(delay) = delay else {
            let to_be_measured = SLEEP_COST.samples.load(Ordering::Relaxed) < COST_SAMPLES;
            thread.sleep_start.set(to_be_measured.then(cpu::thread_cpu_time));
            return None;
        };
        let delay = delay.min(coalesce.max_delay());
        measure_cost(|| {
            let left = tick::remaining(delay);
            sleep(timespec { tv_sec: 0, tv_nsec: i64::from(left.subsec_nanos()) })
        })
    })
}

/// Messages that fit into a lane's receive buffer, counted as a page each.
fn rcvbuf_messages(lane: c_int) -> usize {
    const PAGE_BYTES: usize = 4096;
    crate::base::sockopt::int_option(lane, libc::SOL_SOCKET, libc::SO_RCVBUF)
        .map_or(usize::MAX, |room| room as usize / PAGE_BYTES)
}

/// Runs a delay, and measures its cost if it is one of the first.
fn measure_cost<T>(delay: impl FnOnce() -> T) -> T {
    if DELAY_COST.samples.load(Ordering::Relaxed) >= COST_SAMPLES {
        return delay();
    }
    let before = cpu::thread_cpu_time();
    let answer = delay();
    DELAY_COST.add(cpu::thread_cpu_time().saturating_sub(before));
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lower_cost_per_datagram_is_cheaper() {
        // 30 µs for eight against 10 µs for five, and the other way round.
        assert!(!is_cheaper((30_000, 8 * AVERAGE_SCALE), (10_000, 5 * AVERAGE_SCALE)));
        assert!(is_cheaper((3_000, 4 * AVERAGE_SCALE), (4_000, AVERAGE_SCALE)));
        // Without an average, it is tried.
        assert!(
            is_cheaper((30_000, 0), (10_000, AVERAGE_SCALE))
                && is_cheaper((30_000, AVERAGE_SCALE), (10_000, 0))
        );
    }
}
