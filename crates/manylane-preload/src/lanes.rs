//! Lanes that come and go: when a socket gets them, who owns which, and how it falls back.
//!
//! # When
//!
//! Lanes are made when every thread that ever waited for the socket has come back to receive again, and each wait
//! has had a bound since there were two of them: `consider`. Threads that come later prove the same before they get one.
//!
//! # How a change survives who makes it
//!
//! Every change is made under the lock, and written down before it is begun: [`mend`]. What order its steps have is what
//! makes it possible to finish it from the middle.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};

use libc::c_int;
use manylane_sys::barrier;
use manylane_sys::shim::Reason;

use crate::lock::Guard;
use crate::open::{self, Kept, SLICE_MS};
use crate::points;
use crate::sock::{
    BLOCKS, LANED, LEARN, MAX_LANES, Member, PLAIN, SINGLE, Shared, Sock, UNBOUND, UNBOUNDED, WAITS_ON,
};
use crate::table::{self, Entry};
use crate::{
    alone, epoll, gather, hold, life, loan, mend, mirror, queues, real, report, rest, signals, start, steer,
};

/// Receives after which a thread is known to come back.
pub(crate) const COMES_BACK: u32 = 2;
/// Looks that find some thread that does not come back, before the socket is left alone.
const TRIES: u32 = 4000;
/// Of those, the ones that are made at each receive.
const EAGER: u32 = 256;
/// Lanes that a socket gets at least when they have to be made in advance.
const IN_ADVANCE: usize = 4;

/// Sockets that this is done for: a program with more is no server that forks its receivers.
const SOCKETS_IN_ADVANCE: usize = 64;
/// Of a process's sockets, so many are bound with steering that only matters once there is a group: it costs twice what a socket
/// costs, and who opens one for each request is not to pay that for ever.
const MOST_AHEAD: u32 = 4096;
static STEERED_AHEAD: AtomicU32 = AtomicU32::new(0);

/// The address of `fd`.
pub(crate) fn local_addr(fd: c_int) -> Option<SocketAddr> {
    open::bound(fd)?.addr()
}

/// From now on a blocking receive on the kernel's socket returns after a slice.
pub(crate) fn bound_waits(shared: &Shared, fd: c_int) {
    shared.bounded.store(1, Ordering::Release);
    mirror::set_timeout(fd, SLICE_MS as u64 * 1000);
}

/// The program's own receive timeout is the kernel's again.
fn unbound_waits(shared: &Shared, fd: c_int) {
    mirror::set_timeout(fd, shared.timeout_us.load(Ordering::Relaxed));
    shared.bounded.store(0, Ordering::Release);
}

/// Whether to look if it is time for lanes: at first always, later now and then. Of many threads that are woken for one
/// datagram, the kernel lets those go on sleeping that come too late, so that the last one may take long to prove itself.
#[inline]
pub(crate) fn is_worth_a_look(shared: &Shared, member: &Member) -> bool {
    shared.tries.load(Ordering::Relaxed) < EAGER || member.beat.load(Ordering::Relaxed) % 32 < 2
}

/// A thread received in mode LEARN, or has no lane in mode LANED: looks whether it is time for lanes.
#[cold]
pub(crate) fn consider(sock: &'static Sock, shared: &Shared, fd: c_int) {
    let errno = real::errno();
    let mut give_up = None;
    if let Some(guard) = mend::lock(sock, shared, false) {
        match shared.mode() {
            LEARN => give_up = make(sock, shared, fd, &guard),
            LANED => give_lanes(sock, shared, fd, &guard),
            _ => {}
        }
    }
    if let Some(reason) = give_up {
        fall_back(sock, fd, reason);
    }
    real::set_errno(errno);
}

