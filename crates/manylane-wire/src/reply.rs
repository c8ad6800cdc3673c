//! Writes the headers of a reply from the parsed request.
//!
//! Most replies go back to the source of their request, in its own frame. Then all header fields
//! are known: the addresses are swapped, the lengths are those of the reply, and the rest is
//! constant ([`UdpFrame`](crate::frame::UdpFrame) writes the same bytes). So they are written in
//! one step. The request's headers are not read again, because an earlier reply may have
//! overwritten them. Only the bytes between the MAC addresses and IP are kept: the tags, and the
//! type.

use crate::checksum::Sum;
use crate::datagram::{Checksum, Datagram, chunk, ne32, ne64};
use crate::ethernet::Mac;
use crate::frame::ip_udp_len;
use crate::{ipv4, ipv6, udp};

/// Time to live of our datagrams.
const TTL: u8 = 64;
/// The flag "don't fragment".
const DONT_FRAGMENT: u8 = 0x40;

/// Length of the IP and UDP headers.
const IP_UDP_LEN_V4: usize = ip_udp_len(false);
const IP_UDP_LEN_V6: usize = ip_udp_len(true);

impl Datagram {
    /// True if a reply with the whole payload of this request has the same checksum: the summed
    /// words are the same, in another order.
    #[must_use]
    #[inline]
    pub fn can_reuse_checksum(&self) -> bool {
        self.checksum == Checksum::Valid && self.udp_checksum() != 0
    }

    /// Writes the headers of a reply into `head`, the bytes in front of its payload: MAC
    /// addresses, IP and UDP. The bytes between them, tags and type, stay as in the frame of the
    /// request. `is_whole` is true if `payload` is the whole payload of the request. Returns
    /// false, and writes nothing, if the request had options, `head` has another length, or the
    /// payload does not fit the length fields.
    #[must_use]
    #[inline]
    pub fn write_reply_headers(
        &self,
        head: &mut [u8],
        source_mac: Mac,
        destination_mac: Mac,
        payload: &[u8],
        is_whole: bool,
    ) -> bool {
        let over = ip_udp_len(self.addr_pair.is_v6);
        if self.ip_offset == 0 || head.len() != usize::from(self.ip_offset) + over {
            return false;
        }
        let field = if is_whole && self.can_reuse_checksum() { self.udp_checksum() } else { 0 };
        let written = if self.addr_pair.is_v6 {
            head.last_chunk_mut().is_some_and(|head| self.write_reply_v6(head, payload, field))
        } else {
            head.last_chunk_mut().is_some_and(|head| self.write_reply_v4(head, payload, field))
        };
        if let (true, Some(macs)) = (written, head.first_chunk_mut::<12>()) {
            macs[..6].copy_from_slice(&destination_mac.0);
            macs[6..].copy_from_slice(&source_mac.0);
        }
        written
    }

    /// Writes IPv4 and UDP, with the checksum `field`; it is computed if zero.
    #[inline]
    fn write_reply_v4(&self, to: &mut [u8; IP_UDP_LEN_V4], payload: &[u8], field: u16) -> bool {
        let Ok(total) = u16::try_from(IP_UDP_LEN_V4 + payload.len()) else { return false };
        let mut head = [0; IP_UDP_LEN_V4];
        head[0] = 0x45;
        head[2..4].copy_from_slice(&total.to_be_bytes());
        (head[6], head[8], head[9]) = (DONT_FRAGMENT, TTL, udp::PROTOCOL);
        let [from, peer]: [[u8; 4]; 2] =
            [chunk(&self.addr_pair.addresses, 4), chunk(&self.addr_pair.addresses, 0)];
        head[12..16].copy_from_slice(&from);
        head[16..20].copy_from_slice(&peer);
        self.write_ports(&mut head, ipv4::HEADER_LEN, payload);
        let addresses = Sum::default().add_u64(ne64(&head, 12));
        let sum = addresses.add_u64(ne64(&head, 0)).add_u64(ne32(&head, 8).into()).finish();
        head[10..12].copy_from_slice(&sum.to_be_bytes());
        write_udp_checksum(&mut head, ipv4::HEADER_LEN, addresses, payload, field);
        *to = head;
        true
    }

