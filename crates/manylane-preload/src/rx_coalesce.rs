//! The delay before a sleep: a thread with a lane that finds no datagram delays for a moment, so
//! that more than one datagram arrives.
//!
//! A sleep with its wake-up costs many times what a datagram costs, and lanes multiply sleeps:
//! each lane wakes a thread of its own. So a thread that has emptied its lane may first sleep for
//! a fraction of a millisecond in which no datagram wakes it, and then wait as the program asked.
//! The rule is that of the library's own lanes ([`manylane_sys::rx_coalesce`]), with the datagrams
//! between one sleep and the next as the size of a batch. In addition, the delay has to pay on
//! this machine: the first delays and sleeps of a process are measured, and what each brings is
//! counted. A delay that costs more per datagram than a sleep is given up, and tried now and then.
//!
//! [`before_sleep`] does all of it, for poll, select, epoll and blocking receives alike:
//! 1. Only while a socket has lanes and more than one owner, or has queues ([`can_coalesce`]).
//!    Only in a wait that may last longer than the delay.
//! 2. Only if there is nothing to return at once: the caller polls first.
//! 3. The delay ends at a common beat, so that lanes that share a core wake it once. A signal ends
//!    it as it would have ended the wait. Then the caller waits as before, for the rest of its
//!    time.
//!
//! During the delay, the thread counts as waiting on its lane: the lane is covered. The length of
//! a delay follows from its measured cost, unless `--rx-usecs` sets it.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use libc::{c_int, timespec};
use manylane_sys::rx_coalesce::RxCoalesce;
use manylane_sys::{cpu, tick};

use crate::sock::{MULTI_LANE, Shared};
use crate::{queues, start};

/// A pause lasts for so many times what it costs the thread that pauses: at most half a percent of
/// a core goes into pauses. The interrupt and the scheduler, which nobody counts here, cost several
/// times as much, and so does the system call by system call of a program that takes one datagram
/// at a time: pauses that bring two or three datagrams save nothing.
const DELAY_COST_FACTOR: u32 = 200;
const DELAY_MIN: Duration = Duration::from_micros(50);
const DELAY_MAX: Duration = Duration::from_micros(500);

/// Pauses that are measured, and how long they are.
const COST_SAMPLES: u32 = 16;
const DELAY_INITIAL: Duration = Duration::from_micros(200);

/// A pause is tried in so many that would not pay, to learn anew what it brings.
const PROBE_INTERVAL: u32 = 64;
/// What averages are counted in.
const AVERAGE_SCALE: u64 = 8;

/// Nanoseconds that the first pauses and the first sleeps cost this process, and how many of them
/// were measured.
struct Cost {
    nanos: AtomicU64,
    samples: AtomicU32,
}

static DELAY_COST: Cost = Cost { nanos: AtomicU64::new(0), samples: AtomicU32::new(0) };
static SLEEP_COST: Cost = Cost { nanos: AtomicU64::new(0), samples: AtomicU32::new(0) };

impl Cost {
    /// On the average, once it is known.
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
    /// Datagrams since the last sleep or pause.
    received: Cell<usize>,
    /// That was a pause.
    was_delayed: Cell<bool>,
    /// What a sleep and what a pause brings on the average, in [`AVERAGE_SCALE`] of a datagram.
    per_sleep: Cell<u64>,
    per_delay: Cell<u64>,
    /// Pauses that did not pay since one was tried.
    skipped: Cell<u32>,
    /// CPU time when a sleep began that is measured.
    sleep_start: Cell<Option<Duration>>,
}

