//! The active set: where threads share processors, a socket steers to no more lanes than there are
//! processors.
//!
//! Lanes multiply wake-ups: four threads on one processor are woken four times for datagrams that
//! one awake thread would receive in one go. So a socket steers to no more lanes than there are
//! processors for their owners to run on. The other owners keep their lanes, get no datagrams in
//! them, and wait in slices as before (`wait.rs`). They receive from lanes whose owners are away,
//! by the usual rule (`coverage.rs`), after a slice at most, and go on while there is more.
//!
//! A thread that sleeps in its work (for a disk, another server, a lock) leaves its processor to
//! other threads. That is why programs have more threads than processors, and there all lanes must
//! stay active. So lanes are limited only when the work was seen not to sleep:
//! 1. For some datagrams, the kernel is asked how often the thread has slept and how long it has
//!    run, at the receive and when the thread next asks for more ([`before_work`],
//!    [`after_work`]).
//! 2. After [`CLEAN_SAMPLES_MIN`] samples in a row without a sleep and without a long run, the set
//!    is limited. Each sample with one requires one clean sample more.
//! 3. If more than about one sample in nine has a sleep or a long run, the limit is lifted. The
//!    next one needs 16 times as many clean samples.
//!
//! The set rotates every [`REBALANCE_INTERVAL`] slices, counted over all threads of the socket, so
//! that each thread has its turn.
//!
//! The processors are those of the threads' affinity masks, which are read whenever lanes change
//! owners and at each rotation, limited by the CPU quota of the control group at the start. With
//! queues of devices (engine `xdp`) all lanes are active.

use std::sync::atomic::Ordering;

use manylane_sys::cpu::{self, CpuMask};

use crate::sock::{MAX_LANES, MULTI_LANE, Member, Shared, Sock};
use crate::{lanes, queues, real, recovery, start};

/// All lanes are steered to: there are enough processors, or their number is not known.
const ALL_ACTIVE: u32 = 0;
/// Samples decide whether the set may be limited.
const SAMPLING: u32 = 1;
/// Some lanes with owners are not steered to.
const LIMITED: u32 = 2;

/// Clean samples in a row that are required before the set is limited: at first, and at most.
const CLEAN_SAMPLES_MIN: u32 = 64;
const CLEAN_SAMPLES_MAX: u32 = CLEAN_SAMPLES_MIN << 14;
/// One datagram in n is sampled: at first, and later. Powers of two.
const SAMPLE_INTERVAL_MIN: u32 = 8;
const SAMPLE_INTERVAL_MAX: u32 = 64;
/// Samples with a sleep, in state `SAMPLING`, after which the longer interval applies.
const SLEEP_SAMPLES_MAX: u32 = 64;
/// Weight of a sample with a sleep against one without; and the max score.
const SLEEP_WEIGHT: u32 = 8;
const SLEEP_SCORE_MAX: u32 = 3 * SLEEP_WEIGHT;
/// Work that takes more CPU time than this, in microseconds, counts as a sleep.
const WORK_MICROS_MAX: u32 = 1000;
/// Slices after which the set is rotated and the affinity masks are read again.
const REBALANCE_INTERVAL: u32 = 64;

/// The lanes of `owned` to steer to. Requires the lock.
pub(crate) fn active_lanes(shared: &Shared, owned: u64) -> u64 {
    let some = if queues::is_open(shared) { owned } else { limit_to_cpus(shared, owned) };
    let rest = shared.active_state.load(Ordering::Relaxed);
    let next = match (some == owned, rest) {
        (true, _) => ALL_ACTIVE,
        (false, ALL_ACTIVE) => SAMPLING,
        _ => rest,
    };
    if next != rest {
        shared.sleep_score.store(0, Ordering::Relaxed);
        shared.active_state.store(next, Ordering::Relaxed);
    }
    if next == LIMITED { some } else { owned }
}

/// True if datagrams may be prefetched and replies batched. If the user did not ask for it, only
/// while the set is limited, because a thread that sleeps in its work would hold up answers for as
/// long.
#[inline]
pub(crate) fn can_prefetch(shared: &Shared) -> bool {
    shared.active_state.load(Ordering::Relaxed) == LIMITED
        || start::settings().is_some_and(|settings| !settings.batch_when_limited)
}

/// Limits `owned` to the lanes for which there are processors.
fn limit_to_cpus(shared: &Shared, owned: u64) -> u64 {
    let quota = start::settings().and_then(|settings| settings.quota).unwrap_or(MAX_LANES as u32);
    let mask = |lane: usize| {
        let thread = shared.owner_of(lane)?.thread_id.load(Ordering::Relaxed) as u32;
        cpu::affinity_mask(thread.cast_signed()).ok()
    };
    one_lane_per_cpu(owned, shared.first_active.load(Ordering::Relaxed), quota, mask).unwrap_or(owned)
}

