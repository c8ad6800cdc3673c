//! poll(2) and ppoll(2), and the slices of select(2).

use std::cell::Cell;
use std::time::Duration;

use libc::{POLLIN, POLLRDNORM, c_int, nfds_t, pollfd, sigset_t, size_t, timespec};

use crate::base::real::{self, call};
use crate::base::{pollfds, quiesce, signals};
use crate::batching::readiness::ready_in_memory;
use crate::batching::{rx_coalesce, send_batch};
use crate::fds::hidden_fds;
use crate::fds::sock_fds::{self, is_managed};
use crate::fds::table::{self, Entry};
use crate::group::coverage;
use crate::lanes::{entries, fallback, single_receiver};
use crate::shared::sock::{Member, Shared, Sock};
use crate::shared::thread;
use crate::transfer::detached;
use crate::waiting::wait::{
    Deadline, WaitMode, cancel_wait, finish_wait, is_poll_overdue, start_unsliced, start_wait, timespec_of,
};
use crate::xdp::queues;

/// Events that report a datagram.
const READ_EVENTS: i16 = POLLIN | POLLRDNORM;

pub(crate) unsafe fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: program arguments.
    unsafe {
        let own = |timeout| call::poll(fds, count, timeout);
        if detached::has_leftovers() {
            return detached::poll(fds, count, |now| own(if now { 0 } else { timeout }));
        }
        let Some(slice) = managed_fds(fds, count) else {
            send_batch::flush();
            return own(timeout);
        };
        let native = |slice: &mut [pollfd]| call::poll(slice.as_mut_ptr(), count, timeout);
        if let Some(answer) = poll_alone(slice, native) {
            return answer;
        }
        let until = Deadline::from_ms(timeout);
        poll_sliced(slice, Caller::Poll, until, None, native)
            .unwrap_or_else(|| poll(fds, count, until.remaining_ms()))
    }
}

pub(crate) unsafe fn poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, room: size_t) -> c_int {
    // SAFETY: program arguments.
    unsafe {
        if room / size_of::<pollfd>() < count as usize {
            return call::__poll_chk(fds, count, timeout, room);
        }
        poll(fds, count, timeout)
    }
}

pub(crate) unsafe fn ppoll(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: program arguments.
    unsafe {
        let own = |timeout| call::ppoll(fds, count, timeout, mask);
        if detached::has_leftovers() {
            let time = |now| if now { &raw const real::NO_WAIT } else { timeout };
            return detached::poll(fds, count, |now| own(time(now)));
        }
        let Some(slice) = managed_fds(fds, count) else {
            send_batch::flush();
            return own(timeout);
        };
        let native = |slice: &mut [pollfd]| call::ppoll(slice.as_mut_ptr(), count, timeout, mask);
        if let Some(answer) = poll_alone(slice, native) {
            return answer;
        }
        // The kernel must refuse an invalid timeout.
        let Some(until) = Deadline::from_timespec(timeout.as_ref()) else { return own(timeout) };
        poll_sliced(slice, Caller::Poll, until, mask.as_ref(), native)
            .unwrap_or_else(|| until.with_timespec(|left| ppoll(fds, count, left, mask)))
    }
}

pub(crate) unsafe fn ppoll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
    room: size_t,
) -> c_int {
    // SAFETY: program arguments.
    unsafe {
        if room / size_of::<pollfd>() < count as usize {
            return call::__ppoll_chk(fds, count, timeout, mask, room);
        }
        ppoll(fds, count, timeout, mask)
    }
}

/// The program's array, if it has a socket that the library manages, or a hidden descriptor.
#[inline]
unsafe fn managed_fds<'a>(fds: *mut pollfd, count: nfds_t) -> Option<&'a mut [pollfd]> {
    // The kernel refuses more entries than the limit of open files, and does not read them. For a
    // short array the limit is not asked for, which costs a call: the poll fails a moment later.
    let is_long = count > pollfds::STACK_POLLFDS_MAX as nfds_t;
    if fds.is_null() || count == 0 || is_long && count > hidden_fds::fd_limit() {
        return None;
    }
    // SAFETY: program arguments.
    let fds = unsafe { std::slice::from_raw_parts_mut(fds, count as usize) };
    let mut any = false;
    for at in fds.iter() {
        match table::sock_or_entry(at.fd) {
            Ok(sock) => any |= at.events & READ_EVENTS != 0 && sock.shared().is_some_and(is_managed),
            Err(Entry::Hidden) => any |= is_hidden(at),
            Err(Entry::Epoll(_)) => fallback::mark_nested(at.fd),
            Err(_) => {}
        }
    }
    any.then_some(fds)
}

