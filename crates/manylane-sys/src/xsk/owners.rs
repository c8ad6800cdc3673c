//! Who has a queue: the AF_XDP sockets of all processes, asked for by netlink (Linux 5.1, `CONFIG_XDP_SOCKETS_DIAG`).

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::check;

/// Of linux/sock_diag.h and linux/xdp_diag.h.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const XDP_SHOW_INFO: u32 = 1;
const XDP_DIAG_INFO: u16 = 1;
/// Bytes of `struct nlmsghdr`, of `struct xdp_diag_req`, of `struct xdp_diag_msg`.
const HEADER: usize = 16;
const REQUEST: usize = 20;
const MESSAGE: usize = 16;
/// Messages of one answer: far more than there are sockets in any namespace.
const MOST_READS: usize = 4096;

/// The AF_XDP sockets that are bound to a queue of a device of the calling thread's network namespace, by their inodes:
/// what `/proc/PID/fd` shows as `socket:[INODE]`. A [`Queue`](super::Queue) has one for each member and one more, by
/// which it was opened.
///
/// # Errors
/// `ENOENT` from a kernel that cannot say (before Linux 5.1, or without `CONFIG_XDP_SOCKETS_DIAG`), and what a socket
/// reports that cannot be opened or read.
pub fn owners(ifindex: u32, queue: u32) -> io::Result<Vec<u64>> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
    // SAFETY: takes no pointer.
    let raw = check(unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_SOCK_DIAG) })?;
    // SAFETY: the descriptor was made just above and nobody else has it.
    let fd = unsafe { OwnedFd::from_raw_fd(raw) };
    // The kernel answers at once; should it not, nobody waits for ever.
    let bound = libc::timeval { tv_sec: 1, tv_usec: 0 };
    let len = size_of_val(&bound) as libc::socklen_t;
    let (level, name) = (libc::SOL_SOCKET, libc::SO_RCVTIMEO);
    // SAFETY: the kernel reads `len` bytes of `bound`, which lives across the call.
    check(unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const bound).cast(), len) })?;
    let request = request();
    // SAFETY: the kernel reads the bytes of `request`, which lives across the call.
    let sent = unsafe { libc::send(fd.as_raw_fd(), request.as_ptr().cast(), request.len(), 0) };
    if sent < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut bytes = vec![0; 1 << 15];
    for _ in 0..MOST_READS {
        // SAFETY: the kernel writes at most as many bytes as `bytes` has, which is borrowed for the call.
        let len = unsafe { libc::recv(fd.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        let len = usize::try_from(len).map_err(|_| io::Error::last_os_error())?;
        if read(&bytes[..len], (ifindex, queue), &mut found)? {
            return Ok(found);
        }
    }
    Err(io::Error::other("the list of AF_XDP sockets has no end"))
}

/// Asks for all AF_XDP sockets, and what they are bound to.
fn request() -> [u8; HEADER + REQUEST] {
    let mut bytes = [0; HEADER + REQUEST];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0, &((HEADER + REQUEST) as u32).to_ne_bytes());
    put(4, &SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    put(6, &((libc::NLM_F_REQUEST | libc::NLM_F_DUMP) as u16).to_ne_bytes());
    put(HEADER, &[libc::AF_XDP as u8]);
    put(HEADER + 8, &XDP_SHOW_INFO.to_ne_bytes());
    bytes
}

/// Reads one part of the answer; true if it was the last.
fn read(bytes: &[u8], queue: (u32, u32), found: &mut Vec<u64>) -> io::Result<bool> {
    let broken = || io::Error::other("a netlink message that is cut short");
    let mut rest = bytes;
    while !rest.is_empty() {
        let len = word(rest, 0).ok_or_else(broken)? as usize;
        let kind = half(rest, 4).ok_or_else(broken)?;
        let message = rest.get(HEADER..len).ok_or_else(broken)?;
        match libc::c_int::from(kind) {
            libc::NLMSG_DONE => return Ok(true),
            libc::NLMSG_ERROR => {
                let code = word(message, 0).ok_or_else(broken)? as i32;
                return Err(io::Error::from_raw_os_error(code.wrapping_neg()));
            }
            _ if kind == SOCK_DIAG_BY_FAMILY => {
                let inode = word(message, 4).ok_or_else(broken)?;
                if bound_to(message.get(MESSAGE..).ok_or_else(broken)?) == Some(queue) {
                    found.push(u64::from(inode));
                }
            }
            _ => {}
        }
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

/// Device and queue, of the attributes of one socket; none if it is bound to nothing.
fn bound_to(mut attributes: &[u8]) -> Option<(u32, u32)> {
    while attributes.len() >= 4 {
        let len = usize::from(half(attributes, 0)?);
        let value = attributes.get(4..len)?;
        if half(attributes, 2)? == XDP_DIAG_INFO {
            return Some((word(value, 0)?, word(value, 4)?));
        }
        attributes = attributes.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    None
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u16, body: &[u8]) -> Vec<u8> {
        let len = (HEADER + body.len()) as u32;
        let head = [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), &[0; 10]].concat();
        [&head[..], body].concat()
    }

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let len = (4 + value.len()) as u16;
        let mut bytes = [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn socket(inode: u32, attributes: &[u8]) -> Vec<u8> {
        let head = [&[libc::AF_XDP as u8, 3, 0, 0][..], &inode.to_ne_bytes(), &[0; 8]].concat();
        message(SOCK_DIAG_BY_FAMILY, &[&head[..], attributes].concat())
    }

    fn info(ifindex: u32, queue: u32) -> Vec<u8> {
        attribute(XDP_DIAG_INFO, &[ifindex.to_ne_bytes(), queue.to_ne_bytes()].concat())
    }

    #[test]
    fn sockets_of_the_queue_are_found_and_no_others() {
        let user = attribute(2, &[1, 2, 3]);
        let answer = [
            socket(7, &[user, info(3, 1)].concat()),
            socket(8, &info(3, 0)),
            socket(9, &info(2, 1)),
            socket(10, &[]),
            socket(11, &info(3, 1)),
        ]
        .concat();
        let mut found = Vec::new();
        assert!(!read(&answer, (3, 1), &mut found).unwrap());
        assert!(read(&message(libc::NLMSG_DONE as u16, &[0; 4]), (3, 1), &mut found).unwrap());
        assert_eq!(found, [7, 11]);
    }

    #[test]
    fn an_error_is_one_and_what_is_cut_short_is_no_panic() {
        let error = message(libc::NLMSG_ERROR as u16, &(-libc::ENOENT).to_ne_bytes());
        let err = read(&error, (1, 0), &mut Vec::new()).unwrap_err();
        assert_eq!(err.raw_os_error(), Some(libc::ENOENT));
        let whole = socket(7, &info(3, 1));
        for len in 1..whole.len() {
            assert!(read(&whole[..len], (3, 1), &mut Vec::new()).is_err());
        }
        // Lengths that lie: shorter than what they count, or nothing.
        for lie in 0..whole.len() as u32 {
            let mut bytes = whole.clone();
            bytes[..4].copy_from_slice(&lie.to_ne_bytes());
            let _ = read(&bytes, (3, 1), &mut Vec::new());
            let mut bytes = whole.clone();
            bytes[HEADER + MESSAGE..][..2].copy_from_slice(&(lie as u16).to_ne_bytes());
            assert!(!read(&bytes, (3, 1), &mut Vec::new()).unwrap());
        }
    }
}
