//! Datagrams queued for the program, as seen from outside: in the kernel's queues of its lanes,
//! and in its leased rings.

use std::collections::BTreeMap;
use std::fs;

use manylane::{LeasedRing, LeasedRings};
use manylane_sys::udp_table::Entry;

use crate::doctor::link::receive_buffers;

/// The queue of a kernel socket.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Queue {
    /// Memory of the queued datagrams.
    pub(super) bytes: u64,
    /// Memory limit at which the kernel drops; not all kernels report it (`CONFIG_INET_UDP_DIAG`).
    pub(super) limit: Option<u64>,
    /// Datagrams that found the queue full, or were invalid, since it was opened.
    pub(super) drops: u64,
}

/// A snapshot of the queues.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Backlog {
    /// By inode of the kernel socket, in this network namespace.
    pub(super) queues: BTreeMap<u64, Queue>,
    /// Leased rings, with engine xdp.
    pub(super) rings: Vec<LeasedRing>,
}

impl Backlog {
    pub(super) fn snapshot(rings: Option<&LeasedRings>) -> Self {
        let limits = receive_buffers().unwrap_or_default();
        let mut queues = BTreeMap::new();
        for table in ["/proc/net/udp", "/proc/net/udp6"] {
            let text = fs::read_to_string(table).unwrap_or_default();
            queues.extend(text.lines().filter_map(Entry::parse).map(|entry| {
                let limit = limits.get(&entry.inode).copied();
                (entry.inode, Queue { bytes: entry.queued, limit, drops: entry.drops })
            }));
        }
        Self { queues, rings: rings.map(LeasedRings::snapshot).unwrap_or_default() }
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn loopback_queued_bytes_are_read_from_outside() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let inode = manylane_sys::sock::inode(socket.as_fd()).unwrap();
        // The kernel omits entries of a table that changes meanwhile.
        let scan = |_| Backlog::snapshot(None).queues.get(&inode).copied();
        let there = || (0..100).find_map(scan).unwrap();
        assert_eq!((there().bytes, there().drops), (0, 0));
        manylane_sys::sock::set_buffer(socket.as_fd(), manylane_sys::sock::Buffer::Receive, 4096).unwrap();
        for _ in 0..100 {
            socket.send_to(b"x", socket.local_addr().unwrap()).unwrap();
        }
        let full = there();
        assert!(full.bytes > 0 && full.drops > 0 && full.drops < 100, "{full:?}");
        assert!(full.limit.is_none_or(|limit| limit > 0 && limit < 100_000), "{full:?}");
    }
}
