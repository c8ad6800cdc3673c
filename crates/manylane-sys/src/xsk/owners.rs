//! The owners of a queue: the AF_XDP sockets of all processes, by netlink (Linux 5.1,
//! `CONFIG_XDP_SOCKETS_DIAG`).

use std::io;

use crate::netlink::{AttrReader, NETLINK_SOCK_DIAG, NLM_F_DUMP, NetlinkSocket, SOCK_DIAG_BY_FAMILY, u32_at};

/// Defined in linux/xdp_diag.h.
const XDP_SHOW_INFO: u32 = 1;
const XDP_DIAG_INFO: u16 = 1;
/// Sizes of `struct xdp_diag_req` and `struct xdp_diag_msg`.
const REQUEST_LEN: usize = 20;
const MESSAGE_LEN: usize = 16;

/// Inodes of the AF_XDP sockets that are bound to a queue of a device in the calling thread's
/// network namespace; `/proc/PID/fd` shows them as `socket:[INODE]`. A [`Queue`](super::Queue) has
/// one for each member, and the one with which it was opened.
///
/// # Errors
/// `ENOENT` if the kernel does not support it (before Linux 5.1, or without
/// `CONFIG_XDP_SOCKETS_DIAG`); errors of opening and reading the socket.
pub fn owners(ifindex: u32, queue: u32) -> io::Result<Vec<u64>> {
    let mut request = [0; REQUEST_LEN];
    request[0] = libc::AF_XDP as u8;
    request[8..12].copy_from_slice(&XDP_SHOW_INFO.to_ne_bytes());
    let mut found = Vec::new();
    let mut kernel = NetlinkSocket::open(NETLINK_SOCK_DIAG)?;
    kernel.request(SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, &request, |_, message| {
        found.extend(parse_message(message).filter(|(_, bound)| *bound == Some((ifindex, queue))));
    })?;
    Ok(found.into_iter().map(|(inode, _)| inode).collect())
}

/// The inode of a socket, with its device and queue; none of the latter if it is unbound.
fn parse_message(message: &[u8]) -> Option<(u64, Option<(u32, u32)>)> {
    let inode = u32_at(message, 4)?;
    let info = AttrReader::new(message.get(MESSAGE_LEN..)?).find(XDP_DIAG_INFO);
    Some((inode.into(), info.and_then(|info| Some((u32_at(info, 0)?, u32_at(info, 4)?)))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::Attrs;

    #[test]
    fn a_diag_attribute_gives_the_bound_device() {
        let socket = |inode: u32, attributes: &[u8]| {
            [&[libc::AF_XDP as u8, 3, 0, 0][..], &inode.to_ne_bytes(), &[0; 8], attributes].concat()
        };
        let info = |ifindex: u32, queue: u32| {
            let value = [ifindex.to_ne_bytes(), queue.to_ne_bytes()].concat();
            Attrs::default().bytes(XDP_DIAG_INFO, &value).as_bytes().to_vec()
        };
        let user = Attrs::default().bytes(2, &[1, 2, 3]).as_bytes().to_vec();
        assert_eq!(parse_message(&socket(7, &[user, info(3, 1)].concat())), Some((7, Some((3, 1)))));
        assert_eq!(parse_message(&socket(10, &[])), Some((10, None)));
        let whole = socket(7, &info(3, 1));
        for len in 0..MESSAGE_LEN {
            assert_eq!(parse_message(&whole[..len]), None);
        }
        for len in MESSAGE_LEN..whole.len() {
            assert_eq!(parse_message(&whole[..len]), Some((7, None)));
        }
    }
}
