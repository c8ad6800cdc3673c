//! Replies that are sent together: replies to prefetched datagrams are kept, and sent with one
//! system call when the thread has no more prefetched datagrams to answer. For kernel sockets,
//! wherever `prefetch/` is in use.
//!
//! An *outbox* (`outbox.rs`) belongs to a lane, beside its prefetch, in memory that is shared with
//! all processes forked later. A reply is kept there only while the prefetch has more datagrams
//! for the same thread ([`enqueue`]). So replies are sent at the latest with the reply to the last
//! prefetched datagram, or when the outbox is full, or before the thread does anything but receive
//! and reply ([`flush`]): before it waits, sends otherwise or elsewhere, closes, sleeps, forks or
//! ends.
//!
//! # Senders
//!
//! The owner of the lane, in a send of its own. A thread that changes what sending means (falling
//! back, options, `close`, the end of the process) first sends what all threads have kept
//! ([`flush_all`]). A thread that waits on another lane checks, after each slice, whether an owner
//! has neither received nor sent since the check before ([`flush_overdue`]): such an owner
//! computes, blocks where the library does not see it, or is dead. That is the bound in time; no
//! clock is read for it.
//!
//! `holder` is a lock by liveness token, as in `lock.rs`: the lock of a dead thread counts as
//! free. Its holder writes or sends. If a thread dies while it sends, the replies of that call are
//! dropped, because some may have left, and none leaves twice.
//!
//! # What is never kept
//!
//! A datagram that could fail, as far as that is known: anything but a plain datagram to the
//! sender of a datagram that was just handed out, and anything longer than the lane has sent
//! without an error. If a kept one fails all the same, it is sent again by itself. If that fails,
//! too, it is counted (`reply-failed`), the program's next send on the socket reports the error,
//! and the socket keeps no more replies.

use std::cell::Cell;
use std::sync::atomic::Ordering;

use libc::{MSG_DONTWAIT, MSG_NOSIGNAL, c_int};

use crate::base::signals::SignalMask;
use crate::base::{quiesce, real, state};
use crate::batching::outbox::Outbox;
use crate::batching::prefetch::{self, PREFETCH_MAX};
use crate::fds::sock_fds;
use crate::fds::table::{self, Entry};
use crate::shared::lock::UNTRACKED_HOLDER;
use crate::shared::sock::{MULTI_LANE, Member, Shared, Sock};
use crate::shared::{report, thread};
use crate::xdp::frames::TxDatagram;
use crate::xdp::queues;

/// The outbox with the calling thread's queued replies.
struct Pending {
    /// Index of the socket plus 1; 0 if no reply is queued.
    sock: Cell<u32>,
    generation: Cell<u32>,
    lane: Cell<usize>,
    /// The program's descriptor.
    fd: Cell<c_int>,
}

thread_local! {
    // Constant and without a destructor: needs neither the heap nor a registration.
    static PENDING: Pending = const {
        Pending { sock: Cell::new(0), generation: Cell::new(0), lane: Cell::new(0), fd: Cell::new(-1) }
    };
}

/// Maps the outboxes of a socket that gets lanes, if it has prefetches. Requires the socket's
/// lock; runs before any fork.
pub(crate) fn map(sock: &Sock) {
    if sock.prefetches().is_some() && sock.outboxes().is_none() && sock.outboxes.map(Outbox::init) {
        state::start_send_batching();
    }
}

impl Sock {
    /// The queued replies of its lanes, by lane.
    #[inline]
    pub(crate) fn outboxes(&self) -> Option<&'static [Outbox]> {
        // SAFETY: `map` makes them.
        unsafe { self.outboxes.load::<Outbox>() }
    }
}

/// A datagram that a lane's owner is about to send.
pub(crate) struct Reply<'a> {
    pub(crate) sock: &'static Sock,
    pub(crate) shared: &'a Shared,
    pub(crate) member: &'a Member,
    pub(crate) lane: usize,
    /// The program's descriptor.
    pub(crate) fd: c_int,
    /// Flags of the call, and those that a lane's socket needs.
    pub(crate) flags: c_int,
}

