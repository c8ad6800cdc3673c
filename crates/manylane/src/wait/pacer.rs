//! When to look and when to sleep: decided from when the last batches came, with no clock and no I/O of its own.
//!
//! `adaptive` keeps the last sixteen gaps between two batches that were waited for, and asks when a lane has found nothing:
//!
//! 1. From when on is the next batch due? One gap may be shorter than all others: machines stumble.
//! 2. The lane would *rest*, asleep, so that it is awake a little before, and look from then on. If there is no time for a rest,
//!    it would look at once. Until when would that have cost least of the last sixteen, if each that a look misses costs a sleep
//!    and a wake-up on top ([`PAYS`])? So a few long gaps among short ones keep nobody from looking for the others.
//! 3. If to sleep at once would have cost less than that, the lane sleeps. A rest has to pay, too: with the batch before it, the
//!    timer and the look behind it, it may keep the processor for five twelfths of the gap at most ([`SHARE`]).
//! 4. What is late in spite of that is looked for a while longer: in *overtime*, which is saved up, a sixteenth of the time.
//!
//! So a lane whose requests come within microseconds of each other looks all the time, one whose requests come at even
//! distances looks a little before each, and one that cannot foresee anything sleeps. Looking follows a batch, once: a lane
//! without traffic does not look.
//!
//! A sleeper is woken *late*, by a timer or by a batch, and by how much, machines differ: a few microseconds on bare metal,
//! thirty in a virtual machine. It is learned from rests, so that most end in time. A sleep that a timer ends costs a processor about as long as it ends
//! late, since both are what the machine takes to set the timer, to go idle and to come back (measured on a virtual machine whose
//! exits cost 7 µs: 27 to 38 µs late, 22 to 30 µs of CPU; one that a datagram ends costs 10). So a lane whose requests come
//! every 50 µs rests on bare metal, and sleeps on such a machine. Gaps are counted from when batches are thought to have come, not from
//! when a lane that was asleep had them: or who is late once would be late for ever.

use std::time::Duration;

use super::WaitPolicy;

/// Gaps that are remembered.
const KEPT: usize = 16;
/// Of these, odd ones at each side.
const ODD: usize = 1;
/// Nanoseconds of looking for each batch, on the average, that are worth it: about what going to sleep and being woken
/// costs a processor, with the interrupt, and what the one who is answered would have waited for.
const PAYS: u64 = 25_000;
/// Nanoseconds that a lane looks at a stretch at most.
const STRETCH: u64 = 8 * PAYS;
/// A rest in which a lane is not asleep for so long, with the time that its end is late, saves nothing.
const SHORTEST_REST: u64 = 20_000;
/// Room around what was seen.
const SLACK: u64 = 2_000;
/// By how much sleeps end late until it is known.
const LATE: u64 = 10_000;
/// What is seen of lateness at once, at most: more is a stumble.
const STUMBLE: u64 = 100_000;
/// An overdue batch is looked for once in so many times.
const PROBE: u32 = 8;
/// A rest that costs too much is tried once in so many times: what it costs may have changed.
const TRIAL: u32 = 512;
/// Nanoseconds that a lane looks on for a batch that is overdue, at most: machines stumble, and most stumbles are short.
const OVERTIME: u64 = 2 * PAYS;
/// One part in so many of the time may go into that, and so much of it is saved up.
const ALLOWED: u64 = 16;
const SAVED: u64 = 8 * PAYS;
/// The share of a gap that a rest may keep the processor for, with all that belongs to it: safely below half.
const SHARE: (u64, u64) = (5, 12);
/// After so many gaps it is looked at them anew.
const REVIEW: usize = 4;

/// What to do in a wait, counted from its beginning: sleep until `rest` unless something comes, look until `until`, and
/// then sleep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) rest: Duration,
    pub(crate) until: Duration,
}

/// How a batch was met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Met {
    /// By a look: it came just now.
    Awake,
    /// It woke a sleeper: it came some time ago.
    Asleep,
}

/// The decision of one lane. Times are those of any clock that goes forward, since any moment.
#[derive(Clone, Debug)]
pub(crate) enum Pacer {
    /// Sleeps.
    Sleep,
    /// Looks for so long in each wait.
    Spin(Duration),
    /// As the last gaps say.
    Adaptive(Box<Adaptive>),
}

impl Pacer {
    pub(crate) fn new(policy: WaitPolicy) -> Self {
        match policy {
            WaitPolicy::Sleep | WaitPolicy::BusyPoll(_) => Self::Sleep,
            WaitPolicy::Spin(time) => Self::Spin(time),
            WaitPolicy::Adaptive => Self::Adaptive(Box::default()),
        }
    }

