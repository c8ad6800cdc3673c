//! Next hops in memory shared by processes: one process writes what the kernel told it, and lanes
//! of others read it. This is the Rust side of `abi/manylane_next_hops.h`.
//!
//! | side | does |
//! |---|---|
//! | a lane | looks up the next hop from its address to a peer ([`find`](NextHops::find)); if there is none, it [`request`](NextHops::request)s it, and sends that datagram by its kernel socket |
//! | the writer | takes requests ([`drain_requests`](NextHops::drain_requests)), asks the kernel, [`insert`](NextHops::insert)s and [`remove`](NextHops::remove)s; each [`heartbeat`](NextHops::heartbeat) shows that it is alive |
//!
//! An entry is two cache lines whose consistency a reader can check (a sequence number, odd during
//! a write). A pair has eight adjacent entries; if all are in use, the oldest is replaced. A
//! request has one slot for its pair; if that is in use, the next datagram requests again. Without
//! a writer the heartbeat stops, and all entries become invalid.

use std::mem::{offset_of, size_of};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use manylane_sys::{atomics, tick};

/// Entries of the table, a power of two.
pub const ENTRIES: usize = 8192;
/// Entries that one pair may use.
const WAYS: usize = 8;
/// Request slots.
const REQUESTS: usize = 256;

/// A local address, which may be unspecified, and a peer. IPv4 is stored as an IPv6-mapped
/// address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddrPair([u64; 4]);

impl AddrPair {
    /// None for two families, which cannot reach each other.
    #[must_use]
    #[inline]
    pub fn new(local: IpAddr, peer: IpAddr) -> Option<Self> {
        if local.is_ipv4() != peer.is_ipv4() {
            return None;
        }
        let [(a, b), (c, d)] = [addr_to_words(local), addr_to_words(peer)];
        Some(Self([a, b, c, d]))
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
}

#[inline]
fn addr_to_words(ip: IpAddr) -> (u64, u64) {
    match ip {
        IpAddr::V4(ip) => (0, 0xffff_0000_0000 | u64::from(u32::from(ip))),
        IpAddr::V6(ip) => {
            let bits = u128::from(ip);
            ((bits >> 64) as u64, bits as u64)
        }
    }
}

fn words_to_addr(high: u64, low: u64) -> IpAddr {
    if high == 0 && low >> 32 == 0xffff {
        return Ipv4Addr::from(low as u32).into();
    }
    Ipv6Addr::from(u128::from(high) << 64 | u128::from(low)).into()
}

/// The way of a frame to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextHop {
    /// The source address.
    pub source: IpAddr,
    /// The outgoing device.
    pub ifindex: u32,
    /// Largest IP packet on the path.
    pub mtu: u32,
    /// MAC of the device.
    pub source_mac: [u8; 6],
    /// MAC of the peer, or of the gateway to it.
    pub mac: [u8; 6],
}

/// Words of an entry. This one is odd during a write.
const SEQ: usize = 0;
const PAIR: usize = 1;
const DEVICE: usize = 5;
const MAC: usize = 6;
const SOURCE_MAC: usize = 7;
const SOURCE: usize = 8;
/// 1 if a datagram was sent this way since the writer's last check.
const USED: usize = 10;
const ENTRY_WORDS: usize = 16;

/// States of a request: free, being written by a lane, ready for the writer.
const FREE: u32 = 0;
const CLAIMED: u32 = 1;
const REQUESTED: u32 = 2;

atomics! {
    /// Two cache lines (`struct mln_entry`).
    #[repr(align(128))]
    struct Entry {
        words: [AtomicU64; ENTRY_WORDS],
    }

    /// A request of a lane (`struct mln_request`).
    #[repr(align(64))]
    struct Request {
        state: AtomicU32,
        pair: [AtomicU64; 4],
    }

    /// The table and the requests (`struct mln_next_hops`).
    pub struct NextHops {
        /// Time of the writer's last heartbeat, in milliseconds of a clock common to all
        /// processes; never 0 after the first.
        heartbeat: AtomicU32,
        pad: AtomicU32,
        /// Random seed: peers choose their addresses, but must not be able to choose the entry.
        seed: AtomicU64,
        requests: [Request; REQUESTS],
        entries: [Entry; ENTRIES],
    }
}

