//! Creation of a socket's lanes.
//!
//! While one thread receives, the socket is the kernel's alone. When a second thread receives on
//! it or waits for it, the mode becomes OBSERVING: there is still one kernel socket, but every
//! wait ends after 20 ms at most and starts again. `SO_RCVTIMEO` on the kernel's socket does that,
//! in place of the program's own timeout, which is kept and imitated.
//!
//! Lanes are made ([`try_create`]) when every member has received twice, or waits in a blocking
//! receive that has a bound, and at least two have received twice. A receive that ended without a
//! datagram counts, because several threads may be woken for one datagram. No member may still be
//! in a wait without a bound from before. If a member waits and does not receive, or received only
//! once, the socket becomes plain after a number of attempts.
//!
//! A thread that comes later gets a lane when it has received twice. Until then it receives from
//! all lanes. With more threads than lanes (`MANYLANE_LANES`, the lanes that there were at a fork,
//! or descriptors for no more), some threads share a lane, as all would have shared the program's
//! own socket.
//!
//! # In advance
//!
//! After a fork no lane is opened: the other process would not have it. So before a fork, and
//! before a process drops root, each socket that may need lanes gets them, as far as descriptors
//! can be spared: one for each CPU, at least four, and at most `MANYLANE_LANES`. They are steered
//! to once they have owners. The one receiver may be in a wait without a bound on lane 0 at that
//! time, so that no datagram may land in another lane: see `lane_socket::pre_steer`.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};

use libc::c_int;
use manylane_ipc::report::Reason;

use crate::base::settings::LANES_MAX;
use crate::base::{real, signals, sockopt, state};
use crate::batching::{prefetch, send_batch};
use crate::fds::lane_socket::{self, local_addr};
use crate::fds::sock_fds::{dup_any, lanes_mask};
use crate::fds::{hidden_fds, identity};
use crate::group::change;
use crate::group::leasing;
use crate::group::owners::{assign, drain_first, is_live, remove_member_locked, steer_to};
use crate::group::recovery;
use crate::lanes::epoll_set;
use crate::lanes::fallback::fall_back;
use crate::shared::lock::Guard;
use crate::shared::sock::{
    BLOCKS, MULTI_LANE, Member, OBSERVING, PLAIN, PROVEN_RECEIVES_MIN, SINGLE, Shared, Sock, UNBOUND,
    UNBOUNDED, WAITS_ON,
};
use crate::shared::{failpoint, lease, liveness, report};
use crate::xdp::queues;

/// Max attempts while a thread does not come back. After them the socket becomes plain.
const ATTEMPTS_MAX: u32 = 4000;
/// Attempts that are made at each receive; later ones are rarer.
const EAGER_ATTEMPTS_MAX: u32 = 256;
/// Min lanes of a socket when they are opened in advance.
const PREOPENED_LANES_MIN: usize = 4;

/// Max sockets for this: a program with more is no server that forks its receivers.
const PREOPENED_SOCKETS_MAX: usize = 64;
/// Max sockets of a process that are bound with steering, which matters only once there is a
/// group. It doubles the cost of opening a socket, which a program that opens one for each request
/// must not pay for ever.
const PRE_STEERED_MAX: u32 = 4096;
static PRE_STEERED_COUNT: AtomicU32 = AtomicU32::new(0);

/// True if it is time to try to create lanes: always at first, rarely later. When many threads are
/// woken for one datagram, the kernel lets the late ones sleep on, so that the last thread may
/// take long to receive twice.
#[inline]
pub(crate) fn should_try_create(shared: &Shared, member: &Member) -> bool {
    shared.attempts.load(Ordering::Relaxed) < EAGER_ATTEMPTS_MAX
        || member.heartbeat.load(Ordering::Relaxed) % 32 < 2
}

