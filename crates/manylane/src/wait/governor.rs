//! When a lane polls and when it sleeps, decided from the times of the last batches. No I/O and no
//! clock: tests bring their own time.
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
//!    with the batch before it, the timer and the polling after it, it may use the processor for
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

/// Gaps that are remembered.
const GAP_HISTORY_LEN: usize = 16;
/// Of these, odd ones at each side.
const OUTLIERS_PER_SIDE: usize = 1;
/// Nanoseconds of looking for each batch, on the average, that are worth it: about what going to
/// sleep and being woken costs a processor, with the interrupt, and what the one who is answered
/// would have waited for.
const WAKEUP_COST_NANOS: u64 = 25_000;
/// Nanoseconds that a lane looks at a stretch at most.
const SPIN_NANOS_MAX: u64 = 8 * WAKEUP_COST_NANOS;
/// A rest in which a lane is not asleep for so long, with the time that its end is late, saves
/// nothing.
const SLEEP_NANOS_MIN: u64 = 20_000;
/// Room around what was seen.
const SLACK_NANOS: u64 = 2_000;
/// By how much sleeps end late until it is known.
const WAKE_LATENCY_DEFAULT: u64 = 10_000;
/// What is seen of lateness at once, at most: more is a stumble.
const WAKE_LATENCY_MAX: u64 = 100_000;
/// An overdue batch is looked for once in so many times.
const OVERDUE_SPIN_INTERVAL: u32 = 8;
/// A rest that costs too much is tried once in so many times: what it costs may have changed.
const SLEEP_PROBE_INTERVAL: u32 = 512;
/// Nanoseconds that a lane looks on for a batch that is overdue, at most: machines stumble, and
/// most stumbles are short.
const OVERTIME_NANOS_MAX: u64 = 2 * WAKEUP_COST_NANOS;
/// One part in so many of the time may go into that, and so much of it is saved up.
const OVERTIME_DIVISOR: u64 = 16;
const OVERTIME_BUDGET_MAX: u64 = 8 * WAKEUP_COST_NANOS;
/// The share of a gap that a rest may keep the processor for, with all that belongs to it: safely
/// below half.
const SLEEP_COST_SHARE_MAX: (u64, u64) = (5, 12);
/// After so many gaps it is looked at them anew.
const RESORT_INTERVAL: usize = 4;

/// What to do in a wait, counted from its beginning: sleep until `rest` unless something comes,
/// look until `spin_until`, and then sleep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) sleep_until: Duration,
    pub(crate) spin_until: Duration,
}

/// How a batch was met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// By a look: it came just now.
    Polled,
    /// It woke a sleeper: it came some time ago.
    Woken,
}

/// The decision of one lane. Times are those of any clock that goes forward, since any moment.
#[derive(Clone, Debug)]
pub(crate) enum WaitGovernor {
    /// Sleeps.
    Sleep,
    /// Looks for so long in each wait.
    Spin(Duration),
    /// As the last gaps say.
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

    /// Whether a wait may be anything else than a sleep: whether it is worth it to look what is
    /// there, and what the time is.
    #[inline]
    pub(crate) fn can_spin(&self) -> bool {
        match self {
            Self::Sleep => false,
            Self::Spin(_) => true,
            Self::Adaptive(adaptive) => adaptive.has_new_batch,
        }
    }

    /// Whether it wants to be told when batches come.
    #[inline]
    pub(crate) fn is_adaptive(&self) -> bool {
        matches!(self, Self::Adaptive(_))
    }

    /// What to do in the wait that begins at `now`.
    #[inline]
    pub(crate) fn plan(&mut self, now: Duration) -> Plan {
        match self {
            Self::Sleep => Plan::default(),
            Self::Spin(time) => Plan { sleep_until: Duration::ZERO, spin_until: *time },
            Self::Adaptive(adaptive) => adaptive.plan(nanos(now)),
        }
    }

    /// A batch that was waited for is there at `now`.
    #[inline]
    pub(crate) fn record_arrival(&mut self, now: Duration, met: Arrival) {
        if let Self::Adaptive(adaptive) = self {
            adaptive.record_arrival(nanos(now), met);
        }
    }

