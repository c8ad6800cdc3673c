//! The table of next hops: written by one thread, read by every lane without a lock.
//!
//! Its size is fixed: [`SETS`] sets of [`WAYS`] slots. What comes when a set is full takes the place of the slot
//! that was asked for longest ago. A slot is one cache line, and a set has one byte per slot, a tag, that says
//! whether it is worth looking at. Readers see a change as soon as it is made; there is nothing to publish, and
//! however many peers come and go, nothing is allocated.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::NextHop;

const WAYS: usize = 16;
const SETS: usize = 1024;
/// Peers that the table knows at most.
pub(super) const PEERS: usize = WAYS * SETS;

/// How many turns of the clock an answer is kept that no lane asks for again.
const KEPT: u16 = 4;

/// A local address and the peer it talks to, as four words. IPv4 is written as IPv6 does it (`::ffff:1.2.3.4`),
/// so that both spellings of an IPv4 address are one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pair(pub(super) [u64; 4]);

impl Pair {
    /// None when the two are of different families: nothing can go from one to the other.
    #[inline]
    pub(super) fn new(local: IpAddr, peer: IpAddr) -> Option<Self> {
        let (local, peer) = (bits(local), bits(peer));
        let pair = Self([(local >> 64) as u64, local as u64, (peer >> 64) as u64, peer as u64]);
        (is_v4(local) == is_v4(peer)).then_some(pair)
    }

    pub(super) fn local(&self) -> IpAddr {
        address(self.0[0], self.0[1])
    }

    pub(super) fn peer(&self) -> IpAddr {
        address(self.0[2], self.0[3])
    }
}

#[inline]
fn bits(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(ip) => 0xffff_0000_0000 | u128::from(u32::from(ip)),
        IpAddr::V6(ip) => ip.into(),
    }
}

#[inline]
fn is_v4(bits: u128) -> bool {
    bits >> 32 == 0xffff
}

fn address(high: u64, low: u64) -> IpAddr {
    let bits = u128::from(high) << 64 | u128::from(low);
    if is_v4(bits) { Ipv4Addr::from(bits as u32).into() } else { Ipv6Addr::from(bits).into() }
}

/// Addresses with a common beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Prefix {
    bits: u128,
    length: u32,
}

impl Prefix {
    pub(super) fn new(ip: IpAddr, length: u8) -> Self {
        let (most, before) = if ip.is_ipv4() { (32, 96) } else { (128, 0) };
        Self { bits: bits(ip), length: before + u32::from(length).min(most) }
    }

    fn contains(&self, ip: u128) -> bool {
        (self.bits ^ ip).checked_shr(128 - self.length).unwrap_or(0) == 0
    }
}

/// Whom a frame is handed to on a device: the peer itself, or a gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Hop {
    pub(super) ifindex: u32,
    pub(super) address: IpAddr,
}

/// What a lane finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) next: NextHop,
    /// When it was asked for.
    pub(super) epoch: u16,
    /// The kernel has not heard of the neighbour for a while.
    pub(super) stale: bool,
}

/// One entry: words that a reader can tell to be of one piece.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Slot([AtomicU64; 8]);

/// Odd while the slot is written, another even number after it.
const SEQUENCE: usize = 0;
const PAIR: usize = 1;
/// Device above, MTU below.
const DEVICE: usize = 5;
/// The neighbour's MAC; above it, whether it is stale.
const MAC: usize = 6;
/// The device's MAC; above it, the epoch.
const SOURCE: usize = 7;
const STALE: u64 = 1 << 63;

impl Slot {
    fn load(&self, word: usize) -> u64 {
        self.0[word].load(Ordering::Relaxed)
    }