/// Creates lanes if it is time for them. The caller received in mode `OBSERVING`, or has no lane
/// in mode `MULTI_LANE`.
#[cold]
pub(crate) fn try_create(sock: &'static Sock, shared: &Shared, fd: c_int) {
    // This needs more stack than any other path: a later receive does it.
    if real::is_on_signal_stack() {
        return;
    }
    let errno = real::errno();
    let mut give_up = None;
    if let Some(guard) = recovery::lock(sock, shared, false) {
        match shared.mode() {
            OBSERVING => give_up = create_lanes(sock, shared, fd, &guard),
            MULTI_LANE => assign_new_lanes(sock, shared, fd, &guard),
            _ => {}
        }
    }
    if let Some(reason) = give_up {
        fall_back(sock, fd, reason);
    }
    real::set_errno(errno);
}

/// Creates lanes if every thread comes back; they share lanes if they are too many. Returns the
/// reason if the socket must become plain.
fn create_lanes(sock: &Sock, shared: &Shared, fd: c_int, guard: &Guard<'_>) -> Option<Reason> {
    let Some(limit) = state::settings().map(|settings| settings.lanes) else { return Some(Reason::Full) };
    let tried = shared.attempts.fetch_add(1, Ordering::Relaxed);
    let mut ready = 0;
    let mut blocks = false;
    let joined = shared.joined.load(Ordering::Acquire) as usize;
    for (at, member) in shared.members.iter().enumerate().take(joined) {
        if member.thread_id.load(Ordering::Acquire) == 0 {
            continue;
        }
        if liveness::has_exited(member.liveness.load(Ordering::Acquire)) {
            remove_member_locked(shared, fd, at, guard);
            continue;
        }
        // SeqCst on both sides: either this load sees the wait without a bound, or that thread
        // sees the changed mode.
        let state = member.state.load(Ordering::SeqCst);
        let comes_back = member.receives.load(Ordering::Relaxed) >= PROVEN_RECEIVES_MIN;
        let kind = member.kind.load(Ordering::Relaxed);
        blocks |= kind & BLOCKS != 0;
        let waits_in_receive = kind == BLOCKS && state == WAITS_ON;
        if state == UNBOUNDED || !(comes_back || waits_in_receive) {
            if recovery::has_exited(member) {
                remove_member_locked(shared, fd, at, guard);
                continue;
            }
            return (tried > ATTEMPTS_MAX).then_some(Reason::Pattern);
        }
        ready += usize::from(comes_back);
    }
    if blocks && signals::is_mixed() {
        return Some(Reason::Signals);
    }
    if ready < 2 {
        return (tried > ATTEMPTS_MAX).then_some(Reason::Pattern);
    }
    let opened = open_lanes(sock, shared, fd, ready.min(limit), usize::MAX);
    let full = opened.is_err() || ready >= limit;
    if shared.lanes.load(Ordering::Relaxed) < 2 {
        let late =
            shared.forked.load(Ordering::Relaxed) != 0 && sock.pre_steered.load(Ordering::Relaxed) == 0;
        let short = shared.lacks_fds.load(Ordering::Relaxed) != 0;
        return Some(if late {
            Reason::Forked
        } else if short {
            Reason::Full
        } else {
            opened.err().unwrap_or(Reason::NoSocket)
        });
    }
    let _change = change::start_change(shared, change::OWNERS, guard);
    assign(shared, fd, full);
    failpoint::hit("lanes assigned");
    // Datagrams queued in the program's own socket are older than those of any lane.
    drain_first(shared, 1);
    failpoint::hit("drain order set");
    shared.mode.store(MULTI_LANE, Ordering::Release);
    queues::distribute(shared);
    None
}

