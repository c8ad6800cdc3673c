//! Next hops in memory shared by processes: one process writes what the kernel told it, and lanes
//! of others read it. This is the Rust side of `abi/manylane_next_hops.h`.
//!
//! | side | does |
//! |---|---|
//! | a lane | looks up the next hop from its address to a peer ([`find`](NextHops::find)); if there is none, it [`request`](NextHops::request)s it, and sends that datagram by its kernel socket |
//! | the writer | takes requests ([`drain_requests`](NextHops::drain_requests)), asks the kernel, [`insert`](NextHops::insert)s and [`remove`](NextHops::remove)s; each [`heartbeat`](NextHops::heartbeat) shows that it is alive |
//!
//! An entry is two cache lines whose consistency a reader can check (a sequence number, odd during
//! a write). A pair has eight adjacent entries; if all are in use, the writer replaces one of them
//! in rotation. A request has one slot for its pair; if that is in use, the next datagram requests
//! again. Without a writer the heartbeat stops, and lanes ignore all entries.
//!
//! The library has another table of the same [`Slot`], for the lanes of its own process
//! (`io/xdp/route/table.rs`). It is not shared, because readers of this one can also write to it:
//! each lease has one, filled from the library's. So only this one needs a heartbeat, requests and
//! the mark of use. It also has source addresses, because the program's sockets may be bound to a
//! wildcard address.

mod slot;

use std::mem::{offset_of, size_of};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use manylane_sys::{atomics, tick};

pub use self::slot::{NextHop, RouteKey, Slot, addr_bits};
use self::slot::{halves, words_to_addr};

/// Entries of the table, a power of two.
pub const ENTRIES: usize = 8192;
/// Entries that one pair may use.
const WAYS: usize = 8;
/// Request slots.
const REQUESTS: usize = 256;

/// States of a request: free, being written by a lane, ready for the writer.
const FREE: u32 = 0;
const CLAIMED: u32 = 1;
const REQUESTED: u32 = 2;

