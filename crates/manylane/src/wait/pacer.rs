//! When to look and when to sleep: decided from when the last batches came, with no clock and no I/O of its own.
//!
//! `adaptive` keeps the last sixteen gaps between two batches that were waited for, and asks when a lane has found nothing:
//!
//! 1. Between which two moments is the next batch due, if its gap is like nearly all of them? One at each side may be odd:
//!    machines stumble.
//! 2. The lane would *rest*, asleep, so that it is awake at the first of these moments, and look from there to the second. If
//!    there is no time for a rest, it would look at once. What would that have cost of the last sixteen?
//! 3. If no more than a sleep and a wake-up cost ([`PAYS`]), it is done so; otherwise the lane sleeps. A rest has to pay, too:
//!    with the batch before it, the timer and the look behind it, it may keep the processor for half of the gap at most.
//!
//! So a lane whose requests come within microseconds of each other looks all the time, one whose requests come at even
//! distances looks a little before each, and one that cannot foresee anything sleeps. Looking follows a batch, once: a lane
//! without traffic does not look.
//!
//! A sleeper is woken *late*, by a timer or by a batch, and by how much, machines differ: a few microseconds on bare metal,
//! thirty in a virtual machine. It is learned from rests. A sleep that a timer ends costs a processor about as long as it ends
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
const TRIAL: u32 = 256;
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
    Adaptive(Adaptive),
}

impl Pacer {
    pub(crate) fn new(policy: WaitPolicy) -> Self {
        match policy {
            WaitPolicy::Sleep | WaitPolicy::BusyPoll(_) => Self::Sleep,
            WaitPolicy::Spin(time) => Self::Spin(time),
            WaitPolicy::Adaptive => Self::Adaptive(Adaptive::default()),
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
        }
    }

    /// A rest ended so much late.
    pub(crate) fn overslept(&mut self, by: Duration) {
        if let Self::Adaptive(adaptive) = self {
            let by = nanos(by).min(STUMBLE);
            adaptive.late = adaptive.late - adaptive.late / 8 + by / 8;
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
    /// The shortest and the longest that is not odd.
    shortest: u64,
    longest: u64,
    late: u64,
    /// What a rest costs, as far as it is known, and how often one was too dear.
    price: u64,
    dear: u32,
    /// When the last batch came that was waited for, and when the lane had it.
    last: Option<u64>,
    had: u64,
    /// When the wait began that follows it, and until when it is looked for in it, if it is.
    began: u64,
    looked: u64,
    /// Until when the lane is to rest in it, if it is: it is awake then.
    awake: Option<u64>,
    /// How often a batch was overdue.
    overdue: u32,
    /// There was a batch since the last wait.
    is_fresh: bool,
}

/// The longest gap that is told apart: twelve days.
const NEVER: u64 = 1 << 50;

impl Default for Adaptive {
    fn default() -> Self {
        let gaps = [NEVER; KEPT];
        Self {
            gaps,
            seen: 0,
            shortest: NEVER,
            longest: NEVER,
            late: LATE,
            price: LATE,
            dear: 0,
            last: None,
            had: 0,
            began: 0,
            looked: 0,
            awake: None,
            overdue: 0,
            is_fresh: false,
        }
    }
}

impl Adaptive {
    #[inline]
    fn came(&mut self, now: u64, met: Met) {
        self.is_fresh = true;
        self.had = now;
        let came = match met {
            Met::Awake => now,
            Met::Asleep => self.woken(now),
        };
        let came = came.max(self.last.unwrap_or(0));
        if let Some(last) = self.last.replace(came) {
            self.gaps[self.seen % KEPT] = (came - last).min(NEVER);
            self.seen = self.seen.wrapping_add(1);
            if self.seen.is_multiple_of(REVIEW) {
                self.review();
            }
        }
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
            self.late = self.late.max(self.late - self.late / 8 + late / 8);
            self.paid(late);
            let due = self.last.map_or(now, |last| last.saturating_add(self.shortest));
            return due.clamp(earliest, now);
        }
        // A rest that is always cut short is too long, and nobody would learn by how much.
        self.late = (self.late + self.late / 8 + 1).min(STUMBLE);
        earliest
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
        if self.price.saturating_add(work_and_look).saturating_mul(2) <= gap {
            return true;
        }
        self.dear = self.dear.wrapping_add(1);
        self.dear.is_multiple_of(TRIAL)
    }

    fn review(&mut self) {
        let mut sorted = self.gaps;
        sorted.sort_unstable();
        (self.shortest, self.longest) = (sorted[ODD], sorted[KEPT - 1 - ODD]);
    }

    fn plan(&mut self, now: u64) -> Plan {
        (self.began, self.looked, self.awake) = (now, now, None);
        let Some(last) = self.last else { return Plan::default() };
        let slack = (self.longest - self.shortest) / 4 + SLACK;
        let work = now.saturating_sub(self.had);
        // All of this counts from the last batch.
        let (began, now) = (now, now.saturating_sub(last));
        let (first, end) = (self.shortest, self.longest + slack);
        // It is overdue: others came that nobody had to wait for, or it is not known well when the last one came. Where gaps
        // are short, the next is due at any time; else a look now and then finds out.
        let end = if end > now {
            end
        } else {
            self.overdue = self.overdue.wrapping_add(1);
            if end <= PAYS || self.overdue.is_multiple_of(PROBE) { now + end.min(PAYS) } else { end }
        };
        let sleeps = first.saturating_sub(now);
        let gaps = self.gaps;
        let looked = |start: u64| {
            let looked = |gap: &u64| (*gap).clamp(start, end.max(start)) - start;
            gaps.iter().map(looked).sum::<u64>() / KEPT as u64
        };
        let rests =
            sleeps >= SHORTEST_REST && sleeps > self.late && self.may_rest(work + looked(first), first);
        let start = if rests { first } else { now };
        let cost = looked(start);
        if end <= start || cost > PAYS || end - start > STRETCH {
            // What is known of lateness fades, or a machine that once was slow would never rest again.
            self.late -= self.late / 256;
            return Plan::default();
        }
        let rest = if rests { sleeps - self.late } else { 0 };
        self.awake = rests.then_some(began.saturating_add(rest));
        self.looked = began.saturating_add(end - now);
        Plan { rest: Duration::from_nanos(rest), until: Duration::from_nanos(end - now) }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
