//! Queues of lanes (engine `xdp`), and what threads do with them: check for frames, receive, send.
//!
//! A lane is a kernel socket, here called its companion, and the queues that it has. The companion
//! gets what XDP does not take, and what arrived before the queues were open. Any thread that may
//! take from a lane may take from its queues, with the queue's lock
//! ([`manylane_sys::xsk::LeasedQueue`]). A packet is copied out under that lock, and everything
//! that is known of a queue is in shared memory. So no thread holds a datagram that others cannot
//! receive, and the rules of `coverage.rs` hold unchanged. A signal handler that finds the lock
//! held by its own thread gets nothing from the queue and uses the companion.
//!
//! | stage | by | when it is full or missing |
//! |---|---|---|
//! | a frame in the RX ring | any receive on the lane: queues first; the companion now and then ([`KERNEL_CHECK_INTERVAL`]), and when they are empty | ring full: the kernel counts it |
//! | checked (`frames::parse`) | the receive | invalid frames are dropped, as the kernel does, and counted |
//! | in the program's buffers | the receive: copied under the queue's lock; the frame goes back at once | - |
//! | a wait | any wait on the lane: in slices, with the descriptors of its queues beside the program's; with epoll, in the instance (`epoll_set/queues.rs`) | the socket falls back if the kernel does not watch the queues |
//! | a reply ([`send`]) | the sender: written into a free frame of a queue of the next hop's device | no next hop (then requested), no frame, longer than the MTU, control messages, flags, multicast: the companion |
//! | the kernel is told ([`flush`]) | the sender: at once; while more frames wait to be received, together with the replies to those, up to [`TX_FRAME_BATCH_MAX`]; before any wait and before a send by the companion | the launcher checks every few milliseconds, too |
//!
//! The queues of a lane change under the socket's lock ([`distribute`]), as lanes are made and
//! removed. They go in turn to the lanes with owners; a single receiver has all of them. Frames in
//! a queue go along.

use std::cell::Cell;
use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::ptr;
use std::sync::atomic::Ordering;

use libc::pollfd;
use manylane_ipc::lease::QUEUES_MAX;
use manylane_ipc::next_hops::{NextHop, RouteKey};
use manylane_sys::addr::{SockAddr, in_socket_family};
use manylane_sys::xsk::{Holder, LeasedQueue, QueueGuard};
use manylane_wire::ethernet::Mac;
use manylane_wire::frame::{UdpFrame, ip_udp_len};

use crate::base::recv_bufs::{DatagramRef, RecvBufs};
use crate::base::settings::LANES_MAX;
use crate::base::{quiesce, real};
use crate::shared::lease::{CLOSED, DRAINING, Lease, OPEN};
use crate::shared::sock::{MULTI_LANE, Member, Shared, Sock};
use crate::shared::{failpoint, liveness, report, thread};
use crate::xdp::frames::{self, TxDatagram};

/// Heartbeats between two checks of the companion, for queues that are never empty. A check is due
/// at two heartbeats in a row, because a thread that waits before each receive has two heartbeats
/// for each.
pub(crate) const KERNEL_CHECK_INTERVAL: u32 = 32;
/// Time without a heartbeat of the launcher after which its next hops are ignored, in milliseconds.
const HEARTBEAT_TIMEOUT_MS: u32 = 2000;
/// Max replies that are put into rings before the kernel is told, which is the expensive part.
const TX_FRAME_BATCH_MAX: u32 = 16;

struct Pending {
    /// Queues of `lease` with frames that the kernel was not told of.
    mask: Cell<u32>,
    count: Cell<u32>,
    lease: Cell<*const Lease>,
    /// IP identification of the last packet that routers may fragment.
    ip_id: Cell<u16>,
}

thread_local! {
    // Constant and without a destructor: needs neither the heap nor a registration.
    static PENDING: Pending = const {
        Pending { mask: Cell::new(0), count: Cell::new(0), lease: Cell::new(ptr::null()), ip_id: Cell::new(0) }
    };
}

/// True if the queues of this socket get frames.
#[inline]
pub(crate) fn is_open(shared: &Shared) -> bool {
    shared.lease.load(Ordering::Acquire) == OPEN
}

/// True if the queues may still hold datagrams from before the socket became plain.
#[inline]
pub(crate) fn is_draining(shared: &Shared) -> bool {
    shared.lease.load(Ordering::Acquire) == DRAINING
}

