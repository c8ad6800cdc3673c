//! Waiting on an instance: by the program's own call if each of its sockets has one receiver, and
//! in slices otherwise.

use std::sync::atomic::Ordering;
use std::time::Duration;

use libc::{c_int, epoll_event, sigset_t, timespec};
use manylane_ipc::report::Reason;

use crate::base::real::{self, call};
use crate::base::{quiesce, signals};
use crate::batching::prefetch::{self, Prefetch};
use crate::batching::readiness::ready_in_memory;
use crate::batching::{rx_coalesce, send_batch};
use crate::fds::hidden_fds;
use crate::group::coverage;
use crate::lanes::epoll_set::{self, Epoll, Item, KERNEL_FIRST, LANES_FIRST, NESTED, move_to_lane};
use crate::lanes::{entries, fallback, single_receiver};
use crate::shared::sock::{MULTI_LANE, Shared, Sock};
use crate::shared::thread;
use crate::transfer::detached;
use crate::waiting::wait::{self, Deadline, WaitMode, timespec_of};
use crate::xdp::queues;

pub(crate) unsafe fn epoll_wait(
    epfd: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: c_int,
) -> c_int {
    // SAFETY: program arguments.
    unsafe { wait(epfd, events, count, timeout, None) }
}

pub(crate) unsafe fn epoll_pwait(
    epfd: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: program arguments.
    unsafe { wait(epfd, events, count, timeout, Some(mask)) }
}

/// epoll_pwait(2) with `mask`, or epoll_wait(2) without one.
unsafe fn wait(
    epfd: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: c_int,
    mask: Option<*const sigset_t>,
) -> c_int {
    // SAFETY: program arguments.
    unsafe {
        let own = |epfd, timeout| match mask {
            Some(mask) => call::epoll_pwait(epfd, events, count, timeout, mask),
            None => call::epoll_wait(epfd, events, count, timeout),
        };
        if detached::has_leftovers() {
            let out = Events::new(events, count);
            return wait_with_leftovers(epfd, out, |now| own(epfd, if now { 0 } else { timeout }));
        }
        if let Some(answer) = wait_alone(epfd, || own(epfd, timeout)) {
            return answer;
        }
        let Some((epoll, out)) = managed_epoll(epfd, Events::new(events, count)) else {
            send_batch::flush();
            return own(hidden_fds::kernel_fd(epfd), timeout);
        };
        let until = Deadline::from_ms(timeout);
        let blocked = mask.and_then(|mask| mask.as_ref());
        wait_sliced(epoll, epfd, out, until, blocked, || own(epfd, timeout))
            .unwrap_or_else(|| wait(epfd, events, count, until.remaining_ms(), mask))
    }
}

pub(crate) unsafe fn epoll_pwait2(
    epfd: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: program arguments.
    unsafe {
        let own = |epfd, timeout| call::epoll_pwait2(epfd, events, count, timeout, mask);
        if detached::has_leftovers() {
            let time = |now| if now { &raw const real::NO_WAIT } else { timeout };
            let out = Events::new(events, count);
            return wait_with_leftovers(epfd, out, |now| own(epfd, time(now)));
        }
        if let Some(answer) = wait_alone(epfd, || own(epfd, timeout)) {
            return answer;
        }
        let Some((epoll, out)) = managed_epoll(epfd, Events::new(events, count)) else {
            send_batch::flush();
            return own(hidden_fds::kernel_fd(epfd), timeout);
        };
        // The kernel must refuse an invalid timeout.
        let Some(until) = Deadline::from_timespec(timeout.as_ref()) else { return own(epfd, timeout) };
        wait_sliced(epoll, epfd, out, until, mask.as_ref(), || own(epfd, timeout))
            .unwrap_or_else(|| until.with_timespec(|left| epoll_pwait2(epfd, events, count, left, mask)))
    }
}

/// The largest array that the kernel accepts.
const EVENTS_MAX: c_int = c_int::MAX / size_of::<epoll_event>() as c_int;

