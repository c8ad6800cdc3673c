//! All waits of a lane: for its next batch, and the delay after one.

use std::hint;
use std::time::{Duration, Instant};

use manylane_policy::rx_coalesce::RxCoalesce;
use manylane_sys::cpu;
use manylane_sys::tick::reduce_timer_slack;

use crate::counters::Count;
use crate::error::Result;
use crate::io::{Io, RecvSummary};
use crate::lane_shared::LaneShared;
use crate::wait::WaitPolicy;
use crate::wait::governor::{Arrival, Plan, WaitGovernor};

/// Polls per read of the clock while a lane spins.
const POLLS_PER_CLOCK_READ: u32 = 8;

/// Batches per read of the coarse clock, for the load.
const BATCHES_PER_CLOCK_READ: u32 = 16;

/// Waits for batches by the policy of one lane.
pub(super) struct Waiter {
    governor: WaitGovernor,
    /// Zero of the governor's times.
    opened: Instant,
    /// The waiting thread has 1 µs timer slack and the shortest time slice.
    is_low_latency: bool,
    /// Delays of the next receive of a lane in `serve`. Other lanes never delay.
    coalesce: RxCoalesce,
    batches: u32,
}

impl Waiter {
    pub(super) fn new(policy: WaitPolicy, io: &Io) -> Self {
        let (batch, opened) = (io.capabilities().batch, io.now());
        let coalesce = RxCoalesce::new(Duration::ZERO, batch, io.recv_capacity());
        Self { governor: WaitGovernor::new(policy), opened, is_low_latency: false, coalesce, batches: 0 }
    }

    /// Delays for at most `longest` from now on; none: as the load requires.
    pub(super) fn start_coalescing(&mut self, longest: Option<Duration>) {
        match longest {
            Some(longest) => self.coalesce.set_max_delay(longest),
            None => self.coalesce = self.coalesce.by_load(),
        }
    }

    /// True if the next receive must not sleep, because a delay may be due.
    #[inline]
    pub(super) fn is_delay_pending(&self) -> bool {
        self.coalesce.is_pending()
    }

    /// Delays after a batch of `messages` messages, if that pays. Another queue of the lane that
    /// has frames from before the last delay is served first.
    #[inline]
    pub(super) fn delay_after(&mut self, io: &mut Io, messages: usize) {
        self.batches = self.batches.wrapping_add(1);
        if self.batches.is_multiple_of(BATCHES_PER_CLOCK_READ) {
            self.coalesce.follow_load(|| cpu::open_stat().ok());
        }
        if io.is_within_round() {
            self.coalesce.accumulate(messages);
        } else if let Some(delay) = self.coalesce.next_delay(messages) {
            io.delay(delay);
        }
    }

    /// Waits for a batch by the policy of the lane; returns an empty one after `timeout`.
    pub(super) fn recv(&mut self, io: &mut Io, lane: &LaneShared, timeout: Duration) -> Result<RecvSummary> {
        if timeout.is_zero() {
            return io.recv();
        }
        if self.governor.is_adaptive() && !self.is_low_latency {
            self.set_low_latency();
        }
        if !self.governor.can_spin() {
            let summary = io.sleep(timeout)?;
            if summary.messages > 0 && self.governor.is_adaptive() {
                self.governor.record_arrival(io.now() - self.opened, Arrival::Woken);
            }
            return Ok(summary);
        }
        let summary = io.recv()?;
        if summary.messages > 0 {
            return Ok(summary);
        }
        // The clock is read only if there was nothing to receive.
        let start = io.now();
        let plan = self.governor.plan(start - self.opened);
        let (summary, met) = self.wait_with_plan(io, lane, plan, start, timeout)?;
        if summary.messages == 0 {
            self.governor.record_timeout();
        } else if self.governor.is_adaptive() {
            self.governor.record_arrival(io.now() - self.opened, met);
        }
        Ok(summary)
    }

    /// Sets 1 µs timer slack and the shortest time slice, so that short sleeps end on time and the
    /// thread preempts on wake-up.
    #[cold]
    fn set_low_latency(&mut self) {
        self.is_low_latency = true;
        reduce_timer_slack();
        if let Err(err) = cpu::set_short_slice() {
            log::debug!(
                "cannot set a short time slice, so a lane may wait for other threads on its CPU: sched_setattr: {err}"
            );
        }
    }

    /// Executes `plan` in a wait that began at `start`: a precise sleep, polls, and a sleep.
    fn wait_with_plan(
        &mut self,
        io: &mut Io,
        lane: &LaneShared,
        plan: Plan,
        start: Instant,
        timeout: Duration,
    ) -> Result<(RecvSummary, Arrival)> {
        let sleep_time = plan.sleep_until.min(timeout);
        if !sleep_time.is_zero() {
            let summary = io.sleep_precise(sleep_time)?;
            if summary.messages > 0 || lane.is_draining() {
                return Ok((summary, Arrival::Woken));
            }
            self.governor.record_wake_latency((io.now() - start).saturating_sub(sleep_time));
        }
        let until = plan.spin_until.min(timeout);
        if until > sleep_time {
            let (summary, polls) = spin(io, lane, start, until)?;
            if summary.messages > 0 || until == timeout || lane.is_draining() {
                // Found by the first poll after a sleep: it arrived before the sleep ended.
                let met = if polls == 0 && !sleep_time.is_zero() { Arrival::Woken } else { Arrival::Polled };
                return Ok((summary, met));
            }
        }
        Ok((io.sleep(timeout - until)?, Arrival::Woken))
    }
}

/// Polls without sleep until a batch arrives, the time `until` after `start` has passed, or the
/// lane is removed. Returns the batch and the number of empty polls.
fn spin(io: &mut Io, lane: &LaneShared, start: Instant, until: Duration) -> Result<(RecvSummary, u32)> {
    let mut polls = 0_u32;
    let summary = loop {
        let summary = io.poll(polls)?;
        if summary.messages > 0 {
            break summary;
        }
        polls = polls.wrapping_add(1);
        let is_over =
            polls.is_multiple_of(POLLS_PER_CLOCK_READ) && (lane.is_draining() || io.now() - start >= until);
        if is_over {
            break summary;
        }
        hint::spin_loop();
    };
    lane.cells.add(Count::EmptyPolls, polls.into());
    Ok((summary, polls))
}