    /// Nothing came for as long as the lane was to wait.
    #[cold]
    pub(crate) fn record_timeout(&mut self) {
        if let Self::Adaptive(adaptive) = self {
            adaptive.has_new_batch = false;
            adaptive.charge_overtime(u64::MAX);
        }
    }

    /// A rest ended so much late.
    pub(crate) fn record_wake_latency(&mut self, by: Duration) {
        if let Self::Adaptive(adaptive) = self {
            let by = nanos(by).min(WAKE_LATENCY_MAX);
            adaptive.update_wake_latency(by);
            adaptive.update_sleep_cost(by);
        }
    }
}

/// What the last gaps say.
#[derive(Clone, Debug)]
pub(crate) struct Adaptive {
    /// In nanoseconds.
    gaps: [u64; GAP_HISTORY_LEN],
    /// How many there were.
    gap_count: usize,
    /// The same, as they were at the last review, by length.
    sorted_gaps: [u64; GAP_HISTORY_LEN],
    /// By how much nearly all sleeps end late.
    wake_latency: u64,
    /// What a rest costs, as far as it is known, and how often one was too dear.
    sleep_cost: u64,
    rejected_sleeps: u32,
    /// When the last batch came that was waited for, and when the lane had it.
    last_arrival: Option<u64>,
    last_received: u64,
    /// When the wait began that follows it, until when it is due in it, and until when it is looked
    /// for, if it is.
    wait_start: u64,
    due: u64,
    spin_end: u64,
    /// Until when the lane is to rest in it, if it is: it is awake then.
    sleep_end: Option<u64>,
    /// How often a batch was overdue.
    overdue_count: u32,
    /// What was saved up for overtime.
    overtime_budget: u64,
    /// There was a batch since the last wait.
    has_new_batch: bool,
}

/// The longest gap that is told apart: twelve days.
const GAP_NANOS_MAX: u64 = 1 << 50;

/// A look that was weighed.
#[derive(Clone, Copy, Debug)]
struct SpinWindow {
    /// When it ends, from the last batch.
    end: u64,
    /// What it would have taken of the last gaps, all together.
    spin_time: u64,
}

