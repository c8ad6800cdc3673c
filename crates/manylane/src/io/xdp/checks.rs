//! Decides where XDP may bypass the kernel's input path. Addresses and devices for which the
//! kernel could decide otherwise are left to it. These checks cost nothing per frame. docs/xdp.md
//! has the whole table.

use std::fs;
use std::net::{IpAddr, Ipv6Addr};

use manylane_bpf::abi;
use manylane_sys::device as sys;

use super::route::LocalState;
use crate::error::{Error, ErrorKind, Result};

/// Attach mode of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttachMode {
    /// In the driver, before anything is allocated for a frame.
    Native,
    /// In the kernel, behind the driver: works on any device, but slower. For tests and old
    /// drivers.
    Generic,
}

/// The addresses whose datagrams on `device` are redirected to a socket bound to `bound`; no IPv4
/// if `leaves_ip4`.
pub(super) fn steered_addrs(
    bound: IpAddr,
    only_v6: bool,
    device: u32,
    leaves_ip4: bool,
    locals: &LocalState,
) -> Vec<IpAddr> {
    let LocalState { addresses, masters, vrfs, .. } = locals;
    let is_part = |device: u32| masters.iter().any(|(part, _)| *part == device);
    // The device has become part of a master, which decides about its frames.
    if is_part(device) {
        return Vec::new();
    }
    // Without any IPv6 address, IPv6 is off on the device (disable_ipv6).
    let has_v6 = addresses.iter().any(|(at, ip)| *at == device && ip.is_ipv6());
    let takes = |ip: IpAddr| match bound {
        _ if !bound.is_unspecified() => ip == bound.to_canonical(),
        IpAddr::V4(_) => ip.is_ipv4(),
        IpAddr::V6(_) => ip.is_ipv6() || !only_v6,
    };
    // As in the kernel, any device accepts datagrams to the addresses of others, but not into a
    // VRF: to its own addresses and those of its parts. Link-local addresses are valid on their own
    // link only, and loopback addresses never arrive from a wire.
    let wanted = |(at, ip): &(u32, IpAddr)| {
        let family = if ip.is_ipv4() { !leaves_ip4 } else { has_v6 };
        let elsewhere = ip.is_loopback() || is_link_local(*ip) || is_part(*at) || vrfs.contains(at);
        takes(*ip) && family && !elsewhere
    };
    addresses.iter().filter(|address| wanted(address)).map(|(_, ip)| *ip).collect()
}

/// Source addresses that are not accepted.
#[derive(Debug, Default)]
pub(super) struct BlockedSources {
    /// Our own addresses, and broadcast addresses.
    pub(super) addresses: Vec<IpAddr>,
    /// Those of devices that are down, as far as the program has room for them: there may be one
    /// for each service of a cluster.
    pub(super) down_addresses: Vec<IpAddr>,
}

pub(super) fn blocked_sources(locals: &LocalState) -> BlockedSources {
    let LocalState { addresses, down_addresses, broadcasts, .. } = locals;
    let broadcasts = broadcasts.iter().map(|ip| IpAddr::from(*ip));
    BlockedSources {
        addresses: addresses.iter().map(|(_, ip)| *ip).chain(broadcasts).collect(),
        down_addresses: down_addresses.iter().map(|(_, ip)| *ip).collect(),
    }
}

/// Refuses a device that is part of another one, or is made of others.
///
/// The master decides about the frames of its parts: which ones a bridge forwards, whether a port
/// of a bond is active, what a VRF may reach. A master in turn hands its program to its parts, but
/// an XSK accepts only frames that arrived on its own device, so all redirected frames would be
/// lost. Generic XDP runs where frames have arrived at the upper device.
pub(super) fn check_device(device: u32, attach: AttachMode, locals: &LocalState) -> Result<()> {
    let name = |index: u32| sys::name(index).unwrap_or_else(|_| format!("device {index}"));
    let LocalState { masters, .. } = locals;
    if let Some((_, master)) = masters.iter().find(|(part, _)| *part == device) {
        let (part, master) = (name(device), name(*master));
        let message = format!(
            "{part} is a part of {master}, which handles its frames: remove it from {master}, or use engine mmsg"
        );
        return Err(Error::new(ErrorKind::Unsupported, message));
    }
    let parts: Vec<String> =
        masters.iter().filter(|(_, master)| *master == device).map(|(part, _)| name(*part)).collect();
    if attach == AttachMode::Native && !parts.is_empty() {
        return Err(made_of_others(&name(device), &parts.join(", ")));
    }
    Ok(())
}

/// Refuses a device of a kind that is made of others, even if it has no parts yet: a bond that is
/// opened during boot gets its parts later, and hands its program to them.
pub(super) fn check_kind(name: &str, driver: &str, attach: AttachMode) -> Result<()> {
    if attach == AttachMode::Native && matches!(driver, "bonding" | "bridge" | "team") {
        return Err(made_of_others(name, "any that it is given"));
    }
    Ok(())
}

