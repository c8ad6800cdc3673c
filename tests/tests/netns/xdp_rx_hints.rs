//! Hints of the XDP program on frames, read as a lane reads them: in the frames of a bare AF_XDP
//! socket.

#![allow(dead_code, reason = "of what tests of engine xdp share only a part is used")]

use std::any::Any;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd};

use crate::xdp_support::{frame, frame_to, testbed};
use aya::maps::{Array, HashMap, XskMap};
use aya::programs::{Xdp, XdpMode};
use aya::{Ebpf, EbpfLoader};
use manylane_bpf::abi;
use manylane_sys::errno::ENOBUFS;
use manylane_sys::packet::PacketSocket;
use manylane_sys::xsk::RawXsk;
use manylane_test_support::wait_for;
use manylane_testbed::{Host, Layout};
use manylane_tests::pattern;
use manylane_wire::checksum::{Sum, checksum};
use manylane_wire::datagram::{Checksum, Datagram};
use manylane_wire::ethernet::{Mac, Vlan, ether_type};
use manylane_wire::{rx_hint, udp};

const PORT: u16 = 5300;
/// Maximum number of frames in the ring.
const RING_FRAMES: u32 = 2048;

/// The program on the first device of a host, and a socket at its first queue.
struct AttachedProgram {
    _program: Ebpf,
    _maps: Vec<Box<dyn Any + Send>>,
    socket: RawXsk,
}

impl AttachedProgram {
    fn open(host: &Host, vlans: &[u32]) -> Self {
        let index = host.device_index(0).unwrap();
        let mut program = EbpfLoader::new().btf(None).load(manylane_bpf::XDP).unwrap();
        let take: &mut Xdp = program.program_mut("ml_take").unwrap().try_into().unwrap();
        take.load().unwrap();
        take.attach_to_if_index(index, XdpMode::Driver).unwrap();
        let socket = RawXsk::open(index, 0, RING_FRAMES, false).unwrap();
        let mut described: Array<_, abi::DeviceWords> =
            program.take_map("ml_device").unwrap().try_into().unwrap();
        let device = abi::Device { mac: host.mac(0), longest: 1800, ..abi::Device::default() };
        described.set(0, device.to_words(), 0).unwrap();
        let mut ports: HashMap<_, abi::PortKey, u32> =
            program.take_map("ml_ports").unwrap().try_into().unwrap();
        for ip in [host.ip(0, false), host.ip(0, true)] {
            let ip = match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            let mut key = [0; size_of::<abi::PortKey>()];
            key[..16].copy_from_slice(&ip.octets());
            key[16..18].copy_from_slice(&PORT.to_be_bytes());
            key[18] = abi::PROTOCOL_UDP;
            ports.insert(key, 0, 0).unwrap();
        }
        let mut tags: HashMap<_, u32, u32> = program.take_map("ml_vlans").unwrap().try_into().unwrap();
        for vlan in vlans {
            tags.insert(vlan, 1, 0).unwrap();
        }
        let mut queues: XskMap<_> = program.take_map("ml_xsks").unwrap().try_into().unwrap();
        queues.set(0, socket.as_fd().as_raw_fd(), 0).unwrap();
        let maps: Vec<Box<dyn Any + Send>> =
            vec![Box::new(described), Box::new(ports), Box::new(tags), Box::new(queues)];
        Self { _program: program, _maps: maps, socket }
    }

    /// The received frames up to the end marker, without it.
    fn recv_until(&mut self, last: &[u8]) -> Vec<Vec<u8>> {
        let mut frames: Vec<Vec<u8>> = Vec::new();
        let receive = || {
            self.socket.receive(64, |frame| frames.push(frame.to_vec()));
            (frames.last().is_some_and(|frame| frame.ends_with(last)), frames.len())
        };
        wait_for("the last frame (came, frames)", receive, |(came, _)| *came);
        frames.pop();
        frames
    }
}

/// Sends frames, and returns those that reached the lane, in order.
fn send_through(a: &Host, b: &Host, behind: &mut AttachedProgram, frames: &[Vec<u8>]) -> Vec<Vec<u8>> {
    const END: &[u8] = b"this is the end";
    let sender = a.run(|| PacketSocket::open(a.device_index(0).unwrap())).unwrap();
    let end = frame_to(a, b, SocketAddr::new(b.ip(0, false), PORT), END, |_| ());
    let mut arrived = Vec::new();
    for some in frames.chunks(RING_FRAMES as usize / 2) {
        for frame in some {
            // A veth device refuses what it cannot deliver meanwhile.
            let sent = || sender.send(frame).map_err(|err| err.raw_os_error());
            wait_for("a sent frame", sent, |sent| *sent != Err(Some(ENOBUFS))).unwrap();
        }
        sender.send(&end).unwrap();
        arrived.extend(behind.recv_until(END));
    }
    arrived
}

