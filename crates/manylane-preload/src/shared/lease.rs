//! A lease of queues of devices (engine `xdp`), as this process has it: `leasing.rs` says where it
//! comes from.

use std::ffi::c_int;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::sync::atomic::{AtomicI32, Ordering};

use manylane_ipc::lease::{Message, QUEUES_MAX};
use manylane_ipc::next_hops::NextHops;
use manylane_sys::shared::Shared as SharedMemory;
use manylane_sys::xsk::LeasedQueue;

/// States of a socket's lease.
pub(crate) const NONE: u32 = 0;
pub(crate) const LEASED: u32 = 1;
pub(crate) const OPEN: u32 = 2;
pub(crate) const DRAINING: u32 = 3;
pub(crate) const CLOSED: u32 = 4;

/// This process's view of a lease.
pub(crate) struct Lease {
    /// Our end of the control connection; -1 when it is closed.
    pub(crate) control_fd: AtomicI32,
    /// The queues, followed by `None`.
    pub(crate) queues: [Option<LeasedQueue>; QUEUES_MAX],
    pub(crate) next_hops: SharedMemory<NextHops>,
    /// The address that the socket is bound to.
    pub(crate) local: IpAddr,
    pub(crate) port: u16,
    /// The socket is an IPv6 socket.
    pub(crate) is_v6: bool,
    /// For the IP headers of sent packets.
    pub(crate) ttl: u8,
    pub(crate) allow_fragments: bool,
}

impl Lease {
    pub(crate) fn has_fd(&self, fd: c_int) -> bool {
        self.fds().any(|at| at == fd)
    }

    /// All descriptors of the lease that are open.
    pub(crate) fn fds(&self) -> impl Iterator<Item = c_int> {
        self.queue_fds().chain([self.control_fd.load(Ordering::Relaxed)]).filter(|fd| *fd >= 0)
    }

    /// The descriptors of the queues, by number.
    pub(crate) fn queue_fds(&self) -> impl Iterator<Item = c_int> {
        self.queues.iter().flatten().map(|queue| queue.as_fd().as_raw_fd())
    }

    /// Sends a command to the lessor; true if it acknowledged it. Requires the socket's lock.
    pub(crate) fn send_command(&self, command: Message) -> bool {
        let is_done = |end| command.await_reply(end).unwrap_or(false);
        self.send(command) && self.connection().is_some_and(is_done)
    }

    /// Sends a command to the lessor and waits for no reply; true if it was sent. Requires the
    /// socket's lock.
    pub(crate) fn send(&self, command: Message) -> bool {
        self.connection().is_some_and(|end| command.send(end, &[]).is_ok())
    }

    fn connection(&self) -> Option<BorrowedFd<'_>> {
        let end = self.control_fd.load(Ordering::Acquire);
        // SAFETY: hidden from the program, and closed only by `leasing::release`, under the lock
        // that the caller holds.
        (end >= 0).then(|| unsafe { BorrowedFd::borrow_raw(end) })
    }
}
