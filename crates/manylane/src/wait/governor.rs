//! Decides from the times of the last batches if a lane polls or sleeps. Without I/O and clock:
//! tests provide the time.
//!
//! `adaptive` keeps the last sixteen gaps between two batches that the lane waited for. When a
//! lane has found nothing, it decides:
//!
//! 1. When is the next batch due? The shortest gap but one counts, because one gap may be an
//!    outlier.
//! 2. The lane would sleep until shortly before that time, and poll from then on. If there is no
//!    time for a sleep, it would poll at once. It picks the end of polling that would have cost
//!    least over the last sixteen gaps, if each batch that polling misses costs a sleep and a
//!    wake-up ([`WAKEUP_COST_NANOS`]). So a few long gaps among short ones do not stop it from
//!    polling for the others.
//! 3. If sleeping at once would have cost less, the lane sleeps. A precise sleep has to pay, too:
//!    with the batch before it, the timer and the polling after it, it may use the CPU for
//!    at most five twelfths of the gap ([`SLEEP_COST_SHARE_MAX`]).
//! 4. If the batch is overdue, the lane polls for some time longer. This overtime is limited to a
//!    sixteenth of the time.
//!
//! So a lane whose requests are microseconds apart polls all the time. A lane whose requests
//! arrive at even distances polls a little before each. A lane that cannot predict anything
//! sleeps. A lane polls at most once after each batch: a lane without traffic does not poll.
//!
//! A sleep ends late, by a few microseconds on bare metal and by more in a virtual machine. The
//! governor learns by how much, and ends precise sleeps earlier. It also takes that time as the
//! cost of a sleep that a timer ends, because both are what the machine needs to set the timer, to
//! go idle and to come back. Gaps count from the time at which a batch is estimated to have
//! arrived, not from the time at which a sleeping lane received it: otherwise one late wake-up
//! would make all later ones late.

use std::time::Duration;

use super::WaitPolicy;

/// Number of gaps in the history.
const GAP_HISTORY_LEN: usize = 16;
/// Outliers to ignore at each end of the sorted gaps.
const OUTLIERS_PER_SIDE: usize = 1;
/// Average polling time per batch that pays, in nanoseconds. About the cost of going to sleep and
/// being woken, with the interrupt, plus the value of the latency that it saves.
const WAKEUP_COST_NANOS: u64 = 25_000;
/// Maximum nanoseconds of polling in one wait.
const SPIN_NANOS_MAX: u64 = 8 * WAKEUP_COST_NANOS;
/// Minimum time for a precise sleep, wake-up latency included: a shorter one saves nothing.
const SLEEP_NANOS_MIN: u64 = 20_000;
/// Margin added to predictions.
const SLACK_NANOS: u64 = 2_000;
/// Initial estimate of the wake-up latency.
const WAKE_LATENCY_NANOS_DEFAULT: u64 = 10_000;
/// Maximum of one observed latency: more is a stall.
const WAKE_LATENCY_NANOS_MAX: u64 = 100_000;
/// One in this many overdue batches is polled for.
const OVERDUE_SPIN_INTERVAL: u32 = 8;
/// One in this many precise sleeps that cost too much is tried, because the cost may have changed.
const SLEEP_PROBE_INTERVAL: u32 = 512;
/// Maximum nanoseconds of polling for an overdue batch: most stalls of machines are short.
const OVERTIME_NANOS_MAX: u64 = 2 * WAKEUP_COST_NANOS;
/// Overtime budget: one part in this many of the time, saved up to a maximum.
const OVERTIME_DIVISOR: u64 = 16;
const OVERTIME_BUDGET_NANOS_MAX: u64 = 8 * WAKEUP_COST_NANOS;
/// Maximum share of a gap for which a precise sleep, with its overhead, may use the CPU:
/// safely below half.
const SLEEP_COST_SHARE_MAX: (u64, u64) = (5, 12);
/// Gaps between two sorts of the history.
const RESORT_INTERVAL: usize = 4;

/// A wait, as times from its beginning: a precise sleep until `sleep_until` unless a batch
/// arrives, polling until `spin_until`, and then a sleep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) sleep_until: Duration,
    pub(crate) spin_until: Duration,
}

