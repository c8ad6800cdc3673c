//! Calls of the program after the library detached (`seccomp.rs`), while there are leftover
//! datagrams ([`LeftoverQueue`]): those are received and reported first. All else is the program's
//! own call. Nothing here makes a system call that the program does not make.

use std::sync::atomic::{AtomicBool, Ordering};

use libc::{
    EPOLL_CTL_ADD, FILE, MSG_ERRQUEUE, POLLIN, POLLRDNORM, c_int, c_uint, c_ulong, c_void, epoll_event,
    fd_set, nfds_t, pollfd, timeval,
};

use crate::base::pollfds::STACK_POLLFDS_MAX;
use crate::base::real::{self, call};
use crate::base::recv_bufs::RecvBufs;
use crate::fds::hidden_fds;
use crate::fds::table::{self, Entry};
use crate::lanes::epoll_set;
use crate::shared::leftovers::LeftoverQueue;
use crate::shared::sock::Sock;

static HAS_LEFTOVERS: AtomicBool = AtomicBool::new(false);

/// True if a socket has leftovers, or lanes that close with it.
#[inline]
pub(crate) fn has_leftovers() -> bool {
    HAS_LEFTOVERS.load(Ordering::Relaxed)
}

/// Updates [`has_leftovers`].
pub(crate) fn refresh() {
    let has_lanes = |sock: &Sock| sock.lane_fds().next().is_some();
    HAS_LEFTOVERS.store(any_datagrams() || Sock::in_use().any(has_lanes), Ordering::Release);
}

/// True if a socket has leftovers.
fn any_datagrams() -> bool {
    Sock::in_use().any(|sock| sock.leftovers().is_some_and(LeftoverQueue::has_datagrams))
}

/// The leftovers of `fd`, if it has any.
pub(crate) fn leftovers(fd: c_int) -> Option<&'static LeftoverQueue> {
    table::sock(fd).and_then(Sock::leftovers).filter(|left| left.has_datagrams())
}

/// True if `fd` is a socket with leftovers, or an instance that must report such a socket.
fn is_readable(fd: c_int) -> bool {
    leftovers(fd).is_some() || epoll_set::has_leftovers(fd)
}

/// Receives for the program: a leftover, or with its own call.
#[inline]
pub(crate) fn receive<'a>(
    fd: c_int,
    flags: c_int,
    into: impl FnOnce() -> RecvBufs<'a>,
    own: impl FnOnce() -> isize,
) -> isize {
    let left = if has_leftovers() { recv_leftover(fd, flags, &into()) } else { None };
    left.unwrap_or_else(own)
}

#[cold]
fn recv_leftover(fd: c_int, flags: c_int, into: &RecvBufs<'_>) -> Option<isize> {
    if flags & MSG_ERRQUEUE != 0 || into.is_invalid(0, flags) {
        return None;
    }
    let left = leftovers(fd)?;
    let answer = left.recv(flags, into);
    if !left.has_datagrams() {
        refresh();
    }
    answer
}

/// Waits with the program's own call, which must not block (`true`) if there are leftovers.
#[cold]
pub(crate) unsafe fn poll(fds: *mut pollfd, count: nfds_t, own: impl Fn(bool) -> c_int) -> c_int {
    const READABLE: i16 = POLLIN | POLLRDNORM;
    let has_some = |at: &pollfd| at.events & READABLE != 0 && is_readable(at.fd);
    // SAFETY: program arguments.
    let all = || (0..count as usize).map(|nth| unsafe { &mut *fds.wrapping_add(nth) });
    // As in `waiting/poll.rs`: the kernel may refuse a long array, and has to see it first.
    let is_long = count > STACK_POLLFDS_MAX as nfds_t;
    let may_have_some =
        if is_long { any_datagrams() } else { !fds.is_null() && all().any(|at| has_some(at)) };
    if fds.is_null() || !may_have_some {
        return own(false);
    }
    let answer = own(true);
    if answer < 0 {
        return answer;
    }
    all().filter(|at| has_some(at)).for_each(|at| at.revents |= at.events & READABLE);
    match all().filter(|at| at.revents != 0).count() {
        0 => own(false),
        ready => ready as c_int,
    }
}

/// [`poll`] for select(2) and pselect(2).
#[cold]
pub(crate) unsafe fn select(count: c_int, read: *mut fd_set, own: impl FnOnce(bool) -> c_int) -> c_int {
    let count = count.clamp(0, libc::FD_SETSIZE as c_int);
    // SAFETY: program arguments; a set has room for FD_SETSIZE descriptors.
    let is_set = |fd: c_int| !read.is_null() && unsafe { libc::FD_ISSET(fd, read) };
    let mut readable = [0_u64; libc::FD_SETSIZE / 64];
    for fd in (0..count).filter(|fd| is_set(*fd) && is_readable(*fd)) {
        readable[fd as usize / 64] |= 1 << (fd % 64);
    }
    let any = readable.iter().any(|word| *word != 0);
    let mut answer = own(any);
    for fd in (0..count).filter(|fd| readable[*fd as usize / 64] & 1 << (fd % 64) != 0) {
        if answer >= 0 && !is_set(fd) {
            // SAFETY: as above.
            unsafe { libc::FD_SET(fd, read) };
            answer += 1;
        }
    }
    answer
}

