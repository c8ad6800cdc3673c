//! The layout of the steering table: plain arithmetic, no system calls.
//!
//! - `flow` and `key`: 1024 buckets of a hash. A lane that is removed gives up only its own
//!   buckets, and a new lane takes its share from the lanes with the most. Flows in other buckets
//!   keep their lane.
//! - `cpu`: entry c names the lane whose thread runs on CPU c, or any lane if there is none.
//! - `round-robin`, `random`, `least-loaded`: the lanes in turn; the size of the table is their
//!   number.
//!
//! All entries, even those beyond the size, always name open lanes, so that a reader may see any
//! mix of two tables.

use manylane_bpf::abi::{TABLE_SIZE, Table};

use super::policy::{Slot, Steering};

/// The lanes in steering, and their table.
pub(super) struct Layout {
    policy: Steering,
    lanes: Vec<(Slot, Option<usize>)>,
    /// Empty if the policy has none.
    buckets: Vec<Slot>,
}

impl Layout {
    pub(super) fn new(policy: Steering) -> Self {
        Self { policy, lanes: Vec::new(), buckets: Vec::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// Number of lanes in steering.
    pub(super) fn lanes(&self) -> usize {
        self.lanes.len()
    }

    pub(super) fn admit(&mut self, slot: Slot, cpu: Option<usize>) {
        self.retire(slot);
        self.lanes.push((slot, cpu));
        if !matches!(self.policy, Steering::Flow | Steering::Key { .. }) {
            return;
        }
        let lanes = self.lanes.len();
        if lanes == 1 {
            self.buckets = vec![slot; TABLE_SIZE];
            return;
        }
        // Take buckets from the lane with the most, until the new lane has its share. Start from
        // the end: lanes that are added one after the other then lie nearly where the kernel's own
        // scaling of the hash would put them.
        let mut counts = self.bucket_counts();
        for _ in 0..TABLE_SIZE / lanes {
            let Some((fullest, count)) = counts.iter_mut().max_by_key(|(_, count)| *count) else { break };
            if let Some(at) = self.buckets.iter().rposition(|owner| owner == fullest) {
                self.buckets[at] = slot;
                *count -= 1;
            }
        }
    }

    pub(super) fn retire(&mut self, slot: Slot) {
        self.lanes.retain(|(lane, _)| *lane != slot);
        if self.lanes.is_empty() || self.buckets.is_empty() {
            return;
        }
        let mut counts = self.bucket_counts();
        for owner in self.buckets.iter_mut().filter(|owner| **owner == slot) {
            if let Some((emptiest, count)) = counts.iter_mut().min_by_key(|(_, count)| *count) {
                *owner = *emptiest;
                *count += 1;
            }
        }
    }

    /// The lanes in steering, and the number of buckets of each.
    fn bucket_counts(&self) -> Vec<(Slot, usize)> {
        let count = |slot: Slot| self.buckets.iter().filter(|owner| **owner == slot).count();
        self.lanes.iter().map(|(slot, _)| (*slot, count(*slot))).collect()
    }

    /// The lanes that datagrams received on a CPU are for, if the policy is `cpu`. A CPU is that of
    /// one lane, or of several, of which the first counts.
    pub(super) fn by_cpu(&self) -> impl Iterator<Item = (usize, Slot)> {
        self.lanes.iter().filter_map(|(slot, cpu)| Some(((*cpu)?, *slot)))
    }

    /// The slots that serve in turn.
    pub(super) fn in_turn(&self) -> impl Iterator<Item = Slot> {
        self.lanes.iter().map(|(slot, _)| *slot)
    }

    /// Number of entries in use.
    pub(super) fn size(&self) -> usize {
        match self.policy {
            Steering::Flow | Steering::Key { .. } | Steering::Cpu => TABLE_SIZE,
            _ => self.lanes.len(),
        }
    }

    /// The slot at entry `at`, for any `at` below [`TABLE_SIZE`]. There is at least one lane.
    pub(super) fn entry(&self, at: usize) -> Slot {
        let round_robin = || self.lanes[at % self.lanes.len()].0;
        match self.policy {
            Steering::Flow | Steering::Key { .. } => self.buckets[at],
            Steering::Cpu => self
                .lanes
                .iter()
                .find(|(_, cpu)| *cpu == Some(at))
                .map_or_else(round_robin, |(slot, _)| *slot),
            _ => round_robin(),
        }
    }

    /// The table in the layout that eBPF reads.
    pub(super) fn table(&self) -> Box<Table> {
        let mut table = Box::new(Table { size: self.size() as u32, lane: [0; TABLE_SIZE], pad: 0 });
        for (at, lane) in table.lane.iter_mut().enumerate() {
            *lane = self.entry(at);
        }
        table
    }
}

/// The bucket of a hash is its top ten bits, the same scaling as in the kernel's own choice.
pub(super) const BUCKET_SHIFT: u32 = u32::BITS - TABLE_SIZE.trailing_zeros();

/// Multipliers of the key's hash (the constants of MurmurHash3's finaliser; Austin Appleby, public
/// domain).
pub(super) const KEY_SEED: u32 = 0x9e37_79b9;
pub(super) const KEY_WORD: u32 = 0x85eb_ca6b;
pub(super) const KEY_LAST: u32 = 0xc2b2_ae35;

/// The hash of a key, as eBPF and classic BPF compute it. Its top ten bits are the bucket.
#[must_use]
pub fn key_hash(key: &[u8]) -> u32 {
    let mut hash = KEY_SEED ^ key.len() as u32;
    for chunk in key.chunks(4) {
        let mut word = [0; 4];
        word[..chunk.len()].copy_from_slice(chunk);
        hash = (hash ^ u32::from_be_bytes(word)).wrapping_mul(KEY_WORD);
        hash ^= hash >> 13;
    }
    hash = hash.wrapping_mul(KEY_LAST);
    hash ^ hash >> 16
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lanes_added_in_turn_share_evenly() {
        let mut layout = Layout::new(Steering::Flow);
        for slot in 0..7 {
            layout.admit(slot, None);
        }
        let counts = layout.bucket_counts();
        assert_eq!(counts.len(), 7);
        assert!(
            counts.iter().all(|(_, count)| (TABLE_SIZE / 7..=TABLE_SIZE / 7 + 2).contains(count)),
            "{counts:?}"
        );
    }

    #[test]
    fn cpu_names_the_lane_that_runs_there() {
        let mut layout = Layout::new(Steering::Cpu);
        layout.admit(0, Some(3));
        layout.admit(1, Some(1));
        assert_eq!([layout.entry(3), layout.entry(1)], [0, 1]);
        assert!(layout.entry(0) < 2 && layout.entry(900) < 2);
    }

    #[test]
    fn in_turn_policies_count_and_pad_their_lanes() {
        let mut layout = Layout::new(Steering::RoundRobin);
        for slot in [4, 9, 2] {
            layout.admit(slot, None);
        }
        let table = layout.table();
        assert_eq!(table.size, 3);
        assert_eq!(table.lane[..4], [4, 9, 2, 4]);
        layout.retire(9);
        assert_eq!(layout.table().lane[..3], [4, 2, 4]);
        assert!(layout.table().lane.iter().all(|slot| [4, 2].contains(slot)));
    }

    proptest! {
        /// For any sequence of changes: every bucket names a lane in steering, shares stay even,
        /// and a change moves only the buckets of the lane that is added or removed.
        #[test]
        fn buckets_move_no_more_than_they_must(steps in prop::collection::vec(0_u32..12, 1..40)) {
            let mut layout = Layout::new(Steering::Flow);
            for slot in steps {
                let before = layout.buckets.clone();
                let present = layout.lanes.iter().any(|(lane, _)| *lane == slot);
                if present { layout.retire(slot) } else { layout.admit(slot, None) }
                if layout.is_empty() {
                    continue;
                }
                let lanes: Vec<_> = layout.lanes.iter().map(|(lane, _)| *lane).collect();
                prop_assert!(layout.buckets.iter().all(|owner| lanes.contains(owner)));
                let shares: Vec<_> = layout.bucket_counts().into_iter().map(|(_, count)| count).collect();
                prop_assert!(shares.iter().max().unwrap() - shares.iter().min().unwrap() <= 1 + lanes.len());
                for (old, new) in before.iter().zip(&layout.buckets) {
                    prop_assert!(old == new || *old == slot || *new == slot);
                }
            }
        }
    }
}