atomics! {
    /// Two cache lines (`struct mln_entry`).
    #[repr(align(128))]
    struct Entry {
        slot: Slot,
        /// The source address, part of what is written with the slot.
        source: [AtomicU64; 2],
        /// 1 if a lane has found the entry since the writer's last check.
        used: AtomicU64,
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
const _: () = assert!(offset_of!(Entry, slot) == 0);
const _: () = assert!(offset_of!(Entry, source) == 64);
const _: () = assert!(offset_of!(Entry, used) == 80);
const _: () = assert!(offset_of!(NextHops, seed) == 8);
const _: () = assert!(offset_of!(NextHops, requests) == 64);
const _: () = assert!(offset_of!(NextHops, entries) == 128 + 64 * REQUESTS);
const _: () = assert!(size_of::<NextHops>() == 128 + 64 * REQUESTS + 128 * ENTRIES);

impl Entry {
    #[inline]
    fn read(&self, key: &RouteKey) -> Option<(IpAddr, NextHop)> {
        let [high, low] = &self.source;
        let source = || (high.load(Ordering::Relaxed), low.load(Ordering::Relaxed));
        let (next, _, (high, low)) = self.slot.read(key, source)?;
        if next.ifindex == 0 {
            return None;
        }
        if self.used.load(Ordering::Relaxed) == 0 {
            self.used.store(1, Ordering::Relaxed);
        }
        Some((words_to_addr(high, low), next))
    }

    fn write(&self, key: &RouteKey, source: IpAddr, next: &NextHop) {
        let words = halves(addr_bits(source));
        self.slot.write(key, next, [0; 2], || {
            for (to, word) in self.source.iter().zip(words) {
                to.store(word, Ordering::Relaxed);
            }
        });
    }

    fn has(&self, key: &RouteKey) -> bool {
        !self.slot.is_empty() && self.slot.key() == *key
    }
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

    /// True if the last heartbeat was within `ms` milliseconds.
    #[must_use]
    pub fn is_alive(&self, ms: u32) -> bool {
        let beat = self.heartbeat.load(Ordering::Relaxed);
        beat != 0 && tick::coarse_ms().wrapping_sub(beat) <= ms
    }

    fn hash(&self, key: &RouteKey) -> u64 {
        let seed = self.seed.load(Ordering::Relaxed);
        key.seeded_hash([seed, seed.rotate_left(32)])
    }

    #[expect(clippy::cast_possible_truncation, reason = "less than the number of entries")]
    fn bucket(&self, hash: u64) -> &[Entry] {
        let first = (hash % (ENTRIES / WAYS) as u64) as usize * WAYS;
        &self.entries[first..first + WAYS]
    }

    /// The source address and the next hop of a pair; none if there is no entry, or while it is
    /// being written.
    #[must_use]
    #[inline]
    pub fn find(&self, key: &RouteKey) -> Option<(IpAddr, NextHop)> {
        self.bucket(self.hash(key)).iter().find_map(|entry| entry.read(key))
    }

    /// Requests the next hop of a pair. [`find`](Self::find) returns it once the writer has
    /// inserted it; it may never do so.
    #[cold]
    pub fn request(&self, key: &RouteKey) {
        let question = &self.requests[(self.hash(key) >> 32) as usize % REQUESTS];
        // Acquire: the writer has finished reading the words of the previous request.
        let claimed =
            question.state.compare_exchange(FREE, CLAIMED, Ordering::Acquire, Ordering::Relaxed).is_ok();
        if !claimed {
            return;
        }
        for (to, word) in question.pair.iter().zip(key.0) {
            to.store(word, Ordering::Relaxed);
        }
        // Release: a writer that sees the state sees the words.
        question.state.store(REQUESTED, Ordering::Release);
    }

    /// Takes the pending requests. Only the writer calls this.
    pub fn drain_requests(&self, mut each: impl FnMut(RouteKey)) {
        for question in &self.requests {
            if question.state.load(Ordering::Acquire) == REQUESTED {
                each(RouteKey(std::array::from_fn(|word| question.pair[word].load(Ordering::Relaxed))));
                question.state.store(FREE, Ordering::Release);
            }
        }
    }

    /// Inserts the source address and the next hop of a pair. If all entries of the pair are in
    /// use, `victim` selects the one to replace; returns the replaced pair, if any. Only the writer
    /// calls this.
    pub fn insert(&self, key: &RouteKey, source: IpAddr, next: &NextHop, victim: usize) -> Option<RouteKey> {
        let bucket = self.bucket(self.hash(key));
        if let Some(entry) = bucket.iter().find(|entry| entry.has(key)) {
            entry.write(key, source, next);
            return None;
        }
        let free = bucket.iter().find(|entry| entry.slot.is_empty());
        let entry = free.unwrap_or(&bucket[victim % WAYS]);
        let replaced = free.is_none().then(|| entry.slot.key());
        // It tells of the pair that had the entry before.
        entry.used.store(0, Ordering::Relaxed);
        entry.write(key, source, next);
        replaced
    }

    /// Removes a pair. Only the writer calls this.
    pub fn remove(&self, key: &RouteKey) {
        if let Some(entry) = self.entry(key) {
            entry.slot.write(key, &NextHop::default(), [0; 2], || ());
        }
    }

    /// As [`test_and_clear_used`](Self::test_and_clear_used), but does not write, so that lanes
    /// need not write again. Only the writer calls this.
    #[must_use]
    pub fn is_used(&self, key: &RouteKey) -> bool {
        self.entry(key).is_some_and(|entry| entry.used.load(Ordering::Relaxed) != 0)
    }

    /// True if a lane has found the entry since the last call. Only the writer calls this.
    pub fn test_and_clear_used(&self, key: &RouteKey) -> bool {
        self.entry(key).is_some_and(|entry| entry.used.swap(0, Ordering::Relaxed) != 0)
    }

    fn entry(&self, key: &RouteKey) -> Option<&Entry> {
        self.bucket(self.hash(key)).iter().find(|entry| entry.has(key))
    }
}

#[cfg(all(test, not(miri)))]
#[allow(clippy::unwrap_used, reason = "helpers of tests")]
mod tests {
    use std::net::Ipv4Addr;
    use std::os::fd::AsFd as _;

    use manylane_sys::shared::Shared;

    use super::*;

    const SOURCE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));

    fn hop(mtu: u32) -> NextHop {
        NextHop { ifindex: 3, mtu, source_mac: [2; 6], mac: [4; 6] }
    }

    fn pair(n: u32) -> RouteKey {
        RouteKey::new(SOURCE, Ipv4Addr::from(0x0a01_0000 + n).into()).unwrap()
    }

    #[test]
    fn next_hops_are_shared_between_processes() {
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
        assert_eq!(ours.insert(&pair(1), SOURCE, &hop(1500), 0), None);
        assert!(!ours.is_used(&pair(1)) && !ours.test_and_clear_used(&pair(1)));
        assert_eq!(theirs.find(&pair(1)), Some((SOURCE, hop(1500))));
        assert!(ours.is_used(&pair(1)) && ours.is_used(&pair(1)));
        assert!(ours.test_and_clear_used(&pair(1)) && !ours.test_and_clear_used(&pair(1)));
        ours.insert(&pair(1), SOURCE, &hop(1400), 0);
        assert_eq!(theirs.find(&pair(1)).map(|(_, hop)| hop.mtu), Some(1400));
        ours.remove(&pair(1));
        assert_eq!(theirs.find(&pair(1)), None);
    }

    #[test]
    fn a_full_table_evicts_an_entry() {
        let (hops, _file) = Shared::<NextHops>::create(c"hops").unwrap();
        let mut gone = 0;
        for n in 0..3 * ENTRIES as u32 {
            gone += usize::from(hops.insert(&pair(n), SOURCE, &hop(1500), n as usize).is_some());
            assert!(!hops.is_used(&pair(n)), "as the pair that it replaced");
            assert_eq!(hops.find(&pair(n)), Some((SOURCE, hop(1500))));
        }
        let there = (0..3 * ENTRIES as u32).filter(|n| hops.find(&pair(*n)).is_some()).count();
        assert_eq!((there + gone, there <= ENTRIES), (3 * ENTRIES, true));
    }

    #[test]
    fn entries_are_ignored_without_their_writer() {
        let (hops, _file) = Shared::<NextHops>::create(c"hops").unwrap();
        assert!(!hops.is_alive(u32::MAX));
        hops.heartbeat();
        assert!(hops.is_alive(60_000));
        hops.heartbeat.store(tick::coarse_ms().wrapping_sub(5000), Ordering::Relaxed);
        assert!(!hops.is_alive(1000));
    }
}
