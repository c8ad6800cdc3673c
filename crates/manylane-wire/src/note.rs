//! What the XDP program of a device has found out about a frame on its way to a lane (`bpf/note.h`), and has written into
//! its first four bytes: that it is a plain UDP datagram, how long it is, and what its checksums say.
//!
//! Those bytes were the first of the destination's address, which the program had compared with that of the device. Such
//! an address has no group bit; a note has that bit set. So a frame that came through the program tells by itself
//! whether there is a note on it, and no sender can forge one. A frame that came another way must not be read like this.

use crate::datagram::{Checksum, Datagram, chunk};
use crate::error::Result;
use crate::ethernet::{self, Mac};
use crate::{ipv4, ipv6, udp};

/// There is a note: IP without tags or options, all lengths right, the checksum of IPv4 too.
pub const NOTE: u8 = 1;
/// It is IPv6.
pub const IP6: u8 = 2;
/// The checksum of UDP is that of the pseudo header alone ([`Checksum::Unfinished`]); else it is right.
pub const UNFINISHED: u8 = 4;
/// The longest UDP datagram, with its header, that gets a note.
pub const MOST: u16 = 72;
/// Bytes of a note: kind, one that is left as it was, and the length of UDP in the byte order of the machine.
pub const LEN: usize = 4;

/// Frames of a datagram without a payload.
const SHORTEST4: usize = ethernet::HEADER + ipv4::HEADER + udp::HEADER;
const SHORTEST6: usize = ethernet::HEADER + ipv6::HEADER + udp::HEADER;

/// Whether there is a note on the frame.
#[must_use]
#[inline]
pub fn is_noted(frame: &[u8]) -> bool {
    frame.first().is_some_and(|kind| kind & NOTE != 0)
}

/// Makes a frame with a note what it was: one to the device with this address.
pub fn restore(frame: &mut [u8], device: Mac) {
    if is_noted(frame)
        && let Some(note) = frame.first_chunk_mut::<LEN>()
    {
        *note = chunk(&device.0, 0);
    }
}

impl Datagram {
    /// As [`read`](Self::read), of a frame that came through the XDP program: what a note on it says is believed and not
    /// found out again.
    ///
    /// # Errors
    /// As for [`parse`](Self::parse).
    #[inline]
    pub fn read_noted(&mut self, frame: &[u8]) -> Result<()> {
        if self.believe(frame) { Ok(()) } else { self.read(frame) }
    }

    /// Reads a frame that came through the XDP program and has a note: what that says is believed and not found out again.
    /// False if there is no note on it, or it is not as long as its note says: then [`read`](Self::read) finds out what it is.
    #[must_use]
    #[inline]
    pub fn believe(&mut self, frame: &[u8]) -> bool {
        let Some(head) = frame.first_chunk::<SHORTEST4>() else { return false };
        let [kind, _, low, high] = chunk(head, 0);
        let length = usize::from(u16::from_ne_bytes([low, high]));
        if kind & NOTE == 0 {
            return false;
        }
        // A length below that of a header is as far beyond what a frame can have.
        let payload = length.wrapping_sub(udp::HEADER);
        if kind & IP6 == 0 {
            if payload > frame.len() - SHORTEST4 {
                return false;
            }
            self.end4(head, length);
        } else {
            let Some(head) = frame.first_chunk::<SHORTEST6>() else { return false };
            if payload > frame.len() - SHORTEST6 {
                return false;
            }
            self.end6(head, length);
        }
        self.checksum = if kind & UNFINISHED != 0 { Checksum::Unfinished } else { Checksum::Right };
        true
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::frame::UdpFrame;

    const DEVICE: Mac = Mac([2, 4, 6, 8, 10, 12]);

    /// A frame, and the same with the note that the program puts on it.
    fn pair(payload: &[u8], v6: bool, kind: u8) -> (Vec<u8>, Vec<u8>) {
        let (from, to): (SocketAddr, SocketAddr) = if v6 {
            ("[fd00::1]:7".parse().unwrap(), "[fd00::2]:53".parse().unwrap())
        } else {
            ("10.0.0.1:7".parse().unwrap(), "10.0.0.2:53".parse().unwrap())
        };
        let plan = UdpFrame { payload, traffic_class: 0xb9, ..UdpFrame::new(Mac([2; 6]), DEVICE, from, to) };
        let mut frame = vec![0; plan.len()];
        plan.write(&mut frame).unwrap();
        let mut noted = frame.clone();
        noted[0] = kind | if v6 { IP6 } else { 0 };
        noted[1] = 0;
        noted[2..4].copy_from_slice(&((payload.len() + udp::HEADER) as u16).to_ne_bytes());
        (frame, noted)
    }

    #[test]
    fn a_note_says_what_is_found_out_without_it() {
        for v6 in [false, true] {
            for length in 0..=usize::from(MOST) - udp::HEADER {
                let (frame, mut noted) = pair(&vec![0xa5; length], v6, NOTE);
                // What was in its place before must not show.
                let mut found = Datagram::parse(&pair(b"something else", !v6, 0).0).unwrap();
                for padding in [0, 18] {
                    noted.resize(frame.len() + padding, 0xee);
                    found.read_noted(&noted).unwrap();
                    assert_eq!(Ok(found), Datagram::parse(&frame), "{length}, v6 {v6}");
                }
                noted.truncate(frame.len());
                restore(&mut noted, DEVICE);
                assert_eq!(noted, frame);
            }
        }
    }

    #[test]
    fn it_is_believed_whatever_the_checksum_is() {
        for v6 in [false, true] {
            for (kind, says) in [(NOTE, Checksum::Right), (NOTE | UNFINISHED, Checksum::Unfinished)] {
                let (_, mut noted) = pair(b"payload", v6, kind);
                *noted.last_mut().unwrap() ^= 1;
                let mut found = Datagram::default();
                found.read_noted(&noted).unwrap();
                assert_eq!(found.checksum, says);
            }
        }
    }

    #[test]
    fn without_a_note_everything_is_found_out() {
        for v6 in [false, true] {
            let (mut frame, _) = pair(b"payload", v6, 0);
            let mut found = Datagram::default();
            found.read_noted(&frame).unwrap();
            assert_eq!(Ok(found), Datagram::parse(&frame));
            *frame.last_mut().unwrap() ^= 1;
            found.read_noted(&frame).unwrap();
            assert_eq!(found.checksum, Checksum::Wrong);
            let before = frame.clone();
            restore(&mut frame, Mac([0xff; 6]));
            assert_eq!(frame, before, "nothing to restore");
        }
    }

    /// The program does not write such notes; who reads them does not fall over them.
    #[test]
    fn a_note_that_cannot_be_is_not_believed() {
        for v6 in [false, true] {
            let (frame, noted) = pair(b"payload", v6, NOTE);
            for length in [0_u16, 7, 16, u16::MAX] {
                let mut noted = noted.clone();
                noted[2..4].copy_from_slice(&length.to_ne_bytes());
                let mut found = Datagram::default();
                found.read_noted(&noted).unwrap();
                assert_eq!(Ok(found), Datagram::parse(&frame), "{length}, v6 {v6}");
            }
            for cut in 0..noted.len() {
                assert!(Datagram::default().read_noted(&noted[..cut]).is_err(), "{cut}, v6 {v6}");
            }
        }
    }
}