/// Makes lanes if everybody can be trusted with one. The answer is why the socket has to stay plain.
fn make(sock: &Sock, shared: &Shared, fd: c_int, guard: &Guard<'_>) -> Option<Reason> {
    let Some(limit) = start::settings().map(|settings| settings.lanes) else { return Some(Reason::Full) };
    let tried = shared.tries.fetch_add(1, Ordering::Relaxed);
    let mut ready = 0;
    let mut blocks = false;
    let joined = shared.joined.load(Ordering::Acquire) as usize;
    for (at, member) in shared.members.iter().enumerate().take(joined) {
        if member.who.load(Ordering::Acquire) == 0 {
            continue;
        }
        if life::is_dead(member.life.load(Ordering::Acquire)) {
            leave(shared, fd, at, guard);
            continue;
        }
        // SeqCst on both sides: either we see that it waits without a bound, or it sees that the mode has changed.
        let state = member.state.load(Ordering::SeqCst);
        let comes_back = member.receives.load(Ordering::Relaxed) >= COMES_BACK;
        let kind = member.kind.load(Ordering::Relaxed);
        blocks |= kind & BLOCKS != 0;
        let waits_in_receive = kind == BLOCKS && state == WAITS_ON;
        if state == UNBOUNDED || !(comes_back || waits_in_receive) {
            if mend::is_gone(member) {
                leave(shared, fd, at, guard);
                continue;
            }
            return (tried > TRIES).then_some(Reason::Pattern);
        }
        ready += usize::from(comes_back);
    }
    if blocks && signals::are_mixed() {
        return Some(Reason::Signals);
    }
    if ready < 2 {
        return (tried > TRIES).then_some(Reason::Pattern);
    }
    let full = !open_up_to(sock, shared, fd, ready.min(limit)) || ready >= limit;
    if shared.lanes.load(Ordering::Relaxed) < 2 {
        let late =
            shared.forked.load(Ordering::Relaxed) != 0 && sock.steered_ahead.load(Ordering::Relaxed) == 0;
        return Some(if late { Reason::Forked } else { Reason::NoSocket });
    }
    let _change = mend::begin(shared, mend::OWNERS, guard);
    assign(shared, fd, full);
    points::pass("lanes given");
    // What is queued in the program's own socket is older than what any lane gets: it goes first.
    shared.first.store(1, Ordering::Release);
    points::pass("first set");
    shared.mode.store(LANED, Ordering::Release);
    queues::spread(shared);
    hold::tell(shared, fd);
    None
}

/// Opens sockets until there are `wanted` with the program's own, or until one cannot be opened. None after a fork: the
/// other process would not have them. Whether there are as many now.
fn open_up_to(sock: &Sock, shared: &Shared, fd: c_int, wanted: usize) -> bool {
    if shared.forked.load(Ordering::Relaxed) != 0 {
        return shared.lanes.load(Ordering::Relaxed) as usize >= wanted;
    }
    let have = shared.lanes.load(Ordering::Relaxed) as usize;
    hold::map(sock);
    gather::map(sock);
    let whys = [
        (Reason::OneControl, mirror::has_control(fd)),
        (Reason::OneEdges, epoll::has_edges(sock)),
        (Reason::OneFull, sock.holds().is_none()),
    ];
    whys.into_iter().filter(|(_, is)| *is).for_each(|(why, _)| hold::one_by_one(shared, fd, why));
    let mut steered = have >= 2;
    for lane in have..wanted.min(MAX_LANES) {
        // At once: what comes before the group is steered may land in any of its sockets, also where nobody looks as yet.
        let Some(new) = open::lane(fd, || steered = steered || steer_to(shared, fd, 1)) else { break };
        shared.inode[lane].store(open::inode(new), Ordering::Relaxed);
        sock.set_lane_fd(lane, Some(new));
        shared.lanes.store(lane as u32 + 1, Ordering::Release);
    }
    if shared.lanes.load(Ordering::Relaxed) < 2 {
        // None could be bound: nobody else may join.
        mirror::set_number(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, 0);
    } else if !steered {
        // Without steering a lane cannot be left again. The new ones are bound: what they got stays in reach.
        let all = lanes_mask(shared) & !1;
        sock.lane_fds().for_each(|(_, lane)| open::cut_off(lane));
        mirror::set_number(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, 0);
        shared.retired.store(all, Ordering::Release);
        shared.lanes.store(1, Ordering::Release);
    }
    shared.lanes.load(Ordering::Relaxed) as usize >= wanted
}

