//! Waiting on an instance: by the program's own call where nobody else receives on its sockets, and in slices where somebody does.

use std::ptr;
use std::sync::atomic::Ordering;
use std::time::Duration;

use libc::{c_int, epoll_event, pollfd, sigset_t, timespec};
use manylane_sys::lend::QUEUES;
use manylane_sys::shim::Reason;

use super::change::move_to;
use super::{Epoll, Item, KERNEL_FIRST, LOOK_FIRST, NESTED, nested};
use crate::calls::call;
use crate::leftovers::Leftovers;
use crate::look::in_memory;
use crate::sock::{LANED, Member, Shared, Sock};
use crate::wait::{self, Until, Watch, timespec_of};
use crate::{
    aftermath, alone, gather, hidden, hold, identity, inside, lanes, me, pace, queues, real, signals, table,
};

/// The member of the calling thread, if it is the one receiver of the one UDP socket in the instance. It may wait from now on.
#[inline(always)]
fn begin_alone(epfd: c_int) -> Option<&'static Member> {
    let place = alone::find_in(epfd)?;
    place.begin()
}

#[inline]
pub(crate) fn epoll_wait(epfd: c_int, events: *mut epoll_event, count: c_int, timeout: c_int) -> c_int {
    if let Some(member) = begin_alone(epfd) {
        let answer = call::epoll_wait(epfd, events, count, timeout);
        alone::end(member);
        return answer;
    }
    wait_for_many(epfd, events, count, timeout)
}

#[inline(never)]
fn wait_for_many(epfd: c_int, events: *mut epoll_event, count: c_int, timeout: c_int) -> c_int {
    if aftermath::are_there() {
        let time = |now| if now { 0 } else { timeout };
        return with_leftovers(epfd, events, count, |now| call::epoll_wait(epfd, events, count, time(now)));
    }
    match with_sockets(epfd, events, count) {
        Some(epoll) => {
            let until = Until::after_ms(timeout);
            sliced(epoll, epfd, events, count, until, ptr::null(), || {
                call::epoll_wait(epfd, events, count, timeout)
            })
            .unwrap_or_else(|| wait_for_many(epfd, events, count, until.ms()))
        }
        None => {
            gather::flush();
            call::epoll_wait(hidden::seen(epfd), events, count, timeout)
        }
    }
}

#[inline]
pub(crate) fn epoll_pwait(
    epfd: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    if let Some(member) = begin_alone(epfd) {
        let answer = call::epoll_pwait(epfd, events, count, timeout, mask);
        alone::end(member);
        return answer;
    }
    pwait_for_many(epfd, events, count, timeout, mask)
}

#[inline(never)]
fn pwait_for_many(
    epfd: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    if aftermath::are_there() {
        let time = |now| if now { 0 } else { timeout };
        let own = |now| call::epoll_pwait(epfd, events, count, time(now), mask);
        return with_leftovers(epfd, events, count, own);
    }
    match with_sockets(epfd, events, count) {
        Some(epoll) => {
            let until = Until::after_ms(timeout);
            sliced(epoll, epfd, events, count, until, mask, || {
                call::epoll_pwait(epfd, events, count, timeout, mask)
            })
            .unwrap_or_else(|| pwait_for_many(epfd, events, count, until.ms(), mask))
        }
        None => {
            gather::flush();
            call::epoll_pwait(hidden::seen(epfd), events, count, timeout, mask)
        }
    }
}

pub(crate) fn epoll_pwait2(
    epfd: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    if aftermath::are_there() {
        let time = |now| if now { &raw const aftermath::NOW } else { timeout };
        let own = |now| call::epoll_pwait2(epfd, events, count, time(now), mask);
        return with_leftovers(epfd, events, count, own);
    }
    // What is no time is for the kernel to refuse.
    let until = |epoll| Until::after(timeout).map(|until| (epoll, until));
    match with_sockets(epfd, events, count).and_then(until) {
        Some((epoll, until)) => sliced(epoll, epfd, events, count, until, mask, || {
            call::epoll_pwait2(epfd, events, count, timeout, mask)
        })
        .unwrap_or_else(|| until.with_time(|left| epoll_pwait2(epfd, events, count, left, mask))),
        None => {
            gather::flush();
            call::epoll_pwait2(hidden::seen(epfd), events, count, timeout, mask)
        }
    }
}

