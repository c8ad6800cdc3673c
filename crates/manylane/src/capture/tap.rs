//! The lane's side of a capture: its ring, if there is one, and the mailbox through which rings
//! are exchanged.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{SystemTime, UNIX_EPOCH};

use manylane_ipc::capture::{Direction, Producer, RecordHeader};

/// The ring into which a lane copies frames.
pub(super) struct Ring {
    pub(super) producer: Producer,
    /// Bytes of a frame that are kept.
    pub(super) snaplen: usize,
}

/// The mailbox of a lane.
#[derive(Default)]
pub(crate) struct Mailbox {
    /// Incremented with each post. The one word that a lane reads per batch.
    version: AtomicU32,
    slot: Mutex<Slot>,
}

#[derive(Default)]
struct Slot {
    version: u32,
    /// The new ring of the lane; after the lane has taken it, its old one.
    ring: Option<Ring>,
    /// A post that the lane has not seen yet.
    is_pending: bool,
}

impl Mailbox {
    fn slot(&self) -> MutexGuard<'_, Slot> {
        // Nothing that holds the lock can panic.
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Posts a ring, or none, for the lane's next batch.
    pub(super) fn set_ring(&self, ring: Option<Ring>) {
        let old = {
            let mut slot = self.slot();
            slot.version = slot.version.wrapping_add(1);
            slot.is_pending = true;
            self.version.store(slot.version, Ordering::Release);
            std::mem::replace(&mut slot.ring, ring)
        };
        // Unmapped outside of the lock, for which the lane may be waiting.
        drop(old);
    }

    /// Unmaps the ring that the lane has left here; false if the lane has not seen the last post
    /// yet.
    pub(super) fn reclaim(&self) -> bool {
        let (left, is_unseen) = {
            let mut slot = self.slot();
            let is_unseen = slot.is_pending;
            (slot.ring.take_if(|_| !is_unseen), is_unseen)
        };
        drop(left);
        !is_unseen
    }
}

/// A lane's capture state. Does nothing without a mailbox.
#[derive(Default)]
pub(crate) struct Tap {
    mailbox: Option<Arc<Mailbox>>,
    /// The version of the mailbox that the lane has seen.
    seen_version: u32,
    ring: Option<Ring>,
    /// Device, queue and time of the frames to be sent next (time 0: the clock has not been read
    /// yet).
    tx_meta: (u32, u32, u64),
}

impl Tap {
    pub(super) fn new(mailbox: Arc<Mailbox>) -> Self {
        Self { mailbox: Some(mailbox), ..Self::default() }
    }

    /// Checks for a posted ring. To be called once a batch.
    #[inline]
    pub(crate) fn refresh(&mut self) {
        if let Some(mailbox) = &self.mailbox
            && mailbox.version.load(Ordering::Relaxed) != self.seen_version
        {
            self.swap_ring();
        }
    }

    /// Takes the posted ring and leaves the old one.
    #[cold]
    fn swap_ring(&mut self) {
        let Some(mailbox) = &self.mailbox else { return };
        let mut slot = match mailbox.slot.try_lock() {
            Ok(slot) => slot,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // A post is in progress: retry at the next batch.
            Err(TryLockError::WouldBlock) => return,
        };
        // The version under the lock decides; the one read before may be older.
        if slot.version != self.seen_version {
            self.seen_version = slot.version;
            slot.is_pending = false;
            std::mem::swap(&mut slot.ring, &mut self.ring);
        }
    }

