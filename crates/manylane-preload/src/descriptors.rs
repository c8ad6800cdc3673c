//! Descriptors that come and go: what they mean follows them.

use std::sync::atomic::Ordering;

use libc::{c_int, c_uint, c_ulong, sockaddr, socklen_t};
use manylane_sys::shim::Reason;

use crate::calls::call;
use crate::lock::{Guard, lock};
use crate::sock::Sock;
use crate::start::refuse;
use crate::table::{self, Entry};
use crate::{epoll, gather, lanes, loan, me, open, options, real};

pub(crate) fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    let fd = call::socket(domain, kind, protocol);
    if fd < 0 {
        return fd;
    }
    let udp = matches!(domain, libc::AF_INET | libc::AF_INET6)
        && kind & !(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) == libc::SOCK_DGRAM
        && matches!(protocol, 0 | libc::IPPROTO_UDP);
    let entry = if udp && me::is_ours() { Sock::take() } else { None };
    remember(fd, entry.map_or(Entry::None, |sock| Entry::Sock(sock.index())));
    fd
}

/// A new descriptor means `entry`. What the number meant before was closed behind our back.
pub(crate) fn remember(fd: c_int, entry: Entry) {
    if me::is_ours() {
        means_now(fd, entry, None);
    }
}

fn means_now(fd: c_int, entry: Entry, guard: Option<Guard<'_>>) {
    let before = table::set(fd, entry);
    drop(guard);
    match before {
        Some(before) => forget(before),
        None => forget(entry),
    }
}

/// Before `fd` is closed, or its number comes to mean something else: no other thread is telling an epoll instance of it
/// (`epoll::move_to`) while this is held, nor finds it in the table after it has changed there.
fn hold_still(fd: c_int) -> Option<Guard<'static>> {
    match table::entry(fd) {
        Entry::Sock(index) => {
            let sock = Sock::at(index);
            if sock.watched.load(Ordering::Acquire) == 0 { None } else { lock(&sock.numbers, true) }
        }
        Entry::Epoll(index) => epoll::Epoll::at(index).hold_still(),
        Entry::None | Entry::Hidden => None,
    }
}

/// One descriptor less means `entry`.
fn forget(entry: Entry) {
    let errno = real::errno();
    match entry {
        Entry::Sock(index) => {
            let sock = Sock::at(index);
            if sock.refs.fetch_sub(1, Ordering::AcqRel) == 1 {
                epoll::forget_sock(sock);
                lanes::close(sock);
            }
        }
        Entry::Epoll(index) => epoll::Epoll::at(index).release(),
        Entry::None | Entry::Hidden => {}
    }
    real::set_errno(errno);
}

/// One descriptor more means what `fd` does.
fn add(fd: c_int, new: c_int, guard: Option<Guard<'_>>) {
    if !me::is_ours() {
        return;
    }
    let entry = table::entry(fd);
    match entry {
        Entry::Sock(index) => _ = Sock::at(index).refs.fetch_add(1, Ordering::AcqRel),
        Entry::Epoll(index) => epoll::Epoll::at(index).hold(),
        Entry::None | Entry::Hidden => {}
    }
    means_now(new, if entry == Entry::Hidden { Entry::None } else { entry }, guard);
}

pub(crate) fn bind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
    let sock = table::sock(fd).filter(|_| me::is_ours());
    if let Some(sock) = sock {
        lanes::before_bind(sock, fd);
    }
    let done = call::bind(fd, addr, len);
    if let (Some(sock), 0) = (sock, done) {
        lanes::bind(sock, fd);
    }
    done
}

pub(crate) fn connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
    gather::flush();
    if let Some(sock) = table::sock(fd) {
        lanes::fall_back(sock, fd, Reason::Connect);
    }
    call::connect(fd, addr, len)
}

pub(crate) fn shutdown(fd: c_int, how: c_int) -> c_int {
    gather::flush();
    if let Some(sock) = table::sock(fd) {
        lanes::fall_back(sock, fd, Reason::Shutdown);
    }
    call::shutdown(fd, how)
}

pub(crate) fn close(fd: c_int) -> c_int {
    gather::flush();
    match table::entry(fd) {
        Entry::None => call::close(fd),
        _ if !me::is_ours() => call::close(fd),
        // The program does not have this descriptor.
        Entry::Hidden => refuse(libc::EBADF),
        entry => {
            let guard = hold_still(fd);
            table::set(fd, Entry::None);
            drop(guard);
            forget(entry);
            call::close(fd)
        }
    }
}

