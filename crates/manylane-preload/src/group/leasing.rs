//! Queues of devices on lease (engine `xdp`): requested from the launcher, opened, closed, given
//! back.
//!
//! The launcher has the privileges, and the program has the datagrams. The launcher attaches the
//! XDP program to the devices before it starts the program. It opens an AF_XDP socket and the
//! memory of each queue, and passes both to the library as descriptors. The library needs no
//! privilege to use them. The launcher trusts nothing that the program says: SECURITY.md has who
//! trusts whom, and [`manylane_ipc::lease`] has the messages.
//!
//! ```text
//!  launcher, root                                       program, any user
//!    io/xdp/leasing/: devices, ports, next hops          lease.rs: requests, opens, closes
//!         │ the program's UDP socket ◄───── Request ─────────┤
//!         │ XSK, memory of the frames, of next hops ────────►│
//!         │ the port goes into the XDP program ◄── Open ─────┤ when a receiver has come back
//!         │                                                  ▼
//!    xsk/lessor.rs ◄── shared memory: rings, frames ──► xsk/leased.rs ─ queues.rs ─ frames.rs ─► the call's buffers
//!    next_hops.rs (writes) ─ shared memory: next hops ──► next_hops.rs (reads)
//! ```
//!
//! ```text
//! NONE ─request─► LEASED ─the first receiver that comes back─► OPEN ─fall back─► DRAINING ─all empty─► CLOSED
//!   └─refused, or an option is in the way, with a reason; or the socket falls back before it is OPEN───► CLOSED
//! ```
//!
//! - NONE, CLOSED: the socket is what it is with engine `mmsg`.
//! - LEASED: the queues are mapped, and get no frames. Before a fork each socket requests its
//!   queues, so that the child has them.
//! - OPEN: the queues get frames, or are about to, and each lane has some of them (`queues.rs`).
//! - DRAINING: the queues get no more frames, and those that they hold are received before
//!   anything else. The launcher has taken the port out of the XDP programs and waited for a grace
//!   period.
//!
//! A socket without queues keeps its kernel sockets, with a reason: options that frames cannot
//! honour, no queue to spare, no launcher, no descriptors left.
//!
//! Every process that has the socket has an end of the lease, a local socket. When the last end is
//! closed, the launcher takes the port out, empties the rings and has the queues again. If the
//! launcher is killed, the kernel takes its XDP programs off the devices, and every datagram goes
//! to the companions. Its heartbeat in the memory of next hops stops, and replies go through the
//! companions, too (`queues.rs`).
//!
//! A lease of this process is in memory that is never unmapped, because a thread may use it while
//! another one closes the socket. Its state is in the memory that all processes share. Both change
//! under the socket's lock.

use std::ffi::c_int;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, IntoRawFd};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;
use std::{io, ptr};

use manylane_ipc::lease::{Fds, Message, QUEUES_MAX};
use manylane_ipc::next_hops::NextHops;
use manylane_ipc::report::Reason;
use manylane_sys::shared::Shared as SharedMemory;
use manylane_sys::unix_socket;
use manylane_sys::xsk::LeasedQueue;

use crate::base::{sockopt, state};
use crate::batching::send_batch;
use crate::fds::hidden_fds::{self, HiddenFd};
use crate::fds::table::{self, Entry};
use crate::fds::{identity, lane_socket};
use crate::shared::lease::{CLOSED, DRAINING, LEASED, Lease, NONE, OPEN};
use crate::shared::lock::Guard;
use crate::shared::sock::{Shared, Sock};
use crate::shared::{memory, report};
use crate::xdp::queues;

/// The launcher replies within milliseconds, but may have to open devices on a busy machine.
const LEASE_REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Max leases in the life of a process: the mappings are never unmapped.
const LEASES_MAX: u32 = 64;

static LEASE_COUNT: AtomicU32 = AtomicU32::new(0);

