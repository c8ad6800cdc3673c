//! Brings the [`Filter`] of a socket to the XDP programs of its devices, and counts what they
//! drop.
//!
//! ```text
//!  Builder, Handle::filter, manylane limit ─► Filter ─► FilterHandle: all devices of the socket, or none changes
//!                                                                │ maps of each device
//!  frame ─► 1 to 4: ours? ─► 5: longest prefix ─► wide limit ─► narrow limit ─► 6 to 9: lane
//!                                 │ denied           │ no token    │ no token
//!                                 └──────────────────┴─────────────┴─► dropped, counted by socket and by device
//! ```
//!
//! The numbers are the stages of `bpf/xdp.bpf.c`; `bpf/filter.h` has stage 5 and these maps:
//!
//! | map | key | written by | when it is full |
//! |---|---|---|---|
//! | `ml_filters` | number of the socket | [`FilterHandle`] | it has a place for each socket |
//! | `ml_rules` (LPM trie) | socket, family, prefix | [`FilterHandle`] | the change fails, and the previous filter stays in force |
//! | `ml_wide`, `ml_narrow` (LRU) | generation of the limits, socket, family, source | the program | the least recently used bucket is evicted; a source without a bucket has a full one |
//! | `ml_filter_drops` (per CPU) | number of the socket | the program | it has a place for each socket |
//!
//! | event | what happens |
//! |---|---|
//! | a device is opened | its program gets the filter before an address leads to the socket |
//! | the filter changes | all devices get the new one, or, if one of them fails, all keep the previous one |
//! | a device is removed, the socket ends | the socket's number accepts everything again; its drops stay counted |
//!
//! - **Prefixes come first**, so that a source that is denied or allowed needs no bucket. **The
//!   wide limit comes second**, so that a flood from one prefix does not evict the buckets of
//!   other sources from the narrow map.
//! - **The LRU maps are common to all CPUs.** With `BPF_F_NO_COMMON_LRU` each CPU could use its
//!   share of the map only, and one queue is one CPU.
//! - **The program reads `bpf_ktime_get_ns`**, and only for frames to a socket with limits. The
//!   coarse clock stands still for up to 4 ms; a limit with a short burst would then pass less
//!   than its rate.
//! - **A program reads filters while they are written.** It may apply half of an old limit to one
//!   datagram. The generation is part of the key of a bucket, so that a source that has used up a
//!   strict limit is not held to it by the next limit.

pub(crate) mod maps;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use self::maps::FilterMaps;
pub(crate) use self::maps::SocketIndex;
use crate::counters::FilterDrops;
use crate::error::Result;
use crate::filter::{Filter, Limit, Prefix, Rule};

/// The maps of one device's program. All sockets on the device change them.
pub(crate) type SharedFilterMaps = Arc<Mutex<FilterMaps>>;

/// Generation of the next limits in this process.
static GENERATION: AtomicU32 = AtomicU32::new(1);

/// Changes the filter of a socket from any thread. From [`Handle::filter`](crate::Handle::filter),
/// and from [`Lessor::filter`](crate::Lessor::filter) for programs started by `manylane run`.
///
/// The XDP program drops a UDP datagram to the socket, before any further work is done, if the
/// longest matching [`Prefix`] of its source is denied. It also drops it if that is not an allowed
/// one and the source is over a [`Limit`]. Datagrams that XDP does not take arrive through the
/// companion, unfiltered: fragments, packets with IP options or extension headers, datagrams from
/// this machine, and other devices.
#[derive(Clone, Default)]
pub struct FilterHandle {
    shared: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    filter: Filter,
    generation: u32,
    devices: Vec<(SharedFilterMaps, SocketIndex)>,
    /// Drops on devices that are gone.
    detached_drops: FilterDrops,
}

impl std::fmt::Debug for FilterHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FilterHandle").field("filter", &self.current()).finish_non_exhaustive()
    }
}

impl FilterHandle {
    pub(crate) fn new(guard: Filter) -> Self {
        let generation = GENERATION.fetch_add(1, Ordering::Relaxed);
        Self { shared: Arc::new(Mutex::new(State { filter: guard, generation, ..State::default() })) }
    }