/// The instance behind `epfd`, if it contains UDP sockets that are not the kernel's alone, and the
/// kernel would not refuse the array.
#[inline]
fn managed_epoll(epfd: c_int, events: Option<Events>) -> Option<(&'static Epoll, Events)> {
    let epoll = Epoll::of(epfd)?;
    if epoll.has_nested.load(Ordering::Relaxed) != 0 {
        epoll_set::refresh_all();
    }
    if epoll.count.load(Ordering::Acquire) == 0 {
        return None;
    }
    let events = events?;
    epoll_set::remove_placeholder(epoll, epfd);
    if epoll.is_plain() {
        // Other sockets may be added while this thread waits.
        claim(epoll);
        return None;
    }
    Some((epoll, events))
}

/// Waits with the program's own call, if the calling thread is the single receiver of all sockets
/// of the instance. None: the library has to wait.
#[inline]
fn wait_alone(epfd: c_int, own: impl FnOnce() -> c_int) -> Option<c_int> {
    let epoll = Epoll::of(epfd)?;
    if epoll.has_nested.load(Ordering::Relaxed) | epoll.placeholder.load(Ordering::Acquire) != 0 {
        return None;
    }
    let start = |(_, sock): (&Item, &'static Sock)| single_receiver::start_wait(sock, sock.shared()?);
    let mut items = epoll.items();
    let member = start(items.next()?)?;
    let mut has_more = false;
    for item in items {
        if start(item).is_none() {
            let started = epoll.items().filter_map(|(_, sock)| Some((sock, sock.shared()?)));
            started.for_each(|(sock, shared)| wait::cancel_wait(sock, shared));
            return None;
        }
        has_more = true;
    }
    send_batch::flush();
    let answer = own();
    member.finish_wait();
    if has_more {
        finish_waits(epoll);
    }
    Some(answer)
}

/// epoll_wait(2) on an instance with UDP sockets in it; `native` is the program's own call. None:
/// the caller must wait for the remaining time (the sockets became plain in an earlier round, or
/// the library has detached).
fn wait_sliced(
    epoll: &'static Epoll,
    epfd: c_int,
    events: Events,
    until: Deadline,
    mask: Option<&sigset_t>,
    native: impl Fn() -> c_int,
) -> Option<c_int> {
    quiesce::wait_inside(|| {
        claim(epoll);
        let deferred = signals::DeferredSignals::new();
        let answer = wait_loop(epoll, epfd, events, until, (&deferred, mask), || {
            // The program's own wait, once.
            deferred.release();
            quiesce::run_outside(&native)
        });
        deferred.release();
        if epoll.nested.load(Ordering::Relaxed) == NESTED && !quiesce::is_detaching() {
            finish_nested(epoll, epfd, Events { count: answer.unwrap_or(0).max(0), ..events });
        }
        answer
    })
}

/// Ends the wait of the calling thread for all sockets of the instance.
fn finish_waits(epoll: &'static Epoll) {
    for (_, sock) in epoll.items() {
        if let Some(shared) = sock.shared() {
            wait::finish_wait(sock, shared);
        }
    }
}

/// After a wait on an instance that is also waited for as a descriptor: reports remaining
/// leftovers there.
#[cold]
fn finish_nested(epoll: &'static Epoll, epfd: c_int, mut out: Events) {
    for (item, _) in epoll.items().filter(|(item, _)| out.is_reported(item)) {
        item.edge_reported.store(1, Ordering::Relaxed);
    }
    epoll_set::refresh(epoll, epfd);
}

fn wait_loop(
    epoll: &'static Epoll,
    epfd: c_int,
    events: Events,
    until: Deadline,
    (deferred, mask): (&signals::DeferredSignals, Option<&sigset_t>),
    mut native: impl FnMut() -> c_int,
) -> Option<c_int> {
    // A datagram may be there that the kernel does not report again (EPOLLET): then the next round
    // waits for a slice.
    let mut in_vain = false;
    let mut first = true;
    loop {
        if quiesce::is_detaching() {
            return None;
        }
        let started = start_wait(epoll, epfd);
        let any = started.is_sliced;
        let left_out = if any && first { epoll.truncated.swap(0, Ordering::Relaxed) } else { 0 };
        let due = left_out == KERNEL_FIRST || started.is_due && !in_vain;
        let wait = |time: Duration| {
            let wait = |mask: Option<&sigset_t>| {
                if started.may_have_frames {
                    return wait_with_frames(epoll, epfd, events, time, until, mask);
                }
                send_batch::flush();
                wait_kernel(epfd, &events, time, until, mask)
            };
            deferred.wait_or_look(mask, time, wait)
        };
        let slice = if due { Duration::ZERO } else { until.slice() };
        let mut out = events;
        let mut answer = match any {
            true if left_out == LANES_FIRST && add_other_lanes(epoll, &mut out, |_, _| true) => {
                _ = epoll.truncated.compare_exchange(
                    LANES_FIRST,
                    KERNEL_FIRST,
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                );
                out.count
            }
            true if first && !due => rx_coalesce(started.coalescing_fd, until, (deferred, mask), wait)
                .unwrap_or_else(|| wait(until.slice())),
            true => wait(slice),
            false if first => {
                send_batch::flush();
                native()
            }
            // The sockets became plain in an earlier round, which took some of the time.
            false => return None,
        };
        if any && answer > 0 {
            if out.count == 0 {
                out.count = answer;
                add_due_lanes(epoll, &mut out);
            }
            answer = out.count;
        }
        first = false;
        let errno = real::errno();
        finish_waits(epoll);
        real::set_errno(errno);
        if !any || answer != 0 {
            return Some(answer);
        }
        if !slice.is_zero() {
            for (item, sock) in epoll.items() {
                entries::revalidate(sock, item.fd.load(Ordering::Relaxed));
                // Another process may have removed the queues from an instance of both.
                if epoll.forked.load(Ordering::Relaxed) != 0 {
                    item.queues.store(0, Ordering::Relaxed);
                }
            }
        }
        // After a slice, and before the wait returns 0.
        if add_other_lanes(epoll, &mut out, |_, _| true) || until.remaining() == Some(Duration::ZERO) {
            return Some(out.count);
        }
        in_vain = slice.is_zero();
    }
}

/// Waits on the instance itself, with a timeout as exact as the program's own.
fn wait_kernel(
    epfd: c_int,
    events: &Events,
    time: Duration,
    until: Deadline,
    mask: Option<&sigset_t>,
) -> c_int {
    if until.is_exact() {
        return events.epoll_pwait2(epfd, timespec_of(time), mask);
    }
    let ms = c_int::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(c_int::MAX);
    events.epoll_pwait(epfd, ms, mask)
}

/// Waits after which the kernel is polled once while queues always have frames.
const KERNEL_POLL_INTERVAL: u32 = 8;

/// As [`wait_kernel`], with the frames and prefetched datagrams of the lanes that the calling
/// thread watches. The kernel watches the queues, too (`epoll_set/queues.rs`), but reports only
/// frames that come later. While there are frames, the kernel is polled only now and then.
fn wait_with_frames(
    epoll: &'static Epoll,
    epfd: c_int,
    events: Events,
    slice: Duration,
    until: Deadline,
    mask: Option<&sigset_t>,
) -> c_int {
    let has_frames = |(item, sock): (&Item, &'static Sock)| {
        let lane = item.lane.load(Ordering::Relaxed);
        let in_memory = |shared| ready_in_memory(sock, shared, 1 << lane) != 0;
        item.wanted() != 0 && sock.shared().is_some_and(in_memory)
    };
    let polls = epoll.polls.fetch_add(1, Ordering::Relaxed);
    let mut out = events;
    if !epoll.items().any(has_frames) {
        queues::flush();
        send_batch::flush();
        out.count = wait_kernel(epfd, &events, slice, until, mask);
    } else if polls.is_multiple_of(KERNEL_POLL_INTERVAL) {
        queues::flush();
        out.count = wait_kernel(epfd, &events, Duration::ZERO, until, mask);
    }
    if out.count < 0 {
        return out.count;
    }
    if out.count > 1 {
        epoll
            .items()
            .filter(|(item, _)| item.queues.load(Ordering::Relaxed) != 0)
            .for_each(|(item, _)| out.merge(item));
    }
    for (item, sock) in epoll.items_round_robin(polls) {
        if has_frames((item, sock)) {
            out.add(item);
        }
    }
    out.count
}

/// Waits with the program's own call, which must not block (`true`) if there are leftovers.
#[cold]
fn wait_with_leftovers(epfd: c_int, events: Option<Events>, own: impl Fn(bool) -> c_int) -> c_int {
    let items = epoll_set::items_with_leftovers;
    let epoll = Epoll::of(epfd).filter(|epoll| items(epoll).next().is_some());
    let Some((epoll, events)) = epoll.zip(events) else { return own(false) };
    let mut out = Events { count: own(true), ..events };
    if out.count >= 0 {
        items(epoll).for_each(|(item, _)| out.add(item));
    }
    out.count
}

/// Delays before a wait, if that pays: see `rx_coalesce.rs`. Other descriptors of the instance are
/// not polled meanwhile.
fn rx_coalesce(
    lane: Option<c_int>,
    until: Deadline,
    (deferred, mask): (&signals::DeferredSignals, Option<&sigset_t>),
    wait: impl Fn(Duration) -> c_int,
) -> Option<c_int> {
    let poll_now = || Some(wait(Duration::ZERO)).filter(|answer| *answer != 0);
    let sleep = |time: timespec| {
        let answer = deferred.wait_slice(mask, |mask| real::ppoll_none(time, mask));
        (answer < 0).then_some(answer)
    };
    rx_coalesce::before_sleep(lane?, until.remaining(), poll_now, sleep)
}

/// Records the calling thread as the one that waits on the instance. If another one did so before,
/// its sockets become plain.
fn claim(epoll: &'static Epoll) {
    let thread_id = thread::id();
    let before = epoll.waiter.load(Ordering::Relaxed);
    if before == thread_id {
        return;
    }
    if before == 0 && epoll.waiter.compare_exchange(0, thread_id, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    {
        return;
    }
    for (item, sock) in epoll.items() {
        fallback::fall_back(sock, item.fd.load(Ordering::Relaxed), Reason::SharedEpoll);
    }
}

/// Facts about the sockets of an instance as a wait starts.
#[derive(Default)]
struct StartedWait {
    /// The wait needs a bound.
    is_sliced: bool,
    /// Other lanes must be polled first.
    is_due: bool,
    /// A watched lane may have datagrams that the kernel does not report.
    may_have_frames: bool,
    /// A watched lane's descriptor, if a delay may pay.
    coalescing_fd: Option<c_int>,
}

/// Starts the calling thread's wait for each socket, and moves entries to the thread's lanes.
fn start_wait(epoll: &'static Epoll, epfd: c_int) -> StartedWait {
    let mut started = StartedWait::default();
    for (item, sock) in epoll.items() {
        let Some(shared) = sock.shared() else { continue };
        if item.wanted() == 0 {
            // It does not wait for its lane's datagrams, which other threads must receive. Its
            // wait has a bound all the same.
            started.is_sliced |= shared.mode() == MULTI_LANE;
            continue;
        }
        let fd = item.fd.load(Ordering::Relaxed);
        let mode = wait::start_wait(sock, shared, fd);
        let lane = if let WaitMode::Sliced { lane, .. } = mode { lane } else { 0 };
        if item.lane.load(Ordering::Relaxed) as usize != lane && !move_to_lane(epoll, item, sock, epfd, lane)
        {
            fallback::fall_back(sock, fd, Reason::SharedEpoll);
        }
        if !epoll_set::watch_queues(epoll, item, sock, epfd) {
            fallback::fall_back(sock, fd, Reason::Full);
        }
        let WaitMode::Sliced { is_due, .. } = mode else { continue };
        let lane = item.lane.load(Ordering::Relaxed) as usize;
        started.is_sliced = true;
        started.is_due |= is_due;
        started.may_have_frames |=
            queues::is_open(shared) || prefetch::for_lane(sock, lane).is_some_and(Prefetch::has_datagrams);
        if started.coalescing_fd.is_none() && rx_coalesce::can_coalesce(shared) {
            started.coalescing_fd = Some(sock.fd_of(lane, fd));
        }
    }
    started
}

/// The program's array of events: `capacity` events, of which `count` are filled.
#[derive(Clone, Copy)]
struct Events {
    ptr: *mut epoll_event,
    capacity: c_int,
    count: c_int,
}

impl Events {
    /// Program arguments, as long as the value is used. None if the kernel must refuse the array.
    unsafe fn new(ptr: *mut epoll_event, capacity: c_int) -> Option<Self> {
        let is_valid = (1..=EVENTS_MAX).contains(&capacity) && !ptr.is_null();
        is_valid.then_some(Self { ptr, capacity, count: 0 })
    }

    fn epoll_pwait(&self, epfd: c_int, ms: c_int, mask: Option<&sigset_t>) -> c_int {
        // SAFETY: program arguments; the mask lives through the call.
        unsafe { call::epoll_pwait(epfd, self.ptr, self.capacity, ms, real::or_null(mask)) }
    }

    fn epoll_pwait2(&self, epfd: c_int, time: timespec, mask: Option<&sigset_t>) -> c_int {
        // SAFETY: as above, and so does the time.
        unsafe { call::epoll_pwait2(epfd, self.ptr, self.capacity, &raw const time, real::or_null(mask)) }
    }

    /// The event of an entry.
    fn find(&mut self, item: &Item) -> Option<&mut epoll_event> {
        let data = item.data.load(Ordering::Relaxed);
        // SAFETY: program arguments; `count` of the events are filled, and an event may be at any
        // address.
        let out = (0..self.count as usize).map(|nth| unsafe { &mut *self.ptr.wrapping_add(nth) });
        out.into_iter().find(|event| { event.u64 } == data)
    }

    /// Makes one event of those for an entry's descriptor and queues.
    fn merge(&mut self, item: &Item) {
        let data = item.data.load(Ordering::Relaxed);
        // SAFETY: program arguments; an event may be at any address.
        let at = |nth: usize| unsafe { &mut *self.ptr.wrapping_add(nth) };
        let mut count = self.count as usize;
        let Some(first) = (0..count).find(|nth| { at(*nth).u64 } == data) else { return };
        for nth in (first + 1..count).rev() {
            if { at(nth).u64 } == data {
                at(first).events |= at(nth).events;
                count -= 1;
                *at(nth) = *at(count);
            }
        }
        self.count = count as c_int;
    }

    /// True if an entry is reported as readable.
    fn is_reported(&mut self, item: &Item) -> bool {
        self.find(item).is_some_and(|event| event.events & item.wanted() != 0)
    }

    fn has_room_for(&mut self, item: &Item) -> bool {
        self.count < self.capacity || self.find(item).is_some()
    }

    /// Reports an entry as readable, if there is room.
    fn add(&mut self, item: &Item) {
        let wanted = item.wanted();
        if let Some(event) = self.find(item) {
            event.events |= wanted;
        } else if self.count < self.capacity {
            let event = epoll_event { events: wanted, u64: item.data.load(Ordering::Relaxed) };
            // SAFETY: program arguments.
            unsafe { self.ptr.wrapping_add(self.count as usize).write(event) };
            self.count += 1;
        }
    }
}

/// Reports sockets that have a datagram in a lane that is not watched, among those that are `due`.
/// True if there are any.
fn add_other_lanes(epoll: &Epoll, out: &mut Events, due: impl Fn(&'static Sock, &Shared) -> bool) -> bool {
    let mut any = false;
    for (item, sock) in epoll.items_round_robin(epoll.round_robin.fetch_add(1, Ordering::Relaxed)) {
        let Some(shared) = sock.shared() else { continue };
        if item.wanted() == 0 || out.is_reported(item) || !due(sock, shared) {
            continue;
        }
        if !out.has_room_for(item) {
            epoll.truncated.store(LANES_FIRST, Ordering::Relaxed);
            break;
        }
        let fd = item.fd.load(Ordering::Relaxed);
        if coverage::poll_other_lanes(sock, shared, fd, item.lane.load(Ordering::Relaxed) as usize) {
            out.add(item);
            any = true;
        }
    }
    any
}

/// A wait ends before its slice: reports other lanes, too, if a poll of them is overdue or the
/// last one found a datagram.
fn add_due_lanes(epoll: &Epoll, out: &mut Events) {
    let (mut reported, mut others) = (false, false);
    for (item, _) in epoll.items().filter(|(item, _)| item.wanted() != 0) {
        let is_reported = out.is_reported(item);
        (reported, others) = (reported | is_reported, others | !is_reported);
    }
    if others {
        add_other_lanes(epoll, out, |sock, shared| {
            let member = thread::member(sock, shared);
            wait::is_poll_due(sock, shared, member) || wait::is_poll_overdue(shared, member, reported)
        });
    }
}