/// Detection of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// By a poll: it has just arrived.
    Polled,
    /// By a wake-up: it arrived some time ago.
    Woken,
}

/// The policy of one lane. Times come from any monotonic clock, relative to any origin.
#[derive(Clone, Debug)]
pub(crate) enum WaitGovernor {
    /// Always sleeps.
    Sleep,
    /// Polls for this time in each wait.
    Spin(Duration),
    /// Predicts from the last gaps.
    Adaptive(Box<Adaptive>),
}

impl WaitGovernor {
    pub(crate) fn new(policy: WaitPolicy) -> Self {
        match policy {
            WaitPolicy::Sleep | WaitPolicy::BusyPoll(_) => Self::Sleep,
            WaitPolicy::Spin(time) => Self::Spin(time),
            WaitPolicy::Adaptive => Self::Adaptive(Box::default()),
        }
    }

    /// True if a wait may poll: only then are the first poll and the read of the clock worth it.
    #[inline]
    pub(crate) fn can_spin(&self) -> bool {
        match self {
            Self::Sleep => false,
            Self::Spin(_) => true,
            Self::Adaptive(adaptive) => adaptive.has_new_batch,
        }
    }

    /// True if it needs [`record_arrival`](Self::record_arrival).
    #[inline]
    pub(crate) fn is_adaptive(&self) -> bool {
        matches!(self, Self::Adaptive(_))
    }

    /// The plan for the wait that begins at `now`.
    #[inline]
    pub(crate) fn plan(&mut self, now: Duration) -> Plan {
        match self {
            Self::Sleep => Plan::default(),
            Self::Spin(time) => Plan { sleep_until: Duration::ZERO, spin_until: *time },
            Self::Adaptive(adaptive) => adaptive.plan(nanos(now)),
        }
    }

    /// Records a batch that a wait received at `now`.
    #[inline]
    pub(crate) fn record_arrival(&mut self, now: Duration, met: Arrival) {
        if let Self::Adaptive(adaptive) = self {
            adaptive.record_arrival(nanos(now), met);
        }
    }

    /// Records a wait that ended without a batch.
    #[cold]
    pub(crate) fn record_timeout(&mut self) {
        if let Self::Adaptive(adaptive) = self {
            adaptive.has_new_batch = false;
            adaptive.charge_overtime(u64::MAX);
        }
    }

    /// Records by how much a precise sleep ended late.
    pub(crate) fn record_wake_latency(&mut self, by: Duration) {
        if let Self::Adaptive(adaptive) = self {
            let by = nanos(by).min(WAKE_LATENCY_NANOS_MAX);
            adaptive.update_wake_latency(by);
            adaptive.update_sleep_cost(by);
        }
    }
}

/// State of the adaptive policy.
#[derive(Clone, Debug)]
pub(crate) struct Adaptive {
    /// In nanoseconds; a ring.
    gaps: [u64; GAP_HISTORY_LEN],
    /// Gaps recorded so far.
    gap_count: usize,
    /// The gaps at the last sort, by length.
    sorted_gaps: [u64; GAP_HISTORY_LEN],
    /// The lateness that nearly all sleeps stay below.
    wake_latency: u64,
    /// Estimated cost of a precise sleep, and the number of sleeps rejected because of it.
    sleep_cost: u64,
    rejected_sleeps: u32,
    /// Estimated arrival of the last batch of a wait, and the time at which the lane received it.
    last_arrival: Option<u64>,
    last_received: u64,
    /// Of the current wait: its start, the time at which the batch is due, and the end of polling,
    /// if it polls.
    wait_start: u64,
    due: u64,
    spin_end: u64,
    /// End of the precise sleep in the current wait, if there is one.
    sleep_end: Option<u64>,
    /// Number of overdue batches.
    overdue_count: u32,
    /// Nanoseconds saved up for overtime.
    overtime_budget: u64,
    /// A batch was received since the last wait.
    has_new_batch: bool,
}

/// Longest gap that is recorded: twelve days.
const GAP_NANOS_MAX: u64 = 1 << 50;

/// A candidate for polling.
#[derive(Clone, Copy, Debug)]
struct SpinWindow {
    /// Its end, counted from the last batch.
    end: u64,
    /// Total polling time that it would have taken over the last gaps.
    spin_time: u64,
}