/// The largest array that the kernel takes.
const MAX_EVENTS: c_int = c_int::MAX / size_of::<epoll_event>() as c_int;

/// The instance behind `epfd`, if UDP sockets are in it that are not the kernel's alone.
#[inline]
fn with_sockets(epfd: c_int, events: *mut epoll_event, count: c_int) -> Option<&'static Epoll> {
    let epoll = table::epoll(epfd)?;
    if epoll.outer.load(Ordering::Relaxed) != 0 {
        nested::refresh_all();
    }
    // What is no array is for the kernel to refuse.
    if epoll.count.load(Ordering::Acquire) == 0 || !(1..=MAX_EVENTS).contains(&count) || events.is_null() {
        return None;
    }
    nested::take_out(epoll, epfd);
    if epoll.is_kernels() {
        // Others may come into it while this thread waits.
        claim(epoll);
        return None;
    }
    Some(epoll)
}

/// epoll_wait(2) on an instance with UDP sockets in it; `native` is the program's own call. None: what
/// is left of the wait is for that (the sockets are plain since an earlier turn, or the library stands
/// aside).
fn sliced(
    epoll: &'static Epoll,
    epfd: c_int,
    events: *mut epoll_event,
    count: c_int,
    until: Until,
    mask: *const sigset_t,
    native: impl Fn() -> c_int,
) -> Option<c_int> {
    // Alone with every socket: the program's own call.
    if epoll.items().all(|(_, sock)| alone::of(sock).and_then(alone::Place::begin).is_some()) {
        gather::flush();
        let answer = native();
        for (_, sock) in epoll.items() {
            if let Some(shared) = sock.shared() {
                wait::end(sock, shared);
            }
            if epoll.count.load(Ordering::Relaxed) == 1 && epoll.noted.load(Ordering::Relaxed) == 0 {
                epoll.note(epfd, sock);
            }
        }
        return Some(answer);
    }
    if !inside::enter() {
        return None;
    }
    claim(epoll);
    let held = signals::Held::not();
    let answer = in_turns(epoll, epfd, events, count, until, (&held, mask), || {
        // A wait of the program's own, once.
        held.let_go();
        inside::out(&native)
    });
    held.let_go();
    if epoll.nested.load(Ordering::Relaxed) == NESTED && !inside::is_due() {
        let told = Events { at: events, room: count, count: answer.unwrap_or(0).max(0) };
        leave_nested(epoll, epfd, told);
    }
    if answer.is_some() {
        inside::leave()
    } else {
        inside::step_aside()
    }
    answer
}

/// After a wait on an instance that is waited for as a descriptor, too: leftovers that remain are told of there.
#[cold]
fn leave_nested(epoll: &'static Epoll, epfd: c_int, mut told: Events) {
    for (item, _) in epoll.items().filter(|(item, _)| told.tell(item)) {
        item.told.store(1, Ordering::Relaxed);
    }
    nested::refresh(epoll, epfd);
}

