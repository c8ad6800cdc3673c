//! setsockopt(2), getsockopt(2), ioctl(2). An option that a lane can have is set on every lane. An
//! option that a lane cannot have makes the socket plain. Options that the library itself sets are
//! hidden from the program: while the library has set SO_REUSEPORT, `getsockopt` says 0.

use std::mem::size_of;
use std::sync::atomic::Ordering;

use libc::{c_int, c_ulong, c_void, socklen_t, timeval};
use manylane_ipc::report::Reason;

use crate::base::real::{self, call};
use crate::base::sockopt::NO_WAIT_US;
use crate::base::{quiesce, sockopt, state};
use crate::batching::readiness::ready_lanes;
use crate::batching::{prefetch, send_batch};
use crate::fds::sock_fds::is_managed;
use crate::fds::{hidden_fds, table};
use crate::group::coverage::uncovered;
use crate::group::plain;
use crate::lanes::fallback;
use crate::lanes::{entries, members};
use crate::shared::sock::{MULTI_LANE, Member, PLAIN, Shared, Sock};
use crate::shared::thread;
use crate::transfer::detached;
use crate::xdp::queues;

const SO_RCVTIMEO_NEW: c_int = 66;
const SIOCGSTAMP: c_ulong = 0x8906;
const SIOCGSTAMPNS: c_ulong = 0x8907;
const FIOASYNC: c_ulong = 0x5452;

pub(crate) unsafe fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    send_batch::flush_unless_vforked();
    // SAFETY: program arguments.
    let own = |fd| unsafe { call::setsockopt(fd, level, name, value, len) };
    let Some(sock) = entries::sock(fd) else { return own(hidden_fds::kernel_fd(fd)) };
    // Turns an option off, which changes nothing for lanes.
    // SAFETY: program arguments.
    let is_zero =
        || len as usize == size_of::<c_int>() && unsafe { read_value::<c_int>(value, len) } == Some(0);
    // Other threads sent their queued replies before the option was set: flush them first.
    if state::is_send_batching()
        && let Some(shared) = sock.shared()
    {
        send_batch::flush_all(sock, shared, fd);
    }
    if level == libc::SOL_SOCKET && matches!(name, libc::SO_RCVTIMEO | SO_RCVTIMEO_NEW) {
        // SAFETY: program arguments.
        return set_timeout(sock, fd, || unsafe { read_value(value, len) }, || own(fd));
    }
    if sockopt::affects_frames(level, name) && sock.shared().is_some_and(queues::is_open) {
        fallback::fall_back(sock, fd, Reason::Control);
    }
    if let Some(reason) = sockopt::plain_reason(level, name).filter(|_| !is_zero()) {
        // Before the option is set: its effect must not reach lanes.
        fallback::fall_back(sock, fd, reason);
    }
    if (level, name) == (libc::SOL_SOCKET, libc::SO_REUSEPORT) && !is_zero() {
        plain::detach_steering(sock, fd);
    }
    if sockopt::enables_cmsg(level, name)
        && !is_zero()
        && let Some(shared) = sock.shared()
    {
        // Later datagrams have the control messages that the program asks for.
        prefetch::disable(shared);
    }
    if (level, name) == (libc::SOL_SOCKET, libc::SO_REUSEPORT)
        && is_zero()
        && sock.shared().is_some_and(is_in_group)
    {
        // For the program it is off already: the group stays.
        return 0;
    }
    let done = own(fd);
    if done == 0
        && let Some(name) = sockopt::replicated(level, name)
    {
        let errno = real::errno();
        for (_, lane) in sock.lane_fds() {
            sockopt::replicate_one(fd, lane, level, name);
        }
        real::set_errno(errno);
    }
    done
}

/// True if the socket shares its port with lanes, so that the library has set SO_REUSEPORT.
fn is_in_group(shared: &Shared) -> bool {
    shared.lanes.load(Ordering::Acquire) > 1 && shared.mode() != PLAIN
}

/// The program's value of an option, which consists of numbers; none if it is too short.
unsafe fn read_value<T>(value: *const c_void, len: socklen_t) -> Option<T> {
    let fits = !value.is_null() && len as usize >= size_of::<T>();
    // SAFETY: program arguments.
    fits.then(|| unsafe { value.cast::<T>().read_unaligned() })
}

