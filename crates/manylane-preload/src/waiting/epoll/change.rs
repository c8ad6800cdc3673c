//! Instances that are made; entries that are added, changed and moved from lane to lane.

use std::sync::atomic::Ordering;

use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLLET, EPOLLONESHOT, c_int, epoll_event};
use manylane_ipc::report::Reason;

use crate::base::real::{self, call};
use crate::batching::prefetch;
use crate::fds::hidden_fds;
use crate::fds::sock_fds::is_managed;
use crate::fds::table::{self, Entry};
use crate::lanes::epoll_set::{self, Epoll, ITEMS_MAX, Item};
use crate::lanes::fallback;
use crate::lanes::{entries, registry};
use crate::shared::lock::lock;
use crate::shared::sock::{PLAIN, Sock};
use crate::shared::thread;

pub(crate) fn epoll_create(size: c_int) -> c_int {
    register_instance(call::epoll_create(size))
}

pub(crate) fn epoll_create1(flags: c_int) -> c_int {
    register_instance(call::epoll_create1(flags))
}

fn register_instance(fd: c_int) -> c_int {
    if fd >= 0 && thread::is_own_process() {
        registry::register(fd, Epoll::alloc().map_or(Entry::None, Entry::Epoll));
    }
    fd
}

pub(crate) unsafe fn epoll_ctl(epfd: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
    let (epfd, fd) = (hidden_fds::kernel_fd(epfd), hidden_fds::kernel_fd(fd));
    // SAFETY: program arguments.
    let own = |watched| unsafe { call::epoll_ctl(epfd, op, watched, event) };
    let entry = table::entry(fd);
    if entry == Entry::None {
        return own(fd);
    }
    if let (Entry::Epoll(_), EPOLL_CTL_ADD) = (entry, op) {
        if let Some(outer) = Epoll::of(epfd) {
            outer.has_nested.store(1, Ordering::Relaxed);
        }
        fallback::mark_nested(fd);
    }
    let (Entry::Sock(index), true) = (entry, thread::is_own_process()) else {
        return own(fd);
    };
    let sock = Sock::at(index);
    if !entries::revalidate(sock, fd) {
        return own(fd);
    }
    let Some(epoll) = Epoll::of(epfd) else {
        // An instance from before the start: it is not known which thread waits on it.
        let done = own(fd);
        if done == 0 && op == EPOLL_CTL_ADD {
            fallback::fall_back(sock, fd, Reason::SharedEpoll);
        }
        return done;
    };
    // SAFETY: program arguments.
    let wanted = unsafe { event.as_ref() }.map(|event| (event.events, event.u64));
    if let (Some((events, _)), EPOLL_CTL_ADD | EPOLL_CTL_MOD) = (wanted, op) {
        // The kernel does not say whether it has fired: such an entry cannot move from lane to
        // lane.
        if events & EPOLLONESHOT as u32 != 0 {
            fallback::fall_back(sock, fd, Reason::Events);
        } else if events & EPOLLET as u32 != 0
            && let Some(shared) = sock.shared()
        {
            // The kernel reports an edge for its own queue only: nothing may be prefetched from
            // it.
            prefetch::disable(shared);
        }
        if epoll.nested.load(Ordering::Acquire) != 0 {
            fallback::fall_back(sock, fd, Reason::NestedEpoll);
        }
        // A lane has one descriptor: an instance cannot watch it twice, as it can watch two
        // descriptors of a socket.
        if op == EPOLL_CTL_ADD && epoll.has_other_fd(sock, fd) {
            fallback::fall_back(sock, fd, Reason::Events);
        }
    }
    sock.in_epoll.store(1, Ordering::Release);
    epoll_set::remove_placeholder(epoll, epfd);
    let done = ctl_tracked((epoll, epfd), op, (sock, fd), wanted, own);
    // Another thread may have started to wait for the instance since the check above.
    if epoll.nested.load(Ordering::SeqCst) != 0 {
        if op != EPOLL_CTL_DEL {
            fallback::fall_back(sock, fd, Reason::NestedEpoll);
        }
        epoll_set::refresh(epoll, epfd);
    }
    done
}

