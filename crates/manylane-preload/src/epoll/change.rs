//! Instances that are made; entries that are added, changed and moved from lane to lane.

use std::ptr;
use std::sync::atomic::Ordering;

use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLLET, EPOLLONESHOT, c_int, epoll_event};
use manylane_sys::shim::Reason;

use super::{Epoll, Item, MAX_ITEMS, nested};
use crate::calls::call;
use crate::lock::lock;
use crate::receive::is_managed;
use crate::sock::{PLAIN, Sock};
use crate::table::{self, Entry};
use crate::{descriptors, hidden_fds, identity, lanes, prefetch, real, thread};

pub(crate) fn epoll_create(size: c_int) -> c_int {
    register_instance(call::epoll_create(size))
}

pub(crate) fn epoll_create1(flags: c_int) -> c_int {
    register_instance(call::epoll_create1(flags))
}

fn register_instance(fd: c_int) -> c_int {
    if fd >= 0 && thread::is_own_process() {
        descriptors::register(fd, Epoll::alloc().map_or(Entry::None, Entry::Epoll));
    }
    fd
}

pub(crate) fn epoll_ctl(epfd: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
    let (epfd, fd) = (hidden_fds::kernel_fd(epfd), hidden_fds::kernel_fd(fd));
    let entry = table::entry(fd);
    if entry == Entry::None {
        return call::epoll_ctl(epfd, op, fd, event);
    }
    if let (Entry::Epoll(_), EPOLL_CTL_ADD) = (entry, op) {
        if let Some(outer) = table::epoll(epfd) {
            outer.has_nested.store(1, Ordering::Relaxed);
        }
        nested::mark_nested(fd);
    }
    let (Entry::Sock(index), true) = (entry, thread::is_own_process()) else {
        return call::epoll_ctl(epfd, op, fd, event);
    };
    let sock = Sock::at(index);
    if !identity::revalidate(sock, fd) {
        return call::epoll_ctl(epfd, op, fd, event);
    }
    let Some(epoll) = table::epoll(epfd) else {
        // An instance from before the start: it is not known which thread waits on it.
        let done = call::epoll_ctl(epfd, op, fd, event);
        if done == 0 && op == EPOLL_CTL_ADD {
            lanes::fall_back(sock, fd, Reason::SharedEpoll);
        }
        return done;
    };
    // SAFETY: null, or the program's event, which the kernel would read here, too.
    let wanted = unsafe { event.as_ref() }.map(|event| (event.events, event.u64));
    if let (Some((events, _)), EPOLL_CTL_ADD | EPOLL_CTL_MOD) = (wanted, op) {
        // The kernel does not say whether it has fired: such an entry cannot move from lane to
        // lane.
        if events & EPOLLONESHOT as u32 != 0 {
            lanes::fall_back(sock, fd, Reason::Events);
        } else if events & EPOLLET as u32 != 0
            && let Some(shared) = sock.shared()
        {
            // The kernel reports an edge for its own queue only: nothing may be prefetched from
            // it.
            prefetch::disable(shared, fd, Reason::NoPrefetchEdges);
        }
        if epoll.nested.load(Ordering::Acquire) != 0 {
            lanes::fall_back(sock, fd, Reason::NestedEpoll);
        }
        // A lane has one descriptor: an instance cannot watch it twice, as it can watch two
        // descriptors of a socket.
        if op == EPOLL_CTL_ADD && epoll.has_other_fd(sock, fd) {
            lanes::fall_back(sock, fd, Reason::Events);
        }
    }
    sock.in_epoll.store(1, Ordering::Release);
    nested::remove_placeholder(epoll, epfd);
    let done = ctl_tracked((epoll, epfd), op, (sock, fd), (event, wanted));
    // Another thread may have started to wait for the instance since the check above.
    if epoll.nested.load(Ordering::SeqCst) != 0 {
        if op != EPOLL_CTL_DEL {
            lanes::fall_back(sock, fd, Reason::NestedEpoll);
        }
        nested::refresh(epoll, epfd);
    }
    done
}