    /// What the slot says about `pair`, unless it is about another or is being written just now.
    #[inline]
    fn read(&self, pair: &Pair) -> Option<Found> {
        // Acquire: if this is the number of a finished write, its words are seen below.
        let before = self.0[SEQUENCE].load(Ordering::Acquire);
        let other = (self.load(PAIR) ^ pair.0[0])
            | (self.load(PAIR + 1) ^ pair.0[1])
            | (self.load(PAIR + 2) ^ pair.0[2])
            | (self.load(PAIR + 3) ^ pair.0[3]);
        if before & 1 == 1 || other != 0 {
            return None;
        }
        let (device, mac, source) = (self.load(DEVICE), self.load(MAC), self.load(SOURCE));
        // If one of these words is of a later write, then the fence after its odd number (in `write`) pairs with
        // this one, and the load below sees that number or a later one: the comparison fails.
        fence(Ordering::Acquire);
        if self.load(SEQUENCE) != before {
            return None;
        }
        let next = NextHop {
            ifindex: (device >> 32) as u32,
            source_mac: mac_of(source),
            mac: mac_of(mac),
            mtu: device as u32,
        };
        Some(Found { next, epoch: (source >> 48) as u16, stale: mac & STALE != 0 })
    }

    /// Only the writer calls this, so that the sequence cannot move under it.
    fn write(&self, pair: &Pair, found: &Found) {
        let next = &found.next;
        let sequence = self.load(SEQUENCE);
        self.0[SEQUENCE].store(sequence.wrapping_add(1), Ordering::Relaxed);
        // The odd number is seen by whoever sees one of the words below.
        fence(Ordering::Release);
        for (word, value) in pair.0.iter().enumerate() {
            self.0[PAIR + word].store(*value, Ordering::Relaxed);
        }
        let device = u64::from(next.ifindex) << 32 | u64::from(next.mtu);
        self.0[DEVICE].store(device, Ordering::Relaxed);
        self.0[MAC].store(mac_word(next.mac) | if found.stale { STALE } else { 0 }, Ordering::Relaxed);
        let source = mac_word(next.source_mac) | u64::from(found.epoch) << 48;
        self.0[SOURCE].store(source, Ordering::Relaxed);
        // Release: the words are seen by whoever sees this number.
        self.0[SEQUENCE].store(sequence.wrapping_add(2), Ordering::Release);
    }

    fn pair(&self) -> Pair {
        Pair(std::array::from_fn(|word| self.load(PAIR + word)))
    }
}

fn mac_of(word: u64) -> [u8; 6] {
    let [a, b, c, d, e, f, _, _] = word.to_le_bytes();
    [a, b, c, d, e, f]
}

fn mac_word([a, b, c, d, e, f]: [u8; 6]) -> u64 {
    u64::from_le_bytes([a, b, c, d, e, f, 0, 0])
}

/// What the lanes see of the table.
#[derive(Debug)]
pub(super) struct Table {
    /// Peers choose their addresses: without these numbers they cannot choose the set as well.
    seeds: [u64; 2],
    /// One byte per slot of a set; 0 is an empty slot.
    tags: Box<[[AtomicU64; WAYS / 8]]>,
    slots: Box<[Slot]>,
}

impl Table {
    fn new() -> Self {
        Self {
            seeds: std::array::from_fn(|_| RandomState::new().build_hasher().finish()),
            tags: (0..SETS).map(|_| Default::default()).collect(),
            slots: (0..PEERS).map(|_| Slot::default()).collect(),
        }
    }

    #[inline]
    pub(super) fn hash(&self, pair: &Pair) -> u64 {
        // A prime, so that a local address and a peer do not cancel each other out.
        const SPREAD: u64 = 0x9e37_79b9_7f4a_7c55;
        let [local_high, local_low, peer_high, peer_low] = pair.0;
        let high = local_high.wrapping_mul(SPREAD) ^ peer_high ^ self.seeds[0];
        let low = local_low.wrapping_mul(SPREAD) ^ peer_low ^ self.seeds[1];
        // One round is not enough: with some seeds, peers in a row would come to few sets only.
        fold(fold(high, low) ^ self.seeds[0], SPREAD)
    }