/// A bit for each socket of the group.
pub(crate) fn lanes_mask(shared: &Shared) -> u64 {
    match shared.lanes.load(Ordering::Acquire) {
        0 => 0,
        count => u64::MAX >> (64 - count.min(64)),
    }
}

/// Steers to the lanes whose bits are set.
pub(crate) fn steer_to(shared: &Shared, fd: c_int, lanes: u64) -> bool {
    let policy = start::settings().map_or(steer::Policy::Flow, |settings| settings.steering);
    let done = open::attach(fd, libc::SO_ATTACH_REUSEPORT_CBPF, &steer::program(policy, lanes));
    if done {
        shared.steered.store(lanes, Ordering::Release);
    }
    done
}

/// Steers to the lanes that have owners, but for those who rest.
pub(crate) fn steer_to_awake(shared: &Shared, fd: c_int) {
    let lanes = awake(shared);
    if lanes != shared.steered.load(Ordering::Relaxed) {
        steer_to(shared, fd, lanes);
    }
}

/// The lanes to steer to, as the owners are.
fn awake(shared: &Shared) -> u64 {
    let owned = |lane: &usize| shared.owner[*lane].load(Ordering::Relaxed) != 0;
    let owned = (0..MAX_LANES).filter(owned).fold(0, |mask, lane| mask | 1 << lane);
    rest::awake(shared, owned)
}

/// Gives a lane to each member that comes back and has none, as far as there are any; then steers to those.
pub(crate) fn assign(shared: &Shared, fd: c_int, full: bool) {
    let lanes = shared.lanes.load(Ordering::Relaxed) as usize;
    let joined = shared.joined.load(Ordering::Acquire) as usize;
    for (at, member) in shared.members.iter().enumerate().take(joined) {
        let comes_back = member.receives.load(Ordering::Relaxed) >= COMES_BACK;
        let lane = member.lane.load(Ordering::Relaxed);
        if !is_there(member) || lane >= 0 || !comes_back {
            continue;
        }
        let free = (0..lanes).find(|lane| shared.owner[*lane].load(Ordering::Relaxed) == 0);
        // One that proved itself a moment ago gets its own the next time; shared is what cannot be more.
        let Some(lane) = free.or_else(|| full.then(|| least_shared(shared, lanes))) else { break };
        if free.is_some() {
            shared.owner[lane].store(at as u32 + 1, Ordering::Release);
            points::pass("owner named");
        }
        member.lane.store(lane as c_int, Ordering::Release);
        report::lane(member, lane as c_int, shared.inode_of(lane as c_int));
    }
    steer_to_awake(shared, fd);
    queues::spread(shared);
    note_crowds(shared);
    hold::tell(shared, fd);
}

/// Which lanes several members have: nothing is taken ahead of those.
fn note_crowds(shared: &Shared) {
    let joined = shared.joined.load(Ordering::Acquire) as usize;
    let (mut once, mut crowded) = (0_u64, 0_u64);
    for member in shared.members.iter().take(joined).filter(|at| at.who.load(Ordering::Relaxed) != 0) {
        if let Ok(lane @ 0..MAX_LANES) = usize::try_from(member.lane.load(Ordering::Relaxed)) {
            crowded |= once & 1 << lane;
            once |= 1 << lane;
        }
    }
    shared.crowded.store(crowded, Ordering::Release);
}

/// Whether a place is a member's that is not known to be dead.
fn is_there(member: &Member) -> bool {
    member.who.load(Ordering::Acquire) != 0 && !life::is_dead(member.life.load(Ordering::Acquire))
}

