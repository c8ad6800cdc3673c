//! Sending from the caller's own lane, which is bound to the same address and port.

use std::cell::Cell;
use std::sync::atomic::Ordering;

use libc::{c_int, c_uint, c_void, iovec, mmsghdr, msghdr, size_t, sockaddr, socklen_t, ssize_t};
use manylane_ipc::report::Reason;

use crate::base::real::{call, fail_with_errno};
use crate::base::{quiesce, state};
use crate::batching::send_batch::{self, Reply};
use crate::fds::hidden_fds;
use crate::fds::sock_fds::is_managed;
use crate::lanes::{fallback, registry};
use crate::shared::sock::{MULTI_LANE, Member, Shared, Sock};
use crate::shared::{report, thread};
use crate::xdp::frames::TxDatagram;
use crate::xdp::queues;

pub(crate) unsafe fn send(fd: c_int, from: *const c_void, len: size_t, flags: c_int) -> ssize_t {
    // SAFETY: program arguments.
    send_plain(fd, |fd| unsafe { call::send(fd, from, len, flags) })
}

pub(crate) unsafe fn sendto(
    fd: c_int,
    from: *const c_void,
    len: size_t,
    flags: c_int,
    to: *const sockaddr,
    tolen: socklen_t,
) -> ssize_t {
    if is_own_call(fd) {
        // SAFETY: program arguments.
        return unsafe { call::sendto(fd, from, len, flags, to, tolen) };
    }
    let at = send_route(fd);
    if at.has_queues || state::is_send_batching() {
        let piece = iovec { iov_base: from.cast_mut(), iov_len: len };
        // SAFETY: program arguments.
        let datagram = unsafe { TxDatagram::from_iovec(&piece, to, tolen) };
        if at.has_queues
            && let Some(sent) = send_frame(&at, &datagram, flags)
        {
            return finish_send(&at, sent);
        }
        if state::is_send_batching()
            && let Some(sent) = send_batched(&at, &datagram, flags)
        {
            return sent;
        }
    }
    let (out, more) = at.fd_and_flags(to.is_null());
    // SAFETY: program arguments.
    finish_send(&at, unsafe { call::sendto(out, from, len, flags | more, to, tolen) })
}

pub(crate) unsafe fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    let at = send_route(fd);
    // SAFETY: program arguments.
    unsafe {
        if at.receiver.is_none() {
            mark_passed_fds(message);
        }
        if at.has_queues
            && let Some(out) = TxDatagram::from_msghdr(message)
            && let Some(sent) = send_frame(&at, &out, flags)
        {
            return finish_send(&at, sent);
        }
        queues::flush();
        if state::is_send_batching()
            && let Some(sent) = TxDatagram::from_msghdr(message)
                .map_or_else(|| flush_before_send(&at), |out| send_batched(&at, &out, flags))
        {
            return sent;
        }
        let (out, more) = at.fd_and_flags(message.as_ref().is_none_or(|message| message.msg_name.is_null()));
        finish_send(&at, call::sendmsg(out, message, flags | more))
    }
}

/// Max messages of one call.
const MESSAGES_MAX: c_uint = 1024;

pub(crate) unsafe fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
    let at = send_route(fd);
    // As the kernel.
    let count = count.min(MESSAGES_MAX);
    // SAFETY: program arguments.
    unsafe {
        if at.receiver.is_none() && !messages.is_null() {
            for nth in 0..count as usize {
                mark_passed_fds(&raw const (*messages.wrapping_add(nth)).msg_hdr);
            }
        }
        if let Some(sent) = flush_before_send(&at) {
            return sent as c_int;
        }
        let first =
            if at.has_queues && !messages.is_null() { send_frames(&at, messages, count, flags) } else { 0 };
        let mut sent = first as c_int;
        if first < count || count == 0 {
            queues::flush();
            let remaining = messages.wrapping_add(first as usize);
            let more = call::sendmmsg(at.fd, remaining, count - first, flags | at.extra_flags);
            sent = if more < 0 && first > 0 { sent } else { sent.saturating_add(more) };
        }
        if let (Some(Receiver { member, .. }), true) = (at.receiver, sent > 0) {
            let bytes = (0..sent as usize).map(|nth| u64::from((*messages.wrapping_add(nth)).msg_len));
            report::record_sent(member, sent as u64, bytes.sum());
        }
        sent
    }
}

pub(crate) unsafe fn write(fd: c_int, from: *const c_void, len: size_t) -> ssize_t {
    // SAFETY: program arguments.
    send_plain(fd, |fd| unsafe { call::write(fd, from, len) })
}

pub(crate) unsafe fn writev(fd: c_int, from: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: program arguments.
    send_plain(fd, |fd| unsafe { call::writev(fd, from, count) })
}

/// Sends with the program's `own` call, without an address.
#[inline]
fn send_plain(fd: c_int, own: impl FnOnce(c_int) -> isize) -> isize {
    if is_own_call(fd) {
        return own(fd);
    }
    let at = send_route(fd);
    if let Some(sent) = flush_before_send(&at) {
        return sent;
    }
    finish_send(&at, own(at.own_fd))
}

