//! TCP headers (RFC 9293, section 3.1) and their options.

use std::net::{IpAddr, SocketAddr};

use crate::checksum::Sum;
use crate::error::{Error, Layer, Result, split, split_mut, take};

/// Length of a header without options.
pub const HEADER_LEN: usize = 20;
/// Maximum length of the options.
pub const OPTIONS_LEN_MAX: usize = 40;
/// Offset of the checksum in the header.
pub const CHECKSUM_OFFSET: usize = 16;
/// Protocol number of TCP in IP headers.
pub const PROTOCOL: u8 = 6;
/// Maximum shift of a window (RFC 7323, section 2.3).
pub const WINDOW_SCALE_MAX: u8 = 14;
/// Maximum number of blocks in a SACK option (RFC 2018, section 3).
pub const SACK_BLOCKS_MAX: usize = 4;

/// The control bits of a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(pub u8);

impl Flags {
    /// No more data from the sender.
    pub const FIN: Flags = Flags(0x01);
    /// The sequence number is the initial one.
    pub const SYN: Flags = Flags(0x02);
    /// The connection is reset.
    pub const RST: Flags = Flags(0x04);
    /// The data is to be delivered without delay.
    pub const PSH: Flags = Flags(0x08);
    /// The acknowledgment number is valid.
    pub const ACK: Flags = Flags(0x10);
    /// The urgent pointer is valid.
    pub const URG: Flags = Flags(0x20);
    /// ECN echo (RFC 3168).
    pub const ECE: Flags = Flags(0x40);
    /// Congestion window reduced (RFC 3168).
    pub const CWR: Flags = Flags(0x80);

    /// True if all bits of `other` are set.
    #[must_use]
    #[inline]
    pub const fn contains(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    /// The bits of both.
    #[must_use]
    #[inline]
    pub const fn with(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }
}

/// A segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tcp<'a> {
    /// Source port.
    pub source: u16,
    /// Destination port.
    pub destination: u16,
    /// Number of the first byte of the payload, or of SYN.
    pub sequence: u32,
    /// Number of the next byte that its sender expects, with [`Flags::ACK`].
    pub acknowledgment: u32,
    /// The control bits.
    pub flags: Flags,
    /// The window as sent: not scaled.
    pub window: u16,
    /// The checksum, as received.
    pub checksum: u16,
    /// Offset of the end of the urgent data, with [`Flags::URG`].
    pub urgent: u16,
    /// The bytes of the options: see [`Options::parse`].
    pub options: &'a [u8],
    /// The whole segment.
    pub segment: &'a [u8],
    /// The payload.
    pub payload: &'a [u8],
}

impl<'a> Tcp<'a> {
    /// Parses the payload of an IP packet, all of which is the segment. Does not verify the
    /// checksum: see [`has_valid_checksum`](Self::has_valid_checksum).
    ///
    /// # Errors
    /// If the length in the header is less than the header, or more than `segment`.
    pub fn parse(segment: &'a [u8]) -> Result<Tcp<'a>> {
        let (&[s0, s1, d0, d1, q0, q1, q2, q3, a0, a1, a2, a3, offset, flags, w0, w1, c0, c1, u0, u1], _) =
            split::<HEADER_LEN>(segment, Layer::Tcp)?;
        let header_length = usize::from(offset >> 4) * 4;
        if header_length < HEADER_LEN {
            return Err(Error::BadLength(Layer::Tcp));
        }
        let header = take(segment, header_length, Layer::Tcp)?;
        Ok(Tcp {
            source: u16::from_be_bytes([s0, s1]),
            destination: u16::from_be_bytes([d0, d1]),
            sequence: u32::from_be_bytes([q0, q1, q2, q3]),
            acknowledgment: u32::from_be_bytes([a0, a1, a2, a3]),
            flags: Flags(flags),
            window: u16::from_be_bytes([w0, w1]),
            checksum: u16::from_be_bytes([c0, c1]),
            urgent: u16::from_be_bytes([u0, u1]),
            options: &header[HEADER_LEN..],
            segment,
            payload: &segment[header_length..],
        })
    }

    /// True if the checksum is valid for these addresses.
    #[must_use]
    #[inline]
    pub fn has_valid_checksum(&self, source: IpAddr, destination: IpAddr) -> bool {
        pseudo_header(source, destination, self.segment.len())
            .is_ok_and(|pseudo| pseudo.add_bytes(self.segment).is_valid())
    }

    /// True if the checksum covers the pseudo header alone: a kernel on this machine left the rest
    /// to a device.
    #[must_use]
    #[inline]
    pub fn has_partial_checksum(&self, source: IpAddr, destination: IpAddr) -> bool {
        pseudo_header(source, destination, self.segment.len())
            .is_ok_and(|pseudo| pseudo.value() == self.checksum)
    }

    /// Length in the sequence space: bytes of payload, and one each for SYN and FIN.
    #[must_use]
    pub fn sequence_len(&self) -> usize {
        self.payload.len()
            + usize::from(self.flags.contains(Flags::SYN))
            + usize::from(self.flags.contains(Flags::FIN))
    }
}

/// The options that we know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Maximum segment size, of a SYN (RFC 9293, section 3.7.1).
    pub mss: Option<u16>,
    /// Shift of later windows, of a SYN; at most [`WINDOW_SCALE_MAX`] (RFC 7323).
    pub window_scale: Option<u8>,
    /// The sender takes SACK options, of a SYN (RFC 2018).
    pub sack_permitted: bool,
    /// The first and the last number plus one of received blocks; the first ones are valid, up to
    /// the first that is `None` (RFC 2018).
    pub sack: [Option<(u32, u32)>; SACK_BLOCKS_MAX],
    /// The sender's time stamp, and the one that it echoes (RFC 7323).
    pub timestamps: Option<(u32, u32)>,
}

