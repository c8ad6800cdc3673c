//! One ring of frames: words addressed by counters that only grow, one producer, one consumer, no
//! lock.
//!
//! The memory is 64-bit words, each read and written individually: whatever the other process does
//! meanwhile, a load returns some value, and nothing worse happens. `abi/manylane_capture.h` has
//! their layout. The consumer has a part of its own, of which it writes the first word: words of
//! frames consumed so far. The order:
//!
//! 1. *A frame is written before it is announced.* The producer writes the words of a record, then
//!    its counter with `Release`. The consumer reads the counter, then passes a fence with
//!    `Acquire`, then reads the record. (An acquire load is not allowed on memory that is mapped
//!    read-only; a relaxed load of a word, and a fence, are.)
//! 2. *A frame is not overwritten while it is read.* The consumer reads the words of a record,
//!    then writes its counter with `Release`. The producer reads that with `Acquire` before it
//!    writes to those words again.
//!
//! The producer reads the consumer's counter only when there seems to be no room. It accepts a
//! value between the last one and what has been produced. Anything else counts as no progress, and
//! in the end as a full ring.

use std::fmt;

use sync::{AtomicU64, Ordering, fence};

#[cfg(not(loom))]
mod sync {
    pub(super) use std::sync::atomic::{AtomicU64, Ordering, fence};
}

#[cfg(loom)]
mod sync {
    pub(super) use loom::sync::atomic::{AtomicU64, Ordering, fence};
}

/// "mlanecap", and the version of the layout (`struct mlc_ring`).
const MAGIC: u64 = u64::from_ne_bytes(*b"mlanecap") ^ VERSION;
const VERSION: u64 = 1;

const MAGIC_OFFSET: usize = 0;
const CAPACITY_OFFSET: usize = 1;
const DEVICES_OFFSET: usize = 2;
const CLOSED_OFFSET: usize = 3;
const PRODUCED_OFFSET: usize = 8;
const DEVICE_TABLE_OFFSET: usize = 16;
/// Words per device: its index, two counters, one unused (`struct mlc_device`).
const DEVICE_WORDS: usize = 4;
/// Words of a record's header (`struct mlc_record`).
const RECORD_HEADER_WORDS: usize = 3;
/// Index of the last device entry, which stands for all devices without counters.
const IFINDEX_OTHER: u32 = 0;

/// Maximum number of devices of a ring.
const DEVICES_MAX: usize = 1024;
/// Maximum number of bytes kept of a frame.
pub const SNAPLEN_MAX: usize = 65_535;

/// Direction of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    /// Received.
    In,
    /// Sent.
    Out,
}

/// Metadata of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHeader {
    /// Nanoseconds since 1970.
    pub time: u64,
    /// Index of the device.
    pub ifindex: u32,
    /// Queue number, below 2^31.
    pub queue: u32,
    /// Direction.
    pub direction: Direction,
    /// Length of the frame; fewer bytes may be kept.
    pub len: u32,
}

/// Frames of one device that were dropped because the ring was full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropCounts {
    /// Index of the device; 0 for all devices without counters.
    pub ifindex: u32,
    /// Received frames.
    pub received: u64,
    /// Frames to be sent.
    pub sent: u64,
}

/// A ring has invalid content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CorruptRing(&'static str);

impl fmt::Display for CorruptRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for CorruptRing {}

/// Offset of the frames, in words.
fn header_words(devices: usize) -> usize {
    (DEVICE_TABLE_OFFSET + DEVICE_WORDS * (devices + 1)).next_multiple_of(16)
}

/// Words of a ring for this many devices and at least this many bytes of frames.
#[cfg(not(loom))]
pub(super) fn ring_words(devices: usize, bytes: usize) -> usize {
    // At least the longest frame, so that each frame fits once the ring has been read.
    let words = (bytes / 8).max(RECORD_HEADER_WORDS + SNAPLEN_MAX.div_ceil(8)).next_power_of_two();
    header_words(devices.min(DEVICES_MAX)) + words
}