/// Lanes without an owner go to members that share the lane of another one, as far as there are such.
pub(crate) fn part(shared: &Shared) {
    let lanes = shared.lanes.load(Ordering::Relaxed) as usize;
    let joined = shared.joined.load(Ordering::Acquire) as usize;
    for free in (0..lanes).filter(|lane| shared.owner[*lane].load(Ordering::Relaxed) == 0) {
        let sharer = shared.members.iter().take(joined).position(|member| {
            let lane = usize::try_from(member.lane.load(Ordering::Relaxed)).ok();
            let owner = lane.and_then(|lane| shared.owner_of(lane));
            is_there(member) && owner.is_some_and(|owner| !std::ptr::eq(owner, member))
        });
        let Some(at) = sharer else { break };
        shared.owner[free].store(at as u32 + 1, Ordering::Release);
        shared.members[at].lane.store(free as c_int, Ordering::Release);
        report::lane(&shared.members[at], free as c_int, shared.inode_of(free as c_int));
    }
    note_crowds(shared);
}

/// More threads than lanes: some share one, as all would share the program's own socket. The kernel wakes one of them for
/// each datagram.
fn least_shared(shared: &Shared, lanes: usize) -> usize {
    let members = |lane: usize| {
        let has = |member: &&Member| member.lane.load(Ordering::Relaxed) == lane as c_int;
        shared.members.iter().filter(|member| member.who.load(Ordering::Relaxed) != 0).filter(has).count()
    };
    (0..lanes).min_by_key(|lane| members(*lane)).unwrap_or(0)
}

/// A lane has lost its owner: another member that shares it takes over. Whether there was one.
pub(crate) fn inherit(shared: &Shared, lane: usize) -> bool {
    let joined = shared.joined.load(Ordering::Acquire) as usize;
    let has = |member: &Member| member.lane.load(Ordering::Relaxed) == lane as c_int && is_there(member);
    note_crowds(shared);
    let heir = shared.members.iter().take(joined).position(has);
    shared.owner[lane].store(heir.map_or(0, |at| at as u32 + 1), Ordering::Release);
    heir.is_some()
}

/// Mode LANED: lanes for those who came later.
fn give_lanes(sock: &Sock, shared: &Shared, fd: c_int, guard: &Guard<'_>) {
    let Some(limit) = start::settings().map(|settings| settings.lanes) else { return };
    let owned = shared.owner.iter().filter(|owner| owner.load(Ordering::Relaxed) != 0).count();
    let joined = shared.joined.load(Ordering::Acquire) as usize;
    let without = shared.members.iter().take(joined).filter(|member| {
        is_there(member)
            && member.lane.load(Ordering::Relaxed) < 0
            && member.receives.load(Ordering::Relaxed) >= COMES_BACK
    });
    let wanted = owned + without.count();
    let full = !open_up_to(sock, shared, fd, wanted.min(limit)) || wanted > limit;
    let _change = mend::begin(shared, mend::OWNERS, guard);
    assign(shared, fd, full);
}

/// Takes a member's lane out of steering and frees its place. What the lane holds stays within everybody's reach.
pub(crate) fn leave(shared: &Shared, fd: c_int, at: usize, guard: &Guard<'_>) {
    let _change = mend::begin(shared, mend::OWNERS, guard);
    let member = &shared.members[at];
    let lane = member.lane.swap(-1, Ordering::AcqRel);
    points::pass("lane left");
    if let Ok(lane) = usize::try_from(lane) {
        let owned = shared.owner[lane].load(Ordering::Relaxed) as usize == at + 1;
        if owned && !inherit(shared, lane) && shared.mode() == LANED {
            past(shared, fd, lane);
            points::pass("steered past");
        }
        queues::spread(shared);
    }
    report::end(member);
    member.state.store(0, Ordering::Relaxed);
    // Who takes the place next has proved nothing, and is not known to be dead.
    member.receives.store(0, Ordering::Relaxed);
    member.life.store(0, Ordering::Relaxed);
    member.who.store(0, Ordering::Release);
}

