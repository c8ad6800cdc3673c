//! Devices, addresses and routes of this network namespace, and its UDP sockets' buffers, by
//! netlink.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use manylane_sys::netlink::{
    AttrReader, Attrs, NETLINK_ROUTE, NETLINK_SOCK_DIAG, NLM_F_DUMP, NetlinkSocket, SOCK_DIAG_BY_FAMILY,
    u16_at, u32_at, u64_at,
};

use super::facts::{Device, DeviceCounters};

const GET_LINK: u16 = 18;
const GET_ADDRESS: u16 = 22;
const GET_ROUTE: u16 = 26;
const INET: u8 = 2;
const INET6: u8 = 10;

/// All devices, with the facts of rtnetlink.
pub(crate) fn devices() -> io::Result<Vec<Device>> {
    let mut found = Vec::new();
    // struct ifinfomsg.
    NetlinkSocket::open(NETLINK_ROUTE)?
        .request(GET_LINK, NLM_F_DUMP, &[0; 16], |_, message| found.extend(device(message)))?;
    let over: Vec<(u32, u32)> = masters(&found);
    for device in &mut found {
        device
            .1
            .below
            .extend(over.iter().filter(|(master, _)| *master == device.1.index).map(|(_, low)| low));
    }
    Ok(found.into_iter().map(|(_, device)| device).collect())
}

/// Pairs of a bond, bridge or team and a device in it.
fn masters(devices: &[(Option<u32>, Device)]) -> Vec<(u32, u32)> {
    devices.iter().filter_map(|(master, device)| Some(((*master)?, device.index))).collect()
}

fn device(message: &[u8]) -> Option<(Option<u32>, Device)> {
    const ADDRESS: u16 = 1;
    const IFNAME: u16 = 3;
    const LINK: u16 = 5;
    const MASTER: u16 = 10;
    const LINKINFO: u16 = 18;
    const STATS64: u16 = 23;
    const NUM_RX_QUEUES: u16 = 32;
    const LINK_NETNSID: u16 = 37;
    const XDP: u16 = 43;
    const UP: u32 = 1;
    const LOOPBACK: u32 = 8;
    let (index, flags) = (u32_at(message, 4)?, u32_at(message, 8)?);
    let attrs = AttrReader::new(message.get(16..)?);
    let below = attrs.u32(LINK).filter(|&low| low != index && attrs.find(LINK_NETNSID).is_none());
    let attached = attrs.nest(XDP).and_then(|xdp| xdp.u8(2));
    let device = Device {
        name: attrs.text(IFNAME)?,
        index,
        mac: attrs
            .find(ADDRESS)
            .map(|mac| mac.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":")),
        up: flags & UP != 0,
        loopback: flags & LOOPBACK != 0,
        kind: attrs.nest(LINKINFO).and_then(|info| info.text(1)),
        rx_queues: attrs.u32(NUM_RX_QUEUES),
        xdp_attached: match attached {
            Some(1) => Some("driver".into()),
            Some(2) => Some("generic".into()),
            Some(3) => Some("hardware".into()),
            Some(4) => Some("several".into()),
            _ => None,
        },
        counters: attrs.find(STATS64).map(counters).unwrap_or_default(),
        below: below.filter(|&low| low != 0).into_iter().collect(),
        ..Device::default()
    };
    Some((attrs.u32(MASTER), device))
}

/// `struct rtnl_link_stats64`.
fn counters(stats: &[u8]) -> DeviceCounters {
    let field = |number: usize| u64_at(stats, number * 8).unwrap_or(0);
    DeviceCounters {
        rx_packets: field(0),
        rx_errors: field(4),
        rx_dropped: field(6),
        rx_over: field(11),
        rx_crc: field(12),
        rx_fifo: field(14),
        rx_missed: field(15),
    }
}

/// Each local address with the index of its device.
pub(crate) fn addresses() -> io::Result<Vec<(IpAddr, u32)>> {
    const ADDRESS: u16 = 1;
    const LOCAL: u16 = 2;
    let mut found = Vec::new();
    // struct ifaddrmsg.
    NetlinkSocket::open(NETLINK_ROUTE)?.request(GET_ADDRESS, NLM_F_DUMP, &[0; 8], |_, message| {
        let attrs = AttrReader::after(message, 8);
        let ip = attrs.find(LOCAL).or_else(|| attrs.find(ADDRESS)).and_then(ip);
        found.extend(ip.zip(u32_at(message, 4)));
    })?;
    Ok(found)
}

