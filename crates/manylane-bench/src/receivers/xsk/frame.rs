//! Reads frames for the loops over AF_XDP rings.
//!
//! `xsk/raw` checks nothing. `xsk/checked` makes the checks that a kernel makes: the difference
//! between the two is the cost of checking. The difference between `xsk/checked` and a lane is the
//! cost of the library. The checks are written by hand, for untagged frames: Ethernet type; version
//! and length of the IP header, lengths, no fragment; length of UDP; the checksums of the IPv4
//! header and of UDP. They share no code with the library.

/// Header lengths in bytes.
const ETH_HEADER_LEN: usize = 14;
const IPV4_HEADER_LEN: usize = 20;
const IPV6_HEADER_LEN: usize = 40;
const UDP_HEADER_LEN: usize = 8;
/// The protocol number.
const IPPROTO_UDP: u8 = 17;

/// Offset of the payload of UDP over IPv4 in an untagged frame without options.
const PAYLOAD_OFFSET: usize = ETH_HEADER_LEN + IPV4_HEADER_LEN + UDP_HEADER_LEN;

/// Offsets of the pairs of addresses in a frame, and the length of an address: Ethernet, IP, ports.
type AddressPairs = [(usize, usize); 3];
const IPV4: AddressPairs = [(0, 6), (26, 4), (34, 2)];
const IPV6: AddressPairs = [(0, 6), (22, 16), (54, 2)];

/// Swaps source and destination; the frame is long enough.
#[inline]
fn swap_addresses(packet: &mut [u8], pairs: AddressPairs) -> bool {
    for (start, size) in pairs {
        let (from, to) = packet[start..start + 2 * size].split_at_mut(size);
        from.swap_with_slice(to);
    }
    true
}

/// Check of received frames.
pub(crate) trait FrameParser: Copy + Send + 'static {
    /// Name of the receiver.
    const NAME: &'static str;
    /// True if a frame without a payload is not counted.
    const REJECTS_INVALID: bool;

    /// The payload of a frame.
    fn payload(packet: &[u8]) -> Option<&[u8]>;

    /// Turns a frame into its reply. Returns false if that is not possible.
    fn reply_in_place(packet: &mut [u8]) -> bool;
}

/// Accepts every frame.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unchecked;

impl FrameParser for Unchecked {
    const NAME: &'static str = "xsk/raw";
    const REJECTS_INVALID: bool = false;

    /// The payload of UDP over IPv4. Its length is read from the header, because a short frame has
    /// padding.
    #[inline]
    fn payload(packet: &[u8]) -> Option<&[u8]> {
        let head = packet.first_chunk::<PAYLOAD_OFFSET>()?;
        let length = usize::from(u16::from_be_bytes([head[PAYLOAD_OFFSET - 4], head[PAYLOAD_OFFSET - 3]]));
        packet.get(PAYLOAD_OFFSET..PAYLOAD_OFFSET - UDP_HEADER_LEN + length)
    }

    /// For UDP over IPv4.
    #[inline]
    fn reply_in_place(packet: &mut [u8]) -> bool {
        packet.len() >= PAYLOAD_OFFSET && swap_addresses(packet, IPV4)
    }
}

/// Checks each frame.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Checked;

impl FrameParser for Checked {
    const NAME: &'static str = "xsk/checked";
    const REJECTS_INVALID: bool = true;

    #[inline]
    fn payload(packet: &[u8]) -> Option<&[u8]> {
        match packet.get(ETH_HEADER_LEN - 2..ETH_HEADER_LEN)? {
            [0x08, 0x00] => parse_ipv4(&packet[ETH_HEADER_LEN..]),
            [0x86, 0xdd] => parse_ipv6(&packet[ETH_HEADER_LEN..]),
            _ => None,
        }
    }

    #[inline]
    fn reply_in_place(packet: &mut [u8]) -> bool {
        let (layout, udp) = match packet.get(ETH_HEADER_LEN - 2..ETH_HEADER_LEN) {
            Some([0x08, 0x00]) => (IPV4, ETH_HEADER_LEN + IPV4_HEADER_LEN),
            Some([0x86, 0xdd]) => (IPV6, ETH_HEADER_LEN + IPV6_HEADER_LEN),
            _ => return false,
        };
        packet.len() >= udp + UDP_HEADER_LEN && swap_addresses(packet, layout)
    }
}