/// Nothing more comes to a lane, and what it holds goes before all else: also what arrived on the way there.
fn past(shared: &Shared, fd: c_int, lane: usize) {
    shared.first.fetch_or(1 << lane, Ordering::AcqRel);
    steer_to(shared, fd, awake(shared) & !(1 << lane));
    shared.first.fetch_or(1 << lane, Ordering::AcqRel);
}

/// [`past`], for a lane of `sock` that nobody owns any more. Under the lock.
pub(crate) fn steer_past(sock: &Sock, shared: &Shared, lane: usize) {
    past(shared, group(sock), lane);
}

/// Any socket of the group: what steering is set on. Without a lane there is nothing to steer. Only under the lock: lanes
/// may just be being made.
pub(crate) fn group(sock: &Sock) -> c_int {
    sock.lane_fds().next().map_or(-1, |(_, fd)| fd)
}

/// A member's thread ends.
pub(crate) fn member_leaves(sock: &Sock, shared: &Shared, at: usize) {
    if let Some(guard) = mend::lock(sock, shared, true) {
        leave(shared, group(sock), at, &guard);
    }
}

/// The socket becomes a plain one, for good: lanes leave steering, then the table of ports, and are emptied by
/// whoever receives next. When this returns, the program's own socket is the only one that gets anything.
#[cold]
pub(crate) fn fall_back(sock: &'static Sock, fd: c_int, reason: Reason) {
    let errno = real::errno();
    _ = sock.spoilt.compare_exchange(0, reason as u32 + 1, Ordering::Relaxed, Ordering::Relaxed);
    if let Some(shared) = sock.shared()
        && let Some(guard) = mend::lock(sock, shared, true)
        && !matches!(shared.mode(), UNBOUND | PLAIN)
    {
        // It may be a descriptor of another thread, which closes it meanwhile.
        let kept = keep_as(sock, fd);
        let fd = kept.as_ref().map_or(fd, Kept::fd);
        let change = mend::begin(shared, mend::falling(reason), &guard);
        points::pass("falling");
        report::count_reason(reason, local_addr(fd));
        mend::counted(shared, &guard);
        plain(sock, shared, fd, &guard);
        drop(change);
        drop(guard);
        epoll::fallen(sock);
    }
    real::set_errno(errno);
}

/// All steps of falling back. Each may be done twice: who finishes what somebody died over does them all.
pub(crate) fn plain(sock: &Sock, shared: &Shared, fd: c_int, _guard: &Guard<'_>) {
    alone::leave(sock);
    loan::close(sock, shared);
    let others = lanes_mask(shared) & !1;
    if others == 0 {
        shared.mode.store(PLAIN, Ordering::SeqCst);
        if shared.bounded.load(Ordering::Acquire) != 0 && shared.retired.load(Ordering::Acquire) == 0 {
            unbound_waits(shared, fd);
        }
        forget_steering(sock, fd);
        return;
    }
    steer_to(shared, fd, 1);
    points::pass("steered to one");
    // What is between steering and a queue arrives there before this returns.
    barrier::settle();
    for (_, lane) in sock.lane_fds() {
        open::cut_off(lane);
        points::pass("cut off");
    }
    mirror::set_number(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, 0);
    if shared.bounded.load(Ordering::Acquire) == 0 {
        bound_waits(shared, fd);
    }
    let holds = if sock.holds().is_some() { hold::HOLDS } else { 0 };
    shared.retired.store(others | holds, Ordering::Release);
    points::pass("retired");
    // Without a lane, a member takes from all of them until the mode has changed.
    for member in &shared.members {
        member.lane.store(-1, Ordering::Relaxed);
        report::lane(member, -1, shared.inode_of(-1));
    }
    points::pass("nobody's");
    forget_steering(sock, fd);
    shared.mode.store(PLAIN, Ordering::SeqCst);
    points::pass("plain");
    gather::flush_all(sock, shared, fd);
}

