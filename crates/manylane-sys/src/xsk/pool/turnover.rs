//! What is done with the lock once a batch for each of its packets, as long as nothing about them is out of the
//! ordinary: loops that keep their counts in registers. Anything else they leave to the same steps one by one.

use libc::xdp_desc;

use super::Locked;
use crate::xsk::frames::{Kind, Member, Packet, Place};
use crate::xsk::ring::Consumer;

/// Asks for the cache line at `at`.
#[inline]
fn prefetch(at: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a hint, which reads nothing that the program could see, and never faults.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}

impl Locked<'_> {
    /// Held to filling, for the packets of a batch that ends, as far as the kernel lacks frames. From the first on that
    /// was sent, or that the kernel need not have, [`end_hold`](Self::end_hold) says what becomes of them.
    #[inline]
    pub(in crate::xsk) fn end_batch(&mut self, me: Member, batch: &[Packet]) {
        let (frames, inner) = (self.frames, &mut *self.inner);
        let held = Place::of(Kind::Held, me);
        let lacking = inner.receiving.saturating_sub(inner.filling);
        let mut fill = inner.fill.puts(lacking.min(batch.len() as u32));
        let mut back = 0;
        for packet in batch {
            if frames.place(packet.frame) != held || !fill.put(frames.addr(packet.frame)) {
                break;
            }
            frames.put(packet.frame, Place::FILLING);
            back += 1;
        }
        drop(fill);
        inner.filling += back;
        for packet in &batch[back as usize..] {
            self.end_hold(me, packet.frame);
        }
    }

    /// Filling to held, for as many packets as `batch` has room for, and returns how many it was. It stops before a
    /// descriptor that is not of one whole packet, or that cannot be.
    #[inline]
    pub(in crate::xsk) fn hold_batch(
        &mut self,
        me: Member,
        rx: &mut Consumer<xdp_desc>,
        batch: &mut [Packet],
    ) -> usize {
        let frames = self.frames;
        let held = Place::of(Kind::Held, me);
        let mut room = batch.iter_mut();
        let most = room.len() as u32;
        let taken = rx.take_while(most, |desc| {
            let Some(frame) = frames.frame_of(desc.addr) else { return false };
            if desc.options != 0 || frames.place(frame) != Place::FILLING {
                return false;
            }
            let (Some(packet), Some(to)) = (frames.packet(frame, &desc), room.next()) else { return false };
            frames.put(frame, held);
            // Another core has written it: all lines of a batch are on their way before the first is looked at.
            prefetch(packet.start);
            *to = packet;
            true
        });
        self.inner.filling -= taken;
        taken as usize
    }
}