/// Index of word `at` of the frames, counted from the beginning.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "less than the number of words in memory")]
fn word_index(at: u64, capacity: u64) -> usize {
    (at & (capacity - 1)) as usize
}

/// Words that are possibly read-only: all loads are relaxed.
pub trait Words {
    /// Number of words.
    fn len(&self) -> usize;
    /// Reads a word.
    fn load(&self, index: usize) -> u64;
}

/// The producer. `M` is the memory: words that another process may write at any time.
pub struct Producer<M: AsRef<[AtomicU64]>> {
    data: M,
    consumer_counter: M,
    /// The devices with counters.
    devices: Vec<u32>,
    header: usize,
    capacity: u64,
    /// Words produced and announced.
    produced: u64,
    /// The consumer's counter when it was last accepted.
    consumed: u64,
    staged: Option<Staged>,
}

/// A frame that was staged, or found no room, and is not committed yet.
struct Staged {
    /// End of the record; none if there was no room.
    end: Option<u64>,
    /// Counter for a drop.
    counter: usize,
}

impl<M: AsRef<[AtomicU64]>> Producer<M> {
    /// The producer of a new ring in `data`: zeros, with the length that [`ring_words`] returns.
    /// The consumer writes the first word of `consumer_counter`.
    pub(super) fn new(data: M, taken_by_other: M, devices: &[u32]) -> Self {
        let devices = devices[..devices.len().min(DEVICES_MAX)].to_vec();
        let header = header_words(devices.len());
        let words = data.as_ref();
        let capacity = words.len() - header;
        assert!(capacity.is_power_of_two() && !taken_by_other.as_ref().is_empty());
        words[CAPACITY_OFFSET].store(capacity as u64, Ordering::Relaxed);
        words[DEVICES_OFFSET].store(devices.len() as u64, Ordering::Relaxed);
        for (at, ifindex) in devices.iter().chain([&IFINDEX_OTHER]).enumerate() {
            words[DEVICE_TABLE_OFFSET + DEVICE_WORDS * at].store(u64::from(*ifindex), Ordering::Relaxed);
        }
        // Release: a process that sees the magic number sees the sizes. (One that is given the
        // ring later sees them anyway.)
        words[MAGIC_OFFSET].store(MAGIC, Ordering::Release);
        Self {
            data,
            consumer_counter: taken_by_other,
            devices,
            header,
            capacity: capacity as u64,
            produced: 0,
            consumed: 0,
            staged: None,
        }
    }

    /// Writes a frame, keeping `bytes` (at most [`SNAPLEN_MAX`]), or counts it as dropped.
    pub fn record(&mut self, head: &RecordHeader, bytes: &[u8]) {
        self.stage(head, bytes);
        self.commit(true);
    }

    /// Writes a frame that the consumer cannot see until it is [committed](Self::commit).
    pub fn stage(&mut self, head: &RecordHeader, bytes: &[u8]) {
        let bytes = &bytes[..bytes.len().min(SNAPLEN_MAX)];
        let needed = (RECORD_HEADER_WORDS + bytes.len().div_ceil(8)) as u64;
        let device =
            self.devices.iter().position(|known| *known == head.ifindex).unwrap_or(self.devices.len());
        let counter =
            DEVICE_TABLE_OFFSET + DEVICE_WORDS * device + 1 + usize::from(head.direction == Direction::Out);
        let end = self.has_room(needed).then(|| self.produced + needed);
        self.staged = Some(Staged { end, counter });
        if end.is_none() {
            return;
        }
        let frames = &self.data.as_ref()[self.header..];
        let (wrapped, first) = frames.split_at(word_index(self.produced, self.capacity));
        let out = u64::from(head.direction == Direction::Out) << 63;
        let queue = u64::from(head.queue & 0x7fff_ffff) << 32;
        let words = [
            bytes.len() as u64 | u64::from(head.len) << 32,
            head.time,
            u64::from(head.ifindex) | queue | out,
        ];
        let (chunks, rest) = bytes.as_chunks();
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        let words = words
            .into_iter()
            .chain(chunks.iter().map(|chunk| u64::from_ne_bytes(*chunk)))
            .chain((!rest.is_empty()).then(|| u64::from_ne_bytes(last)));
        for (slot, word) in first.iter().chain(wrapped).zip(words) {
            slot.store(word, Ordering::Relaxed);
        }
    }