/// Sets the program's own receive timeout. The kernel gets it only while the library has set no
/// bound on waits.
fn set_timeout(
    sock: &'static Sock,
    fd: c_int,
    value: impl Fn() -> Option<timeval>,
    own: impl Fn() -> c_int,
) -> c_int {
    let is_valid = |time: &timeval| (0..1_000_000).contains(&time.tv_usec);
    // With a negative time the kernel's receive does not wait, and getsockopt reports no timeout.
    if value().is_some_and(|time| time.tv_sec < 0 && is_valid(&time)) {
        fallback::fall_back(sock, fd, Reason::Option);
        // Lanes may still hold datagrams. The last one that is empty must not set the time before
        // this one again.
        if let Some(shared) = sock.shared().filter(|shared| shared.mode() == PLAIN) {
            shared.bounded.store(0, Ordering::Release);
        }
        store_timeout(sock, NO_WAIT_US);
        return own();
    }
    let bounded = sock.shared().is_some_and(|shared| shared.bounded.load(Ordering::Acquire) != 0);
    if !bounded {
        let done = own();
        if done == 0
            && let Some(time) = value()
        {
            store_timeout(sock, to_us(time));
        }
        return done;
    }
    let Some(time) = value() else { return own() };
    if !is_valid(&time) {
        return real::fail_with_errno(libc::EDOM);
    }
    store_timeout(sock, to_us(time));
    0
}

/// Microseconds of a time that is not negative.
fn to_us(time: timeval) -> u64 {
    let us = (time.tv_sec.max(0) as u64).saturating_mul(1_000_000);
    round_to_ticks(us.saturating_add(time.tv_usec.max(0) as u64)).min(NO_WAIT_US - 1)
}

fn store_timeout(sock: &'static Sock, us: u64) {
    sock.timeout_us.store(us, Ordering::Relaxed);
    if let Some(shared) = sock.shared() {
        shared.timeout_us.store(us, Ordering::Relaxed);
    }
}

/// Rounds a timeout up to whole ticks of the kernel's clock, as the kernel stores and reports it.
fn round_to_ticks(us: u64) -> u64 {
    let mut tick = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `tick` is a local that the call, which is not the program's, writes; it stays zero
    // if the call fails.
    unsafe { libc::clock_getres(libc::CLOCK_MONOTONIC_COARSE, &raw mut tick) };
    match u64::try_from(tick.tv_nsec / 1000) {
        Ok(tick @ 1..) => us.checked_next_multiple_of(tick).unwrap_or(us),
        _ => us,
    }
}

pub(crate) unsafe fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    // Check before and after the kernel's call: a socket may become plain in between, and the
    // kernel may report it with the library's options.
    let is_ours =
        level == libc::SOL_SOCKET && matches!(name, libc::SO_REUSEPORT | libc::SO_RCVTIMEO | SO_RCVTIMEO_NEW);
    let shared = if is_ours { entries::sock(fd).and_then(Sock::shared) } else { None };
    let is_bounded = |shared: &Shared| shared.bounded.load(Ordering::Acquire) != 0;
    let (was_group, was_bounded) =
        shared.map_or((false, false), |shared| (is_in_group(shared), is_bounded(shared)));
    // SAFETY: program arguments.
    let done = unsafe { call::getsockopt(hidden_fds::kernel_fd(fd), level, name, value, len) };
    let (Some(shared), 0) = (shared, done) else { return done };
    // SAFETY: program arguments: the kernel has just written the length.
    let room = unsafe { *len } as usize;
    match name {
        // The program setting it would have made the socket plain: it is the library's.
        libc::SO_REUSEPORT if was_group || is_in_group(shared) => {
            // SAFETY: program arguments: the kernel has just written as many bytes.
            unsafe { value.cast::<u8>().write_bytes(0, room.min(size_of::<c_int>())) };
        }
        libc::SO_RCVTIMEO | SO_RCVTIMEO_NEW if was_bounded || is_bounded(shared) => {
            // As the kernel reports a negative one.
            let us = Some(shared.timeout_us.load(Ordering::Relaxed)).filter(|us| *us != NO_WAIT_US);
            let us = us.unwrap_or(0);
            let time = timeval { tv_sec: (us / 1_000_000) as i64, tv_usec: (us % 1_000_000) as i64 };
            // As the kernel: as many of its bytes as there is room for.
            let len = room.min(size_of::<timeval>());
            // SAFETY: as above; a local, which does not overlap.
            unsafe { value.cast::<u8>().copy_from_nonoverlapping((&raw const time).cast(), len) };
        }
        _ => {}
    }
    done
}