/// Adds a lane if its owner and those of the lanes so far have more processors than lanes. None
/// if an owner's `mask` is not known. `first` is the owner to start with.
fn one_lane_per_cpu(
    owned: u64,
    first: u32,
    quota: u32,
    mask: impl Fn(usize) -> Option<CpuMask>,
) -> Option<u64> {
    let mut all: CpuMask = [0; cpu::MASK_WORDS];
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

/// The calling thread has received datagrams in mode `MULTI_LANE`, and will work on them.
#[inline]
pub(crate) fn before_work(shared: &Shared, member: &Member) {
    let every = match shared.active_state.load(Ordering::Relaxed) {
        ALL_ACTIVE => return,
        SAMPLING if shared.clean_required.load(Ordering::Relaxed) < CLEAN_SAMPLES_MIN + SLEEP_SAMPLES_MAX => {
            SAMPLE_INTERVAL_MIN
        }
        _ => SAMPLE_INTERVAL_MAX,
    };
    // A datagram is one heartbeat, or two with a wait.
    if member.heartbeat.load(Ordering::Relaxed) % (2 * every) < 2 {
        start_sample(member);
    }
}

#[cold]
fn start_sample(member: &Member) {
    let errno = real::errno();
    let work = cpu::thread_usage();
    member.sampled_switches.store(work.voluntary_switches as u32, Ordering::Relaxed);
    member.sampled_cpu_micros.store(work.cpu_micros as u32, Ordering::Relaxed);
    member.is_sampled.store(1, Ordering::Relaxed);
    real::set_errno(errno);
}

/// The calling thread asks for the next datagram.
#[inline]
pub(crate) fn after_work(sock: &Sock, shared: &Shared, member: &Member) {
    if member.is_sampled.load(Ordering::Relaxed) != 0 {
        finish_sample(sock, shared, member);
    }
}

#[cold]
fn finish_sample(sock: &Sock, shared: &Shared, member: &Member) {
    let errno = real::errno();
    let work = cpu::thread_usage();
    member.is_sampled.store(0, Ordering::Relaxed);
    let ran = (work.cpu_micros as u32).wrapping_sub(member.sampled_cpu_micros.load(Ordering::Relaxed));
    let away = work.voluntary_switches as u32 != member.sampled_switches.load(Ordering::Relaxed)
        || ran > WORK_MICROS_MAX;
    let before = WorkStats {
        active_state: shared.active_state.load(Ordering::Relaxed),
        sleep_score: shared.sleep_score.load(Ordering::Relaxed),
        clean_required: shared.clean_required.load(Ordering::Relaxed).max(CLEAN_SAMPLES_MIN),
    };
    let after = before.with_sample(away);
    // If another thread holds the lock, a later sample changes the state.
    if after.active_state == before.active_state
        || set_state(sock, shared, before.active_state, after.active_state)
    {
        shared.sleep_score.store(after.sleep_score, Ordering::Relaxed);
        shared.clean_required.store(after.clean_required, Ordering::Relaxed);
    }
    real::set_errno(errno);
}

/// State and score of a socket's samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct WorkStats {
    active_state: u32,
    /// In `SAMPLING`, clean samples in a row; in `LIMITED`, the weighted score of sleeps.
    sleep_score: u32,
    /// Clean samples in a row that are required.
    clean_required: u32,
}

impl WorkStats {
    /// Adds one sample; `away` if it had a sleep or a long run.
    fn with_sample(self, away: bool) -> Self {
        let Self { active_state: rest, sleep_score: signs, clean_required: calm } = self;
        match (rest, away) {
            (SAMPLING, true) => {
                Self { active_state: rest, sleep_score: 0, clean_required: (calm + 1).min(CLEAN_SAMPLES_MAX) }
            }
            (SAMPLING, false) if signs + 1 < calm => {
                Self { active_state: rest, sleep_score: signs + 1, clean_required: calm }
            }
            (SAMPLING, false) => Self { active_state: LIMITED, sleep_score: 0, clean_required: calm },
            (LIMITED, true) if signs + SLEEP_WEIGHT > SLEEP_SCORE_MAX => Self {
                active_state: SAMPLING,
                sleep_score: 0,
                clean_required: (calm * 16).min(CLEAN_SAMPLES_MAX),
            },
            (LIMITED, true) => {
                Self { active_state: rest, sleep_score: signs + SLEEP_WEIGHT, clean_required: calm }
            }
            (LIMITED, false) => {
                Self { active_state: rest, sleep_score: signs.saturating_sub(1), clean_required: calm }
            }
            _ => self,
        }
    }
}

/// Changes the state; true if it did.
fn set_state(sock: &Sock, shared: &Shared, from: u32, to: u32) -> bool {
    let Some(_guard) = recovery::lock(sock, shared, false) else { return false };
    let turned = shared.mode() == MULTI_LANE
        && shared.active_state.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    if turned {
        lanes::steer_to_active(shared, lanes::group_fd(sock));
    }
    turned
}

