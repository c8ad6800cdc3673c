//! Datagrams received ahead: with one system call the owner of a lane takes the datagrams that its
//! socket holds, and its calls return them one by one. Used while the active set is limited
//! (`active_set.rs`).
//!
//! A *prefetch* is the front of a lane's queue, in memory that is shared with all processes forked
//! later. A receive on the lane's kernel socket reads it first (`recv_call.rs`), and a readiness
//! check includes it (`readiness.rs`, `poll.rs`, `epoll/`, `options.rs`). So prefetched datagrams
//! can be received by exactly those threads that could have received them from the kernel: at once
//! by the owner and by a thread that polls, within a slice by a thread that sleeps while the owner
//! is away (`coverage.rs`).
//!
//! # Filling and taking
//!
//! | file | what it does |
//! |---|---|
//! | `buffer.rs` | the memory, its state, and how a fill that was interrupted ends |
//! | `fill.rs` | filling it from the kernel, and when that pays |
//! | `take.rs` | taking datagrams out of it |
//!
//! Only the owner of a lane fills its prefetch, in a receive of its own, when the prefetch is
//! empty, without waiting. So no datagram leaves the kernel's queue before a thread wants one, and
//! the order in the lane stays. Any thread may take. One word keeps the state:
//!
//! ```text
//!  EMPTY ──owner: FILLING, recvmmsg(2)──► next..end ──each taker: next + 1, a claim; copies; gives the claim back──► EMPTY
//! ```
//!
//! | stage | by | when it is full or missing |
//! |---|---|---|
//! | filled | the lane's owner | a claim is still out, or another thread is filling: one datagram, from the kernel |
//! | published | the filler; if its thread died, the next thread of its process that checks; a signal handler that interrupted it | only messages that the kernel has marked are there (`msg_len`) |
//! | taken | any thread that may take from the lane | - |
//! | drained after a fallback | the next receive, before all lanes and the kernel's socket | a prefetch that is being filled keeps the socket managed |
//!
//! - A thread with a claim is copying. The prefetch is filled again only when all claims are back.
//!   If a thread dies with a claim, one datagram is lost with it, as it would have been from the
//!   kernel, and the lane goes on one by one.
//! - If a thread dies while it fills, nothing is lost: the kernel has marked each message, and the
//!   next thread of the process finishes the change (`recover`). So does a signal handler that
//!   interrupted the filling thread, because signals arrive at the end of the system call. If its
//!   whole process dies in that call, the datagrams that the call took are lost.
//! - FILLING lasts for one system call that does not wait. Another thread that meets it yields a
//!   few times, then asks the kernel. A thread that is stopped while it fills keeps the datagrams
//!   until it continues or dies.
//! - Falling back: the mode changes first, then prefetches are drained. A filler checks the mode
//!   after it has set FILLING. So either it sees the fallback, or the fallback sees that the
//!   prefetch is not idle (`is_idle`).
//!
//! # What other processes can write
//!
//! A process forked from this one may have other privileges, and may be taken over. So what the
//! kernel follows (message headers, iovecs) is in pages of each process's own (`Headers`), and
//! names memory of the prefetch only. Numbers in shared memory are bounded where they are used.
//!
//! # What stays one by one
//!
//! - What would show it: sockets with options that bring control messages, lanes that several
//!   threads share, and edge-triggered epoll entries (the kernel drops one when its queue is
//!   empty).
//! - Sockets with queues (engine `xdp`), whose datagrams are in memory anyway; receives of the
//!   error queue; `recvmmsg`, which is a batch of its own.
//! - What would not pay: see `Prefetch::should_fill`.
//!
//! Bounds: [`PREFETCH_MAX`] datagrams for each lane, beside its receive buffer. Each takes 2 KiB,
//! up to 64 KiB for long ones, once it is used. Without memory, or after [`MAPPINGS_MAX`] sockets
//! in the life of a process, receives stay one by one.

mod buffer;
mod fill;
mod take;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU32, Ordering};

use libc::{MSG_PEEK, c_int};

