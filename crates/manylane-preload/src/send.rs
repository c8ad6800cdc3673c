//! Sending: from the caller's own lane, which is bound to the same address and port.

use std::cell::Cell;
use std::mem::size_of;
use std::sync::atomic::Ordering;

use libc::{c_int, c_uint, c_void, iovec, mmsghdr, msghdr, size_t, sockaddr, socklen_t, ssize_t};
use manylane_sys::shim::Reason;

use crate::calls::call;
use crate::frames::Out;
use crate::gather::Reply;
use crate::receive::is_managed;
use crate::sock::{LANED, Member, Sock};
use crate::start::refuse;
use crate::{alone, gather, hidden, identity, inside, lanes, me, queues, report, start, table};

#[inline]
pub(crate) fn send(fd: c_int, from: *const c_void, len: size_t, flags: c_int) -> ssize_t {
    if let Some(alone) = alone::find(fd) {
        return alone.sends(|| call::send(fd, from, len, flags));
    }
    send_by_lane(fd, from, len, flags)
}

/// The long way.
#[inline(never)]
fn send_by_lane(fd: c_int, from: *const c_void, len: size_t, flags: c_int) -> ssize_t {
    let at = place(fd);
    if let Some(sent) = alone_now(&at) {
        return sent;
    }
    done(&at, call::send(at.of, from, len, flags))
}

#[inline]
pub(crate) fn sendto(
    fd: c_int,
    from: *const c_void,
    len: size_t,
    flags: c_int,
    to: *const sockaddr,
    tolen: socklen_t,
) -> ssize_t {
    if let Some(alone) = alone::find(fd) {
        return alone.sends(|| call::sendto(fd, from, len, flags, to, tolen));
    }
    sendto_by_lane(fd, from, len, flags, to, tolen)
}

/// The long way.
#[inline(never)]
fn sendto_by_lane(
    fd: c_int,
    from: *const c_void,
    len: size_t,
    flags: c_int,
    to: *const sockaddr,
    tolen: socklen_t,
) -> ssize_t {
    let at = place(fd);
    if at.frames {
        let piece = iovec { iov_base: from.cast_mut(), iov_len: len };
        if let Some(sent) = by_frames(&at, &Out::pieces(&raw const piece, 1, to, tolen), flags) {
            return done(&at, sent);
        }
    }
    if start::gathers() {
        let piece = iovec { iov_base: from.cast_mut(), iov_len: len };
        if let Some(sent) = with_others(&at, &Out::pieces(&raw const piece, 1, to, tolen), flags) {
            return sent;
        }
    }
    let (out, more) = at.way(to.is_null());
    done(&at, call::sendto(out, from, len, flags | more, to, tolen))
}

#[inline]
pub(crate) fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    if let Some(alone) = alone::find(fd) {
        return alone.sends(|| call::sendmsg(fd, message, flags));
    }
    sendmsg_by_lane(fd, message, flags)
}

/// The long way.
#[inline(never)]
fn sendmsg_by_lane(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    let at = place(fd);
    if at.member.is_none() {
        give_away(message);
    }
    if at.frames
        && let Some(out) = Out::message(message)
        && let Some(sent) = by_frames(&at, &out, flags)
    {
        return done(&at, sent);
    }
    queues::flush();
    if start::gathers()
        && let Some(sent) =
            Out::message(message).map_or_else(|| alone_now(&at), |out| with_others(&at, &out, flags))
    {
        return sent;
    }
    // SAFETY: null, or the program's message, which the kernel would read here, too.
    let (out, more) = at.way(unsafe { message.as_ref() }.is_none_or(|message| message.msg_name.is_null()));
    done(&at, call::sendmsg(out, message, flags | more))
}