/// Indices of the devices of default routes.
pub(crate) fn default_routes() -> io::Result<Vec<u32>> {
    const OIF: u16 = 4;
    const MULTIPATH: u16 = 9;
    let mut found = Vec::new();
    for family in [INET, INET6] {
        let mut kernel = NetlinkSocket::open(NETLINK_ROUTE)?;
        // struct rtmsg.
        let body = [&[family][..], &[0; 11]].concat();
        kernel.request(GET_ROUTE, NLM_F_DUMP, &body, |_, message| {
            // A prefix of length 0, and a unicast route.
            let [_, 0, _, _, _, _, _, 1, ..] = message else { return };
            let attrs = AttrReader::after(message, 12);
            found.extend(attrs.u32(OIF));
            let mut next_hops = attrs.find(MULTIPATH).unwrap_or_default();
            // struct rtnexthop: length, flags, hops, index.
            while let (Some(len), Some(index)) = (u16_at(next_hops, 0), u32_at(next_hops, 4)) {
                found.push(index);
                next_hops = next_hops.get(usize::from(len.max(8)).next_multiple_of(4)..).unwrap_or_default();
            }
        })?;
    }
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// Index of the device of the route to `peer`.
pub(crate) fn route_to(peer: IpAddr) -> io::Result<Option<u32>> {
    const DST: u16 = 1;
    const OIF: u16 = 4;
    let (family, bytes) = match peer {
        IpAddr::V4(ip) => (INET, ip.octets().to_vec()),
        IpAddr::V6(ip) => (INET6, ip.octets().to_vec()),
    };
    let bits = bytes.len() as u8 * 8;
    let mut body = vec![family, bits];
    body.resize(12, 0);
    body.extend(Attrs::default().bytes(DST, &bytes).as_bytes());
    let mut found = None;
    NetlinkSocket::open(NETLINK_ROUTE)?.request(GET_ROUTE, 0, &body, |_, message| {
        found = AttrReader::after(message, 12).u32(OIF);
    })?;
    Ok(found)
}

fn ip(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => Some(IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?)),
        16 => Some(IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?)),
        _ => None,
    }
}

/// Size of the receive buffer of each UDP socket, by inode. Empty on a kernel without
/// `CONFIG_INET_UDP_DIAG`.
pub(crate) fn receive_buffers() -> io::Result<BTreeMap<u64, u64>> {
    const UDP: u8 = 17;
    const SKMEMINFO: u16 = 7;
    let mut found = BTreeMap::new();
    for family in [INET, INET6] {
        // struct inet_diag_req_v2: all states, and the wanted attributes.
        let mut body = vec![family, UDP, 1 << (SKMEMINFO - 1), 0];
        body.extend(u32::MAX.to_ne_bytes());
        body.resize(56, 0);
        let mut kernel = NetlinkSocket::open(NETLINK_SOCK_DIAG)?;
        kernel.request(SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, &body, |_, message| {
            // struct inet_diag_msg is of 72 bytes, the last of them the inode; then rmem_alloc and
            // rcvbuf.
            let attrs = AttrReader::after(message, 72);
            let buffer = attrs.find(SKMEMINFO).and_then(|memory| u32_at(memory, 4));
            if let (Some(inode), Some(buffer)) = (u32_at(message, 68), buffer) {
                found.insert(inode.into(), buffer.into());
            }
        })?;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn loopback_device_and_addresses_are_found() {
        let devices = devices().unwrap();
        let lo = devices.iter().find(|device| device.name == "lo").unwrap();
        assert!(lo.loopback && lo.up && lo.index == 1 && lo.below.is_empty());
        assert!(addresses().unwrap().contains(&("127.0.0.1".parse().unwrap(), 1)));
        assert_eq!(route_to("127.0.0.1".parse().unwrap()).unwrap(), Some(1));
        assert!(!default_routes().unwrap().contains(&1));
    }

    #[test]
    fn the_buffer_of_a_socket_is_found() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let inode = manylane_sys::sock::inode(socket.as_fd()).unwrap();
        let default = std::fs::read_to_string("/proc/sys/net/core/rmem_default").unwrap();
        // A kernel without `CONFIG_INET_UDP_DIAG` returns an error.
        if let Ok(found) = receive_buffers() {
            assert_eq!(found.get(&inode).copied(), default.trim().parse().ok());
        }
    }

    #[test]
    fn truncated_messages_are_skipped() {
        for len in 0..16 {
            assert!(device(&vec![0; len]).is_none());
        }
        assert_eq!(
            counters(&[1, 0, 0, 0, 0, 0, 0, 0, 9]),
            DeviceCounters { rx_packets: 1, ..Default::default() }
        );
    }
}