    /// True if frames are captured.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        self.ring.is_some()
    }

    /// Records frames received from a queue, unmodified.
    #[inline]
    pub(crate) fn record_rx<'a>(&mut self, ifindex: u32, queue: u32, frames: impl Iterator<Item = &'a [u8]>) {
        if let Some(ring) = &mut self.ring {
            let time = now();
            for frame in frames {
                let head =
                    RecordHeader { time, ifindex, queue, direction: Direction::In, len: frame.len() as u32 };
                ring.producer.record(&head, &frame[..frame.len().min(ring.snaplen)]);
            }
        }
    }

    /// Sets the queue by which the following frames are sent.
    #[inline]
    pub(crate) fn set_tx_queue(&mut self, ifindex: u32, queue: u32) {
        self.tx_meta = (ifindex, queue, 0);
    }

    /// Stages a frame that is about to be put into the TX ring. [`commit_tx`](Self::commit_tx)
    /// then records it if that worked. Staged before, because after the put the lane no longer
    /// owns the frame's bytes.
    #[inline]
    pub(crate) fn stage_tx(&mut self, frame: &[u8]) {
        if let Some(ring) = &mut self.ring {
            let (ifindex, queue, time) = &mut self.tx_meta;
            if *time == 0 {
                *time = now();
            }
            let (ifindex, queue, time) = (*ifindex, *queue, *time);
            let head =
                RecordHeader { time, ifindex, queue, direction: Direction::Out, len: frame.len() as u32 };
            ring.producer.stage(&head, &frame[..frame.len().min(ring.snaplen)]);
        }
    }

    /// Records the staged frame if it is in the TX ring. Returns `is_sent`.
    #[inline]
    pub(crate) fn commit_tx(&mut self, is_sent: bool) -> bool {
        if let Some(ring) = &mut self.ring {
            ring.producer.commit(is_sent);
        }
        is_sent
    }
}

/// Nanoseconds since 1970; 0 before 1970.
fn now() -> u64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use manylane_ipc::capture::{self, Consumer};

    use super::*;

    fn ring() -> (Ring, Consumer) {
        let (producer, files) = capture::create(&[3], 0).unwrap();
        (Ring { producer, snaplen: 4 }, capture::open(&files, 1, 0).unwrap())
    }

    #[test]
    fn a_lane_attaches_uses_and_detaches_a_ring() {
        let mailbox = Arc::new(Mailbox::default());
        let mut tap = Tap::new(Arc::clone(&mailbox));
        let frame = |tap: &mut Tap| {
            tap.refresh();
            tap.record_rx(3, 1, [&b"received"[..]].into_iter());
            tap.set_tx_queue(3, 1);
            tap.stage_tx(b"sent");
            tap.commit_tx(true);
            tap.stage_tx(b"not sent");
            tap.commit_tx(false);
        };
        frame(&mut tap);
        let (ours, mut theirs) = ring();
        mailbox.set_ring(Some(ours));
        assert!(!mailbox.reclaim(), "the lane has not been there");
        frame(&mut tap);
        let mut bytes = Vec::new();
        let head = theirs.pop(&mut bytes).unwrap().unwrap();
        assert_eq!((head.direction, head.len, bytes.as_slice()), (Direction::In, 8, &b"rece"[..]));
        let head = theirs.pop(&mut bytes).unwrap().unwrap();
        assert_eq!((head.direction, head.len, bytes.as_slice()), (Direction::Out, 4, &b"sent"[..]));
        assert_eq!(theirs.pop(&mut bytes), Ok(None));
        assert!(mailbox.reclaim());
        mailbox.set_ring(None);
        assert!(!mailbox.reclaim());
        assert_eq!(theirs.is_finished(), Ok(false), "the lane still has it");
        frame(&mut tap);
        assert_eq!(theirs.pop(&mut bytes), Ok(None));
        assert_eq!(theirs.is_finished(), Ok(false), "left, not unmapped yet");
        assert!(mailbox.reclaim());
        assert_eq!(theirs.is_finished(), Ok(true));
    }

    /// Captures that end before a lane polls its mailbox, and a lane that closes with its ring.
    #[test]
    fn a_late_or_removed_lane_keeps_no_ring() {
        let mailbox = Arc::new(Mailbox::default());
        let mut tap = Tap::new(Arc::clone(&mailbox));
        let ((first, mut of_first), (second, mut of_second)) = (ring(), ring());
        mailbox.set_ring(Some(first));
        mailbox.set_ring(None);
        assert_eq!(of_first.is_finished(), Ok(true), "it was not recorded");
        mailbox.set_ring(Some(second));
        tap.refresh();
        let (third, mut of_third) = ring();
        mailbox.set_ring(Some(third));
        tap.refresh();
        assert!(mailbox.reclaim());
        assert_eq!((of_second.is_finished(), of_third.is_finished()), (Ok(true), Ok(false)));
        drop(tap);
        assert_eq!(of_third.is_finished(), Ok(true));
    }
}