/// The queues of the lanes of `mask`, with their numbers.
fn lane_queues<'a>(
    sock: &'static Sock,
    shared: &'a Shared,
    mask: u64,
) -> impl Iterator<Item = (usize, &'static LeasedQueue)> + 'a {
    let live = matches!(shared.lease.load(Ordering::Acquire), OPEN | DRAINING);
    let lease = if live { sock.lease() } else { None };
    let all = lease.map_or(&[][..], |lease| &lease.queues);
    all.iter()
        .map_while(Option::as_ref)
        .enumerate()
        .filter(move |(number, _)| mask & 1 << lane_of_queue(shared, *number) != 0)
}

fn lane_of_queue(shared: &Shared, number: usize) -> usize {
    shared.queue_lane[number].load(Ordering::Relaxed) as usize % LANES_MAX
}

/// A bit for each lane of `mask` that has a queue with a frame.
pub(crate) fn ready_lanes(sock: &'static Sock, shared: &Shared, mask: u64) -> u64 {
    if !is_open(shared) {
        return 0;
    }
    lane_queues(sock, shared, mask)
        .filter(|(_, queue)| queue.has_received())
        .fold(0, |all, (number, _)| all | 1 << lane_of_queue(shared, number))
}

/// True if queues hold datagrams older than all that arrive from now on.
pub(crate) fn has_leftovers(sock: &'static Sock, shared: &Shared) -> bool {
    is_draining(shared) && lane_queues(sock, shared, u64::MAX).any(|(_, queue)| queue.has_received())
}

/// A bit for each queue of a lane that gets frames.
#[inline]
pub(crate) fn mask_of_lane(sock: &'static Sock, shared: &Shared, lane: usize) -> u32 {
    if !is_open(shared) {
        return 0;
    }
    lane_queues(sock, shared, 1 << lane).fold(0, |mask, (number, _)| mask | 1 << number)
}

/// Adds the sockets of the queues of the lanes of `mask` to the entries for ppoll(2), after the
/// first `count`. Returns the new count.
pub(crate) fn append_pollfds(
    sock: &'static Sock,
    shared: &Shared,
    mask: u64,
    fds: &mut [pollfd],
    mut count: usize,
) -> usize {
    if is_open(shared) {
        for (_, queue) in lane_queues(sock, shared, mask) {
            let Some(place) = fds.get_mut(count) else { break };
            *place = pollfd { fd: queue.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
            count += 1;
        }
    }
    count
}

/// True if this process has the lease with that number.
#[cold]
fn is_own_lease(number: u16) -> bool {
    let has = |lease: &Lease| lease.queues.iter().flatten().any(|queue| queue.terms().lease_id == number);
    Sock::in_use().filter_map(Sock::lease).any(has)
}

#[inline]
fn lock_queue(queue: &'static LeasedQueue) -> Option<QueueGuard<'static>> {
    let own = Holder::new(queue.terms().lease_id, thread::holder_token());
    // Only tokens of this program's leases can be checked. If all of another program is dead, the
    // launcher breaks its lock.
    queue.lock(own, |holder| is_own_lease(holder.lease()) && liveness::has_exited(holder.token()))
}

/// Receives from the queues of a lane for a call of the program. Returns the call's result; none
/// if the queues are empty. `start` selects the first queue: if it were constant, a busy queue
/// could starve the others.
#[inline]
pub(crate) fn receive(
    sock: &'static Sock,
    shared: &Shared,
    lane: usize,
    start: u32,
    flags: c_int,
    into: &RecvBufs<'_>,
) -> Option<isize> {
    let lease = sock.lease()?;
    let first = (start % shared.queue_count.load(Ordering::Relaxed).max(1)) as usize;
    let all = || lane_queues(sock, shared, 1 << lane);
    let (from, before) =
        (all().filter(|(number, _)| *number >= first), all().filter(|(number, _)| *number < first));
    from.chain(before).find_map(|(number, queue)| {
        if queue.has_received() { recv_from(sock, lease, lane, number, queue, flags, into) } else { None }
    })
}

/// Receives from one queue.
fn recv_from(
    sock: &'static Sock,
    lease: &Lease,
    lane: usize,
    number: usize,
    queue: &'static LeasedQueue,
    flags: c_int,
    into: &RecvBufs<'_>,
) -> Option<isize> {
    let mut guard = lock_queue(queue)?;
    let peeks = flags & libc::MSG_PEEK != 0;
    let datagrams_max = if peeks { 1 } else { into.capacity() };
    let (mut done, mut answer) = (0, 0);
    while done < datagrams_max && (done == 0 || !into.is_invalid(done, flags)) {
        let Some((peer, payload)) = peek(queue, &mut guard) else { break };
        let name = SockAddr::from(in_socket_family(peer, lease.is_v6));
        let datagram = DatagramRef { name: name.as_bytes(), payload: [payload, &[]], control: &[] };
        answer = into.write(done, &datagram, flags);
        if peeks {
            failpoint::hit("peeked");
        } else {
            guard.pop();
        }
        if answer < 0 {
            break;
        }
        done += 1;
    }
    unlock(sock, guard, if peeks { 0 } else { done as u64 });
    if done == 0 {
        return (answer < 0).then_some(answer);
    }
    if peeks {
        thread::set_peeked(sock, lane | (number + 1) << 8);
    }
    Some(if into.is_mmsg() { done as isize } else { answer })
}

/// Source and payload of the next datagram of a queue.
#[inline]
fn peek<'a>(queue: &LeasedQueue, guard: &'a mut QueueGuard<'_>) -> Option<(SocketAddr, &'a [u8])> {
    let ((peer, payload), frame) = guard.peek(|frame| frames::parse(frame, queue.terms().is_veth))?;
    Some((peer, &frame[payload]))
}

/// Unlocks a queue. Counts datagrams that the calling thread received as frames from it, and
/// frames that it dropped.
#[inline]
fn unlock(sock: &Sock, guard: QueueGuard<'_>, datagrams: u64) {
    let bad = guard.refused();
    drop(guard);
    if (datagrams > 0 || bad > 0)
        && let Some(shared) = sock.shared()
        && let Some(member) = thread::cached_member(sock, shared)
    {
        report::record_received_frames(member, datagrams, bad.into());
    }
}

/// Receives the datagram that the calling thread peeked at, from the same queue.
pub(crate) fn receive_peeked(
    sock: &'static Sock,
    peeked: usize,
    flags: c_int,
    into: &RecvBufs<'_>,
) -> Option<isize> {
    let (lane, number) = (peeked & 0xff, (peeked >> 8).checked_sub(1)?);
    let lease = sock.lease()?;
    let queue = lease.queues.get(number)?.as_ref()?;
    recv_from(sock, lease, lane, number, queue, flags, into)
}

/// Length of the datagram that the next receive from the lanes of `mask` would return. Records it
/// as peeked, so that this receive returns it.
pub(crate) fn next_len(sock: &'static Sock, shared: &Shared, mask: u64) -> Option<usize> {
    if !matches!(shared.lease.load(Ordering::Acquire), OPEN | DRAINING) {
        return None;
    }
    lane_queues(sock, shared, mask).find_map(|(number, queue)| {
        let mut guard = lock_queue(queue)?;
        let len = peek(queue, &mut guard).map(|(_, payload)| payload.len());
        unlock(sock, guard, 0);
        let lane = lane_of_queue(shared, number);
        len.inspect(|_| thread::set_peeked(sock, lane | (number + 1) << 8))
    })
}

/// Receives a datagram left in the queues of a plain socket; none once they are empty.
#[cold]
pub(crate) fn drain(
    sock: &'static Sock,
    shared: &Shared,
    flags: c_int,
    into: &RecvBufs<'_>,
) -> Option<isize> {
    let lease = sock.lease()?;
    let found = lane_queues(sock, shared, u64::MAX)
        .find_map(|(number, queue)| recv_from(sock, lease, 0, number, queue, flags, into));
    if found.is_none() && !has_leftovers(sock, shared) {
        _ = shared.lease.compare_exchange(DRAINING, CLOSED, Ordering::AcqRel, Ordering::Relaxed);
    }
    found
}

/// Sends a datagram through a queue. Returns its length; none if the kernel's socket must send it.
#[inline]
pub(crate) fn send(
    sock: &'static Sock,
    shared: &Shared,
    member: &Member,
    out: &TxDatagram<'_>,
    flags: c_int,
) -> Option<isize> {
    if flags & !(libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) != 0 {
        return flush_for_kernel();
    }
    let Some(lease) = sock.lease() else { return flush_for_kernel() };
    let lane = member.own_lane().unwrap_or(0);
    let sent = out.len().zip(out.peer(lease.is_v6)).and_then(|(len, peer)| {
        // An IPv6 wildcard is one for IPv4, too.
        let any = lease.local.is_unspecified() && peer.is_ipv4();
        let local = if any { Ipv4Addr::UNSPECIFIED.into() } else { lease.local };
        let (source, next) = next_hop(lease, &RouteKey::new(local, peer.ip())?)?;
        if len + ip_udp_len(peer.is_ipv6()) > next.mtu as usize {
            return None;
        }
        let all = lane_queues(sock, shared, 1 << lane).chain(lane_queues(sock, shared, u64::MAX));
        let (number, queue) = all.into_iter().find(|(_, queue)| queue.terms().ifindex == next.ifindex)?;
        let plan = UdpFrame {
            ttl: lease.ttl,
            fragment_id: lease.allow_fragments.then(next_ip_id),
            ..UdpFrame::new(Mac(next.source_mac), Mac(next.mac), SocketAddr::new(source, lease.port), peer)
        };
        let sent = lock_queue(queue)?.send(|room| out.write_frame(room, len, &plan));
        sent.then_some((len, number))
    });
    let Some((len, number)) = sent else { return flush_for_kernel() };
    report::record_sent_frame(member);
    mark_pending(lease, number);
    // While more frames wait, the program comes back for them, and its replies leave together.
    let waits = lane_queues(sock, shared, 1 << lane).any(|(_, queue)| queue.has_received());
    if !waits || PENDING.with(|pending| pending.count.get()) >= TX_FRAME_BATCH_MAX {
        flush();
    }
    Some(len as isize)
}

/// The kernel's socket sends next: flush the rings first, so that the order stays.
#[cold]
fn flush_for_kernel() -> Option<isize> {
    flush();
    None
}

/// The IP identification of the next packet that routers may fragment.
fn next_ip_id() -> u16 {
    PENDING.with(|pending| {
        pending.ip_id.set(pending.ip_id.get().wrapping_add(1).max(1));
        pending.ip_id.get()
    })
}

/// The source address and the next hop of a pair. Requests them if they are unknown.
fn next_hop(lease: &Lease, pair: &RouteKey) -> Option<(IpAddr, NextHop)> {
    if !lease.next_hops.is_alive(HEARTBEAT_TIMEOUT_MS) {
        return None;
    }
    let found = lease.next_hops.find(pair);
    if found.is_none() {
        lease.next_hops.request(pair);
    }
    found
}

/// Records that the kernel must be told of a queue's frames.
fn mark_pending(lease: &Lease, number: usize) {
    PENDING.with(|pending| {
        if !ptr::eq(pending.lease.get(), lease) {
            flush();
            pending.lease.set(lease);
        }
        pending.mask.set(pending.mask.get() | 1 << number);
        pending.count.set(pending.count.get() + 1);
    });
}

/// Tells the kernel of all frames that the calling thread has put into rings.
#[inline]
pub(crate) fn flush() {
    PENDING.with(|pending| {
        if pending.mask.get() != 0 {
            flush_now(pending);
        }
    });
}

#[cold]
fn flush_now(pending: &Pending) {
    quiesce::run_inside(|| flush_pending(pending));
}

fn flush_pending(pending: &Pending) {
    let errno = real::errno();
    let mask = pending.mask.replace(0);
    pending.count.set(0);
    // SAFETY: null, or a lease, which is never unmapped.
    if let Some(lease) = unsafe { pending.lease.get().as_ref() } {
        let queues = lease.queues.iter().enumerate().filter(|(number, _)| mask & 1 << number != 0);
        queues.filter_map(|(_, queue)| queue.as_ref()).for_each(LeasedQueue::kick);
    }
    real::set_errno(errno);
}

/// Distributes the queues round robin over the owned lanes. Requires the socket's lock.
pub(crate) fn distribute(shared: &Shared) {
    let count = (shared.queue_count.load(Ordering::Relaxed) as usize).min(QUEUES_MAX);
    if count == 0 {
        return;
    }
    let owned = |lane: &usize| shared.owner[*lane].load(Ordering::Relaxed) != 0;
    let lanes = if shared.mode() == MULTI_LANE { (0..LANES_MAX).filter(owned).count() } else { 0 };
    for number in 0..count {
        let lane = if lanes == 0 { 0 } else { (0..LANES_MAX).filter(owned).nth(number % lanes).unwrap_or(0) };
        shared.queue_lane[number].store(lane as u32, Ordering::Release);
    }
}

/// Reports lane 0 for the members of a socket with queues and one receiver.
pub(crate) fn report_lanes(shared: &Shared) {
    if shared.mode() == MULTI_LANE {
        return;
    }
    for member in shared.joined_members().iter().filter(|at| at.thread_id.load(Ordering::Relaxed) != 0) {
        report::record_lane(member, 0, shared.inode_of(0));
    }
}