    /// Writes IPv6 and UDP, as above.
    #[inline]
    fn write_reply_v6(&self, to: &mut [u8; IP_UDP_LEN_V6], payload: &[u8], field: u16) -> bool {
        let Ok(length) = u16::try_from(udp::HEADER_LEN + payload.len()) else { return false };
        let mut head = [0; IP_UDP_LEN_V6];
        head[0] = 0x60;
        head[4..6].copy_from_slice(&length.to_be_bytes());
        (head[6], head[7]) = (udp::PROTOCOL, TTL);
        let [from, peer]: [[u8; 16]; 2] =
            [chunk(&self.addr_pair.addresses, 16), chunk(&self.addr_pair.addresses, 0)];
        head[8..24].copy_from_slice(&from);
        head[24..40].copy_from_slice(&peer);
        self.write_ports(&mut head, ipv6::HEADER_LEN, payload);
        let addresses = Sum::default().add_bytes(&self.addr_pair.addresses);
        write_udp_checksum(&mut head, ipv6::HEADER_LEN, addresses, payload, field);
        *to = head;
        true
    }

    /// Writes the UDP header without its checksum.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "the callers have checked that it fits")]
    fn write_ports<const N: usize>(&self, head: &mut [u8; N], at: usize, payload: &[u8]) {
        let [a, b, c, d, ..] = self.udp;
        head[at..at + 4].copy_from_slice(&[c, d, a, b]);
        head[at + 4..at + 6].copy_from_slice(&((udp::HEADER_LEN + payload.len()) as u16).to_be_bytes());
    }
}

