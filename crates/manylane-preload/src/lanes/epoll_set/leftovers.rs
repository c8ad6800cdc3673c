//! Instances after the library detached: they report datagrams that are left in lanes.

use std::sync::atomic::Ordering;

use libc::{EPOLL_CTL_MOD, c_int, epoll_event};

use super::instance::{Epoll, Item};
use crate::fds::table;
use crate::shared::leftovers::LeftoverQueue;
use crate::shared::sock::Sock;

/// The items that must report leftovers after the library detached.
pub(crate) fn items_with_leftovers(
    epoll: &'static Epoll,
) -> impl Iterator<Item = (&'static Item, &'static Sock)> {
    let has_some = |sock: &Sock| sock.leftovers().is_some_and(LeftoverQueue::has_datagrams);
    epoll.items().filter(move |(item, sock)| item.wanted() != 0 && has_some(sock))
}

/// True if `fd` is an instance with such items.
pub(crate) fn has_leftovers(fd: c_int) -> bool {
    Epoll::of(fd).is_some_and(|epoll| items_with_leftovers(epoll).next().is_some())
}

/// The program changed or removed an entry after the library detached: leftovers are reported as
/// the entry now says.
pub(crate) fn ctl_after_detach(epfd: c_int, op: c_int, fd: c_int, event: Option<&epoll_event>) {
    let Some((epoll, sock)) = Epoll::of(epfd).zip(table::sock(fd)) else { return };
    let Some(item) = epoll.item(sock, fd) else { return };
    match event {
        Some(event) if op == EPOLL_CTL_MOD => {
            item.events.store(event.events, Ordering::Relaxed);
            item.data.store(event.u64, Ordering::Relaxed);
        }
        _ => item.sock.store(0, Ordering::Release),
    }
}
