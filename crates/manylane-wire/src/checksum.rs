//! The Internet checksum (RFC 1071) and pseudo headers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::error::{Error, Result};

/// A ones' complement sum that can be continued. It is kept in the byte order of the machine,
/// which the arithmetic allows (RFC 1071, 2.B). It has 64 bits: a multiple of 16, so a carry out
/// of the top can be added at the bottom (2.C).
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum(u64);

/// Length from which words are summed by halves, several at a time.
const WIDE_SUM_BYTES_MIN: usize = 128;

impl Sum {
    /// Adds `bytes`. Only the last slice of a sum may have an odd length: it is padded with a
    /// zero.
    #[must_use]
    #[inline]
    pub fn add_bytes(self, bytes: &[u8]) -> Sum {
        let Some(last) = bytes.last_chunk::<8>() else { return self.add_short(bytes) };
        let (mut sum, mut words) = (self, bytes);
        if bytes.len() >= WIDE_SUM_BYTES_MIN {
            let (long, behind) = bytes.split_at(bytes.len() & !7);
            (sum, words) = (sum.add_u64(sum_halves(long)), behind);
        }
        let blocks = words.chunks_exact(32);
        let rest = blocks.remainder();
        for block in blocks {
            for word in block.chunks_exact(8) {
                sum = sum.add_u64(u64::from_ne_bytes(word_bytes(word)));
            }
        }
        // At most three more words, each behind a comparison. Most datagrams are short, and the
        // code that a compiler generates for a possibly long loop would cost them more than their
        // sum.
        for at in [0, 8, 16] {
            if let Some(word) = rest.get(at..at + 8) {
                sum = sum.add_u64(u64::from_ne_bytes(word_bytes(word)));
            }
        }
        // The bytes behind the last whole word are the end of the last eight bytes; shift out
        // those that were added already. (In two steps, because it may be all 64 bits.)
        let end = (u64::from_le_bytes(*last) >> 1) >> (63 - bytes.len() % 8 * 8);
        sum.add_u64(u64::from_ne_bytes(end.to_le_bytes()))
    }

    /// Adds fewer than eight bytes.
    #[inline]
    fn add_short(self, bytes: &[u8]) -> Sum {
        let mut word = [0; 8];
        for (to, from) in word.iter_mut().zip(bytes) {
            *to = *from;
        }
        self.add_u64(u64::from_ne_bytes(word))
    }

    /// Adds four 16-bit words, in the byte order of the machine.
    #[inline]
    pub(crate) fn add_u64(self, words: u64) -> Sum {
        let (sum, carry) = self.0.overflowing_add(words);
        // Cannot overflow: with a carry the sum is below the maximum.
        Sum(sum + u64::from(carry))
    }

    /// Adds a 16-bit header field.
    #[must_use]
    pub fn add_u16(self, word: u16) -> Sum {
        self.add_bytes(&word.to_be_bytes())
    }

    /// The pseudo header of IPv4.
    #[must_use]
    pub fn pseudo_v4(source: Ipv4Addr, destination: Ipv4Addr, protocol: u8, length: u16) -> Sum {
        Sum::default()
            .add_bytes(&source.octets())
            .add_bytes(&destination.octets())
            .add_u16(protocol.into())
            .add_u16(length)
    }

    /// The pseudo header of IPv6.
    #[must_use]
    pub fn pseudo_v6(source: Ipv6Addr, destination: Ipv6Addr, next_header: u8, length: u32) -> Sum {
        Sum::default()
            .add_bytes(&source.octets())
            .add_bytes(&destination.octets())
            .add_bytes(&length.to_be_bytes())
            .add_u16(next_header.into())
    }

