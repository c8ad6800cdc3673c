//! Receiving: each call of the program becomes one operation, which is done on the caller's own
//! lane first.
//!
//! [`receive`] decides on which socket; each call of the C library says how to receive. With one
//! receiving thread, the operation is the program's own call on the program's own socket.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use libc::{EAGAIN, EBADF, EINTR, ENOTSOCK, MSG_DONTWAIT, MSG_ERRQUEUE, MSG_PEEK, MSG_TRUNC, MSG_WAITFORONE};
use libc::{c_int, c_uint, c_void, iovec, mmsghdr, msghdr, size_t, sockaddr, socklen_t, ssize_t, timespec};

use crate::base::real::{self, call};
use crate::base::recv_bufs::RecvBufs;
use crate::base::{quiesce, signals};
use crate::batching::{rx_coalesce, send_batch};
use crate::fds::sock_fds::is_managed;
use crate::fds::{hidden_fds, table};
use crate::group::{leasing, sampling};
use crate::lanes::create;
use crate::lanes::{entries, inherited, members, registry, single_receiver};
use crate::shared::report;
use crate::shared::sock::{MULTI_LANE, OBSERVING, PROVEN_RECEIVES_MIN, SINGLE, Shared, Sock};
use crate::transfer::detached;
use crate::transfer::recv_call::RecvCall;
use crate::xdp::queues;

pub(crate) unsafe fn recv(fd: c_int, to: *mut c_void, len: size_t, flags: c_int) -> ssize_t {
    // SAFETY: program arguments.
    let op = move |fd, more| unsafe { call::recv(fd, to, len, flags | more) };
    // SAFETY: program arguments.
    let into = move || unsafe { addressless_buf(to, len) };
    receive(fd, flags, into, op, |got| (1, if flags & MSG_TRUNC == 0 { got } else { got.min(len as isize) }))
}

pub(crate) unsafe fn recvfrom(
    fd: c_int,
    to: *mut c_void,
    len: size_t,
    flags: c_int,
    from: *mut sockaddr,
    fromlen: *mut socklen_t,
) -> ssize_t {
    // A receive without a datagram leaves the length unchanged, so that a second attempt finds the
    // program's value.
    // SAFETY: program arguments.
    let into = move || unsafe { RecvBufs::bytes(to, len, from, fromlen) };
    // SAFETY: program arguments.
    let op = move |fd, more| unsafe { call::recvfrom(fd, to, len, flags | more, from, fromlen) };
    receive(fd, flags, into, op, |got| (1, got))
}

pub(crate) unsafe fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: program arguments.
    unsafe {
        let op = move |fd, more| call::recvmsg(fd, message, flags | more);
        let got = receive(fd, flags, move || RecvBufs::message(message), op, |got| (1, got));
        if got >= 0 && table::sock(fd).is_none() {
            registry::clear_passed_fds(message);
        }
        got
    }
}

pub(crate) unsafe fn read(fd: c_int, to: *mut c_void, len: size_t) -> ssize_t {
    // SAFETY: program arguments.
    unsafe {
        let found = hidden_fds::sock(fd);
        if len == 0 || len > isize::MAX as usize || found.is_err() {
            send_batch::flush();
            return call::read(found.err().unwrap_or(fd), to, len);
        }
        // The program's own call on its own descriptor, which may no longer be a socket.
        let op = |at, more| {
            if at == fd && more == 0 { call::read(at, to, len) } else { call::recv(at, to, len, more) }
        };
        receive(fd, 0, || addressless_buf(to, len), op, |got| (1, got))
    }
}

pub(crate) unsafe fn readv(fd: c_int, to: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: program arguments; zeroes are a value of a msghdr (no address, no control messages).
    unsafe {
        let found = hidden_fds::sock(fd);
        if found.is_err() || !(1..=1024).contains(&count) || is_empty(to, count as usize) {
            send_batch::flush();
            return call::readv(found.err().unwrap_or(fd), to, count);
        }
        let op = |at, more| {
            if at == fd && more == 0 {
                return call::readv(at, to, count);
            }
            let mut message: msghdr = std::mem::zeroed();
            message.msg_iov = to.cast_mut();
            message.msg_iovlen = count as usize;
            call::recvmsg(at, &raw mut message, more)
        };
        receive(fd, 0, || RecvBufs::iovecs(to, count as usize), op, |got| (1, got))
    }
}

