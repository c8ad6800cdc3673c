//! One ring of frames: words that only grow counters lead through, one producer, one consumer, no
//! lock.
//!
//! The memory is words of 64 bits, each read and written by itself: whatever the other process does
//! meanwhile, a load gives some value and nothing worse. The words, of the part that the producer
//! writes:
//!
//! | words | hold |
//! |---|---|
//! | 0, 1, 2 | what this is ([`MAGIC`], with the version), words of frames (a power of two), devices |
//! | 3 | not 0: the producer is gone |
//! | 8 | words of frames put in so far |
//! | 16 + 4 n | of device n: its index, frames dropped that it received, and that it should send; the last is "any other" |
//! | then | frames: words of a head, then the bytes, each record behind the other, round and round |
//!
//! The consumer has a part of its own, of which it writes the first word: words of frames taken out
//! so far. The order:
//!
//! 1. *A frame is there before it is announced.* The producer writes the words of a record, then
//!    its counter with `Release`. The consumer reads the counter, then passes a fence with
//!    `Acquire`, then reads the record. (A load that acquires may not be made of memory that is
//!    mapped read-only; a relaxed one of a word, and a fence, may.)
//! 2. *A frame is not overwritten while it is read.* The consumer reads the words of a record, then
//!    writes its counter with `Release`. The producer reads that with `Acquire` before it writes to
//!    those words again.
//!
//! The producer reads the consumer's counter only when there seems to be no room. It believes it if
//! it lies between what it was before and what has been put in; anything else is no progress, and
//! in the end a full ring.

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

/// "mlanecap", and the version of the layout.
const MAGIC: u64 = u64::from_ne_bytes(*b"mlanecap") ^ VERSION;
const VERSION: u64 = 1;

const MAGIC_OFFSET: usize = 0;
const CAPACITY_OFFSET: usize = 1;
const DEVICES_OFFSET: usize = 2;
const CLOSED_OFFSET: usize = 3;
const PRODUCED_OFFSET: usize = 8;
const DEVICE_TABLE_OFFSET: usize = 16;
/// Words of a device: its index, two counters, one that is free.
const DEVICE_WORDS: usize = 4;
/// Words of the head of a record.
const RECORD_HEADER_WORDS: usize = 3;
/// The index of the last device, which stands for all that the ring has no counters for.
const IFINDEX_OTHER: u32 = 0;

/// Most devices of a ring.
const DEVICES_MAX: usize = 1024;
/// Bytes of a frame that are kept at most.
pub const SNAPLEN_MAX: usize = 65_535;

/// Whether a frame came in or went out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    /// Received.
    In,
    /// Sent.
    Out,
}

/// What is known of a frame beside its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHeader {
    /// Nanoseconds since 1970.
    pub time: u64,
    /// Index of the device.
    pub ifindex: u32,
    /// Queue of the device, below 2^31.
    pub queue: u32,
    /// In or out.
    pub direction: Direction,
    /// Bytes that the frame had; fewer may have been kept.
    pub len: u32,
}

/// Frames of one device for which a ring had no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropCounts {
    /// Index of the device; 0 for all that are not named.
    pub ifindex: u32,
    /// Frames that it received.
    pub received: u64,
    /// Frames that it was to send.
    pub sent: u64,
}

/// What was found in a ring cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CorruptRing(&'static str);

impl fmt::Display for CorruptRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for CorruptRing {}

/// Where the frames begin, in words.
fn header_words(devices: usize) -> usize {
    (DEVICE_TABLE_OFFSET + DEVICE_WORDS * (devices + 1)).next_multiple_of(16)
}

/// Words of a ring for so many devices and at least so many bytes of frames.
#[cfg(not(loom))]
pub(super) fn ring_words(devices: usize, bytes: usize) -> usize {
    // Room for the longest frame at least, so that what has no room now has it later.
    let words = (bytes / 8).max(RECORD_HEADER_WORDS + SNAPLEN_MAX.div_ceil(8)).next_power_of_two();
    header_words(devices.min(DEVICES_MAX)) + words
}

