//! Queues that change hands while lanes run.
//!
//! A queue goes from lane to lane as it is, with its rings and all that is in them: nothing is
//! closed, nothing is led elsewhere for a while, nothing is lost. The lane that has it gives it up
//! at the beginning of a batch, and the other one finds it in its mailbox at the beginning of one
//! of its own. Per batch a lane reads one word.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use manylane_sys::measure::EpollHandle;

use super::lane_queue::{LaneQueue, QueueId};

/// What a lane is to do with a queue that it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueueCommand {
    /// Give it to another lane.
    HandOff,
    /// Take what is in it, then close it: its device is gone.
    Close,
}

/// What waits for a lane.
#[derive(Default)]
pub(super) struct Content {
    pub(super) queues: Vec<LaneQueue>,
    pub(super) commands: Vec<(QueueId, QueueCommand)>,
}

/// The mailbox of a lane.
pub(super) struct Mailbox {
    /// There is something in it.
    has_mail: AtomicBool,
    content: Mutex<Content>,
    /// What the lane waits with: the frames of a queue that waits here wake it.
    epoll: EpollHandle,
}

impl Mailbox {
    pub(super) fn new(waits_with: EpollHandle) -> Self {
        Self { has_mail: AtomicBool::new(false), content: Mutex::default(), epoll: waits_with }
    }

    fn content(&self) -> MutexGuard<'_, Content> {
        // Nothing that holds the lock can panic half-way.
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the lane a queue.
    pub(super) fn push_queue(&self, queue: LaneQueue) {
        let mut content = self.content();
        if let Err(err) = self.epoll.add(&queue.xsk, queue.id.0) {
            // The lane still looks every few milliseconds.
            log::warn!("a lane is not woken by a queue that it was given: {err}");
        }
        content.queues.push(queue);
        self.has_mail.store(true, Ordering::Release);
    }

    /// Tells the lane what to do with a queue.
    pub(super) fn push_command(&self, queue: QueueId, order: QueueCommand) {
        self.content().commands.push((queue, order));
        self.has_mail.store(true, Ordering::Release);
    }

    /// Whether there is something in it.
    #[inline]
    pub(super) fn has_mail(&self) -> bool {
        self.has_mail.load(Ordering::Acquire)
    }

    /// Takes all that is in it.
    #[cold]
    pub(super) fn drain(&self) -> Content {
        let mut content = self.content();
        self.has_mail.store(false, Ordering::Relaxed);
        std::mem::take(&mut content)
    }
}
