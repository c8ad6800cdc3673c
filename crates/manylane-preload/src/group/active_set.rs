//! The active set: where threads share CPUs, a socket steers to no more lanes than there are
//! CPUs.
//!
//! Lanes multiply wake-ups: four threads on one CPU are woken four times for datagrams that
//! one awake thread would receive in one go. So a socket steers to no more lanes than there are
//! CPUs for their owners to run on. The other owners keep their lanes, get no datagrams in
//! them, and wait in slices as before (`wait.rs`). They receive from lanes whose owners are away,
//! by the usual rule (`coverage.rs`), after a slice at most, and go on while there is more.
//!
//! A thread that sleeps in its work (for a disk, another server, a lock) leaves its CPU to
//! other threads. That is why programs have more threads than CPUs, and there all lanes must
//! stay active. So lanes are limited only when the work was seen not to sleep (`sampling.rs`).
//!
//! The CPUs are those of the threads' affinity masks, which are read whenever lanes change
//! owners and at each rotation, limited by the CPU quota of the control group at the start. With
//! queues of devices (engine `xdp`) all lanes are active.
//!
//! While the set is limited, an active thread finds many datagrams in its lane. Then it receives
//! them with one call (`prefetch/`), and sends the replies with one (`send_batch.rs`). While all
//! lanes are active, batches would be small, and a thread that sleeps in its work would hold up
//! replies for as long.

use std::sync::atomic::Ordering;

use manylane_sys::cpu::{self, CpuMask};

use crate::base::settings::LANES_MAX;
use crate::base::state;
use crate::shared::processes;
use crate::shared::sock::Shared;
use crate::xdp::queues;

/// All lanes are steered to: there are enough CPUs, or their number is not known.
pub(crate) const ALL_ACTIVE: u32 = 0;
/// Samples decide whether the set may be limited.
pub(crate) const SAMPLING: u32 = 1;
/// Some lanes with owners are not steered to.
pub(crate) const LIMITED: u32 = 2;

/// The lanes of `owned` to steer to. Requires the lock.
pub(crate) fn active_lanes(shared: &Shared, owned: u64) -> u64 {
    let some = if queues::is_open(shared) { owned } else { limit_to_cpus(shared, owned) };
    let state = shared.active_state.load(Ordering::Relaxed);
    let next = match (some == owned, state) {
        (true, _) => ALL_ACTIVE,
        (false, ALL_ACTIVE) => SAMPLING,
        _ => state,
    };
    if next != state {
        shared.sleep_score.store(0, Ordering::Relaxed);
        shared.active_state.store(next, Ordering::Relaxed);
    }
    if next == LIMITED { some } else { owned }
}

/// True while the set is limited.
#[inline]
pub(crate) fn is_limited(shared: &Shared) -> bool {
    shared.active_state.load(Ordering::Relaxed) == LIMITED
}

/// Limits `owned` to the lanes for which there are CPUs.
fn limit_to_cpus(shared: &Shared, owned: u64) -> u64 {
    let quota = state::settings().and_then(|settings| settings.quota).unwrap_or(LANES_MAX as u32);
    let mask = |lane: usize| {
        if processes::has_pid_namespaces() {
            return None;
        }
        let thread = shared.owner_of(lane)?.thread_id.load(Ordering::Relaxed) as u32;
        cpu::affinity_mask(thread.cast_signed()).ok()
    };
    one_lane_per_cpu(owned, shared.first_active.load(Ordering::Relaxed), quota, mask).unwrap_or(owned)
}

/// Adds a lane if its owner and those of the lanes so far have more CPUs than lanes. None
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
    let lanes = (0..LANES_MAX).filter(|lane| owned & 1 << lane != 0);
    for lane in lanes.cycle().skip((first % count) as usize).take(owned.count_ones() as usize) {
        let mut union = mask(lane)?;
        union.iter_mut().zip(all).for_each(|(union, all)| *union |= all);
        let cpus: u32 = union.iter().map(|word| word.count_ones()).sum();
        if cpus.min(quota) > some.count_ones() {
            some |= 1 << lane;
            all = union;
        }
    }
    Some(some)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first CPU.
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
    fn one_lane_is_active_per_cpu_of_the_owners() {
        assert_eq!(steered(&[0b1; 4], 64), 0b1);
        assert_eq!(steered(&[0b11; 4], 64), 0b11);
        assert_eq!(steered(&[0b1111; 4], 64), 0b1111);
        // Two owners on each of two CPUs: one lane each.
        assert_eq!(steered(&[0b01, 0b01, 0b10, 0b10], 64), 0b101);
        assert_eq!(steered(&[0b1111; 4], 2), 0b11);
        assert_eq!(one_lane_per_cpu(0b11, 0, 64, |lane| (lane == 0).then_some(CPU0)), None);
        // The set rotates; lanes without an owner do not count.
        let one = |first| one_lane_per_cpu(0b1011, first, 64, |_| Some(CPU0)).unwrap();
        assert_eq!([0, 1, 2, 3].map(one), [0b1, 0b10, 0b1000, 0b1]);
        assert_eq!(one_lane_per_cpu(0, 3, 64, |_| None), Some(0));
    }
}