/// The side that puts frames in. `M` is the memory: words that somebody else may write at any time.
pub struct Producer<M: AsRef<[AtomicU64]>> {
    data: M,
    consumer_counter: M,
    /// The devices that have counters.
    devices: Vec<u32>,
    header: usize,
    capacity: u64,
    /// Put in, and announced.
    produced: u64,
    /// The consumer's counter when it was last believed.
    consumed: u64,
    staged: Option<Staged>,
}

/// A frame that was written, or had no room, and has not been settled.
struct Staged {
    /// Where the next one goes; none if there was no room.
    end: Option<u64>,
    /// Where a drop is counted.
    counter: usize,
}

impl<M: AsRef<[AtomicU64]>> Producer<M> {
    /// The producer of a new ring, in `data`: zeroes, as many as [`ring_words`] these devices says.
    /// What the other side writes is the first word of `consumer_counter`.
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
        // Release: who sees that this is a ring sees its sizes. (Who is given it later sees it
        // anyway.)
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

    /// Puts a frame in, of which `bytes` are kept ([`SNAPLEN_MAX`] at most), or counts it as
    /// dropped.
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
        let (wrapped, first) = frames.split_at((self.produced & (self.capacity - 1)) as usize);
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

    /// Lets the other side see the frame that was staged last, or counts that it had no room; if
    /// `real` is not, it never was.
    pub fn commit(&mut self, real: bool) {
        let Some(Staged { end, counter }) = self.staged.take() else { return };
        let words = self.data.as_ref();
        match end {
            _ if !real => {}
            Some(end) => {
                self.produced = end;
                // Release: the words of the record are there for whoever sees the counter (1).
                words[PRODUCED_OFFSET].store(end, Ordering::Release);
            }
            None => {
                // One writer: no atomic addition.
                let count = words[counter].load(Ordering::Relaxed);
                words[counter].store(count.wrapping_add(1), Ordering::Relaxed);
            }
        }
    }

    fn has_room(&mut self, needed: u64) -> bool {
        if self.capacity - (self.produced - self.consumed) >= needed {
            return true;
        }
        // Acquire: what has been taken is no longer read (2).
        let taken = self.consumer_counter.as_ref()[0].load(Ordering::Acquire);
        if (self.consumed..=self.produced).contains(&taken) {
            self.consumed = taken;
        }
        self.capacity - (self.produced - self.consumed) >= needed
    }
}

impl<M: AsRef<[AtomicU64]>> fmt::Debug for Producer<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { capacity, produced: put, consumed: taken, .. } = self;
        write!(f, "Producer {{ capacity: {capacity}, put: {put}, taken: {taken} }}")
    }
}

impl<M: AsRef<[AtomicU64]>> Drop for Producer<M> {
    /// Tells the other side that nothing more comes.
    fn drop(&mut self) {
        // Release: what was put in before is there for whoever sees this.
        self.data.as_ref()[CLOSED_OFFSET].store(1, Ordering::Release);
    }
}

/// The side that takes frames out.
pub struct Consumer<M> {
    data: M,
    consumer_counter: M,
    devices: usize,
    header: usize,
    capacity: u64,
    consumed: u64,
    /// The record that comes next, read and checked, and how many bytes of it were kept.
    next: Option<(RecordHeader, usize)>,
}

