//! The entries of the program's descriptors: whether a descriptor still is what its entry says, and
//! what happens when an entry goes.
//!
//! A program can close a descriptor past the C library (io_uring, direct system calls), and the
//! number comes to mean something else. The kernel's cookie of a socket tells, because no other
//! socket ever has it. Asking for it costs a system call, so the library asks off the path of a
//! datagram: before it applies an option, a copy, an epoll instance or a lane to a socket, when a
//! thread receives on it for the first time, when a call says that there is no such socket, and
//! after each slice of a wait. If the descriptor was closed, its lanes and its lease are closed
//! here, too.

use std::sync::atomic::Ordering;

use libc::{c_int, sockaddr, socklen_t};

use crate::base::real;
use crate::fds::identity::{is_same_socket, may_have_port};
use crate::fds::table::{self, Entry};
use crate::group::socket_end;
use crate::lanes::epoll_set::{self, Epoll};
use crate::shared::lock::{Guard, lock};
use crate::shared::sock::Sock;
use crate::shared::thread;

/// True unless the table says that `fd` is `sock` and it no longer is. Then its entry is closed.
/// The caller must hold no locks.
#[cold]
pub(crate) fn revalidate(sock: &Sock, fd: c_int) -> bool {
    let entry = Entry::Sock(sock.index());
    if table::entry(fd) != entry || is_same_socket(sock, fd) {
        return true;
    }
    // In the child of a vfork the table is the parent's.
    if thread::is_own_process() {
        handle_untracked_close(fd, entry);
    }
    false
}

/// The UDP socket behind `fd`: [`table::sock`], for calls that can afford a system call.
pub(crate) fn sock(fd: c_int) -> Option<&'static Sock> {
    table::sock(fd).filter(|sock| revalidate(sock, fd))
}

/// Checks all descriptors of `sock`. True if one was closed unseen.
pub(crate) fn revalidate_all(sock: &Sock) -> bool {
    let entry = Entry::Sock(sock.index());
    let all = table::tracked(0, u32::MAX).filter(|(_, at)| *at == entry);
    all.fold(false, |any, (fd, _)| !revalidate(sock, fd) || any)
}

/// Checks all sockets with lanes or queues, or only those of `port`. True if one was closed
/// unseen.
pub(crate) fn sweep(port: Option<u16>) -> bool {
    if let Some(port) = port
        && !may_have_port(port)
    {
        return false;
    }
    let has_port = |sock: &Sock| {
        let own = sock.shared().map(|shared| shared.port.load(Ordering::Relaxed));
        port.is_none_or(|port| own == Some(u32::from(port)))
    };
    let mut any = false;
    for sock in Sock::in_use() {
        if (sock.lane_fds().next().is_some() || sock.lease().is_some()) && has_port(sock) {
            any |= revalidate_all(sock);
        }
    }
    any
}

/// [`sweep`] for the port of an address of the program, of which the kernel has read `len` bytes.
pub(crate) unsafe fn sweep_addr(addr: *const sockaddr, len: socklen_t) -> bool {
    if addr.is_null() || (len as usize) < size_of::<libc::sockaddr_in>() {
        return false;
    }
    // SAFETY: program arguments. Both families have the port at the same offset.
    let port = unsafe { (&raw const (*addr.cast::<libc::sockaddr_in>()).sin_port).read_unaligned() };
    sweep(Some(u16::from_be(port)))
}

/// `fd` no longer means `entry`: it was closed unseen.
#[cold]
fn handle_untracked_close(fd: c_int, entry: Entry) {
    let guard = lock_entry(fd);
    let done = table::replace(fd, entry, Entry::None);
    drop(guard);
    if done {
        release(entry);
    }
}

/// Taken before `fd` is closed, or its number gets another meaning. While it is held, no other
/// thread changes an epoll instance by it (`epoll_set::move_to_lane`), or finds it in the table
/// after the table has changed.
pub(crate) fn lock_entry(fd: c_int) -> Option<Guard<'static>> {
    match table::entry(fd) {
        Entry::Sock(index) => {
            let sock = Sock::at(index);
            if sock.in_epoll.load(Ordering::Acquire) == 0 { None } else { lock(&sock.fd_lock, true) }
        }
        Entry::Epoll(index) => Epoll::at(index).lock_items(),
        Entry::None | Entry::Hidden => None,
    }
}

/// Removes one descriptor from the count of `entry`.
pub(crate) fn release(entry: Entry) {
    let errno = real::errno();
    match entry {
        Entry::Sock(index) => {
            let sock = Sock::at(index);
            if sock.refs.fetch_sub(1, Ordering::AcqRel) == 1 {
                epoll_set::remove_sock(sock);
                // An instance that another process shares keeps the placeholder until a wait.
                socket_end::close(sock, epoll_set::has_placeholder());
            }
        }
        Entry::Epoll(index) => Epoll::at(index).release(),
        Entry::None | Entry::Hidden => {}
    }
    real::set_errno(errno);
}
