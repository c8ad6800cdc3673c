//! Owners of lanes, and the lanes that are steered to.

use std::sync::atomic::Ordering;

use libc::c_int;

use crate::base::settings::LANES_MAX;
use crate::base::{state, steer};
use crate::fds::{lane_socket, sock_fds};
use crate::group::active_set;
use crate::group::change::{OWNERS, start_change};
use crate::shared::lock::Guard;
use crate::shared::sock::{MULTI_LANE, Member, PROVEN_RECEIVES_MIN, Shared, Sock};
use crate::shared::{failpoint, liveness, report};
use crate::xdp::queues;

/// Max receives from lanes that are drained first, for each change of steering: more datagrams
/// than a receive buffer of 32 MiB holds.
const DRAIN_FIRST_RECEIVES_MAX: u32 = 1 << 16;

/// Steers to the lanes whose bits are set.
pub(crate) fn steer_to(shared: &Shared, fd: c_int, lanes: u64) -> bool {
    let policy = state::settings().map_or(steer::Policy::Flow, |settings| settings.steering);
    let steer_by =
        |code: &[libc::sock_filter]| lane_socket::attach_filter(fd, libc::SO_ATTACH_REUSEPORT_CBPF, code);
    let done = match lanes.count_ones() {
        0 | 1 => steer_by(&steer::single_lane(lanes)),
        _ => steer::program(policy, lanes).is_some_and(|to| steer_by(to.code())),
    };
    if done {
        shared.steered.store(lanes, Ordering::Release);
    }
    done
}

/// Steers to the active lanes among those that have owners.
pub(crate) fn steer_to_active(shared: &Shared, fd: c_int) {
    let lanes = active_lanes(shared);
    if lanes != shared.steered.load(Ordering::Relaxed) {
        steer_to(shared, fd, lanes);
    }
}

/// The lanes to steer to, given the owners.
fn active_lanes(shared: &Shared) -> u64 {
    active_set::active_lanes(shared, owned_lanes(shared))
}

/// The lanes that have an owner.
fn owned_lanes(shared: &Shared) -> u64 {
    let has_owner = |lane: &usize| shared.owner[*lane].load(Ordering::Relaxed) != 0;
    (0..LANES_MAX).filter(has_owner).fold(0, |mask, lane| mask | 1 << lane)
}

/// Gives a free lane to each proven member that has none, while lanes last, and steers to the
/// owned lanes. If `full`, further members share lanes.
pub(crate) fn assign(shared: &Shared, fd: c_int, full: bool) {
    let lanes = shared.lane_count();
    for (at, member) in shared.joined_members().iter().enumerate() {
        let comes_back = member.receives.load(Ordering::Relaxed) >= PROVEN_RECEIVES_MIN;
        let lane = member.lane.load(Ordering::Relaxed);
        if !is_live(member) || lane >= 0 || !comes_back {
            continue;
        }
        let free = (0..lanes).find(|lane| shared.owner[*lane].load(Ordering::Relaxed) == 0);
        // Lanes are shared only when no more can be opened (`full`). Otherwise the member gets its
        // own lane the next time.
        let Some(lane) = free.or_else(|| full.then(|| least_shared(shared, lanes))) else { break };
        if free.is_some() {
            shared.owner[lane].store(at as u32 + 1, Ordering::Release);
            failpoint::hit("owner stored");
        }
        member.lane.store(lane as c_int, Ordering::Release);
        report::record_lane(member, lane as c_int, shared.inode_of(lane as c_int));
    }
    let before = shared.steered.load(Ordering::Relaxed);
    let lanes = active_lanes(shared);
    if lanes != before {
        resteer(shared, fd, lanes, before);
    }
    queues::distribute(shared);
    update_oversubscribed(shared);
}

/// Records which lanes several members share: nothing is prefetched for those.
fn update_oversubscribed(shared: &Shared) {
    let (mut once, mut crowded) = (0_u64, 0_u64);
    for member in shared.joined_members().iter().filter(|at| at.thread_id.load(Ordering::Relaxed) != 0) {
        if let Some(lane) = member.own_lane() {
            crowded |= once & 1 << lane;
            once |= 1 << lane;
        }
    }
    shared.oversubscribed.store(crowded, Ordering::Release);
}

/// True if the slot has a member that is not known to be dead.
pub(crate) fn is_live(member: &Member) -> bool {
    member.thread_id.load(Ordering::Acquire) != 0
        && !liveness::has_exited(member.liveness.load(Ordering::Acquire))
}

