//! The table of next hops: written by one thread, read by every lane without a lock.
//!
//! It has a fixed size: [`SETS`] sets of [`WAYS`] slots. A new entry in a full set replaces the
//! one that was queried longest ago. A slot is one cache line. A set has a tag of one byte per
//! slot, which tells whether the slot is worth reading. Readers see a change as soon as it is
//! made. Nothing is published separately, and nothing is allocated however many peers there are.
//!
//! [`NextHops`](manylane_ipc::next_hops::NextHops) is another table of the same [`Slot`], in memory
//! that a program on lease can write to. So it cannot be this one: each lease has its own, filled
//! from this one (`leasing/peers.rs`), and garbage in it harms that program alone. Its lanes leave
//! requests in it and mark the entries that they find, because its writer is another process. Here,
//! lanes write nothing to the table: they have queues for queries. From these, the writer knows
//! when each entry was last queried, by which entries expire and are replaced. There, marks and
//! requests are all it has.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use manylane_ipc::next_hops::{NextHop, RouteKey, Slot, addr_bits};

const WAYS: usize = 16;
const SETS: usize = 1024;
/// Maximum number of entries.
pub(super) const ENTRIES_MAX: usize = WAYS * SETS;

/// Epochs after which an entry that no lane queries is removed.
const ENTRY_EPOCHS_MAX: u16 = 4;

/// A prefix of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Prefix {
    bits: u128,
    length: u32,
}

impl Prefix {
    pub(super) fn new(ip: IpAddr, length: u8) -> Self {
        let (prefix_max, before) = if ip.is_ipv4() { (32, 96) } else { (128, 0) };
        Self { bits: addr_bits(ip), length: before + u32::from(length).min(prefix_max) }
    }

    /// Its length, that of IPv4 with the 96 bits in front.
    pub(super) fn length(&self) -> u32 {
        self.length
    }

    pub(super) fn contains(&self, ip: u128) -> bool {
        (self.bits ^ ip).checked_shr(128 - self.length).unwrap_or(0) == 0
    }
}

/// The neighbour that a frame is sent to: the peer itself, or a gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct NeighbourKey {
    pub(super) ifindex: u32,
    pub(super) address: IpAddr,
}

/// A result of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) next: NextHop,
    /// Epoch in which it was queried.
    pub(super) epoch: u16,
    /// The neighbour is stale: the kernel has not heard of it for a while.
    pub(super) stale: bool,
}

impl Entry {
    /// The entry of `pair`, unless the slot has another one or is being written.
    #[inline]
    fn read(slot: &Slot, pair: &RouteKey) -> Option<Self> {
        let (next, [stale, epoch], ()) = slot.read(pair, || ())?;
        Some(Self { next, epoch, stale: stale != 0 })
    }

    fn write(&self, slot: &Slot, pair: &RouteKey) {
        slot.write(pair, &self.next, [self.stale.into(), self.epoch], || ());
    }
}

/// The part of the table that lanes read.
#[derive(Debug)]
pub(super) struct Table {
    /// Random seeds: peers choose their addresses, but must not be able to choose the set.
    seeds: [u64; 2],
    /// One byte per slot of a set; 0 is an empty slot.
    tags: Box<[[AtomicU64; WAYS / 8]]>,
    slots: Box<[Slot]>,
    version: Version,
}

/// Incremented after each change of what a reader may have found. Every lane reads it once per
/// batch, so it has its own cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Version(AtomicU64);

impl Table {
    fn new() -> Self {
        Self {
            seeds: std::array::from_fn(|_| RandomState::new().build_hasher().finish()),
            tags: (0..SETS).map(|_| Default::default()).collect(),
            slots: (0..ENTRIES_MAX).map(|_| Slot::default()).collect(),
            version: Version::default(),
        }
    }

    /// While this number is unchanged, earlier results are still valid.
    #[inline]
    pub(super) fn version(&self) -> u64 {
        // Acquire: a reader that sees the number sees the changes that it counts.
        self.version.0.load(Ordering::Acquire)
    }

    /// An entry was changed or removed. Only the writer calls this, after the change.
    fn bump_version(&self) {
        let next = self.version.0.load(Ordering::Relaxed).wrapping_add(1);
        self.version.0.store(next, Ordering::Release);
    }

    #[inline]
    pub(super) fn hash(&self, pair: &RouteKey) -> u64 {
        pair.seeded_hash(self.seeds)
    }