/// True if the launcher leases queues.
pub(crate) fn is_enabled() -> bool {
    state::settings().is_some_and(|settings| settings.lessor.is_some())
}

/// True if a socket may get queues and has none open yet.
#[inline]
pub(crate) fn is_pending(shared: &Shared) -> bool {
    shared.lease.load(Ordering::Acquire) < OPEN && is_enabled()
}

/// True if a socket has queues open, or may get some.
#[inline]
pub(crate) fn may_have_queues(shared: &Shared) -> bool {
    shared.lease.load(Ordering::Acquire) <= OPEN && is_enabled()
}

/// Runs before a fork: both processes must have the queues that they may use later.
pub(crate) fn acquire_early(sock: &'static Sock, shared: &Shared, fd: c_int, guard: &Guard<'_>) {
    if is_enabled() && shared.lease.load(Ordering::Acquire) == NONE {
        acquire(sock, shared, fd, guard);
    }
}

fn reject(shared: &Shared, fd: c_int, reason: Reason) {
    shared.lease.store(CLOSED, Ordering::Release);
    report::count_reason(reason, lane_socket::local_addr(fd));
}

/// Counts one more lease; false at the limit.
fn reserve_one() -> bool {
    LEASE_COUNT
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| (count < LEASES_MAX).then_some(count + 1))
        .is_ok()
}

/// Requests queues and maps them.
pub(crate) fn acquire(sock: &'static Sock, shared: &Shared, fd: c_int, _guard: &Guard<'_>) {
    if shared.forked.load(Ordering::Relaxed) != 0 {
        return reject(shared, fd, Reason::NoQueue);
    }
    if !identity::is_same_socket(sock, fd) {
        return;
    }
    // One descriptor for each queue, and one for the control connection.
    if lane_socket::spare_fds(QUEUES_MAX + 1) <= QUEUES_MAX {
        return reject(shared, fd, Reason::Full);
    }
    if sockopt::needs_kernel(fd) {
        return reject(shared, fd, Reason::Control);
    }
    if !reserve_one() {
        return reject(shared, fd, Reason::Full);
    }
    identity::record_port(shared);
    let generation = sock.generation.load(Ordering::Acquire);
    let asked = request(fd);
    // A thread that has waited too long for this lock has closed the socket without it. The slot
    // may be another socket's.
    let is_closed = sock.generation.load(Ordering::Acquire) != generation;
    if is_closed || asked.is_err() {
        LEASE_COUNT.fetch_sub(1, Ordering::Relaxed);
    }
    match asked {
        _ if is_closed => {}
        Ok((new, connection)) => {
            let lease = new.keep();
            lease.control_fd.store(connection.into_fd(), Ordering::Release);
            sock.set_lease(Some(lease));
            shared.queue_count.store(lease.queues.iter().flatten().count() as u32, Ordering::Relaxed);
            queues::distribute(shared);
            shared.lease.store(LEASED, Ordering::Release);
        }
        Err(err) => {
            let reason = match err.raw_os_error() {
                Some(libc::ENODEV | libc::ENOSPC) => Reason::NoQueue,
                Some(libc::ENOMEM) => Reason::Full,
                _ => Reason::NoLease,
            };
            reject(shared, fd, reason);
        }
    }
}

/// A lease that is being built where it stays: it is too large for the stack of a small thread or
/// of a signal handler. Dropping it closes its queues, and frees the memory.
struct NewLease {
    at: &'static [AtomicU64],
    is_filled: bool,
}

impl NewLease {
    fn map() -> Option<Self> {
        let at = memory::map::<AtomicU64>(size_of::<Lease>().div_ceil(size_of::<AtomicU64>()), false)?;
        Some(Self { at, is_filled: false })
    }

    fn as_ptr(&self) -> *mut Lease {
        self.at.as_ptr().cast_mut().cast()
    }