fn in_turns(
    epoll: &'static Epoll,
    epfd: c_int,
    events: *mut epoll_event,
    count: c_int,
    until: Until,
    (held, mask): (&signals::Held, *const sigset_t),
    mut native: impl FnMut() -> c_int,
) -> Option<c_int> {
    // Something may be there that the kernel does not tell of again (EPOLLET): then the next round waits for a slice.
    let mut in_vain = false;
    let mut first = true;
    loop {
        if inside::is_due() {
            return None;
        }
        let any = begin(epoll, epfd);
        let left_out = if any && first { epoll.left_out.swap(0, Ordering::Relaxed) } else { 0 };
        let mut due = left_out == KERNEL_FIRST;
        due |= any
            && !in_vain
            && epoll.items().any(|(_, sock)| sock.shared().is_some_and(|at| wait::is_look_due(sock, at)));
        let may_have = |(item, sock): (&Item, &'static Sock)| {
            sock.shared().is_some_and(queues::are_open) || holds(item, sock)
        };
        let with_frames = any && epoll.items().any(may_have);
        let wait = |time: Duration| {
            let mask = held.mask(mask);
            if with_frames {
                return with_queues(epoll, epfd, events, count, time, mask);
            }
            gather::flush();
            kernels(epfd, (events, count), time, until, mask)
        };
        let slice = if due { Duration::ZERO } else { until.slice() };
        let look = || Some(wait(Duration::ZERO)).filter(|answer| *answer != 0);
        let first_wait = |time: Duration| {
            let found = if time.is_zero() { None } else { held.before_wait(look) };
            found.unwrap_or_else(|| wait(time))
        };
        let mut told = Events { at: events, room: count, count: 0 };
        let mut answer = match any {
            true if left_out == LOOK_FIRST && elsewhere(epoll, &mut told, |_, _| true) => {
                _ = epoll.left_out.compare_exchange(
                    LOOK_FIRST,
                    KERNEL_FIRST,
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                );
                told.count
            }
            true if first && !due => {
                pause(epoll, until, (held, mask), wait).unwrap_or_else(|| first_wait(until.slice()))
            }
            true if slice.is_zero() => wait(slice),
            true => first_wait(slice),
            false if first => {
                gather::flush();
                native()
            }
            // The sockets are plain since an earlier turn, which has taken its time.
            false => return None,
        };
        if any && answer > 0 {
            if told.count == 0 {
                told.count = answer;
                beside(epoll, &mut told);
            }
            answer = told.count;
        }
        first = false;
        let errno = real::errno();
        for (_, sock) in epoll.items() {
            if let Some(shared) = sock.shared() {
                wait::end(sock, shared);
            }
        }
        real::set_errno(errno);
        if !any || answer != 0 {
            return Some(answer);
        }
        if !slice.is_zero() {
            for (item, sock) in epoll.items() {
                identity::look(sock, item.fd.load(Ordering::Relaxed));
            }
        }
        // After a slice, and before the program is told that there is nothing.
        if elsewhere(epoll, &mut told, |_, _| true) || until.left() == Some(Duration::ZERO) {
            return Some(told.count);
        }
        in_vain = slice.is_zero();
    }
}

/// Waits on the instance itself, for a time that is as exact as the program's own.
fn kernels(
    epfd: c_int,
    (events, count): (*mut epoll_event, c_int),
    time: Duration,
    until: Until,
    mask: *const sigset_t,
) -> c_int {
    if until.is_exact() {
        return call::epoll_pwait2(epfd, events, count, &timespec_of(time), mask);
    }
    let ms = c_int::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(c_int::MAX);
    call::epoll_pwait(epfd, events, count, ms, mask)
}

/// Whether something was taken ahead of the lane that an entry watches.
fn holds(item: &Item, sock: &Sock) -> bool {
    hold::ready(sock, 1 << item.lane.load(Ordering::Relaxed)) != 0
}

/// Entries between two looks of the kernel's while queues always have something.
const KERNELS_TURN: u32 = 8;