/// Makes the program's call, and records the change.
fn ctl_tracked(
    (epoll, epfd): (&Epoll, c_int),
    op: c_int,
    (sock, fd): (&'static Sock, c_int),
    (event, wanted): (*mut epoll_event, Option<(u32, u64)>),
) -> c_int {
    let Some(guard) = lock(&epoll.lock, true) else { return call::epoll_ctl(epfd, op, fd, event) };
    match (op, epoll.item(sock, fd)) {
        (EPOLL_CTL_ADD, None) => {
            let done = call::epoll_ctl(epfd, op, fd, event);
            if let (0, Some(wanted)) = (done, wanted)
                && !add_item(epoll, MAX_ITEMS, sock, fd, wanted)
            {
                drop(guard);
                lanes::fall_back(sock, fd, Reason::Full);
                add_after_fallback(epoll, sock, fd, wanted);
            }
            done
        }
        (EPOLL_CTL_MOD | EPOLL_CTL_DEL, Some(item)) => {
            let watched = sock.fd_of(item.lane.load(Ordering::Relaxed) as usize, fd);
            let done = call::epoll_ctl(epfd, op, watched, event);
            match (done, wanted) {
                (0, _) if op == EPOLL_CTL_DEL => epoll.remove_item(item, &guard),
                (0, Some((events, data))) => {
                    item.events.store(events, Ordering::Relaxed);
                    item.data.store(data, Ordering::Relaxed);
                    item.edge_reported.store(0, Ordering::Relaxed);
                }
                _ => {}
            }
            done
        }
        // The entry exists, on another lane.
        (EPOLL_CTL_ADD, Some(item)) if item.lane.load(Ordering::Relaxed) != 0 => {
            real::set_errno(libc::EEXIST);
            -1
        }
        _ => call::epoll_ctl(epfd, op, fd, event),
    }
}

/// The program changed or removed an entry after the library detached: leftovers are reported as
/// the entry now says.
pub(crate) fn ctl_after_detach(epfd: c_int, op: c_int, fd: c_int, event: *const epoll_event) {
    let Some((epoll, sock)) = table::epoll(epfd).zip(table::sock(fd)) else { return };
    let Some(item) = epoll.item(sock, fd) else { return };
    // SAFETY: null, or the program's event, which the kernel has just read.
    match unsafe { event.as_ref() } {
        Some(event) if op == EPOLL_CTL_MOD => {
            item.events.store(event.events, Ordering::Relaxed);
            item.data.store(event.u64, Ordering::Relaxed);
        }
        _ => item.sock.store(0, Ordering::Release),
    }
}

/// A socket has become plain: entries that watch its lanes move to the socket itself, also while
/// their thread sleeps. (Threads of other processes move their entries when they return from a
/// slice.)
pub(crate) fn handle_fallback(sock: &Sock) {
    for epoll in Epoll::all().iter().filter(|epoll| epoll.used.load(Ordering::Acquire) == 1) {
        let moved = |item: &Item| item.lane.load(Ordering::Relaxed) != 0;
        if !epoll.items().any(|(item, at)| ptr::eq(at, sock) && moved(item)) {
            continue;
        }
        let Some(epfd) = epoll.any_fd() else { continue };
        for (item, at) in epoll.items().filter(|(_, at)| ptr::eq(*at, sock)) {
            move_to_lane(epoll, item, at, epfd, 0);
        }
    }
}

/// A socket for which there was no item has become plain. Adds an item all the same if its lanes
/// still hold datagrams, which must be reported.
#[cold]
fn add_after_fallback(epoll: &Epoll, sock: &Sock, fd: c_int, wanted: (u32, u64)) {
    if sock.shared().is_some_and(is_managed)
        && let Some(guard) = lock(&epoll.lock, true)
        && !add_item(epoll, usize::MAX, sock, fd, wanted)
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

/// Records an entry in one of the first `top` items; false if none of them is free.
fn add_item(epoll: &Epoll, top: usize, sock: &Sock, fd: c_int, (events, data): (u32, u64)) -> bool {
    let Some((at, item)) = epoll.slots(top).enumerate().find(|(_, item)| is_free(item)) else { return false };
    if item.sock.load(Ordering::Relaxed) == 0 {
        epoll.count.fetch_add(1, Ordering::AcqRel);
    }
    item.generation.store(sock.generation.load(Ordering::Relaxed), Ordering::Relaxed);
    item.fd.store(fd, Ordering::Relaxed);
    item.lane.store(0, Ordering::Relaxed);
    item.events.store(events, Ordering::Relaxed);
    item.data.store(data, Ordering::Relaxed);
    item.edge_reported.store(0, Ordering::Relaxed);
    item.sock.store(sock.index() + 1, Ordering::Release);
    epoll.top.fetch_max(at as u32 + 1, Ordering::AcqRel);
    epoll.clear_fast_path();
    true
}

/// Moves an entry to another lane. Level or edge, the kernel reports datagrams already there.
pub(super) fn move_to_lane(epoll: &Epoll, item: &Item, sock: &Sock, epfd: c_int, lane: usize) {
    let Some(_guard) = lock(&epoll.lock, true) else { return };
    let before = item.lane.load(Ordering::Relaxed) as usize;
    // Another thread that waits on the instance may have moved or removed the entry.
    if before == lane || item.sock.load(Ordering::Acquire) != sock.index() + 1 {
        return;
    }
    // Another thread may close a descriptor of the instance or the socket, and its number may get
    // another meaning. It has to wait for this lock, or has done so before.
    let Some(_numbers) = lock(&sock.fd_lock, true) else { return };
    if table::entry(epfd) != Entry::Epoll(epoll.index()) {
        return;
    }
    let added = item.fd.load(Ordering::Relaxed);
    // The program may have closed the descriptor that it added, and use another one for the same
    // socket.
    let is_open = table::entry(added) == Entry::Sock(sock.index());
    let Some(fd) = (if is_open { Some(added) } else { lanes::any_fd(sock) }) else { return };
    let from = sock.fd_of(before, fd);
    let to = sock.fd_of(lane, fd);
    let mut event =
        epoll_event { events: item.events.load(Ordering::Relaxed), u64: item.data.load(Ordering::Relaxed) };
    // Add first: watching both for a moment reports too much, not too little.
    if call::epoll_ctl(epfd, EPOLL_CTL_ADD, to, &raw mut event) == 0 || real::errno() == libc::EEXIST {
        call::epoll_ctl(epfd, EPOLL_CTL_DEL, from, &raw mut event);
        item.lane.store(lane as u32, Ordering::Release);
    }
}