fn made_of_others(name: &str, parts: &str) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!(
            "{name} is made of other devices ({parts}), whose frames do not reach an AF_XDP socket of {name}: use engine mmsg, or generic XDP (xdp_generic(true))"
        ),
    )
}

/// Number of queues of a device that XSKs can use. Such a queue receives and sends, and the driver
/// reserves some of them. The kernel does not report an XSK that cannot send: its frames stay in
/// the TX ring.
pub(super) fn usable_queues(queues: sys::Queues, reserved: u32) -> u32 {
    queues.receive.min(queues.send.saturating_sub(reserved)).min(abi::QUEUES_MAX)
}

/// True if the kernel would filter sources on a device (`rp_filter` 1) and another device is up,
/// over which such a source might be routed: a route needs no address there. An XDP program cannot
/// do that check: `bpf_fib_lookup` works only on devices that forward. None if it cannot be read,
/// such as without /proc (chroot), or at the limit of open files.
pub(super) fn read_strict_rp_filter(device: u32, locals: &LocalState) -> Option<bool> {
    if locals.up.iter().all(|at| *at == device) {
        return Some(false);
    }
    // The current name: the device may have been renamed since it was opened.
    let name = sys::name(device).ok()?;
    let read = |conf: &str| -> Option<u32> {
        let text = fs::read_to_string(format!("/proc/sys/net/ipv4/conf/{conf}/rp_filter")).ok()?;
        text.trim().parse().ok()
    };
    Some(read("all")?.max(read(&name)?) == 1)
}

/// Warns about a device with a strict filter ([`read_strict_rp_filter`]), or with one that could
/// not be read: the kernel checks its IPv4 sources unless the device was named.
pub(super) fn warn_of_rp_filter(name: &str, is_named: bool) {
    if is_named {
        log::warn!(
            "engine xdp: net.ipv4.conf.{name}.rp_filter is 1, or cannot be read. Frames received past the stack on {name} skip this check of sources, because the device was named: use a firewall in front of this machine (docs/xdp.md)"
        );
    } else {
        log::warn!(
            "engine xdp: net.ipv4.conf.{name}.rp_filter is 1, or cannot be read. The kernel keeps receiving IPv4 on {name}, because it checks sources. Name the device to receive IPv4 by XDP without the check (docs/xdp.md)"
        );
    }
}

/// True if a frame may arrive with a partial checksum, or as a GSO message, and the kernel has
/// to finish it. The drivers of NICs pass whole frames to XDP. tun does not: checksums that a
/// guest leaves partial are finished behind it. In generic mode GRO messages are not split yet.
/// False for veth in native mode, where lanes accept partial checksums.
pub(super) fn may_be_partial(driver: &str, attach: AttachMode) -> bool {
    attach == AttachMode::Generic || driver == "tun"
}

/// The warning for a device whose driver strips VLAN tags, if it does: frames of all VLANs then
/// look untagged. None for veth, which always reports it: there, the other end decides whether
/// tags are beside the frame.
pub(super) fn vlan_stripping_warning(name: &str, is_veth: bool, strips: bool) -> Option<String> {
    (strips && !is_veth).then(|| {
        format!("{name}: its driver strips VLAN tags, so that datagrams of all VLANs appear untagged to XDP: run 'ethtool -K {name} rxvlan off'")
    })
}