pub(crate) fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    const UNSHARE: c_int = 1 << 1;
    const CLOEXEC: c_int = 1 << 2;
    if first > last || flags & !(UNSHARE | CLOEXEC) != 0 || !me::is_ours() {
        return call::close_range(first, last, flags);
    }
    gather::flush();
    // Around the lanes, which close with their sockets.
    let mut from = first;
    for (fd, entry) in table::known(first, last) {
        let fd = fd as c_uint;
        match entry {
            Entry::Hidden => {
                if fd > from && call::close_range(from, fd - 1, flags) < 0 {
                    return -1;
                }
                from = fd + 1;
            }
            entry if flags & CLOEXEC == 0 => {
                let guard = hold_still(fd as c_int);
                table::set(fd as c_int, Entry::None);
                drop(guard);
                forget(entry);
            }
            _ => {}
        }
    }
    if from > last { 0 } else { call::close_range(from, last, flags) }
}

pub(crate) fn closefrom(first: c_int) {
    let first = first.max(0) as c_uint;
    if close_range(first, c_uint::MAX, 0) == 0 {
        return;
    }
    // A kernel before 5.9: what is known here is closed here, the rest by the C library if no lane is in its way.
    let known = || table::known(first, c_uint::MAX);
    known().filter(|(_, entry)| *entry != Entry::Hidden).for_each(|(fd, _)| _ = close(fd));
    if known().next().is_none() {
        call::closefrom(first as c_int);
    }
}

pub(crate) fn dup(fd: c_int) -> c_int {
    let new = call::dup(fd);
    if new >= 0 {
        add(fd, new, None);
    }
    new
}

pub(crate) fn dup2(fd: c_int, to: c_int) -> c_int {
    gather::flush();
    if is_lent(to) {
        return refuse(libc::EBUSY);
    }
    make_room(fd, to);
    let guard = if fd == to || !me::is_ours() { None } else { hold_still(to) };
    let new = call::dup2(fd, to);
    if new >= 0 && fd != to {
        add(fd, to, guard);
    }
    new
}

/// Whether a number belongs to queues on loan, which cannot move.
fn is_lent(to: c_int) -> bool {
    table::entry(to) == Entry::Hidden && me::is_ours() && loan::has(to)
}

pub(crate) fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    gather::flush();
    if is_lent(to) {
        return refuse(libc::EBUSY);
    }
    make_room(fd, to);
    let guard = if me::is_ours() { hold_still(to) } else { None };
    let new = call::dup3(fd, to, flags);
    if new >= 0 {
        add(fd, to, guard);
    }
    new
}

/// The program wants a number that a lane has: the lane moves.
fn make_room(fd: c_int, to: c_int) {
    if fd == to || table::entry(to) != Entry::Hidden || !me::is_ours() {
        return;
    }
    for sock in Sock::in_use() {
        for (lane, at) in sock.lane_fds() {
            if at != to {
                continue;
            }
            let new = call::fcntl(to, libc::F_DUPFD_CLOEXEC, to as c_ulong + 1);
            if new >= 0 {
                table::set(new, Entry::Hidden);
                sock.set_lane_fd(lane, Some(new));
                table::set(to, Entry::None);
            }
        }
    }
}

pub(crate) fn fcntl(fd: c_int, command: c_int, arg: c_ulong) -> c_int {
    let entry = table::entry(fd);
    if entry == Entry::None {
        return call::fcntl(fd, command, arg);
    }
    if entry == Entry::Hidden && open::is_programs_business(command) {
        return refuse(libc::EBADF);
    }
    let done = call::fcntl(fd, command, arg);
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC if done >= 0 => add(fd, done, None),
        libc::F_SETFL if done >= 0 => {
            if let Some((sock, shared)) = table::sock(fd).and_then(|sock| Some((sock, sock.shared()?))) {
                options::nonblocking(fd, shared);
                if arg & libc::O_ASYNC as c_ulong != 0 {
                    lanes::fall_back(sock, fd, Reason::Ioctl);
                }
            }
        }
        _ => {}
    }
    done
}