/// True if the iovecs have no room: readv(2), like read(2), then takes no datagram.
unsafe fn is_empty(pieces: *const iovec, count: usize) -> bool {
    // SAFETY: program arguments.
    pieces.is_null() || (0..count).all(|nth| unsafe { (*pieces.wrapping_add(nth)).iov_len == 0 })
}

/// A buffer without an address.
unsafe fn addressless_buf<'call>(to: *mut c_void, len: size_t) -> RecvBufs<'call> {
    // SAFETY: program arguments.
    unsafe { RecvBufs::bytes(to, len, std::ptr::null_mut(), std::ptr::null_mut()) }
}

pub(crate) unsafe fn recv_chk(
    fd: c_int,
    to: *mut c_void,
    len: size_t,
    room: size_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: program arguments.
    unsafe { if len > room { call::__recv_chk(fd, to, len, room, flags) } else { recv(fd, to, len, flags) } }
}

pub(crate) unsafe fn recvfrom_chk(
    fd: c_int,
    to: *mut c_void,
    len: size_t,
    room: size_t,
    flags: c_int,
    from: *mut sockaddr,
    fromlen: *mut socklen_t,
) -> ssize_t {
    // SAFETY: program arguments.
    unsafe {
        if len > room {
            return call::__recvfrom_chk(fd, to, len, room, flags, from, fromlen);
        }
        recvfrom(fd, to, len, flags, from, fromlen)
    }
}

pub(crate) unsafe fn read_chk(fd: c_int, to: *mut c_void, len: size_t, room: size_t) -> ssize_t {
    // SAFETY: program arguments.
    unsafe { if len > room { call::__read_chk(fd, to, len, room) } else { read(fd, to, len) } }
}

pub(crate) unsafe fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    let found = managed(fd);
    let is_ours = found.is_ok() || detached::has_leftovers() && detached::leftovers(fd).is_some();
    // SAFETY: program arguments.
    let limit = if is_ours { unsafe { timeout.as_ref() } } else { None };
    if !is_ours || flags & MSG_ERRQUEUE != 0 || count == 0 || limit.is_some_and(is_invalid_timeout) {
        send_batch::flush();
        // SAFETY: program arguments.
        let got = unsafe { call::recvmmsg(found.err().unwrap_or(fd), messages, count, flags, timeout) };
        if got > 0 && table::sock(fd).is_none() {
            // SAFETY: program arguments: the kernel has just filled these messages.
            let clear = |nth| unsafe { registry::clear_passed_fds(&(*messages.wrapping_add(nth)).msg_hdr) };
            (0..got as usize).for_each(clear);
        }
        return got;
    }
    // The kernel checks the time only after a datagram; so does this.
    let is_over = limit.is_some_and(|time| time.tv_sec == 0 && time.tv_nsec == 0);
    let count = if is_over { 1 } else { count };
    let limit = limit
        .and_then(|time| Instant::now().checked_add(Duration::new(time.tv_sec as u64, time.tv_nsec as u32)));
    let mut done: c_uint = 0;
    loop {
        // The remaining messages.
        let (at, remaining) = (messages.wrapping_add(done as usize), count - done);
        // SAFETY: program arguments.
        let op = |fd, more| unsafe {
            // The kernel's own timeout is not used: on one lane it could wait past it.
            let wait_for_one = if more & MSG_DONTWAIT == 0 { MSG_WAITFORONE } else { 0 };
            call::recvmmsg(fd, at, remaining, flags | more | wait_for_one, std::ptr::null_mut()) as isize
        };
        let more = if done > 0 && flags & MSG_WAITFORONE != 0 { MSG_DONTWAIT } else { 0 };
        // SAFETY: program arguments.
        let got = unsafe {
            let into = || RecvBufs::messages(at, remaining as usize);
            receive(fd, flags | more, into, |fd, extra| op(fd, extra | more), |got| sum_messages(at, got))
        };
        if got < 0 {
            return if done > 0 { done as c_int } else { -1 };
        }
        done += got as c_uint;
        let left = limit.map(|limit| limit.saturating_duration_since(Instant::now()));
        // SAFETY: program arguments.
        if let (Some(left), Some(timeout)) = (left, unsafe { timeout.as_mut() }) {
            (timeout.tv_sec, timeout.tv_nsec) = (left.as_secs() as i64, left.subsec_nanos().into());
        }
        let late = left.is_some_and(|left| left.is_zero());
        // Without a wait, the datagrams of one lane are enough: the next call polls the others.
        let nonblock =
            (flags & MSG_DONTWAIT) != 0 || table::sock(fd).and_then(Sock::shared).is_some_and(is_nonblocking);
        if done >= count || late || nonblock || flags & MSG_WAITFORONE != 0 {
            return done as c_int;
        }
    }
}