pub(crate) fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
    let at = place(fd);
    if at.member.is_none() && !messages.is_null() {
        for nth in 0..count.min(1024) as usize {
            // SAFETY: the program's array of `count` messages.
            give_away(unsafe { &raw const (*messages.wrapping_add(nth)).msg_hdr });
        }
    }
    if let Some(sent) = alone_now(&at) {
        return sent as c_int;
    }
    let first =
        if at.frames && !messages.is_null() { many_by_frames(&at, messages, count, flags) } else { 0 };
    let mut sent = first as c_int;
    if first < count || count == 0 {
        queues::flush();
        let rest = messages.wrapping_add(first as usize);
        let more = call::sendmmsg(at.fd, rest, count - first, flags | at.more);
        sent = if more < 0 && first > 0 { sent } else { sent.saturating_add(more) };
    }
    if let (Some(member), true) = (at.member, sent > 0) {
        // SAFETY: the kernel has just filled the lengths of these messages of the program's array.
        let bytes = (0..sent as usize).map(|nth| u64::from(unsafe { (*messages.wrapping_add(nth)).msg_len }));
        report::sent(member, sent as u64, bytes.sum());
    }
    sent
}

#[inline]
pub(crate) fn write(fd: c_int, from: *const c_void, len: size_t) -> ssize_t {
    if let Some(alone) = alone::find(fd) {
        return alone.sends(|| call::write(fd, from, len));
    }
    write_by_lane(fd, from, len)
}

/// The long way.
#[inline(never)]
fn write_by_lane(fd: c_int, from: *const c_void, len: size_t) -> ssize_t {
    let at = place(fd);
    if let Some(sent) = alone_now(&at) {
        return sent;
    }
    done(&at, call::write(at.of, from, len))
}

pub(crate) fn writev(fd: c_int, from: *const iovec, count: c_int) -> ssize_t {
    let at = place(fd);
    if let Some(sent) = alone_now(&at) {
        return sent;
    }
    done(&at, call::writev(at.of, from, count))
}

/// Keeps a datagram to be sent with others, if that can be; else it goes alone, after what was kept. None: by the kernel, now.
fn with_others(at: &Place, out: &Out, flags: c_int) -> Option<isize> {
    if !inside::enter() {
        return None;
    }
    let sent = with_others_now(at, out, flags);
    inside::leave();
    sent
}

fn with_others_now(at: &Place, out: &Out, flags: c_int) -> Option<isize> {
    if let Some(errno) = at.owed {
        return alone_now(at).or(Some(refuse(errno) as isize));
    }
    if let (Some(sock), Some(member)) = (at.sock, at.member)
        && let Some(lane) = at.lane
        && let Some(shared) = sock.shared()
        && shared.owner_of(lane).is_some_and(|owner| std::ptr::eq(owner, member))
    {
        let reply = Reply { sock, shared, member, lane, fd: at.of, flags: flags | at.more };
        if let Some(sent) = gather::keep(&reply, out) {
            return Some(sent);
        }
        gather::flush();
        at.proves.set(out.len());
        return None;
    }
    gather::flush();
    None
}

/// What is to be sent goes by the kernel, by itself: after what was kept. An answer where an earlier one failed: the error.
#[inline]
fn alone_now(at: &Place) -> Option<isize> {
    gather::flush();
    at.owed.map(|errno| refuse(errno) as isize)
}

/// Sends a datagram as a frame, if that can be.
#[inline]
fn by_frames(at: &Place, out: &Out, flags: c_int) -> Option<isize> {
    let (sock, member) = at.sock.zip(at.member)?;
    let shared = sock.shared()?;
    if !inside::enter() {
        return None;
    }
    let sent = queues::send(sock, shared, member, out, flags);
    inside::leave();
    sent
}