    /// The entry of a pair.
    #[inline]
    pub(super) fn find(&self, pair: &Pair, hash: u64) -> Option<Found> {
        let set = set_of(hash);
        for (eight, tags) in self.tags[set].iter().enumerate() {
            let mut same = equal_bytes(tags.load(Ordering::Acquire), tag_of(hash));
            while same != 0 {
                let way = eight * 8 + same.trailing_zeros() as usize / 8;
                if let Some(found) = self.slots[set * WAYS + way].read(pair) {
                    return Some(found);
                }
                same &= same - 1;
            }
        }
        None
    }

    fn tag(&self, slot: usize) -> u8 {
        let way = slot % WAYS;
        (self.tags[slot / WAYS][way / 8].load(Ordering::Relaxed) >> (way % 8 * 8)) as u8
    }

    /// Only the writer calls this.
    fn set_tag(&self, slot: usize, tag: u8) {
        let way = slot % WAYS;
        let (word, shift) = (&self.tags[slot / WAYS][way / 8], way % 8 * 8);
        let others = word.load(Ordering::Relaxed) & !(0xff << shift);
        // Release: who sees the tag sees the slot that was written before it.
        word.store(others | u64::from(tag) << shift, Ordering::Release);
    }
}

/// Both halves of a product, of which each depends on every bit of the factors.
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product >> 64) as u64 ^ product as u64
}

fn set_of(hash: u64) -> usize {
    hash as usize % SETS
}

fn tag_of(hash: u64) -> u8 {
    ((hash >> 56) as u8).max(1)
}

/// The top bit of each byte of `word` that is `byte`; now and then also of one above such a byte.
fn equal_bytes(word: u64, byte: u8) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    let zero_if_equal = word ^ (ONES * u64::from(byte));
    zero_if_equal.wrapping_sub(ONES) & !zero_if_equal & (ONES << 7)
}

/// What only the writer knows of a slot.
#[derive(Clone, Copy, Debug)]
struct Note {
    hop: Hop,
    epoch: u16,
    /// Counts up with every answer: the smallest is the oldest.
    order: u64,
}

/// The one that writes. What it wrote goes when it goes: lanes then find nothing and use ordinary sockets.
#[derive(Debug)]
pub(super) struct Writer {
    table: Arc<Table>,
    notes: Box<[Option<Note>]>,
    used: usize,
    order: u64,
}

impl Writer {
    pub(super) fn new() -> Self {
        Self { table: Arc::new(Table::new()), notes: vec![None; PEERS].into(), used: 0, order: 0 }
    }

    pub(super) fn table(&self) -> &Arc<Table> {
        &self.table
    }

    /// Number of entries.
    pub(super) fn len(&self) -> usize {
        self.used
    }

    /// Enters what was found out about a pair, in place of what was known.
    pub(super) fn put(&mut self, pair: &Pair, hop: Hop, found: &Found) {
        let hash = self.table.hash(pair);
        let set = set_of(hash) * WAYS..(set_of(hash) + 1) * WAYS;
        let same = |slot: &usize| self.notes[*slot].is_some() && self.table.slots[*slot].pair() == *pair;
        // An empty slot sorts before all others.
        let oldest = |slot: &usize| self.notes[*slot].map(|note| note.order);
        let Some(slot) = set.clone().find(same).or_else(|| set.min_by_key(oldest)) else { return };
        self.order += 1;
        let note = Note { hop, epoch: found.epoch, order: self.order };
        if self.notes[slot].replace(note).is_none() {
            self.used += 1;
        }
        self.table.slots[slot].write(pair, found);
        self.table.set_tag(slot, tag_of(hash));
    }

    /// Forgets a pair.
    pub(super) fn forget(&mut self, pair: &Pair) {
        let set = set_of(self.table.hash(pair)) * WAYS;
        let same = |slot: &usize| self.notes[*slot].is_some() && self.table.slots[*slot].pair() == *pair;
        if let Some(slot) = (set..set + WAYS).find(same) {
            self.remove(slot);
        }
    }