impl Default for Adaptive {
    fn default() -> Self {
        let gaps = [GAP_NANOS_MAX; GAP_HISTORY_LEN];
        Self {
            gaps,
            gap_count: 0,
            sorted_gaps: gaps,
            wake_latency: WAKE_LATENCY_DEFAULT,
            sleep_cost: WAKE_LATENCY_DEFAULT,
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
        let came = match met {
            Arrival::Polled => now,
            Arrival::Woken => self.estimate_arrival(now),
        };
        let came = came.max(self.last_arrival.unwrap_or(0));
        if let Some(last) = self.last_arrival.replace(came) {
            let gap = (came - last).min(GAP_NANOS_MAX);
            self.overtime_budget = (self.overtime_budget + gap / OVERTIME_DIVISOR).min(OVERTIME_BUDGET_MAX);
            self.gaps[self.gap_count % GAP_HISTORY_LEN] = gap;
            self.gap_count = self.gap_count.wrapping_add(1);
            if self.gap_count.is_multiple_of(RESORT_INTERVAL) {
                self.sorted_gaps = self.gaps;
                self.sorted_gaps.sort_unstable();
            }
        }
    }

    /// Pays for the overtime of the wait that ends.
    fn charge_overtime(&mut self, now: u64) {
        self.overtime_budget =
            self.overtime_budget.saturating_sub(now.min(self.spin_end).saturating_sub(self.due));
    }

    /// When a batch came that is there, at `now`, when the lane wakes up.
    fn estimate_arrival(&mut self, now: u64) -> u64 {
        // Not before it was looked for in vain.
        let looked = if now > self.spin_end { self.spin_end } else { self.wait_start };
        let earliest = now.saturating_sub(self.wake_latency).max(looked).min(now);
        let Some(awake) = self.sleep_end.take() else { return earliest };
        if now > awake.saturating_add(self.wake_latency / 2) {
            // Its rest was over, or nearly so: it came as it was due, as far as anybody can tell.
            // Whether time or the batch has woken the lane, it has taken so long at least.
            let late = (now - awake).min(WAKE_LATENCY_MAX);
            if late > self.wake_latency {
                self.update_wake_latency(late);
            }
            self.update_sleep_cost(late);
            let due = self
                .last_arrival
                .map_or(now, |last| last.saturating_add(self.sorted_gaps[OUTLIERS_PER_SIDE]));
            return due.clamp(earliest, now);
        }
        // A rest that is always cut short is too long, and nobody would learn by how much.
        self.wake_latency = (self.wake_latency + self.wake_latency / 8 + 1).min(WAKE_LATENCY_MAX);
        earliest
    }

    /// A sleep ended so late: a fourth of the way up, and a thirty-second down: most are not so
    /// late.
    fn update_wake_latency(&mut self, late: u64) {
        if late > self.wake_latency {
            self.wake_latency += (late - self.wake_latency).div_ceil(4);
        } else {
            self.wake_latency -= (self.wake_latency - late) / 32;
        }
    }

    /// A rest that was not cut short has ended so late.
    fn update_sleep_cost(&mut self, late: u64) {
        // One stumble says little.
        let late = late.min(2 * self.sleep_cost + WAKEUP_COST_NANOS / 5);
        self.sleep_cost = self.sleep_cost - self.sleep_cost / 4 + late / 4;
    }

    /// Whether a rest pays, with so much work before it and a look behind it, in a gap of this
    /// length; a trial now and then finds out what it costs.
    fn should_sleep(&mut self, work_and_look: u64, gap: u64) -> bool {
        let cost = self.sleep_cost.saturating_add(work_and_look);
        if cost.saturating_mul(SLEEP_COST_SHARE_MAX.1) <= gap.saturating_mul(SLEEP_COST_SHARE_MAX.0) {
            return true;
        }
        self.rejected_sleeps = self.rejected_sleeps.wrapping_add(1);
        self.rejected_sleeps.is_multiple_of(SLEEP_PROBE_INTERVAL)
    }

    /// The look from `start` on, counted from the last batch, that would have cost least of the
    /// last gaps, if not more than to sleep: what it takes, and a sleep for each batch that it
    /// misses.
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
        // All of this counts from the last batch.
        let (began, now) = (now, now.saturating_sub(last));
        let first = self.sorted_gaps[OUTLIERS_PER_SIDE];
        let sleeps = first.saturating_sub(now);
        // Awake a little before.
        let early = self.wake_latency + SLACK_NANOS;
        let may_rest = sleeps >= SLEEP_NANOS_MIN && sleeps > early;
        let rested = self.best_spin(first).filter(|spin| {
            may_rest && self.should_sleep(work + SLACK_NANOS + spin.spin_time / GAP_HISTORY_LEN as u64, first)
        });
        let spin = rested.or_else(|| self.best_spin(now)).or_else(|| self.overdue_spin(now));
        let Some(SpinWindow { end, .. }) = spin else {
            // What is known of lateness fades, or a machine that once was slow would never rest
            // again.
            self.wake_latency -= self.wake_latency / 256;
            return Plan::default();
        };
        let rest = if rested.is_some() { sleeps - early } else { 0 };
        let overtime = self.overtime_budget.min(OVERTIME_NANOS_MAX);
        self.sleep_end = rested.map(|_| began.saturating_add(rest));
        self.due = began.saturating_add(end - now);
        self.spin_end = self.due.saturating_add(overtime);
        Plan {
            sleep_until: Duration::from_nanos(rest),
            spin_until: Duration::from_nanos(end - now + overtime),
        }
    }

    /// The look for a batch that should have come before `now`: others came that nobody had to wait
    /// for, or it is not known well when the last one came. Where gaps are short, the next is due
    /// at any time; else a look now and then finds out.
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
