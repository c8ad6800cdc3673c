//! Who rests: where threads share processors, one for each processor is steered to.
//!
//! Lanes multiply wake-ups: four threads on one processor are woken four times for what one that is awake takes in its stride.
//! So a socket steers to no more lanes than there are processors for their owners to run on. Who owns one of the other lanes
//! rests: nothing comes for it, and it waits as ever, in slices (`wait.rs`). Whatever waits in a lane whose owner is away is
//! within its reach as before (`reach.rs`): after a slice at most it helps, and goes on with it while there is more.
//!
//! A thread that sleeps in its work (for a disk, for another server, for a lock) leaves its processor to others, and these are to
//! be there: that is why programs have more threads than processors. So rest begins only when the work was seen not to do that,
//! and ends when it does:
//! 1. Of some of the datagrams that a thread receives, the kernel is asked how often the thread has slept, and how long it has
//!    run, when it has received and when it next asks for more ([`before_work`], [`after_work`]).
//! 2. [`CALM`] of these in a row in which nobody slept, or ran for long: rest begins. Each one that is not like that asks for one more.
//! 3. One in nine on the average in which somebody did: rest ends, and begins anew only after 16 times as many.
//!
//! Who is awake changes once in [`LOOKS`] slices, some half a second: each thread has its turn, as it would have without lanes.
//!
//! Processors are those of the threads' affinity masks, which are looked at whenever lanes change hands, and at each such
//! turn; and no more than a quota of the control group that was there at the start. With queues of devices (engine `xdp`) nobody rests.

use std::sync::atomic::Ordering;

use manylane_sys::cpu::{self, Mask};

use crate::sock::{LANED, MAX_LANES, Member, Shared, Sock};
use crate::{lanes, mend, queues, real, start};

/// There are as many processors as lanes, or it is not known how many: nobody would rest.
const NOBODY: u32 = 0;
/// Whether somebody may rest is being found out.
const ASKED: u32 = 1;
/// There are lanes that are not steered to.
const RESTING: u32 = 2;

/// Samples in a row without a sleep, before anybody rests; and the most after it did not work out.
const CALM: u32 = 64;
const CALMEST: u32 = CALM << 14;
/// One datagram in so many is looked at: at first, and later. Powers of two.
const OFTEN: u32 = 8;
const SELDOM: u32 = 64;
/// Samples with a sleep before that is later, where nobody rests.
const TRIES: u32 = 64;
/// A sample with a sleep weighs as much as so many without one; and that is too much.
const WEIGHT: u32 = 8;
const TOO_MUCH: u32 = 3 * WEIGHT;
/// Work that takes longer than this, in microseconds of CPU time, is not to be waited for.
const LONG: u32 = 1000;
/// Slices after which the processors are looked at again.
const LOOKS: u32 = 64;

/// Of the lanes of `owned`, those to steer to. Under the lock.
pub(crate) fn awake(shared: &Shared, owned: u64) -> u64 {
    let some = if queues::are_open(shared) { owned } else { enough(shared, owned) };
    let rest = shared.rest.load(Ordering::Relaxed);
    let next = match (some == owned, rest) {
        (true, _) => NOBODY,
        (false, NOBODY) => ASKED,
        _ => rest,
    };
    if next != rest {
        shared.signs.store(0, Ordering::Relaxed);
        shared.rest.store(next, Ordering::Relaxed);
    }
    if next == RESTING { some } else { owned }
}

/// Whether datagrams may be taken ahead of lanes, and replies put together: where that was not asked for, only while threads rest,
/// since a thread that sleeps in its work would keep answers for as long.
#[inline]
pub(crate) fn may_take_ahead(shared: &Shared) -> bool {
    shared.rest.load(Ordering::Relaxed) == RESTING
        || start::settings().is_some_and(|settings| !settings.batch_at_rest)
}

/// The owners of `owned` that are not too many for their processors.
fn enough(shared: &Shared, owned: u64) -> u64 {
    let quota = start::settings().and_then(|settings| settings.quota).unwrap_or(MAX_LANES as u32);
    let mask = |lane: usize| {
        let thread = shared.owner_of(lane)?.who.load(Ordering::Relaxed) as u32;
        cpu::mask_of(thread.cast_signed()).ok()
    };
    one_for_each(owned, shared.first_awake.load(Ordering::Relaxed), quota, mask).unwrap_or(owned)
}

