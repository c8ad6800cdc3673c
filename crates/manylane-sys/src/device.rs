//! Network devices: their properties by ioctl, in the namespace of the calling thread.

use std::ffi::CStr;
use std::io;

use crate::netlink::{AttrReader, NETLINK_ROUTE, NetlinkSocket};
use crate::netns::{device_flags, device_index, ethtool, ethtool_value, ifreq, ioctl};

/// Index of the loopback device of every namespace (`LOOPBACK_IFINDEX` of the kernel).
pub const LOOPBACK_IFINDEX: u32 = 1;

/// Name of the device with this index.
///
/// # Errors
/// `ENXIO` if there is none.
pub fn name(index: u32) -> io::Result<String> {
    let mut name = [0_u8; libc::IF_NAMESIZE];
    // SAFETY: the array has the kernel's maximum length of names, and if_indextoname(3) terminates
    // the name.
    if unsafe { libc::if_indextoname(index, name.as_mut_ptr().cast()) }.is_null() {
        return Err(io::Error::last_os_error());
    }
    let name = CStr::from_bytes_until_nul(&name).map_err(io::Error::other)?;
    Ok(name.to_string_lossy().into_owned())
}

/// MAC address of an Ethernet device.
///
/// # Errors
/// `ENODEV` if there is no such device; `ENOTSUP` if it is not Ethernet.
pub fn mac(name: &str) -> io::Result<[u8; 6]> {
    let mut request = ifreq(name)?;
    ioctl(libc::SIOCGIFHWADDR, &mut request)?;
    // SAFETY: SIOCGIFHWADDR filled this member of the union.
    let addr = unsafe { request.ifr_ifru.ifru_hwaddr };
    if addr.sa_family != libc::ARPHRD_ETHER {
        return Err(io::Error::from_raw_os_error(libc::ENOTSUP));
    }
    let mut mac = [0; 6];
    for (to, from) in mac.iter_mut().zip(addr.sa_data) {
        *to = from as u8;
    }
    Ok(mac)
}

/// Largest IP packet that the device sends, in bytes.
///
/// # Errors
/// `ENODEV` if there is no such device.
pub fn mtu(name: &str) -> io::Result<u32> {
    let mut request = ifreq(name)?;
    ioctl(libc::SIOCGIFMTU, &mut request)?;
    // SAFETY: SIOCGIFMTU filled this member of the union.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    u32::try_from(mtu).map_err(io::Error::other)
}

/// True if the device is up.
///
/// # Errors
/// `ENODEV` if there is no such device.
pub fn is_up(name: &str) -> io::Result<bool> {
    Ok(device_flags(name)? & libc::IFF_UP != 0)
}

/// `struct ethtool_channels` of linux/ethtool.h.
#[repr(C)]
#[derive(Default)]
struct Channels {
    cmd: u32,
    max: [u32; 4],
    rx: u32,
    tx: u32,
    other: u32,
    combined: u32,
}

/// Numbers of queues in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queues {
    /// Receive queues.
    pub receive: u32,
    /// Send queues; often the same ones.
    pub send: u32,
}

/// Queues that the device has in use (`ETHTOOL_GCHANNELS`). One in each direction if the driver
/// does not report them; veth does since Linux 5.13, and before uses all that it was created with.
///
/// # Errors
/// `ENODEV` if there is no such device.
pub fn queues(name: &str) -> io::Result<Queues> {
    const ETHTOOL_GCHANNELS: u32 = 0x3c;
    let mut channels = Channels { cmd: ETHTOOL_GCHANNELS, ..Channels::default() };
    match ethtool(name, &mut channels) {
        Err(err) if err.raw_os_error() != Some(libc::EOPNOTSUPP) => Err(err),
        Err(_) if driver(name)? == "veth" => created_queues(name),
        _ => {
            let Channels { rx, tx, combined, .. } = channels;
            Ok(Queues { receive: (rx + combined).max(1), send: (tx + combined).max(1) })
        }
    }
}

/// Queues that the device was created with, in use or not (Linux 3.8).
fn created_queues(name: &str) -> io::Result<Queues> {
    /// The head of `struct ifinfomsg`: its family and type, and the index after them.
    const HEAD_LEN: usize = 16;
    let mut request = [0; HEAD_LEN];
    request[4..8].copy_from_slice(&device_index(name)?.to_ne_bytes());
    let mut found = Queues { receive: 1, send: 1 };
    NetlinkSocket::open(NETLINK_ROUTE)?.request(libc::RTM_GETLINK, 0, &request, |_, link| {
        let attrs = AttrReader::after(link, HEAD_LEN);
        let count = |kind| attrs.u32(kind).unwrap_or(1).max(1);
        found = Queues { receive: count(libc::IFLA_NUM_RX_QUEUES), send: count(libc::IFLA_NUM_TX_QUEUES) };
    })?;
    Ok(found)
}

/// Name of the driver (`ETHTOOL_GDRVINFO`); empty if there is none.
///
/// # Errors
/// `ENODEV` if there is no such device.
pub fn driver(name: &str) -> io::Result<String> {
    /// `struct ethtool_drvinfo` of linux/ethtool.h.
    #[repr(C)]
    struct Info {
        cmd: u32,
        driver: [u8; 32],
        rest: [u8; 160],
    }
    const ETHTOOL_GDRVINFO: u32 = 3;
    let mut info = Info { cmd: ETHTOOL_GDRVINFO, driver: [0; 32], rest: [0; 160] };
    const { assert!(size_of::<Info>() == 196) };
    match ethtool(name, &mut info) {
        Ok(()) => {
            let end = info.driver.iter().position(|&byte| byte == 0).unwrap_or(info.driver.len());
            Ok(String::from_utf8_lossy(&info.driver[..end]).into_owned())
        }
        Err(err) if err.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(String::new()),
        Err(err) => Err(err),
    }
}

