//! Lists the sockets of the calling thread's network namespace by netlink (`sock_diag(7)`, Linux
//! 3.3).
//!
//! Written without a netlink crate: this is the only netlink query here, and the preload library,
//! which contains this crate, has no other use for one.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::sockopt::{self, Timeout};
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// Defined in linux/sock_diag.h.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// Size of `struct nlmsghdr`.
const HEADER_LEN: usize = 16;
/// Maximum number of reads of an answer, with some hundred sockets each. The kernel skips what it
/// has listed before in each of them, so the time grows with the square of the number.
const READS_MAX: usize = 64;

/// Queries sockets. Its own stays open, so that the next query needs no free descriptor.
#[derive(Debug, Default)]
pub(crate) struct Diag(Option<OwnedFd>);

impl Diag {
    /// Queries all sockets that match `request`, a struct of the family that begins with its
    /// number; calls `each` with the message of each socket.
    ///
    /// # Errors
    /// `ENOENT` if the kernel does not support it; errors of opening and reading the socket;
    /// `InvalidData` if `each` rejects a message.
    pub(crate) fn dump(
        &mut self,
        request: &[u8],
        mut each: impl FnMut(&[u8]) -> Option<()>,
    ) -> io::Result<()> {
        // After an error, the rest of the answer may still be queued: the next query takes a new
        // socket.
        let fd = self.0.take().map_or_else(open, Ok)?;
        net::send(&fd, &message(request), SendFlags::empty())?;
        let mut bytes = vec![0; 1 << 15];
        for _ in 0..READS_MAX {
            let (len, _) = net::recv(&fd, bytes.as_mut_slice(), RecvFlags::empty())?;
            if parse(&bytes[..len], &mut each)? {
                self.0 = Some(fd);
                return Ok(());
            }
        }
        Err(io::Error::other("too many sockets to list"))
    }
}

fn open() -> io::Result<OwnedFd> {
    let fd = net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(net::netlink::SOCK_DIAG),
    )?;
    // The kernel answers at once; this only bounds the wait.
    sockopt::set_socket_timeout(&fd, Timeout::Recv, Some(Duration::from_secs(1)))?;
    Ok(fd)
}

fn message(request: &[u8]) -> Vec<u8> {
    let flags = (libc::NLM_F_REQUEST | libc::NLM_F_DUMP) as u16;
    let len = (HEADER_LEN + request.len()) as u32;
    let kind = SOCK_DIAG_BY_FAMILY.to_ne_bytes();
    [&len.to_ne_bytes()[..], &kind, &flags.to_ne_bytes(), &[0; 8], request].concat()
}

/// Parses one part of the answer; true if it was the last.
fn parse(bytes: &[u8], each: &mut impl FnMut(&[u8]) -> Option<()>) -> io::Result<bool> {
    let broken = || io::Error::new(io::ErrorKind::InvalidData, "truncated netlink message");
    let mut rest = bytes;
    while !rest.is_empty() {
        let len = read_u32(rest, 0).ok_or_else(broken)? as usize;
        let kind = read_u16(rest, 4).ok_or_else(broken)?;
        let message = rest.get(HEADER_LEN..len).ok_or_else(broken)?;
        match libc::c_int::from(kind) {
            libc::NLMSG_DONE => return Ok(true),
            libc::NLMSG_ERROR => {
                let code = read_u32(message, 0).ok_or_else(broken)? as i32;
                return Err(io::Error::from_raw_os_error(code.wrapping_neg()));
            }
            _ if kind == SOCK_DIAG_BY_FAMILY => each(message).ok_or_else(broken)?,
            _ => {}
        }
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

/// The value of the first attribute of this type.
pub(crate) fn attribute(mut attributes: &[u8], kind: u16) -> Option<&[u8]> {
    while attributes.len() >= 4 {
        let len = usize::from(read_u16(attributes, 0)?);
        let value = attributes.get(4..len)?;
        if read_u16(attributes, 2)? == kind {
            return Some(value);
        }
        attributes = attributes.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    None
}

pub(crate) fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

pub(crate) fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn message(kind: u16, body: &[u8]) -> Vec<u8> {
        let len = (HEADER_LEN + body.len()) as u32;
        let head = [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), &[0; 10]].concat();
        [&head[..], body].concat()
    }

    /// An attribute in the kernel's format.
    pub(crate) fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let len = (4 + value.len()) as u16;
        let mut bytes = [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn messages_are_read_until_the_last() {
        let answer = [message(SOCK_DIAG_BY_FAMILY, &[7; 8]), message(SOCK_DIAG_BY_FAMILY, &[8; 4])].concat();
        let mut found = Vec::new();
        let mut each = |message: &[u8]| {
            found.push(message.to_vec());
            Some(())
        };
        assert!(!parse(&answer, &mut each).unwrap());
        assert!(parse(&message(libc::NLMSG_DONE as u16, &[0; 4]), &mut each).unwrap());
        assert_eq!(found, [vec![7; 8], vec![8; 4]]);
        let attributes = [attribute(2, &[1, 2, 3]), attribute(1, &[9])].concat();
        assert_eq!(super::attribute(&attributes, 1), Some(&[9][..]));
        assert_eq!(super::attribute(&attributes, 3), None);
    }

    #[test]
    fn errors_and_truncated_replies_are_returned() {
        let error = message(libc::NLMSG_ERROR as u16, &(-libc::ENOENT).to_ne_bytes());
        let mut none = |_: &[u8]| Some(());
        assert_eq!(parse(&error, &mut none).unwrap_err().raw_os_error(), Some(libc::ENOENT));
        let whole = message(SOCK_DIAG_BY_FAMILY, &attribute(1, &[5; 8]));
        for len in 1..whole.len() {
            assert!(parse(&whole[..len], &mut none).is_err());
        }
        assert!(parse(&whole, &mut |_: &[u8]| None).is_err());
        // Wrong lengths: shorter than their content, or zero.
        for lie in 0..whole.len() as u32 {
            let mut bytes = whole.clone();
            bytes[..4].copy_from_slice(&lie.to_ne_bytes());
            _ = parse(&bytes, &mut none);
            let mut bytes = attribute(1, &[5; 8]);
            bytes[..2].copy_from_slice(&(lie as u16).to_ne_bytes());
            _ = super::attribute(&bytes, 2);
        }
    }
}