/// The payload after an IPv4 header without options.
#[inline]
fn parse_ipv4(packet: &[u8]) -> Option<&[u8]> {
    let head = packet.first_chunk::<{ IPV4_HEADER_LEN + UDP_HEADER_LEN }>()?;
    let total = usize::from(u16::from_be_bytes([head[2], head[3]]));
    // Version and header length; no fragment, whether DF is set or not.
    if head[0] != 0x45 || head[6] & 0x3f != 0 || head[7] != 0 || head[9] != IPPROTO_UDP {
        return None;
    }
    let segment = packet.get(IPV4_HEADER_LEN..total)?;
    let addresses = csum_partial(0, &head[12..20]);
    if csum_fold(csum_partial(addresses, &head[..12])) != 0xffff {
        return None;
    }
    parse_udp(segment, addresses, false)
}

/// The payload after an IPv6 header without extensions.
#[inline]
fn parse_ipv6(packet: &[u8]) -> Option<&[u8]> {
    let head = packet.first_chunk::<{ IPV6_HEADER_LEN + UDP_HEADER_LEN }>()?;
    let length = usize::from(u16::from_be_bytes([head[4], head[5]]));
    if head[0] >> 4 != 6 || head[6] != IPPROTO_UDP {
        return None;
    }
    let segment = packet.get(IPV6_HEADER_LEN..IPV6_HEADER_LEN + length)?;
    parse_udp(segment, csum_partial(0, &head[8..40]), true)
}

/// The payload of UDP, whose checksum is optional over IPv4. `addresses` is the sum of both
/// addresses.
#[inline]
fn parse_udp(segment: &[u8], addresses: u64, needs_checksum: bool) -> Option<&[u8]> {
    let head = segment.first_chunk::<UDP_HEADER_LEN>()?;
    // UDP may be shorter than the IP payload, as the kernel allows.
    let segment = segment.get(..usize::from(u16::from_be_bytes([head[4], head[5]])))?;
    let payload = segment.get(UDP_HEADER_LEN..)?;
    if [head[6], head[7]] == [0, 0] {
        return (!needs_checksum).then_some(payload);
    }
    // The other fields of the pseudo header, in the machine's byte order, as all sums here.
    let pseudo = addresses
        + u64::from(u16::from_ne_bytes([0, IPPROTO_UDP]))
        + u64::from(u16::from_ne_bytes([head[4], head[5]]));
    let is_whole = csum_fold(csum_partial(pseudo, segment)) == 0xffff;
    // The other end of a virtual link leaves the checksum to a device that does not exist.
    (is_whole || csum_fold(pseudo) == u16::from_ne_bytes([head[6], head[7]])).then_some(payload)
}

/// Adds `bytes` as words of 16 bits, four bytes at a time. A frame is far too short for an
/// overflow.
#[inline]
fn csum_partial(mut sum: u64, bytes: &[u8]) -> u64 {
    let mut words = bytes.chunks_exact(4);
    for word in &mut words {
        sum += u64::from(u32::from_ne_bytes([word[0], word[1], word[2], word[3]]));
    }
    let mut rest = [0; 4];
    for (to, from) in rest.iter_mut().zip(words.remainder()) {
        *to = *from;
    }
    sum + u64::from(u32::from_ne_bytes(rest))
}

/// The sum in 16 bits.
#[inline]
fn csum_fold(sum: u64) -> u16 {
    let sum = (sum >> 32) + (sum & 0xffff_ffff);
    let sum = (sum >> 16) + (sum & 0xffff);
    let sum = (sum >> 16) + (sum & 0xffff);
    ((sum >> 16) + (sum & 0xffff)) as u16
}

#[cfg(test)]
mod tests {
    use manylane_wire::checksum::Sum;
    use manylane_wire::datagram::{Checksum, Datagram};
    use manylane_wire::ethernet::{Ethernet, Mac};
    use manylane_wire::frame::UdpFrame;

    use super::*;

    const LOCAL_MAC: Mac = Mac([2, 1, 1, 1, 1, 1]);
    const PEER_MAC: Mac = Mac([2, 7, 7, 7, 7, 7]);