const _: () = assert!(size_of::<Request>() == 64);
const _: () = assert!(offset_of!(Request, pair) == 8);
const _: () = assert!(size_of::<Entry>() == 128);
const _: () = assert!(offset_of!(NextHops, seed) == 8);
const _: () = assert!(offset_of!(NextHops, requests) == 64);
const _: () = assert!(offset_of!(NextHops, entries) == 128 + 64 * REQUESTS);
const _: () = assert!(size_of::<NextHops>() == 128 + 64 * REQUESTS + 128 * ENTRIES);

impl Entry {
    fn load(&self, word: usize) -> u64 {
        self.words[word].load(Ordering::Relaxed)
    }

    fn pair(&self) -> AddrPair {
        AddrPair(std::array::from_fn(|word| self.load(PAIR + word)))
    }

    #[inline]
    fn read(&self, pair: &AddrPair) -> Option<NextHop> {
        // Acquire: if this is the number of a completed write, its words are visible below.
        let before = self.words[SEQ].load(Ordering::Acquire);
        if before & 1 == 1 || before == 0 || self.pair() != *pair {
            return None;
        }
        let (device, mac, source_mac) = (self.load(DEVICE), self.load(MAC), self.load(SOURCE_MAC));
        let source = (self.load(SOURCE), self.load(SOURCE + 1));
        // Pairs with the fence after the odd number in `write`: if one of these words is from a
        // later write, the load below sees that number or a later one.
        fence(Ordering::Acquire);
        if self.load(SEQ) != before || device == 0 {
            return None;
        }
        if self.load(USED) == 0 {
            self.words[USED].store(1, Ordering::Relaxed);
        }
        Some(NextHop {
            source: words_to_addr(source.0, source.1),
            ifindex: (device >> 32) as u32,
            mtu: device as u32,
            source_mac: mac_from_word(source_mac),
            mac: mac_from_word(mac),
        })
    }

    /// Only the writer calls this. Without a next hop the entry becomes free.
    fn write(&self, pair: &AddrPair, hop: Option<&NextHop>) {
        let sequence = self.load(SEQ);
        self.words[SEQ].store(sequence.wrapping_add(1) | 1, Ordering::Relaxed);
        // A reader that sees one of the words below also sees the odd number.
        fence(Ordering::Release);
        for (word, value) in pair.0.iter().enumerate() {
            self.words[PAIR + word].store(*value, Ordering::Relaxed);
        }
        if let Some(hop) = hop {
            let source = addr_to_words(hop.source);
            self.words[DEVICE].store(u64::from(hop.ifindex) << 32 | u64::from(hop.mtu), Ordering::Relaxed);
            self.words[MAC].store(mac_to_word(hop.mac), Ordering::Relaxed);
            self.words[SOURCE_MAC].store(mac_to_word(hop.source_mac), Ordering::Relaxed);
            self.words[SOURCE].store(source.0, Ordering::Relaxed);
            self.words[SOURCE + 1].store(source.1, Ordering::Relaxed);
        } else {
            self.words[DEVICE].store(0, Ordering::Relaxed);
        }
        // Release: a reader that sees this number sees the words.
        self.words[SEQ].store((sequence.wrapping_add(1) | 1).wrapping_add(1), Ordering::Release);
    }

    fn is_free(&self) -> bool {
        self.load(DEVICE) == 0
    }
}

fn mac_from_word(word: u64) -> [u8; 6] {
    let [a, b, c, d, e, f, _, _] = word.to_le_bytes();
    [a, b, c, d, e, f]
}

