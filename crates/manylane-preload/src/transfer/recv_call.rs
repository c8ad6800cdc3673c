//! One receive call of the program, and its attempts on a lane, none of which waits.

use std::cell::Cell;
use std::ops::ControlFlow::{self, Break, Continue};
use std::sync::atomic::Ordering;
use std::time::Instant;

use libc::{EAGAIN, MSG_DONTWAIT, MSG_PEEK, c_int};

use crate::base::real;
use crate::base::recv_bufs::RecvBufs;
use crate::base::sockopt::NO_WAIT_US;
use crate::base::{signals, state};
use crate::batching::prefetch::{self, FillResult, Prefetch};
use crate::batching::send_batch;
use crate::group::active_set;
use crate::shared::sock::{Member, Shared, Sock};
use crate::shared::{failpoint, thread};
use crate::xdp::queues;

/// One receive call of the program. An attempt returns the call's result, or none if there is no
/// datagram.
pub(crate) struct RecvCall<'a, Op> {
    pub(crate) sock: &'static Sock,
    pub(crate) shared: &'a Shared,
    pub(crate) member: &'a Member,
    /// The program's descriptor: lane 0.
    pub(crate) fd: c_int,
    pub(crate) flags: c_int,
    pub(crate) bufs: RecvBufs<'a>,
    pub(crate) op: Op,
    /// The result came from a prefetch, by a system call that was counted before.
    pub(crate) was_prefetched: Cell<bool>,
    pub(crate) signals: signals::DeferredSignals,
    /// The call does not wait.
    pub(crate) nonblock: Cell<bool>,
    /// The program's own timeout of this call, as [`Shared::timeout_us`].
    pub(crate) timeout_us: Cell<u64>,
    /// End of that timeout; none before the first wait of the call.
    pub(crate) until: Cell<Option<Instant>>,
}

impl<'a, Op: Fn(c_int, c_int) -> isize> RecvCall<'a, Op> {
    #[inline]
    pub(crate) fn new(
        sock: &'static Sock,
        shared: &'a Shared,
        member: &'a Member,
        (fd, flags, bufs): (c_int, c_int, RecvBufs<'a>),
        op: Op,
    ) -> Self {
        let (nonblock, timeout_us) = options(shared, flags);
        Self {
            sock,
            shared,
            member,
            fd,
            flags,
            bufs,
            op,
            was_prefetched: Cell::new(false),
            signals: signals::DeferredSignals::new(),
            nonblock: Cell::new(nonblock),
            timeout_us: Cell::new(timeout_us),
            until: Cell::new(None),
        }
    }

    /// One attempt on a lane, without waiting: its queues, if it has any, and its kernel socket.
    #[inline]
    pub(crate) fn try_lane(&self, lane: usize) -> Option<isize> {
        if !queues::is_open(self.shared) {
            return self.try_kernel(lane);
        }
        // Check the companion now and then, in case the queues are never empty.
        let heartbeat = self.member.heartbeat.load(Ordering::Relaxed);
        if heartbeat % queues::KERNEL_CHECK_INTERVAL < 2
            && let Some(answer) = self.try_kernel(lane)
        {
            return Some(answer);
        }
        // A receive is one heartbeat or two: every second one begins with another queue.
        let start = heartbeat / 2;
        if let Some(answer) = queues::receive(self.sock, self.shared, lane, start, self.flags, &self.bufs) {
            return Some(answer);
        }
        queues::flush();
        self.try_kernel(lane)
    }

    /// One attempt on the datagram that was peeked at.
    pub(super) fn try_peeked(&self, peeked: usize) -> Option<isize> {
        queues::receive_peeked(self.sock, peeked, self.flags, &self.bufs)
            .or_else(|| self.try_kernel(peeked & 0xff))
    }

    /// One attempt on a lane's prefetch; its owner may fill it first. `Continue`: the caller must
    /// ask the kernel for a datagram. `sleeps`: if there is no datagram, the caller sleeps next.
    pub(super) fn try_prefetch(
        &self,
        prefetched: &Prefetch,
        lane: usize,
        sleeps: bool,
    ) -> ControlFlow<Option<isize>> {
        let take = || {
            let answer = prefetched.recv(self.flags, &self.bufs)?;
            self.was_prefetched.set(true);
            if self.flags & MSG_PEEK != 0 {
                thread::set_peeked(self.sock, lane);
            }
            Some(answer)
        };
        if let Some(answer) = take() {
            return Break(Some(answer));
        }
        if self.bufs.is_mmsg() || !self.can_prefetch(lane) || !prefetched.should_fill() {
            return Continue(());
        }
        match prefetched.fill(self.shared, self.member, self.sock.fd_of(lane, self.fd), sleeps) {
            FillResult::Ready => {
                let got = take();
                // The call to the kernel counts for the first datagram that it brought.
                self.was_prefetched.set(false);
                got.map_or(Continue(()), |answer| Break(Some(answer)))
            }
            FillResult::Empty => Break(None),
            FillResult::Failed => Break(Some(-1)),
            FillResult::Skipped => Continue(()),
        }
    }

    /// True if the active set is limited, the caller owns the lane and does not share it, and its
    /// datagrams come from its kernel socket only.
    fn can_prefetch(&self, lane: usize) -> bool {
        failpoint::prefetch().unwrap_or_else(|| active_set::is_limited(self.shared))
            && self.shared.owner_of(lane).is_some_and(|owner| std::ptr::eq(owner, self.member))
            && self.member.lane.load(Ordering::Relaxed) == lane as i32
            && self.shared.oversubscribed.load(Ordering::Relaxed) & 1 << lane == 0
            && self.shared.prefetch_off.load(Ordering::Relaxed) == 0
            && !queues::is_open(self.shared)
    }

    /// One attempt on a lane's kernel socket, without waiting.
    #[inline]
    pub(super) fn try_kernel(&self, lane: usize) -> Option<isize> {
        if state::is_send_batching() && self.member.lane.load(Ordering::Relaxed) != lane as i32 {
            send_batch::before_recv_from_other_lane(self.sock, self.shared, self.fd, lane);
        }
        if let Some(prefetched) = prefetch::for_lane(self.sock, lane)
            && let Break(got) = self.try_prefetch(prefetched, lane, false)
        {
            return got;
        }
        let answer = (self.op)(self.sock.fd_of(lane, self.fd), MSG_DONTWAIT);
        if answer < 0 && real::errno() == EAGAIN {
            return None;
        }
        if answer >= 0 && self.flags & MSG_PEEK != 0 {
            thread::set_peeked(self.sock, lane);
        }
        Some(answer)
    }
}

/// Options that the kernel reads when a receive starts: true if the call does not wait, and its
/// timeout. A change during the wait affects later calls only.
#[inline]
pub(crate) fn options(shared: &Shared, flags: c_int) -> (bool, u64) {
    let timeout_us = shared.timeout_us.load(Ordering::Relaxed);
    let nonblock = shared.nonblock.load(Ordering::Relaxed) != 0;
    (nonblock || flags & MSG_DONTWAIT != 0 || timeout_us == NO_WAIT_US, timeout_us)
}
