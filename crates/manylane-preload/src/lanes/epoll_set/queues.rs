//! Queues in an instance (engine `xdp`): the kernel watches the queues of an entry's lane beside
//! its descriptor, with the program's data. So one call waits for everything.
//!
//! They are watched edge-triggered, because a wait looks into the rings before it calls the kernel:
//! what has come before is seen there, and each later frame is an edge. A queue that stays watched
//! for too long, because another thread changed the lanes, wakes in vain once for each frame.
//!
//! The launcher has a copy of each queue's descriptor. The kernel therefore goes on watching a
//! queue that the program closes, so queues must be removed before their socket closes.

use std::sync::atomic::Ordering;

use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLLET, c_int, epoll_event};

use super::instance::{Epoll, Item};
use crate::base::real;
use crate::fds::table::{self, Entry};
use crate::shared::lock::{Guard, lock};
use crate::shared::sock::Sock;
use crate::xdp::queues;

/// The queues that the kernel should watch for an entry.
fn wanted(item: &Item, sock: &'static Sock) -> u32 {
    match sock.shared() {
        Some(shared) if item.wanted() != 0 => {
            queues::mask_of_lane(sock, shared, item.lane.load(Ordering::Relaxed) as usize)
        }
        _ => 0,
    }
}

/// The thread that waits on an instance is about to: lets the kernel watch the queues of an entry.
/// False if it cannot.
#[inline]
pub(crate) fn watch_queues(epoll: &Epoll, item: &Item, sock: &'static Sock, epfd: c_int) -> bool {
    item.queues.load(Ordering::Relaxed) == wanted(item, sock) || watch_queues_now(epoll, item, sock, epfd)
}

#[cold]
fn watch_queues_now(epoll: &Epoll, item: &Item, sock: &'static Sock, epfd: c_int) -> bool {
    let Some(guard) = lock(&epoll.lock, true) else { return true };
    let is_open = table::entry(epfd) == Entry::Epoll(epoll.index());
    // Another thread may have removed the entry, or closed the descriptor of the instance: it has
    // to wait for this lock, or has done so before.
    if !is_open || item.sock.load(Ordering::Acquire) != sock.index() + 1 {
        return true;
    }
    update(item, sock, epfd, wanted(item, sock), &guard)
}

/// The program has added or changed an entry. What fails here is tried again by the next wait.
pub(crate) fn entry_changed(item: &Item, sock: &'static Sock, epfd: c_int, guard: &Guard<'_>) {
    let to = wanted(item, sock);
    if item.queues.load(Ordering::Relaxed) == to {
        change(item, sock, epfd, to, EPOLL_CTL_MOD, guard);
    } else {
        update(item, sock, epfd, to, guard);
    }
}

/// Removes the queues of an entry that ends.
pub(crate) fn unwatch_queues(item: &Item, sock: &Sock, epfd: c_int, guard: &Guard<'_>) {
    update(item, sock, epfd, 0, guard);
}

/// Makes the kernel watch these queues, and no others. False if it cannot.
fn update(item: &Item, sock: &Sock, epfd: c_int, to: u32, guard: &Guard<'_>) -> bool {
    let before = item.queues.load(Ordering::Relaxed);
    // Another process that has the instance may have removed some, or added them.
    change(item, sock, epfd, before & !to, EPOLL_CTL_DEL, guard);
    let is_done = change(item, sock, epfd, to & !before, EPOLL_CTL_ADD, guard);
    item.queues.store(if is_done { to } else { before & to }, Ordering::Relaxed);
    is_done
}

/// Changes the kernel's entries of these queues. False if it refuses.
fn change(item: &Item, sock: &Sock, epfd: c_int, queues: u32, op: c_int, _guard: &Guard<'_>) -> bool {
    let Some(lease) = sock.lease().filter(|_| queues != 0) else { return queues == 0 };
    let (events, data) = (item.wanted() | EPOLLET as u32, item.data.load(Ordering::Relaxed));
    let mut event = epoll_event { events, u64: data };
    let mut ctl = |fd, op| real::epoll_ctl(epfd, op, fd, Some(&mut event)) == 0;
    let changed = lease.queue_fds().enumerate().filter(|(number, _)| queues & 1 << number != 0);
    changed.fold(true, |all, (_, fd)| {
        let is_done =
            ctl(fd, op) || op == EPOLL_CTL_ADD && real::errno() == libc::EEXIST && ctl(fd, EPOLL_CTL_MOD);
        all & is_done
    })
}