/// Queues a datagram to be sent with others, if possible; otherwise flushes those. None: the
/// caller must send it through the kernel now.
fn send_batched(at: &SendRoute, out: &TxDatagram<'_>, flags: c_int) -> Option<isize> {
    if let Some(errno) = at.reply_error {
        return flush_before_send(at).or(Some(fail_with_errno(errno)));
    }
    if let Some(Receiver { sock, shared, member }) = at.receiver
        && let Some(lane) = at.lane
        && shared.owner_of(lane).is_some_and(|owner| std::ptr::eq(owner, member))
    {
        let reply = Reply { sock, shared, member, lane, fd: at.own_fd, flags: flags | at.extra_flags };
        if let Some(sent) = send_batch::enqueue(&reply, out) {
            return Some(sent);
        }
        send_batch::flush();
        at.probe_len.set(out.len());
        return None;
    }
    send_batch::flush();
    None
}

/// The datagram is about to be sent by itself: flushes batched replies. Returns a result only if
/// an earlier reply failed: that error.
#[inline]
fn flush_before_send(at: &SendRoute) -> Option<isize> {
    send_batch::flush();
    at.reply_error.map(fail_with_errno)
}

/// Sends a datagram as a frame, if possible.
#[inline]
fn send_frame(at: &SendRoute, out: &TxDatagram<'_>, flags: c_int) -> Option<isize> {
    let Receiver { sock, shared, member } = at.receiver?;
    quiesce::run_inside(|| queues::send(sock, shared, member, out, flags)).flatten()
}

/// Sends messages as frames, up to the first that cannot be sent so. Returns their number.
unsafe fn send_frames(at: &SendRoute, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_uint {
    for nth in 0..count {
        let message = messages.wrapping_add(nth as usize);
        // SAFETY: program arguments.
        unsafe {
            let out = TxDatagram::from_msghdr(&raw const (*message).msg_hdr);
            let Some(sent) = out.and_then(|out| send_frame(at, &out, flags)) else { return nth };
            (*message).msg_len = sent as c_uint;
        }
    }
    count
}

/// The calling thread as a receiver of the socket.
#[derive(Clone, Copy)]
struct Receiver {
    sock: &'static Sock,
    shared: &'static Shared,
    member: &'static Member,
}

/// The route of a datagram that the program sends.
struct SendRoute {
    /// Queues are open, through which it may leave.
    has_queues: bool,
    /// None if the library does not manage the socket, or the thread only sends.
    receiver: Option<Receiver>,
    fd: c_int,
    /// A lane's socket is never non-blocking: if the program made its own so, each call needs
    /// MSG_DONTWAIT.
    extra_flags: c_int,
    /// The program's descriptor, or a closed one if the program has none of that number. `lane` is
    /// that of the calling thread.
    own_fd: c_int,
    lane: Option<usize>,
    /// Length of a datagram that could be batched if one as long had been sent without an error.
    probe_len: Cell<Option<usize>>,
    /// The error of a reply that the program believes to be sent.
    reply_error: Option<c_int>,
}

impl SendRoute {
    /// The descriptor and further flags for a call to the kernel. A socket with lanes is not
    /// connected, so that a call without an address fails, unless the descriptor means something
    /// else that the library has not seen. Such a call uses the program's own descriptor.
    #[inline]
    fn fd_and_flags(&self, has_no_address: bool) -> (c_int, c_int) {
        if has_no_address { (self.own_fd, 0) } else { (self.fd, self.extra_flags) }
    }
}

/// True if the library has nothing to do for a datagram that is sent by `fd`, and nothing to count.
#[inline]
fn is_own_call(fd: c_int) -> bool {
    let is_own = match hidden_fds::sock(fd).map(Sock::shared) {
        Ok(Some(shared)) => shared.mode() != MULTI_LANE && !queues::is_open(shared) && !report::is_open(),
        Ok(None) => true,
        Err(at) => at == fd,
    };
    is_own && !state::is_send_batching()
}

#[inline]
fn send_route(fd: c_int) -> SendRoute {
    let found = hidden_fds::sock(fd);
    let fd = found.err().unwrap_or(fd);
    let mut at = SendRoute {
        has_queues: false,
        receiver: None,
        fd,
        extra_flags: 0,
        own_fd: fd,
        lane: None,
        probe_len: Cell::new(None),
        reply_error: None,
    };
    let Ok(sock) = found else { return at };
    let Some(shared) = sock.shared() else { return at };
    at.reply_error = send_batch::take_reply_error(shared);
    if !is_managed(shared) {
        return at;
    }
    // A thread that only sends has no lane, and needs none.
    let Some(member) = thread::cached_member(sock, shared) else { return at };
    at.has_queues = queues::is_open(shared);
    at.receiver = Some(Receiver { sock, shared, member });
    if shared.mode() == MULTI_LANE {
        at.lane = member.own_lane();
    }
    if let Some(lane) = at.lane.filter(|lane| *lane > 0) {
        at.fd = sock.fd_of(lane, fd);
        at.extra_flags = if shared.nonblock.load(Ordering::Relaxed) != 0 { libc::MSG_DONTWAIT } else { 0 };
    }
    at
}

#[inline]
fn finish_send(at: &SendRoute, sent: isize) -> isize {
    if let (Some(Receiver { sock, member, .. }), true) = (at.receiver, sent >= 0) {
        report::record_sent(member, 1, sent as u64);
        if let (Some(len), Some(lane)) = (at.probe_len.get(), at.lane) {
            send_batch::record_sent_len(sock, lane, len);
        }
    }
    sent
}

/// Makes sockets of the program plain that a message passes to another process.
unsafe fn mark_passed_fds(message: *const msghdr) {
    // SAFETY: program arguments.
    unsafe { registry::for_each_fd(message, |fd| fallback::fall_back_fd(fd, Reason::Passed)) };
}