fn mac_to_word([a, b, c, d, e, f]: [u8; 6]) -> u64 {
    u64::from_le_bytes([a, b, c, d, e, f, 0, 0])
}

impl NextHops {
    /// Sets the secret seed; called once, by the writer.
    pub fn set_seed(&self, seed: u64) {
        self.seed.store(seed, Ordering::Relaxed);
    }

    /// Shows that the writer is alive.
    pub fn heartbeat(&self) {
        self.heartbeat.store(tick::coarse_ms(), Ordering::Relaxed);
    }

    /// True if the last heartbeat was within `ms` milliseconds. Call it once a batch.
    #[must_use]
    pub fn is_alive(&self, ms: u32) -> bool {
        let beat = self.heartbeat.load(Ordering::Relaxed);
        beat != 0 && tick::coarse_ms().wrapping_sub(beat) <= ms
    }

    fn hash(&self, pair: &AddrPair) -> u64 {
        const SPREAD: u64 = 0x9e37_79b9_7f4a_7c55;
        let seed = self.seed.load(Ordering::Relaxed);
        let [a, b, c, d] = pair.0;
        let high = a.wrapping_mul(SPREAD) ^ c ^ seed;
        let low = b.wrapping_mul(SPREAD) ^ d ^ seed.rotate_left(32);
        folded_multiply(folded_multiply(high, low) ^ seed, SPREAD)
    }

    fn bucket(&self, hash: u64) -> &[Entry] {
        let first = hash as usize % (ENTRIES / WAYS) * WAYS;
        &self.entries[first..first + WAYS]
    }

    /// The next hop from a local address to a peer.
    #[must_use]
    #[inline]
    pub fn find(&self, pair: &AddrPair) -> Option<NextHop> {
        self.bucket(self.hash(pair)).iter().find_map(|place| place.read(pair))
    }

    /// Requests a pair. The result can be found later, or never.
    #[cold]
    pub fn request(&self, pair: &AddrPair) {
        let question = &self.requests[(self.hash(pair) >> 32) as usize % REQUESTS];
        // Acquire: the writer has finished reading the words of the previous request.
        let claimed =
            question.state.compare_exchange(FREE, CLAIMED, Ordering::Acquire, Ordering::Relaxed).is_ok();
        if !claimed {
            return;
        }
        for (to, word) in question.pair.iter().zip(pair.0) {
            to.store(word, Ordering::Relaxed);
        }
        // Release: a writer that sees the state sees the words.
        question.state.store(REQUESTED, Ordering::Release);
    }

    /// Takes the pending requests. Only the writer calls this.
    pub fn drain_requests(&self, mut each: impl FnMut(AddrPair)) {
        for question in &self.requests {
            if question.state.load(Ordering::Acquire) == REQUESTED {
                each(AddrPair(std::array::from_fn(|word| question.pair[word].load(Ordering::Relaxed))));
                question.state.store(FREE, Ordering::Release);
            }
        }
    }

    /// Inserts the next hop of a pair, and returns the pair that it replaced, if any. Only the
    /// writer calls this.
    pub fn insert(&self, pair: &AddrPair, hop: &NextHop, turn: usize) -> Option<AddrPair> {
        let places = self.bucket(self.hash(pair));
        let same = places.iter().find(|place| !place.is_free() && place.pair() == *pair);
        if let Some(place) = same.or_else(|| places.iter().find(|place| place.is_free())) {
            place.write(pair, Some(hop));
            return None;
        }
        let place = &places[turn % WAYS];
        let gone = place.pair();
        place.write(pair, Some(hop));
        Some(gone)
    }

    /// Removes a pair. Only the writer calls this.
    pub fn remove(&self, pair: &AddrPair) {
        let places = self.bucket(self.hash(pair));
        if let Some(place) = places.iter().find(|place| !place.is_free() && place.pair() == *pair) {
            place.write(pair, None);
        }
    }

