//! The kernel's tables of bound UDP sockets, `/proc/net/udp` and `/proc/net/udp6`
//! (proc_net_tcp.rst, udp4_seq_show).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// A row of the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Bound address.
    pub local: SocketAddr,
    /// Connected peer; port 0 if there is none.
    pub peer: SocketAddr,
    /// Bytes in its receive queue, including the kernel's overhead per datagram.
    pub queued: u64,
    /// Uid of its owner.
    pub uid: u32,
    /// Its inode, as in `/proc/PID/fd` ([`sock::inode`](crate::sock::inode)).
    pub inode: u64,
    /// Datagrams dropped since it was opened, for lack of room or because of a wrong checksum.
    pub drops: u64,
}

impl Entry {
    /// Parses a row; `None` for the heading, and for truncated rows.
    #[must_use]
    pub fn parse(line: &str) -> Option<Self> {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let (_, queued) = fields.get(4)?.split_once(':')?;
        Some(Self {
            local: parse_addr(fields.get(1)?)?,
            peer: parse_addr(fields.get(2)?)?,
            queued: u64::from_str_radix(queued, 16).ok()?,
            uid: fields.get(7)?.parse().ok()?,
            inode: fields.get(9)?.parse().ok()?,
            drops: fields.get(12)?.parse().ok()?,
        })
    }
}

/// Parses an address and a port as printed in these tables and those of TCP.
#[must_use]
pub fn parse_addr(field: &str) -> Option<SocketAddr> {
    let (ip, port) = field.split_once(':')?;
    Some(SocketAddr::new(parse_ip(ip)?, u16::from_str_radix(port, 16).ok()?))
}

/// Hexadecimal words in the byte order of the machine.
fn parse_ip(hex: &str) -> Option<IpAddr> {
    let mut bytes = Vec::with_capacity(16);
    for at in (0..hex.len()).step_by(8) {
        bytes.extend(u32::from_str_radix(hex.get(at..at + 8)?, 16).ok()?.to_ne_bytes());
    }
    match bytes.len() {
        4 => Some(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?).into()),
        16 => Some(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn udp_table_lines_are_parsed() {
        let line = "  412: 0100007F:0035 0200007F:1F90 01 00000000:00000B00 00:00000000 00000000  1000        0 5151 2 0000000000000000 17";
        let entry = Entry::parse(line).unwrap();
        if cfg!(target_endian = "little") {
            assert_eq!(entry.local, "127.0.0.1:53".parse().unwrap());
            assert_eq!(entry.peer, "127.0.0.2:8080".parse().unwrap());
        }
        assert_eq!((entry.queued, entry.uid, entry.inode, entry.drops), (0xb00, 1000, 5151, 17));
        let line = "1: 00000000000000000000000001000000:0035 00000000000000000000000000000000:0000 07 0:0 0:0 0 0 0 1 2 0 3";
        let entry = Entry::parse(line).unwrap();
        assert!(entry.local.is_ipv6() && entry.peer.port() == 0 && entry.drops == 3);
    }

    #[test]
    fn malformed_lines_are_skipped() {
        let header = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops";
        for bad in
            [header, "", "1:", "1: 0100007F", "1: 0100007F:0035", "1: zz:0035 0:0 0 0:0 0 0 0 0 0 1 2 3 4"]
        {
            assert_eq!(Entry::parse(bad), None, "{bad}");
        }
    }
}
