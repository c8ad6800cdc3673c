//! A slot for one next hop (a seqlock): one thread writes it, others read it without a lock. By a
//! sequence number, a reader detects words that are not from one write. Two tables have such
//! slots: [`NextHops`](super::NextHops), which processes share, and the one that the lanes of a
//! process share.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicU64, Ordering, fence};

use manylane_sys::atomics;

/// A local address, which may be unspecified, and a peer, as four words. An IPv4 address is stored
/// as an IPv4-mapped IPv6 address (`::ffff:1.2.3.4`), so both spellings are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RouteKey(pub [u64; 4]);

impl RouteKey {
    /// The key of two addresses; none if they are of different families.
    #[must_use]
    #[inline]
    pub fn new(local: IpAddr, peer: IpAddr) -> Option<Self> {
        let (local, peer) = (addr_bits(local), addr_bits(peer));
        let ([local_high, local_low], [peer_high, peer_low]) = (halves(local), halves(peer));
        let key = Self([local_high, local_low, peer_high, peer_low]);
        (is_v4(local) == is_v4(peer)).then_some(key)
    }

    /// The local address.
    #[must_use]
    pub fn local(&self) -> IpAddr {
        words_to_addr(self.0[0], self.0[1])
    }

    /// The peer.
    #[must_use]
    pub fn peer(&self) -> IpAddr {
        words_to_addr(self.0[2], self.0[3])
    }

    /// A hash that peers cannot aim at an entry, although they choose their addresses: the seeds
    /// are secret.
    #[must_use]
    #[inline]
    pub fn seeded_hash(&self, seeds: [u64; 2]) -> u64 {
        // An odd constant, so that a local address and a peer do not cancel each other out.
        const HASH_MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c55;
        let [local_high, local_low, peer_high, peer_low] = self.0;
        let high = local_high.wrapping_mul(HASH_MULTIPLIER) ^ peer_high ^ seeds[0];
        let low = local_low.wrapping_mul(HASH_MULTIPLIER) ^ peer_low ^ seeds[1];
        // One round is not enough: with some seeds, consecutive peers would map to few sets only.
        folded_multiply(folded_multiply(high, low) ^ seeds[0], HASH_MULTIPLIER)
    }
}

/// The bits of an IPv6 address; an IPv4 address as an IPv4-mapped one.
#[must_use]
#[inline]
pub fn addr_bits(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(ip) => 0xffff_0000_0000 | u128::from(u32::from(ip)),
        IpAddr::V6(ip) => ip.into(),
    }
}

#[inline]
fn is_v4(bits: u128) -> bool {
    bits >> 32 == 0xffff
}

pub(super) fn words_to_addr(high: u64, low: u64) -> IpAddr {
    let bits = u128::from(high) << 64 | u128::from(low);
    if is_v4(bits) { Ipv4Addr::from((low & 0xffff_ffff) as u32).into() } else { Ipv6Addr::from(bits).into() }
}

/// The upper and the lower half.
#[inline]
pub(super) fn halves(bits: u128) -> [u64; 2] {
    [(bits >> 64) as u64, (bits & 0xffff_ffff_ffff_ffff) as u64]
}

/// Combines both halves of a product; each depends on every bit of the factors.
#[inline]
fn folded_multiply(a: u64, b: u64) -> u64 {
    let [high, low] = halves(u128::from(a) * u128::from(b));
    high ^ low
}

/// Next hop of frames to a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NextHop {
    /// The outgoing device; 0 only in an empty slot.
    pub ifindex: u32,
    /// MAC of that device.
    pub source_mac: [u8; 6],
    /// MAC of the peer, or of the gateway to it.
    pub mac: [u8; 6],
    /// Size of the largest IP packet on the path, in bytes, as far as the kernel knows.
    pub mtu: u32,
}

// Indices of the words of a slot.

/// The sequence number: odd during a write, and even after it.
const SEQ: usize = 0;
const KEY: usize = 1;
/// Device in the upper half, MTU in the lower; 0 if the slot is empty.
const DEVICE: usize = 5;
/// The MACs, each with a mark of the caller in its upper 16 bits.
const MAC: usize = 6;
const SOURCE_MAC: usize = 7;

atomics! {
    /// A cache line with a key, its next hop, and two marks of the caller.
    #[derive(Debug, Default)]
    #[repr(align(64))]
    pub struct Slot {
        words: [AtomicU64; 8],
    }
}

impl Slot {
    #[inline]
    fn load(&self, word: usize) -> u64 {
        self.words[word].load(Ordering::Relaxed)
    }