/// True if an entry names a descriptor that the program does not have: the wait reports that, and
/// ends at once.
fn is_hidden(at: &pollfd) -> bool {
    hidden_fds::kernel_fd(at.fd) != at.fd
}

/// The managed socket that an entry waits to receive from.
fn managed(at: &pollfd) -> Option<(&'static Sock, &'static Shared)> {
    if at.events & READ_EVENTS == 0 {
        return None;
    }
    sock_fds::managed(at.fd)
}

/// [`finish_wait`] for all managed sockets.
fn finish_waits(fds: &[pollfd]) {
    for at in fds {
        if let Some((sock, shared)) = managed(at) {
            finish_wait(sock, shared);
        }
    }
}

/// The program's call that waits.
#[derive(Clone, Copy)]
pub(crate) enum Caller {
    Poll,
    Select,
}

impl Caller {
    /// Number of the program's entries, if the limit of open files applies to them.
    fn limited(self, fds: &[pollfd]) -> Option<usize> {
        match self {
            Self::Poll => Some(fds.len()),
            Self::Select => None,
        }
    }
}

/// Waits with the program's own call, if the calling thread is the single receiver of all managed
/// sockets.
#[inline]
pub(crate) fn poll_alone(fds: &mut [pollfd], own: impl FnOnce(&mut [pollfd]) -> c_int) -> Option<c_int> {
    let is_alone = |at: &pollfd| {
        managed(at).is_none_or(|(sock, shared)| single_receiver::start_wait(sock, shared).is_some())
    };
    if fds.iter().any(is_hidden) {
        return None;
    }
    if !fds.iter().all(is_alone) {
        fds.iter().filter_map(managed).for_each(|(sock, shared)| cancel_wait(sock, shared));
        return None;
    }
    send_batch::flush();
    let answer = own(fds);
    finish_waits(fds);
    Some(answer)
}

/// poll(2) over descriptors with managed sockets among them; `native` is the program's own call.
/// None: the caller must wait for the remaining time (the sockets became plain in an earlier
/// round, or the library has detached).
pub(crate) fn poll_sliced(
    fds: &mut [pollfd],
    caller: Caller,
    until: Deadline,
    mask: Option<&sigset_t>,
    native: impl Fn(&mut [pollfd]) -> c_int,
) -> Option<c_int> {
    quiesce::wait_inside(|| {
        let deferred = signals::DeferredSignals::new();
        let mut native = |fds: &mut [pollfd]| {
            // The program's own wait, once.
            deferred.release();
            quiesce::run_outside(|| native(fds))
        };
        let answer = pollfds::with_pollfds(fds.len(), |all| {
            poll_loop(fds, all, caller, until, (&deferred, mask), &mut native)
        });
        deferred.release();
        answer.unwrap_or_else(|| Some(wait_unsliced(fds, caller, mask, native)))
    })
}

/// Too many entries, or no memory for them: waits for all as the program said.
#[cold]
fn wait_unsliced(
    fds: &mut [pollfd],
    caller: Caller,
    mask: Option<&sigset_t>,
    native: impl FnOnce(&mut [pollfd]) -> c_int,
) -> c_int {
    let begin = |at: &pollfd| managed(at).is_some_and(|(sock, shared)| start_unsliced(sock, shared, at.fd));
    // Count them, so that the filter runs for all entries.
    let older = fds.iter().filter(|at| begin(at)).count() > 0;
    queues::flush();
    send_batch::flush();
    let own = caller.limited(fds);
    let poll_now = |fds: &mut [pollfd]| {
        real::ppoll_cells(Cell::from_mut(fds).as_slice_of_cells(), own, real::NO_WAIT, mask)
    };
    let answer = if older { poll_now(fds) } else { native(fds) };
    if older && answer >= 0 {
        for at in fds.iter_mut() {
            if managed(at).is_some_and(|(sock, shared)| coverage::poll_other_lanes(sock, shared, at.fd, 0)) {
                at.revents |= at.events & READ_EVENTS;
            }
        }
    }
    finish_waits(fds);
    if answer < 0 { answer } else { fds.iter().filter(|at| at.revents != 0).count() as c_int }
}