/// True if the kernel refuses the timeout.
fn is_invalid_timeout(time: &timespec) -> bool {
    time.tv_sec < 0 || !(0..1_000_000_000).contains(&time.tv_nsec)
}

/// Datagrams and bytes of the first `got` messages, which the kernel has just filled.
unsafe fn sum_messages(messages: *const mmsghdr, got: isize) -> (u64, isize) {
    // SAFETY: program arguments.
    let len = |nth| u64::from(unsafe { (*messages.wrapping_add(nth)).msg_len });
    let bytes: u64 = (0..got.max(0) as usize).map(len).sum();
    (got as u64, bytes as isize)
}

fn is_nonblocking(shared: &'static Shared) -> bool {
    shared.nonblock.load(Ordering::Relaxed) != 0
}

/// The socket behind `fd`, if the library manages it; else the descriptor to pass to the kernel.
#[inline]
fn managed(fd: c_int) -> Result<(&'static Sock, &'static Shared), c_int> {
    let sock = hidden_fds::sock(fd)?;
    let Some(shared) = sock.shared() else { return Err(fd) };
    if is_managed(shared) {
        return Ok((sock, shared));
    }
    inherited::report_inherited(shared, fd);
    Err(fd)
}

/// The program's own call failed: true if the library has to receive. The bound that waits have
/// since a second receiver joined may have ended it, or the descriptor was closed unseen. The bound
/// is set before the mode changes, and cleared after the socket became plain.
#[cold]
fn should_retry(sock: &Sock, shared: &Shared, fd: c_int) -> bool {
    let has_others = || shared.bounded.load(Ordering::Acquire) != 0 || shared.mode() != SINGLE;
    match real::errno() {
        EAGAIN => has_others(),
        EINTR => has_others() && signals::should_restart() && shared.timeout_us.load(Ordering::Relaxed) == 0,
        _ => quiesce::run_inside(|| is_stale_fd(sock, fd)).unwrap_or(false),
    }
}

/// A receive failed: true if the descriptor was closed unseen, and is closed now or means
/// something else.
fn is_stale_fd(sock: &Sock, fd: c_int) -> bool {
    matches!(real::errno(), EBADF | ENOTSOCK) && !entries::revalidate(sock, fd)
}

