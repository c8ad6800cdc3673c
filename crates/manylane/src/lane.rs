//! A lane: one receive queue and one send path of a socket, owned by exactly one thread.

use std::hint;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use manylane_bpf::abi;
use manylane_sys::map::SharedWords;
use manylane_sys::measure::{Epoll, reduce_timer_slack};
use manylane_sys::mmsg::Wait;
use manylane_sys::rx_coalesce::RxCoalesce;
use manylane_sys::{cpu, sock};

use crate::batch::{Batch, Origin};
use crate::counters::{Cells, Count, LaneCounters, LaneId};
use crate::drop_policy::DropPolicy;
use crate::error::{Error, Result};
use crate::io::mmsg::MmsgIo;
use crate::io::uring::UringIo;
use crate::io::xdp::XdpIo;
use crate::io::{Capabilities, RecvSummary};
use crate::outbox::Outbox;
use crate::port_owner;
use crate::socket::Shared;
use crate::steer::Slot;
use crate::wait::governor::{Arrival, Plan, WaitGovernor};

/// Steered to, and open for receiving.
pub(crate) const OPEN: u8 = 0;
/// Being taken out of steering: datagrams may still arrive until the grace period is over.
pub(crate) const RETIRING: u8 = 1;
/// Nothing more arrives, or the whole socket stops: what is queued is still handled, then the lane
/// ends.
pub(crate) const DRAINING: u8 = 2;
/// The kernel refuses what is new: the lane of a socket that ends.
pub(crate) const SHUT_DOWN: u8 = 3;

/// Bytes of memory that a datagram takes in the queue at worst, if it is small.
const SKB_TRUESIZE_MAX: usize = 4096;

/// Bytes of memory that the smallest datagram takes in the queue at least.
const SKB_TRUESIZE_MIN: usize = 512;

/// A lane that spins reads the clock once in so many looks.
const POLLS_PER_CLOCK_READ: u32 = 8;
/// One with queues looks at its companion, which is a system call, once in so many.
const POLLS_PER_KERNEL_POLL: u32 = 64;

/// Receives that a lane which closes spends on throwing away what is left.
const DISCARD_BUDGET: usize = 1 << 14;

/// The part of a lane that others may look at: its socket, its counters, its state.
#[derive(Debug)]
pub(crate) struct LaneShared {
    pub(crate) id: LaneId,
    pub(crate) slot: Slot,
    pub(crate) fd: Arc<OwnedFd>,
    pub(crate) cpu: Option<usize>,
    pub(crate) cells: Cells,
    pub(crate) state: AtomicU8,
    /// The thread that serves it in `serve`; 0 if none does.
    pub(crate) tid: AtomicI32,
    /// The kernel's counts when the lane opened: its socket or slot may have served another before.
    pub(crate) drops_before: u32,
    pub(crate) steered_before: u64,
}

impl LaneShared {
    /// The lane's counters, with the kernel's drops at its queue.
    pub(crate) fn counters(&self) -> LaneCounters {
        let mut counters = self.cells.read();
        let drops = sock::queue_state(self.fd.as_fd()).map_or(self.drops_before, |state| state.drops);
        counters.kernel_dropped = u64::from(drops.wrapping_sub(self.drops_before));
        counters
    }

    /// The thread that serves it; 0 if none does.
    pub(crate) fn thread(&self) -> i32 {
        self.tid.load(Ordering::Relaxed)
    }

    /// Steered to.
    pub(crate) fn is_open(&self) -> bool {
        self.state.load(Ordering::Relaxed) == OPEN
    }

    /// Time to drain the queue and to end.
    pub(crate) fn is_draining(&self) -> bool {
        // Who sees this also sees whether it is because the whole socket stops.
        self.state.load(Ordering::Acquire) >= DRAINING
    }
}