/// Opens at most `share` sockets, until the group has `wanted`, a socket cannot be opened, or no
/// descriptor can be spared. Opens none after a fork: the other process would not have them. Steers
/// to lane 0 from the first one on. The error says why the group has fewer than `wanted`.
fn open_lanes(sock: &Sock, shared: &Shared, fd: c_int, wanted: usize, share: usize) -> Result<(), Reason> {
    let have = shared.lanes.load(Ordering::Relaxed) as usize;
    if have >= wanted {
        return Ok(());
    }
    if shared.forked.load(Ordering::Relaxed) != 0 || !identity::is_same_socket(sock, fd) {
        return Err(Reason::NoSocket);
    }
    identity::record_port(shared);
    let lanes_max = have + lane_socket::spare_fds(wanted.saturating_sub(have).min(share));
    if lanes_max < wanted {
        shared.lacks_fds.store(1, Ordering::Relaxed);
    }
    prefetch::map(sock);
    send_batch::map(sock);
    if sockopt::has_cmsg(fd) || epoll_set::is_edge_triggered(sock) {
        prefetch::disable(shared);
    }
    let mut steered = have >= 2;
    let mut why = Reason::NoSocket;
    for lane in have..wanted.min(lanes_max).min(LANES_MAX) {
        // Steer at once: before that, a datagram may land in any socket of the group, also in one
        // that no thread polls yet.
        let new = match lane_socket::open_lane(fd, || steered = steered || steer_to(shared, fd, 1)) {
            Ok(new) => new,
            Err(reason) => {
                why = reason;
                break;
            }
        };
        shared.inode[lane].store(lane_socket::inode(new), Ordering::Relaxed);
        sock.set_lane_fd(lane, new);
        shared.lanes.store(lane as u32 + 1, Ordering::Release);
    }
    if shared.lanes.load(Ordering::Relaxed) as usize > have {
        open_readable_fd();
    }
    if shared.lanes.load(Ordering::Relaxed) < 2 {
        // No lane could be bound: no other socket may join the port.
        sockopt::set_int_option(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, 0);
    } else if !steered {
        // Without steering a lane cannot be left. The new ones are bound: they stay readable for
        // the datagrams that they got.
        let all = lanes_mask(shared) & !1;
        sock.lane_fds().for_each(|(_, lane)| lane_socket::retire(lane));
        sockopt::set_int_option(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, 0);
        shared.retired.store(all, Ordering::Release);
        shared.lanes.store(1, Ordering::Release);
    }
    if shared.lanes.load(Ordering::Relaxed) as usize >= wanted { Ok(()) } else { Err(why) }
}

/// Opens the descriptor that reports datagrams left in lanes (`nested.rs`), if one can be spared.
/// Later the program may have lowered its limit of open files, so that none can be opened.
fn open_readable_fd() {
    if hidden_fds::readable_fd_if_open().is_none() && lane_socket::spare_fds(1) > 0 {
        hidden_fds::readable_fd();
    }
}

/// In mode `MULTI_LANE`: lanes for threads that joined later.
fn assign_new_lanes(sock: &Sock, shared: &Shared, fd: c_int, guard: &Guard<'_>) {
    let Some(limit) = state::settings().map(|settings| settings.lanes) else { return };
    let owned = shared.owner.iter().filter(|owner| owner.load(Ordering::Relaxed) != 0).count();
    let joined = shared.joined.load(Ordering::Acquire) as usize;
    let without = shared.members.iter().take(joined).filter(|member| {
        is_live(member)
            && member.lane.load(Ordering::Relaxed) < 0
            && member.receives.load(Ordering::Relaxed) >= PROVEN_RECEIVES_MIN
    });
    let wanted = owned + without.count();
    let full = open_lanes(sock, shared, fd, wanted.min(limit), usize::MAX).is_err() || wanted > limit;
    let _change = change::start_change(shared, change::OWNERS, guard);
    assign(shared, fd, full);
}

/// A socket is about to be bound: attach steering first, so that no datagram lands in a lane that
/// no thread polls, if it gets lanes.
pub(crate) fn before_bind(sock: &'static Sock, fd: c_int) {
    let may_have = sock.shared().is_none_or(|shared| shared.mode() == UNBOUND)
        && sock.plain_reason().is_none()
        && state::settings().is_some_and(|settings| settings.lanes > 1);
    if may_have
        && sock.pre_steered.load(Ordering::Relaxed) == 0
        && PRE_STEERED_COUNT.fetch_add(1, Ordering::Relaxed) < PRE_STEERED_MAX
    {
        let errno = real::errno();
        sock.pre_steered.store(u32::from(lane_socket::pre_steer(fd)), Ordering::Release);
        real::set_errno(errno);
    }
}

