//! Receive dispatch: which lanes a call tries, in which order, and what it blocks on.
//!
//! [`RecvCall::run`] goes by the mode of the socket (`sock.rs`):
//!
//! | mode | order |
//! |---|---|
//! | SINGLE, OBSERVING | the program's own kernel socket, and queues if there are any |
//! | MULTI_LANE | 1. the lane that the thread peeked at; 2. lanes to drain first, which hold older datagrams; 3. the thread's own lane; 4. lanes whose owners do not wait |
//! | PLAIN | datagrams that the lanes still hold; then the program's own socket, for good |
//!
//! A call that has waited goes on in slices when the socket becomes plain, unless it has no
//! timeout: the kernel would start that anew.
//!
//! Two promises follow from this order:
//!
//! - A thread that peeks, or asks for the size, gets that very datagram with its next receive.
//! - A thread sees the datagrams of a flow in their order: a flow stays in one lane, and datagrams
//!   queued before a change of lanes are received first. While a lane is added or removed, flows
//!   move, and two threads may briefly hold two parts of one flow, as two readers of one socket
//!   would.

use std::ops::ControlFlow::Break;
use std::sync::atomic::Ordering;

use libc::{EAGAIN, c_int, pollfd};
use manylane_ipc::lease::QUEUES_MAX;

use crate::base::real::{self, fail_with_errno};
use crate::base::recv_bufs::RecvBufs;
use crate::base::settings::{LANES_MAX, WAIT_SLICE};
use crate::base::{quiesce, signals, sockopt};
use crate::batching::prefetch;
use crate::batching::readiness::{lane_pollfds, lanes_with};
use crate::batching::{rx_coalesce, send_batch};
use crate::fds::sock_fds::{self, is_managed};
use crate::group::coverage::{uncovered, without_running};
use crate::group::{owners, recovery, sampling};
use crate::lanes::{entries, single_receiver};
use crate::shared::sock::{BLOCKS, MULTI_LANE, OBSERVING, PLAIN, SINGLE, Shared, Sock};
use crate::shared::thread;
use crate::transfer::backoff::Backoff;
use crate::transfer::recv_call::RecvCall;
use crate::xdp::queues;

