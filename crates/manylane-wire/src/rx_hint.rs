//! The rx hint: results of the XDP program about a frame (`bpf/rx_hint.h`), written into its first
//! four bytes. It says that the frame is a plain UDP datagram, how long it is, and what its
//! checksums say.
//!
//! Those bytes were the first ones of the destination MAC address, which the program had compared
//! with the device's. Such an address has no group bit; a hint has that bit set. So a frame that
//! came through the program shows by itself whether it has a hint, and no sender can forge one. A
//! frame that did not come through the program must not be parsed like this.

use crate::datagram::{Checksum, Datagram, chunk};
use crate::error::Result;
use crate::ethernet::{self, Mac};
use crate::frame::ip_udp_len;
use crate::udp;

/// The frame has a hint: IP without tags or options, all lengths and the IPv4 checksum valid.
pub const HINT: u8 = 1;
/// Mask of the number of bytes before the payload: [`HEADERS_LEN_V4`] or [`HEADERS_LEN_V6`].
pub const HEADERS_LEN_MASK: u8 = 0x3e;
/// The UDP checksum is that of the pseudo header alone ([`Checksum::Partial`]); otherwise it is
/// valid.
pub const PARTIAL: u8 = 0x40;
/// Length of the longest UDP datagram, with its header, that gets a hint.
pub const UDP_LEN_MAX: u16 = 72;
/// Length of a hint: kind, one unchanged byte, and the length of the payload in the byte order of
/// the machine.
pub const HINT_LEN: usize = 4;

/// Bytes before the payload in a frame with a hint, for IPv4.
pub const HEADERS_LEN_V4: usize = ethernet::HEADER_LEN + ip_udp_len(false);
/// As [`HEADERS_LEN_V4`], for IPv6.
pub const HEADERS_LEN_V6: usize = ethernet::HEADER_LEN + ip_udp_len(true);
const _: () = assert!(
    (HEADERS_LEN_V4 | HEADERS_LEN_V6) & !(HEADERS_LEN_MASK as usize) == 0
        && HEADERS_LEN_MASK & (HINT | PARTIAL) == 0
);

/// True if the frame has a hint.
#[must_use]
#[inline]
pub fn has_hint(frame: &[u8]) -> bool {
    frame.first().is_some_and(|kind| kind & HINT != 0)
}

/// Restores the first bytes of a frame with a hint, which was sent to the device with this
/// address.
pub fn restore(frame: &mut [u8], device: Mac) {
    if has_hint(frame)
        && let Some(hint) = frame.first_chunk_mut::<HINT_LEN>()
    {
        *hint = chunk(&device.0, 0);
    }
}

/// The payload of a frame with a hint, which is what a receiver needs of every frame. The other
/// header fields are parsed only on demand ([`Datagram::from_hint_v4`],
/// [`Datagram::from_hint_v6`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RxHint {
    /// Offset of the payload in the frame.
    pub payload_offset: u16,
    /// Length of the payload.
    pub len: u16,
}

/// Parses the hint of a frame that came through the XDP program. None if there is no hint, if the
/// frame is shorter than the hint says, or if the checksum is [`Checksum::Partial`] and the frame
/// is not from a veth ([`Checksum::is_accepted`]). Then [`Datagram::read`] has to parse the frame.
#[must_use]
#[inline]
pub fn parse(frame: &[u8], from_veth: bool) -> Option<RxHint> {
    let &[kind, _, low, high] = frame.first_chunk()?;
    let (at, len) = (u16::from(kind & HEADERS_LEN_MASK), u16::from_ne_bytes([low, high]));
    let is_taken = kind & (HINT | if from_veth { 0 } else { PARTIAL }) == HINT;
    (is_taken && usize::from(at) + usize::from(len) <= frame.len())
        .then_some(RxHint { payload_offset: at, len })
}