/// One receive queue and one send path of a [`Socket`](crate::Socket), for one thread at a time.
///
/// A lane can move to another thread but not be shared. As a descriptor ([`AsFd`]) it can wait in
/// an epoll of the application; level-triggered readiness means that [`recv`](Self::recv) brings
/// something. Take it out of that epoll before the lane is dropped: the kernel's socket may live on
/// for the next lane, and with it the entry. The descriptor is the kernel's socket with engine
/// `mmsg`; with `uring` and `xdp` it tells readiness and is nothing else. Once asked for it stays
/// the same one for the lane's life, also when io_uring fails and the lane goes on without.
pub struct Lane {
    shared: Arc<Shared>,
    lane_shared: Arc<LaneShared>,
    io: MmsgIo,
    /// The queues of devices that the lane serves, with engine `xdp`; `io` is then its companion.
    xdp: Option<XdpIo>,
    /// The way to receive from the kernel socket, with engine `uring`; `io` then sends, and takes
    /// over if it fails.
    uring: Option<UringIo>,
    /// What the lane's descriptor is since io_uring failed, if it was the ring's before: it stays
    /// the same one.
    readiness: Option<Epoll>,
    caps: Capabilities,
    /// The receive timeout that the socket has, or its ring.
    timeout: Option<Duration>,
    drop_policy: DropPolicy,
    governor: WaitGovernor,
    /// What times of the pacer count from.
    opened: Instant,
    /// The thread that waits has the timer slack that rests need, and runs when it wakes up.
    is_low_latency: bool,
    /// Where eBPF reads how much the lane has taken (`least-loaded` only), and the lane's first
    /// word there.
    load: Option<(Arc<SharedWords>, usize)>,
    /// Sockets that the last lane waits for when all else of it is closed: the last field.
    orphaned: OrphanedSockets,
}

/// Sockets, by their inodes, that rings may have for a moment yet although they are closed. When
/// this is dropped they have been let go of, or some seconds have passed: then whoever drops the
/// last lane finds the port free.
#[derive(Debug, Default)]
struct OrphanedSockets {
    /// The lane has left such a ring.
    has_ring: bool,
    sockets: Vec<u64>,
}

impl Drop for OrphanedSockets {
    fn drop(&mut self) {
        if !self.sockets.is_empty() && !port_owner::wait_unbound(&self.sockets) {
            log::warn!("the kernel still has the sockets of io_uring rings that another thread had used");
        }
    }
}

/// What a receive brought, and the way to answer.
pub struct Received<'a> {
    /// The datagrams; may be none.
    pub batch: Batch<'a>,
    /// Where replies go. Dropping it sends them.
    pub out: Outbox<'a>,
}

impl Lane {
    pub(crate) fn new(
        shared: Arc<Shared>,
        me: Arc<LaneShared>,
        io: MmsgIo,
        uring: Option<UringIo>,
        can: Capabilities,
        load: Option<Arc<SharedWords>>,
    ) -> Self {
        let load = load.map(|words| (words, me.slot as usize * abi::LOAD_WORDS));
        let drop_policy = shared.config.drop_policy;
        let governor = WaitGovernor::new(shared.config.wait);
        let opened = Instant::now();
        Self {
            shared,
            lane_shared: me,
            io,
            xdp: None,
            uring,
            readiness: None,
            caps: can,
            timeout: None,
            drop_policy,
            governor,
            opened,
            is_low_latency: false,
            load,
            orphaned: OrphanedSockets::default(),
        }
    }

    /// Gives the lane queues of devices.
    pub(crate) fn attach_queues(&mut self, mut xdp: XdpIo) -> Result<()> {
        xdp.add_kernel_socket(self.lane_shared.fd.as_fd())?;
        self.xdp = Some(xdp);
        Ok(())
    }

    /// The lane's id, unique within the socket.
    #[must_use]
    pub fn id(&self) -> LaneId {
        self.lane_shared.id
    }

    /// The CPU that placement gave to the lane; none without pinning.
    #[must_use]
    pub fn cpu(&self) -> Option<usize> {
        self.lane_shared.cpu
    }