/// Receives for the program: with its own call, if the calling thread is the socket's single
/// receiver. `op` receives on a descriptor, with further flags. `into` describes the buffers.
/// `size` returns the datagrams and bytes of a result.
#[inline]
fn receive<'a>(
    fd: c_int,
    flags: c_int,
    into: impl Fn() -> RecvBufs<'a>,
    op: impl Fn(c_int, c_int) -> isize,
    size: impl Fn(isize) -> (u64, isize),
) -> isize {
    let mut found = managed(fd);
    if let Ok((sock, shared)) = found {
        send_batch::before_receive(sock);
        if let Some(member) = single_receiver::start_wait(sock, shared) {
            let answer = op(fd, 0);
            member.finish_wait();
            if answer >= 0 && flags & (MSG_PEEK | MSG_ERRQUEUE) == 0 {
                let (datagrams, bytes) = size(answer);
                report::record_received(member, datagrams, bytes.max(0) as u64, false, false);
            }
            if answer >= 0 || !should_retry(sock, shared, fd) {
                return answer;
            }
            // The number may have come to mean something else.
            found = managed(fd);
        }
    }
    match found {
        Ok(found) => receive_by_library(found, (fd, flags), into, op, size),
        Err(at) => {
            send_batch::flush();
            detached::receive(fd, flags, into, || op(at, 0))
        }
    }
}

/// [`receive`] for all but a single receiver. Not inlined, so that a single receiver's calls do not
/// save the registers and reserve the stack that this needs.
#[inline(never)]
fn receive_by_library<'a>(
    (sock, shared): (&'static Sock, &'static Shared),
    (fd, flags): (c_int, c_int),
    into: impl Fn() -> RecvBufs<'a>,
    op: impl Fn(c_int, c_int) -> isize,
    size: impl Fn(isize) -> (u64, isize),
) -> isize {
    if flags & MSG_ERRQUEUE != 0 || into().is_invalid(0, flags) {
        send_batch::flush();
        return detached::receive(fd, flags, into, || op(fd, 0));
    }
    quiesce::wait_inside(|| managed_receive(sock, shared, (fd, flags, into()), &op, size))
        .unwrap_or_else(|| detached::receive(fd, flags, into, || op(fd, 0)))
}

/// Receives on a socket that the library manages. None: the library has detached.
#[inline]
fn managed_receive<Op: Fn(c_int, c_int) -> isize>(
    sock: &'static Sock,
    shared: &Shared,
    (fd, flags, into): (c_int, c_int, RecvBufs<'_>),
    op: &Op,
    size: impl Fn(isize) -> (u64, isize),
) -> Option<isize> {
    let Some(member) = members::member(sock, shared, fd) else {
        return Some(quiesce::run_outside(|| op(fd, 0)));
    };
    sampling::after_work(sock, shared, member);
    member.beat();
    let call = RecvCall::new(sock, shared, member, (fd, flags, into), op);
    let (answer, helped) = call.run()?;
    if quiesce::is_detaching() {
        return Some(answer);
    }
    if answer < 0 && is_stale_fd(sock, fd) {
        return Some(quiesce::run_outside(|| op(fd, 0)));
    }
    if answer >= 0 && flags & MSG_PEEK == 0 {
        let (datagrams, bytes) = size(answer);
        report::record_received(member, datagrams, bytes.max(0) as u64, helped, call.was_prefetched.get());
        let receives = member.receives.load(Ordering::Relaxed);
        if receives < PROVEN_RECEIVES_MIN {
            member.receives.store(receives + 1, Ordering::Relaxed);
        }
        if receives + 1 >= PROVEN_RECEIVES_MIN && leasing::is_pending(shared) {
            create::open_queues(sock, shared, fd);
        }
        let mode = shared.mode();
        if mode == MULTI_LANE || queues::is_open(shared) {
            rx_coalesce::add_received(datagrams);
        }
        if mode == MULTI_LANE {
            sampling::before_work(shared, member);
        }
        let without = mode == MULTI_LANE && member.lane.load(Ordering::Relaxed) < 0;
        if (mode == OBSERVING || without)
            && receives + 1 >= PROVEN_RECEIVES_MIN
            && create::should_try_create(shared, member)
        {
            create::try_create(sock, shared, fd);
        }
    }
    // Woken for a datagram that another thread got: this thread came back all the same.
    if answer < 0 && shared.mode() == OBSERVING && real::errno() == EAGAIN {
        let receives = member.receives.load(Ordering::Relaxed);
        if receives < PROVEN_RECEIVES_MIN {
            member.receives.store(receives + 1, Ordering::Relaxed);
        }
    }
    Some(answer)
}