/// Queues a reply if more will follow, or sends it with those queued before. Returns the result of
/// the program's call. None: the caller must send it by itself, after [`flush`].
#[inline]
pub(crate) fn enqueue(reply: &Reply<'_>, out: &TxDatagram<'_>) -> Option<isize> {
    let outbox = reply.sock.outboxes()?.get(reply.lane)?;
    let own_prefetch = prefetch::for_lane(reply.sock, reply.lane)?;
    let at = reply.sock.index() + 1;
    let is_pending = PENDING.with(|pending| pending.sock.get() == at && pending.lane.get() == reply.lane);
    if !is_pending && !own_prefetch.has_datagrams() {
        return None;
    }
    let len = out.len()?;
    let may = reply.flags & !(MSG_DONTWAIT | MSG_NOSIGNAL) == 0
        && outbox.accepts_len(len)
        && reply.shared.send_batch_off.load(Ordering::Relaxed) == 0
        && !queues::is_open(reply.shared)
        && own_prefetch.has_delivered_from(out.name()?);
    if !may {
        return None;
    }
    quiesce::run_inside(|| {
        if !is_pending {
            flush();
        }
        enqueue_now(outbox, reply, out, len)
    })
    .flatten()
}

fn enqueue_now(outbox: &Outbox, reply: &Reply<'_>, out: &TxDatagram<'_>, len: usize) -> Option<isize> {
    let guard = outbox.lock(thread::acquired_liveness())?;
    if outbox.has_other_flags(reply.flags) {
        guard.send(reply.shared, send_fd(reply.sock, reply.shared, reply.lane, reply.fd));
    }
    let slot = guard.append(out, len, reply.flags)?;
    // A thread that changes one of these then sends the queued replies, under the lock. Either
    // it finds this reply, or this thread sees the change.
    let goes_on = reply.shared.mode.load(Ordering::SeqCst) == MULTI_LANE && state::is_send_batching();
    let has_more = prefetch::for_lane(reply.sock, reply.lane).is_some_and(prefetch::Prefetch::has_datagrams);
    if goes_on && has_more && slot + 1 < PREFETCH_MAX {
        PENDING.with(|pending| {
            pending.generation.set(reply.sock.generation.load(Ordering::Relaxed));
            pending.lane.set(reply.lane);
            pending.fd.set(reply.fd);
            pending.sock.set(reply.sock.index() + 1);
        });
        report::record_batched(reply.member, len as u64);
        return Some(len as isize);
    }
    PENDING.with(|pending| pending.sock.set(0));
    let errno = real::errno();
    let way = send_fd(reply.sock, reply.shared, reply.lane, reply.fd);
    // Send the earlier ones, then this one, whose error is the program's own.
    let calls = guard.send_up_to(reply.shared, way, Some(slot));
    report::record_send_calls(reply.member, calls.0);
    if let Some(failed) = calls.1 {
        return Some(real::fail_with_errno(failed));
    }
    report::record_batched(reply.member, len as u64);
    real::set_errno(errno);
    Some(len as isize)
}

/// The kernel sent a datagram without an error: replies of this length may be queued.
#[inline]
pub(crate) fn record_sent_len(sock: &Sock, lane: usize, len: usize) {
    if let Some(outbox) = sock.outboxes().and_then(|all| all.get(lane)) {
        outbox.record_sent_len(len);
    }
}

/// Sends the calling thread's queued replies.
#[inline]
pub(crate) fn flush() {
    if state::is_send_batching() {
        PENDING.with(|pending| {
            if pending.sock.get() != 0 {
                flush_now(pending);
            }
        });
    }
}

/// [`flush`], unless the next receive gets a prefetched datagram of the same lane. So a thread has
/// no queued replies while it receives on another socket. On this socket, it sends them before it
/// waits on its own lane or on all lanes. They have been sent by the time the socket becomes
/// plain.
#[inline]
pub(crate) fn before_receive(sock: &Sock) {
    if !state::is_send_batching() {
        return;
    }
    PENDING.with(|pending| {
        if pending.sock.get() == 0 {
            return;
        }
        let has_more =
            || prefetch::for_lane(sock, pending.lane.get()).is_some_and(prefetch::Prefetch::has_datagrams);
        if pending.sock.get() != sock.index() + 1 || !has_more() {
            flush_now(pending);
        }
    });
}

#[cold]
fn flush_now(pending: &Pending) {
    quiesce::run_inside(|| flush_pending(pending));
}

/// [`flush`], for calls that the child of a vfork makes before it executes a program. It has its
/// parent's replies, but not its descriptors: the parent sends them. Not in [`flush`], because
/// waits need no system call that says which process this is.
pub(crate) fn flush_unless_vforked() {
    let has_replies = || PENDING.with(|pending| pending.sock.get() != 0);
    if state::is_send_batching() && has_replies() && thread::is_own_process() {
        flush();
    }
}