/// True if the frame must have a hint: a plain, short and valid datagram.
fn should_have_hint(frame: &[u8]) -> bool {
    let Ok(datagram) = Datagram::parse(frame) else { return false };
    let is_v6 = datagram.addr_pair().is_ipv6();
    let udp = if is_v6 { 54 } else { 34 };
    let total = if is_v6 { 18 } else { 16 };
    let word = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
    // Data after UDP in the IP payload is valid, but not plain.
    let is_plain = usize::from(datagram.payload_offset) == udp + 8
        && word(udp + 4) + (if is_v6 { 0 } else { 20 }) == word(total);
    is_plain
        && usize::from(datagram.len) + udp::HEADER_LEN <= usize::from(rx_hint::UDP_LEN_MAX)
        && datagram.checksum != Checksum::Invalid
}

/// Each received frame is as it was sent, except for a hint if it must have one, and the hint
/// agrees with a full check. Returns the number of hints.
fn check(b: &Host, sent: &[Vec<u8>], came: &[Vec<u8>]) -> usize {
    let mut hinted = 0;
    let mut sent = sent.iter();
    for frame in came {
        let mut restored = frame.clone();
        rx_hint::restore(&mut restored, Mac(b.mac(0)));
        assert!(sent.any(|one| *one == restored), "a frame that was not sent: {restored:02x?}");
        assert_eq!(rx_hint::has_hint(frame), should_have_hint(&restored), "{restored:02x?}");
        let mut read = Datagram::default();
        let read = read.read_hinted(frame).map(|()| read);
        assert_eq!(read, Datagram::parse(&restored), "{restored:02x?}");
        hinted += usize::from(rx_hint::has_hint(frame));
    }
    hinted
}

/// One datagram, and all that differ from it in one bit or are truncated: a frame has a hint if and
/// only if it must have one.
#[test]
fn netns_xdp_rx_hints_match_what_a_lane_parses() {
    let Some(testbed) =
        testbed("netns_xdp_rx_hints_match_what_a_lane_parses", &Layout { queues: 1, ..Layout::default() })
    else {
        return;
    };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let mut behind = b.run(|| AttachedProgram::open(b, &[]));
    for ipv6 in [false, true] {
        let to = SocketAddr::new(b.ip(0, ipv6), PORT);
        let mut frames = Vec::new();
        for payload in [&b"odd"[..], b"evenly"] {
            let good = frame_to(a, b, to, payload, |_| ());
            // The bytes before the type only decide whether the frame is for this device.
            for bit in 12 * 8..good.len() * 8 {
                let mut flipped = good.clone();
                flipped[bit / 8] ^= 1 << (bit % 8);
                frames.push(flipped);
            }
            frames.extend((42..good.len()).map(|length| good[..length].to_vec()));
            frames.push(good);
        }
        let came = send_through(a, b, &mut behind, &frames);
        assert!(came.len() > frames.len() / 2, "{} of {}", came.len(), frames.len());
        // Both valid; IPv4's checksum includes TTL and identification. Nothing protects IPv6's
        // class, label and hop limit.
        let hinted = check(b, &frames, &came);
        let unprotected = if ipv6 { 2 * (4 + 4 + 20 + 8) } else { 0 };
        assert!(hinted >= 2 + unprotected / 2, "{hinted}");
    }
}

/// Inconsistent lengths of IPv4 and UDP, with everything else valid.
#[test]
fn netns_xdp_no_rx_hints_on_inconsistent_lengths() {
    let Some(testbed) =
        testbed("netns_xdp_no_rx_hints_on_inconsistent_lengths", &Layout { queues: 1, ..Layout::default() })
    else {
        return;
    };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let mut behind = b.run(|| AttachedProgram::open(b, &[]));
    let mut good = frame_to(a, b, SocketAddr::new(b.ip(0, false), PORT), b"lengths", |_| ());
    // Without a UDP checksum, which IPv4 allows, only the lengths can be checked.
    good[40..42].fill(0);
    good.resize(60, 0);
    let mut frames = Vec::new();
    for total in 20..50_u16 {
        for length in 0..30_u16 {
            let mut frame = good.clone();
            frame[16..18].copy_from_slice(&total.to_be_bytes());
            frame[38..40].copy_from_slice(&length.to_be_bytes());
            frame[24..26].fill(0);
            let sum = checksum(&frame[14..34]);
            frame[24..26].copy_from_slice(&sum.to_be_bytes());
            frames.push(frame);
        }
    }
    let came = send_through(a, b, &mut behind, &frames);
    assert_eq!(came.len(), frames.len());
    // One for each length that fits the frame.
    assert_eq!(check(b, &frames, &came), (udp::HEADER_LEN..=60 - 34).count());
}