    /// The filter in force.
    #[must_use]
    pub fn current(&self) -> Filter {
        self.state().filter.clone()
    }

    /// Datagrams dropped so far, on all devices.
    #[must_use]
    pub fn drops(&self) -> FilterDrops {
        let state = self.state();
        let mut sum = state.detached_drops;
        for (maps, number) in &state.devices {
            sum += lock(maps).drops(*number);
        }
        sum
    }

    /// Replaces the limits: at most two; an empty slice for no limit. Each source starts with a
    /// full burst.
    ///
    /// # Errors
    /// [`ErrorKind::Limit`](crate::ErrorKind::Limit) for more than two; errors of the kernel.
    pub fn set_limits(&self, limits: &[Limit]) -> Result<()> {
        self.change(|guard| guard.set_limits(limits))
    }

    /// Accepts datagrams from `prefix`, exempt from all limits, except from longer prefixes that
    /// are denied. Forged sources in the prefix are accepted as well.
    ///
    /// # Errors
    /// [`ErrorKind::Limit`](crate::ErrorKind::Limit) for too many prefixes; errors of the kernel.
    pub fn allow(&self, prefix: Prefix) -> Result<()> {
        self.change(|guard| guard.set_rule(prefix, Some(Rule::Allow)))
    }

    /// Drops datagrams from `prefix`, except from longer prefixes that are allowed.
    ///
    /// # Errors
    /// As for [`allow`](Self::allow).
    pub fn deny(&self, prefix: Prefix) -> Result<()> {
        self.change(|guard| guard.set_rule(prefix, Some(Rule::Deny)))
    }

    /// Removes the rule of `prefix`.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub fn remove(&self, prefix: Prefix) -> Result<()> {
        self.change(|guard| guard.set_rule(prefix, None))
    }

    /// Makes several changes at once: all of them, or none.
    ///
    /// # Errors
    /// The error of `how`; errors of the kernel.
    pub fn change(&self, how: impl FnOnce(&mut Filter) -> Result<()>) -> Result<()> {
        let mut state = self.state();
        let mut wanted = state.filter.clone();
        how(&mut wanted)?;
        let before = state.generation;
        if wanted.limits() != state.filter.limits() {
            state.generation = GENERATION.fetch_add(1, Ordering::Relaxed);
        }
        for at in 0..state.devices.len() {
            let (maps, number) = &state.devices[at];
            let Err(err) = lock(maps).apply(*number, &wanted, state.generation) else { continue };
            state.generation = before;
            for (maps, number) in &state.devices[..=at] {
                // Cannot run out of room: this filter was installed a moment ago.
                _ = lock(maps).apply(*number, &state.filter, before);
            }
            return Err(err);
        }
        state.filter = wanted;
        Ok(())
    }

    /// Adds a device on which the socket has a number that no address leads to yet.
    pub(super) fn attach(&self, maps: &SharedFilterMaps, number: SocketIndex) -> Result<()> {
        let mut state = self.state();
        let mut guards = lock(maps);
        guards.clear(number);
        if let Err(err) = guards.apply(number, &state.filter, state.generation) {
            guards.clear(number);
            return Err(err);
        }
        drop(guards);
        state.devices.push((Arc::clone(maps), number));
        Ok(())
    }

    /// Removes a device, once no address leads to the number.
    pub(super) fn detach(&self, maps: &SharedFilterMaps, number: SocketIndex) {
        let mut state = self.state();
        let is_it = |(other, at): &(SharedFilterMaps, SocketIndex)| Arc::ptr_eq(other, maps) && *at == number;
        let Some(at) = state.devices.iter().position(is_it) else { return };
        state.devices.swap_remove(at);
        let mut guards = lock(maps);
        state.detached_drops += guards.drops(number);
        guards.clear(number);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every critical section leaves valid state, so a poisoned lock can be used.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn lock(maps: &Mutex<FilterMaps>) -> MutexGuard<'_, FilterMaps> {
    // As in `state`.
    maps.lock().unwrap_or_else(PoisonError::into_inner)
}
