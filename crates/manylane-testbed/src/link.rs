//! Links between hosts: names, addresses and counters of the devices.

use std::net::{Ipv4Addr, Ipv6Addr};

use anyhow::{Context, Result};

/// One end of a link: the facts about its device.
#[derive(Clone, Debug)]
pub(crate) struct LinkEnd {
    pub(crate) device: String,
    pub(crate) mac: [u8; 6],
    pub(crate) mtu: u32,
    pub(crate) ip4: Ipv4Addr,
    pub(crate) ip6: Option<Ipv6Addr>,
}

impl LinkEnd {
    /// The end of link `link` on host `host`. Everything follows from the two numbers, so that
    /// each end can compute the other.
    pub(crate) fn new(link: u8, host: u8, mtu: u32, ipv6: bool) -> LinkEnd {
        let number = host + 1;
        LinkEnd {
            device: device_name(link),
            // 02: administered locally. Then "ml", to be recognized in a dump.
            mac: [0x02, b'm', b'l', 0, link, number],
            mtu,
            ip4: Ipv4Addr::new(10, 77, link, number),
            ip6: ipv6.then(|| Ipv6Addr::new(0xfd77, 0, 0, link.into(), 0, 0, 0, number.into())),
        }
    }

    /// Lines for `ip -batch` that configure this end, run inside its host.
    pub(crate) fn ip_batch_config(&self, peer: Option<&LinkEnd>) -> String {
        let device = &self.device;
        let mut lines = format!("link set dev {device} addrgenmode none\n");
        lines += &format!("address replace {}/24 dev {device}\n", self.ip4);
        if let Some(ip6) = self.ip6 {
            // Without duplicate address detection, which would delay the use of a new address.
            lines += &format!("address replace {ip6}/64 dev {device} nodad\n");
        }
        lines += &format!("link set dev {device} up\n");
        // With the neighbour known, the first frames of a burst are not lost behind its resolution.
        if let Some(peer) = peer {
            let mac = format_mac(&peer.mac);
            lines += &format!("neighbour replace {} lladdr {mac} dev {device} nud permanent\n", peer.ip4);
            if let Some(ip6) = peer.ip6 {
                lines += &format!("neighbour replace {ip6} lladdr {mac} dev {device} nud permanent\n");
            }
        }
        lines
    }
}

/// Name of the devices at both ends of a link; the ends are in different namespaces.
pub(crate) fn device_name(link: u8) -> String {
    format!("link{link}")
}

pub(crate) fn format_mac(mac: &[u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// The kernel's counters of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceCounters {
    /// Frames received.
    pub rx_packets: u64,
    /// Frames sent.
    pub tx_packets: u64,
    /// Frames that the device did not accept for sending.
    pub tx_dropped: u64,
}

/// Counters of `device` in the namespace of the calling thread.
///
/// # Errors
/// Fails if there is no such device there.
pub fn device_counters(device: &str) -> Result<DeviceCounters> {
    // Not /proc/net/dev, which shows the namespace of the main thread.
    let table = std::fs::read_to_string("/proc/thread-self/net/dev").context("reading device counters")?;
    parse_counters(&table, device)
        .with_context(|| format!("no counters for the device {device} in this namespace"))
}

fn parse_counters(table: &str, device: &str) -> Option<DeviceCounters> {
    let row = table.lines().find_map(|line| line.trim_start().strip_prefix(device)?.strip_prefix(':'))?;
    let numbers: Vec<u64> = row.split_whitespace().map_while(|word| word.parse().ok()).collect();
    // bytes packets errs drop fifo frame compressed multicast, then the same for sending.
    Some(DeviceCounters {
        rx_packets: *numbers.get(1)?,
        tx_packets: *numbers.get(9)?,
        tx_dropped: *numbers.get(11)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read_from_the_table() {
        let table = "Inter-|   Receive  |  Transmit\n face |bytes    packets\n\
                     link10: 9 9 9 9 9 9 9 9 9 9 9 9 9 9 9 9\n\
                     link1: 100 2 0 3 0 0 0 0 400 5 0 6 0 0 0 0\n";
        let counters = parse_counters(table, "link1").unwrap();
        assert_eq!((counters.rx_packets, counters.tx_packets, counters.tx_dropped), (2, 5, 6));
        assert_eq!(parse_counters(table, "link2"), None);
        assert_eq!(parse_counters("link1: 1 2", "link1"), None);
    }

    #[test]
    fn ends_of_a_link_differ_in_every_address() {
        let (a, b) = (LinkEnd::new(3, 0, 1500, true), LinkEnd::new(3, 1, 1500, true));
        assert_eq!(a.device, b.device);
        assert_eq!(a.ip4.to_string(), "10.77.3.1");
        assert_eq!(b.ip6.unwrap().to_string(), "fd77:0:0:3::2");
        assert_eq!(format_mac(&b.mac), "02:6d:6c:00:03:02");
        assert!(
            LinkEnd::new(0, 0, 1500, false).ip_batch_config(None).lines().all(|line| !line.contains("fd77"))
        );
        assert!(a.ip_batch_config(Some(&b)).contains("neighbour replace 10.77.3.2 lladdr 02:6d:6c:00:03:02"));
    }
}
