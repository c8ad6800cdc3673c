//! Members that join and leave, and their shares of the frames.

use libc::xdp_desc;

use super::{AllocatorGuard, MemberSlot};
use crate::xsk::frames::{FrameState, MEMBERS_MAX, MemberId, StateWord};
use crate::xsk::ring::{Consumer, Producer};

impl AllocatorGuard<'_> {
    /// Adds a member whose RX ring has this many entries, and gives the kernel frames for it. None
    /// if there is no free number.
    pub(in crate::xsk) fn insert_member(&mut self, ring: u32) -> Option<MemberId> {
        let accounts = &mut self.inner.slots;
        // Not a number with frames that are still being sent: its credits would be mixed up.
        let vacant = accounts.iter().position(|account| !account.is_open && account.granted == 0);
        let at = match vacant {
            Some(at) => at,
            None if accounts.len() == MEMBERS_MAX => return None,
            None => {
                accounts.push(MemberSlot::default());
                accounts.len() - 1
            }
        };
        accounts[at] = MemberSlot { is_open: true, granted: 0, ring };
        self.rebalance();
        self.refill();
        Some(at as MemberId)
    }

    /// Recomputes the shares of receiving and sending. Unread frames in RX rings are not available
    /// for receiving. With as many frames as all rings have entries, a member that does not read
    /// takes none from the others.
    fn rebalance(&mut self) {
        let open = self.inner.slots.iter().filter(|account| account.is_open);
        let (members, rings) = open
            .fold((0, 0_u32), |(members, rings), account| (members + 1, rings.saturating_add(account.ring)));
        self.inner.members = members;
        self.inner.fill_target = rings.min(self.frames.count() / 2);
        let outgoing = self.frames.count() - self.inner.fill_target;
        // With more members than frames each may still send, one at a time.
        self.inner.quota = (outgoing, (outgoing / members.max(1)).max(1));
    }

    /// Removes a member. Its frames are free, except those that the kernel is still sending.
    /// Frames in its TX ring that the kernel has not taken are free, too, if the kernel takes none
    /// without being notified (`asked`), because no notification follows. Otherwise it may still
    /// take them.
    pub(in crate::xsk) fn remove_member(
        &mut self,
        member: MemberId,
        rx: &mut Consumer<xdp_desc>,
        tx: &mut Producer<xdp_desc>,
        asked: bool,
    ) {
        let frames = self.frames;
        for kind in [FrameState::Cached, FrameState::Held, FrameState::HeldSent, FrameState::Allocated] {
            frames.in_state(kind, Some(member)).for_each(|frame| self.release(frame));
        }
        for frame in frames.in_state(FrameState::HeldSending, Some(member)) {
            frames.set_state(frame, StateWord::new(FrameState::Sending, member));
        }
        // Reclaim first: the kernel may have dropped a packet, which completes it, without
        // advancing in the ring.
        self.reap();
        for desc in tx.unconsumed(asked) {
            let frame = self.frames.frame_of(desc.addr);
            if let Some(frame) =
                frame.filter(|&frame| self.frames.state(frame) == StateWord::new(FrameState::Sending, member))
            {
                self.release(frame);
            }
        }
        for _ in 0..rx.entries() {
            let Some(desc) = rx.pop() else { break };
            if let Some(frame) = self.accept_desc(&desc) {
                self.release(frame);
            }
        }
        rx.release();
        let still = self.frames.in_state(FrameState::Sending, Some(member)).count() as u32;
        if let Some(account) = self.inner.slots.get_mut(usize::from(member)) {
            let before = account.granted;
            *account = MemberSlot { is_open: false, granted: still, ring: 0 };
            self.inner.granted = (self.inner.granted + still).saturating_sub(before);
        }
        self.rebalance();
        self.refill();
    }
}