/// A retired lane was found empty: it stays so. With the last one the socket is the kernel's alone.
#[cold]
pub(crate) fn emptied(shared: &Shared, fd: c_int, lane: usize) {
    let errno = real::errno();
    let bit = 1 << lane;
    let mut retired = shared.retired.load(Ordering::Acquire);
    while retired & bit != 0 {
        if retired == bit {
            // Before anybody takes the socket for the kernel's: a bound of ours would be seen.
            unbound_waits(shared, fd);
        }
        match shared.retired.compare_exchange(retired, retired & !bit, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => break,
            Err(now) => retired = now,
        }
    }
    real::set_errno(errno);
}

/// A socket is about to be bound: should it get lanes, there is to be no moment in which they get what nobody looks for.
pub(crate) fn before_bind(sock: &'static Sock, fd: c_int) {
    let may_have = sock.shared().is_none_or(|shared| shared.mode() == UNBOUND)
        && sock.spoilt.load(Ordering::Relaxed) == 0
        && start::settings().is_some_and(|settings| settings.lanes > 1);
    if may_have
        && sock.steered_ahead.load(Ordering::Relaxed) == 0
        && STEERED_AHEAD.fetch_add(1, Ordering::Relaxed) < MOST_AHEAD
    {
        let errno = real::errno();
        sock.steered_ahead.store(u32::from(open::steer_ahead(fd)), Ordering::Release);
        real::set_errno(errno);
    }
}

/// The socket's group, if it ever has one, is the program's.
pub(crate) fn forget_steering(sock: &Sock, fd: c_int) {
    if sock.steered_ahead.swap(0, Ordering::AcqRel) != 0 {
        let errno = real::errno();
        open::forget_steering(fd);
        real::set_errno(errno);
    }
}

/// A socket was bound: whether it can have lanes is known now.
pub(crate) fn bind(sock: &'static Sock, fd: c_int) {
    let errno = real::errno();
    if let (Some(addr), Some(settings)) = (local_addr(fd), start::settings())
        && settings.takes(addr.port())
        && sock.shared().is_none_or(|shared| shared.mode() == UNBOUND)
    {
        begin(sock, fd, addr);
    }
    real::set_errno(errno);
}

fn begin(sock: &'static Sock, fd: c_int, addr: SocketAddr) {
    report::count_socket();
    let Some(shared) = sock.share() else {
        report::count_reason(Reason::Full, Some(addr));
        return;
    };
    let flags = crate::calls::call::fcntl(fd, libc::F_GETFL, 0);
    shared.nonblock.store(u32::from(flags & libc::O_NONBLOCK != 0), Ordering::Relaxed);
    shared.timeout_us.store(sock.timeout_us.load(Ordering::Relaxed), Ordering::Relaxed);
    shared.port.store(u32::from(addr.port()), Ordering::Relaxed);
    shared.inode[0].store(open::inode(fd), Ordering::Relaxed);
    shared.lanes.store(1, Ordering::Relaxed);
    let ip = addr.ip();
    let one_only = ip.is_multicast() || ip == std::net::IpAddr::V4(std::net::Ipv4Addr::BROADCAST);
    let spoilt = sock.spoilt.load(Ordering::Relaxed);
    let reason = Reason::ALL.get((spoilt as usize).wrapping_sub(1)).copied();
    match reason.or(one_only.then_some(Reason::Address)) {
        Some(reason) => {
            report::count_reason(reason, Some(addr));
            shared.mode.store(PLAIN, Ordering::Release);
        }
        None => shared.mode.store(SINGLE, Ordering::Release),
    }
}