/// A socket was bound: decides whether it can have lanes.
pub(crate) fn bind(sock: &'static Sock, fd: c_int) {
    let errno = real::errno();
    if let (Some(addr), Some(settings)) = (local_addr(fd), state::settings())
        && settings.allows_port(addr.port())
        && sock.shared().is_none_or(|shared| shared.mode() == UNBOUND)
    {
        init_shared(sock, fd, addr);
    }
    real::set_errno(errno);
}

fn init_shared(sock: &'static Sock, fd: c_int, addr: SocketAddr) {
    report::count_socket();
    let Some(shared) = sock.map_shared() else {
        report::count_reason(Reason::Full, Some(addr));
        return;
    };
    let flags = real::status_flags(fd);
    shared.nonblock.store(u32::from(flags & libc::O_NONBLOCK != 0), Ordering::Relaxed);
    shared.timeout_us.store(sock.timeout_us.load(Ordering::Relaxed), Ordering::Relaxed);
    shared.port.store(u32::from(addr.port()), Ordering::Relaxed);
    shared.inode[0].store(lane_socket::inode(fd), Ordering::Relaxed);
    shared.lanes.store(1, Ordering::Relaxed);
    let ip = addr.ip();
    let one_only = ip.is_multicast() || ip == std::net::IpAddr::V4(std::net::Ipv4Addr::BROADCAST);
    match sock.plain_reason().or(one_only.then_some(Reason::Address)) {
        Some(reason) => {
            report::count_reason(reason, Some(addr));
            shared.mode.store(PLAIN, Ordering::Release);
        }
        None => shared.mode.store(SINGLE, Ordering::Release),
    }
}

/// A member is proven: requests queues if needed, and opens them.
#[cold]
pub(crate) fn open_queues(sock: &'static Sock, shared: &Shared, fd: c_int) {
    // As in `try_create`: a later receive does it.
    if real::is_on_signal_stack() {
        return;
    }
    let errno = real::errno();
    if let Some(guard) = recovery::lock(sock, shared, true)
        && matches!(shared.mode(), SINGLE | OBSERVING | MULTI_LANE)
    {
        if shared.lease.load(Ordering::Acquire) == lease::NONE {
            leasing::acquire(sock, shared, fd, &guard);
        }
        if shared.lease.load(Ordering::Acquire) == lease::LEASED {
            leasing::open(sock, shared, &guard);
        }
    }
    real::set_errno(errno);
}

/// Runs before a fork or a loss of privileges: requests queues and opens lanes for sockets that may
/// need them later. The lanes are not steered to.
pub(crate) fn preopen_lanes() {
    let errno = real::errno();
    let (cpus, limit) = state::settings().map_or((1, 1), |settings| (settings.cpus, settings.lanes));
    let wanted = limit.min(cpus.max(PREOPENED_LANES_MIN));
    let may_have = |sock: &&'static Sock| {
        sock.shared().is_some_and(|shared| matches!(shared.mode(), SINGLE | OBSERVING | MULTI_LANE))
    };
    let all = || Sock::in_use().filter(may_have).take(PREOPENED_SOCKETS_MAX);
    let count = all().count();
    for (nth, sock) in all().enumerate() {
        let generation = sock.generation.load(Ordering::Acquire);
        let (Some(shared), Some(fd)) = (sock.shared(), dup_any(sock)) else { continue };
        // Another thread may have made it plain meanwhile: then it gets no lanes. Or it closed it,
        // and the slot belongs to another socket.
        if let Some(guard) = recovery::lock(sock, shared, true)
            && may_have(&sock)
            && sock.generation.load(Ordering::Acquire) == generation
        {
            let fd = fd.fd();
            leasing::acquire_early(sock, shared, fd, &guard);
            // Its receiver may be in a wait without a bound, or poll only the program's own
            // socket: no datagram may land in another lane.
            if sock.pre_steered.load(Ordering::Acquire) != 0 && shared.forked.load(Ordering::Relaxed) == 0 {
                // Each socket gets its share of the free descriptors.
                let left = count.saturating_sub(nth).max(1);
                let share = lane_socket::spare_fds(wanted * left) / left;
                _ = open_lanes(sock, shared, fd, wanted, share);
            }
        }
    }
    real::set_errno(errno);
}
