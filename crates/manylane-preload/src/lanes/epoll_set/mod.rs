//! Instances of epoll, and the UDP sockets in them: what `epoll/` changes and waits on.
//!
//! | file | what it does |
//! |---|---|
//! | `instance.rs` | what an instance is, and its entries |
//! | here | entries move from lane to lane, and end with their socket |
//! | `nested.rs` | instances that are waited for as descriptors |
//! | `queues.rs` | the queues of their lanes |
//! | `leftovers.rs` | instances after the library detached |

mod instance;
mod leftovers;
mod nested;
mod queues;

use std::ptr;
use std::sync::atomic::Ordering;

use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLLET, c_int, epoll_event};

use crate::base::real;
use crate::fds::sock_fds;
use crate::fds::table::{self, Entry};
use crate::shared::lock::lock;
use crate::shared::sock::{PLAIN, Sock};

pub(crate) use instance::{Epoll, ITEMS_MAX, Item, KERNEL_FIRST, LANES_FIRST, NESTED, NESTED_DRAINED};
pub(crate) use leftovers::{ctl_after_detach, has_leftovers, items_with_leftovers};
pub(crate) use nested::{detach, has_placeholder, refresh, refresh_all, remove_placeholder};
pub(crate) use queues::{entry_changed, unwatch_queues, watch_queues};

/// True if an instance of this process watches a socket edge-triggered.
pub(crate) fn is_edge_triggered(sock: &Sock) -> bool {
    let used = Epoll::all().iter().filter(|epoll| epoll.used.load(Ordering::Acquire) == 1);
    used.flat_map(Epoll::items)
        .any(|(item, at)| ptr::eq(at, sock) && item.events.load(Ordering::Relaxed) & EPOLLET as u32 != 0)
}

/// A socket closes. Its lanes do, too, unless another process has them: so remove them from this
/// process's instances. An instance that another process has keeps the lanes: its entries are that
/// process's, too, and the kernel removes what no process has open. It loses the queues, which the
/// launcher has open; the other process adds them again after a slice of its wait.
pub(crate) fn remove_sock(sock: &Sock) {
    let of = ptr::from_ref(sock);
    for epoll in Epoll::all().iter().filter(|epoll| epoll.used.load(Ordering::Acquire) == 1) {
        if epoll.count.load(Ordering::Acquire) == 0 || !epoll.items().any(|(_, at)| ptr::eq(at, of)) {
            continue;
        }
        let Some(guard) = lock(&epoll.lock, true) else { continue };
        let is_shared = epoll.forked.load(Ordering::Relaxed) != 0;
        let epfd = epoll.any_fd();
        for (item, at) in epoll.items() {
            if !ptr::eq(at, of) {
                continue;
            }
            if let Some(epfd) = epfd {
                unwatch_queues(item, at, epfd, &guard);
            }
            let lane = item.lane.load(Ordering::Relaxed) as usize;
            if let (Some(epfd), true) = (epfd, lane > 0 && !is_shared) {
                real::epoll_ctl(epfd, EPOLL_CTL_DEL, sock.fd_of(lane, -1), None);
            }
            epoll.remove_item(item, &guard);
        }
        drop(guard);
        if let (Some(epfd), true) = (epfd, !is_shared && epoll.placeholder.load(Ordering::Acquire) != 0) {
            refresh(epoll, epfd);
        }
    }
}

/// Moves an entry to another lane. Level or edge, the kernel reports datagrams already there. False
/// if another process has the instance: it would not find the entry. Only entries of plain sockets
/// move then, to the socket itself.
pub(crate) fn move_to_lane(epoll: &Epoll, item: &Item, sock: &Sock, epfd: c_int, lane: usize) -> bool {
    let Some(_guard) = lock(&epoll.lock, true) else { return true };
    let before = item.lane.load(Ordering::Relaxed) as usize;
    // Another thread that waits on the instance may have moved or removed the entry.
    if before == lane || item.sock.load(Ordering::Acquire) != sock.index() + 1 {
        return true;
    }
    let is_plain = sock.shared().is_none_or(|shared| shared.mode() == PLAIN);
    if epoll.forked.load(Ordering::Relaxed) != 0 && !is_plain {
        return false;
    }
    // Another thread may close a descriptor of the instance or the socket, and its number may get
    // another meaning. It has to wait for this lock, or has done so before.
    let Some(_numbers) = lock(&sock.fd_lock, true) else { return true };
    if table::entry(epfd) != Entry::Epoll(epoll.index()) {
        return true;
    }
    let added = item.fd.load(Ordering::Relaxed);
    // The program may have closed the descriptor that it added, and use another one for the same
    // socket.
    let is_open = table::entry(added) == Entry::Sock(sock.index());
    let Some(fd) = (if is_open { Some(added) } else { sock_fds::any_fd(sock) }) else { return true };
    let from = sock.fd_of(before, fd);
    let to = sock.fd_of(lane, fd);
    let mut event =
        epoll_event { events: item.events.load(Ordering::Relaxed), u64: item.data.load(Ordering::Relaxed) };
    // Add first: watching both for a moment reports too much, not too little.
    if real::epoll_ctl(epfd, EPOLL_CTL_ADD, to, Some(&mut event)) == 0 || real::errno() == libc::EEXIST {
        real::epoll_ctl(epfd, EPOLL_CTL_DEL, from, Some(&mut event));
        item.lane.store(lane as u32, Ordering::Release);
    }
    true
}

/// A socket has become plain: entries that watch its lanes and queues move to the socket itself,
/// also while their thread sleeps. (Threads of other processes move their entries when they return
/// from a slice.)
pub(crate) fn handle_fallback(sock: &Sock) {
    for epoll in Epoll::all().iter().filter(|epoll| epoll.used.load(Ordering::Acquire) == 1) {
        let moved =
            |item: &Item| item.lane.load(Ordering::Relaxed) | item.queues.load(Ordering::Relaxed) != 0;
        if !epoll.items().any(|(item, at)| ptr::eq(at, sock) && moved(item)) {
            continue;
        }
        let Some(epfd) = epoll.any_fd() else { continue };
        for (item, at) in epoll.items().filter(|(_, at)| ptr::eq(*at, sock)) {
            move_to_lane(epoll, item, at, epfd, 0);
            watch_queues(epoll, item, at, epfd);
        }
    }
}