    /// The address that the socket is bound to.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.shared.addr
    }

    /// What the engine can do on this lane.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        self.caps
    }

    /// Pins the calling thread to the CPU that placement gave to the lane, if any.
    ///
    /// # Errors
    /// When the CPU went offline or out of the process's cpuset.
    pub fn pin(&self) -> Result<()> {
        let Some(cpu) = self.lane_shared.cpu else { return Ok(()) };
        cpu::pin(cpu).map_err(|err| Error::system(format!("pinning to CPU {cpu} (placement)"), err))
    }

    /// Takes what is there, without waiting; the batch may be empty.
    ///
    /// # Errors
    /// What the system reports for the socket as a whole. No error of a single datagram or peer
    /// shows here.
    #[inline]
    pub fn recv(&mut self) -> Result<Received<'_>> {
        let taken = self.recv_batch(Wait::Never)?;
        Ok(self.received(taken))
    }

    /// Waits until something is there, for at most `timeout`; the batch is empty if nothing came,
    /// and may be after a signal, or once the lane leaves.
    ///
    /// # Errors
    /// As for [`recv`](Self::recv).
    #[inline]
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<Received<'_>> {
        let taken = self.recv_batch_timeout(timeout)?;
        Ok(self.received(taken))
    }

    /// Sends of the lane's own accord, without a request.
    pub fn sender(&mut self) -> Outbox<'_> {
        if let Some(xdp) = &mut self.xdp {
            xdp.end_batch();
        }
        if let Some(uring) = &mut self.uring {
            uring.end_batch();
        }
        self.received(RecvSummary::default()).out
    }

    /// Takes the lane out of steering: when this returns, nothing more arrives in its queue, and
    /// when [`recv`](Self::recv) then brings nothing, dropping the lane loses nothing.
    ///
    /// Takes some milliseconds (an RCU grace period). With steering by the kernel's own choice the
    /// lane cannot be taken out, and what arrives between the last receive and the drop is lost.
    ///
    /// # Errors
    /// [`ErrorKind::LastLane`](crate::ErrorKind::LastLane) for the only one left.
    pub fn retire(&mut self) -> Result<()> {
        self.shared.retire(&self.lane_shared)?;
        if let Some(xdp) = &mut self.xdp {
            xdp.release_queues();
        }
        Ok(())
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.lane_shared.is_draining()
    }

    /// The pauses of a lane with batches as they are.
    pub(crate) fn new_rx_coalesce(&self) -> RxCoalesce {
        RxCoalesce::new(self.shared.rx_coalesce(), self.caps.batch, self.shared.recv_capacity(self))
    }

    /// Messages that fit into the receive buffer, counted with a page each: what small frames of a
    /// device take.
    pub(crate) fn recv_capacity(&self) -> usize {
        let state = sock::queue_state(self.lane_shared.fd.as_fd());
        state.map_or(usize::MAX, |state| state.limit_bytes as usize / SKB_TRUESIZE_MAX)
    }

    pub(crate) fn lane_shared(&self) -> &LaneShared {
        &self.lane_shared
    }

    pub(crate) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    /// Messages that a lane which leaves drains before it stops receiving: all that are queued, and
    /// a batch that may come meanwhile.
    pub(crate) fn queued(&self) -> usize {
        let queued =
            sock::queue_state(self.lane_shared.fd.as_fd()).map_or(0, |state| state.queued_bytes as usize);
        queued / SKB_TRUESIZE_MIN + self.caps.batch
    }

    /// Lets nothing more into the queue if the whole socket ends, or if the lane has `drained` all
    /// that was queued and is still steered to.
    pub(crate) fn maybe_shut_down(&self, drained: bool) {
        if self.shared.is_stopping() || (drained && !self.shared.can_retire()) {
            self.shared.shut_down(&self.lane_shared);
        }
    }

    /// Takes a batch as soon as there is something, by the policy of the lane; none after
    /// `timeout`.
    pub(crate) fn recv_batch_timeout(&mut self, timeout: Duration) -> Result<RecvSummary> {
        if timeout.is_zero() {
            return self.recv_batch(Wait::Never);
        }
        if self.governor.is_adaptive() && !self.is_low_latency {
            self.set_low_latency();
        }
        if !self.governor.can_spin() {
            let taken = self.sleep(timeout)?;
            if taken.messages > 0 && self.governor.is_adaptive() {
                self.governor.record_arrival(self.opened.elapsed(), Arrival::Woken);
            }
            return Ok(taken);
        }
        let taken = self.recv_batch(Wait::Never)?;
        if taken.messages > 0 {
            return Ok(taken);
        }
        // Only now that there is nothing the clock is read.
        let start = Instant::now();
        let plan = self.governor.plan(start - self.opened);
        let (taken, met) = self.wait_with_plan(plan, start, timeout)?;
        if taken.messages == 0 {
            self.governor.record_timeout();
        } else if self.governor.is_adaptive() {
            self.governor.record_arrival(self.opened.elapsed(), met);
        }
        Ok(taken)
    }

    /// Rests are short, and who sleeps leaves its processor to others: neither is to make the lane
    /// late.
    #[cold]
    fn set_low_latency(&mut self) {
        self.is_low_latency = true;
        reduce_timer_slack();
        if let Err(err) = cpu::set_short_slice() {
            log::debug!("a lane may have to wait for others on its processor: sched_setattr: {err}");
        }
    }

    /// Rests, looks, and sleeps, as `plan` says, in a wait that began at `start`.
    fn wait_with_plan(
        &mut self,
        plan: Plan,
        start: Instant,
        timeout: Duration,
    ) -> Result<(RecvSummary, Arrival)> {
        let rest = plan.sleep_until.min(timeout);
        if !rest.is_zero() {
            let taken = self.sleep_precise(rest)?;
            if taken.messages > 0 || self.is_draining() {
                return Ok((taken, Arrival::Woken));
            }
            self.governor.record_wake_latency(start.elapsed().saturating_sub(rest));
        }
        let until = plan.spin_until.min(timeout);
        if until > rest {
            let (taken, polls) = self.spin(start, until)?;
            if taken.messages > 0 || until == timeout || self.is_draining() {
                // What is there after a rest came before its end.
                let met = if polls == 0 && !rest.is_zero() { Arrival::Woken } else { Arrival::Polled };
                return Ok((taken, met));
            }
        }
        Ok((self.sleep(timeout - until)?, Arrival::Woken))
    }

    /// Looks until there is something, without sleep, for so long after `start`, or until the lane
    /// leaves; and how often that was in vain.
    fn spin(&mut self, start: Instant, until: Duration) -> Result<(RecvSummary, u32)> {
        let mut polls = 0_u32;
        let taken = loop {
            let taken = self.poll(polls)?;
            if taken.messages > 0 {
                break taken;
            }
            polls = polls.wrapping_add(1);
            let is_over = polls.is_multiple_of(POLLS_PER_CLOCK_READ)
                && (self.is_draining() || start.elapsed() >= until);
            if is_over {
                break taken;
            }
            hint::spin_loop();
        };
        self.lane_shared.cells.add(Count::EmptyPolls, polls.into());
        Ok((taken, polls))
    }

    /// The look of this number at what there is. What costs a system call although nothing has
    /// come, a lane with queues does not do each time.
    #[inline]
    fn poll(&mut self, number: u32) -> Result<RecvSummary> {
        let nothing = |xdp: &XdpIo| !xdp.can_receive() && !number.is_multiple_of(POLLS_PER_KERNEL_POLL);
        if self.xdp.as_ref().is_some_and(nothing) {
            return Ok(RecvSummary::default());
        }
        self.recv_batch(Wait::Never)
    }

    /// Sleeps until something comes, for at most `timeout`, of which the kernel may leave out a
    /// quarter.
    fn sleep(&mut self, timeout: Duration) -> Result<RecvSummary> {
        self.lane_shared.cells.add(Count::Sleeps, 1);
        if let Some(xdp) = &mut self.xdp {
            // What is there, or came just now, is no reason to look at the socket.
            xdp.wait(timeout)?;
            return self.recv_batch(Wait::Never);
        }
        if self.uring.is_some() {
            self.timeout = Some(timeout);
        } else if !self.timeout.is_some_and(|set| set <= timeout && set >= timeout - timeout / 4) {
            // Below a microsecond it would mean for ever.
            let bound = timeout.max(Duration::from_micros(1));
            sock::set_recv_timeout(self.lane_shared.fd.as_fd(), bound)
                .map_err(|err| Error::system("receive timeout", err))?;
            self.timeout = Some(timeout);
        }
        self.recv_batch(Wait::First)
    }

    /// Sleeps until something comes, for `time`, which is short: to the microsecond.
    fn sleep_precise(&mut self, time: Duration) -> Result<RecvSummary> {
        if self.xdp.is_none() && self.uring.is_none() {
            self.lane_shared.cells.add(Count::Sleeps, 1);
            sock::wait_readable(self.lane_shared.fd.as_fd(), time);
            return self.recv_batch(Wait::Never);
        }
        self.sleep(time)
    }

    /// Takes a batch: from a queue of a device, if the lane has any and there is something, else
    /// from the lane's own socket.
    #[inline]
    pub(crate) fn recv_batch(&mut self, wait: Wait) -> Result<RecvSummary> {
        let companion_first = self.xdp.as_mut().is_some_and(XdpIo::take_kernel_turn);
        if companion_first {
            let taken = self.recv_from_socket(Wait::Never)?;
            if taken.messages > 0 {
                return Ok(taken);
            }
        }
        let taken = self.recv_from_queues();
        if taken.messages > 0 || companion_first {
            return Ok(taken);
        }
        if let Some(xdp) = &mut self.xdp {
            xdp.ack_kernel_turn();
        }
        self.recv_from_socket(wait)
    }

    /// Takes what may have come behind a full batch, without waiting. Where queues bring batches
    /// their companion is not asked for that, which is a system call: its turn comes after so many
    /// batches anyway.
    #[inline]
    pub(crate) fn recv_more(&mut self) -> Result<RecvSummary> {
        if self.xdp.as_ref().is_some_and(XdpIo::has_batch) {
            return Ok(self.recv_from_queues());
        }
        self.recv_batch(Wait::Never)
    }

    /// Whether a queue whose turn has not come since the lane last paused has something. Each has
    /// one turn: who goes on for as long as something comes never pauses.
    #[inline]
    pub(crate) fn is_within_round(&mut self) -> bool {
        self.xdp.as_mut().is_some_and(XdpIo::is_within_round)
    }

    /// Takes a batch from a queue of a device, if the lane has any and there is something.
    #[inline]
    fn recv_from_queues(&mut self) -> RecvSummary {
        let Some(xdp) = &mut self.xdp else { return RecvSummary::default() };
        let taken =
            xdp.receive(self.caps.batch, self.caps.datagram_size, self.drop_policy, &self.lane_shared.cells);
        xdp.publish_backlog(&self.lane_shared.cells);
        if taken.messages > 0 {
            self.lane_shared.cells.add(Count::DeliveredByXdp, taken.datagrams as u64);
            self.count(taken);
        }
        taken
    }

    #[inline]
    fn recv_from_socket(&mut self, wait: Wait) -> Result<RecvSummary> {
        let mut taken = self.recv_raw(wait)?;
        if self.drop_policy == DropPolicy::Head && taken.messages == self.caps.batch {
            taken = self.drop_stale(taken)?;
        }
        self.count(taken);
        Ok(taken)
    }

    /// Gives up the batch that was `taken`, and what is behind it, if the socket's queue is more
    /// than half full: up to the last batch that is there.
    #[cold]
    fn drop_stale(&mut self, mut taken: RecvSummary) -> Result<RecvSummary> {
        // What a ring holds was in the queue, too.
        let (queued, limit) = self.backlog();
        if queued <= limit / 2 {
            return Ok(taken);
        }
        // More may come all the time.
        let mut most = limit / SKB_TRUESIZE_MIN;
        while taken.messages == self.caps.batch && most >= taken.messages && self.backlog().0 > 0 {
            self.lane_shared.cells.add(Count::DroppedStale, taken.datagrams as u64);
            most -= taken.messages;
            taken = self.recv_raw(Wait::Never)?;
        }
        Ok(taken)
    }

    /// Bytes of memory that wait in the socket's queue, and how many there can be; what the ring
    /// has taken counts as little as it can have been.
    fn backlog(&self) -> (usize, usize) {
        let state = sock::queue_state(self.lane_shared.fd.as_fd()).unwrap_or_default();
        let held = self.uring.as_ref().map_or(0, UringIo::prefetched);
        (state.queued_bytes as usize + held * SKB_TRUESIZE_MIN, state.limit_bytes as usize)
    }

    /// Receives from the socket, and counts nothing but what fails.
    #[inline]
    fn recv_raw(&mut self, wait: Wait) -> Result<RecvSummary> {
        let steered = self.load.as_ref().map(|(words, base)| words.load(base + abi::LOAD_STEERED));
        let received = match &mut self.uring {
            Some(uring) => {
                let wait = if wait == Wait::First { self.timeout } else { None };
                uring.recv(self.lane_shared.fd.as_fd(), wait, &self.lane_shared.cells)
            }
            None => self.io.recv(self.lane_shared.fd.as_fd(), wait),
        };
        let taken = match received {
            Ok(taken) => taken,
            Err(err) if self.uring.as_ref().is_some_and(UringIo::is_broken) => {
                self.disable_uring(&err);
                return self.recv_raw(Wait::Never);
            }
            Err(err) => {
                self.lane_shared.cells.add(Count::RecvErrors, 1);
                return Err(Error::system("receiving", err));
            }
        };
        if let (Some((words, base)), Some(steered)) = (&self.load, steered) {
            let at = base + abi::LOAD_TAKEN;
            // An empty queue means that all that was steered here was taken or dropped: the sums
            // meet again.
            let total = if taken.messages == 0 { steered } else { words.load(at) + taken.messages as u64 };
            words.store(at, total);
        }
        Ok(taken)
    }

    /// io_uring has failed, with all that it had taken handed out: the socket is as good as ever.
    #[cold]
    fn disable_uring(&mut self, err: &std::io::Error) {
        log::warn!("lane {}: engine mmsg from now on, since io_uring fails: {err}", self.lane_shared.id);
        self.lane_shared.cells.add(Count::UringFallbacks, 1);
        if let Some(mut uring) = self.uring.take() {
            uring.stop();
            self.orphaned.has_ring |= uring.has_socket_ref();
            self.readiness = uring.into_readiness();
        }
        self.timeout = None;
    }

    #[inline]
    fn count(&self, taken: RecvSummary) {
        let cells = &self.lane_shared.cells;
        if taken.messages == 0 {
            return;
        }
        cells.add(Count::Batches, 1);
        cells.add(Count::Messages, taken.messages as u64);
        cells.add(Count::Delivered, taken.datagrams as u64);
        cells.add(Count::DeliveredBytes, taken.bytes as u64);
        if taken.truncated > 0 {
            cells.add(Count::Truncated, taken.truncated as u64);
        }
        if taken.gro_messages > 0 {
            cells.add(Count::GroMessages, taken.gro_messages as u64);
        }
    }

    /// What was taken last, in the form for the application.
    #[inline]
    pub(crate) fn received(&mut self, taken: RecvSummary) -> Received<'_> {
        let (batch, ring) = self.io.split(taken, &self.shared.addr);
        let v6 = self.shared.addr.is_ipv6();
        let (frames, xdp) = self.xdp.as_mut().map_or((None, None), XdpIo::split);
        let batch = match frames {
            Some(frames) => {
                Batch::new(Origin::Frames(frames), &self.shared.addr, taken.messages, taken.datagrams)
            }
            None => match self.uring.as_ref().and_then(UringIo::origin) {
                Some(origin) => Batch::new(origin, &self.shared.addr, taken.messages, taken.datagrams),
                None => batch,
            },
        };
        Received {
            batch,
            out: Outbox::new(ring.batch(), self.lane_shared.fd.as_fd(), &self.lane_shared.cells, v6, xdp),
        }
    }

    /// Throws away, and counts, what is still queued.
    fn discard(&mut self) {
        if let Some(xdp) = &mut self.xdp {
            let left = xdp.discard(&self.lane_shared.cells);
            self.lane_shared.cells.add(Count::Discarded, left);
        }
        if let Some(mut uring) = self.uring.take() {
            uring.stop();
            // It ends with what the ring holds; an error says that this was nothing.
            while let Ok(taken) = uring.recv(self.lane_shared.fd.as_fd(), None, &self.lane_shared.cells)
                && taken.messages > 0
            {
                self.lane_shared.cells.add(Count::Discarded, taken.datagrams as u64);
            }
            self.orphaned.has_ring |= uring.has_socket_ref();
        }
        for _ in 0..DISCARD_BUDGET {
            match self.io.recv(self.lane_shared.fd.as_fd(), Wait::Never) {
                Ok(taken) if taken.messages > 0 => {
                    self.lane_shared.cells.add(Count::Discarded, taken.datagrams as u64);
                }
                _ => return,
            }
        }
    }
}

impl AsFd for Lane {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match (&self.xdp, &self.uring) {
            (Some(xdp), _) => xdp.as_fd(),
            (None, Some(uring)) => uring.readiness(self.lane_shared.fd.as_fd()),
            (None, None) => match &self.readiness {
                Some(readiness) => readiness.as_fd(),
                None => self.lane_shared.fd.as_fd(),
            },
        }
    }
}

impl Drop for Lane {
    /// Leaves steering if it has not yet, counts what is thrown away, and closes.
    fn drop(&mut self) {
        let reusable = self.shared.detach(&self.lane_shared);
        if let Some(xdp) = &mut self.xdp {
            xdp.release_queues();
        }
        self.discard();
        // The XSKs close before their queues are given back, and before the counters are read for
        // good.
        self.shared.remove_queues(self.lane_shared.id);
        self.xdp = None;
        self.orphaned.sockets = self.shared.finish_close(&self.lane_shared, reusable, self.orphaned.has_ring);
    }
}