    /// True if the slot has no next hop. For the writer.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.load(DEVICE) == 0
    }

    /// The key of the last write, which an empty slot keeps. For the writer.
    #[must_use]
    pub fn key(&self) -> RouteKey {
        RouteKey(std::array::from_fn(|word| self.load(KEY + word)))
    }

    /// The next hop of `key`, its two marks, and the result of `more`, which reads other words of
    /// the same write. None if the slot has another key, or was being written during the read. An
    /// empty slot may keep the key: its next hop then has the device 0.
    #[inline]
    pub fn read<T>(&self, key: &RouteKey, more: impl FnOnce() -> T) -> Option<(NextHop, [u16; 2], T)> {
        // Acquire: if this is the number of a completed write, its words are visible below.
        let before = self.words[SEQ].load(Ordering::Acquire);
        let other = (self.load(KEY) ^ key.0[0])
            | (self.load(KEY + 1) ^ key.0[1])
            | (self.load(KEY + 2) ^ key.0[2])
            | (self.load(KEY + 3) ^ key.0[3]);
        if before & 1 == 1 || other != 0 {
            return None;
        }
        let (device, mac, source_mac) = (self.load(DEVICE), self.load(MAC), self.load(SOURCE_MAC));
        let more = more();
        // If one of these words is from a later write, then the fence after its odd number (in
        // `write`) pairs with this one, and the load below sees that number or a later one: the
        // comparison fails.
        fence(Ordering::Acquire);
        if self.load(SEQ) != before {
            return None;
        }
        let next = NextHop {
            ifindex: (device >> 32) as u32,
            source_mac: word_to_mac(source_mac),
            mac: word_to_mac(mac),
            mtu: (device & 0xffff_ffff) as u32,
        };
        Some((next, [(mac >> 48) as u16, (source_mac >> 48) as u16], more))
    }

    /// Writes a key, its next hop and two marks; `more` writes other words that belong to them. The
    /// default next hop empties the slot. Only one thread, the writer, calls this, so the sequence
    /// number cannot change meanwhile.
    pub fn write(&self, key: &RouteKey, next: &NextHop, marks: [u16; 2], more: impl FnOnce()) {
        let odd = self.load(SEQ).wrapping_add(1) | 1;
        self.words[SEQ].store(odd, Ordering::Relaxed);
        // A reader that sees one of the words below also sees the odd number.
        fence(Ordering::Release);
        let device = u64::from(next.ifindex) << 32 | u64::from(next.mtu);
        let [mac, source_mac] = [(next.mac, marks[0]), (next.source_mac, marks[1])].map(mac_to_word);
        let words = key.0.into_iter().chain([device, mac, source_mac]);
        for (to, word) in self.words[KEY..].iter().zip(words) {
            to.store(word, Ordering::Relaxed);
        }
        more();
        // Release: a reader that sees this number sees the words.
        self.words[SEQ].store(odd.wrapping_add(1), Ordering::Release);
    }
}

#[inline]
fn word_to_mac(word: u64) -> [u8; 6] {
    let [a, b, c, d, e, f, _, _] = word.to_le_bytes();
    [a, b, c, d, e, f]
}

fn mac_to_word(([a, b, c, d, e, f], mark): ([u8; 6], u16)) -> u64 {
    u64::from_le_bytes([a, b, c, d, e, f, 0, 0]) | u64::from(mark) << 48
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests")]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_of_one_family() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert_eq!(RouteKey::new(ip("10.0.0.1"), ip("fd00::1")), None);
        assert_eq!(RouteKey::new(ip("0.0.0.0"), ip("::")), None);
        let four = RouteKey::new(ip("10.0.0.1"), ip("10.0.0.2")).unwrap();
        assert_eq!(Some(four), RouteKey::new(ip("::ffff:10.0.0.1"), ip("10.0.0.2")));
        for (local, peer) in [
            ("10.0.0.1", "255.255.255.255"),
            ("0.0.0.0", "192.0.2.7"),
            ("fd00::1", "::"),
            ("::", "2001:db8::9"),
            ("fe80::1", "::1"),
        ] {
            let key = RouteKey::new(ip(local), ip(peer)).unwrap();
            assert_eq!((key.local(), key.peer()), (ip(local), ip(peer)));
        }
    }

    #[test]
    fn entries_are_read_whole_and_only_by_their_key() {
        let slot = Slot::default();
        let (key, other) = (RouteKey([1, 2, 3, 4]), RouteKey([1, 2, 3, 5]));
        assert!(slot.is_empty());
        let next = NextHop { ifindex: u32::MAX, source_mac: [0xff; 6], mac: [0xfe; 6], mtu: 65_575 };
        for marks in [[0, 0], [1, u16::MAX], [u16::MAX, 1]] {
            slot.write(&key, &next, marks, || ());
            assert_eq!(slot.read(&key, || 7), Some((next, marks, 7)));
            assert_eq!(slot.read(&other, || ()), None);
            assert_eq!((slot.key(), slot.is_empty()), (key, false));
        }
        // Neither from within a write, nor over one.
        slot.write(&key, &next, [0, 0], || assert_eq!(slot.read(&key, || ()), None));
        assert_eq!(slot.read(&key, || slot.write(&key, &next, [0, 0], || ())), None);
        slot.write(&key, &NextHop::default(), [0, 0], || ());
        assert!(slot.is_empty());
    }
}
