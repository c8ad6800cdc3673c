//! What the members of a queue share: the fill and the completion ring, the free frames, and who may send how many.
//!
//! A device queue has one fill and one completion ring, whoever receives from it and sends to it. Each member takes
//! the lock once a batch, when it receives: what the batch held goes back, what was sent comes back (whoever sent it),
//! the kernel gets frames to receive into, and the descriptors of the member's own receive ring are checked and held.
//! On demand, once for many frames, it takes the lock when it has run out of what it may send. Nobody makes a system
//! call or takes another lock with this one held, so it cannot be part of a deadlock, and it is held for as long as a
//! batch takes to be counted.
//!
//! # Who may send
//!
//! A frame on its way out is one less to receive into. So `frames - receiving` may be out at a time, in all, and a
//! member's part of that is the same as everybody else's. A member has it granted in portions, called credits: one
//! for each frame that is in its supply, taken, or on its way out, and those that it has not used yet. When the
//! kernel has sent a frame, the place of the frame says which member's account the credit goes back to.

mod turnover;

use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use libc::xdp_desc;

use super::Census;
use super::frames::{Frames, Kind, MOST_MEMBERS, Member, Packet, Place};
use super::ring::{Consumer, Producer};
use super::socket::Maps;

/// A value on cache lines of its own: what lies beside it is read all the time by threads that do not take the lock.
#[repr(align(128))]
struct Apart<T>(T);

/// The rings that a device queue has once.
pub(super) struct PoolRings {
    pub(super) fill: Producer<u64>,
    pub(super) completion: Consumer<u64>,
}

/// The socket that a queue was opened with, and what it is bound to.
pub(super) struct Anchor {
    pub(super) socket: OwnedFd,
    pub(super) ifindex: u32,
    pub(super) queue: u32,
}

/// What all members of a queue share.
pub(super) struct Pool {
    // Dropped from the top: the rings before their maps, and these before the socket and the frames. (The kernel has
    // the pages of the frames pinned, so that the rest of the order is for tidiness.)
    inner: Apart<Mutex<Inner>>,
    _maps: Option<Maps>,
    /// By what the frames and both rings were made. A mapping keeps its socket open, whoever closes the descriptor:
    /// were these the first member's, its socket would stay while others have the queue. None in tests.
    pub(super) anchor: Option<Anchor>,
    /// Whether packets come in several frames if they are long.
    pub(super) pieces: bool,
    pub(super) frames: Frames,
}

struct Inner {
    fill: Producer<u64>,
    completion: Consumer<u64>,
    free: Vec<u32>,
    /// Frames that the kernel has to receive into.
    filling: u32,
    /// So many it should have.
    receiving: u32,
    /// What the kernel said and cannot be.
    invalid: u64,
    accounts: Vec<Account>,
    /// Credits of all accounts.
    granted: u32,
    /// Accounts that are open.
    members: u32,
    /// Credits that all of them together may have, and that one may: kept, since to find out takes a division.
    quota: (u32, u32),
}

/// What is granted to one member.
#[derive(Clone, Copy, Default)]
struct Account {
    /// A closed account may have frames on their way out.
    open: bool,
    granted: u32,
    /// Entries of the member's receive ring.
    ring: u32,
}

/// What a member has at hand for sending, without the lock. All of it is granted.
#[derive(Default)]
pub(super) struct Purse {
    /// Credits for frames that are there already: those of the batch.
    pub(super) credits: u32,
    /// Frames to be taken, in their place of that name.
    pub(super) supply: Vec<u32>,
    /// Frames taken since the batch began: as many are there when the next one begins.
    pub(super) taken: u32,
    /// The pool had nothing. It is not asked again before the next batch or flush: not per datagram.
    pub(super) dry: bool,
}

impl Pool {
    /// A pool without members, which has given the kernel frames to receive into for a member with a receive ring of
    /// so many entries. `kernel` is the socket of the rings and what they lie in.
    pub(super) fn new(rings: PoolRings, kernel: Option<(Maps, Anchor)>, frames: Frames, ring: u32) -> Self {
        let PoolRings { fill, completion } = rings;
        let inner = Inner {
            fill,
            completion,
            // The frame given back last is taken first: it is still in the cache.
            free: (0..frames.count()).rev().collect(),
            filling: 0,
            receiving: ring.min(frames.count() / 2),
            invalid: 0,
            accounts: Vec::new(),
            granted: 0,
            members: 0,
            quota: (0, 0),
        };
        let (maps, anchor) = kernel.unzip();
        let pool = Self { inner: Apart(Mutex::new(inner)), _maps: maps, anchor, pieces: false, frames };
        pool.lock().refill();
        pool
    }