/// As epoll_pwait(2), with the queues of the lanes that the calling thread watches, and what was taken ahead of them. The kernel watches the program's entries
/// as ever; queues are looked at here, and the instance is waited for with them. While they have something, the kernel is
/// asked for the rest now and then.
fn with_queues(
    epoll: &'static Epoll,
    epfd: c_int,
    events: *mut epoll_event,
    count: c_int,
    slice: Duration,
    mask: *const sigset_t,
) -> c_int {
    let mut fds = [pollfd { fd: -1, events: libc::POLLIN, revents: 0 }; 1 + QUEUES];
    fds[0].fd = epfd;
    let mut used = 1;
    let has_frames = |item: &Item, sock: &'static Sock| {
        let lane = item.lane.load(Ordering::Relaxed);
        sock.shared().is_some_and(|shared| in_memory(sock, shared, 1 << lane) != 0)
    };
    for (item, sock) in epoll.items().filter(|(item, _)| item.wanted() != 0) {
        let lane = item.lane.load(Ordering::Relaxed);
        if let Some(shared) = sock.shared() {
            used = queues::append(sock, shared, 1 << lane, &mut fds, used);
        }
    }
    let frames = || epoll.items().any(|(item, sock)| item.wanted() != 0 && has_frames(item, sock));
    let mut found = 0;
    let looks = epoll.looks.fetch_add(1, Ordering::Relaxed);
    let some = frames();
    if !some {
        queues::flush();
        gather::flush();
        let time = timespec { tv_sec: 0, tv_nsec: slice.as_nanos() as i64 };
        if call::ppoll(fds.as_mut_ptr(), used as libc::nfds_t, &raw const time, mask) < 0 {
            return -1;
        }
    }
    if fds[0].revents != 0 || some && looks.is_multiple_of(KERNELS_TURN) {
        queues::flush();
        found = call::epoll_pwait(epfd, events, count, 0, if some { mask } else { ptr::null() });
        if found < 0 {
            return found;
        }
    }
    let mut told = Events { at: events, room: count, count: found };
    for (item, sock) in epoll.items_in_turn(looks) {
        if item.wanted() != 0 && has_frames(item, sock) {
            told.add(item);
        }
    }
    told.count
}

/// The items that are to tell of what was taken into memory when the library stood aside.
fn items_with_leftovers(epoll: &'static Epoll) -> impl Iterator<Item = (&'static Item, &'static Sock)> {
    let has_some = |sock: &Sock| sock.leftovers().is_some_and(Leftovers::has_some);
    epoll.items().filter(move |(item, sock)| item.wanted() != 0 && has_some(sock))
}

/// True if `fd` is an instance with such items.
pub(crate) fn has_leftovers(fd: c_int) -> bool {
    table::epoll(fd).is_some_and(|epoll| items_with_leftovers(epoll).next().is_some())
}

/// Waits by the program's own call, which does not wait (`true`) if there are leftovers.
#[cold]
fn with_leftovers(epfd: c_int, events: *mut epoll_event, count: c_int, own: impl Fn(bool) -> c_int) -> c_int {
    let items = items_with_leftovers;
    let epoll = table::epoll(epfd).filter(|_| count > 0 && !events.is_null());
    let Some(epoll) = epoll.filter(|epoll| items(epoll).next().is_some()) else { return own(false) };
    let mut told = Events { at: events, room: count, count: own(true) };
    if told.count >= 0 {
        items(epoll).for_each(|(item, _)| told.add(item));
    }
    told.count
}

/// A pause before a wait, if one pays: see `pace.rs`. Other descriptors of the instance are not looked at meanwhile.
fn pause(
    epoll: &Epoll,
    until: Until,
    (held, mask): (&signals::Held, *const sigset_t),
    wait: impl Fn(Duration) -> c_int,
) -> Option<c_int> {
    let (item, sock) = epoll.items().find(|(_, sock)| sock.shared().is_some_and(pace::pays))?;
    let lane = sock.fd_of(item.lane.load(Ordering::Relaxed) as usize, item.fd.load(Ordering::Relaxed));
    let look = || Some(wait(Duration::ZERO)).filter(|answer| *answer != 0);
    let rest = |time: timespec| {
        held.hold_back();
        let answer = call::ppoll(ptr::null_mut(), 0, &raw const time, held.mask(mask));
        (answer < 0).then_some(answer)
    };
    pace::before_sleep(lane, until.left(), look, rest)
}

