//! The pause before a sleep: a thread with a lane that finds nothing waits a moment for more than one datagram.
//!
//! A sleep with its wake-up costs many times what a datagram costs, and lanes multiply them: each wakes a thread of its own
//! for its own datagrams. So a thread that has emptied its lane may rest for a fraction of a millisecond, in which
//! nothing wakes it, before it goes to sleep as the program asked. Whether that pays is decided as the library's own lanes
//! decide it (`manylane_sys::linger`), from the datagrams between one sleep and the next.
//!
//! [`before_sleep`] is the whole of it, for poll, select, epoll and blocking receives alike:
//! 1. Only while a socket has lanes and more than one receiver ([`pays`]); a program with one receiver never pauses. Only
//!    in a wait that may last longer than the pause.
//! 2. Only if there is nothing to return at once: the caller looks first.
//! 3. The pause ends at a common beat, so that lanes that share a core wake it once; a signal ends it as it would have
//!    ended the wait. After it the caller waits as before, for what is left of its time.
//!
//! While it rests, a thread counts as waiting on its lane: what comes is its own. How long a pause is follows from what a
//! wake-up costs here (`--linger` overrules it), which the first pauses of a process measure.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use libc::{c_int, timespec};
use manylane_sys::linger::Linger;
use manylane_sys::{cpu, tick};

use crate::sock::{LANED, Shared};
use crate::{queues, start};

/// A pause lasts for so many times what it costs the thread that pauses: at most half a percent of a core goes into pauses. The
/// interrupt and the scheduler, which nobody counts here, cost several times as much, and so does the system call by
/// system call of a program that takes one datagram at a time: pauses that bring two or three datagrams save nothing.
const TIMES_THE_COST: u32 = 200;
const SHORTEST: Duration = Duration::from_micros(50);
const LONGEST: Duration = Duration::from_micros(500);

/// Pauses that are measured, and how long they are.
const MEASURED: u32 = 16;
const FIRST: Duration = Duration::from_micros(200);

/// Nanoseconds that the measured pauses cost this process, and how many there were.
static COST: AtomicU64 = AtomicU64::new(0);
static SAMPLES: AtomicU32 = AtomicU32::new(0);

struct Pace {
    linger: Cell<Option<Linger>>,
    /// Datagrams since the last sleep.
    taken: Cell<usize>,
}

thread_local! {
    // Without a destructor and with a constant: neither the heap nor a registration is involved.
    static PACE: Pace = const { Pace { linger: Cell::new(None), taken: Cell::new(0) } };
}

/// Whether a wait for this socket may be worth a pause: two lanes at least have owners.
#[inline]
pub(crate) fn pays(shared: &Shared) -> bool {
    let owned = |owner: &&AtomicU32| owner.load(Ordering::Relaxed) != 0;
    (shared.mode() == LANED && shared.owner.iter().filter(owned).nth(1).is_some()) || queues::are_open(shared)
}

/// The calling thread has received so many datagrams from lanes.
#[inline]
pub(crate) fn took(datagrams: u64) {
    PACE.with(|pace| pace.taken.set(pace.taken.get().saturating_add(datagrams as usize)));
}

/// How long a pause is now; zero if there are none.
fn longest() -> Duration {
    if let Some(linger) = start::settings().and_then(|settings| settings.linger) {
        return linger;
    }
    match SAMPLES.load(Ordering::Relaxed) {
        samples if samples < MEASURED => FIRST,
        samples => {
            let cost = Duration::from_nanos(COST.load(Ordering::Relaxed) / u64::from(samples));
            (cost * TIMES_THE_COST).clamp(SHORTEST, LONGEST)
        }
    }
}

/// The calling thread is about to sleep in a wait that lasts for `left` at most. The answer is what `look` saw, which then is
/// what the wait ends with, or what ended the pause; none: the wait goes on as if nothing had been.
///
/// `lane` is the descriptor whose receive buffer bounds what may queue up in a pause; `rest` sleeps for the time it is given.
pub(crate) fn before_sleep<T>(
    lane: c_int,
    left: Option<Duration>,
    look: impl FnOnce() -> Option<T>,
    rest: impl FnOnce(timespec) -> Option<T>,
) -> Option<T> {
    PACE.with(|pace| {
        let mut linger = pace
            .linger
            .get()
            .unwrap_or_else(|| Linger::new(longest(), usize::MAX, room_of(lane)).on_average());
        // What no pause could be made of costs no look.
        let may = linger.may_pause() && left.is_none_or(|left| left > linger.longest());
        if may && let Some(found) = look() {
            return Some(found);
        }
        let pause = linger.after(pace.taken.take());
        if pause.is_some() && linger.longest() != longest() {
            linger.set_longest(longest());
        }
        pace.linger.set(Some(linger));
        let pause = pause.filter(|_| may)?.min(linger.longest());
        measured(|| {
            let left = tick::left(pause);
            rest(timespec { tv_sec: 0, tv_nsec: i64::from(left.subsec_nanos()) })
        })
    })
}

/// Messages that fit into a lane's receive buffer, counted with a page each.
fn room_of(lane: c_int) -> usize {
    const PAGE: usize = 4096;
    crate::mirror::number(lane, libc::SOL_SOCKET, libc::SO_RCVBUF)
        .map_or(usize::MAX, |room| room as usize / PAGE)
}

/// The first pauses say what one costs.
fn measured<T>(pause: impl FnOnce() -> T) -> T {
    if SAMPLES.load(Ordering::Relaxed) >= MEASURED {
        return pause();
    }
    let before = cpu::thread_time();
    let answer = pause();
    let cost = cpu::thread_time().saturating_sub(before);
    COST.fetch_add(cost.as_nanos() as u64, Ordering::Relaxed);
    SAMPLES.fetch_add(1, Ordering::Relaxed);
    answer
}
