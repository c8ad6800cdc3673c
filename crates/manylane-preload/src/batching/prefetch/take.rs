//! Taking datagrams out of a prefetch.

use std::sync::atomic::Ordering;

use libc::{MSG_PEEK, c_int};

use super::buffer::{CLAIM, FILLING, PREFETCH_MAX, Prefetch, SOCKADDR_LEN_MAX, end, next};
use crate::base::recv_bufs::RecvBufs;
use crate::shared::thread;

/// Yields while another thread fills.
const SPIN_LIMIT: u32 = 64;

impl Prefetch {
    /// Takes or peeks at the next datagrams for a call of the program. Returns the call's result.
    ///
    /// The loop is that of `LeftoverQueue::recv`. With one for both, the compiler no longer makes
    /// the first datagram a path of its own.
    pub(crate) fn recv(&self, flags: c_int, into: &RecvBufs<'_>) -> Option<isize> {
        let mut answer = None;
        // As in the kernel: a peek at several messages returns the same one several times.
        for nth in 0..into.capacity() {
            if nth > 0 && into.is_invalid(nth, flags) {
                break;
            }
            let Some(slot) = self.claim(flags & MSG_PEEK == 0) else { break };
            let got = into.write(nth, &self.datagram(slot), flags);
            self.state.fetch_sub(CLAIM, Ordering::Release);
            if got < 0 {
                return answer.or(Some(got));
            }
            answer = Some(if into.is_mmsg() { nth as isize + 1 } else { got });
        }
        answer
    }

    /// Length of the next datagram.
    pub(super) fn next_len(&self) -> Option<usize> {
        let slot = self.claim(false)?;
        let (len, _) = self.lens(slot);
        self.state.fetch_sub(CLAIM, Ordering::Release);
        Some(len)
    }

    /// Claims the slot of the next datagram. No thread writes to it until the claim is returned.
    #[inline]
    pub(super) fn claim(&self, takes: bool) -> Option<usize> {
        let mut retries = 0;
        loop {
            let word = self.recovered_state();
            if word & FILLING != 0 {
                retries += 1;
                let mine = thread::acquired_liveness();
                if retries > SPIN_LIMIT || mine != 0 && self.filler.load(Ordering::Relaxed) == mine {
                    return None;
                }
                std::thread::yield_now();
                continue;
            }
            if next(word) >= end(word) {
                return None;
            }
            let claimed = word + CLAIM + u64::from(takes);
            if self.state.compare_exchange_weak(word, claimed, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return Some(next(word));
            }
        }
    }

    /// True if a datagram taken from the current fill came from this address. Only for the owner,
    /// who alone fills.
    #[inline]
    pub(crate) fn has_delivered_from(&self, name: &[u8]) -> bool {
        let word = self.state.load(Ordering::Acquire);
        // The last one first: most servers answer a datagram before they take the next.
        word & FILLING == 0
            && (0..next(word).min(PREFETCH_MAX)).rev().any(|slot| {
                // SAFETY: within the array; written during the fill, and not since.
                let of_slot = unsafe { &*self.slot(slot).0.cast::<[u8; SOCKADDR_LEN_MAX]>() };
                of_slot.get(..name.len()) == Some(name)
            })
    }
}