    /// The neighbour has another MAC now, or none: so have all entries that go through it.
    pub(super) fn set_mac(&mut self, hop: &Hop, mac: Option<[u8; 6]>) {
        for slot in 0..PEERS {
            if self.notes[slot].is_none_or(|note| note.hop != *hop) {
                continue;
            }
            let entry = &self.table.slots[slot];
            let pair = entry.pair();
            match (mac, entry.read(&pair)) {
                (Some(mac), Some(found)) => {
                    entry.write(&pair, &Found { next: NextHop { mac, ..found.next }, ..found });
                }
                _ => self.remove(slot),
            }
        }
    }

    /// Forgets the peers within a prefix.
    pub(super) fn remove_within(&mut self, prefix: &Prefix) {
        if self.used == 0 {
            return;
        }
        for slot in 0..PEERS {
            if self.notes[slot].is_some() {
                let [.., high, low] = self.table.slots[slot].pair().0;
                if prefix.contains(u128::from(high) << 64 | u128::from(low)) {
                    self.remove(slot);
                }
            }
        }
    }

    /// Forgets what no lane has asked for since some turns of the clock.
    pub(super) fn expire(&mut self, epoch: u16) {
        for slot in 0..PEERS {
            if self.notes[slot].is_some_and(|note| epoch.wrapping_sub(note.epoch) > KEPT) {
                self.remove(slot);
            }
        }
    }

    /// Forgets all.
    pub(super) fn clear(&mut self) {
        if self.used == 0 {
            return;
        }
        self.notes.fill(None);
        self.used = 0;
        for tags in self.table.tags.iter().flatten() {
            tags.store(0, Ordering::Release);
        }
    }