impl<M: AsRef<[AtomicU64]>> Consumer<M> {
    /// The consumer of a ring that somebody made; its first.
    ///
    /// # Errors
    /// When it is no ring, one of another version, or its sizes cannot be.
    pub(super) fn new(data: M, taken_by_us: M) -> Result<Self, CorruptRing> {
        let words = data.as_ref();
        let read = |at: usize| words.get(at).map_or(0, |word| word.load(Ordering::Relaxed));
        if read(MAGIC_OFFSET) != MAGIC || taken_by_us.as_ref().is_empty() {
            return Err(CorruptRing("the memory is no ring of frames that this version knows"));
        }
        fence(Ordering::Acquire);
        let (capacity, devices) = (read(CAPACITY_OFFSET), read(DEVICES_OFFSET));
        let devices = usize::try_from(devices).ok().filter(|devices| *devices <= DEVICES_MAX);
        let header = devices.map(header_words);
        match (devices, header) {
            (Some(devices), Some(header))
                if capacity.is_power_of_two()
                    && words.len() as u64 == (header as u64).saturating_add(capacity) =>
            {
                Ok(Self {
                    data,
                    consumer_counter: taken_by_us,
                    devices,
                    header,
                    capacity,
                    consumed: 0,
                    next: None,
                })
            }
            _ => Err(CorruptRing("the sizes of a ring of frames are wrong")),
        }
    }

    fn load(&self, at: usize) -> u64 {
        self.data.as_ref()[at].load(Ordering::Relaxed)
    }

    /// Word `at` of the frames, counted since the beginning.
    fn frame_word(&self, at: u64) -> u64 {
        self.load(self.header + (at & (self.capacity - 1)) as usize)
    }

    /// The frame that comes next; none if there is none yet.
    ///
    /// # Errors
    /// When what is there cannot be. It stays so: the ring is of no use any more.
    pub fn peek(&mut self) -> Result<Option<RecordHeader>, CorruptRing> {
        if let Some((head, _)) = self.next {
            return Ok(Some(head));
        }
        let put = self.load(PRODUCED_OFFSET);
        // With the counter comes what it announces (1).
        fence(Ordering::Acquire);
        let there = put.wrapping_sub(self.consumed);
        if there == 0 {
            return Ok(None);
        }
        if there > self.capacity || there < RECORD_HEADER_WORDS as u64 {
            return Err(CorruptRing("a ring of frames claims more than it can hold"));
        }
        let [sizes, time, place] = [0, 1, 2].map(|at| self.frame_word(self.consumed + at));
        let (kept, len) = (sizes as u32 as usize, (sizes >> 32) as u32);
        if kept > SNAPLEN_MAX
            || kept > len as usize
            || (RECORD_HEADER_WORDS + kept.div_ceil(8)) as u64 > there
        {
            return Err(CorruptRing("a frame in a ring has a length that cannot be"));
        }
        let direction = if place >> 63 == 1 { Direction::Out } else { Direction::In };
        let queue = (place >> 32) as u32 & 0x7fff_ffff;
        let head = RecordHeader { time, ifindex: place as u32, queue, direction, len };
        self.next = Some((head, kept));
        Ok(Some(head))
    }

    /// Takes the next frame: what was kept of it replaces what is in `bytes`.
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
        // Release: our reads come before whatever is written there next (2).
        self.consumer_counter.as_ref()[0].store(self.consumed, Ordering::Release);
        Ok(Some(head))
    }

    /// Whether the producer is gone, and all that it left was taken.
    ///
    /// # Errors
    /// As for [`peek`](Self::peek).
    pub fn is_finished(&mut self) -> Result<bool, CorruptRing> {
        let gone = self.load(CLOSED_OFFSET) != 0;
        // Before the counter is looked at: what was put in last is not overlooked.
        fence(Ordering::Acquire);
        Ok(gone && self.peek()?.is_none())
    }

    /// The frames that had no room so far.
    pub fn dropped(&self) -> impl Iterator<Item = DropCounts> + '_ {
        (0..=self.devices).map(|device| {
            let [ifindex, received, sent] =
                [0, 1, 2].map(|at| self.load(DEVICE_TABLE_OFFSET + DEVICE_WORDS * device + at));
            DropCounts { ifindex: ifindex as u32, received, sent }
        })
    }
}

impl<M> fmt::Debug for Consumer<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { capacity, consumed: taken, .. } = self;
        write!(f, "Consumer {{ capacity: {capacity}, taken: {taken} }}")
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
