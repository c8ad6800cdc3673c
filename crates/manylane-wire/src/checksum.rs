//! The Internet checksum (RFC 1071), pseudo headers, and the update of a checksum (RFC 1624).

use std::net::{Ipv4Addr, Ipv6Addr};

/// A sum in ones' complement that can be continued. It is kept in the byte order of the machine, which the
/// arithmetic allows (RFC 1071, 2.B), and unfolded.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum(u64);

impl Sum {
    /// Adds `bytes`. Only the last piece of a sum may have an odd length: it is padded with a zero.
    #[must_use]
    #[inline]
    pub fn bytes(self, bytes: &[u8]) -> Sum {
        let mut sum = self.0;
        // 32-bit halves into 64 bits: blocks are short enough not to overflow before they are folded.
        for block in bytes.chunks(1 << 16) {
            let mut words = block.chunks_exact(8);
            for word in &mut words {
                let word = u64::from_ne_bytes(eight(word));
                sum += (word >> 32) + (word & 0xffff_ffff);
            }
            // Piece by piece: filling up a word with a copy of unknown length costs more than all of this.
            let mut rest = words.remainder();
            if let Some((four, behind)) = rest.split_first_chunk::<4>() {
                sum += u64::from(u32::from_ne_bytes(*four));
                rest = behind;
            }
            if let Some((two, behind)) = rest.split_first_chunk::<2>() {
                sum += u64::from(u16::from_ne_bytes(*two));
                rest = behind;
            }
            if let [last] = *rest {
                sum += u64::from(u16::from_ne_bytes([last, 0]));
            }
            sum = (sum >> 32) + (sum & 0xffff_ffff);
        }
        Sum(sum)
    }

    /// Adds a number of 16 bits, as it is in a header.
    #[must_use]
    pub fn word(self, word: u16) -> Sum {
        self.bytes(&word.to_be_bytes())
    }

    /// The pseudo header of IPv4.
    #[must_use]
    pub fn pseudo4(source: Ipv4Addr, destination: Ipv4Addr, protocol: u8, length: u16) -> Sum {
        Sum::default().bytes(&source.octets()).bytes(&destination.octets()).word(protocol.into()).word(length)
    }

    /// The pseudo header of IPv6.
    #[must_use]
    pub fn pseudo6(source: Ipv6Addr, destination: Ipv6Addr, next_header: u8, length: u32) -> Sum {
        Sum::default()
            .bytes(&source.octets())
            .bytes(&destination.octets())
            .bytes(&length.to_be_bytes())
            .word(next_header.into())
    }

    /// The sum itself, folded to 16 bits. Over bytes that include a right checksum it is `0xffff`.
    #[must_use]
    #[inline]
    pub fn value(self) -> u16 {
        let mut sum = self.0;
        while sum >> 16 != 0 {
            sum = (sum >> 16) + (sum & 0xffff);
        }
        u16::from_be(sum as u16)
    }

    /// The checksum: the complement of the sum.
    #[must_use]
    pub fn finish(self) -> u16 {
        !self.value()
    }

    /// Whether the bytes summed, which include their checksum, are as they were sent.
    #[must_use]
    #[inline]
    pub fn holds(self) -> bool {
        self.value() == 0xffff
    }
}

/// `chunks_exact(8)` gives nothing else.
fn eight(bytes: &[u8]) -> [u8; 8] {
    bytes.try_into().unwrap_or_default()
}

/// The checksum of `bytes`.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u16 {
    Sum::default().bytes(bytes).finish()
}

/// The checksum after one 16-bit word of what it covers changed (RFC 1624, equation 3).
#[must_use]
pub fn update(checksum: u16, old: u16, new: u16) -> u16 {
    let mut sum = u32::from(!checksum) + u32::from(!old) + u32::from(new);
    sum = (sum >> 16) + (sum & 0xffff);
    sum = (sum >> 16) + (sum & 0xffff);
    !(sum as u16)
}

/// The checksum after bytes at an even offset were replaced by as many others: an address, say.
#[must_use]
pub fn update_bytes(checksum: u16, old: &[u8], new: &[u8]) -> u16 {
    let removed = !Sum::default().bytes(old).value();
    let mut sum = u32::from(!checksum) + u32::from(removed) + u32::from(Sum::default().bytes(new).value());
    sum = (sum >> 16) + (sum & 0xffff);
    sum = (sum >> 16) + (sum & 0xffff);
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_rfc_1071() {
        let sum = Sum::default().bytes(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]);
        assert_eq!(sum.value(), 0xddf2);
        assert_eq!(sum.finish(), 0x220d);
    }

    #[test]
    fn the_example_of_rfc_1624() {
        // Section 4: the header checksum DD2F, a field changes from 5555 to 3285; the result is 0000.
        assert_eq!(update(0xdd2f, 0x5555, 0x3285), 0x0000);
    }

    #[test]
    fn nothing_and_odd_lengths() {
        assert_eq!(checksum(&[]), 0xffff);
        assert_eq!(checksum(&[0xab]), !0xab00);
        assert_eq!(checksum(&[0xff; 3]), !0xff00);
    }

    #[test]
    fn long_input_does_not_overflow() {
        let bytes = vec![0xff; 1 << 22];
        assert_eq!(Sum::default().bytes(&bytes).value(), 0xffff);
    }
}