    fn remove(&mut self, slot: usize) {
        if self.table.tag(slot) != 0 {
            self.table.set_tag(slot, 0);
        }
        if self.notes[slot].take().is_some() {
            self.used -= 1;
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pair(local: &str, peer: &str) -> Pair {
        Pair::new(local.parse().unwrap(), peer.parse().unwrap()).unwrap()
    }

    fn nth(n: u32) -> Pair {
        Pair::new(Ipv4Addr::new(10, 0, 0, 1).into(), Ipv4Addr::from(0x0b00_0000 + n).into()).unwrap()
    }

    fn via(gateway: &str) -> Hop {
        Hop { ifindex: 3, address: gateway.parse().unwrap() }
    }

    fn found(last: u8, epoch: u16) -> Found {
        let next = NextHop { ifindex: 3, source_mac: [1; 6], mac: [2, 0, 0, 0, 0, last], mtu: 1500 };
        Found { next, epoch, stale: false }
    }

    fn find(writer: &Writer, pair: &Pair) -> Option<Found> {
        writer.table.find(pair, writer.table.hash(pair))
    }

    #[test]
    fn pairs_are_of_one_family() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert_eq!(Pair::new(ip("10.0.0.1"), ip("fd00::1")), None);
        assert_eq!(pair("10.0.0.1", "10.0.0.2"), pair("::ffff:10.0.0.1", "10.0.0.2"));
        for (local, peer) in [("10.0.0.1", "255.255.255.255"), ("fd00::1", "::"), ("fe80::1", "::1")] {
            let pair = pair(local, peer);
            assert_eq!((pair.local(), pair.peer()), (ip(local), ip(peer)));
        }
    }

    #[test]
    fn what_was_put_is_found_whole() {
        let mut writer = Writer::new();
        let (a, b) = (pair("10.0.0.1", "192.0.2.9"), pair("fd00::1", "2001:db8::9"));
        let next = NextHop { ifindex: u32::MAX, source_mac: [0xff; 6], mac: [0xfe; 6], mtu: 65_575 };
        let entry = Found { next, epoch: u16::MAX, stale: true };
        writer.put(&a, via("10.0.0.254"), &entry);
        assert_eq!(find(&writer, &a), Some(entry));
        assert_eq!(find(&writer, &b), None);
        writer.put(&b, via("fe80::1"), &found(7, 0));
        writer.put(&a, via("10.0.0.254"), &found(8, 1));
        assert_eq!((find(&writer, &a), find(&writer, &b)), (Some(found(8, 1)), Some(found(7, 0))));
        assert_eq!(writer.len(), 2);
        writer.clear();
        assert_eq!((find(&writer, &a), find(&writer, &b), writer.len()), (None, None, 0));
    }

    #[test]
    fn the_table_is_bounded_and_forgets_the_oldest() {
        let mut writer = Writer::new();
        let peers = 4 * PEERS as u32;
        for n in 0..peers {
            writer.put(&nth(n), via("10.0.0.254"), &found(n as u8, 0));
            assert_eq!(find(&writer, &nth(n)), Some(found(n as u8, 0)));
        }
        assert_eq!(writer.len(), PEERS);
        let known: Vec<u32> = (0..peers).filter(|n| find(&writer, &nth(*n)).is_some()).collect();
        assert_eq!(known.len(), PEERS);
        // Sets fill unevenly; still, what is known is by and large what came last.
        let recent = known.iter().filter(|n| **n >= peers - 2 * PEERS as u32).count();
        assert!(recent * 10 > PEERS * 9, "{recent} of {PEERS}");
    }

    #[test]
    fn peers_in_a_row_come_to_all_sets_alike() {
        let six = |n: u32| Pair([0xfd00 << 48, 1, 0x2001_0db8_0000_0000 + u64::from(n), 1]);
        // Many local addresses, each with the same peers.
        let square = |n: u32| {
            Pair([0, 0xffff_0a00_0000 + u64::from(n % 256), 0, 0xffff_0b00_0000 + u64::from(n / 256)])
        };
        let rows: [&dyn Fn(u32) -> Pair; 4] = [&nth, &|n| nth(n << 8), &six, &square];
        for _ in 0..if cfg!(miri) { 1 } else { 32 } {
            let table = Table::new();
            for (row, pair_of) in rows.iter().enumerate() {
                let mut sets = [0; SETS];
                (0..64 * SETS as u32).for_each(|n| sets[set_of(table.hash(&pair_of(n)))] += 1);
                let (least, most) = (sets.iter().min(), sets.iter().max());
                assert!(least > Some(&16) && most < Some(&128), "row {row}: {least:?} to {most:?}");
            }
        }
    }

    #[test]
    fn an_entry_that_is_renewed_is_not_the_oldest() {
        let mut writer = Writer::new();
        let kept = nth(0);
        for n in 0..2 * PEERS as u32 {
            writer.put(&nth(n), via("10.0.0.254"), &found(0, 0));
            writer.put(&kept, via("10.0.0.254"), &found(1, 0));
        }
        assert_eq!(find(&writer, &kept), Some(found(1, 0)));
    }

    #[test]
    fn a_neighbour_changes_under_its_entries() {
        let mut writer = Writer::new();
        let (near, far, other) = (nth(1), nth(2), nth(3));
        writer.put(&near, via("10.0.0.254"), &found(1, 5));
        writer.put(&far, via("10.0.0.254"), &found(1, 6));
        writer.put(&other, via("10.0.0.253"), &found(9, 5));
        writer.set_mac(&via("10.0.0.254"), Some([2, 0, 0, 0, 0, 4]));
        assert_eq!(find(&writer, &near), Some(found(4, 5)));
        assert_eq!(find(&writer, &far), Some(found(4, 6)));
        assert_eq!(find(&writer, &other), Some(found(9, 5)));
        writer.set_mac(&via("10.0.0.254"), None);
        assert_eq!((find(&writer, &near), find(&writer, &far)), (None, None));
        assert_eq!((find(&writer, &other), writer.len()), (Some(found(9, 5)), 1));
    }

    #[test]
    fn prefixes_and_time_remove_what_they_cover() {
        let mut writer = Writer::new();
        let inside = pair("10.0.0.1", "192.0.2.200");
        let outside = pair("10.0.0.1", "192.0.3.1");
        let six = pair("fd00::1", "2001:db8::1");
        let fill = |writer: &mut Writer| {
            for (pair, epoch) in [(&inside, 1), (&outside, 2), (&six, 3)] {
                writer.put(pair, via("10.0.0.254"), &found(0, epoch));
            }
        };
        let state = |writer: &Writer| [&inside, &outside, &six].map(|pair| find(writer, pair).is_some());
        let within = |text: &str, length| Prefix::new(text.parse().unwrap(), length);
        fill(&mut writer);
        writer.remove_within(&within("192.0.2.0", 24));
        assert_eq!(state(&writer), [false, true, true]);
        writer.remove_within(&within("192.0.3.1", 99));
        assert_eq!(state(&writer), [false, false, true]);
        fill(&mut writer);
        writer.remove_within(&within("0.0.0.0", 0));
        assert_eq!(state(&writer), [false, false, true]);
        writer.remove_within(&within("2001:db8::", 32));
        assert_eq!((state(&writer), writer.len()), ([false; 3], 0));
        fill(&mut writer);
        writer.expire(2 + KEPT);
        assert_eq!(state(&writer), [false, true, true]);
        writer.expire(2u16.wrapping_sub(1));
        assert_eq!(state(&writer), [false, false, false]);
    }

    #[test]
    fn nothing_is_left_of_a_writer_that_went() {
        let mut writer = Writer::new();
        let table = Arc::clone(writer.table());
        writer.put(&nth(1), via("10.0.0.254"), &found(1, 0));
        assert!(table.find(&nth(1), table.hash(&nth(1))).is_some());
        drop(writer);
        assert!(table.find(&nth(1), table.hash(&nth(1))).is_none());
    }

    #[test]
    fn readers_never_see_half_an_entry() {
        let mut writer = Writer::new();
        let table = Arc::clone(writer.table());
        let done = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let rounds = if cfg!(miri) { 200 } else { 200_000 };
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        let pair = nth(0);
                        if let Some(found) = table.find(&pair, table.hash(&pair)) {
                            let NextHop { ifindex, source_mac, mac, mtu } = found.next;
                            assert!(mac == [ifindex as u8; 6] && source_mac == mac && mtu == ifindex);
                        }
                    }
                });
            }
            for round in 0..rounds {
                let byte = round as u8;
                let next =
                    NextHop { ifindex: byte.into(), source_mac: [byte; 6], mac: [byte; 6], mtu: byte.into() };
                writer.put(&nth(0), via("10.0.0.254"), &Found { next, epoch: 0, stale: false });
            }
            done.store(true, Ordering::Relaxed);
        });
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_table_agrees_with_a_map(steps in proptest::collection::vec((0u32..64, 0u8..4, any::<u8>()), 0..200)) {
            let mut writer = Writer::new();
            let mut map = std::collections::HashMap::new();
            for (peer, step, value) in steps {
                let gateway = [via("10.0.0.252"), via("10.0.0.253")][usize::from(value % 2)];
                match step {
                    0 | 1 => {
                        writer.put(&nth(peer), gateway, &found(value, 0));
                        map.insert(peer, (gateway, value));
                    }
                    2 => {
                        writer.set_mac(&gateway, Some(found(value, 0).next.mac));
                        map.values_mut().filter(|(hop, _)| *hop == gateway).for_each(|(_, mac)| *mac = value);
                    }
                    _ => {
                        writer.remove_within(&Prefix::new(nth(peer).peer(), 30));
                        map.retain(|other, _| other >> 2 != peer >> 2);
                    }
                }
                for peer in 0..64 {
                    let expected = map.get(&peer).map(|(_, value)| found(*value, 0));
                    prop_assert_eq!(find(&writer, &nth(peer)), expected);
                }
                prop_assert_eq!(writer.len(), map.len());
            }
        }
    }
}
