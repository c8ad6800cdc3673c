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
/// The bits of the number of bytes before the payload, which is [`HEAD4`] or [`HEAD6`].
pub const HEAD: u8 = 0x3e;
/// The checksum of UDP is that of the pseudo header alone ([`Checksum::Unfinished`]); else it is right.
pub const UNFINISHED: u8 = 0x40;
/// The longest UDP datagram, with its header, that gets a note.
pub const MOST: u16 = 72;
/// Bytes of a note: kind, one that is left as it was, and the bytes of payload in the byte order of the machine.
pub const LEN: usize = 4;

/// Bytes before the payload in a frame with a note: of IPv4, and of IPv6.
pub const HEAD4: usize = ethernet::HEADER + ipv4::HEADER + udp::HEADER;
/// See [`HEAD4`].
pub const HEAD6: usize = ethernet::HEADER + ipv6::HEADER + udp::HEADER;
const _: () = assert!((HEAD4 | HEAD6) & !(HEAD as usize) == 0 && HEAD & (NOTE | UNFINISHED) == 0);

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

/// Where the payload of a frame with a note is: what a receiver has to know of each frame. What the headers say besides is read of
/// those that it asks about ([`Datagram::of_noted4`], [`Datagram::of_noted6`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noted {
    /// Where the payload starts in the frame.
    pub at: u16,
    /// Bytes of payload.
    pub len: u16,
}

/// What the note on a frame says that came through the XDP program. None if there is no note on it, or it is not as long as that
/// says, or its checksum is unfinished and that is not `taken`: then [`Datagram::read`] finds out what it is.
#[must_use]
#[inline]
pub fn find(frame: &[u8], taken: Unfinished) -> Option<Noted> {
    let &[kind, _, low, high] = frame.first_chunk()?;
    let (at, len) = (u16::from(kind & HEAD), u16::from_ne_bytes([low, high]));
    let is_taken = kind & (NOTE | UNFINISHED & !(taken as u8)) == NOTE;
    (is_taken && usize::from(at) + usize::from(len) <= frame.len()).then_some(Noted { at, len })
}

/// Whether checksums may be unfinished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Unfinished {
    /// They are as wrong as any other.
    Refused = 0,
    /// The frame has not been on a wire.
    Taken = UNFINISHED,
}

impl Datagram {
    /// As [`read`](Self::read), of a frame that came through the XDP program: what a note on it says is believed and not
    /// found out again.
    ///
    /// # Errors
    /// As for [`parse`](Self::parse).
    #[inline]
    pub fn read_noted(&mut self, frame: &[u8]) -> Result<()> {
        let noted = find(frame, Unfinished::Taken).and_then(|noted| match noted.at.into() {
            HEAD4 => frame.first_chunk().and_then(Self::of_noted4),
            HEAD6 => frame.first_chunk().and_then(Self::of_noted6),
            _ => None,
        });
        match noted {
            Some(noted) => *self = noted,
            None => return self.read(frame),
        }
        Ok(())
    }

    /// What the headers of a frame with a note say, if that says that they are those of IPv4; of one that [`find`] has found, with
    /// so many bytes before its payload. Once this is compiled into where it is called, nothing is read that nobody looks at.
    #[must_use]
    #[inline]
    pub fn of_noted4(head: &[u8; HEAD4]) -> Option<Self> {
        let mut found = Self::default();
        let length = found.believe(chunk(head, 0), HEAD4)?;
        found.end4(head, length);
        Some(found)
    }

    /// The same of IPv6.
    #[must_use]
    #[inline]
    pub fn of_noted6(head: &[u8; HEAD6]) -> Option<Self> {
        let mut found = Self::default();
        let length = found.believe(chunk(head, 0), HEAD6)?;
        found.end6(head, length);
        Some(found)
    }

    /// What a note says of the checksum, if it says that so many bytes are before the payload; the bytes of UDP.
    #[inline]
    fn believe(&mut self, note: [u8; LEN], head: usize) -> Option<usize> {
        let [kind, _, low, high] = note;
        self.checksum = if kind & UNFINISHED != 0 { Checksum::Unfinished } else { Checksum::Right };
        let length = u16::from_ne_bytes([low, high]);
        (kind & !UNFINISHED == NOTE | head as u8).then(|| udp::HEADER + usize::from(length))
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
        noted[0] = kind | if v6 { HEAD6 } else { HEAD4 } as u8;
        noted[1] = 0;
        noted[2..4].copy_from_slice(&(payload.len() as u16).to_ne_bytes());
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
            let as_if_none = |change: &dyn Fn(&mut [u8])| {
                let mut noted = noted.clone();
                change(&mut noted);
                let mut found = Datagram::default();
                found.read_noted(&noted).unwrap();
                assert_eq!(Ok(found), Datagram::parse(&frame), "v6 {v6}");
            };
            for length in [8_u16, 16, u16::MAX] {
                as_if_none(&|noted| noted[2..4].copy_from_slice(&length.to_ne_bytes()));
            }
            let right = [HEAD4 as u8, HEAD6 as u8];
            for head in (0..=HEAD).step_by(2).filter(|&head| head != right[0] && head != right[1]) {
                as_if_none(&|noted| noted[0] = NOTE | head);
            }
            // A bit that says nothing.
            as_if_none(&|noted| noted[0] |= 0x80);
            for cut in 0..noted.len() {
                assert_eq!(find(&noted[..cut], Unfinished::Taken), None);
                assert!(Datagram::default().read_noted(&noted[..cut]).is_err(), "{cut}, v6 {v6}");
            }
        }
    }

    #[test]
    fn a_note_says_where_the_payload_is_if_its_checksum_is_taken() {
        for v6 in [false, true] {
            let at = if v6 { 62 } else { 42 };
            for (kind, refused) in [(NOTE, Some(Noted { at, len: 7 })), (NOTE | UNFINISHED, None)] {
                let (frame, noted) = pair(b"payload", v6, kind);
                assert_eq!(find(&noted, Unfinished::Taken), Some(Noted { at, len: 7 }));
                assert_eq!(find(&noted, Unfinished::Refused), refused);
                assert_eq!(
                    (find(&frame, Unfinished::Taken), find(&frame, Unfinished::Refused)),
                    (None, None)
                );
            }
        }
    }

    #[test]
    fn headers_are_those_of_the_version_that_the_note_says() {
        for v6 in [false, true] {
            let (frame, noted) = pair(b"payload", v6, NOTE);
            let read = Datagram::parse(&frame).unwrap();
            let four = Datagram::of_noted4(noted.first_chunk().unwrap());
            let six = noted.first_chunk().and_then(Datagram::of_noted6);
            assert_eq!((four, six), if v6 { (None, Some(read)) } else { (Some(read), None) });
            let four = Datagram::of_noted4(frame.first_chunk().unwrap());
            assert_eq!((four, frame.first_chunk().and_then(Datagram::of_noted6)), (None, None), "no note");
        }
    }
}