impl Datagram {
    /// As [`read`](Self::read), for a frame that came through the XDP program: a hint is trusted,
    /// and not verified.
    ///
    /// # Errors
    /// As for [`parse`](Self::parse).
    #[inline]
    pub fn read_hinted(&mut self, frame: &[u8]) -> Result<()> {
        let hint = parse(frame, true).and_then(|hint| match hint.payload_offset.into() {
            HEADERS_LEN_V4 => frame.first_chunk().and_then(Self::from_hint_v4),
            HEADERS_LEN_V6 => frame.first_chunk().and_then(Self::from_hint_v6),
            _ => None,
        });
        match hint {
            Some(datagram) => *self = datagram,
            None => return self.read(frame),
        }
        Ok(())
    }

    /// Parses the headers of a frame with a hint, if the hint is for IPv4. [`parse`] must have
    /// accepted the frame, with this number of bytes before its payload. Inlined into the caller,
    /// it reads only the fields that are used.
    #[must_use]
    #[inline]
    pub fn from_hint_v4(head: &[u8; HEADERS_LEN_V4]) -> Option<Self> {
        let mut found = Self::default();
        let length = found.trust(chunk(head, 0), HEADERS_LEN_V4)?;
        found.set_headers_v4(head, length);
        Some(found)
    }

    /// As above, for IPv6.
    #[must_use]
    #[inline]
    pub fn from_hint_v6(head: &[u8; HEADERS_LEN_V6]) -> Option<Self> {
        let mut found = Self::default();
        let length = found.trust(chunk(head, 0), HEADERS_LEN_V6)?;
        found.set_headers_v6(head, length);
        Some(found)
    }