impl Default for Adaptive {
    fn default() -> Self {
        let gaps = [GAP_NANOS_MAX; GAP_HISTORY_LEN];
        Self {
            gaps,
            gap_count: 0,
            sorted_gaps: gaps,
            wake_latency: WAKE_LATENCY_NANOS_DEFAULT,
            sleep_cost: WAKE_LATENCY_NANOS_DEFAULT,
            rejected_sleeps: 0,
            last_arrival: None,
            last_received: 0,
            wait_start: 0,
            due: 0,
            spin_end: 0,
            sleep_end: None,
            overdue_count: 0,
            overtime_budget: 0,
            has_new_batch: false,
        }
    }
}

impl Adaptive {
    #[inline]
    fn record_arrival(&mut self, now: u64, met: Arrival) {
        self.has_new_batch = true;
        self.last_received = now;
        self.charge_overtime(now);
        let arrived_at = match met {
            Arrival::Polled => now,
            Arrival::Woken => self.estimate_arrival(now),
        };
        let arrived_at = arrived_at.max(self.last_arrival.unwrap_or(0));
        if let Some(last) = self.last_arrival.replace(arrived_at) {
            let gap = (arrived_at - last).min(GAP_NANOS_MAX);
            self.overtime_budget =
                (self.overtime_budget + gap / OVERTIME_DIVISOR).min(OVERTIME_BUDGET_NANOS_MAX);
            self.gaps[self.gap_count % GAP_HISTORY_LEN] = gap;
            self.gap_count = self.gap_count.wrapping_add(1);
            if self.gap_count.is_multiple_of(RESORT_INTERVAL) {
                self.sorted_gaps = self.gaps;
                self.sorted_gaps.sort_unstable();
            }
        }
    }

    /// Charges the budget with the overtime of the wait that ends.
    fn charge_overtime(&mut self, now: u64) {
        self.overtime_budget =
            self.overtime_budget.saturating_sub(now.min(self.spin_end).saturating_sub(self.due));
    }

    /// Estimates when the batch arrived that the lane received at `now`, after a wake-up.
    fn estimate_arrival(&mut self, now: u64) -> u64 {
        // Not before the last poll that found nothing.
        let polled_until = if now > self.spin_end { self.spin_end } else { self.wait_start };
        let earliest = now.saturating_sub(self.wake_latency).max(polled_until).min(now);
        let Some(awake) = self.sleep_end.take() else { return earliest };
        if now > awake.saturating_add(self.wake_latency / 2) {
            // The sleep was over, or nearly so. The best estimate is that the batch arrived when
            // it was due. The wake-up took at least this long, whether the timer or the batch
            // caused it.
            let late = (now - awake).min(WAKE_LATENCY_NANOS_MAX);
            if late > self.wake_latency {
                self.update_wake_latency(late);
            }
            self.update_sleep_cost(late);
            let due = self
                .last_arrival
                .map_or(now, |last| last.saturating_add(self.sorted_gaps[OUTLIERS_PER_SIDE]));
            return due.clamp(earliest, now);
        }
        // Raise the estimate: a sleep that is always cut short is too long, and does not show by
        // how much.
        self.wake_latency = (self.wake_latency + self.wake_latency / 8 + 1).min(WAKE_LATENCY_NANOS_MAX);
        earliest
    }

    /// Moves the estimate by a quarter upwards and by 1/32 downwards, so that most sleeps stay
    /// below it.
    fn update_wake_latency(&mut self, late: u64) {
        if late > self.wake_latency {
            self.wake_latency += (late - self.wake_latency).div_ceil(4);
        } else {
            self.wake_latency -= (self.wake_latency - late) / 32;
        }
    }

    /// Updates the estimated cost after a precise sleep that was not cut short ended `late`.
    fn update_sleep_cost(&mut self, late: u64) {
        // One stall must not dominate the average.
        let late = late.min(2 * self.sleep_cost + WAKEUP_COST_NANOS / 5);
        self.sleep_cost = self.sleep_cost - self.sleep_cost / 4 + late / 4;
    }

