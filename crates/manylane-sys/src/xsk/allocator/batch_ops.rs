//! Operations on all packets of a batch, once a batch with the lock held: loops for the ordinary
//! case, which keep their counts in registers. Anything else is left to the single-step
//! operations.

use libc::xdp_desc;

use super::{AllocatorGuard, Inner};
use crate::xsk::frames::{FrameState, MemberId, Packet, StateWord};
use crate::xsk::ring::Consumer;

/// Prefetches the cache line at `at`.
#[inline]
fn prefetch_cacheline(at: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a hint, which has no visible effect and never faults.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}

/// Returned credits, mostly of one member: accumulated until a credit of another member is added.
#[derive(Default)]
struct ReturnedCredits {
    member: MemberId,
    count: u32,
}

impl ReturnedCredits {
    /// Adds a credit of `member`. Returns the credits to book first, if those were another
    /// member's.
    #[inline]
    fn add(&mut self, member: MemberId) -> Option<Self> {
        if self.member == member {
            self.count += 1;
            return None;
        }
        Some(std::mem::replace(self, Self { member, count: 1 }))
    }
}

impl AllocatorGuard<'_> {
    /// Reclaims the frames that the kernel has sent, of all members, and returns their number. A
    /// frame in a batch stays held until the end of the batch, because its payload may be
    /// borrowed; the others become free. Invalid completions are counted, and change nothing.
    #[inline]
    pub(in crate::xsk) fn reap(&mut self) -> u32 {
        let (frames, inner) = (self.frames, &mut *self.inner);
        let Inner { completion, free, slots: accounts, granted, invalid, .. } = inner;
        let mut book = |ReturnedCredits { member, count }: ReturnedCredits| {
            if let Some(account) = accounts.get_mut(usize::from(member)) {
                account.granted -= count;
                *granted -= count;
            }
        };
        let mut returned = ReturnedCredits::default();
        // Bounded, for a kernel that fills the ring as fast as it is emptied.
        let entries = completion.entries();
        let reaped = completion.pop_while(entries, |addr| {
            let frame = frames.frame_of(addr);
            let place = frame.map_or(StateWord::FREE, |frame| frames.state(frame));
            match (frame, place.state()) {
                (Some(frame), FrameState::HeldSending) => {
                    frames.set_state(frame, StateWord::new(FrameState::HeldSent, place.member()))
                }
                (Some(frame), FrameState::Sending) => {
                    frames.set_state(frame, StateWord::FREE);
                    free.push(frame);
                }
                _ => {
                    *invalid += 1;
                    return true;
                }
            }
            if let Some(others) = returned.add(place.member()) {
                book(others);
            }
            true
        });
        book(returned);
        completion.release();
        reaped
    }

    /// Held to filling, for the packets of a batch that ends, as far as the kernel lacks frames:
    /// those that were not sent, and those that were sent and reclaimed. The remaining ones, from
    /// the first other frame on, go through [`release_held`](Self::release_held).
    #[inline]
    pub(in crate::xsk) fn end_batch(&mut self, member: MemberId, batch: &[Packet]) {
        let (frames, inner) = (self.frames, &mut *self.inner);
        let lacking = inner.fill_target.saturating_sub(inner.filling) as usize;
        let (frames, held) = (frames.batch_frames(), StateWord::new(FrameState::Held, member));
        let usual = &batch[..batch.len().min(lacking)];
        // Each frame that the kernel has to receive into was in the ring once. Each frame in an RX
        // ring was taken out of it before the kernel reported the packet.
        inner.fill.assume_pending_max(inner.filling);
        let back = inner.fill.push_from(usual, |packet| frames.refill(packet.frame, held));
        inner.filling += back;
        for packet in &batch[back as usize..] {
            self.release_held(member, packet.frame);
        }
    }

    /// Filling to held, for as many packets as `batch` has room for; returns their number. Stops
    /// before a descriptor that is invalid or not a whole packet.
    #[inline]
    pub(in crate::xsk) fn hold_batch(
        &mut self,
        member: MemberId,
        rx: &mut Consumer<xdp_desc>,
        batch: &mut [Packet],
    ) -> usize {
        let frames = self.frames.batch_frames();
        let held = StateWord::new(FrameState::Held, member);
        let taken = rx.pop_into(batch, |desc, packet| {
            let is_taken = desc.options == 0 && frames.accept_desc(&desc, held, packet);
            if is_taken {
                // Another core has written it: prefetch all lines of a batch before the first is
                // read.
                prefetch_cacheline(packet.start);
            }
            is_taken
        });
        self.inner.filling -= taken;
        taken as usize
    }
}
