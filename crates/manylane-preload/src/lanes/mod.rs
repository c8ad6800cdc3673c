//! Lanes that come and go: when a socket gets them, who owns which, and how it falls back.
//!
//! # When
//!
//! Lanes are made when every thread that ever waited for the socket has come back to receive again, and each wait
//! has had a bound since there were two of them: `consider`. Threads that come later prove the same before they get one.
//!
//! # How a change survives who makes it
//!
//! Every change is made under the lock, and written down before it is begun: [`mend`]. What order its steps have is what
//! makes it possible to finish it from the middle.
//!
//! | file | what it decides |
//! |---|---|
//! | `make.rs` | when a socket gets lanes, and what is opened in advance |
//! | `owners.rs` | who owns which lane, and which are steered to |
//! | `fall.rs` | how a socket becomes a plain one again |
//!
//! Here is what all of these need: descriptors of a socket, and its end.

mod fall;
mod make;
mod owners;

use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use libc::c_int;
use manylane_sys::shim::Reason;

use crate::hidden::{self, Kept};
use crate::open::{self, SLICE_MS};
use crate::sock::{Member, Shared, Sock};
use crate::table::{self, Entry};
use crate::{alone, gather, identity, loan, mend, mirror};

pub(crate) use fall::{emptied, fall_back, forget_steering, plain, signals_are_mixed};
pub(crate) use make::{before_bind, bind, consider, is_worth_a_look, open_in_advance};
pub(crate) use owners::{
    assign, drain_first, drained_first, inherit, leave, member_leaves, part, steer_past, steer_to,
    steer_to_awake,
};

/// Receives after which a thread is known to come back.
pub(crate) const COMES_BACK: u32 = 2;

/// The address of `fd`.
pub(crate) fn local_addr(fd: c_int) -> Option<SocketAddr> {
    open::bound(fd)?.addr()
}

/// From now on a blocking receive on the kernel's socket returns after a slice.
pub(crate) fn bound_waits(shared: &Shared, fd: c_int) {
    shared.bounded.store(1, Ordering::Release);
    mirror::set_timeout(fd, SLICE_MS as u64 * 1000);
}

/// The program's own receive timeout is the kernel's again.
fn unbound_waits(shared: &Shared, fd: c_int) {
    mirror::set_timeout(fd, shared.timeout_us.load(Ordering::Relaxed));
    shared.bounded.store(0, Ordering::Release);
}

/// A bit for each socket of the group.
pub(crate) fn lanes_mask(shared: &Shared) -> u64 {
    match shared.lanes.load(Ordering::Acquire) {
        0 => 0,
        count => u64::MAX >> (64 - count.min(64)),
    }
}

/// Any socket of the group: what steering is set on. Without a lane there is nothing to steer. Only under the lock: lanes
/// may just be being made.
pub(crate) fn group(sock: &Sock) -> c_int {
    sock.lane_fds().next().map_or(-1, |(_, fd)| fd)
}

/// Any of the program's descriptors for a socket.
pub(crate) fn any_fd(sock: &Sock) -> Option<c_int> {
    let index = sock.index();
    let is_one = |(fd, entry): &(c_int, Entry)| *entry == Entry::Sock(index) && identity::is(sock, *fd);
    table::known(0, u32::MAX).find(is_one).map(|(fd, _)| fd)
}

/// A socket, for a thread that has no descriptor of the program's in its hands: another one may close any of them at any time.
pub(crate) fn keep(sock: &Sock) -> Option<Kept> {
    keep_by(sock, any_fd(sock)?)
}

/// [`keep`], by `fd` if that is still one of the socket's.
fn keep_as(sock: &Sock, fd: c_int) -> Option<Kept> {
    keep_by(sock, fd).or_else(|| keep(sock))
}

fn keep_by(sock: &Sock, fd: c_int) -> Option<Kept> {
    let kept = Kept::of(fd)?;
    // Before it was kept its number may have come to mean another socket.
    (identity::is(sock, kept.fd()) && table::entry(fd) == Entry::Sock(sock.index())).then_some(kept)
}

/// Frees the places of this process's threads: it closes the socket.
pub(crate) fn close(sock: &Sock) {
    alone::leave(sock);
    if let Some(shared) = sock.shared()
        && let Some(guard) = mend::lock(sock, shared, true)
    {
        // Nobody else has it: who binds the port next is to get all that comes from now on. The lender would learn of the
        // end of the loan a moment too late.
        if shared.forked.load(Ordering::Relaxed) == 0 {
            loan::close(sock, shared);
        }
        let fd = group(sock);
        gather::flush_all(sock, shared, fd);
        let pid = u64::from(std::process::id());
        for at in 0..shared.joined.load(Ordering::Acquire) as usize {
            if shared.members[at].who.load(Ordering::Relaxed) >> 32 == pid {
                leave(shared, fd, at, &guard);
            }
        }
    }
    for (lane, fd) in sock.lane_fds() {
        sock.set_lane_fd(lane, None);
        hidden::close(fd);
    }
    loan::give_back(sock);
    sock.give_back();
}

/// The program has closed one of the library's own descriptors past it, and has its number: what needs that goes on without.
#[cold]
pub(crate) fn lost(fd: c_int) {
    for sock in Sock::in_use() {
        let lane = sock.lane_fds().find(|(_, at)| *at == fd);
        if let Some((lane, _)) = lane {
            sock.set_lane_fd(lane, None);
        }
        if lane.is_some() || sock.loan().is_some_and(|loan| loan.has(fd)) {
            let own = any_fd(sock).unwrap_or(-1);
            fall_back(sock, own, Reason::NoSocket);
        }
    }
}

/// One more beat of the calling thread.
#[inline]
pub(crate) fn beat(member: &Member) {
    member.beat.store(member.beat.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}
