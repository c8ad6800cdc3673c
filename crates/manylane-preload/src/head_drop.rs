//! Under overload the newest wins, for who asked for it (`--drop head`): of a kernel socket's queue
//! that is more than half full, the oldest datagrams are thrown away, down to a quarter of it.
//! `queues.rs` does the same with rings.
//!
//! How full a queue is says the memory that the kernel books for it (`SO_MEMINFO`), a system call:
//! a thread makes it for one receive in [`CHECK_INTERVAL`]. What is thrown away is received into
//! the program's own buffers, each over the one before, so that the program gets the last one, and
//! never nothing. The kernel may book up to a quarter of the buffer for what was taken just before:
//! that is reckoned off, at the least that it can be; and where others have emptied the queue
//! meanwhile, what was received last is the newest that there is.
//!
//! | what | stays |
//! |---|---|
//! | what the program has peeked at, or knows the size of | comes next |
//! | what was taken ahead (`prefetch.rs`), what is older than the lanes, other threads' lanes | as it is: their owners look at those |
//! | sockets that are plain | as they are: nothing of them is counted, and what is not counted is not thrown away |

use std::mem::{size_of_val, zeroed};
use std::sync::atomic::Ordering;

use libc::{EAGAIN, MSG_DONTWAIT, MSG_PEEK, MSG_WAITFORONE, c_int, msghdr, socklen_t};

use crate::calls::call;
use crate::recv_bufs::RecvBufs;
use crate::sock::{MULTI_LANE, Member, OBSERVING, SINGLE, Shared, Sock};
use crate::{identity, prefetch, queues, real, report, thread};

/// One receive of a thread in so many looks at its queue.
const CHECK_INTERVAL: u32 = 8;
/// The part of the buffer that is thrown away between two looks.
const RECHECK_DIVISOR: u32 = 16;
/// Memory that a queued datagram has at least.
const SKB_TRUESIZE_MIN: u32 = 512;

/// Receives for the program what is left when its lane's queue has been made a quarter full: the
/// answer of its call. None, and nothing is done, if it is not this receive's turn to look, or if
/// the queue is not more than half full.
#[inline]
pub(crate) fn receive(
    sock: &'static Sock,
    shared: &Shared,
    member: &Member,
    fd: c_int,
    flags: c_int,
    into: &RecvBufs,
) -> Option<isize> {
    let lane = match shared.mode() {
        SINGLE | OBSERVING => 0,
        MULTI_LANE => usize::try_from(member.lane.load(Ordering::Relaxed)).ok()?,
        _ => return None,
    };
    // With lanes, or queues, what was peeked at is remembered where it is found, and taken there.
    let is_straight = shared.mode() != MULTI_LANE && !queues::is_open(shared);
    if flags & MSG_PEEK != 0 {
        if is_straight {
            thread::set_peeked(sock, lane);
        }
        return None;
    }
    let unlooked = member.receives_since_check.load(Ordering::Relaxed);
    if unlooked.is_multiple_of(CHECK_INTERVAL) {
        // Its turn is kept for when nothing comes before the queue.
        if shared.drain_first.load(Ordering::Acquire) != 0 || prefetch::ready_lanes(sock, 1 << lane) != 0 {
            return None;
        }
    }
    member.receives_since_check.store(unlooked.wrapping_add(1), Ordering::Relaxed);
    if thread::has_peeked(sock) {
        if is_straight {
            thread::take_peeked(sock);
        }
        return None;
    }
    if !unlooked.is_multiple_of(CHECK_INTERVAL) {
        return None;
    }
    let errno = real::errno();
    let (answer, thrown) = drop_stale(sock, sock.fd_of(lane, fd), fd, flags, into);
    if thrown > 0 {
        report::record_dropped_stale(member, thrown);
    }
    if answer.is_none_or(|answer| answer >= 0) {
        real::set_errno(errno);
    }
    answer
}