/// True if the driver strips VLAN tags from received frames (`ETHTOOL_GFLAGS`; ethtool's
/// `rxvlan`): XDP programs then see no tags. False if the driver does not report it.
///
/// # Errors
/// `ENODEV` if there is no such device.
pub fn strips_vlan_tags(name: &str) -> io::Result<bool> {
    const ETHTOOL_GFLAGS: u32 = 0x25;
    const ETH_FLAG_RXVLAN: u32 = 1 << 8;
    match ethtool_value(name, ETHTOOL_GFLAGS, 0) {
        Ok(flags) => Ok(flags & ETH_FLAG_RXVLAN != 0),
        Err(err) if err.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(false),
        Err(err) => Err(err),
    }
}

/// Flow types with a configurable receive hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowType {
    /// UDP over IPv4.
    Udp4,
    /// UDP over IPv6.
    Udp6,
}

/// `struct ethtool_rxnfc` of linux/ethtool.h.
#[repr(C)]
struct Rxnfc {
    cmd: u32,
    flow_type: u32,
    data: u64,
    /// `struct ethtool_rx_flow_spec` and the rest; zero for these requests.
    rest: [u64; 22],
}

// The kernel copies the whole struct: 16 bytes, the flow of 168, and a number padded to 8.
const _: () = assert!(size_of::<Rxnfc>() == 192);

impl Rxnfc {
    fn new(cmd: u32, flow: FlowType, data: u64) -> Self {
        let flow_type = match flow {
            FlowType::Udp4 => 2,
            FlowType::Udp6 => 6,
        };
        Self { cmd, flow_type, data, rest: [0; 22] }
    }
}

/// Source and destination address in the receive hash, as bits of [`flow_hash`] (`RXH_IP_SRC`,
/// `RXH_IP_DST`).
pub const HASH_ADDRESSES: u64 = 1 << 4 | 1 << 5;

/// Source and destination port in the receive hash, as bits of [`flow_hash`] (`RXH_L4_B_0_1`,
/// `RXH_L4_B_2_3`).
pub const HASH_PORTS: u64 = 1 << 6 | 1 << 7;

/// Header fields that the device's receive hash covers, as bits `RXH_*` (`ETHTOOL_GRXFH`).
///
/// # Errors
/// `EOPNOTSUPP` if the driver does not report them; `ENODEV`.
pub fn flow_hash(name: &str, flow: FlowType) -> io::Result<u64> {
    const ETHTOOL_GRXFH: u32 = 0x29;
    let mut question = Rxnfc::new(ETHTOOL_GRXFH, flow, 0);
    ethtool(name, &mut question)?;
    Ok(question.data)
}

/// Sets the header fields of the receive hash (`ETHTOOL_SRXFH`).
///
/// # Errors
/// `EOPNOTSUPP` or `EINVAL` if the device does not support it; `EPERM` without CAP_NET_ADMIN;
/// `ENODEV`.
pub fn set_flow_hash(name: &str, flow: FlowType, fields: u64) -> io::Result<()> {
    const ETHTOOL_SRXFH: u32 = 0x2a;
    ethtool(name, &mut Rxnfc::new(ETHTOOL_SRXFH, flow, fields))
}

/// Receive queue of each entry of the indirection table, by which the device maps hashes to queues
/// (RSS, `ETHTOOL_GRXFHINDIR`).
///
/// # Errors
/// `EOPNOTSUPP` if the device has no such table, or the driver does not report it; `EMSGSIZE` if it
/// has more than 4,096 entries; `ENODEV`.
pub fn indirection_table(name: &str) -> io::Result<Vec<u32>> {
    /// `struct ethtool_rxfh_indir` of linux/ethtool.h, with room for a table.
    #[repr(C)]
    struct Table {
        cmd: u32,
        size: u32,
        entries: [u32; 4096],
    }
    const ETHTOOL_GRXFHINDIR: u32 = 0x38;
    // With a size of 0, the kernel returns the size alone.
    let mut table = Table { cmd: ETHTOOL_GRXFHINDIR, size: 0, entries: [0; 4096] };
    ethtool(name, &mut table)?;
    if table.size as usize > table.entries.len() {
        return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
    }
    ethtool(name, &mut table)?;
    Ok(table.entries[..table.size as usize].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_device_properties_are_read() {
        let name = name(1).unwrap();
        assert_eq!(name, "lo");
        assert!(mtu(&name).unwrap() >= 1280);
        assert_eq!(mac(&name).unwrap_err().raw_os_error(), Some(libc::ENOTSUP));
        assert_eq!(queues(&name).unwrap().receive, 1);
        assert!(driver(&name).is_ok() && is_up(&name).is_ok());
        assert!(flow_hash("lo", FlowType::Udp4).is_err() && set_flow_hash("lo", FlowType::Udp6, 0).is_err());
        assert_eq!(indirection_table(&name).unwrap_err().raw_os_error(), Some(libc::EOPNOTSUPP));
        assert!(!strips_vlan_tags(&name).unwrap() && strips_vlan_tags("nosuchdevice").is_err());
        assert!(mtu("nosuchdevice").is_err());
    }
}