impl<Op: Fn(c_int, c_int) -> isize> RecvCall<'_, Op> {
    /// The call's result, and whether it came from a lane that is not the caller's. None: the
    /// library has detached.
    pub(crate) fn run(&self) -> Option<(isize, bool)> {
        let answer = self.retry();
        self.signals.release();
        answer
    }

    fn retry(&self) -> Option<(isize, bool)> {
        let mut rounds = Backoff::default();
        let mut again = false;
        loop {
            if quiesce::is_detaching() {
                return None;
            }
            let nonblock = self.nonblock.get();
            if !nonblock {
                let kind = self.member.kind.load(Ordering::Relaxed);
                if kind & BLOCKS == 0 {
                    self.member.kind.store(kind | BLOCKS, Ordering::Relaxed);
                }
            }
            match self.shared.mode() {
                SINGLE | OBSERVING if queues::is_open(self.shared) => {
                    if let Some(answer) = self.recv_with_queues(nonblock) {
                        return Some((answer, false));
                    }
                }
                SINGLE if nonblock => return Some(((self.op)(self.fd, 0), false)),
                SINGLE => {
                    if !single_receiver::start_wait_of(self.shared, self.member) {
                        continue;
                    }
                    self.start_timeout();
                    let answer = quiesce::run_outside(|| (self.op)(self.fd, 0));
                    if quiesce::is_detaching() {
                        // Our own bound may have ended it.
                        let goes_on = answer < 0 && self.should_wait_again();
                        return (!goes_on).then_some((answer, false));
                    }
                    self.member.finish_wait();
                    let bounded = self.shared.bounded.load(Ordering::Acquire) != 0;
                    if answer >= 0 || !bounded || !self.should_wait_again() {
                        return Some((answer, false));
                    }
                }
                OBSERVING if nonblock => return Some(((self.op)(self.fd, 0), false)),
                OBSERVING => match self.wait_on(0) {
                    Some(answer) => return Some((answer, false)),
                    None => recovery::recover(self.sock, self.shared),
                },
                MULTI_LANE => {
                    if let Some(answer) = self.recv_multi_lane(nonblock, again) {
                        return Some(answer);
                    }
                }
                PLAIN => {
                    if let Some(answer) = self.pending_error() {
                        return Some((answer, false));
                    }
                    if let Some(answer) = self.drain_retired() {
                        return Some((answer, true));
                    }
                    if nonblock {
                        return Some(((self.op)(self.fd, 0), false));
                    }
                    if !is_managed(self.shared) && (!again || self.is_endless()) {
                        return Some((quiesce::run_outside(|| (self.op)(self.fd, 0)), false));
                    }
                    if let Some(answer) = self.wait_on(0) {
                        return Some((answer, false));
                    }
                }
                _ => return Some(((self.op)(self.fd, 0), false)),
            }
            // The wait brought no datagram: the descriptor may have been closed unseen.
            if !entries::revalidate(self.sock, self.fd) {
                return Some((quiesce::run_outside(|| (self.op)(self.fd, 0)), false));
            }
            rounds.backoff();
            again = true;
            // A handler may have run between two slices, and the kernel would have restarted the
            // call.
            if signals::has_handlers() && !self.signals.is_active() {
                self.read_options();
            }
        }
    }

    /// With queues: one receiver, or several that have no lanes of their own yet. All queues
    /// belong to lane 0.
    fn recv_with_queues(&self, nonblock: bool) -> Option<isize> {
        if let Some(peeked) = thread::take_peeked(self.sock)
            && let Some(answer) = self.try_peeked(peeked)
        {
            return Some(answer);
        }
        if let Some(answer) = self.try_lane(0) {
            return Some(answer);
        }
        if nonblock {
            return Some(fail_with_errno(EAGAIN));
        }
        if let Some(answer) = self.rx_coalesce(0) {
            return Some(answer);
        }
        self.wait_on(0)
    }

    /// Mode `MULTI_LANE`: the result, or none if the mode may have changed. `again`: after a wait
    /// of the same call.
    fn recv_multi_lane(&self, nonblock: bool, again: bool) -> Option<(isize, bool)> {
        let own = self.member.own_lane();
        // 1. The lane that was peeked at.
        if let Some(lane) = thread::take_peeked(self.sock)
            && let Some(answer) = self.try_peeked(lane)
        {
            return Some((answer, own != Some(lane & 0xff)));
        }
        // A thread that always finds datagrams in its own lane also checks now and then that the
        // other owners are alive, and sends their overdue replies. A thread that waits does so
        // after each slice, which is sooner.
        let now_and_then = self.member.heartbeat.load(Ordering::Relaxed) % 16 < 2;
        if now_and_then {
            uncovered(self.sock, self.shared, own);
        }
        if now_and_then || again {
            send_batch::flush_overdue(self.sock, self.shared, self.fd);
        }
        // 2. Lanes to drain first.
        let first = self.shared.drain_first.load(Ordering::Acquire);
        if first != 0 {
            for lane in (0..LANES_MAX).filter(|lane| first & 1 << lane != 0) {
                match self.try_kernel(lane) {
                    Some(answer) => {
                        owners::count_drained(self.shared);
                        return Some((answer, own != Some(lane)));
                    }
                    None => _ = self.shared.drain_first.fetch_and(!(1 << lane), Ordering::AcqRel),
                }
            }
        }
        let Some(own) = own else { return self.recv_any(nonblock) };
        // 3. The caller's own lane, 4. lanes whose owners do not wait.
        if nonblock || self.member.found_in_other_lanes.load(Ordering::Relaxed) != 0 {
            if let Some(answer) = self.try_lane(own) {
                return Some((answer, false));
            }
            if let Some(answer) = self.recv_from_other_lanes(Some(own)) {
                return Some((answer, true));
            }
            if nonblock {
                return Some((fail_with_errno(EAGAIN), false));
            }
        }
        if let Some(prefetched) = prefetch::for_lane(self.sock, own)
            && let Break(Some(answer)) = self.try_prefetch(prefetched, own, true)
        {
            return Some((answer, false));
        }
        // Other threads may have taken the prefetched datagrams meanwhile.
        send_batch::flush();
        if rx_coalesce::can_coalesce(self.shared)
            && let Some(answer) = self.rx_coalesce(own)
        {
            return Some((answer, false));
        }
        match self.wait_on(own) {
            Some(answer) if answer >= 0 || real::errno() != EAGAIN => Some((answer, false)),
            // The slice or the program's own timeout is over: in both cases poll the other lanes
            // once more.
            outcome => match (self.poll_others(own), outcome) {
                (Some(answer), _) => Some((answer, true)),
                (None, Some(_)) => Some((fail_with_errno(EAGAIN), false)),
                (None, None) => None,
            },
        }
    }

    /// A thread without a lane receives from all of them.
    fn recv_any(&self, nonblock: bool) -> Option<(isize, bool)> {
        if let Some(answer) = self.recv_from_other_lanes(None) {
            return Some((answer, true));
        }
        if nonblock {
            return Some((fail_with_errno(EAGAIN), false));
        }
        self.start_timeout();
        send_batch::flush();
        let all = sock_fds::lanes_mask(self.shared);
        let (lane_fds, count) = lane_pollfds(self.sock, self.fd, all);
        let mut fds = [pollfd { fd: -1, events: 0, revents: 0 }; LANES_MAX + QUEUES_MAX];
        fds[..count].copy_from_slice(&lane_fds[..count]);
        queues::flush();
        let count = queues::append_pollfds(self.sock, self.shared, all, &mut fds, count);
        let ready = real::ppoll(&mut fds[..count], WAIT_SLICE, self.signals.wait_mask(None));
        self.defer_signals();
        self.member.beat();
        if !real::is_interrupted(ready) {
            real::set_errno(EAGAIN);
        }
        if ready <= 0 && !self.should_wait_again() {
            return Some((-1, false));
        }
        None
    }

    /// After a slice: receives from uncovered lanes.
    fn poll_others(&self, own: usize) -> Option<isize> {
        sampling::after_slice(self.sock, self.shared);
        self.recv_from_other_lanes(Some(own))
    }

    /// Polls the uncovered lanes, and receives from one that has a datagram. A thread without a
    /// lane polls all.
    fn recv_from_other_lanes(&self, own: Option<usize>) -> Option<isize> {
        let errno = real::errno();
        let mask = match own {
            Some(own) => uncovered(self.sock, self.shared, Some(own)),
            None => {
                recovery::recover(self.sock, self.shared);
                sock_fds::lanes_mask(self.shared)
            }
        };
        // An error of a socket is received like a datagram: no other thread may wait for it.
        let events = libc::POLLIN | libc::POLLERR;
        let ready = lanes_with(events, self.sock, self.shared, self.fd, mask);
        let ready = match own {
            Some(_) => without_running(self.shared, self.member, ready, std::thread::yield_now),
            None => ready,
        };
        for lane in (0..LANES_MAX).filter(|lane| ready & 1 << lane != 0) {
            if let Some(answer) = self.try_lane(lane) {
                return Some(answer);
            }
        }
        self.member.found_in_other_lanes.store(0, Ordering::Relaxed);
        real::set_errno(errno);
        None
    }

    /// Mode PLAIN, while lanes still hold datagrams: the kernel reports a pending socket error
    /// before any queued datagram.
    fn pending_error(&self) -> Option<isize> {
        let error = if is_managed(self.shared) {
            sockopt::int_option(self.fd, libc::SOL_SOCKET, libc::SO_ERROR).unwrap_or(0)
        } else {
            0
        };
        (error != 0).then(|| fail_with_errno(error))
    }

    /// Mode PLAIN: receives the datagrams that lanes still hold, which are older.
    fn drain_retired(&self) -> Option<isize> {
        if queues::is_draining(self.shared) {
            if let Some(peeked) = thread::take_peeked(self.sock)
                && let Some(answer) = self.try_peeked(peeked)
            {
                return Some(answer);
            }
            if let Some(answer) = queues::drain(self.sock, self.shared, self.flags, &self.bufs) {
                return Some(answer);
            }
        }
        let retired = self.shared.retired.load(Ordering::Acquire);
        if retired & prefetch::PREFETCH_BIT != 0 {
            // Prefetches of any lane: their datagrams are older than the kernel's.
            if let Some(peeked) = thread::take_peeked(self.sock)
                && let Some(prefetched) = prefetch::for_lane(self.sock, peeked & 0xff)
                && let Break(Some(answer)) = self.try_prefetch(prefetched, peeked & 0xff, false)
            {
                return Some(answer);
            }
            if let Some(answer) = prefetch::drain(self.sock, self.shared, self.fd, self.flags, &self.bufs) {
                return Some(answer);
            }
        }
        for lane in (1..LANES_MAX).filter(|lane| retired & 1 << lane != 0) {
            match self.try_kernel(lane) {
                Some(answer) => return Some(answer),
                None => sock_fds::mark_lane_empty(self.sock, self.shared, self.fd, lane),
            }
        }
        None
    }
}

/// Receives the next datagram that the lanes of a plain socket still hold, without waiting; none
/// if they are empty.
pub(crate) fn recv_leftover<Op: Fn(c_int, c_int) -> isize>(
    sock: &'static Sock,
    shared: &Shared,
    fd: c_int,
    into: RecvBufs<'_>,
    op: Op,
) -> Option<isize> {
    // In a plain socket no member has a lane: any member will do.
    let member = thread::cached_member(sock, shared).unwrap_or(&shared.members[0]);
    RecvCall::new(sock, shared, member, (fd, 0, into), op).drain_retired()
}