pub(crate) unsafe fn ioctl(fd: c_int, request: c_ulong, arg: *mut c_void) -> c_int {
    // SAFETY: program arguments.
    unsafe {
        if table::sock(fd).is_none() {
            return call::ioctl(hidden_fds::kernel_fd(fd), request, arg);
        }
        quiesce::run_inside(|| ioctl_tracked(fd, request, arg))
            .unwrap_or_else(|| detached::ioctl(fd, request, arg))
    }
}

unsafe fn ioctl_tracked(fd: c_int, request: c_ulong, arg: *mut c_void) -> c_int {
    // SAFETY: program arguments.
    let native = |fd| unsafe { call::ioctl(fd, request, arg) };
    let answer = |len: usize| {
        // SAFETY: program arguments, of FIONREAD.
        unsafe { arg.cast::<c_int>().write_unaligned(len as c_int) };
        0
    };
    let Some((sock, shared)) = entries::sock(fd).and_then(|sock| Some((sock, sock.shared()?))) else {
        return native(hidden_fds::kernel_fd(fd));
    };
    match request {
        libc::FIONBIO => {
            let done = native(fd);
            update_nonblocking(fd, shared);
            done
        }
        libc::FIONREAD if is_managed(shared) && !arg.is_null() => {
            let own = thread::member(sock, shared).and_then(Member::own_lane).unwrap_or(0);
            let mask = if queues::is_draining(shared) { u64::MAX } else { 1 << own };
            if let Some(len) = queues::next_len(sock, shared, mask) {
                return answer(len);
            }
            // In a plain socket, prefetched datagrams come first.
            let queued_len = if prefetch::has_leftovers(sock, shared, fd) {
                prefetch::next_len(sock, u64::MAX)
            } else {
                None
            };
            let lane = queued_len.map_or_else(|| next_recv_lane(sock, shared, fd), |(_, lane)| lane);
            let queued_len = queued_len.or_else(|| prefetch::next_len(sock, 1 << lane)).map(|(len, _)| len);
            if queued_len.is_some() {
                thread::set_peeked(sock, lane);
            }
            if let Some(len) = queued_len.or_else(|| queues::next_len(sock, shared, 1 << lane)) {
                return answer(len);
            }
            thread::set_peeked(sock, lane);
            native(sock.fd_of(lane, fd))
        }
        SIOCGSTAMP | SIOCGSTAMPNS | FIOASYNC => {
            fallback::fall_back(sock, fd, Reason::Ioctl);
            native(fd)
        }
        _ => native(fd),
    }
}

/// The lane that the calling thread would receive from.
fn next_recv_lane(sock: &'static Sock, shared: &Shared, fd: c_int) -> usize {
    let errno = real::errno();
    let own = members::member(sock, shared, fd).and_then(Member::own_lane).unwrap_or(0);
    let mut lane = own;
    let retired = shared.retired.load(Ordering::Acquire) & !prefetch::PREFETCH_BIT;
    // As a receive does: retired lanes hold nothing newer than the program's own socket.
    for mask in [retired, shared.drain_first.load(Ordering::Acquire), 1 << own] {
        let has = ready_lanes(sock, shared, fd, mask);
        if has != 0 {
            real::set_errno(errno);
            return has.trailing_zeros() as usize;
        }
    }
    if shared.mode() == MULTI_LANE {
        let has = ready_lanes(sock, shared, fd, uncovered(sock, shared, Some(own)));
        if has != 0 {
            lane = has.trailing_zeros() as usize;
        }
    }
    real::set_errno(errno);
    lane
}

/// The program has made `fd` blocking or non-blocking.
pub(crate) fn update_nonblocking(fd: c_int, shared: &Shared) {
    let errno = real::errno();
    let flags = real::status_flags(fd);
    if flags >= 0 {
        shared.nonblock.store(u32::from(flags & libc::O_NONBLOCK != 0), Ordering::Relaxed);
    }
    real::set_errno(errno);
}
