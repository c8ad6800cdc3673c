//! The kernel's cookie of a socket, which no other socket ever has, and the ports of sockets with
//! lanes or queues.

use std::sync::atomic::{AtomicU64, Ordering};

use libc::{EBADF, ENOTSOCK, SO_COOKIE, SO_NETNS_COOKIE, c_int};

use crate::base::{real, sockopt};
use crate::shared::sock::{Shared, Sock};

/// A bit for each port of a socket that has had lanes or queues.
static PORTS: [AtomicU64; 1 << 10] = [const { AtomicU64::new(0) }; 1 << 10];

/// A 64-bit option of a socket, or the error.
fn u64_option(fd: c_int, name: c_int) -> Result<u64, c_int> {
    let errno = real::errno();
    let mut cookie = [0; size_of::<u64>()];
    let read = sockopt::read_into(fd, libc::SOL_SOCKET, name, &mut cookie);
    let answer = read.map(|_| u64::from_ne_bytes(cookie)).ok_or_else(real::errno);
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

/// Records the port of a socket that is about to get lanes or queues.
pub(crate) fn record_port(shared: &Shared) {
    let port = shared.port.load(Ordering::Relaxed) as usize & 0xffff;
    PORTS[port / 64].fetch_or(1 << (port % 64), Ordering::Relaxed);
}

/// True if a socket with this port may have had lanes or queues.
pub(crate) fn may_have_port(port: u16) -> bool {
    PORTS[usize::from(port) / 64].load(Ordering::Relaxed) & 1 << (port % 64) != 0
}