fn flush_pending(pending: &Pending) {
    let index = pending.sock.replace(0) - 1;
    let sock = Sock::at(index);
    let errno = real::errno();
    let fd = pending.fd.get();
    // If it was closed, the closer sent the replies, and the number may mean something else.
    if sock.generation.load(Ordering::Acquire) == pending.generation.get()
        && let Some(shared) = sock.shared()
        && let Some(outbox) = sock.outboxes().and_then(|all| all.get(pending.lane.get()))
        && outbox.has_replies()
        && table::entry(fd) == Entry::Sock(index)
        && let Some(guard) = outbox.lock(thread::acquired_liveness())
    {
        let calls = guard.send(shared, send_fd(sock, shared, pending.lane.get(), fd));
        drop(guard);
        if let Some(member) = thread::cached_member(sock, shared) {
            report::record_send_calls(member, calls);
        }
    }
    real::set_errno(errno);
}

/// The descriptor that a lane sends by: the program's own unless the socket has lanes.
fn send_fd(sock: &Sock, shared: &Shared, lane: usize, fd: c_int) -> c_int {
    if shared.mode() == MULTI_LANE { sock.fd_of(lane, fd) } else { fd }
}

/// Sends the queued replies of all threads for a socket. `fd` is any of its descriptors.
#[cold]
pub(crate) fn flush_all(sock: &Sock, shared: &Shared, fd: c_int) {
    let Some(outboxes) = sock.outboxes() else { return };
    let errno = real::errno();
    // The calling thread may have no liveness token yet.
    let signal_mask = SignalMask::new();
    let mine = match thread::liveness() {
        0 => UNTRACKED_HOLDER,
        token => token,
    };
    for guard in outboxes.iter().filter(|at| at.may_have_replies()).filter_map(|at| at.lock(mine)) {
        guard.send(shared, fd);
    }
    drop(signal_mask);
    real::set_errno(errno);
}

/// The process ends (`for_good`), or becomes another program: sends the queued replies of all its
/// threads. If it ends, no more are queued.
#[cold]
pub(crate) fn flush_at_exit(for_good: bool) {
    if state::is_send_batching() {
        quiesce::run_inside(|| {
            if thread::is_own_process() {
                flush_all_sockets(for_good);
            }
        });
    }
}

fn flush_all_sockets(for_good: bool) {
    if for_good {
        state::stop_send_batching();
    }
    for sock in Sock::in_use() {
        if let (Some(shared), Some(_)) = (sock.shared(), sock.outboxes()) {
            let lane = sock.lane_fds().next().map(|(_, fd)| fd);
            if let Some(fd) = lane.filter(|_| shared.mode() == MULTI_LANE).or_else(|| sock_fds::any_fd(sock))
            {
                flush_all(sock, shared, fd);
            }
        }
    }
}

/// Sends the overdue replies of other threads, when the calling thread waits, or now and then when
/// it receives. `fd` is the program's descriptor.
#[inline]
pub(crate) fn flush_overdue(sock: &Sock, shared: &Shared, fd: c_int) {
    if state::is_send_batching()
        && let Some(outboxes) = sock.outboxes()
    {
        let count = shared.lane_count();
        for (lane, outbox) in outboxes.iter().enumerate().take(count).filter(|(_, at)| at.may_have_replies())
        {
            flush_if_overdue(sock, shared, fd, lane, outbox);
        }
    }
}

#[cold]
fn flush_if_overdue(sock: &Sock, shared: &Shared, fd: c_int, lane: usize, outbox: &Outbox) {
    if outbox.is_overdue() {
        send_outbox(sock, shared, fd, lane, outbox);
    }
}

/// The calling thread is about to receive from another thread's lane: sends that thread's queued
/// replies first, so that they precede the reply to this datagram.
#[inline]
pub(crate) fn before_recv_from_other_lane(sock: &Sock, shared: &Shared, fd: c_int, lane: usize) {
    if let Some(outbox) = sock.outboxes().and_then(|all| all.get(lane))
        && outbox.has_replies()
    {
        send_outbox(sock, shared, fd, lane, outbox);
    }
}

#[cold]
fn send_outbox(sock: &Sock, shared: &Shared, fd: c_int, lane: usize, outbox: &Outbox) {
    let errno = real::errno();
    if let Some(guard) = outbox.lock(thread::acquired_liveness()) {
        guard.send(shared, send_fd(sock, shared, lane, fd));
    }
    real::set_errno(errno);
}

/// The error of a reply that the program believes to be sent. Returned once.
#[inline]
pub(crate) fn take_reply_error(shared: &Shared) -> Option<c_int> {
    if shared.send_batch_off.load(Ordering::Relaxed) == 0 {
        return None;
    }
    Some(shared.reply_error.swap(0, Ordering::Relaxed)).filter(|errno| *errno != 0)
}