/// Writes the UDP checksum: `field` if not zero, else one computed over the header at `at`, and
/// what is summed with it.
#[inline]
fn write_udp_checksum<const N: usize>(
    head: &mut [u8; N],
    at: usize,
    addresses: Sum,
    payload: &[u8],
    field: u16,
) {
    let sum = match field {
        0 => {
            let protocol = ne32(&[0, udp::PROTOCOL, head[at + 4], head[at + 5]], 0);
            udp::nonzero_checksum(
                addresses.add_u64(protocol.into()).add_u64(ne64(head, at)).add_bytes(payload).finish(),
            )
        }
        known => known,
    };
    head[at + udp::CHECKSUM_OFFSET..at + udp::HEADER_LEN].copy_from_slice(&sum.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use proptest::prelude::*;

    use crate::datagram::{Checksum, Datagram};
    use crate::ethernet::{Mac, Vlan, ether_type};
    use crate::frame::UdpFrame;
    use crate::udp;

    const LOCAL_MAC: Mac = Mac([2, 1, 1, 1, 1, 1]);
    const NEXT_HOP_MAC: Mac = Mac([2, 9, 8, 7, 6, 5]);

    fn endpoints(v6: bool, hosts: (u16, u16), ports: (u16, u16)) -> (SocketAddr, SocketAddr) {
        let of = |host: u16, port: u16| -> SocketAddr {
            let [a, b] = host.to_be_bytes();
            if v6 {
                ([0xfd00, 0, 0, u16::from(a), 0, 0, 7, host], port).into()
            } else {
                ([10, 0, a, b], port).into()
            }
        };
        (of(hosts.0, ports.0), of(hosts.1, ports.1))
    }

    fn request<'a>(
        v6: bool,
        tags: usize,
        hosts: (u16, u16),
        ports: (u16, u16),
        payload: &'a [u8],
    ) -> UdpFrame<'a> {
        let (source, destination) = endpoints(v6, hosts, ports);
        let tag = |ether_type, control| Some(Vlan { ether_type, tci: control });
        let vlans = match tags {
            0 => [None, None],
            1 => [tag(ether_type::VLAN, 0x6005), None],
            _ => [tag(ether_type::SERVICE_VLAN, 7), tag(ether_type::VLAN, 0xe123)],
        };
        // All fields that a reply does not copy.
        UdpFrame {
            vlans,
            traffic_class: 0xb9,
            ttl: 3,
            payload,
            ..UdpFrame::new(NEXT_HOP_MAC, LOCAL_MAC, source, destination)
        }
    }

    fn written(plan: &UdpFrame<'_>) -> Vec<u8> {
        let mut bytes = vec![0xa5; plan.len()];
        plan.write(&mut bytes).unwrap();
        bytes
    }

    /// The bytes that the layers write.
    fn expected(request: &UdpFrame<'_>, payload: &[u8]) -> Vec<u8> {
        let back = UdpFrame::new(LOCAL_MAC, NEXT_HOP_MAC, request.destination, request.source);
        written(&UdpFrame { vlans: request.vlans, payload, ..back })
    }

    /// The reply in the frame of the request.
    fn reply_frame(frame: &[u8], read: &Datagram, payload: &[u8], is_whole: bool) -> Vec<u8> {
        let mut head = frame[..read.payload_offset.into()].to_vec();
        assert!(read.write_reply_headers(&mut head, LOCAL_MAC, NEXT_HOP_MAC, payload, is_whole));
        [&head, payload].concat()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 20 } else { 2000 }, failure_persistence: None, ..ProptestConfig::default() })]

        /// The bytes of any reply are those that the layers write, also of a second reply to the
        /// same request.
        #[test]
        fn a_reply_in_place_matches_the_header_writers(
            v6: bool,
            tags in 0_usize..3,
            hosts: (u16, u16),
            ports: (u16, u16),
            payload in prop::collection::vec(any::<u8>(), 0..300),
            other in prop::collection::vec(any::<u8>(), 0..300),
            cut: prop::sample::Index,
        ) {
            let request = request(v6, tags, hosts, ports, &payload);
            let mut frame = written(&request);
            let read = Datagram::parse(&frame).unwrap();
            prop_assert!(read.can_reuse_checksum());
            let part = &payload[..cut.index(payload.len() + 1)];
            for (payload, is_whole) in [(part, false), (&other[..], false), (&payload[..], false), (&payload[..], true)] {
                let reply = reply_frame(&frame, &read, payload, is_whole);
                prop_assert_eq!(&reply, &expected(&request, payload));
                // The next reply finds the headers of this one.
                frame[..read.payload_offset.into()].copy_from_slice(&reply[..read.payload_offset.into()]);
            }
        }
    }

    /// A request with the sum zero, which is sent as 0xffff: the reply has the same.
    #[test]
    fn a_checksum_of_zero_is_never_sent() {
        for v6 in [false, true] {
            let zero = (0..=u16::MAX).map(u16::to_be_bytes).find(|payload| {
                let frame = written(&request(v6, 0, (1, 2), (3, 4), payload));
                frame[..frame.len() - 2].ends_with(&[0xff, 0xff])
            });
            let payload = zero.unwrap();
            let plan = request(v6, 0, (1, 2), (3, 4), &payload);
            let frame = written(&plan);
            let read = Datagram::parse(&frame).unwrap();
            for is_whole in [false, true] {
                assert_eq!(reply_frame(&frame, &read, &payload, is_whole), expected(&plan, &payload));
            }
        }
    }

    /// A request without a checksum, and one with a partial sum: the reply has a checksum of
    /// its own.
    #[test]
    fn an_absent_checksum_is_not_copied() {
        let plan = request(false, 1, (1, 2), (3, 4), b"odd");
        let mut frame = written(&plan);
        let at = frame.len() - 3 - 2;
        let datagram = frame[at + 2 - udp::HEADER_LEN..].len() as u16;
        let (source, destination) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        let pseudo = crate::checksum::Sum::pseudo_v4(source, destination, udp::PROTOCOL, datagram).value();
        for (field, expected_state) in [(0, Checksum::Valid), (pseudo, Checksum::Partial)] {
            frame[at..at + 2].copy_from_slice(&field.to_be_bytes());
            let read = Datagram::parse(&frame).unwrap();
            assert_eq!((read.checksum, read.can_reuse_checksum()), (expected_state, false));
            assert_eq!(reply_frame(&frame, &read, b"odd", true), expected(&plan, b"odd"));
        }
    }

    #[test]
    fn unreplyable_frames_are_left_unchanged() {
        let plan = request(false, 0, (1, 2), (3, 4), b"payload");
        let frame = written(&plan);
        let read = Datagram::parse(&frame).unwrap();
        let longest = vec![0; usize::from(u16::MAX) - 28];
        let too_long = vec![0; longest.len() + 1];
        let mut head = frame[..42].to_vec();
        assert!(!read.write_reply_headers(&mut head, LOCAL_MAC, NEXT_HOP_MAC, &too_long, false));
        assert_eq!(head, frame[..42]);
        assert!(read.write_reply_headers(&mut head, LOCAL_MAC, NEXT_HOP_MAC, &longest, false));
        let mut short = frame[..41].to_vec();
        assert!(!read.write_reply_headers(&mut short, LOCAL_MAC, NEXT_HOP_MAC, b"payload", false));
        assert_eq!(short, frame[..41]);
        // Options: four bytes of padding behind the header, as long as a tag.
        let mut with_options = frame.clone();
        with_options.splice(34..34, [1, 1, 1, 0]);
        with_options[14] = 0x46;
        with_options[17] += 4;
        with_options[24..26].fill(0);
        let sum = crate::checksum::checksum(&with_options[14..38]);
        with_options[24..26].copy_from_slice(&sum.to_be_bytes());
        let read = Datagram::parse(&with_options).unwrap();
        assert_eq!((read.payload_offset, read.checksum), (46, Checksum::Valid));
        let mut head = with_options[..46].to_vec();
        assert!(!read.write_reply_headers(&mut head, LOCAL_MAC, NEXT_HOP_MAC, b"payload", true));
        assert_eq!(head, with_options[..46]);
    }
}