    /// Decides whether a precise sleep pays in this gap, given the work before it and the polling
    /// after it. Allows a trial now and then to learn the current cost.
    fn should_sleep(&mut self, work_and_look: u64, gap: u64) -> bool {
        let cost = self.sleep_cost.saturating_add(work_and_look);
        if cost.saturating_mul(SLEEP_COST_SHARE_MAX.1) <= gap.saturating_mul(SLEEP_COST_SHARE_MAX.0) {
            return true;
        }
        self.rejected_sleeps = self.rejected_sleeps.wrapping_add(1);
        self.rejected_sleeps.is_multiple_of(SLEEP_PROBE_INTERVAL)
    }

    /// The polling from `start` on, counted from the last batch, that would have cost least over
    /// the last gaps: its time, and a wake-up for each batch that it misses. None if sleeping
    /// costs less.
    fn best_spin(&self, start: u64) -> Option<SpinWindow> {
        let (mut best, mut least_cost) = (None, GAP_HISTORY_LEN as u64 * WAKEUP_COST_NANOS);
        let mut met = 0;
        for (index, &gap) in self.sorted_gaps.iter().enumerate() {
            let missed = (GAP_HISTORY_LEN - 1 - index) as u64;
            let end = gap + (gap - self.sorted_gaps[OUTLIERS_PER_SIDE.min(index)]) / 4 + SLACK_NANOS;
            met += gap.saturating_sub(start);
            if index < GAP_HISTORY_LEN / 2 || end <= start || end - start > SPIN_NANOS_MAX {
                continue;
            }
            let took = met + missed * (end - start);
            let cost = took + missed * WAKEUP_COST_NANOS;
            if cost <= least_cost {
                (best, least_cost) = (Some(SpinWindow { end, spin_time: took }), cost);
            }
        }
        best
    }

    fn plan(&mut self, now: u64) -> Plan {
        (self.wait_start, self.due, self.spin_end, self.sleep_end) = (now, now, now, None);
        let Some(last) = self.last_arrival else { return Plan::default() };
        let work = now.saturating_sub(self.last_received);
        // These times count from the last batch.
        let (began, now) = (now, now.saturating_sub(last));
        let first = self.sorted_gaps[OUTLIERS_PER_SIDE];
        let sleeps = first.saturating_sub(now);
        // Wake up a little early.
        let early = self.wake_latency + SLACK_NANOS;
        let can_sleep = sleeps >= SLEEP_NANOS_MIN && sleeps > early;
        let after_sleep = self.best_spin(first).filter(|spin| {
            can_sleep
                && self.should_sleep(work + SLACK_NANOS + spin.spin_time / GAP_HISTORY_LEN as u64, first)
        });
        let spin = after_sleep.or_else(|| self.best_spin(now)).or_else(|| self.overdue_spin(now));
        let Some(SpinWindow { end, .. }) = spin else {
            // The estimate decays; otherwise a machine that was slow once would never sleep
            // precisely again.
            self.wake_latency -= self.wake_latency / 256;
            return Plan::default();
        };
        let sleep = if after_sleep.is_some() { sleeps - early } else { 0 };
        let overtime = self.overtime_budget.min(OVERTIME_NANOS_MAX);
        self.sleep_end = after_sleep.map(|_| began.saturating_add(sleep));
        self.due = began.saturating_add(end - now);
        self.spin_end = self.due.saturating_add(overtime);
        Plan {
            sleep_until: Duration::from_nanos(sleep),
            spin_until: Duration::from_nanos(end - now + overtime),
        }
    }

    /// Polling for a batch that should have arrived before `now`: the lane received others without
    /// a wait, or the time of the last one is uncertain. Where gaps are short, the next batch is
    /// due at any time. Else a trial now and then finds out.
    fn overdue_spin(&mut self, now: u64) -> Option<SpinWindow> {
        let longest = self.sorted_gaps[GAP_HISTORY_LEN - 1 - OUTLIERS_PER_SIDE];
        let end = longest + (longest - self.sorted_gaps[OUTLIERS_PER_SIDE]) / 4 + SLACK_NANOS;
        if end > now {
            return None;
        }
        self.overdue_count = self.overdue_count.wrapping_add(1);
        let spins = end <= WAKEUP_COST_NANOS || self.overdue_count.is_multiple_of(OVERDUE_SPIN_INTERVAL);
        spins.then(|| SpinWindow { end: now + end.min(WAKEUP_COST_NANOS), spin_time: 0 })
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