/// A lane more for as long as the processors of its owner and of those before it are more than these lanes. None where the
/// `mask` of one is not known. `first` says which one is the first.
fn one_for_each(owned: u64, first: u32, quota: u32, mask: impl Fn(usize) -> Option<Mask>) -> Option<u64> {
    let mut all: Mask = [0; cpu::WORDS];
    let mut some = 0_u64;
    let count = owned.count_ones().max(1);
    let lanes = (0..MAX_LANES).filter(|lane| owned & 1 << lane != 0);
    for lane in lanes.cycle().skip((first % count) as usize).take(owned.count_ones() as usize) {
        let mut union = mask(lane)?;
        union.iter_mut().zip(all).for_each(|(union, all)| *union |= all);
        let processors: u32 = union.iter().map(|word| word.count_ones()).sum();
        if processors.min(quota) > some.count_ones() {
            some |= 1 << lane;
            all = union;
        }
    }
    Some(some)
}

/// The calling thread has received something, with lanes, and will work on it now.
#[inline]
pub(crate) fn before_work(shared: &Shared, member: &Member) {
    let every = match shared.rest.load(Ordering::Relaxed) {
        NOBODY => return,
        ASKED if shared.calm.load(Ordering::Relaxed) < CALM + TRIES => OFTEN,
        _ => SELDOM,
    };
    // A datagram is one beat or two, with a wait.
    if member.beat.load(Ordering::Relaxed) % (2 * every) < 2 {
        look_at(member);
    }
}

#[cold]
fn look_at(member: &Member) {
    let errno = real::errno();
    let work = cpu::work();
    member.slept.store(work.sleeps as u32, Ordering::Relaxed);
    member.ran.store(work.micros as u32, Ordering::Relaxed);
    member.is_watched.store(1, Ordering::Relaxed);
    real::set_errno(errno);
}

/// The calling thread asks for more.
#[inline]
pub(crate) fn after_work(sock: &Sock, shared: &Shared, member: &Member) {
    if member.is_watched.load(Ordering::Relaxed) != 0 {
        judge(sock, shared, member);
    }
}

#[cold]
fn judge(sock: &Sock, shared: &Shared, member: &Member) {
    let errno = real::errno();
    let work = cpu::work();
    member.is_watched.store(0, Ordering::Relaxed);
    let ran = (work.micros as u32).wrapping_sub(member.ran.load(Ordering::Relaxed));
    let away = work.sleeps as u32 != member.slept.load(Ordering::Relaxed) || ran > LONG;
    let before = Signs {
        rest: shared.rest.load(Ordering::Relaxed),
        signs: shared.signs.load(Ordering::Relaxed),
        calm: shared.calm.load(Ordering::Relaxed).max(CALM),
    };
    let after = before.with(away);
    // Where somebody else has the lock, the next sample says the same.
    if after.rest == before.rest || turn(sock, shared, before.rest, after.rest) {
        shared.signs.store(after.signs, Ordering::Relaxed);
        shared.calm.store(after.calm, Ordering::Relaxed);
    }
    real::set_errno(errno);
}

/// What is known of a socket's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Signs {
    rest: u32,
    /// Samples in a row without a sleep; while threads rest, what those with one weigh.
    signs: u32,
    /// As many of the first as it takes.
    calm: u32,
}

impl Signs {
    /// With one sample more: whether the thread was `away` in its work.
    fn with(self, away: bool) -> Self {
        let Self { rest, signs, calm } = self;
        match (rest, away) {
            (ASKED, true) => Self { rest, signs: 0, calm: (calm + 1).min(CALMEST) },
            (ASKED, false) if signs + 1 < calm => Self { rest, signs: signs + 1, calm },
            (ASKED, false) => Self { rest: RESTING, signs: 0, calm },
            (RESTING, true) if signs + WEIGHT > TOO_MUCH => {
                Self { rest: ASKED, signs: 0, calm: (calm * 16).min(CALMEST) }
            }
            (RESTING, true) => Self { rest, signs: signs + WEIGHT, calm },
            (RESTING, false) => Self { rest, signs: signs.saturating_sub(1), calm },
            _ => self,
        }
    }
}