const END: u8 = 0;
const NOP: u8 = 1;
const MSS: u8 = 2;
const WINDOW_SCALE: u8 = 3;
const SACK_PERMITTED: u8 = 4;
const SACK: u8 = 5;
const TIMESTAMPS: u8 = 8;

impl Options {
    /// Parses the options of a segment. As in the kernel (`tcp_parse_options`), unknown ones and
    /// those of a wrong length are skipped, those that belong to a SYN count only there, and a
    /// length that leaves the header ends the list.
    #[must_use]
    pub fn parse(bytes: &[u8], is_syn: bool) -> Options {
        let (mut options, mut rest) = (Options::default(), bytes);
        while let [kind, behind @ ..] = rest {
            match *kind {
                END => break,
                NOP => {
                    rest = behind;
                    continue;
                }
                _ => {}
            }
            let Some(length) = behind.first().map(|length| usize::from(*length)) else { break };
            let Some((option, behind)) = rest.split_at_checked(length).filter(|_| length >= 2) else { break };
            options.read(*kind, &option[2..], is_syn);
            rest = behind;
        }
        options
    }

    fn read(&mut self, kind: u8, value: &[u8], is_syn: bool) {
        match (kind, value) {
            (MSS, &[m0, m1]) if is_syn => {
                self.mss = Some(u16::from_be_bytes([m0, m1])).filter(|mss| *mss > 0);
            }
            (WINDOW_SCALE, &[shift]) if is_syn => self.window_scale = Some(shift.min(WINDOW_SCALE_MAX)),
            (SACK_PERMITTED, []) if is_syn => self.sack_permitted = true,
            (TIMESTAMPS, &[v0, v1, v2, v3, e0, e1, e2, e3]) => {
                let (value, echo) = ([v0, v1, v2, v3], [e0, e1, e2, e3]);
                self.timestamps = Some((u32::from_be_bytes(value), u32::from_be_bytes(echo)));
            }
            (SACK, blocks) if !blocks.is_empty() && blocks.len().is_multiple_of(8) => {
                let mut blocks = blocks.as_chunks::<8>().0.iter();
                self.sack = std::array::from_fn(|_| {
                    blocks.next().map(|&[l0, l1, l2, l3, r0, r1, r2, r3]| {
                        (u32::from_be_bytes([l0, l1, l2, l3]), u32::from_be_bytes([r0, r1, r2, r3]))
                    })
                });
            }
            _ => {}
        }
    }

    /// Length of the options in a header: a multiple of four.
    ///
    /// # Errors
    /// If they exceed [`OPTIONS_LEN_MAX`].
    pub fn encoded_len(&self) -> Result<usize> {
        let blocks = self.sack_blocks().count();
        let length = [
            (self.mss.is_some(), 4),
            (self.sack_permitted && self.timestamps.is_none(), 4),
            (self.timestamps.is_some(), 12),
            (self.window_scale.is_some(), 4),
            (blocks > 0, 4 + 8 * blocks),
        ]
        .into_iter()
        .map(|(is_set, length)| if is_set { length } else { 0 })
        .sum();
        if length > OPTIONS_LEN_MAX { Err(Error::TooLong(Layer::Tcp)) } else { Ok(length) }
    }