/// Counts a slice of a wait, and rebalances after every [`REBALANCE_INTERVAL`].
#[inline]
pub(crate) fn after_slice(sock: &Sock, shared: &Shared) {
    if shared.mode() == MULTI_LANE
        && shared.polls.fetch_add(1, Ordering::Relaxed) % REBALANCE_INTERVAL == REBALANCE_INTERVAL - 1
    {
        rebalance(sock, shared);
    }
}

#[cold]
fn rebalance(sock: &Sock, shared: &Shared) {
    // This needs more stack than any other path: a later slice does it.
    if real::is_on_signal_stack() {
        return;
    }
    let errno = real::errno();
    if let Some(_guard) = recovery::lock(sock, shared, false)
        && shared.mode() == MULTI_LANE
    {
        shared.first_active.fetch_add(1, Ordering::Relaxed);
        lanes::steer_to_active(shared, lanes::group_fd(sock));
    }
    real::set_errno(errno);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first processor.
    const CPU0: CpuMask = {
        let mut words = [0; cpu::MASK_WORDS];
        words[0] = 1;
        words
    };

    fn steered(masks: &[u64], quota: u32) -> u64 {
        let mask = |lane: usize| {
            let mut words = [0; cpu::MASK_WORDS];
            words[0] = masks[lane];
            Some(words)
        };
        one_lane_per_cpu((1 << masks.len()) - 1, 0, quota, mask).unwrap()
    }

    #[test]
    fn there_is_a_lane_for_each_processor_that_owners_may_run_on() {
        assert_eq!(steered(&[0b1; 4], 64), 0b1);
        assert_eq!(steered(&[0b11; 4], 64), 0b11);
        assert_eq!(steered(&[0b1111; 4], 64), 0b1111);
        // Two owners on each of two processors: one lane each.
        assert_eq!(steered(&[0b01, 0b01, 0b10, 0b10], 64), 0b101);
        assert_eq!(steered(&[0b1111; 4], 2), 0b11);
        assert_eq!(one_lane_per_cpu(0b11, 0, 64, |lane| (lane == 0).then_some(CPU0)), None);
        // The set rotates; lanes without an owner do not count.
        let one = |first| one_lane_per_cpu(0b1011, first, 64, |_| Some(CPU0)).unwrap();
        assert_eq!([0, 1, 2, 3].map(one), [0b1, 0b10, 0b1000, 0b1]);
        assert_eq!(one_lane_per_cpu(0, 3, 64, |_| None), Some(0));
    }

    fn after(mut signs: WorkStats, samples: impl IntoIterator<Item = bool>) -> WorkStats {
        for away in samples {
            signs = signs.with_sample(away);
        }
        signs
    }

    #[test]
    fn rest_begins_when_nobody_slept_for_a_while_and_not_before() {
        let fresh = WorkStats { active_state: SAMPLING, sleep_score: 0, clean_required: CLEAN_SAMPLES_MIN };
        let calm = |count: u32| (0..count).map(|_| false);
        assert_eq!(after(fresh, calm(CLEAN_SAMPLES_MIN - 1)).active_state, SAMPLING);
        assert_eq!(after(fresh, calm(CLEAN_SAMPLES_MIN)).active_state, LIMITED);
        // One sleep requires one clean sample more.
        let slept = after(fresh, calm(CLEAN_SAMPLES_MIN - 1).chain([true]));
        assert_eq!(after(slept, calm(CLEAN_SAMPLES_MIN)).active_state, SAMPLING);
        assert_eq!(after(slept, calm(CLEAN_SAMPLES_MIN + 1)).active_state, LIMITED);
    }

    #[test]
    fn rest_ends_where_work_sleeps_often_and_begins_later_each_time() {
        let resting = WorkStats { active_state: LIMITED, sleep_score: 0, clean_required: CLEAN_SAMPLES_MIN };
        assert_eq!(after(resting, [true; 3]).active_state, LIMITED);
        assert_eq!(
            after(resting, [true; 4]),
            WorkStats { active_state: SAMPLING, sleep_score: 0, clean_required: 16 * CLEAN_SAMPLES_MIN }
        );
        // One in nine is not too many.
        let seldom = (0..9000).map(|nth| nth % 9 == 0);
        assert_eq!(after(resting, seldom).active_state, LIMITED);
        let often = (0..9000).map(|nth| nth % 4 == 0);
        assert_eq!(after(resting, often).active_state, SAMPLING);
        let never = after(WorkStats { clean_required: CLEAN_SAMPLES_MAX, ..resting }, [true; 4]);
        assert_eq!((never.active_state, never.clean_required), (SAMPLING, CLEAN_SAMPLES_MAX));
    }
}
