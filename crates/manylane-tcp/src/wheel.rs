//! A hierarchical timer wheel: one deadline per connection of a lane.
//!
//! A level has 64 slots, each as long as all slots of the level below; those of the lowest level
//! are one microsecond long. The level of a deadline is the highest digit, in base 64, in which it
//! differs from the current time; its slot is the value of that digit. Thus all slots in use are in
//! the future, those of a level end before those of the next level begin, and the first slot in use
//! of the lowest level in use has the earliest deadline.

use crate::time::Time;

/// Bits of a digit: a level has as many slots as a `u64` has bits.
const DIGIT_BITS: u32 = 6;
const SLOTS: u32 = 1 << DIGIT_BITS;
/// Enough for all bits of a time: no deadline is too far away.
const LEVELS: u32 = u64::BITS.div_ceil(DIGIT_BITS);
/// The list of the deadlines that have passed, after those of the slots.
const DUE: u32 = LEVELS * SLOTS;
/// The first node of a key: those before it are the heads of the lists.
const KEYS: u32 = DUE + 1;

/// The deadlines of keys. Keys are indices of a slab of the caller: memory grows to 16 bytes per
/// key up to the largest one, and is kept.
pub struct Wheel {
    /// The latest time passed to [`pop`](Self::pop).
    now: Time,
    /// Bit n is set if level n is in use.
    levels: u16,
    /// Bit n of a level is set if its slot n is in use.
    slots: [u64; LEVELS as usize],
    /// The heads of the lists, then the nodes of the keys. All lists are circular; a node that
    /// links to itself is an empty list or a key without a deadline.
    nodes: Vec<Node>,
}

#[derive(Clone, Copy)]
struct Node {
    /// Unused in the head of a list.
    at: Time,
    previous: u32,
    next: u32,
}

impl Node {
    fn unlinked(index: u32) -> Node {
        Node { at: Time(0), previous: index, next: index }
    }
}

impl std::fmt::Debug for Wheel {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Wheel").field("now", &self.now).finish_non_exhaustive()
    }
}

impl Wheel {
    /// An empty wheel.
    #[must_use]
    pub fn new(now: Time) -> Wheel {
        let nodes = (0..KEYS).map(Node::unlinked).collect();
        Wheel { now, levels: 0, slots: [0; LEVELS as usize], nodes }
    }

    /// Sets or moves the deadline of `key`. One in the past is due at once.
    pub fn set(&mut self, key: u32, at: Time) {
        let index = index(key);
        while self.nodes.len() <= index as usize {
            self.nodes.push(Node::unlinked(self.nodes.len() as u32));
        }
        let list = self.list(at);
        if self.is_linked(index) {
            // Most moves are short, such as that of a retransmission timer by an acknowledgment:
            // do not touch the neighbours' cache lines.
            if self.list(self.node(index).at) == list {
                self.node_mut(index).at = at;
                return;
            }
            self.unlink(index);
        }
        self.node_mut(index).at = at;
        self.append(list, index);
    }

    /// Removes the deadline of `key`, if it has one.
    pub fn cancel(&mut self, key: u32) {
        let index = index(key);
        if self.is_linked(index) {
            self.unlink(index);
        }
    }

    /// The deadline of `key`.
    #[must_use]
    pub fn deadline(&self, key: u32) -> Option<Time> {
        let index = index(key);
        self.is_linked(index).then(|| self.node(index).at)
    }

    /// Removes and returns a key whose deadline is at or before `now`, in no particular order. If
    /// an earlier call passed a later `now`, that one counts.
    pub fn pop(&mut self, now: Time) -> Option<u32> {
        self.advance(now);
        let index = self.node(DUE).next;
        if index == DUE {
            return None;
        }
        self.unlink(index);
        Some(index - KEYS)
    }

    /// The time to call [`pop`](Self::pop) next, at or before the earliest deadline: either a key
    /// is due then, or keys move to lower levels, which happens at most ten times to each. Zero if
    /// a key is due already, `None` if no key has a deadline.
    #[must_use]
    pub fn next(&self) -> Option<Time> {
        if self.is_linked(DUE) {
            return Some(Time(0));
        }
        let slot = self.first_slot()?;
        let Node { previous, next, .. } = *self.node(slot);
        // A key that is alone in its slot need not pass through the levels below.
        Some(if previous == next { self.node(next).at } else { self.bounds(slot).0 })
    }

