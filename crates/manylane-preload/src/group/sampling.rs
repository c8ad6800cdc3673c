//! Samples of how threads work, which decide whether the active set is limited (`active_set.rs`).
//!
//! 1. For some datagrams, the kernel is asked how often the thread has slept and how long it has
//!    run, at the receive and when the thread next asks for more ([`before_work`],
//!    [`after_work`]).
//! 2. After [`CLEAN_SAMPLES_MIN`] samples in a row without a sleep and without a long run, the set
//!    is limited. Each sample with one requires one clean sample more.
//! 3. If more than about one sample in nine has a sleep or a long run, the limit is lifted. The
//!    next one needs 16 times as many clean samples.
//!
//! The set rotates every [`REBALANCE_SLICES`] slices, counted over all threads of the socket, so
//! that each thread has its turn.

use std::sync::atomic::Ordering;

use manylane_sys::cpu;

use crate::base::real;
use crate::fds::sock_fds;
use crate::group::active_set::{ALL_ACTIVE, LIMITED, SAMPLING};
use crate::group::owners;
use crate::group::recovery;
use crate::shared::sock::{MULTI_LANE, Member, Shared, Sock};

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
const REBALANCE_SLICES: u32 = 64;

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
        let Self { active_state: state, sleep_score: score, clean_required: required } = self;
        match (state, away) {
            (SAMPLING, true) => Self {
                active_state: state,
                sleep_score: 0,
                clean_required: (required + 1).min(CLEAN_SAMPLES_MAX),
            },
            (SAMPLING, false) if score + 1 < required => {
                Self { active_state: state, sleep_score: score + 1, clean_required: required }
            }
            (SAMPLING, false) => Self { active_state: LIMITED, sleep_score: 0, clean_required: required },
            (LIMITED, true) if score + SLEEP_WEIGHT > SLEEP_SCORE_MAX => Self {
                active_state: SAMPLING,
                sleep_score: 0,
                clean_required: (required * 16).min(CLEAN_SAMPLES_MAX),
            },
            (LIMITED, true) => {
                Self { active_state: state, sleep_score: score + SLEEP_WEIGHT, clean_required: required }
            }
            (LIMITED, false) => {
                Self { active_state: state, sleep_score: score.saturating_sub(1), clean_required: required }
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
        owners::steer_to_active(shared, sock_fds::group_fd(sock));
    }
    turned
}

/// Counts a slice of a wait, and rebalances after every [`REBALANCE_SLICES`].
#[inline]
pub(crate) fn after_slice(sock: &Sock, shared: &Shared) {
    if shared.mode() == MULTI_LANE
        && shared.polls.fetch_add(1, Ordering::Relaxed) % REBALANCE_SLICES == REBALANCE_SLICES - 1
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
        owners::steer_to_active(shared, sock_fds::group_fd(sock));
    }
    real::set_errno(errno);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(mut score: WorkStats, samples: impl IntoIterator<Item = bool>) -> WorkStats {
        for away in samples {
            score = score.with_sample(away);
        }
        score
    }

    #[test]
    fn consolidation_starts_after_a_time_without_sleeps() {
        let fresh = WorkStats { active_state: SAMPLING, sleep_score: 0, clean_required: CLEAN_SAMPLES_MIN };
        let required = |count: u32| (0..count).map(|_| false);
        assert_eq!(after(fresh, required(CLEAN_SAMPLES_MIN - 1)).active_state, SAMPLING);
        assert_eq!(after(fresh, required(CLEAN_SAMPLES_MIN)).active_state, LIMITED);
        // One sleep requires one clean sample more.
        let slept = after(fresh, required(CLEAN_SAMPLES_MIN - 1).chain([true]));
        assert_eq!(after(slept, required(CLEAN_SAMPLES_MIN)).active_state, SAMPLING);
        assert_eq!(after(slept, required(CLEAN_SAMPLES_MIN + 1)).active_state, LIMITED);
    }

    #[test]
    fn consolidation_ends_when_work_sleeps_and_backs_off() {
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