/// From `fd`, where the program has `own`: the newest that is left, or the error that receiving
/// ended with, and how many were thrown away.
fn drop_stale(sock: &Sock, fd: c_int, own: c_int, flags: c_int, into: &RecvBufs) -> (Option<isize>, u64) {
    let Some((mut queued, limit)) = queue_memory(fd) else { return (None, 0) };
    if queued <= limit / 2 || fd == own && !identity::is_same_socket(sock, fd) {
        return (None, 0);
    }
    let (mut answer, mut thrown) = (None, 0);
    // Memory of what was received since the last look, and since the kernel last said less: at the
    // least.
    let (mut unlooked, mut unbooked) = (0, 0);
    let given = Lengths::load(into);
    // More may come all the time: no more than there was room for.
    for _ in 0..limit / SKB_TRUESIZE_MIN {
        let before = Lengths::load(into);
        given.write(into);
        let got = recv_one(fd, flags, into);
        if got < 0 && real::errno() == EAGAIN {
            before.write(into);
            break;
        }
        // Where receiving fails, the program is told, as it would have been with its next call.
        thrown += u64::from(answer.is_some());
        answer = Some(got);
        let least = SKB_TRUESIZE_MIN + u32::try_from(got).unwrap_or(0);
        (unlooked, unbooked) = (unlooked + least, unbooked + least);
        if unlooked >= limit / RECHECK_DIVISOR {
            unlooked = 0;
            let now = queue_memory(fd).map_or(0, |(now, _)| now);
            if now < queued {
                unbooked = 0;
            }
            queued = now;
        }
        if got < 0 || queued.saturating_sub(unbooked) <= limit / 4 {
            break;
        }
    }
    (answer, thrown)
}

/// Memory that waits in the queue of a kernel socket, and at which it is full. None before Linux
/// 4.12.
fn queue_memory(fd: c_int) -> Option<(u32, u32)> {
    // Of linux/sock_diag.h: the first is SK_MEMINFO_RMEM_ALLOC, the second SK_MEMINFO_RCVBUF.
    let mut words = [0_u32; 9];
    let mut len = size_of_val(&words) as socklen_t;
    let at = (&raw mut words).cast();
    let done = call::getsockopt(fd, libc::SOL_SOCKET, libc::SO_MEMINFO, at, &raw mut len);
    (done == 0).then_some((words[0], words[1]))
}

/// Receives one datagram, without waiting, as the program's call would: what that returns.
fn recv_one(fd: c_int, flags: c_int, into: &RecvBufs) -> isize {
    let flags = flags & !MSG_WAITFORONE | MSG_DONTWAIT;
    match *into {
        RecvBufs::Bytes { to, len, from, fromlen } => call::recvfrom(fd, to, len, flags, from, fromlen),
        RecvBufs::Iovecs { to, count } => {
            // SAFETY: zeroes are a value of a msghdr (no address, no control messages).
            let mut message: msghdr = unsafe { zeroed() };
            message.msg_iov = to.cast_mut();
            message.msg_iovlen = count;
            call::recvmsg(fd, &raw mut message, flags)
        }
        RecvBufs::Message(message) => call::recvmsg(fd, message, flags),
        RecvBufs::Messages { to, .. } => {
            // SAFETY: the program's array of one message at least, to which the kernel would write,
            // too.
            let (message, len) = unsafe { (&raw mut (*to).msg_hdr, &raw mut (*to).msg_len) };
            let got = call::recvmsg(fd, message, flags);
            if got < 0 {
                return got;
            }
            // SAFETY: as above.
            unsafe { len.write(got as u32) };
            1
        }
    }
}

/// What a receive reads and writes beside the buffers: how much room there is, and how much of it
/// was used.
#[derive(Clone, Copy)]
enum Lengths {
    None,
    Name(socklen_t),
    Message { name: socklen_t, control: usize, flags: c_int },
}

impl Lengths {
    fn load(into: &RecvBufs) -> Self {
        match *into {
            RecvBufs::Bytes { from, fromlen, .. } if !from.is_null() && !fromlen.is_null() => {
                // SAFETY: the program's length, which the kernel would read.
                Self::Name(unsafe { *fromlen })
            }
            _ => first_header(into).map_or(Self::None, |message| {
                // SAFETY: the program's message, which the kernel would read and write.
                let message = unsafe { &*message };
                Self::Message {
                    name: message.msg_namelen,
                    control: message.msg_controllen,
                    flags: message.msg_flags,
                }
            }),
        }
    }

    fn write(self, into: &RecvBufs) {
        match (self, *into) {
            // SAFETY: the program's length, which the kernel would write.
            (Self::Name(len), RecvBufs::Bytes { fromlen, .. }) => unsafe { *fromlen = len },
            (Self::Message { name, control, flags }, _) => {
                let Some(message) = first_header(into) else { return };
                // SAFETY: the program's message, which the kernel would read and write.
                let message = unsafe { &mut *message };
                message.msg_namelen = name;
                message.msg_controllen = control;
                message.msg_flags = flags;
            }
            _ => {}
        }
    }
}

/// The one message of a call, or its first one.
fn first_header(into: &RecvBufs) -> Option<*mut msghdr> {
    match *into {
        RecvBufs::Message(message) => Some(message),
        // SAFETY: the address of a part of the program's array of one message at least.
        RecvBufs::Messages { to, .. } => Some(unsafe { &raw mut (*to).msg_hdr }),
        _ => None,
    }
}