    /// A lease without queues and without a control connection.
    fn fill(
        &mut self,
        next_hops: SharedMemory<NextHops>,
        addr: SocketAddr,
        (ttl, allow_fragments): (u8, bool),
    ) -> &mut Lease {
        let at = self.as_ptr();
        // SAFETY: the mapping is as long as a lease, aligned to a page, and only this value has it.
        // All fields are written, as the pattern shows, before there is a reference to the whole.
        unsafe {
            (&raw mut (*at).control_fd).write(AtomicI32::new(-1));
            let queues = (&raw mut (*at).queues).cast::<Option<LeasedQueue>>();
            (0..QUEUES_MAX).for_each(|nth| queues.add(nth).write(None));
            (&raw mut (*at).next_hops).write(next_hops);
            (&raw mut (*at).local).write(addr.ip().to_canonical());
            (&raw mut (*at).port).write(addr.port());
            (&raw mut (*at).is_v6).write(addr.is_ipv6());
            (&raw mut (*at).ttl).write(ttl);
            (&raw mut (*at).allow_fragments).write(allow_fragments);
            self.is_filled = true;
            let Lease {
                control_fd: _,
                queues: _,
                next_hops: _,
                local: _,
                port: _,
                is_v6: _,
                ttl: _,
                allow_fragments: _,
            } = &*at;
            &mut *at
        }
    }

    /// The lease, in memory that is never unmapped. It has been filled.
    fn keep(self) -> &'static Lease {
        let at = self.as_ptr();
        std::mem::forget(self);
        // SAFETY: `request` has filled it, and it is neither dropped nor unmapped any more.
        unsafe { &*at }
    }
}

impl Drop for NewLease {
    fn drop(&mut self) {
        let at = self.as_ptr();
        // SAFETY: no other reference to the lease or to its mapping exists: it was not published.
        unsafe {
            if self.is_filled {
                ptr::drop_in_place(at);
            }
            libc::munmap(at.cast(), size_of_val(self.at));
        }
    }
}

/// Requests queues for a socket and maps them. Returns the lease and then its connection: a lease
/// that is dropped closes its queues before the lessor sees the connection end and has them again.
fn request(fd: c_int) -> io::Result<(NewLease, HiddenFd)> {
    let gone = || io::Error::from_raw_os_error(libc::EPIPE);
    let ticket = state::settings().and_then(|settings| settings.lessor.as_ref()).ok_or_else(gone)?;
    let addr = lane_socket::local_addr(fd).ok_or_else(gone)?;
    let open = || unix_socket::socket().map_or(-1, IntoRawFd::into_raw_fd);
    let end = HiddenFd::open(open).ok_or_else(|| io::Error::from_raw_os_error(libc::EMFILE))?;
    ticket.connect(end.as_fd(), LEASE_REPLY_TIMEOUT)?;
    // After the connection, so that it is dropped before it.
    let mut new = NewLease::map().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
    // SAFETY: it is the descriptor of the calling thread's own call.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    Message::Request(ticket.secret).send(end.as_fd(), &[socket])?;
    let (count, next_hops) = receive(&end, |message, fds| match (message, fds) {
        (Message::Granted(count), [Some(next_hops), ..]) => {
            Ok((count, SharedMemory::open(next_hops.as_fd())?))
        }
        (Message::Refused(errno @ (libc::ENODEV | libc::ENOSPC)), _) => {
            Err(io::Error::from_raw_os_error(errno))
        }
        _ => Err(gone()),
    })?;
    let lease = new.fill(next_hops, addr, sockopt::ip_header_fields(fd));
    for place in lease.queues.iter_mut().take(count as usize) {
        let queue = receive(&end, |message, fds| {
            let (Message::Queue(terms), [xsk, Some(memory), ..]) = (message, fds) else { return Err(gone()) };
            let xsk = hidden_fds::move_high(xsk.take().ok_or_else(gone)?);
            let queue = LeasedQueue::open(terms, xsk, memory.as_fd())?;
            table::set(queue.as_fd().as_raw_fd(), Entry::Hidden);
            Ok(queue)
        })?;
        *place = Some(queue);
    }
    Ok((new, end))
}