fn poll_loop(
    fds: &mut [pollfd],
    all: &mut [pollfd],
    caller: Caller,
    until: Deadline,
    (deferred, mask): (&signals::DeferredSignals, Option<&sigset_t>),
    mut native: impl FnMut(&mut [pollfd]) -> c_int,
) -> Option<c_int> {
    // `all` has the program's entries, and after them the queues of the lanes. The kernel checks
    // the limit of open files when a call starts.
    let mut own = caller.limited(fds);
    let mut has_waited = false;
    // The last round polled the other lanes in vain: this one waits.
    let mut has_polled = false;
    loop {
        if quiesce::is_detaching() {
            return None;
        }
        let (mut any, mut frames, mut due) = (false, false, has_waited);
        let mut count = fds.len();
        for (nth, from) in fds.iter().enumerate() {
            all[nth] = pollfd { fd: hidden_fds::kernel_fd(from.fd), ..*from };
            any |= is_hidden(from);
            let Some((sock, shared)) = managed(from) else { continue };
            if let WaitMode::Sliced { lane, is_due } = start_wait(sock, shared, from.fd) {
                any = true;
                due |= is_due;
                // Datagrams of the lane that the kernel does not report.
                frames |= ready_in_memory(sock, shared, 1 << lane) != 0;
                all[nth].fd = sock.fd_of(lane, from.fd);
                count = queues::append_pollfds(sock, shared, 1 << lane, all, count);
            }
        }
        queues::flush();
        if !frames {
            send_batch::flush();
        }
        // A round polls the other lanes, and does not wait, before the result is 0, after each
        // slice, and first if they may hold older datagrams.
        let now = any && !has_polled && (due || until.slice().is_zero());
        let waits = !now && !frames;
        let mut answer = if any {
            let all = Cell::from_mut(&mut all[..count]).as_slice_of_cells();
            let wait = |time: Duration| {
                let wait = |mask: Option<&sigset_t>| real::ppoll_cells(all, own, timespec_of(time), mask);
                deferred.wait_or_look(mask, time, wait)
            };
            if waits {
                let entries = &all[..fds.len()];
                let coalesce = || rx_coalesce(fds, entries, own, until, (deferred, mask));
                let delayed = if has_waited { None } else { coalesce() };
                delayed.unwrap_or_else(|| wait(until.slice()))
            } else {
                wait(Duration::ZERO)
            }
        } else if has_waited {
            // The sockets became plain in an earlier round, which took some of the time.
            return None;
        } else {
            native(fds)
        };
        let copy = &mut all[..fds.len()];
        if any && answer >= 0 {
            answer = add_frames(fds, copy);
        }
        for at in fds.iter() {
            if let Some(sock) = table::sock(at.fd)
                && let Some(shared) = sock.shared()
            {
                finish_wait(sock, shared);
            }
        }
        if !any || answer < 0 {
            return Some(answer);
        }
        own = None;
        if now {
            answer = add_other_lanes(fds, copy, |_, _| true);
        } else if answer > 0 {
            add_due_lanes(fds, copy);
        }
        let late = until.remaining().is_some_and(|left| left.is_zero());
        if answer > 0 || now && late {
            return Some(copy_revents(fds, copy));
        }
        has_waited |= waits;
        has_polled = now;
        if waits {
            fds.iter().for_each(|at| _ = entries::sock(at.fd));
        }
    }
}