    /// The entry of a pair.
    #[inline]
    pub(super) fn find(&self, pair: &RouteKey, hash: u64) -> Option<Entry> {
        let set = set_of(hash);
        for (eight, tags) in self.tags[set].iter().enumerate() {
            let mut same = equal_bytes(tags.load(Ordering::Acquire), tag_of(hash));
            while same != 0 {
                let way = eight * 8 + same.trailing_zeros() as usize / 8;
                if let Some(found) = Entry::read(&self.slots[set * WAYS + way], pair) {
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
        // Release: a reader that sees the tag sees the slot that was written before it.
        word.store(others | u64::from(tag) << shift, Ordering::Release);
    }
}

fn set_of(hash: u64) -> usize {
    hash as usize % SETS
}

fn tag_of(hash: u64) -> u8 {
    ((hash >> 56) as u8).max(1)
}

/// The top bit of each byte of `word` that equals `byte`, and nothing else: a slot whose entry was
/// removed keeps its words, and only its tag tells that they are no longer valid.
fn equal_bytes(word: u64, byte: u8) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const LOW: u64 = ONES * 0x7f;
    let zero_if_equal = word ^ (ONES * u64::from(byte));
    // No sum carries into the next byte.
    !(((zero_if_equal & LOW) + LOW) | zero_if_equal | LOW)
}

/// The writer's data about a slot.
#[derive(Clone, Copy, Debug)]
struct SlotMeta {
    neighbour: NeighbourKey,
    epoch: u16,
    /// Increases with every insertion: the smallest is the oldest.
    order: u64,
}

/// The writer. Its entries are removed when it is dropped: lanes then find nothing and use
/// ordinary sockets.
#[derive(Debug)]
pub(super) struct Writer {
    table: Arc<Table>,
    slot_meta: Box<[Option<SlotMeta>]>,
    used: usize,
    order: u64,
}

impl Writer {
    pub(super) fn new() -> Self {
        Self { table: Arc::new(Table::new()), slot_meta: vec![None; ENTRIES_MAX].into(), used: 0, order: 0 }
    }

    pub(super) fn table(&self) -> &Arc<Table> {
        &self.table
    }

    /// Number of entries.
    pub(super) fn len(&self) -> usize {
        self.used
    }

    /// Inserts the result for a pair, or replaces the old one.
    pub(super) fn insert(&mut self, pair: &RouteKey, hop: NeighbourKey, found: &Entry) {
        let hash = self.table.hash(pair);
        let set = set_of(hash) * WAYS..(set_of(hash) + 1) * WAYS;
        let same = |slot: &usize| self.slot_meta[*slot].is_some() && self.table.slots[*slot].key() == *pair;
        // An empty slot sorts before all others.
        let oldest = |slot: &usize| self.slot_meta[*slot].map(|meta| meta.order);
        let Some(slot) = set.clone().find(same).or_else(|| set.min_by_key(oldest)) else { return };
        self.order += 1;
        let meta = SlotMeta { neighbour: hop, epoch: found.epoch, order: self.order };
        let before = self.slot_meta[slot].replace(meta);
        found.write(&self.table.slots[slot], pair);
        self.table.set_tag(slot, tag_of(hash));
        match before {
            None => self.used += 1,
            Some(_) => self.table.bump_version(),
        }
    }

    /// Removes a pair.
    pub(super) fn remove_pair(&mut self, pair: &RouteKey) {
        let set = set_of(self.table.hash(pair)) * WAYS;
        let same = |slot: &usize| self.slot_meta[*slot].is_some() && self.table.slots[*slot].key() == *pair;
        if let Some(slot) = (set..set + WAYS).find(same) {
            self.remove(slot);
        }
    }

    /// Changes the MAC of all entries that use a neighbour, or removes them if it has none.
    pub(super) fn set_mac(&mut self, hop: &NeighbourKey, mac: Option<[u8; 6]>) {
        for slot in 0..ENTRIES_MAX {
            if self.slot_meta[slot].is_none_or(|meta| meta.neighbour != *hop) {
                continue;
            }
            let entry = &self.table.slots[slot];
            let pair = entry.key();
            match (mac, Entry::read(entry, &pair)) {
                (Some(mac), Some(found)) => {
                    Entry { next: NextHop { mac, ..found.next }, ..found }.write(entry, &pair);
                    self.table.bump_version();
                }
                _ => self.remove(slot),
            }
        }
    }

    /// Removes the peers within a prefix.
    pub(super) fn remove_prefix(&mut self, prefix: &Prefix) {
        self.remove_if(|_, pair| {
            let [.., high, low] = pair.0;
            prefix.contains(u128::from(high) << 64 | u128::from(low))
        });
    }

    /// Removes the pairs that contain an address.
    pub(super) fn remove_address(&mut self, ip: IpAddr) {
        self.remove_if(|_, pair| pair.local() == ip || pair.peer() == ip);
    }

    /// Removes the entries that use a device.
    pub(super) fn remove_device(&mut self, ifindex: u32) {
        self.remove_if(|hop, _| hop.ifindex == ifindex);
    }

    fn remove_if(&mut self, goes: impl Fn(&NeighbourKey, &RouteKey) -> bool) {
        if self.used == 0 {
            return;
        }
        for slot in 0..ENTRIES_MAX {
            if self.slot_meta[slot].is_some_and(|meta| goes(&meta.neighbour, &self.table.slots[slot].key())) {
                self.remove(slot);
            }
        }
    }

    /// Removes the entries that no lane has queried for some epochs.
    pub(super) fn expire(&mut self, epoch: u16) {
        for slot in 0..ENTRIES_MAX {
            if self.slot_meta[slot].is_some_and(|meta| epoch.wrapping_sub(meta.epoch) > ENTRY_EPOCHS_MAX) {
                self.remove(slot);
            }
        }
    }

    /// Removes all entries.
    pub(super) fn clear(&mut self) {
        if self.used == 0 {
            return;
        }
        self.slot_meta.fill(None);
        self.used = 0;
        for tags in self.table.tags.iter().flatten() {
            tags.store(0, Ordering::Release);
        }
        self.table.bump_version();
    }

    fn remove(&mut self, slot: usize) {
        if self.table.tag(slot) != 0 {
            self.table.set_tag(slot, 0);
        }
        if self.slot_meta[slot].take().is_some() {
            self.used -= 1;
            self.table.bump_version();
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests;