/// Gives lanes without an owner to members that share the lane of another one, if there are any.
pub(crate) fn split_shared_lanes(shared: &Shared) {
    for free in (0..shared.lane_count()).filter(|lane| shared.owner[*lane].load(Ordering::Relaxed) == 0) {
        let sharer = shared.joined_members().iter().position(|member| {
            let owner = member.own_lane().and_then(|lane| shared.owner_of(lane));
            is_live(member) && owner.is_some_and(|owner| !std::ptr::eq(owner, member))
        });
        let Some(at) = sharer else { break };
        shared.owner[free].store(at as u32 + 1, Ordering::Release);
        shared.members[at].lane.store(free as c_int, Ordering::Release);
        report::record_lane(&shared.members[at], free as c_int, shared.inode_of(free as c_int));
    }
    update_oversubscribed(shared);
}

/// Picks the lane with the fewest members, for a thread that must share one. The kernel wakes one
/// of its members for each datagram.
fn least_shared(shared: &Shared, lanes: usize) -> usize {
    let members = |lane: usize| {
        let has = |member: &&Member| member.lane.load(Ordering::Relaxed) == lane as c_int;
        shared
            .members
            .iter()
            .filter(|member| member.thread_id.load(Ordering::Relaxed) != 0)
            .filter(has)
            .count()
    };
    (0..lanes).min_by_key(|lane| members(*lane)).unwrap_or(0)
}

/// A lane has lost its owner: another member that shares it takes over. True if there was one.
pub(crate) fn inherit(shared: &Shared, lane: usize) -> bool {
    let has = |member: &Member| member.lane.load(Ordering::Relaxed) == lane as c_int && is_live(member);
    update_oversubscribed(shared);
    let successor = shared.joined_members().iter().position(has);
    shared.owner[lane].store(successor.map_or(0, |at| at as u32 + 1), Ordering::Release);
    successor.is_some()
}

/// Takes a member's lane out of steering and frees its slot. All other threads can still receive
/// the datagrams queued in the lane.
pub(crate) fn remove_member_locked(shared: &Shared, fd: c_int, at: usize, guard: &Guard<'_>) {
    let _change = start_change(shared, OWNERS, guard);
    let member = &shared.members[at];
    let lane = member.own_lane();
    member.lane.store(-1, Ordering::Release);
    failpoint::hit("lane vacated");
    if let Some(lane) = lane {
        let owned = shared.owner[lane].load(Ordering::Relaxed) as usize == at + 1;
        if owned && !inherit(shared, lane) && shared.mode() == MULTI_LANE {
            steer_away_locked(shared, fd, lane);
            failpoint::hit("steered away");
        }
        queues::distribute(shared);
    }
    report::release_slot(member);
    member.state.store(0, Ordering::Relaxed);
    // The next thread in this slot is not proven, and not known to be dead.
    member.receives.store(0, Ordering::Relaxed);
    member.liveness.store(0, Ordering::Relaxed);
    member.pid.store(0, Ordering::Relaxed);
    member.thread_id.store(0, Ordering::Release);
}

/// Stops steering to a lane. Its queued datagrams are received before all others.
fn steer_away_locked(shared: &Shared, fd: c_int, lane: usize) {
    let lane = 1 << lane;
    resteer(shared, fd, active_lanes(shared) & !lane, shared.steered.load(Ordering::Relaxed) | lane);
}

/// Steers to `lanes`. This moves flows: datagrams queued in the `older` lanes are received before
/// newer ones of these flows.
fn resteer(shared: &Shared, fd: c_int, lanes: u64, older: u64) {
    drain_first(shared, older);
    steer_to(shared, fd, lanes);
    // Also the datagrams that arrived meanwhile.
    drain_first(shared, older);
}

/// All threads receive from `lanes` first, until each was seen empty.
pub(crate) fn drain_first(shared: &Shared, lanes: u64) {
    shared.drain_first_left.store(DRAIN_FIRST_RECEIVES_MAX, Ordering::Relaxed);
    shared.drain_first.fetch_or(lanes, Ordering::AcqRel);
}

/// Counts a receive from a lane that is drained first. A flooded lane may never be seen empty, and
/// must not keep all threads from the other lanes for ever. So after the maximum only its owner
/// drains it.
#[cold]
pub(crate) fn count_drained(shared: &Shared) {
    if shared.drain_first_left.fetch_sub(1, Ordering::Relaxed) == 1 {
        shared.drain_first.fetch_and(!owned_lanes(shared), Ordering::AcqRel);
    }
}

/// [`steer_away_locked`], for a lane of `sock` that has no owner. Requires the lock.
pub(crate) fn steer_away(sock: &Sock, shared: &Shared, lane: usize) {
    steer_away_locked(shared, sock_fds::group_fd(sock), lane);
}
