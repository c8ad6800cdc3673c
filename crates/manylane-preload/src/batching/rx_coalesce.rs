//! The delay before a sleep: a thread with a lane that finds no datagram delays for a moment, so
//! that more than one datagram arrives.
//!
//! A sleep with its wake-up costs many times what a datagram costs, and lanes multiply sleeps:
//! each lane wakes a thread of its own. So a thread that has emptied its lane may first sleep for
//! a fraction of a millisecond in which no datagram wakes it, and then wait as the program asked.
//! The rule is that of the library's own lanes ([`manylane_policy::rx_coalesce`]), with the
//! datagrams between one sleep and the next as the size of a batch. The longest delay follows how
//! busy their CPUs are ([`manylane_policy::cpu_load`]), unless
//! `--rx-usecs` sets it.
//!
//! [`before_sleep`] does all of it, for poll, select, epoll and blocking receives alike:
//! 1. Only while a socket has lanes and more than one owner, or has queues ([`can_coalesce`]).
//!    Only in a wait that may last longer than the delay.
//! 2. Only if there is nothing to return at once: the caller polls first.
//! 3. The delay ends at a common beat, so that lanes that share a CPU wake it once. A signal ends
//!    it as it would have ended the wait. Then the caller waits as before, for the rest of its
//!    time.
//!
//! During the delay, the thread counts as waiting on its lane: the lane is covered.

use std::cell::Cell;
use std::os::fd::IntoRawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use libc::{c_int, timespec};
use manylane_policy::rx_coalesce::RxCoalesce;
use manylane_sys::{cpu, tick};

use crate::base::state;
use crate::fds::hidden_fds::HiddenFd;
use crate::shared::sock::{MULTI_LANE, Shared};
use crate::xdp::queues;

struct ThreadCoalesce {
    coalesce: Cell<Option<RxCoalesce>>,
    /// Datagrams since the last sleep or delay.
    received: Cell<usize>,
}

thread_local! {
    // Constant and without a destructor: needs neither the heap nor a registration.
    static THREAD_COALESCE: ThreadCoalesce = const {
        ThreadCoalesce {
            coalesce: Cell::new(None),
            received: Cell::new(0),
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
    });
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
        let mut coalesce = thread.coalesce.get().unwrap_or_else(|| new_coalesce(lane));
        coalesce.follow_load(open_stat);
        // Do not poll if no delay can follow.
        let may = coalesce.can_delay() && left.is_none_or(|left| left > coalesce.max_delay());
        let found = if may { poll() } else { None };
        if found.is_none() {
            let delay = coalesce.next_delay(thread.received.take()).filter(|_| may);
            thread.coalesce.set(Some(coalesce));
            let left = tick::remaining(delay?.min(coalesce.max_delay()));
            return sleep(timespec { tv_sec: 0, tv_nsec: i64::from(left.subsec_nanos()) });
        }
        thread.coalesce.set(Some(coalesce));
        found
    })
}

#[cold]
fn open_stat() -> Option<HiddenFd> {
    HiddenFd::open(|| cpu::open_stat().map_or(-1, IntoRawFd::into_raw_fd))
}

fn new_coalesce(lane: c_int) -> RxCoalesce {
    let fixed = state::settings().and_then(|settings| settings.rx_coalesce);
    let new = |delay| RxCoalesce::new(delay, usize::MAX, rcvbuf_messages(lane)).with_average();
    fixed.map_or_else(|| new(Duration::ZERO).by_load(), new)
}

/// Messages that fit into a lane's receive buffer, counted as a page each.
fn rcvbuf_messages(lane: c_int) -> usize {
    const PAGE_BYTES: usize = 4096;
    crate::base::sockopt::int_option(lane, libc::SOL_SOCKET, libc::SO_RCVBUF)
        .map_or(usize::MAX, |room| room as usize / PAGE_BYTES)
}