/// Before a fork, or before privileges go: sockets that may need lanes later get them now, steered to by nobody.
pub(crate) fn open_in_advance() {
    let errno = real::errno();
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let limit = start::settings().map_or(1, |settings| settings.lanes);
    let may_have = |sock: &&'static Sock| {
        sock.shared().is_some_and(|shared| matches!(shared.mode(), SINGLE | LEARN | LANED))
    };
    for sock in Sock::in_use().filter(may_have).take(SOCKETS_IN_ADVANCE) {
        let generation = sock.generation.load(Ordering::Acquire);
        let (Some(shared), Some(fd)) = (sock.shared(), keep(sock)) else { continue };
        // Another thread may have made it plain meanwhile: then it gets none any more. Or it has closed it, and what is here now is
        // another one.
        if let Some(guard) = mend::lock(sock, shared, true)
            && may_have(&sock)
            && sock.generation.load(Ordering::Acquire) == generation
        {
            let fd = fd.fd();
            loan::in_advance(sock, shared, fd, &guard);
            // Who receives on it may be in a wait without a bound already, or looks at nothing but the program's own socket:
            // not one datagram may land elsewhere.
            if sock.steered_ahead.load(Ordering::Acquire) != 0 {
                open_up_to(sock, shared, fd, limit.min(cpus.max(IN_ADVANCE)));
            }
        }
    }
    real::set_errno(errno);
}

/// Any of the program's descriptors for a socket.
pub(crate) fn any_fd(sock: &Sock) -> Option<c_int> {
    let index = sock.index();
    table::known(0, u32::MAX).find(|(_, entry)| *entry == Entry::Sock(index)).map(|(fd, _)| fd)
}

/// A socket, for a thread that has no descriptor of the program's in its hands: another one may close any of them at any time.
pub(crate) fn keep(sock: &Sock) -> Option<Kept> {
    keep_by(sock, any_fd(sock)?)
}

/// [`keep`], by `fd` if that is still one of the socket's.
fn keep_as(sock: &Sock, fd: c_int) -> Option<Kept> {
    keep_by(sock, fd).or_else(|| keep(sock))
}

fn keep_by(sock: &Sock, fd: c_int) -> Option<Kept> {
    let shared = sock.shared()?;
    let kept = Kept::of(fd)?;
    // Before it was kept its number may have come to mean another socket.
    let port = local_addr(kept.fd()).map(|addr| u32::from(addr.port()));
    let is_it =
        port == Some(shared.port.load(Ordering::Relaxed)) && table::entry(fd) == Entry::Sock(sock.index());
    is_it.then_some(kept)
}

/// From now on nobody can tell whether a blocking receive goes on after a signal: `signals.rs`.
#[cold]
pub(crate) fn signals_are_mixed() {
    for sock in Sock::in_use() {
        let Some(shared) = sock.shared() else { continue };
        let joined = shared.joined.load(Ordering::Acquire) as usize;
        let blocks = shared
            .members
            .iter()
            .take(joined)
            .any(|member| member.kind.load(Ordering::Relaxed) & BLOCKS != 0);
        if (matches!(shared.mode(), LEARN | LANED) || queues::are_open(shared))
            && blocks
            && let Some(fd) = keep(sock)
        {
            fall_back(sock, fd.fd(), Reason::Signals);
        }
    }
}

/// Frees the places of this process's threads: it closes the socket.
pub(crate) fn close(sock: &Sock) {
    alone::leave(sock);
    if let Some(shared) = sock.shared()
        && let Some(guard) = mend::lock(sock, shared, true)
    {
        // Nobody else has it: who binds the port next is to get all that comes from now on. The lender would learn of the
        // end of the loan a moment too late.
        if shared.forked.load(Ordering::Relaxed) == 0 {
            loan::close(sock, shared);
        }
        let fd = group(sock);
        gather::flush_all(sock, shared, fd);
        let pid = u64::from(std::process::id());
        for at in 0..shared.joined.load(Ordering::Acquire) as usize {
            if shared.members[at].who.load(Ordering::Relaxed) >> 32 == pid {
                leave(shared, fd, at, &guard);
            }
        }
    }
    for (lane, fd) in sock.lane_fds() {
        table::set(fd, Entry::None);
        crate::calls::call::close(fd);
        sock.set_lane_fd(lane, None);
    }
    loan::give_back(sock);
    sock.give_back();
}

/// One more beat of the calling thread.
#[inline]
pub(crate) fn beat(member: &Member) {
    member.beat.store(member.beat.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}