    /// Announces the last staged frame, or counts its drop if there was no room; discards it
    /// unless it is `real`.
    pub fn commit(&mut self, real: bool) {
        let Some(Staged { end, counter }) = self.staged.take() else { return };
        let words = self.data.as_ref();
        match end {
            _ if !real => {}
            Some(end) => {
                self.produced = end;
                // Release: a consumer that sees the counter sees the words of the record (1).
                words[PRODUCED_OFFSET].store(end, Ordering::Release);
            }
            None => {
                // Only one writer: no atomic addition is needed.
                let count = words[counter].load(Ordering::Relaxed);
                words[counter].store(count.wrapping_add(1), Ordering::Relaxed);
            }
        }
    }

    fn has_room(&mut self, needed: u64) -> bool {
        if self.capacity - (self.produced - self.consumed) >= needed {
            return true;
        }
        // Acquire: consumed words are no longer being read (2).
        let consumed = self.consumer_counter.as_ref()[0].load(Ordering::Acquire);
        if (self.consumed..=self.produced).contains(&consumed) {
            self.consumed = consumed;
        }
        self.capacity - (self.produced - self.consumed) >= needed
    }
}

impl<M: AsRef<[AtomicU64]>> fmt::Debug for Producer<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { capacity, produced, consumed, .. } = self;
        write!(f, "Producer {{ capacity: {capacity}, produced: {produced}, consumed: {consumed} }}")
    }
}

impl<M: AsRef<[AtomicU64]>> Drop for Producer<M> {
    /// Announces that no more frames will follow.
    fn drop(&mut self) {
        // Release: a consumer that sees this sees all frames before it.
        self.data.as_ref()[CLOSED_OFFSET].store(1, Ordering::Release);
    }
}

/// The consumer. `D` is the producer's memory, `M` its own.
pub struct Consumer<D, M> {
    data: D,
    consumer_counter: M,
    devices: usize,
    header: usize,
    capacity: u64,
    consumed: u64,
    /// The producer's counter at the stop: nothing after it is read.
    end: Option<u64>,
    /// The next record, read and checked, and the number of bytes kept.
    next: Option<(RecordHeader, usize)>,
}

impl<D: Words, M: AsRef<[AtomicU64]>> Consumer<D, M> {
    /// The first consumer of a ring that another process made.
    ///
    /// # Errors
    /// If it is no ring, has another version, or invalid sizes.
    pub(super) fn new(data: D, taken_by_us: M) -> Result<Self, CorruptRing> {
        let read = |at: usize| if at < data.len() { data.load(at) } else { 0 };
        if read(MAGIC_OFFSET) != MAGIC || taken_by_us.as_ref().is_empty() {
            return Err(CorruptRing("the memory is not a ring of frames of this version"));
        }
        fence(Ordering::Acquire);
        let (capacity, devices) = (read(CAPACITY_OFFSET), read(DEVICES_OFFSET));
        let devices = usize::try_from(devices).ok().filter(|devices| *devices <= DEVICES_MAX);
        let header = devices.map(header_words);
        match (devices, header) {
            (Some(devices), Some(header))
                if capacity.is_power_of_two()
                    && data.len() as u64 == (header as u64).saturating_add(capacity) =>
            {
                Ok(Self {
                    data,
                    consumer_counter: taken_by_us,
                    devices,
                    header,
                    capacity,
                    consumed: 0,
                    end: None,
                    next: None,
                })
            }
            _ => Err(CorruptRing("the sizes of a ring of frames are wrong")),
        }
    }

    fn load(&self, at: usize) -> u64 {
        self.data.load(at)
    }