/// A timeout of zero for select(2), which writes the remaining time.
pub(crate) fn zero_timeval() -> timeval {
    timeval { tv_sec: 0, tv_usec: 0 }
}

pub(crate) unsafe fn ioctl(fd: c_int, request: c_ulong, arg: *mut c_void) -> c_int {
    let is_query = request == libc::FIONREAD && !arg.is_null();
    match leftovers(fd).filter(|_| is_query).and_then(LeftoverQueue::next_len) {
        Some(len) => {
            // SAFETY: program arguments.
            unsafe { arg.cast::<c_int>().write_unaligned(len as c_int) };
            0
        }
        // SAFETY: program arguments.
        None => unsafe { call::ioctl(fd, request, arg) },
    }
}

/// The number is about to mean something else.
fn forget(fd: c_int) {
    if table::entry(fd) != Entry::None {
        table::set(fd, Entry::None);
    }
}

/// Lanes keep the port in use while they are open: closes them with the program's descriptor, `by`
/// the same call. No lane moves any more. Not under the lock of hidden numbers, which takes other
/// system calls.
fn close_lanes(fd: c_int, by: impl Fn(c_int)) {
    let Some(sock) = table::sock(fd) else { return };
    for (lane, fd) in sock.lane_fds() {
        // Another thread may close the socket, too. The program may have closed all descriptors
        // that it did not open, and use the number.
        if sock.replace_lane_fd(lane, fd, None) && table::replace(fd, Entry::Hidden, Entry::None) {
            by(fd);
        }
    }
}

/// The program closes `fd`, or gives its number away.
pub(crate) fn before_close(fd: c_int) {
    close_lanes(fd, |lane| _ = call::close(lane));
    forget(fd);
}

pub(crate) fn close(fd: c_int) -> c_int {
    before_close(fd);
    call::close(fd)
}

pub(crate) unsafe fn fclose(file: *mut FILE) -> c_int {
    // SAFETY: program arguments.
    unsafe {
        before_close(libc::fileno(file));
        call::fclose(file)
    }
}

pub(crate) fn dup2(fd: c_int, to: c_int) -> c_int {
    dup_to(fd, to, call::dup2)
}

pub(crate) fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    dup_to(fd, to, |fd, to| call::dup3(fd, to, flags))
}

fn dup_to(fd: c_int, to: c_int, by: impl Fn(c_int, c_int) -> c_int) -> c_int {
    let done = by(fd, to);
    if done >= 0 && fd != to {
        // The filter may forbid close(2): the lanes' numbers become copies of one without a port.
        let errno = real::errno();
        // The program may have closed its number, and use it.
        let is_ours = |fd: &c_int| table::entry(*fd) == Entry::Hidden;
        if let Some(other) = hidden_fds::readable_fd_if_open().filter(is_ours) {
            close_lanes(to, |lane| _ = by(other, lane));
        }
        real::set_errno(errno);
        forget(to);
    }
    done
}

pub(crate) fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    const CLOEXEC: c_int = 1 << 2;
    if flags & CLOEXEC == 0 {
        before_close_range(first, last, |lane| _ = close_one_by_range(lane));
    }
    call::close_range(first, last, flags)
}

fn before_close_range(first: c_uint, last: c_uint, by: impl Fn(c_int)) {
    for (fd, _) in table::tracked(first, last) {
        close_lanes(fd, &by);
        forget(fd);
    }
}

fn close_one_by_range(fd: c_int) -> c_int {
    call::close_range(fd as c_uint, fd as c_uint, 0)
}

pub(crate) fn closefrom(first: c_int) {
    // As the C library, which closes one by one where close_range(2) fails.
    before_close_range(first.max(0) as c_uint, c_uint::MAX, |lane| {
        if close_one_by_range(lane) < 0 {
            call::close(lane);
        }
    });
    call::closefrom(first);
}

pub(crate) unsafe fn epoll_ctl(epfd: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
    // SAFETY: program arguments.
    unsafe {
        let done = call::epoll_ctl(epfd, op, fd, event);
        if done == 0 && op != EPOLL_CTL_ADD {
            epoll_set::ctl_after_detach(epfd, op, fd, event.as_ref());
        }
        done
    }
}