    fn udp_frame(payload: &[u8], v6: bool) -> UdpFrame<'_> {
        let (from, to) =
            if v6 { ("[fd00::1]:1000", "[fd00::2]:53") } else { ("10.0.0.1:1000", "10.9.8.7:53") };
        UdpFrame { payload, ..UdpFrame::new(LOCAL_MAC, PEER_MAC, from.parse().unwrap(), to.parse().unwrap()) }
    }

    fn frame(payload: &[u8], v6: bool) -> Vec<u8> {
        let plan = udp_frame(payload, v6);
        let mut frame = vec![0; plan.len()];
        plan.write(&mut frame).unwrap();
        frame
    }

    #[test]
    fn payloads_of_all_lengths_are_found_before_padding() {
        for v6 in [false, true] {
            for length in 0..200 {
                let payload: Vec<u8> = (0..length).map(|at| (at * at % 251) as u8).collect();
                let mut frame = frame(&payload, v6);
                assert_eq!(Checked::payload(&frame), Some(&payload[..]), "{length}, v6 {v6}");
                frame.resize(frame.len() + 18, 0xaa);
                assert_eq!(Checked::payload(&frame), Some(&payload[..]), "{length}, v6 {v6}, padded");
            }
        }
    }

    /// With flipped bits, this accepts and rejects the same frames as the library, which also
    /// parses tags and options.
    #[test]
    fn damaged_frames_are_judged_as_by_the_library() {
        for v6 in [false, true] {
            let whole = frame(b"payload", v6);
            for cut in 0..whole.len() {
                assert_eq!(Checked::payload(&whole[..cut]), None);
            }
            let (mut believed, mut flips) = (0, Vec::new());
            for bit in 0..whole.len() * 8 {
                flips.push(vec![bit]);
                flips.extend((bit + 1..whole.len() * 8).map(|other| vec![bit, other]));
            }
            for flip in flips {
                let mut bytes = whole.clone();
                flip.iter().for_each(|bit| bytes[bit / 8] ^= 1 << (bit % 8));
                let theirs = Datagram::parse(&bytes).ok().filter(|datagram| {
                    let is_plain = usize::from(datagram.payload_offset) == whole.len() - 7;
                    is_plain && datagram.checksum != Checksum::Invalid
                });
                let theirs = theirs
                    .map(|datagram| &bytes[datagram.payload_offset.into()..][..usize::from(datagram.len)]);
                assert_eq!(Checked::payload(&bytes), theirs, "bits {flip:?}, v6 {v6}");
                believed += usize::from(theirs.is_some());
            }
            assert!(believed > 1000, "{believed}");
        }
    }

    #[test]
    fn absent_and_partial_checksums_are_accepted() {
        for v6 in [false, true] {
            let mut frame = frame(b"payload", v6);
            let at = frame.len() - 7 - 2;
            frame[at..at + 2].fill(0);
            assert_eq!(Checked::payload(&frame).is_some(), !v6, "no checksum, v6 {v6}");
            let pseudo = if v6 {
                Sum::pseudo_v6("fd00::1".parse().unwrap(), "fd00::2".parse().unwrap(), IPPROTO_UDP, 15)
            } else {
                Sum::pseudo_v4([10, 0, 0, 1].into(), [10, 9, 8, 7].into(), IPPROTO_UDP, 15)
            };
            frame[at..at + 2].copy_from_slice(&pseudo.value().to_be_bytes());
            assert_eq!(Checked::payload(&frame), Some(&b"payload"[..]), "partial, v6 {v6}");
            frame[at] ^= 1;
            assert_eq!(Checked::payload(&frame), None, "wrong, v6 {v6}");
        }
    }

    #[test]
    fn frames_other_than_plain_udp_are_refused() {
        let good = frame(b"payload", false);
        // A total length beyond the frame, and one that is shorter than that of UDP; options;
        // fragments; TCP; ARP.
        for (at, value) in [(16, 1), (17, 34), (14, 0x46), (20, 0x20), (21, 1), (23, 6), (13, 6)] {
            let mut bytes = good.clone();
            bytes[at] = value;
            // With a valid header checksum, so that the field is the reason.
            bytes[24..26].fill(0);
            let sum = manylane_wire::checksum::checksum(&bytes[14..34]);
            bytes[24..26].copy_from_slice(&sum.to_be_bytes());
            assert_eq!(Checked::payload(&bytes), None, "byte {at}");
        }
    }

    fn check_reply<R: FrameParser>(v6: bool) {
        let mut bytes = frame(b"request", v6);
        let plan = udp_frame(b"request", v6);
        assert!(R::reply_in_place(&mut bytes));
        let back = Datagram::parse(&bytes).unwrap();
        assert_eq!((back.source(), back.destination()), (plan.destination, plan.source));
        assert_eq!((back.checksum, R::payload(&bytes)), (Checksum::Valid, Some(&b"request"[..])));
        let (ethernet, _) = Ethernet::parse(&bytes).unwrap();
        assert_eq!((ethernet.source, ethernet.destination), (PEER_MAC, LOCAL_MAC));
        let short = bytes.len() - 8;
        assert!(!R::reply_in_place(&mut bytes[..short]));
    }

    #[test]
    fn a_reply_in_place_has_correct_checksums() {
        check_reply::<Unchecked>(false);
        check_reply::<Checked>(false);
        check_reply::<Checked>(true);
    }

    #[test]
    fn padding_is_no_payload() {
        let mut bytes = frame(b"request", false);
        bytes.resize(60, 0xaa);
        assert_eq!(Unchecked::payload(&bytes), Some(&b"request"[..]));
        assert_eq!((Unchecked::payload(&bytes[..48]), Unchecked::payload(&bytes[..41])), (None, None));
    }
}