/// The calling thread is the one that waits on the instance; if another one was before, its sockets are plain.
fn claim(epoll: &'static Epoll) {
    let who = me::who();
    let before = epoll.waiter.load(Ordering::Relaxed);
    if before == who {
        return;
    }
    if before == 0 && epoll.waiter.compare_exchange(0, who, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
        return;
    }
    for (item, sock) in epoll.items() {
        lanes::fall_back(sock, item.fd.load(Ordering::Relaxed), Reason::SharedEpoll);
    }
}

/// Says to each socket that the calling thread waits for it, and moves entries to the thread's lanes. Whether the wait needs a
/// bound.
fn begin(epoll: &Epoll, epfd: c_int) -> bool {
    let mut any = false;
    for (item, sock) in epoll.items() {
        let Some(shared) = sock.shared() else { continue };
        if item.wanted() == 0 {
            // It does not wait for what comes to its lane, which others have to take. Its wait has a bound all the same.
            any |= shared.mode() == LANED;
            continue;
        }
        let fd = item.fd.load(Ordering::Relaxed);
        let lane = match wait::begin(sock, shared, fd) {
            Watch::Native => 0,
            Watch::Sliced(lane) => {
                any = true;
                lane
            }
        };
        if item.lane.load(Ordering::Relaxed) as usize != lane {
            move_to(epoll, item, sock, epfd, lane);
        }
    }
    any
}

/// The program's array of events, which has `room`, and those that are in it.
struct Events {
    at: *mut epoll_event,
    room: c_int,
    count: c_int,
}

impl Events {
    /// The event of an entry.
    fn of(&mut self, item: &Item) -> Option<&mut epoll_event> {
        let data = item.data.load(Ordering::Relaxed);
        // SAFETY: the program's array of `room` events, of which `count` are filled; an event may be at any address.
        let told = (0..self.count as usize).map(|nth| unsafe { &mut *self.at.wrapping_add(nth) });
        told.into_iter().find(|event| { event.u64 } == data)
    }

    /// Whether an entry is told of something to receive.
    fn tell(&mut self, item: &Item) -> bool {
        self.of(item).is_some_and(|event| event.events & item.wanted() != 0)
    }

    fn have_room(&mut self, item: &Item) -> bool {
        self.count < self.room || self.of(item).is_some()
    }

    /// Tells of an entry that there is something to receive, if there is room.
    fn add(&mut self, item: &Item) {
        let wanted = item.wanted();
        if let Some(event) = self.of(item) {
            event.events |= wanted;
        } else if self.count < self.room {
            let event = epoll_event { events: wanted, u64: item.data.load(Ordering::Relaxed) };
            // SAFETY: as above.
            unsafe { self.at.wrapping_add(self.count as usize).write(event) };
            self.count += 1;
        }
    }
}

/// Tells of sockets that have something in a lane that is not watched, of those that are `due`; whether there are any.
fn elsewhere(epoll: &Epoll, told: &mut Events, due: impl Fn(&'static Sock, &Shared) -> bool) -> bool {
    let mut any = false;
    for (item, sock) in epoll.items_in_turn(epoll.turns.fetch_add(1, Ordering::Relaxed)) {
        let Some(shared) = sock.shared() else { continue };
        if item.wanted() == 0 || told.tell(item) || !due(sock, shared) {
            continue;
        }
        if !told.have_room(item) {
            epoll.left_out.store(LOOK_FIRST, Ordering::Relaxed);
            break;
        }
        let fd = item.fd.load(Ordering::Relaxed);
        if wait::elsewhere(sock, shared, fd, item.lane.load(Ordering::Relaxed) as usize) {
            told.add(item);
            any = true;
        }
    }
    any
}

/// A wait ends before its slice: tells of other lanes, too, where a look at them is overdue, or had something the last time.
fn beside(epoll: &Epoll, told: &mut Events) {
    let mut items = epoll.items().filter(|(item, _)| item.wanted() != 0);
    let datagrams = items.any(|(item, _)| told.tell(item));
    elsewhere(epoll, told, |sock, shared| {
        wait::is_look_due(sock, shared) || wait::is_look_overdue(sock, shared, datagrams)
    });
}