    /// Sets the checksum from a hint, if that says that `head` bytes are before the payload;
    /// returns the length of UDP.
    #[inline]
    fn trust(&mut self, hint: [u8; HINT_LEN], head: usize) -> Option<usize> {
        let [kind, _, low, high] = hint;
        self.checksum = if kind & PARTIAL != 0 { Checksum::Partial } else { Checksum::Valid };
        let length = u16::from_ne_bytes([low, high]);
        (usize::from(kind & !PARTIAL) == usize::from(HINT) | head)
            .then(|| udp::HEADER_LEN + usize::from(length))
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::frame::UdpFrame;

    const DEVICE: Mac = Mac([2, 4, 6, 8, 10, 12]);

    /// A frame, and the same with the hint that the program writes.
    fn pair(payload: &[u8], v6: bool, kind: u8) -> (Vec<u8>, Vec<u8>) {
        let (from, to): (SocketAddr, SocketAddr) = if v6 {
            ("[fd00::1]:7".parse().unwrap(), "[fd00::2]:53".parse().unwrap())
        } else {
            ("10.0.0.1:7".parse().unwrap(), "10.0.0.2:53".parse().unwrap())
        };
        let plan = UdpFrame { payload, traffic_class: 0xb9, ..UdpFrame::new(Mac([2; 6]), DEVICE, from, to) };
        let mut frame = vec![0; plan.len()];
        plan.write(&mut frame).unwrap();
        let mut hinted = frame.clone();
        hinted[0] = kind | if v6 { HEADERS_LEN_V6 } else { HEADERS_LEN_V4 } as u8;
        hinted[1] = 0;
        hinted[2..4].copy_from_slice(&(payload.len() as u16).to_ne_bytes());
        (frame, hinted)
    }

    #[test]
    fn an_rx_hint_matches_full_parsing() {
        for v6 in [false, true] {
            for length in 0..=usize::from(UDP_LEN_MAX) - udp::HEADER_LEN {
                let (frame, mut hinted) = pair(&vec![0xa5; length], v6, HINT);
                // Old content must not show through.
                let mut found = Datagram::parse(&pair(b"something else", !v6, 0).0).unwrap();
                for padding in [0, 18] {
                    hinted.resize(frame.len() + padding, 0xee);
                    found.read_hinted(&hinted).unwrap();
                    assert_eq!(Ok(found), Datagram::parse(&frame), "{length}, v6 {v6}");
                }
                hinted.truncate(frame.len());
                restore(&mut hinted, DEVICE);
                assert_eq!(hinted, frame);
            }
        }
    }

    #[test]
    fn an_rx_hint_is_used_whatever_the_checksum() {
        for v6 in [false, true] {
            for (kind, says) in [(HINT, Checksum::Valid), (HINT | PARTIAL, Checksum::Partial)] {
                let (_, mut hinted) = pair(b"payload", v6, kind);
                *hinted.last_mut().unwrap() ^= 1;
                let mut found = Datagram::default();
                found.read_hinted(&hinted).unwrap();
                assert_eq!(found.checksum, says);
            }
        }
    }

    #[test]
    fn frames_without_an_rx_hint_are_parsed_fully() {
        for v6 in [false, true] {
            let (mut frame, _) = pair(b"payload", v6, 0);
            let mut found = Datagram::default();
            found.read_hinted(&frame).unwrap();
            assert_eq!(Ok(found), Datagram::parse(&frame));
            *frame.last_mut().unwrap() ^= 1;
            found.read_hinted(&frame).unwrap();
            assert_eq!(found.checksum, Checksum::Invalid);
            let before = frame.clone();
            restore(&mut frame, Mac([0xff; 6]));
            assert_eq!(frame, before, "nothing to restore");
        }
    }

    /// The program does not write such hints, but a reader must handle them.
    #[test]
    fn an_invalid_rx_hint_is_ignored() {
        for v6 in [false, true] {
            let (frame, hinted) = pair(b"payload", v6, HINT);
            let as_if_none = |change: &dyn Fn(&mut [u8])| {
                let mut hinted = hinted.clone();
                change(&mut hinted);
                let mut found = Datagram::default();
                found.read_hinted(&hinted).unwrap();
                assert_eq!(Ok(found), Datagram::parse(&frame), "v6 {v6}");
            };
            for length in [8_u16, 16, u16::MAX] {
                as_if_none(&|hinted| hinted[2..4].copy_from_slice(&length.to_ne_bytes()));
            }
            let right = [HEADERS_LEN_V4 as u8, HEADERS_LEN_V6 as u8];
            for head in (0..=HEADERS_LEN_MASK).step_by(2).filter(|&head| head != right[0] && head != right[1])
            {
                as_if_none(&|hinted| hinted[0] = HINT | head);
            }
            // A bit without a meaning.
            as_if_none(&|hinted| hinted[0] |= 0x80);
            for cut in 0..hinted.len() {
                assert_eq!(parse(&hinted[..cut], true), None);
                assert!(Datagram::default().read_hinted(&hinted[..cut]).is_err(), "{cut}, v6 {v6}");
            }
        }
    }

    #[test]
    fn an_rx_hint_locates_the_payload() {
        for v6 in [false, true] {
            let at = if v6 { 62 } else { 42 };
            for (kind, refused) in
                [(HINT, Some(RxHint { payload_offset: at, len: 7 })), (HINT | PARTIAL, None)]
            {
                let (frame, hinted) = pair(b"payload", v6, kind);
                assert_eq!(parse(&hinted, true), Some(RxHint { payload_offset: at, len: 7 }));
                assert_eq!(parse(&hinted, false), refused);
                assert_eq!((parse(&frame, true), parse(&frame, false)), (None, None));
            }
        }
    }

    #[test]
    fn headers_follow_the_ip_version_of_the_rx_hint() {
        for v6 in [false, true] {
            let (frame, hinted) = pair(b"payload", v6, HINT);
            let read = Datagram::parse(&frame).unwrap();
            let four = Datagram::from_hint_v4(hinted.first_chunk().unwrap());
            let six = hinted.first_chunk().and_then(Datagram::from_hint_v6);
            assert_eq!((four, six), if v6 { (None, Some(read)) } else { (Some(read), None) });
            let four = Datagram::from_hint_v4(frame.first_chunk().unwrap());
            assert_eq!((four, frame.first_chunk().and_then(Datagram::from_hint_v6)), (None, None), "no hint");
        }
    }
}
