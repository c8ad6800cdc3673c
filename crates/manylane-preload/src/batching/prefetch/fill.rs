//! Filling a prefetch from the kernel's queue, and when that pays.

use std::ptr;
use std::sync::atomic::Ordering;

use libc::{EAGAIN, MSG_DONTWAIT, c_int};

use super::buffer::{CLAIMS, FILLING, NOT_RECEIVED, PREFETCH_MAX, Prefetch, SOCKADDR_LEN_MAX};
use super::buffer::{end, next, next_generation};
use crate::base::real::{self, call};
use crate::shared::sock::{MULTI_LANE, Member, Shared};

/// Fills in a row with less than two datagrams after which only one receive in
/// [`PROBE_INTERVAL`] fills.
const CREDITS_MAX: u32 = 8;
const PROBE_INTERVAL: u32 = 8;

/// Result of a fill.
pub(crate) enum FillResult {
    /// The prefetch has datagrams.
    Ready,
    /// The kernel's queue is empty.
    Empty,
    /// The call failed; errno has the error.
    Failed,
    /// No fill is possible now, or in this lane: the caller must receive from the kernel.
    Skipped,
}

impl Prefetch {
    /// True if a fill should be tried now. A call for many datagrams costs more than a call for
    /// one, so it must have brought more than one of late, or be a probe.
    #[inline]
    pub(crate) fn should_fill(&self) -> bool {
        if self.credits.load(Ordering::Relaxed) > 0 {
            return true;
        }
        let passed = self.skipped.load(Ordering::Relaxed).wrapping_add(1);
        self.skipped.store(passed, Ordering::Relaxed);
        passed.is_multiple_of(PROBE_INTERVAL)
    }

    /// Records the result of a fill. A fill without a datagram takes a credit only if the caller
    /// `sleeps` next: then the call was one too many.
    fn update_credits(&self, count: usize, sleeps: bool) {
        let credits = self.credits.load(Ordering::Relaxed);
        let credits = match count {
            0 if !sleeps => credits,
            0 | 1 => credits.saturating_sub(1),
            _ => CREDITS_MAX,
        };
        self.credits.store(credits, Ordering::Relaxed);
    }

    /// Fills it from the lane's socket `fd`, for the owner.
    pub(crate) fn fill(&self, shared: &Shared, member: &Member, fd: c_int, sleeps: bool) -> FillResult {
        let mine = member.liveness.load(Ordering::Relaxed);
        if mine == 0 || self.recovered_state() & FILLING != 0 || !self.lock(mine) {
            return FillResult::Skipped;
        }
        let filled = self.fill_locked(shared, fd, sleeps);
        self.filler.store(0, Ordering::Release);
        filled
    }

    fn fill_locked(&self, shared: &Shared, fd: c_int, sleeps: bool) -> FillResult {
        let word = self.state.load(Ordering::SeqCst);
        if word & FILLING != 0 {
            // Left by a filler that died meanwhile.
            self.publish_received(word);
            return FillResult::Ready;
        }
        if next(word) < end(word) {
            return FillResult::Ready;
        }
        if word & CLAIMS != 0 {
            return FillResult::Skipped;
        }
        let filling = next_generation(word) | FILLING;
        let own = self.headers.get();
        // SAFETY: this process's own memory; there is no claim, and only the filler writes.
        let messages = unsafe {
            (*own).filling.store(filling, Ordering::Relaxed);
            &mut (*own).messages
        };
        for message in &mut *messages {
            message.msg_len = NOT_RECEIVED;
            message.msg_hdr.msg_namelen = SOCKADDR_LEN_MAX as u32;
        }
        let messages = messages.as_mut_ptr();
        if self.state.compare_exchange(word, filling, Ordering::SeqCst, Ordering::Relaxed).is_err() {
            return FillResult::Skipped;
        }
        // Either this load sees the changed mode, or the thread that changed it sees FILLING.
        if shared.mode.load(Ordering::SeqCst) != MULTI_LANE || shared.prefetch_off.load(Ordering::SeqCst) != 0
        {
            self.publish(filling, 0);
            return FillResult::Skipped;
        }
        let errno = real::errno();
        // SAFETY: `init` made the headers, which name memory of this prefetch; only the filler
        // writes to it.
        let got = unsafe { call::recvmmsg(fd, messages, PREFETCH_MAX as u32, MSG_DONTWAIT, ptr::null_mut()) };
        let count = self.publish_received(filling);
        self.update_credits(count, sleeps);
        if got >= 0 {
            return FillResult::Ready;
        }
        if real::errno() != EAGAIN {
            return FillResult::Failed;
        }
        real::set_errno(errno);
        FillResult::Empty
    }
}