/// Sends the first of several messages as frames, up to one that cannot go that way; how many.
fn many_by_frames(at: &Place, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_uint {
    for nth in 0..count {
        let message = messages.wrapping_add(nth as usize);
        // SAFETY: the program's array of `count` messages.
        let header = unsafe { &raw const (*message).msg_hdr };
        let Some(sent) = Out::message(header).and_then(|out| by_frames(at, &out, flags)) else { return nth };
        // SAFETY: as above; the kernel would write here.
        unsafe { (*message).msg_len = sent as c_uint };
    }
    count
}

/// Where a datagram leaves.
struct Place {
    /// There are queues, which it may leave by.
    frames: bool,
    sock: Option<&'static Sock>,
    fd: c_int,
    /// A lane's socket is never non-blocking: what the program set on its own is asked for with each call.
    more: c_int,
    member: Option<&'static Member>,
    /// The program's descriptor, or one that is not open if it has none of that number; the lane of the calling thread.
    of: c_int,
    lane: Option<usize>,
    /// Bytes of a datagram that could be kept, had one of its length gone without an error.
    proves: Cell<Option<usize>>,
    /// The error of a reply that the program takes for sent.
    owed: Option<c_int>,
}

impl Place {
    /// The descriptor and further flags for a call of the kernel. A socket with lanes is not connected: what has no address goes
    /// nowhere, unless the descriptor means something else by now, which the library does not know of.
    #[inline]
    fn way(&self, has_no_address: bool) -> (c_int, c_int) {
        if has_no_address { (self.of, 0) } else { (self.fd, self.more) }
    }
}

#[inline]
fn place(fd: c_int) -> Place {
    let found = hidden::sock(fd);
    let fd = found.err().unwrap_or(fd);
    let proves = Cell::new(None);
    let own = Place {
        fd,
        more: 0,
        member: None,
        frames: false,
        sock: None,
        of: fd,
        lane: None,
        proves,
        owed: None,
    };
    let Ok(sock) = found else { return own };
    let Some(shared) = sock.shared() else { return own };
    let own = Place { owed: gather::owed(shared), ..own };
    if !is_managed(shared) {
        return own;
    }
    // A thread that only sends has no lane, and needs none.
    let Some(member) = me::known(sock, shared) else { return own };
    let lane = member.lane.load(Ordering::Acquire);
    let own = Place { frames: queues::are_open(shared), sock: Some(sock), ..own };
    if shared.mode() != LANED || lane < 1 {
        let lane = if shared.mode() == LANED { usize::try_from(lane).ok() } else { None };
        return Place { member: Some(member), lane, ..own };
    }
    let nonblock = shared.nonblock.load(Ordering::Relaxed) != 0;
    let more = if nonblock { libc::MSG_DONTWAIT } else { 0 };
    Place { fd: sock.fd_of(lane as usize, fd), more, member: Some(member), lane: Some(lane as usize), ..own }
}

#[inline]
fn done(at: &Place, sent: isize) -> isize {
    if let (Some(member), true) = (at.member, sent >= 0) {
        report::sent(member, 1, sent as u64);
        if let (Some(len), Some(sock), Some(lane)) = (at.proves.get(), at.sock, at.lane) {
            gather::passed(sock, lane, len);
        }
    }
    sent
}

/// A message that carries descriptors to somebody else: sockets of ours among them become plain.
fn give_away(message: *const msghdr) {
    for_each_descriptor(message, |fd| {
        if table::sock(fd).is_some() && inside::enter() {
            if let Some(sock) = identity::sock(fd) {
                lanes::fall_back(sock, fd, Reason::Passed);
            }
            inside::leave();
        }
    });
}

/// The descriptors that a message of the program carries.
pub(crate) fn for_each_descriptor(message: *const msghdr, mut of: impl FnMut(c_int)) {
    // SAFETY: the program's message, which the kernel reads or has written; null is what it would refuse.
    let Some(message) = (unsafe { message.as_ref() }) else { return };
    if message.msg_control.is_null() || message.msg_controllen < size_of::<libc::cmsghdr>() {
        return;
    }
    // SAFETY: the control buffer is the program's, of the length it gives; the macros stay within it.
    unsafe {
        let mut at = libc::CMSG_FIRSTHDR(message);
        while let Some(control) = at.as_ref() {
            if (control.cmsg_level, control.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let bytes = control.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                let fds = libc::CMSG_DATA(control).cast::<c_int>();
                for nth in 0..(bytes / size_of::<c_int>()).min(253) {
                    of(fds.add(nth).read_unaligned());
                }
            }
            at = libc::CMSG_NXTHDR(message, control);
        }
    }
}