    /// All that may be done with the lock held.
    #[inline]
    pub(super) fn lock(&self) -> Locked<'_> {
        // Whoever panicked with the lock held did so between two steps; each leaves everything in order.
        let inner = self.inner.0.lock().unwrap_or_else(PoisonError::into_inner);
        Locked { frames: &self.frames, inner }
    }

    pub(super) fn census(&self) -> Census {
        let invalid = self.lock().inner.invalid;
        Census { invalid, ..self.frames.census() }
    }
}

/// The pool while one member has its lock.
pub(super) struct Locked<'a> {
    frames: &'a Frames,
    inner: MutexGuard<'a, Inner>,
}

impl Locked<'_> {
    /// Opens an account for a member whose receive ring has so many entries, and gives the kernel frames for it. None
    /// if there are no more numbers.
    pub(super) fn join(&mut self, ring: u32) -> Option<Member> {
        let accounts = &mut self.inner.accounts;
        // A number whose frames are still on their way would get the credits of two.
        let vacant = accounts.iter().position(|account| !account.open && account.granted == 0);
        let at = match vacant {
            Some(at) => at,
            None if accounts.len() == MOST_MEMBERS => return None,
            None => {
                accounts.push(Account::default());
                accounts.len() - 1
            }
        };
        accounts[at] = Account { open: true, granted: 0, ring };
        self.settle();
        self.refill();
        Some(at as Member)
    }

    /// Shares out the frames anew between receiving and sending. What is unread in receive rings is no more to
    /// receive into; with as many frames as all rings have entries, a member that does not read takes none from
    /// the others.
    fn settle(&mut self) {
        let open = self.inner.accounts.iter().filter(|account| account.open);
        let (members, rings) = open
            .fold((0, 0_u32), |(members, rings), account| (members + 1, rings.saturating_add(account.ring)));
        self.inner.members = members;
        self.inner.receiving = rings.min(self.frames.count() / 2);
        let outgoing = self.frames.count() - self.inner.receiving;
        // With more members than frames each may still send: one after the other.
        self.inner.quota = (outgoing, (outgoing / members.max(1)).max(1));
    }

    /// Closes the account of a member. What it had is free, but for what the kernel is still sending. What the kernel
    /// has not taken from its send ring is free, too, if it takes nothing without being asked (`asked`), which nobody
    /// does any more; otherwise it may take it yet.
    pub(super) fn leave(
        &mut self,
        me: Member,
        rx: &mut Consumer<xdp_desc>,
        tx: &mut Producer<xdp_desc>,
        asked: bool,
    ) {
        let frames = self.frames;
        for kind in [Kind::Supply, Kind::Held, Kind::HeldDone, Kind::Taken] {
            frames.all(kind, Some(me)).for_each(|frame| self.release(frame));
        }
        for frame in frames.all(Kind::HeldSending, Some(me)) {
            frames.put(frame, Place::of(Kind::Sending, me));
        }
        // First what was sent: the kernel may have dropped a packet, which completes it, and not moved on in the ring.
        self.reap();
        for desc in tx.left(asked) {
            let frame = self.frames.frame_of(desc.addr);
            if let Some(frame) =
                frame.filter(|&frame| self.frames.place(frame) == Place::of(Kind::Sending, me))
            {
                self.release(frame);
            }
        }
        for _ in 0..rx.entries() {
            let Some(desc) = rx.take() else { break };
            if let Some(frame) = self.received(&desc) {
                self.release(frame);
            }
        }
        rx.release();
        let still = self.frames.all(Kind::Sending, Some(me)).count() as u32;
        if let Some(account) = self.inner.accounts.get_mut(usize::from(me)) {
            let before = account.granted;
            *account = Account { open: false, granted: still, ring: 0 };
            self.inner.granted = (self.inner.granted + still).saturating_sub(before);
        }
        self.settle();
        self.refill();
    }

    #[inline]
    fn release(&mut self, frame: u32) {
        self.frames.put(frame, Place::FREE);
        self.inner.free.push(frame);
    }

    /// Gives the kernel what it lacks to receive into, as far as the fill ring has room.
    #[inline]
    pub(super) fn refill(&mut self) {
        while self.inner.filling < self.inner.receiving {
            let Some(&frame) = self.inner.free.last() else { break };
            if !self.inner.fill.put(self.frames.addr(frame)) {
                break;
            }
            self.inner.free.pop();
            self.inner.filling += 1;
            self.frames.put(frame, Place::FILLING);
        }
        self.inner.fill.publish();
    }

    /// Whether the kernel wants to be told that the fill ring has entries; none where it cannot say so.
    #[inline]
    pub(super) fn wants_wakeup(&self) -> Option<bool> {
        self.inner.fill.wants_wakeup()
    }

    /// The frame that the kernel says it has received into: from filling to nowhere, where the caller takes it from.
    /// None, and counted, if that cannot be.
    #[inline]
    fn received(&mut self, desc: &xdp_desc) -> Option<u32> {
        let frame =
            self.frames.frame_of(desc.addr).filter(|&frame| self.frames.place(frame) == Place::FILLING);
        if frame.is_some() {
            self.inner.filling -= 1;
        } else {
            self.inner.invalid += 1;
        }
        frame
    }

    /// Filling to held: what the kernel says it has received, in one frame. None, and counted, if that cannot be; the
    /// frame goes back to the free list if it was the kernel's.
    #[inline]
    pub(super) fn hold(&mut self, me: Member, desc: &xdp_desc) -> Option<Packet> {
        let frame = self.received(desc)?;
        let Some(packet) = self.frames.packet(frame, desc) else {
            self.inner.invalid += 1;
            self.release(frame);
            return None;
        };
        self.frames.put(frame, Place::of(Kind::Held, me));
        Some(packet)
    }

    /// Filling to free, for what is part of nothing that can be used.
    pub(super) fn discard(&mut self, desc: &xdp_desc) {
        if let Some(frame) = self.received(desc) {
            self.release(frame);
        }
    }

    /// Counts something that the kernel said and that cannot be.
    pub(super) fn count_invalid(&mut self) {
        self.inner.invalid += 1;
    }

    /// Held to free (to filling at once, if the kernel lacks some), or to sending if it is still on its way out.
    #[inline]
    pub(super) fn end_hold(&mut self, me: Member, frame: u32) {
        match self.frames.place(frame).kind() {
            Kind::Held | Kind::HeldDone => {
                let inner = &mut *self.inner;
                if inner.filling < inner.receiving && inner.fill.put(self.frames.addr(frame)) {
                    inner.filling += 1;
                    self.frames.put(frame, Place::FILLING);
                } else {
                    self.release(frame);
                }
            }
            // Granted since it was put into the ring.
            Kind::HeldSending => self.frames.put(frame, Place::of(Kind::Sending, me)),
            Kind::Free | Kind::Filling | Kind::Supply | Kind::Taken | Kind::Sending => {}
        }
    }

    /// Grants up to `wanted` credits.
    #[inline]
    fn grant(&mut self, me: Member, wanted: u32) -> u32 {
        let (outgoing, quota) = self.inner.quota;
        let inner = &mut *self.inner;
        let Some(account) = inner.accounts.get_mut(usize::from(me)) else { return 0 };
        let own = quota.saturating_sub(account.granted);
        let granted = wanted.min(own).min(outgoing.saturating_sub(inner.granted));
        account.granted += granted;
        inner.granted += granted;
        granted
    }

    /// Whether nothing is to be done for a member: the kernel has all frames that it should have to receive into, and what
    /// is granted to the member is in its purse, so that nothing of its comes back.
    #[inline]
    pub(super) fn is_settled(&self, me: Member, purse: &Purse) -> bool {
        let granted = self.inner.accounts.get(usize::from(me)).map_or(0, |account| account.granted);
        self.inner.filling >= self.inner.receiving
            && granted as usize == purse.credits as usize + purse.supply.len()
    }

    #[inline]
    fn give_credit(&mut self, member: Member, count: u32) {
        let inner = &mut *self.inner;
        if let Some(account) = inner.accounts.get_mut(usize::from(member)) {
            account.granted -= count;
            inner.granted -= count;
        }
    }

    /// Gets what the batch that begins will need, if it is like the one before: a batch of up to so many packets.
    #[inline]
    pub(super) fn restock(&mut self, me: Member, purse: &mut Purse, batch: usize) {
        let frames = purse.taken.min(purse.supply.capacity() as u32);
        self.stock(me, purse, batch as u32, frames);
        (purse.taken, purse.dry) = (0, false);
    }

    /// Fills a purse up to so many credits and frames. A purse that has more keeps it, unless the part of each member
    /// has become smaller: then it gives up what it has too much.
    #[inline]
    pub(super) fn stock(&mut self, me: Member, purse: &mut Purse, credits: u32, frames: u32) {
        if purse.credits < credits {
            purse.credits += self.grant(me, credits - purse.credits);
        }
        for _ in purse.supply.len()..frames as usize {
            if self.inner.free.is_empty() || (purse.credits == 0 && self.grant(me, 1) == 0) {
                break;
            }
            purse.credits = purse.credits.saturating_sub(1);
            let Some(frame) = self.inner.free.pop() else { break };
            self.frames.put(frame, Place::of(Kind::Supply, me));
            purse.supply.push(frame);
        }
        let (_, quota) = self.inner.quota;
        let granted = self.inner.accounts.get(usize::from(me)).map_or(0, |account| account.granted);
        if granted > quota {
            self.give_up(me, purse, granted - quota);
        }
    }

    /// Gives up so much of what is in a purse, as far as it has that.
    fn give_up(&mut self, me: Member, purse: &mut Purse, count: u32) {
        let credits = count.min(purse.credits);
        purse.credits -= credits;
        let frames = (count - credits).min(purse.supply.len() as u32);
        self.unload(purse, frames);
        self.give_credit(me, credits + frames);
    }

    /// Makes credits of frames: the newest `count` of the supply are free again.
    fn unload(&mut self, purse: &mut Purse, count: u32) {
        for _ in 0..count {
            if let Some(frame) = purse.supply.pop() {
                self.release(frame);
            }
        }
    }

    /// Makes credits of half of the supply.
    pub(super) fn take_in(&mut self, purse: &mut Purse) {
        let count = purse.supply.len().div_ceil(2) as u32;
        self.unload(purse, count);
        purse.credits += count;
    }

    /// Makes one credit at least of what is in the supply, if that is the only way to one.
    pub(super) fn change(&mut self, purse: &mut Purse) {
        if purse.credits == 0 {
            purse.credits = purse.supply.len() as u32;
            self.unload(purse, purse.credits);
        }
    }
}