    /// Moves the time to `now`, and the deadlines up to it to the list of those due.
    fn advance(&mut self, now: Time) {
        while let Some(slot) = self.first_slot() {
            let (first, last) = self.bounds(slot);
            if first > now {
                break;
            }
            if last > now {
                // Slots in use do not overlap: `now` is inside no other one, and all that end
                // before it are empty already.
                self.now = now;
                self.distribute(slot);
            } else {
                self.move_to_due(slot);
            }
        }
        self.now = self.now.max(now);
    }

    /// Files the keys of a slot again, all of them at a lower level or as due.
    fn distribute(&mut self, slot: u32) {
        let mut index = self.node(slot).next;
        self.clear(slot);
        while index != slot {
            let Node { at, next, .. } = *self.node(index);
            self.append(self.list(at), index);
            index = next;
        }
    }

    /// Moves all keys of a slot to the list of those due.
    fn move_to_due(&mut self, slot: u32) {
        let Node { previous: last, next: first, .. } = *self.node(slot);
        let before = self.node(DUE).previous;
        self.link(before, first);
        self.link(last, DUE);
        self.clear(slot);
    }

    /// The list for a deadline.
    #[inline]
    fn list(&self, at: Time) -> u32 {
        if at <= self.now {
            return DUE;
        }
        let level = (at.0 ^ self.now.0).ilog2() / DIGIT_BITS;
        level * SLOTS + (at.0 >> (level * DIGIT_BITS)) as u32 % SLOTS
    }

    /// The slot in use with the earliest deadline.
    #[inline]
    fn first_slot(&self) -> Option<u32> {
        let level = self.levels.trailing_zeros();
        let slots = self.slots.get(level as usize)?;
        Some(level * SLOTS + slots.trailing_zeros())
    }

    /// The first and the last time of a slot in use.
    #[inline]
    fn bounds(&self, slot: u32) -> (Time, Time) {
        let shift = slot / SLOTS * DIGIT_BITS;
        let below = (1 << shift) - 1;
        // The digits above are those of the current time; the highest level has none above it.
        let above = !(below | u64::from(SLOTS - 1) << shift);
        let first = self.now.0 & above | u64::from(slot % SLOTS) << shift;
        (Time(first), Time(first | below))
    }

    fn append(&mut self, list: u32, index: u32) {
        let last = self.node(list).previous;
        self.link(last, index);
        self.link(index, list);
        if list != DUE {
            self.slots[(list / SLOTS) as usize] |= 1 << (list % SLOTS);
            self.levels |= 1 << (list / SLOTS);
        }
    }

    /// Removes a key from its list.
    fn unlink(&mut self, index: u32) {
        let Node { previous, next, .. } = *self.node(index);
        self.link(previous, next);
        self.link(index, index);
        // Only the head is left.
        if previous == next && next != DUE {
            self.clear(next);
        }
    }

    /// Makes a slot empty.
    fn clear(&mut self, slot: u32) {
        self.link(slot, slot);
        let level = slot / SLOTS;
        let slots = &mut self.slots[level as usize];
        *slots &= !(1 << (slot % SLOTS));
        if *slots == 0 {
            self.levels &= !(1 << level);
        }
    }

    fn link(&mut self, previous: u32, next: u32) {
        self.node_mut(previous).next = next;
        self.node_mut(next).previous = previous;
    }

    /// True for a list with keys and for a key with a deadline.
    #[inline]
    fn is_linked(&self, index: u32) -> bool {
        self.nodes.get(index as usize).is_some_and(|node| node.next != index)
    }

    #[inline]
    fn node(&self, index: u32) -> &Node {
        &self.nodes[index as usize]
    }

    #[inline]
    fn node_mut(&mut self, index: u32) -> &mut Node {
        &mut self.nodes[index as usize]
    }
}

/// The node of a key. It saturates only for keys that no slab in memory has.
fn index(key: u32) -> u32 {
    key.saturating_add(KEYS)
}