/// Payloads of all lengths, with padding and without, with a checksum that is right, wrong,
/// missing, or partial.
#[test]
fn netns_xdp_rx_hints_on_valid_short_datagrams() {
    const NAME: &str = "netns_xdp_rx_hints_on_valid_short_datagrams";
    let Some(testbed) = testbed(NAME, &Layout { queues: 1, ..Layout::default() }) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let mut behind = b.run(|| AttachedProgram::open(b, &[]));
    let longest = usize::from(rx_hint::UDP_LEN_MAX) - udp::HEADER_LEN;
    for ipv6 in [false, true] {
        let (from, to) = (a.ip(0, ipv6), SocketAddr::new(b.ip(0, ipv6), PORT));
        let mut frames = Vec::new();
        for length in 0..longest + 8 {
            let good = frame_to(a, b, to, &pattern(length, length), |_| ());
            let at = good.len() - length - 2;
            let total = (length + udp::HEADER_LEN) as u16;
            let pseudo = match (from, to.ip()) {
                (IpAddr::V4(from), IpAddr::V4(to)) => Sum::pseudo_v4(from, to, udp::PROTOCOL, total),
                (IpAddr::V6(from), IpAddr::V6(to)) => Sum::pseudo_v6(from, to, udp::PROTOCOL, total.into()),
                _ => unreachable!("both are of one family"),
            };
            let sum = [good[at], good[at + 1]];
            for sum in [sum, [sum[0] ^ 1, sum[1]], [0, 0], pseudo.value().to_be_bytes()] {
                let mut frame = good.clone();
                frame[at..at + 2].copy_from_slice(&sum);
                frames.push(frame.clone());
                frame.resize(frame.len() + 7, 0xee);
                frames.push(frame);
            }
        }
        let came = send_through(a, b, &mut behind, &frames);
        assert_eq!(came.len(), frames.len());
        // Right and partial ones, and over IPv4 those without a checksum.
        let kinds = if ipv6 { 2 } else { 3 };
        assert_eq!(check(b, &frames, &came), (longest + 1) * kinds * 2);
    }
}

/// An IPv4-mapped address in an IPv6 header is invalid, although a socket may match it: the lane
/// rejects such a frame.
#[test]
fn netns_xdp_no_rx_hints_on_v4_mapped_addresses() {
    let Some(testbed) =
        testbed("netns_xdp_no_rx_hints_on_v4_mapped_addresses", &Layout { queues: 1, ..Layout::default() })
    else {
        return;
    };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let mut behind = b.run(|| AttachedProgram::open(b, &[]));
    let IpAddr::V4(ours) = b.ip(0, false) else { unreachable!("it is asked for one of IPv4") };
    let mapped = SocketAddr::new(ours.to_ipv6_mapped().into(), PORT);
    let frame = frame((a, SocketAddr::new(a.ip(0, true), 4444)), (b, mapped), b"mapped", |_| ());
    let came = send_through(a, b, &mut behind, std::slice::from_ref(&frame));
    assert_eq!(came, [frame]);
    assert!(Datagram::default().read_hinted(&came[0]).is_err());
}

/// After tags, IP is at another offset: the lane verifies such a frame itself.
#[test]
fn netns_xdp_no_rx_hints_on_vlan_frames() {
    let Some(testbed) =
        testbed("netns_xdp_no_rx_hints_on_vlan_frames", &Layout { queues: 1, ..Layout::default() })
    else {
        return;
    };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let mut behind = b.run(|| AttachedProgram::open(b, &[7, 7 << 16 | 9]));
    let tag = |control| Some(Vlan { ether_type: ether_type::VLAN, tci: control });
    for ipv6 in [false, true] {
        let to = SocketAddr::new(b.ip(0, ipv6), PORT);
        // ID 0 is a priority only, not a VLAN.
        let tags = [[tag(7), None], [tag(7), tag(9)], [tag(0), None], [None, None]];
        let frames: Vec<Vec<u8>> =
            tags.map(|vlans| frame_to(a, b, to, b"tagged", |plan| plan.vlans = vlans)).into();
        let came = send_through(a, b, &mut behind, &frames);
        assert_eq!((came.len(), check(b, &frames, &came)), (4, 1));
        assert!(rx_hint::has_hint(&came[3]));
    }
}
