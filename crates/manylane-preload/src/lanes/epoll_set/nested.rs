//! Instances that are waited for as descriptors: by poll(2), by select(2), or by another instance.
//!
//! The kernel answers such a wait by what the instance watches, so its sockets become plain. It
//! knows nothing of datagrams that are left in their lanes or were prefetched. While there are
//! such leftovers, the instance also watches a *placeholder*: a descriptor of the library's that
//! is always readable, with the data of a socket's entry. The placeholder is out of the instance
//! while the library itself waits on it, and goes back in if leftovers remain.

use std::sync::atomic::{AtomicBool, Ordering};

use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLLET, EPOLLIN, c_int, epoll_event};

use super::instance::{Epoll, Item, NESTED, NESTED_DRAINED};
use crate::base::{quiesce, real};
use crate::fds::hidden_fds;
use crate::fds::sock_fds::is_managed;
use crate::fds::table::{self, Entry};
use crate::group::coverage;
use crate::shared::lock::lock;
use crate::shared::sock::Sock;
use crate::shared::thread;
use crate::xdp::queues;

/// An instance may contain a placeholder.
static HAS_PLACEHOLDERS: AtomicBool = AtomicBool::new(false);

/// True if leftovers of a socket must be reported: not if they were already reported as an edge.
fn needs_report(item: &Item) -> bool {
    let is_edge = item.events.load(Ordering::Relaxed) & EPOLLET as u32 != 0;
    item.wanted() != 0 && !(is_edge && item.edge_reported.load(Ordering::Relaxed) != 0)
}

/// True if an item's socket has leftovers to report. Lanes found empty are marked so.
fn has_leftovers(item: &Item, sock: &'static Sock) -> bool {
    let Some(shared) = sock.shared().filter(|shared| needs_report(item) && is_managed(shared)) else {
        return false;
    };
    let lane = item.lane.load(Ordering::Relaxed) as usize;
    coverage::poll_other_lanes(sock, shared, item.fd.load(Ordering::Relaxed), lane)
}

/// The same, as far as it can be known under the instance's lock.
fn may_have_leftovers(item: &Item, sock: &'static Sock) -> bool {
    needs_report(item)
        && sock.shared().is_some_and(|shared| {
            shared.retired.load(Ordering::Acquire) != 0 || queues::has_leftovers(sock, shared)
        })
}

/// Adds the placeholder to a nested instance if there are leftovers; else removes it.
pub(crate) fn refresh(epoll: &'static Epoll, epfd: c_int) {
    if thread::is_own_process() {
        quiesce::run_inside(|| refresh_now(epoll, epfd));
    }
}

fn refresh_now(epoll: &'static Epoll, epfd: c_int) {
    let errno = real::errno();
    let left = epoll.items().find(|(item, sock)| has_leftovers(item, sock));
    // Before taking the lock: opening a descriptor takes another one.
    let fd = left.and_then(|_| hidden_fds::readable_fd());
    if let Some(_guard) = lock(&epoll.lock, true)
        && table::entry(epfd) == Entry::Epoll(epoll.index())
    {
        let is_managed = |sock: &Sock| sock.shared().is_some_and(is_managed);
        let settled = !epoll.items().any(|(_, sock)| is_managed(sock));
        epoll.nested.store(if settled { NESTED_DRAINED } else { NESTED }, Ordering::Release);
        match (left, fd) {
            // Another thread that changes the item meanwhile calls this function after that.
            (Some((item, sock)), Some(fd)) if item.sock.load(Ordering::Acquire) == sock.index() + 1 => {
                insert_placeholder(epoll, epfd, item, fd);
            }
            // Another thread may have found leftovers meanwhile.
            (None, _) if !epoll.items().any(|(item, sock)| may_have_leftovers(item, sock)) => {
                remove_placeholder_locked(epoll, epfd);
            }
            _ => {}
        }
    }
    real::set_errno(errno);
}

fn insert_placeholder(epoll: &Epoll, epfd: c_int, item: &Item, fd: c_int) {
    let mut event = epoll_event { events: EPOLLIN as u32, u64: item.data.load(Ordering::Relaxed) };
    // It may be there for another socket, or by another process.
    if real::epoll_ctl(epfd, EPOLL_CTL_ADD, fd, Some(&mut event)) == 0
        || real::errno() == libc::EEXIST && real::epoll_ctl(epfd, EPOLL_CTL_MOD, fd, Some(&mut event)) == 0
    {
        epoll.placeholder.store(1, Ordering::Release);
        HAS_PLACEHOLDERS.store(true, Ordering::Release);
    }
}

fn remove_placeholder_locked(epoll: &Epoll, epfd: c_int) {
    if epoll.placeholder.swap(0, Ordering::AcqRel) != 0
        && let Some(fd) = hidden_fds::readable_fd_if_open()
    {
        real::epoll_ctl(epfd, EPOLL_CTL_DEL, fd, None);
    }
}

/// True if an instance contains the placeholder.
pub(crate) fn has_placeholder() -> bool {
    let has_one = |epoll: &Epoll| epoll.placeholder.load(Ordering::Acquire) != 0;
    Epoll::all().iter().any(|epoll| epoll.used.load(Ordering::Acquire) == 1 && has_one(epoll))
}

/// Called before the entries of an instance are waited for or changed.
#[inline]
pub(crate) fn remove_placeholder(epoll: &Epoll, epfd: c_int) {
    if epoll.placeholder.load(Ordering::Acquire) != 0 && thread::is_own_process() {
        quiesce::run_inside(|| remove_placeholder_now(epoll, epfd));
    }
}

#[cold]
fn remove_placeholder_now(epoll: &Epoll, epfd: c_int) {
    let errno = real::errno();
    if let Some(_guard) = lock(&epoll.lock, true)
        && table::entry(epfd) == Entry::Epoll(epoll.index())
    {
        remove_placeholder_locked(epoll, epfd);
    }
    real::set_errno(errno);
}

/// The library is about to detach: no thread would remove placeholders after that.
pub(crate) fn detach() {
    for epoll in Epoll::all().iter().filter(|epoll| epoll.used.load(Ordering::Acquire) == 1) {
        if epoll.placeholder.load(Ordering::Acquire) != 0
            && let Some(epfd) = epoll.any_fd()
        {
            remove_placeholder(epoll, epfd);
        }
    }
}

/// Called before a wait on an instance that contains others: placeholders must not report
/// datagrams that were received meanwhile.
#[inline]
pub(crate) fn refresh_all() {
    if HAS_PLACEHOLDERS.load(Ordering::Relaxed) {
        refresh_all_now();
    }
}

#[cold]
fn refresh_all_now() {
    HAS_PLACEHOLDERS.store(false, Ordering::Release);
    let has_one = |epoll: &&Epoll| {
        epoll.used.load(Ordering::Acquire) == 1 && epoll.placeholder.load(Ordering::Acquire) != 0
    };
    for epoll in Epoll::all().iter().filter(has_one) {
        if let Some(epfd) = epoll.any_fd() {
            refresh(epoll, epfd);
        }
    }
}
