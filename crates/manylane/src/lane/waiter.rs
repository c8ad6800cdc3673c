//! How a lane waits for its next batch, and when it pauses after one.

use std::hint;
use std::time::{Duration, Instant};

use manylane_sys::measure::reduce_timer_slack;
use manylane_sys::rx_coalesce::RxCoalesce;
use manylane_sys::{cpu, tick};

use crate::counters::Count;
use crate::error::Result;
use crate::io::{Io, RecvSummary};
use crate::lane_shared::LaneShared;
use crate::wait::WaitPolicy;
use crate::wait::governor::{Arrival, Plan, WaitGovernor};

/// A lane that spins reads the clock once in so many polls.
const POLLS_PER_CLOCK_READ: u32 = 8;

/// The policies of one lane.
pub(super) struct Waiter {
    governor: WaitGovernor,
    /// What times of the governor count from.
    opened: Instant,
    /// The thread that waits has the timer slack that short sleeps need, and runs when it wakes up.
    is_low_latency: bool,
}

impl Waiter {
    pub(super) fn new(policy: WaitPolicy) -> Self {
        Self { governor: WaitGovernor::new(policy), opened: Instant::now(), is_low_latency: false }
    }

    /// Takes a batch as soon as there is something, by the policy of the lane; none after
    /// `timeout`.
    pub(super) fn recv(&mut self, io: &mut Io, lane: &LaneShared, timeout: Duration) -> Result<RecvSummary> {
        if timeout.is_zero() {
            return io.recv();
        }
        if self.governor.is_adaptive() && !self.is_low_latency {
            self.set_low_latency();
        }
        if !self.governor.can_spin() {
            let taken = io.sleep(timeout)?;
            if taken.messages > 0 && self.governor.is_adaptive() {
                self.governor.record_arrival(self.opened.elapsed(), Arrival::Woken);
            }
            return Ok(taken);
        }
        let taken = io.recv()?;
        if taken.messages > 0 {
            return Ok(taken);
        }
        // Only now that there is nothing the clock is read.
        let start = Instant::now();
        let plan = self.governor.plan(start - self.opened);
        let (taken, met) = self.wait_with_plan(io, lane, plan, start, timeout)?;
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
        io: &mut Io,
        lane: &LaneShared,
        plan: Plan,
        start: Instant,
        timeout: Duration,
    ) -> Result<(RecvSummary, Arrival)> {
        let rest = plan.sleep_until.min(timeout);
        if !rest.is_zero() {
            let taken = io.sleep_precise(rest)?;
            if taken.messages > 0 || lane.is_draining() {
                return Ok((taken, Arrival::Woken));
            }
            self.governor.record_wake_latency(start.elapsed().saturating_sub(rest));
        }
        let until = plan.spin_until.min(timeout);
        if until > rest {
            let (taken, polls) = spin(io, lane, start, until)?;
            if taken.messages > 0 || until == timeout || lane.is_draining() {
                // What is there after a rest came before its end.
                let met = if polls == 0 && !rest.is_zero() { Arrival::Woken } else { Arrival::Polled };
                return Ok((taken, met));
            }
        }
        Ok((io.sleep(timeout - until)?, Arrival::Woken))
    }
}

/// Looks until there is something, without sleep, for so long after `start`, or until the lane
/// leaves; and how often that was in vain.
fn spin(io: &mut Io, lane: &LaneShared, start: Instant, until: Duration) -> Result<(RecvSummary, u32)> {
    let mut polls = 0_u32;
    let taken = loop {
        let taken = io.poll(polls)?;
        if taken.messages > 0 {
            break taken;
        }
        polls = polls.wrapping_add(1);
        let is_over =
            polls.is_multiple_of(POLLS_PER_CLOCK_READ) && (lane.is_draining() || start.elapsed() >= until);
        if is_over {
            break taken;
        }
        hint::spin_loop();
    };
    lane.cells.add(Count::EmptyPolls, polls.into());
    Ok((taken, polls))
}

/// When a lane that serves pauses: after which batches, and for how long.
pub(crate) struct Pauses(RxCoalesce);

impl Pauses {
    pub(super) fn new(longest: Duration, io: &Io, batch: usize) -> Self {
        Self(RxCoalesce::new(longest, batch, io.recv_capacity()))
    }

    /// Whether the next receive shall not sleep, since a pause may be due.
    #[inline]
    pub(super) fn is_pending(&self) -> bool {
        self.0.is_pending()
    }

    /// Pauses if that pays after a batch of so many messages. While another queue of the lane has
    /// something, it comes first.
    #[inline]
    pub(super) fn after(&mut self, messages: usize, is_within_round: bool) {
        if is_within_round {
            self.0.accumulate(messages);
        } else if let Some(pause) = self.0.next_delay(messages) {
            tick::sleep(pause);
        }
    }
}