    /// Word `at` of the frames, counted from the beginning.
    fn frame_word(&self, at: u64) -> u64 {
        self.load(self.header + word_index(at, self.capacity))
    }

    /// Ends the ring after the frames announced so far. Later ones are not read, so that a producer
    /// that never stops cannot keep the consumer busy.
    pub fn stop(&mut self) {
        self.end = Some(self.load(PRODUCED_OFFSET));
    }

    /// The next frame; none if there is none yet.
    ///
    /// # Errors
    /// If the content is invalid. The ring is then unusable for good.
    pub fn peek(&mut self) -> Result<Option<RecordHeader>, CorruptRing> {
        if let Some((head, _)) = self.next {
            return Ok(Some(head));
        }
        let put = self.end.unwrap_or_else(|| self.load(PRODUCED_OFFSET));
        // With the counter, what it announces is visible (1).
        fence(Ordering::Acquire);
        let there = put.wrapping_sub(self.consumed);
        if there == 0 {
            return Ok(None);
        }
        if there > self.capacity || there < RECORD_HEADER_WORDS as u64 {
            return Err(CorruptRing("a ring of frames claims more than it can hold"));
        }
        let [sizes, time, place] = [0, 1, 2].map(|at| self.frame_word(self.consumed + at));
        let (kept, len) = ((sizes & 0xffff_ffff) as usize, (sizes >> 32) as u32);
        if kept > SNAPLEN_MAX
            || kept > len as usize
            || (RECORD_HEADER_WORDS + kept.div_ceil(8)) as u64 > there
        {
            return Err(CorruptRing("invalid length of a frame in a ring"));
        }
        let direction = if place >> 63 == 1 { Direction::Out } else { Direction::In };
        let queue = (place >> 32) as u32 & 0x7fff_ffff;
        let head = RecordHeader { time, ifindex: (place & 0xffff_ffff) as u32, queue, direction, len };
        self.next = Some((head, kept));
        Ok(Some(head))
    }

    /// Reads the next frame; its kept bytes replace the content of `bytes`.
    ///
    /// # Errors
    /// As for [`peek`](Self::peek).
    pub fn pop(&mut self, bytes: &mut Vec<u8>) -> Result<Option<RecordHeader>, CorruptRing> {
        self.peek()?;
        let Some((head, kept)) = self.next.take() else { return Ok(None) };
        let words = kept.div_ceil(8) as u64;
        let start = self.consumed + RECORD_HEADER_WORDS as u64;
        bytes.clear();
        bytes.extend((start..start + words).flat_map(|at| self.frame_word(at).to_ne_bytes()));
        bytes.truncate(kept);
        self.consumed = start + words;
        // Release: our reads come before later writes of these words (2).
        self.consumer_counter.as_ref()[0].store(self.consumed, Ordering::Release);
        Ok(Some(head))
    }

    /// True if the producer is gone, and all its frames were read.
    ///
    /// # Errors
    /// As for [`peek`](Self::peek).
    pub fn is_finished(&mut self) -> Result<bool, CorruptRing> {
        let gone = self.load(CLOSED_OFFSET) != 0;
        // Before the counter is read, so that the last frames are not missed.
        fence(Ordering::Acquire);
        Ok(gone && self.peek()?.is_none())
    }

    /// Frames dropped so far for lack of room.
    pub fn dropped(&self) -> impl Iterator<Item = DropCounts> + '_ {
        (0..=self.devices).map(|device| {
            let [ifindex, received, sent] =
                [0, 1, 2].map(|at| self.load(DEVICE_TABLE_OFFSET + DEVICE_WORDS * device + at));
            DropCounts { ifindex: u32::try_from(ifindex).unwrap_or(IFINDEX_OTHER), received, sent }
        })
    }
}

impl<D, M> fmt::Debug for Consumer<D, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { capacity, consumed, .. } = self;
        write!(f, "Consumer {{ capacity: {capacity}, consumed: {consumed} }}")
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