#[cfg(test)]
impl Locked<'_> {
    /// Whether all counts are right, by the places of the frames and by what each member has unused.
    pub(super) fn audit(&self, purses: &[(Member, &Purse)]) {
        let mut free = self.inner.free.clone();
        free.sort_unstable();
        assert_eq!(
            free,
            self.frames.all(Kind::Free, None).collect::<Vec<_>>(),
            "the free list and the places differ"
        );
        assert_eq!(self.inner.filling as usize, self.frames.all(Kind::Filling, None).count());
        assert_eq!(self.frames.census().total(), self.frames.count());
        for (at, account) in self.inner.accounts.iter().enumerate() {
            let out = [Kind::Supply, Kind::Taken, Kind::Sending, Kind::HeldSending];
            let out =
                out.iter().map(|&kind| self.frames.all(kind, Some(at as Member)).count() as u32).sum::<u32>();
            let purse = purses.iter().find(|(member, _)| usize::from(*member) == at).map(|(_, purse)| purse);
            assert_eq!(account.open, purse.is_some());
            assert_eq!(
                account.granted,
                out + purse.map_or(0, |purse| purse.credits),
                "the account of member {at}"
            );
            if let Some(purse) = purse {
                let mut supply = purse.supply.clone();
                supply.sort_unstable();
                assert_eq!(supply, self.frames.all(Kind::Supply, Some(at as Member)).collect::<Vec<_>>());
            }
        }
        let granted = self.inner.accounts.iter().map(|account| account.granted).sum::<u32>();
        assert_eq!(self.inner.granted, granted);
        // What one that has left is still sending was granted when there were others to share with, or none.
        let of_members = self.inner.accounts.iter().filter(|account| account.open);
        let of_members = of_members.map(|account| account.granted).sum::<u32>();
        assert!(of_members + self.inner.receiving <= self.frames.count() || self.inner.members != 1);
    }
}