/// Receives one message of the lessor, and passes it to `open`. Its descriptors are closed, moved
/// or hidden before the program can get one of their numbers.
fn receive<T>(end: &HiddenFd, open: impl FnOnce(Message, &mut Fds) -> io::Result<T>) -> io::Result<T> {
    // Not under the lock, which would be held for as long as the lessor takes. Flush first:
    // closing a descriptor flushes, too, and would wait for an outbox under this lock.
    send_batch::flush();
    unix_socket::wait_for_message(end.as_fd())?;
    let _numbers = hidden_fds::lock();
    let mut fds = Fds::default();
    let message = Message::receive(end.as_fd(), &mut fds);
    let opened = match message {
        Ok(Some(message)) => open(message, &mut fds),
        Ok(None) => Err(io::Error::from_raw_os_error(libc::EPIPE)),
        Err(err) => Err(err),
    };
    fds.into_iter().flatten().for_each(hidden_fds::close_unhidden);
    opened
}

/// For a lease that is not kept, and has no connection yet.
impl Drop for Lease {
    fn drop(&mut self) {
        send_batch::flush();
        let _numbers = hidden_fds::lock();
        // The drops of the queues cannot close descriptors that are hidden.
        self.fds().for_each(|fd| _ = table::set(fd, Entry::None));
        self.queues.iter_mut().for_each(|queue| *queue = None);
    }
}

/// The launcher redirects frames to the queues from now on.
pub(crate) fn open(sock: &'static Sock, shared: &Shared, _guard: &Guard<'_>) {
    let Some(lease) = sock.lease() else { return };
    queues::distribute(shared);
    // Before the command: if this thread dies meanwhile, the queues are checked, and closed, all
    // the same.
    if shared.lease.compare_exchange(LEASED, OPEN, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        return;
    }
    if lease.send_command(Message::Open) {
        queues::report_lanes(shared);
        return;
    }
    // A launcher that was only too slow finds both commands, and ends the lease.
    lease.send(Message::Close);
    shared.lease.store(CLOSED, Ordering::Release);
    report::count_reason(Reason::NoLease, None);
}

/// The socket is about to become plain, or to be closed: when this returns, the queues get no more
/// frames, and will get none. Requires the socket's lock.
pub(crate) fn close(sock: &Sock, shared: &Shared) {
    let before = shared.lease.load(Ordering::Acquire);
    if before < OPEN {
        shared.lease.store(CLOSED, Ordering::Release);
    }
    if before != OPEN {
        return;
    }
    queues::flush();
    // If the launcher has died, the kernel has detached its programs.
    if let Some(lease) = sock.lease() {
        lease.send_command(Message::Close);
    }
    shared.lease.store(DRAINING, Ordering::SeqCst);
}

/// This process closes the socket, and its end of the lease. After the last process has, the
/// lessor takes the queues back. Requires the socket's lock.
pub(crate) fn release(sock: &Sock) {
    let Some(lease) = sock.lease() else { return };
    queues::flush();
    // Under one lock, so that the program gets no number of a lease that is half closed.
    let _numbers = hidden_fds::lock();
    sock.set_lease(None);
    lease.fds().for_each(hidden_fds::close_locked);
    lease.control_fd.store(-1, Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_a_lease_sets_its_final_state() {
        let sock = &memory::map::<Sock>(1, false).unwrap()[0];
        let shared = &memory::map::<Shared>(1, true).unwrap()[0];
        for (before, after) in
            [(NONE, CLOSED), (LEASED, CLOSED), (OPEN, DRAINING), (DRAINING, DRAINING), (CLOSED, CLOSED)]
        {
            shared.lease.store(before, Ordering::Relaxed);
            close(sock, shared);
            assert_eq!(shared.lease.load(Ordering::Relaxed), after, "{before}");
        }
    }
}