/// Delays before a wait, if that pays: see `rx_coalesce.rs`. An event on a descriptor that is not
/// one of our sockets ends the delay.
fn rx_coalesce(
    fds: &[pollfd],
    copy: &[Cell<pollfd>],
    own: Option<usize>,
    until: Deadline,
    (deferred, mask): (&signals::DeferredSignals, Option<&sigset_t>),
) -> Option<c_int> {
    let pays = |at: &pollfd| managed(at).is_some_and(|(_, shared)| rx_coalesce::can_coalesce(shared));
    let lane = fds.iter().zip(copy).find(|(at, _)| pays(at))?.1.get().fd;
    let poll_now = || {
        let answer = real::ppoll_cells(copy, own, real::NO_WAIT, deferred.wait_mask(mask));
        (answer != 0).then_some(answer)
    };
    let sleep = |time: timespec| {
        if fds.iter().all(|at| at.fd < 0 || pays(at)) {
            let answer = deferred.wait_slice(mask, |mask| real::ppoll_none(time, mask));
            return (answer < 0).then_some(answer);
        }
        // The kernel skips negative descriptors: negate those of sockets with lanes, and back.
        let negate_fd = |to: &Cell<pollfd>| to.set(pollfd { fd: !to.get().fd, ..to.get() });
        fds.iter().zip(copy).filter(|(from, _)| pays(from)).for_each(|(_, to)| negate_fd(to));
        let answer = deferred.wait_slice(mask, |mask| real::ppoll_cells(copy, own, time, mask));
        fds.iter()
            .zip(copy)
            .filter(|(from, to)| from.fd >= 0 && to.get().fd < 0)
            .for_each(|(_, to)| negate_fd(to));
        (answer < 0).then_some(answer)
    };
    rx_coalesce::before_sleep(lane, until.remaining(), poll_now, sleep)
}

/// Marks entries readable whose sockets have datagrams that the kernel does not report: in memory.
/// Returns the number of entries with events.
fn add_frames(fds: &[pollfd], copy: &mut [pollfd]) -> c_int {
    add_readable(fds, copy, |sock, shared, fd| {
        ready_in_memory(sock, shared, 1 << own_lane(sock, shared)) != 0
            || coverage::has_older(sock, shared, fd)
    })
}

/// The same, of sockets that have a datagram in a lane that is not watched, among those that are
/// `due`.
fn add_other_lanes(
    fds: &[pollfd],
    copy: &mut [pollfd],
    due: impl Fn(&'static Sock, &Shared) -> bool,
) -> c_int {
    add_readable(fds, copy, |sock, shared, fd| {
        due(sock, shared) && coverage::poll_other_lanes(sock, shared, fd, own_lane(sock, shared))
    })
}

/// A wait ends before its slice: the same, if a poll of other lanes is overdue.
fn add_due_lanes(fds: &[pollfd], copy: &mut [pollfd]) {
    let datagrams = fds
        .iter()
        .zip(copy.iter())
        .any(|(from, to)| to.revents & READ_EVENTS != 0 && managed(from).is_some());
    add_other_lanes(fds, copy, |sock, shared| {
        is_poll_overdue(shared, thread::member(sock, shared), datagrams)
    });
}

/// Marks entries without a datagram readable, if `has` one. The kernel's other results stay: an
/// error is of the program's own socket. Returns the number of entries with events.
fn add_readable(
    fds: &[pollfd],
    copy: &mut [pollfd],
    has: impl Fn(&'static Sock, &Shared, c_int) -> bool,
) -> c_int {
    for (from, to) in fds.iter().zip(copy.iter_mut()).filter(|(_, to)| to.revents & READ_EVENTS == 0) {
        if let Some((sock, shared)) = managed(from)
            && has(sock, shared, from.fd)
        {
            to.revents |= from.events & READ_EVENTS;
        }
    }
    copy.iter().filter(|at| at.revents != 0).count() as c_int
}

fn own_lane(sock: &'static Sock, shared: &Shared) -> usize {
    thread::member(sock, shared).and_then(Member::own_lane).unwrap_or(0)
}

/// Copies the kernel's results for the lanes to the program's entries.
fn copy_revents(fds: &mut [pollfd], copy: &[pollfd]) -> c_int {
    let mut count = 0;
    for (to, from) in fds.iter_mut().zip(copy) {
        to.revents = from.revents;
        count += c_int::from(from.revents != 0);
    }
    count
}