/// Makes the program's `own` call for the descriptor that is watched, and records the change.
fn ctl_tracked(
    (epoll, epfd): (&Epoll, c_int),
    op: c_int,
    (sock, fd): (&'static Sock, c_int),
    wanted: Option<(u32, u64)>,
    own: impl Fn(c_int) -> c_int,
) -> c_int {
    let Some(guard) = lock(&epoll.lock, true) else { return own(fd) };
    match (op, epoll.item(sock, fd)) {
        (EPOLL_CTL_ADD, None) => {
            let done = own(fd);
            let (0, Some(wanted)) = (done, wanted) else { return done };
            if let Some(item) = add_item(epoll, ITEMS_MAX, sock, fd, wanted) {
                epoll_set::entry_changed(item, sock, epfd, &guard);
            } else {
                drop(guard);
                fallback::fall_back(sock, fd, Reason::Full);
                add_after_fallback(epoll, sock, fd, wanted);
            }
            done
        }
        (EPOLL_CTL_MOD | EPOLL_CTL_DEL, Some(item)) => {
            let watched = sock.fd_of(item.lane.load(Ordering::Relaxed) as usize, fd);
            let mut done = own(watched);
            // Another process that has the instance may have made the socket plain, and moved the
            // entry.
            if done < 0 && watched != fd && real::errno() == libc::ENOENT {
                done = own(fd);
                item.lane.store(0, Ordering::Release);
            }
            match (done, wanted) {
                (0, _) if op == EPOLL_CTL_DEL => {
                    epoll_set::unwatch_queues(item, sock, epfd, &guard);
                    epoll.remove_item(item, &guard);
                }
                (0, Some((events, data))) => {
                    item.events.store(events, Ordering::Relaxed);
                    item.data.store(data, Ordering::Relaxed);
                    item.edge_reported.store(0, Ordering::Relaxed);
                    epoll_set::entry_changed(item, sock, epfd, &guard);
                }
                _ => {}
            }
            done
        }
        // The entry exists, on another lane. A null event is the kernel's to refuse.
        (EPOLL_CTL_ADD, Some(item)) if wanted.is_some() && item.lane.load(Ordering::Relaxed) != 0 => {
            real::fail_with_errno(libc::EEXIST)
        }
        _ => own(fd),
    }
}

/// A socket for which there was no item has become plain. Adds an item all the same if its lanes
/// still hold datagrams, which must be reported.
#[cold]
fn add_after_fallback(epoll: &Epoll, sock: &Sock, fd: c_int, wanted: (u32, u64)) {
    if sock.shared().is_some_and(is_managed)
        && let Some(guard) = lock(&epoll.lock, true)
        && add_item(epoll, usize::MAX, sock, fd, wanted).is_none()
        && epoll.grow(&guard).is_some()
    {
        add_item(epoll, usize::MAX, sock, fd, wanted);
    }
}

/// True if an item is free, or its socket is the kernel's alone, for good.
fn is_free(item: &Item) -> bool {
    let Some(index) = item.sock.load(Ordering::Relaxed).checked_sub(1) else { return true };
    let sock = Sock::at(index);
    sock.generation.load(Ordering::Relaxed) != item.generation.load(Ordering::Relaxed)
        || item.lane.load(Ordering::Relaxed) == 0
            && sock.shared().is_some_and(|shared| shared.mode() == PLAIN && !is_managed(shared))
}

/// Records an entry in one of the first `top` items, and returns it; none if none of them is free.
fn add_item<'a>(
    epoll: &'a Epoll,
    top: usize,
    sock: &Sock,
    fd: c_int,
    (events, data): (u32, u64),
) -> Option<&'a Item> {
    let (at, item) = epoll.slots(top).enumerate().find(|(_, item)| is_free(item))?;
    if item.sock.load(Ordering::Relaxed) == 0 {
        epoll.count.fetch_add(1, Ordering::AcqRel);
    }
    item.generation.store(sock.generation.load(Ordering::Relaxed), Ordering::Relaxed);
    item.fd.store(fd, Ordering::Relaxed);
    item.lane.store(0, Ordering::Relaxed);
    item.queues.store(0, Ordering::Relaxed);
    item.events.store(events, Ordering::Relaxed);
    item.data.store(data, Ordering::Relaxed);
    item.edge_reported.store(0, Ordering::Relaxed);
    item.sock.store(sock.index() + 1, Ordering::Release);
    epoll.top.fetch_max(at as u32 + 1, Ordering::AcqRel);
    Some(item)
}