pub(crate) use self::buffer::{PREFETCH_MAX, Prefetch};
pub(crate) use self::fill::FillResult;
use crate::base::recv_bufs::RecvBufs;
use crate::fds::sock_fds;
use crate::shared::sock::{PLAIN, Shared, Sock};
use crate::shared::thread;

/// Max sockets of a process that get prefetches: the mappings are never unmapped.
const MAPPINGS_MAX: u32 = 64;
static MAPPED: AtomicU32 = AtomicU32::new(0);

/// Bit in `retired`: prefetches may have datagrams. It is the bit of lane 0, which is never
/// retired.
pub(crate) const PREFETCH_BIT: u64 = 1;

/// Maps the prefetches of a socket that gets lanes. Requires the socket's lock; runs before any
/// fork.
pub(crate) fn map(sock: &Sock) {
    if sock.prefetches().is_none() && MAPPED.fetch_add(1, Ordering::Relaxed) < MAPPINGS_MAX {
        sock.prefetches.map(Prefetch::init);
    }
}

/// Stops prefetching for the socket, because the program would notice it.
pub(crate) fn disable(shared: &Shared) {
    // SeqCst, as where a fill checks it.
    shared.prefetch_off.store(1, Ordering::SeqCst);
}

impl Sock {
    /// The prefetches of its lanes, by lane.
    #[inline]
    pub(crate) fn prefetches(&self) -> Option<&'static [Prefetch]> {
        // SAFETY: [`map`] mapped them, of this type.
        unsafe { self.prefetches.load::<Prefetch>() }
    }
}

/// The prefetch of a lane; none if nothing is prefetched.
#[inline]
pub(crate) fn for_lane(sock: &Sock, lane: usize) -> Option<&'static Prefetch> {
    sock.prefetches()?.get(lane)
}

/// A bit for each lane of `mask` with prefetched datagrams.
#[inline]
pub(crate) fn ready_lanes(sock: &Sock, mask: u64) -> u64 {
    let Some(prefetches) = sock.prefetches() else { return 0 };
    let (mut left, mut ready) = (mask, 0);
    while left != 0 {
        let lane = left & left.wrapping_neg();
        left ^= lane;
        if prefetches.get(lane.trailing_zeros() as usize).is_some_and(Prefetch::has_datagrams) {
            ready |= lane;
        }
    }
    ready
}

/// True if a plain socket still has prefetched datagrams, which are received before all others.
/// Once false, it stays so.
pub(crate) fn has_leftovers(sock: &Sock, shared: &Shared, fd: c_int) -> bool {
    if shared.mode() != PLAIN || shared.retired.load(Ordering::Acquire) & PREFETCH_BIT == 0 {
        return false;
    }
    let prefetches = sock.prefetches().unwrap_or_default();
    if prefetches.iter().any(Prefetch::has_datagrams) {
        return true;
    }
    if prefetches.iter().all(Prefetch::is_idle) {
        sock_fds::mark_lane_empty(sock, shared, fd, 0);
    }
    false
}

/// Receives a datagram that a plain socket still has in its prefetches.
#[cold]
pub(crate) fn drain(
    sock: &Sock,
    shared: &Shared,
    fd: c_int,
    flags: c_int,
    into: &RecvBufs<'_>,
) -> Option<isize> {
    if !has_leftovers(sock, shared, fd) {
        return None;
    }
    let (lane, answer) = sock
        .prefetches()?
        .iter()
        .enumerate()
        .find_map(|(lane, prefetch)| prefetch.recv(flags, into).map(|answer| (lane, answer)))?;
    if flags & MSG_PEEK != 0 {
        thread::set_peeked(sock, lane);
    }
    Some(answer)
}

/// Length of the next datagram in the prefetches of `mask`, and its lane.
pub(crate) fn next_len(sock: &Sock, mask: u64) -> Option<(usize, usize)> {
    let lane = ready_lanes(sock, mask).trailing_zeros() as usize;
    Some((for_lane(sock, lane)?.next_len()?, lane))
}
