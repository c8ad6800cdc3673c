//! Who owns which lane, and which lanes are steered to.

use std::sync::atomic::Ordering;

use libc::c_int;

use super::{PROVEN_RECEIVES_MIN, group_fd};
use crate::lock::Guard;
use crate::sock::{MAX_LANES, MULTI_LANE, Member, Shared, Sock};
use crate::{active_set, failpoint, lane_socket, liveness, prefetch, queues, recovery, report, start, steer};

/// Receives out of lanes that are emptied first, for each change of steering: more than a receive
/// buffer of 32 MiB holds.
const DRAIN_FIRST_RECEIVES_MAX: u32 = 1 << 16;

/// Steers to the lanes whose bits are set.
pub(crate) fn steer_to(shared: &Shared, fd: c_int, lanes: u64) -> bool {
    let policy = start::settings().map_or(steer::Policy::Flow, |settings| settings.steering);
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

/// Steers to the lanes that have owners, but for those who rest.
pub(crate) fn steer_to_active(shared: &Shared, fd: c_int) {
    let lanes = active_lanes(shared);
    if lanes != shared.steered.load(Ordering::Relaxed) {
        steer_to(shared, fd, lanes);
    }
}

/// The lanes to steer to, as the owners are.
fn active_lanes(shared: &Shared) -> u64 {
    active_set::active_lanes(shared, owned_lanes(shared))
}

/// The lanes that have an owner.
fn owned_lanes(shared: &Shared) -> u64 {
    let has_owner = |lane: &usize| shared.owner[*lane].load(Ordering::Relaxed) != 0;
    (0..MAX_LANES).filter(has_owner).fold(0, |mask, lane| mask | 1 << lane)
}

/// Gives a lane to each member that comes back and has none, as far as there are any; then steers
/// to those.
pub(crate) fn assign(shared: &Shared, fd: c_int, full: bool) {
    let lanes = shared.lanes.load(Ordering::Relaxed) as usize;
    let joined = shared.joined.load(Ordering::Acquire) as usize;
    for (at, member) in shared.members.iter().enumerate().take(joined) {
        let comes_back = member.receives.load(Ordering::Relaxed) >= PROVEN_RECEIVES_MIN;
        let lane = member.lane.load(Ordering::Relaxed);
        if !is_live(member) || lane >= 0 || !comes_back {
            continue;
        }
        let free = (0..lanes).find(|lane| shared.owner[*lane].load(Ordering::Relaxed) == 0);
        // One that proved itself a moment ago gets its own the next time; shared is what cannot be
        // more.
        let Some(lane) = free.or_else(|| full.then(|| least_shared(shared, lanes))) else { break };
        if free.is_some() {
            shared.owner[lane].store(at as u32 + 1, Ordering::Release);
            failpoint::hit("owner named");
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
    prefetch::count_reasons(shared, fd);
}

/// Which lanes several members have: nothing is taken ahead of those.
fn update_oversubscribed(shared: &Shared) {
    let joined = shared.joined.load(Ordering::Acquire) as usize;
    let (mut once, mut crowded) = (0_u64, 0_u64);
    for member in shared.members.iter().take(joined).filter(|at| at.thread_id.load(Ordering::Relaxed) != 0) {
        if let Ok(lane @ 0..MAX_LANES) = usize::try_from(member.lane.load(Ordering::Relaxed)) {
            crowded |= once & 1 << lane;
            once |= 1 << lane;
        }
    }
    shared.oversubscribed.store(crowded, Ordering::Release);
}

/// Whether a place is a member's that is not known to be dead.
pub(super) fn is_live(member: &Member) -> bool {
    member.thread_id.load(Ordering::Acquire) != 0
        && !liveness::has_exited(member.liveness.load(Ordering::Acquire))
}

/// Lanes without an owner go to members that share the lane of another one, as far as there are
/// such.
pub(crate) fn split_shared_lanes(shared: &Shared) {
    let lanes = shared.lanes.load(Ordering::Relaxed) as usize;
    let joined = shared.joined.load(Ordering::Acquire) as usize;
    for free in (0..lanes).filter(|lane| shared.owner[*lane].load(Ordering::Relaxed) == 0) {
        let sharer = shared.members.iter().take(joined).position(|member| {
            let lane = usize::try_from(member.lane.load(Ordering::Relaxed)).ok();
            let owner = lane.and_then(|lane| shared.owner_of(lane));
            is_live(member) && owner.is_some_and(|owner| !std::ptr::eq(owner, member))
        });
        let Some(at) = sharer else { break };
        shared.owner[free].store(at as u32 + 1, Ordering::Release);
        shared.members[at].lane.store(free as c_int, Ordering::Release);
        report::record_lane(&shared.members[at], free as c_int, shared.inode_of(free as c_int));
    }
    update_oversubscribed(shared);
}

/// More threads than lanes: some share one, as all would share the program's own socket. The kernel
/// wakes one of them for each datagram.
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

/// A lane has lost its owner: another member that shares it takes over. Whether there was one.
pub(crate) fn inherit(shared: &Shared, lane: usize) -> bool {
    let joined = shared.joined.load(Ordering::Acquire) as usize;
    let has = |member: &Member| member.lane.load(Ordering::Relaxed) == lane as c_int && is_live(member);
    update_oversubscribed(shared);
    let heir = shared.members.iter().take(joined).position(has);
    shared.owner[lane].store(heir.map_or(0, |at| at as u32 + 1), Ordering::Release);
    heir.is_some()
}

/// Takes a member's lane out of steering and frees its place. What the lane holds stays within
/// everybody's reach.
pub(crate) fn remove_member_locked(shared: &Shared, fd: c_int, at: usize, guard: &Guard<'_>) {
    let _change = recovery::start_change(shared, recovery::OWNERS, guard);
    let member = &shared.members[at];
    let lane = member.lane.swap(-1, Ordering::AcqRel);
    failpoint::hit("lane left");
    if let Ok(lane) = usize::try_from(lane) {
        let owned = shared.owner[lane].load(Ordering::Relaxed) as usize == at + 1;
        if owned && !inherit(shared, lane) && shared.mode() == MULTI_LANE {
            steer_away_locked(shared, fd, lane);
            failpoint::hit("steered past");
        }
        queues::distribute(shared);
    }
    report::release_slot(member);
    member.state.store(0, Ordering::Relaxed);
    // Who takes the place next has proved nothing, and is not known to be dead.
    member.receives.store(0, Ordering::Relaxed);
    member.liveness.store(0, Ordering::Relaxed);
    member.thread_id.store(0, Ordering::Release);
}

/// Nothing more comes to a lane, and what it holds goes before all else.
fn steer_away_locked(shared: &Shared, fd: c_int, lane: usize) {
    let lane = 1 << lane;
    resteer(shared, fd, active_lanes(shared) & !lane, shared.steered.load(Ordering::Relaxed) | lane);
}

/// Steers to `lanes`. Flows change lanes by that: what is queued in the `older` ones goes before
/// what comes for these flows from now on.
fn resteer(shared: &Shared, fd: c_int, lanes: u64, older: u64) {
    drain_first(shared, older);
    steer_to(shared, fd, lanes);
    // Also what arrived on the way there.
    drain_first(shared, older);
}

/// Everybody receives from `lanes` first, until each was seen empty.
pub(crate) fn drain_first(shared: &Shared, lanes: u64) {
    shared.drain_first_left.store(DRAIN_FIRST_RECEIVES_MAX, Ordering::Relaxed);
    shared.drain_first.fetch_or(lanes, Ordering::AcqRel);
}

/// A receive out of a lane that is emptied first. One that a flood comes for may never be seen
/// empty: it must not keep everybody from the other lanes for ever, so its owner goes on with it
/// alone.
#[cold]
pub(crate) fn count_drained(shared: &Shared) {
    if shared.drain_first_left.fetch_sub(1, Ordering::Relaxed) == 1 {
        shared.drain_first.fetch_and(!owned_lanes(shared), Ordering::AcqRel);
    }
}

/// [`steer_away_locked`], for a lane of `sock` that nobody owns any more. Under the lock.
pub(crate) fn steer_away(sock: &Sock, shared: &Shared, lane: usize) {
    steer_away_locked(shared, group_fd(sock), lane);
}

/// A member's thread ends.
pub(crate) fn remove_member(sock: &Sock, shared: &Shared, at: usize) {
    if let Some(guard) = recovery::lock(sock, shared, true) {
        remove_member_locked(shared, group_fd(sock), at, &guard);
    }
}