/// True if an address is valid on its own link only.
pub(super) fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if Ipv6Addr::is_unicast_link_local(&ip))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ETH: u32 = 2;
    const OTHER: u32 = 3;
    const PART: u32 = 4;
    const MASTER: u32 = 9;
    const VRF: u32 = 10;

    fn locals() -> LocalState {
        let at = |device: u32, ip: &str| (device, ip.parse().unwrap());
        LocalState {
            addresses: vec![
                at(1, "127.0.0.1"),
                at(1, "127.5.0.1"),
                at(1, "192.0.2.77"),
                at(1, "::1"),
                at(ETH, "10.0.0.1"),
                at(ETH, "fd00::1"),
                at(ETH, "fe80::1"),
                at(OTHER, "10.1.0.1"),
                at(PART, "10.2.0.1"),
                at(MASTER, "10.3.0.1"),
                at(VRF, "10.4.0.1"),
                at(VRF, "fd04::1"),
            ],
            down_addresses: vec![(9, "10.5.0.1".parse().unwrap())],
            broadcasts: vec!["10.0.0.255".parse().unwrap()],
            masters: vec![(PART, MASTER)],
            vrfs: vec![VRF],
            up: vec![ETH, OTHER, PART, MASTER, VRF],
        }
    }

    fn steered_to(bound: &str, only_v6: bool, device: u32) -> Vec<String> {
        let led = steered_addrs(bound.parse().unwrap(), only_v6, device, false, &locals());
        led.iter().map(IpAddr::to_string).collect()
    }

    #[test]
    fn steered_addresses_match_what_the_kernel_accepts() {
        // Addresses of a bridge or bond (MASTER), but not those of a VRF.
        let four = ["192.0.2.77", "10.0.0.1", "10.1.0.1", "10.3.0.1"];
        assert_eq!(steered_to("0.0.0.0", false, ETH), four);
        let both = ["192.0.2.77", "10.0.0.1", "fd00::1", "10.1.0.1", "10.3.0.1"];
        assert_eq!(steered_to("::", false, ETH), both);
        assert_eq!(steered_to("::", true, ETH), ["fd00::1"]);
        // A device without IPv6 addresses accepts no IPv6.
        assert_eq!(steered_to("::", false, OTHER), four);
        assert_eq!(steered_to("10.1.0.1", false, ETH), ["10.1.0.1"]);
        for bound in
            ["127.0.0.1", "::1", "fe80::1", "10.2.0.1", "10.4.0.1", "10.5.0.1", "fd04::1", "10.9.9.9"]
        {
            assert_eq!(steered_to(bound, false, ETH), [""; 0], "{bound}");
        }
        assert_eq!(steered_to("0.0.0.0", false, PART), [""; 0]);
    }

    #[test]
    fn addresses_of_ip4_can_be_left_to_the_kernel() {
        let steered = |bound: &str| steered_addrs(bound.parse().unwrap(), false, ETH, true, &locals());
        assert_eq!(steered("::"), ["fd00::1".parse::<IpAddr>().unwrap()]);
        for bound in ["0.0.0.0", "10.0.0.1", "::ffff:10.0.0.1"] {
            assert!(steered(bound).is_empty(), "{bound}");
        }
    }

    #[test]
    fn an_unreadable_rp_filter_is_not_assumed_off() {
        const MISSING: u32 = i32::MAX as u32;
        let locals = |up| LocalState { up, ..LocalState::default() };
        assert_eq!(read_strict_rp_filter(MISSING, &locals(vec![MISSING, OTHER])), None, "without addresses");
        assert_eq!(read_strict_rp_filter(MISSING, &locals(vec![MISSING])), Some(false));
    }

    #[test]
    fn own_and_broadcast_sources_are_refused() {
        let BlockedSources { addresses, down_addresses } = blocked_sources(&locals());
        assert_eq!(addresses.len(), 13);
        for ip in ["10.0.0.255", "10.0.0.1", "fe80::1", "127.0.0.1"] {
            assert!(addresses.contains(&ip.parse().unwrap()), "{ip}");
        }
        assert_eq!(down_addresses, ["10.5.0.1".parse::<IpAddr>().unwrap()]);
    }

    #[test]
    fn vlan_stripping_is_warned_of() {
        assert!(vlan_stripping_warning("eth0", false, true).unwrap().contains("ethtool -K eth0 rxvlan off"));
        assert_eq!(vlan_stripping_warning("eth0", false, false), None);
        assert_eq!(vlan_stripping_warning("eth0", true, true), None);
    }

    #[test]
    fn partial_checksums_of_tap_and_generic_xdp_pass_to_the_kernel() {
        assert!(may_be_partial("tun", AttachMode::Native));
        assert!(may_be_partial("ixgbe", AttachMode::Generic));
        for driver in ["ixgbe", "veth", "virtio_net", ""] {
            assert!(!may_be_partial(driver, AttachMode::Native), "{driver}");
        }
    }

    #[test]
    fn queues_need_rx_and_tx_to_be_usable() {
        let usable = |receive, send, reserved| usable_queues(sys::Queues { receive, send }, reserved);
        assert_eq!((usable(4, 4, 0), usable(4, 2, 0), usable(1, 4, 0)), (4, 2, 1));
        // virtio_net with two CPUs: two of its four queues are in use before the program is
        // attached.
        assert_eq!(usable(4, 4, 2), 2);
        assert_eq!(usable(2000, 2000, 0), abi::QUEUES_MAX);
    }

    #[test]
    fn bridges_bonds_and_their_ports_are_refused() {
        let refused = |device, attach| check_device(device, attach, &locals()).map_err(|err| err.to_string());
        for attach in [AttachMode::Native, AttachMode::Generic] {
            assert_eq!(refused(ETH, attach), Ok(()));
            let text = refused(PART, attach).unwrap_err();
            assert!(text.contains("part of") && text.contains("mmsg"), "{text}");
        }
        let text = refused(MASTER, AttachMode::Native).unwrap_err();
        assert!(text.contains("made of") && text.contains("generic"), "{text}");
        assert_eq!(refused(MASTER, AttachMode::Generic), Ok(()));
    }

    #[test]
    fn bonds_and_bridges_are_refused_in_native_mode() {
        for driver in ["bonding", "bridge", "team"] {
            let text = check_kind("one0", driver, AttachMode::Native).unwrap_err().to_string();
            assert!(text.contains("one0 is made of other devices") && text.contains("generic"), "{text}");
            assert!(check_kind("one0", driver, AttachMode::Generic).is_ok(), "{driver}");
        }
        for driver in ["veth", "virtio_net", ""] {
            assert!(check_kind("one0", driver, AttachMode::Native).is_ok(), "{driver}");
        }
    }
}
