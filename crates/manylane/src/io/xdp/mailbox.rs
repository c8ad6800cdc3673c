//! Moves queues between lanes while they run.
//!
//! A queue moves from lane to lane as it is, with its rings and their content. Nothing is closed
//! or redirected for a while, and nothing is lost. The old lane gives it up at the beginning of a
//! batch; the new one finds it in its mailbox at the beginning of one. Per batch a lane reads one
//! word.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use manylane_sys::epoll::EpollHandle;

use super::lane_queue::{LaneQueue, QueueId};

/// A command to a lane about one of its queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueueCommand {
    /// Hand the queue over to another lane.
    HandOff,
    /// Drain the queue, then close it: its device is gone.
    Close,
}

/// The content of a mailbox.
#[derive(Default)]
pub(super) struct Content {
    pub(super) queues: Vec<LaneQueue>,
    pub(super) commands: Vec<(QueueId, QueueCommand)>,
}

/// The mailbox of a lane.
pub(super) struct Mailbox {
    /// The mailbox is not empty.
    has_mail: AtomicBool,
    content: Mutex<Content>,
    /// The epoll that the lane waits on. Frames of a queue in the mailbox wake the lane too.
    epoll: EpollHandle,
}

impl Mailbox {
    pub(super) fn new(waits_with: EpollHandle) -> Self {
        Self { has_mail: AtomicBool::new(false), content: Mutex::default(), epoll: waits_with }
    }

    fn content(&self) -> MutexGuard<'_, Content> {
        // No critical section can panic half-way.
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Delivers a queue to the lane.
    pub(super) fn push_queue(&self, queue: LaneQueue) {
        let mut content = self.content();
        if let Err(err) = self.epoll.add(&queue.xsk, queue.id.0) {
            // The lane still polls every few milliseconds.
            log::warn!("a lane does not wake up for a queue that it was assigned: {err}");
        }
        content.queues.push(queue);
        self.has_mail.store(true, Ordering::Release);
    }

    /// Sends the lane a command about one of its queues.
    pub(super) fn push_command(&self, queue: QueueId, order: QueueCommand) {
        self.content().commands.push((queue, order));
        self.has_mail.store(true, Ordering::Release);
    }

    /// True if it is not empty.
    #[inline]
    pub(super) fn has_mail(&self) -> bool {
        self.has_mail.load(Ordering::Acquire)
    }

    /// Removes and returns the content.
    #[cold]
    pub(super) fn drain(&self) -> Content {
        let mut content = self.content();
        self.has_mail.store(false, Ordering::Relaxed);
        std::mem::take(&mut content)
    }
}