    fn sack_blocks(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.sack.iter().map_while(|block| *block)
    }

    /// Writes the options in the order and with the padding of Linux, into exactly
    /// [`encoded_len`](Self::encoded_len) bytes.
    fn write(&self, bytes: &mut [u8]) {
        let mut rest = bytes;
        let mut put = |option: &[u8]| {
            if let Some((place, behind)) = std::mem::take(&mut rest).split_at_mut_checked(option.len()) {
                place.copy_from_slice(option);
                rest = behind;
            }
        };
        if let Some(mss) = self.mss {
            let [m0, m1] = mss.to_be_bytes();
            put(&[MSS, 4, m0, m1]);
        }
        if let Some((value, echo)) = self.timestamps {
            // The two bytes in front of it are for padding, or for SACK permitted.
            put(if self.sack_permitted { &[SACK_PERMITTED, 2] } else { &[NOP, NOP] });
            put(&[TIMESTAMPS, 10]);
            put(&value.to_be_bytes());
            put(&echo.to_be_bytes());
        } else if self.sack_permitted {
            put(&[NOP, NOP, SACK_PERMITTED, 2]);
        }
        if let Some(shift) = self.window_scale {
            put(&[NOP, WINDOW_SCALE, 3, shift.min(WINDOW_SCALE_MAX)]);
        }
        let blocks = self.sack_blocks().count();
        if blocks > 0 {
            // At most 34, with four blocks.
            put(&[NOP, NOP, SACK, u8::try_from(2 + 8 * blocks).unwrap_or(u8::MAX)]);
            for (first, end) in self.sack_blocks() {
                put(&first.to_be_bytes());
                put(&end.to_be_bytes());
            }
        }
    }
}

/// The fields of a header, for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpHeader {
    /// Source.
    pub source: SocketAddr,
    /// Destination.
    pub destination: SocketAddr,
    /// See [`Tcp::sequence`].
    pub sequence: u32,
    /// See [`Tcp::acknowledgment`].
    pub acknowledgment: u32,
    /// The control bits.
    pub flags: Flags,
    /// The window as sent: already scaled.
    pub window: u16,
    /// See [`Tcp::urgent`].
    pub urgent: u16,
    /// The options.
    pub options: Options,
}

impl TcpHeader {
    /// Length of the header with its options.
    ///
    /// # Errors
    /// If the options are too long.
    pub fn encoded_len(&self) -> Result<usize> {
        Ok(HEADER_LEN + self.options.encoded_len()?)
    }

    /// Writes the header at the start of `bytes`, with the checksum over `payload`, which is stored
    /// elsewhere. Returns its length.
    ///
    /// # Errors
    /// If there is no room for the header, the options or the segment are too long, or the
    /// families differ.
    pub fn write(&self, bytes: &mut [u8], payload: &[u8]) -> Result<usize> {
        let length = self.encoded_len()?;
        let pseudo = pseudo_header(self.source.ip(), self.destination.ip(), length + payload.len())?;
        let there = bytes.len();
        let header =
            bytes.get_mut(..length).ok_or(Error::Truncated { layer: Layer::Tcp, needed: length, there })?;
        let (fixed, options) = split_mut::<HEADER_LEN>(header, Layer::Tcp)?;
        fixed[..2].copy_from_slice(&self.source.port().to_be_bytes());
        fixed[2..4].copy_from_slice(&self.destination.port().to_be_bytes());
        fixed[4..8].copy_from_slice(&self.sequence.to_be_bytes());
        fixed[8..12].copy_from_slice(&self.acknowledgment.to_be_bytes());
        // At most 60 bytes: 15 words, in the upper half of the byte.
        fixed[12] = u8::try_from(length << 2).unwrap_or(u8::MAX);
        fixed[13] = self.flags.0;
        fixed[14..CHECKSUM_OFFSET].copy_from_slice(&self.window.to_be_bytes());
        fixed[CHECKSUM_OFFSET..18].fill(0);
        fixed[18..].copy_from_slice(&self.urgent.to_be_bytes());
        self.options.write(options);
        let checksum = pseudo.add_bytes(header).add_bytes(payload).finish();
        header[CHECKSUM_OFFSET..18].copy_from_slice(&checksum.to_be_bytes());
        Ok(length)
    }
}

fn pseudo_header(source: IpAddr, destination: IpAddr, length: usize) -> Result<Sum> {
    let length = u16::try_from(length).map_err(|_| Error::TooLong(Layer::Tcp))?;
    Sum::pseudo(source, destination, PROTOCOL, length)
}