    /// Whether a wait may be anything else than a sleep: whether it is worth it to look what is there, and what the time is.
    #[inline]
    pub(crate) fn may_look(&self) -> bool {
        match self {
            Self::Sleep => false,
            Self::Spin(_) => true,
            Self::Adaptive(adaptive) => adaptive.is_fresh,
        }
    }

    /// Whether it wants to be told when batches come.
    #[inline]
    pub(crate) fn learns(&self) -> bool {
        matches!(self, Self::Adaptive(_))
    }

    /// What to do in the wait that begins at `now`.
    #[inline]
    pub(crate) fn plan(&mut self, now: Duration) -> Plan {
        match self {
            Self::Sleep => Plan::default(),
            Self::Spin(time) => Plan { rest: Duration::ZERO, until: *time },
            Self::Adaptive(adaptive) => adaptive.plan(nanos(now)),
        }
    }

    /// A batch that was waited for is there at `now`.
    #[inline]
    pub(crate) fn came(&mut self, now: Duration, met: Met) {
        if let Self::Adaptive(adaptive) = self {
            adaptive.came(nanos(now), met);
        }
    }

    /// Nothing came for as long as the lane was to wait.
    #[cold]
    pub(crate) fn gave_up(&mut self) {
        if let Self::Adaptive(adaptive) = self {
            adaptive.is_fresh = false;
            adaptive.spend(u64::MAX);
        }
    }

    /// A rest ended so much late.
    pub(crate) fn overslept(&mut self, by: Duration) {
        if let Self::Adaptive(adaptive) = self {
            let by = nanos(by).min(STUMBLE);
            adaptive.overslept(by);
            adaptive.paid(by);
        }
    }
}

/// What the last gaps say.
#[derive(Clone, Debug)]
pub(crate) struct Adaptive {
    /// In nanoseconds.
    gaps: [u64; KEPT],
    /// How many there were.
    seen: usize,
    /// The same, as they were at the last review, by length.
    sorted: [u64; KEPT],
    /// By how much nearly all sleeps end late.
    late: u64,
    /// What a rest costs, as far as it is known, and how often one was too dear.
    price: u64,
    dear: u32,
    /// When the last batch came that was waited for, and when the lane had it.
    last: Option<u64>,
    had: u64,
    /// When the wait began that follows it, until when it is due in it, and until when it is looked for, if it is.
    began: u64,
    due: u64,
    looked: u64,
    /// Until when the lane is to rest in it, if it is: it is awake then.
    awake: Option<u64>,
    /// How often a batch was overdue.
    overdue: u32,
    /// What was saved up for overtime.
    saved: u64,
    /// There was a batch since the last wait.
    is_fresh: bool,
}

/// The longest gap that is told apart: twelve days.
const NEVER: u64 = 1 << 50;

/// A look that was weighed.
#[derive(Clone, Copy, Debug)]
struct Look {
    /// When it ends, from the last batch.
    end: u64,
    /// What it would have taken of the last gaps, all together.
    took: u64,
}

impl Default for Adaptive {
    fn default() -> Self {
        let gaps = [NEVER; KEPT];
        Self {
            gaps,
            seen: 0,
            sorted: gaps,
            late: LATE,
            price: LATE,
            dear: 0,
            last: None,
            had: 0,
            began: 0,
            due: 0,
            looked: 0,
            awake: None,
            overdue: 0,
            saved: 0,
            is_fresh: false,
        }
    }
}

impl Adaptive {
    #[inline]
    fn came(&mut self, now: u64, met: Met) {
        self.is_fresh = true;
        self.had = now;
        self.spend(now);
        let came = match met {
            Met::Awake => now,
            Met::Asleep => self.woken(now),
        };
        let came = came.max(self.last.unwrap_or(0));
        if let Some(last) = self.last.replace(came) {
            let gap = (came - last).min(NEVER);
            self.saved = (self.saved + gap / ALLOWED).min(SAVED);
            self.gaps[self.seen % KEPT] = gap;
            self.seen = self.seen.wrapping_add(1);
            if self.seen.is_multiple_of(REVIEW) {
                self.sorted = self.gaps;
                self.sorted.sort_unstable();
            }
        }
    }

    /// Pays for the overtime of the wait that ends.
    fn spend(&mut self, now: u64) {
        self.saved = self.saved.saturating_sub(now.min(self.looked).saturating_sub(self.due));
    }