    /// The pseudo header of the family of both addresses.
    ///
    /// # Errors
    /// If they are of different families.
    pub(crate) fn pseudo(source: IpAddr, destination: IpAddr, protocol: u8, length: u16) -> Result<Sum> {
        match (source, destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                Ok(Self::pseudo_v4(source, destination, protocol, length))
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                Ok(Self::pseudo_v6(source, destination, protocol, length.into()))
            }
            _ => Err(Error::MixedFamilies),
        }
    }

    /// The sum, folded to 16 bits. Over bytes that include a valid checksum it is `0xffff`.
    #[must_use]
    #[inline]
    pub fn value(self) -> u16 {
        // Always folds as often as may ever be needed: how often depends on the bytes, and an
        // unpredictable branch costs more.
        let sum = (self.0 >> 32) + (self.0 & 0xffff_ffff);
        let sum = (sum >> 16) + (sum & 0xffff);
        let sum = (sum >> 16) + (sum & 0xffff);
        let sum = (sum >> 16) + (sum & 0xffff);
        u16::from_be((sum & 0xffff) as u16)
    }

    /// The checksum: the complement of the sum.
    #[must_use]
    #[inline]
    pub fn finish(self) -> u16 {
        !self.value()
    }

    /// True if the summed bytes, which include their checksum, are valid.
    #[must_use]
    #[inline]
    pub fn is_valid(self) -> bool {
        // Folding is the remainder by 0xffff, except for zero, which only zeros sum to. A number
        // is a multiple if its product with the inverse is the quotient, and so no higher than a
        // quotient can be.
        const INVERSE: u64 = 0xfffe_fffe_fffe_ffff;
        const { assert!(INVERSE.wrapping_mul(0xffff) == 1) };
        self.0.wrapping_mul(INVERSE).wrapping_sub(1) < u64::MAX / 0xffff
    }
}

/// The sum of the 32-bit words in whole 64-bit words. It would overflow only after many gigabytes.
fn sum_halves(bytes: &[u8]) -> u64 {
    bytes.chunks_exact(8).fold(0, |sum, word| {
        let word = u64::from_ne_bytes(word_bytes(word));
        sum + (word >> 32) + (word & 0xffff_ffff)
    })
}

/// Cannot fail: `chunks_exact(8)` returns no other length.
#[inline]
fn word_bytes(bytes: &[u8]) -> [u8; 8] {
    bytes.try_into().unwrap_or_default()
}

/// The checksum of `bytes`.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u16 {
    Sum::default().add_bytes(bytes).finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_rfc_1071() {
        let sum = Sum::default().add_bytes(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]);
        assert_eq!(sum.value(), 0xddf2);
        assert_eq!(sum.finish(), 0x220d);
    }

    #[test]
    fn empty_and_odd_lengths_are_summed() {
        assert_eq!(checksum(&[]), 0xffff);
        assert_eq!(checksum(&[0xab]), !0xab00);
        assert_eq!(checksum(&[0xff; 3]), !0xff00);
    }

    /// The sum as RFC 1071 defines it: word by word.
    fn reference_sum(bytes: &[u8]) -> u16 {
        let mut sum = 0_u32;
        for word in bytes.chunks(2) {
            sum += u32::from(u16::from_be_bytes([word[0], word.get(1).copied().unwrap_or(0)]));
            sum = (sum >> 16) + (sum & 0xffff);
        }
        sum as u16
    }

    #[test]
    fn every_length_is_summed_as_defined_in_one_piece_or_two() {
        let bytes: Vec<u8> = (0..700_u32).map(|at| (at * at % 253) as u8 ^ u8::from(at % 5 == 0)).collect();
        for length in 0..bytes.len() {
            let bytes = &bytes[..length];
            let expected = reference_sum(bytes);
            let sum = Sum::default().add_bytes(bytes);
            assert_eq!((sum.value(), sum.is_valid()), (expected, expected == 0xffff), "{length}");
            for cut in [0, 2, 8, 18, 64, 134].into_iter().filter(|&cut| cut <= length) {
                let pieces = Sum::default().add_bytes(&bytes[..cut]).add_bytes(&bytes[cut..]);
                assert_eq!(pieces.value(), expected, "{length}, cut at {cut}");
            }
            // With its checksum appended, and zero padding if the length is odd.
            let mut whole = bytes.to_vec();
            whole.resize(length.next_multiple_of(2), 0);
            whole.extend((!expected).to_be_bytes());
            assert!(
                Sum::default().add_bytes(&whole).is_valid() || whole.iter().all(|&byte| byte == 0),
                "{length}"
            );
        }
    }

    #[test]
    fn zeroes_are_invalid_and_all_ones_valid() {
        for length in [0, 2, 8, 20, 200] {
            assert!(!Sum::default().add_bytes(&vec![0; length]).is_valid());
            assert_eq!(Sum::default().add_bytes(&vec![0xff; length]).is_valid(), length > 0);
        }
    }

    #[test]
    fn long_input_does_not_overflow() {
        let bytes = vec![0xff; 1 << 22];
        assert_eq!(Sum::default().add_bytes(&bytes).value(), 0xffff);
    }
}