thread_local! {
    // Without a destructor and with a constant: neither the heap nor a registration is involved.
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

/// Whether a wait for this socket may be worth a pause: two lanes at least have owners.
#[inline]
pub(crate) fn can_coalesce(shared: &Shared) -> bool {
    let owned = |owner: &&AtomicU32| owner.load(Ordering::Relaxed) != 0;
    (shared.mode() == MULTI_LANE && shared.owner.iter().filter(owned).nth(1).is_some())
        || queues::is_open(shared)
}

/// The calling thread has received so many datagrams from lanes.
#[inline]
pub(crate) fn add_received(datagrams: u64) {
    THREAD_COALESCE.with(|pace| {
        pace.received.set(pace.received.get().saturating_add(datagrams as usize));
        if let Some(since) = pace.sleep_start.take() {
            SLEEP_COST.add(cpu::thread_cpu_time().saturating_sub(since));
        }
    });
}

impl ThreadCoalesce {
    /// A sleep or a pause is over, and has brought so many.
    fn add_sample(&self, datagrams: usize) {
        let average = if self.was_delayed.get() { &self.per_delay } else { &self.per_sleep };
        let some = (datagrams as u64).min(1 << 20) * AVERAGE_SCALE;
        average.set(match average.get() {
            0 => some,
            before => before - before / AVERAGE_SCALE + some / AVERAGE_SCALE,
        });
    }

    /// Whether a pause is worth what it costs here; not known yet, and tried now and then: yes.
    fn is_worthwhile(&self) -> bool {
        let (Some(pause), Some(sleep)) = (DELAY_COST.average(), SLEEP_COST.average()) else { return true };
        if is_cheaper((pause, self.per_delay.get()), (sleep, self.per_sleep.get())) {
            return true;
        }
        self.skipped.set((self.skipped.get() + 1) % PROBE_INTERVAL);
        self.skipped.get() == 0
    }
}

/// Whether `one` way of waiting costs less for a datagram than the `other`: what it costs each
/// time, and what it brings. One of which it is not known what it brings does.
fn is_cheaper(one: (u64, u64), other: (u64, u64)) -> bool {
    one.1 == 0 || other.1 == 0 || one.0.saturating_mul(other.1) < other.0.saturating_mul(one.1)
}

/// How long a pause is now; zero if there are none.
fn max_delay() -> Duration {
    if let Some(coalesce) = start::settings().and_then(|settings| settings.rx_coalesce) {
        return coalesce;
    }
    DELAY_COST.average().map_or(DELAY_INITIAL, |cost| {
        (Duration::from_nanos(cost) * DELAY_COST_FACTOR).clamp(DELAY_MIN, DELAY_MAX)
    })
}

/// The calling thread is about to sleep in a wait that lasts for `left` at most. The answer is what
/// `look` saw, which then is what the wait ends with, or what ended the pause; none: the wait goes
/// on as if nothing had been.
///
/// `lane` is the descriptor whose receive buffer bounds what may queue up in a pause; `rest` sleeps
/// for the time it is given.
pub(crate) fn before_sleep<T>(
    lane: c_int,
    left: Option<Duration>,
    look: impl FnOnce() -> Option<T>,
    rest: impl FnOnce(timespec) -> Option<T>,
) -> Option<T> {
    THREAD_COALESCE.with(|pace| {
        let mut coalesce = pace.coalesce.get().unwrap_or_else(|| {
            RxCoalesce::new(max_delay(), usize::MAX, rcvbuf_messages(lane)).with_average()
        });
        // What no pause could be made of costs no look.
        let may = coalesce.can_delay() && left.is_none_or(|left| left > coalesce.max_delay());
        if may && let Some(found) = look() {
            return Some(found);
        }
        let taken = pace.received.take();
        pace.add_sample(taken);
        let pause = coalesce.next_delay(taken);
        if pause.is_some() && coalesce.max_delay() != max_delay() {
            coalesce.set_max_delay(max_delay());
        }
        pace.coalesce.set(Some(coalesce));
        let is_asked_for = start::settings().is_some_and(|settings| settings.rx_coalesce.is_some());
        let pause = pause.filter(|_| may && (is_asked_for || pace.is_worthwhile()));
        pace.was_delayed.set(pause.is_some());
        let Some(pause) = pause else {
            let to_be_measured = SLEEP_COST.samples.load(Ordering::Relaxed) < COST_SAMPLES;
            pace.sleep_start.set(to_be_measured.then(cpu::thread_cpu_time));
            return None;
        };
        let pause = pause.min(coalesce.max_delay());
        measure_cost(|| {
            let left = tick::remaining(pause);
            rest(timespec { tv_sec: 0, tv_nsec: i64::from(left.subsec_nanos()) })
        })
    })
}

/// Messages that fit into a lane's receive buffer, counted with a page each.
fn rcvbuf_messages(lane: c_int) -> usize {
    const PAGE: usize = 4096;
    crate::sockopt::int_option(lane, libc::SOL_SOCKET, libc::SO_RCVBUF)
        .map_or(usize::MAX, |room| room as usize / PAGE)
}

/// The first pauses say what one costs.
fn measure_cost<T>(pause: impl FnOnce() -> T) -> T {
    if DELAY_COST.samples.load(Ordering::Relaxed) >= COST_SAMPLES {
        return pause();
    }
    let before = cpu::thread_cpu_time();
    let answer = pause();
    DELAY_COST.add(cpu::thread_cpu_time().saturating_sub(before));
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_costs_less_for_a_datagram_is_cheaper() {
        // 30 µs for eight against 10 µs for five, and the other way round.
        assert!(!is_cheaper((30_000, 8 * AVERAGE_SCALE), (10_000, 5 * AVERAGE_SCALE)));
        assert!(is_cheaper((3_000, 4 * AVERAGE_SCALE), (4_000, AVERAGE_SCALE)));
        // What was never seen is tried.
        assert!(
            is_cheaper((30_000, 0), (10_000, AVERAGE_SCALE))
                && is_cheaper((30_000, AVERAGE_SCALE), (10_000, 0))
        );
    }
}