/// Rest begins or ends; whether it did.
fn turn(sock: &Sock, shared: &Shared, from: u32, to: u32) -> bool {
    let Some(_guard) = mend::lock(sock, shared, false) else { return false };
    let turned = shared.mode() == LANED
        && shared.rest.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    if turned {
        lanes::steer_to_awake(shared, lanes::group(sock));
    }
    turned
}

/// A slice of a wait is over: now and then, the processors are looked at.
#[inline]
pub(crate) fn after_slice(sock: &Sock, shared: &Shared) {
    if shared.mode() == LANED && shared.looks.fetch_add(1, Ordering::Relaxed) % LOOKS == LOOKS - 1 {
        look_at_processors(sock, shared);
    }
}

#[cold]
fn look_at_processors(sock: &Sock, shared: &Shared) {
    // Steering takes more of the stack than all else: another look does it.
    if real::is_on_signal_stack() {
        return;
    }
    let errno = real::errno();
    if let Some(_guard) = mend::lock(sock, shared, false)
        && shared.mode() == LANED
    {
        shared.first_awake.fetch_add(1, Ordering::Relaxed);
        lanes::steer_to_awake(shared, lanes::group(sock));
    }
    real::set_errno(errno);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first processor.
    const ONE: Mask = {
        let mut words = [0; cpu::WORDS];
        words[0] = 1;
        words
    };

    fn steered(masks: &[u64], quota: u32) -> u64 {
        let mask = |lane: usize| {
            let mut words = [0; cpu::WORDS];
            words[0] = masks[lane];
            Some(words)
        };
        one_for_each((1 << masks.len()) - 1, 0, quota, mask).unwrap()
    }

    #[test]
    fn there_is_a_lane_for_each_processor_that_owners_may_run_on() {
        assert_eq!(steered(&[0b1; 4], 64), 0b1);
        assert_eq!(steered(&[0b11; 4], 64), 0b11);
        assert_eq!(steered(&[0b1111; 4], 64), 0b1111);
        // Two for each of two: one of either.
        assert_eq!(steered(&[0b01, 0b01, 0b10, 0b10], 64), 0b101);
        assert_eq!(steered(&[0b1111; 4], 2), 0b11);
        assert_eq!(one_for_each(0b11, 0, 64, |lane| (lane == 0).then_some(ONE)), None);
        // Each has its turn; lanes without an owner do not count.
        let one = |first| one_for_each(0b1011, first, 64, |_| Some(ONE)).unwrap();
        assert_eq!([0, 1, 2, 3].map(one), [0b1, 0b10, 0b1000, 0b1]);
        assert_eq!(one_for_each(0, 3, 64, |_| None), Some(0));
    }

    fn after(mut signs: Signs, samples: impl IntoIterator<Item = bool>) -> Signs {
        for away in samples {
            signs = signs.with(away);
        }
        signs
    }

    #[test]
    fn rest_begins_when_nobody_slept_for_a_while_and_not_before() {
        let fresh = Signs { rest: ASKED, signs: 0, calm: CALM };
        let calm = |count: u32| (0..count).map(|_| false);
        assert_eq!(after(fresh, calm(CALM - 1)).rest, ASKED);
        assert_eq!(after(fresh, calm(CALM)).rest, RESTING);
        // Who slept once has to be calm for one more.
        let slept = after(fresh, calm(CALM - 1).chain([true]));
        assert_eq!(after(slept, calm(CALM)).rest, ASKED);
        assert_eq!(after(slept, calm(CALM + 1)).rest, RESTING);
    }

    #[test]
    fn rest_ends_where_work_sleeps_often_and_begins_later_each_time() {
        let resting = Signs { rest: RESTING, signs: 0, calm: CALM };
        assert_eq!(after(resting, [true; 3]).rest, RESTING);
        assert_eq!(after(resting, [true; 4]), Signs { rest: ASKED, signs: 0, calm: 16 * CALM });
        // One in nine is not too much.
        let seldom = (0..9000).map(|nth| nth % 9 == 0);
        assert_eq!(after(resting, seldom).rest, RESTING);
        let often = (0..9000).map(|nth| nth % 4 == 0);
        assert_eq!(after(resting, often).rest, ASKED);
        let never = after(Signs { calm: CALMEST, ..resting }, [true; 4]);
        assert_eq!((never.rest, never.calm), (ASKED, CALMEST));
    }
}
