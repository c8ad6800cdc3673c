//! Checks that a descriptor still is the socket that the table says it is.
//!
//! A program can close a descriptor past the C library (io_uring, direct system calls), and the
//! number comes to mean something else. The kernel's cookie of a socket tells, because no other
//! socket ever has it. Asking for it costs a system call, so the library asks off the path of a
//! datagram: before it applies an option, a copy, an epoll instance or a lane to a socket, when a
//! thread receives on it for the first time, when a call says that there is no such socket, and
//! after each slice of a wait. If the descriptor was closed, its lanes and its lease are closed
//! here, too.

use std::sync::atomic::{AtomicU64, Ordering};

use libc::{EBADF, ENOTSOCK, c_int, sockaddr, socklen_t};

use crate::calls::call;
use crate::sock::{Shared, Sock};
use crate::table::{self, Entry};
use crate::{descriptors, real, thread};

const SO_COOKIE: c_int = 57;
const SO_NETNS_COOKIE: c_int = 71;

/// A bit for each port of a socket that has had lanes or queues.
static PORTS: [AtomicU64; 1 << 10] = [const { AtomicU64::new(0) }; 1 << 10];

/// A 64-bit option of a socket, or the error.
fn u64_option(fd: c_int, name: c_int) -> Result<u64, c_int> {
    let errno = real::errno();
    let mut cookie = 0_u64;
    let mut len = size_of::<u64>() as socklen_t;
    let at = (&raw mut cookie).cast();
    let done = call::getsockopt(fd, libc::SOL_SOCKET, name, at, &raw mut len);
    let answer = if done == 0 { Ok(cookie) } else { Err(real::errno()) };
    real::set_errno(errno);
    answer
}

/// The socket cookie; 0 before Linux 4.12.
pub(crate) fn cookie(fd: c_int) -> u64 {
    u64_option(fd, SO_COOKIE).unwrap_or(0)
}

/// The cookie of a socket's network namespace. None before Linux 5.14.
pub(crate) fn netns_cookie(fd: c_int) -> Option<u64> {
    u64_option(fd, SO_NETNS_COOKIE).ok()
}

/// True if the kernel's descriptor `fd` is `sock`.
pub(crate) fn is_same_socket(sock: &Sock, fd: c_int) -> bool {
    let known = sock.cookie.load(Ordering::Relaxed);
    match u64_option(fd, SO_COOKIE) {
        Ok(cookie) => known == 0 || known == cookie,
        Err(why) => !matches!(why, EBADF | ENOTSOCK),
    }
}

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
        descriptors::handle_untracked_close(fd, entry);
    }
    false
}

/// The UDP socket behind `fd`: [`table::sock`], for calls that can afford a system call.
pub(crate) fn sock(fd: c_int) -> Option<&'static Sock> {
    table::sock(fd).filter(|sock| revalidate(sock, fd))
}

/// Records the port of a socket that is about to get lanes or queues.
pub(crate) fn record_port(shared: &Shared) {
    let port = shared.port.load(Ordering::Relaxed) as usize & 0xffff;
    PORTS[port / 64].fetch_or(1 << (port % 64), Ordering::Relaxed);
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
    if let Some(port) = port.map(usize::from)
        && PORTS[port / 64].load(Ordering::Relaxed) & 1 << (port % 64) == 0
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
pub(crate) fn sweep_addr(addr: *const sockaddr, len: socklen_t) -> bool {
    if addr.is_null() || (len as usize) < size_of::<libc::sockaddr_in>() {
        return false;
    }
    // SAFETY: the kernel has just read as many bytes here. Both families have the port at the same
    // offset.
    let port = unsafe { (&raw const (*addr.cast::<libc::sockaddr_in>()).sin_port).read_unaligned() };
    sweep(Some(u16::from_be(port)))
}