    /// When a batch came that is there, at `now`, when the lane wakes up.
    fn woken(&mut self, now: u64) -> u64 {
        // Not before it was looked for in vain.
        let looked = if now > self.looked { self.looked } else { self.began };
        let earliest = now.saturating_sub(self.late).max(looked).min(now);
        let Some(awake) = self.awake.take() else { return earliest };
        if now > awake.saturating_add(self.late / 2) {
            // Its rest was over, or nearly so: it came as it was due, as far as anybody can tell. Whether time or the batch has
            // woken the lane, it has taken so long at least.
            let late = (now - awake).min(STUMBLE);
            if late > self.late {
                self.overslept(late);
            }
            self.paid(late);
            let due = self.last.map_or(now, |last| last.saturating_add(self.sorted[ODD]));
            return due.clamp(earliest, now);
        }
        // A rest that is always cut short is too long, and nobody would learn by how much.
        self.late = (self.late + self.late / 8 + 1).min(STUMBLE);
        earliest
    }

    /// A sleep ended so late: a fourth of the way up, and a thirty-second down: most are not so late.
    fn overslept(&mut self, late: u64) {
        if late > self.late {
            self.late += (late - self.late).div_ceil(4);
        } else {
            self.late -= (self.late - late) / 32;
        }
    }

    /// A rest that was not cut short has ended so late.
    fn paid(&mut self, late: u64) {
        // One stumble says little.
        let late = late.min(2 * self.price + PAYS / 5);
        self.price = self.price - self.price / 4 + late / 4;
    }

    /// Whether a rest pays, with so much work before it and a look behind it, in a gap of this length; a trial now and then
    /// finds out what it costs.
    fn may_rest(&mut self, work_and_look: u64, gap: u64) -> bool {
        let cost = self.price.saturating_add(work_and_look);
        if cost.saturating_mul(SHARE.1) <= gap.saturating_mul(SHARE.0) {
            return true;
        }
        self.dear = self.dear.wrapping_add(1);
        self.dear.is_multiple_of(TRIAL)
    }

    /// The look from `start` on, counted from the last batch, that would have cost least of the last gaps, if not more than to
    /// sleep: what it takes, and a sleep for each batch that it misses.
    fn look(&self, start: u64) -> Option<Look> {
        let (mut best, mut least) = (None, KEPT as u64 * PAYS);
        let mut met = 0;
        for (index, &gap) in self.sorted.iter().enumerate() {
            let missed = (KEPT - 1 - index) as u64;
            let end = gap + (gap - self.sorted[ODD.min(index)]) / 4 + SLACK;
            met += gap.saturating_sub(start);
            if index < KEPT / 2 || end <= start || end - start > STRETCH {
                continue;
            }
            let took = met + missed * (end - start);
            let cost = took + missed * PAYS;
            if cost <= least {
                (best, least) = (Some(Look { end, took }), cost);
            }
        }
        best
    }

    fn plan(&mut self, now: u64) -> Plan {
        (self.began, self.due, self.looked, self.awake) = (now, now, now, None);
        let Some(last) = self.last else { return Plan::default() };
        let work = now.saturating_sub(self.had);
        // All of this counts from the last batch.
        let (began, now) = (now, now.saturating_sub(last));
        let first = self.sorted[ODD];
        let sleeps = first.saturating_sub(now);
        // Awake a little before.
        let early = self.late + SLACK;
        let may_rest = sleeps >= SHORTEST_REST && sleeps > early;
        let rested = self
            .look(first)
            .filter(|look| may_rest && self.may_rest(work + SLACK + look.took / KEPT as u64, first));
        let look = rested.or_else(|| self.look(now)).or_else(|| self.overdue(now));
        let Some(Look { end, .. }) = look else {
            // What is known of lateness fades, or a machine that once was slow would never rest again.
            self.late -= self.late / 256;
            return Plan::default();
        };
        let rest = if rested.is_some() { sleeps - early } else { 0 };
        let overtime = self.saved.min(OVERTIME);
        self.awake = rested.map(|_| began.saturating_add(rest));
        self.due = began.saturating_add(end - now);
        self.looked = self.due.saturating_add(overtime);
        Plan { rest: Duration::from_nanos(rest), until: Duration::from_nanos(end - now + overtime) }
    }

    /// The look for a batch that should have come before `now`: others came that nobody had to wait for, or it is not known well
    /// when the last one came. Where gaps are short, the next is due at any time; else a look now and then finds out.
    fn overdue(&mut self, now: u64) -> Option<Look> {
        let longest = self.sorted[KEPT - 1 - ODD];
        let end = longest + (longest - self.sorted[ODD]) / 4 + SLACK;
        if end > now {
            return None;
        }
        self.overdue = self.overdue.wrapping_add(1);
        let looks = end <= PAYS || self.overdue.is_multiple_of(PROBE);
        looks.then(|| Look { end: now + end.min(PAYS), took: 0 })
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