    /// True if a datagram was sent this way since the last call. Only the writer calls this.
    pub fn test_and_clear_used(&self, pair: &AddrPair) -> bool {
        let places = self.bucket(self.hash(pair));
        let place = places.iter().find(|place| !place.is_free() && place.pair() == *pair);
        place.is_some_and(|place| place.words[USED].swap(0, Ordering::Relaxed) != 0)
    }
}

/// Combines both halves of a product; each depends on every bit of the factors.
fn folded_multiply(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product >> 64) as u64 ^ product as u64
}

#[cfg(all(test, not(miri)))]
#[allow(clippy::unwrap_used, reason = "helpers of tests")]
mod tests {
    use std::os::fd::AsFd as _;

    use manylane_sys::shared::Shared;

    use super::*;

    fn hop(mtu: u32) -> NextHop {
        NextHop { source: [10, 0, 0, 1].into(), ifindex: 3, mtu, source_mac: [2; 6], mac: [4; 6] }
    }

    fn pair(n: u32) -> AddrPair {
        AddrPair::new([10, 0, 0, 1].into(), Ipv4Addr::from(0x0a01_0000 + n).into()).unwrap()
    }

    #[test]
    fn what_one_process_enters_another_finds() {
        let (ours, file) = Shared::<NextHops>::create(c"hops").unwrap();
        ours.set_seed(77);
        let theirs = Shared::<NextHops>::open(file.as_fd()).unwrap();
        assert_eq!(theirs.find(&pair(1)), None);
        theirs.request(&pair(1));
        theirs.request(&pair(1));
        let mut asked = Vec::new();
        ours.drain_requests(|pair| asked.push(pair));
        ours.drain_requests(|pair| asked.push(pair));
        assert_eq!(asked, [pair(1)]);
        assert_eq!(ours.insert(&pair(1), &hop(1500), 0), None);
        assert!(!ours.test_and_clear_used(&pair(1)));
        assert_eq!(theirs.find(&pair(1)), Some(hop(1500)));
        assert!(ours.test_and_clear_used(&pair(1)) && !ours.test_and_clear_used(&pair(1)));
        ours.insert(&pair(1), &hop(1400), 0);
        assert_eq!(theirs.find(&pair(1)).map(|hop| hop.mtu), Some(1400));
        ours.remove(&pair(1));
        assert_eq!(theirs.find(&pair(1)), None);
    }

    #[test]
    fn a_full_table_gives_up_one_for_another() {
        let (hops, _file) = Shared::<NextHops>::create(c"hops").unwrap();
        let mut gone = 0;
        for n in 0..3 * ENTRIES as u32 {
            gone += usize::from(hops.insert(&pair(n), &hop(1500), n as usize).is_some());
            assert_eq!(hops.find(&pair(n)), Some(hop(1500)));
        }
        let there = (0..3 * ENTRIES as u32).filter(|n| hops.find(&pair(*n)).is_some()).count();
        assert_eq!((there + gone, there <= ENTRIES), (3 * ENTRIES, true));
    }

    #[test]
    fn without_its_writer_nothing_is_believed() {
        let (hops, _file) = Shared::<NextHops>::create(c"hops").unwrap();
        assert!(!hops.is_alive(u32::MAX));
        hops.heartbeat();
        assert!(hops.is_alive(60_000));
        hops.heartbeat.store(tick::coarse_ms().wrapping_sub(5000), Ordering::Relaxed);
        assert!(!hops.is_alive(1000));
    }

    #[test]
    fn addresses_are_what_they_were() {
        for (local, peer) in [("0.0.0.0", "192.0.2.7"), ("::", "2001:db8::9"), ("fd00::1", "fd00::2")] {
            let (local, peer): (IpAddr, IpAddr) = (local.parse().unwrap(), peer.parse().unwrap());
            let pair = AddrPair::new(local, peer).unwrap();
            assert_eq!((pair.local(), pair.peer()), (local, peer));
        }
        assert_eq!(AddrPair::new([0; 4].into(), IpAddr::from([0_u16; 8])), None);
    }
}
