//! Waiting by poll(2), and what all waits have in common.
//!
//! A wait for a socket with lanes is a wait for the caller's own lane, in slices; after each slice the lanes whose owners
//! do not wait are looked at. With one receiving thread it is the program's own call.

use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use libc::{POLLIN, POLLRDNORM, c_int, nfds_t, pollfd, sigset_t, size_t, timespec};
use manylane_sys::shim::Reason;

use crate::calls::{self, call};
use crate::look::{in_memory, ready};
use crate::open::{self, SLICE_MS};
use crate::reach::{now_ms, uncovered};
use crate::receive::is_managed;
use crate::sock::{
    BUSY, LANED, LEARN, MAX_LANES, Member, PLAIN, POLLS, SINGLE, Shared, Sock, UNBOUNDED, WAITS_ON,
};
use crate::table::{self, Entry};
use crate::{
    aftermath, alone, entries, epoll, gather, hidden, hold, identity, inside, lanes, me, mend, pace, queues,
    rest, signals,
};

/// Beats of which two look at the clock where no datagram is to pay for that.
const CLOCK_EVERY: u32 = 16;

/// What tells of something to receive.
const READ: i16 = POLLIN | POLLRDNORM;

/// How a thread waits for one socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watch {
    /// As the program said: nothing is to be done.
    Native,
    /// The lane to watch, in slices.
    Sliced(usize),
}

/// The calling thread is about to wait for `sock`.
#[inline]
pub(crate) fn begin(sock: &'static Sock, shared: &Shared, fd: c_int) -> Watch {
    // Its one receiver: no more is to be known.
    if alone::of(sock).and_then(alone::Place::begin).is_some() {
        return Watch::Native;
    }
    begin_to_watch(sock, shared, fd)
}

fn begin_to_watch(sock: &'static Sock, shared: &Shared, fd: c_int) -> Watch {
    if !is_managed(shared) {
        return Watch::Native;
    }
    let Some(member) = me::member(sock, shared, fd) else { return Watch::Native };
    rest::after_work(sock, shared, member);
    let kind = member.kind.load(Ordering::Relaxed);
    if kind & POLLS == 0 {
        member.kind.store(kind | POLLS, Ordering::Relaxed);
    }
    if shared.mode() == SINGLE && !queues::are_open(shared) {
        // SeqCst, as where lanes are made: a mode that has changed is seen here, or this state there.
        member.state.swap(UNBOUNDED, Ordering::SeqCst);
        if shared.mode.load(Ordering::SeqCst) == SINGLE {
            return Watch::Native;
        }
    }
    match shared.mode() {
        LANED => match usize::try_from(member.lane.load(Ordering::Acquire)) {
            Ok(lane) => {
                member.state.store(WAITS_ON + lane as u32, Ordering::Release);
                Watch::Sliced(lane)
            }
            Err(_) => {
                member.state.store(BUSY, Ordering::Release);
                Watch::Sliced(0)
            }
        },
        LEARN => {
            member.state.store(WAITS_ON, Ordering::Release);
            Watch::Sliced(0)
        }
        _ => {
            member.state.store(BUSY, Ordering::Release);
            if is_managed(shared) { Watch::Sliced(0) } else { Watch::Native }
        }
    }
}

/// The calling thread has waited for `sock`.
#[inline]
pub(crate) fn end(sock: &'static Sock, shared: &Shared) {
    if let Some(place) = alone::of(sock) {
        return alone::end(place.member());
    }
    if let Some(member) = me::known(sock, shared) {
        member.state.store(BUSY, Ordering::Release);
        lanes::beat(member);
    }
}

/// Whether something is there for the caller in another lane than the one it watches.
pub(crate) fn elsewhere(sock: &'static Sock, shared: &Shared, fd: c_int, watched: usize) -> bool {
    mend::look(sock, shared);
    gather::look(sock, shared, fd);
    rest::after_slice(sock, shared);
    let retired = shared.retired.load(Ordering::Acquire);
    let older = shared.first.load(Ordering::Acquire);
    if has_older(sock, shared, fd) {
        return true;
    }
    let mut mask = retired & !hold::HOLDS | older;
    if shared.mode() == LANED {
        mask |= uncovered(sock, shared, Some(watched));
    }
    let has = ready(sock, shared, fd, mask);
    // What is empty now need not be emptied first any more: the next wait must not look for it again.
    if older & !has != 0 {
        shared.first.fetch_and(!(older & !has), Ordering::AcqRel);
    }
    if shared.mode() == PLAIN {
        (1..MAX_LANES)
            .filter(|lane| retired & !has & 1 << lane != 0)
            .for_each(|lane| lanes::emptied(sock, shared, fd, lane));
    }
    let found = has & !(1 << watched) != 0;
    if let Some(member) = me::known(sock, shared) {
        member.helps.store(u32::from(found), Ordering::Relaxed);
        member.looked.store(now_ms(), Ordering::Relaxed);
    }
    found
}

/// Whether a wait that tells of something, but of nothing to receive from `sock`, is to look at the other lanes before it ends:
/// else a descriptor that is always ready would hide them for ever. Once in a slice; where datagrams of another socket are told
/// of, only some waits look at the clock.
pub(crate) fn is_look_overdue(sock: &'static Sock, shared: &Shared, datagrams: bool) -> bool {
    if shared.mode() != LANED {
        return false;
    }
    let Some(member) = me::known(sock, shared) else { return false };
    // A wait is one beat, and may come with a receive, which is another one.
    let skips = datagrams && member.beat.load(Ordering::Relaxed) % CLOCK_EVERY >= 2;
    !skips && now_ms().wrapping_sub(member.looked.load(Ordering::Relaxed)) >= SLICE_MS as u32
}

/// Whether the library itself has what is older than all that the kernel has, since the socket became plain.
fn has_older(sock: &'static Sock, shared: &Shared, fd: c_int) -> bool {
    queues::has_leftovers(sock, shared) || hold::has_leftovers(sock, shared, fd)
}

/// Whether a look at other lanes is due before a wait: they hold what is older, or had something the last time.
pub(crate) fn is_look_due(sock: &'static Sock, shared: &Shared) -> bool {
    shared.retired.load(Ordering::Acquire) | shared.first.load(Ordering::Acquire) != 0
        || queues::has_leftovers(sock, shared)
        || me::known(sock, shared).is_some_and(|member| member.helps.load(Ordering::Relaxed) != 0)
}

/// When a wait ends: a bound in time, or none.
#[derive(Clone, Copy)]
pub(crate) struct Until {
    end: Option<Instant>,
    /// It was not asked for in milliseconds.
    is_exact: bool,
}

impl Until {
    /// From milliseconds as poll(2) counts them.
    pub(crate) fn after_ms(ms: c_int) -> Self {
        let end = u64::try_from(ms).ok().map(|ms| Instant::now() + Duration::from_millis(ms));
        Self { end, is_exact: false }
    }

    /// From the time that ppoll(2) takes; null: no bound. None if it is one that the kernel refuses.
    pub(crate) fn after(time: *const timespec) -> Option<Self> {
        // SAFETY: null, or the program's timespec, which the kernel would read here, too.
        let end = match unsafe { time.as_ref() } {
            Some(time) => {
                let nanos = u32::try_from(time.tv_nsec).ok().filter(|nanos| *nanos < 1_000_000_000)?;
                let span = Duration::new(u64::try_from(time.tv_sec).ok()?, nanos);
                // A time beyond what the clock can count is for ever.
                Instant::now().checked_add(span)
            }
            None => None,
        };
        Some(Self { end, is_exact: true })
    }

    /// Whether milliseconds are too coarse for it.
    pub(crate) fn is_exact(&self) -> bool {
        self.is_exact
    }

    /// What is left, a slice at most; none left: zero.
    pub(crate) fn slice(&self) -> Duration {
        let slice = Duration::from_millis(SLICE_MS as u64);
        self.left().map_or(slice, |left| left.min(slice))
    }

    /// What is left, in milliseconds as poll(2) counts them, rounded up: a wait must not end early.
    pub(crate) fn ms(&self) -> c_int {
        let ms = |left: Duration| c_int::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(c_int::MAX);
        self.left().map_or(-1, ms)
    }

    /// What is left, as ppoll(2) takes it.
    pub(crate) fn with_time<T>(&self, wait: impl FnOnce(*const timespec) -> T) -> T {
        let left = self.left().map(timespec_of);
        wait(left.as_ref().map_or(std::ptr::null(), std::ptr::from_ref))
    }

    /// What is left; none without a bound.
    pub(crate) fn left(&self) -> Option<Duration> {
        self.end.map(|end| end.saturating_duration_since(Instant::now()))
    }
}

pub(crate) fn timespec_of(time: Duration) -> timespec {
    timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) }
}

/// Entries of which a wait is looked through at no cost to speak of.
const FEW: usize = 4;

/// One descriptor: the member of the calling thread, if it is the one receiver of the socket. It may wait from now on.
#[inline(always)]
fn begin_one(fds: *mut pollfd, count: nfds_t) -> Option<&'static Member> {
    if count != 1 || fds.is_null() {
        return None;
    }
    // SAFETY: the program's array of one, which the kernel would read here, too.
    let at = unsafe { &*fds };
    let place = alone::find(at.fd).filter(|_| at.events & READ != 0)?;
    place.begin()
}

/// The program's own call, if the calling thread is the one receiver of all UDP sockets that it waits for, and these are few.
fn straight(fds: *mut pollfd, count: nfds_t, native: impl Fn() -> c_int) -> Option<c_int> {
    if fds.is_null() || count == 0 || count as usize > FEW {
        return None;
    }
    let mut members = [None; FEW];
    for nth in 0..count as usize {
        // SAFETY: the program's array of `count`, which the kernel would read here, too.
        let at = unsafe { &*fds.wrapping_add(nth) };
        match alone::find(at.fd) {
            Some(place) if at.events & READ != 0 => members[nth] = place.begin(),
            _ if table::entry(at.fd) == Entry::None => continue,
            _ => {}
        }
        if members[nth].is_none() {
            // The long way, on which each says anew what it does.
            members.into_iter().flatten().for_each(alone::end);
            return None;
        }
    }
    gather::flush();
    let answer = native();
    members.into_iter().flatten().for_each(alone::end);
    Some(answer)
}

#[inline]
pub(crate) fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    if let Some(member) = begin_one(fds, count) {
        let answer = call::poll(fds, count, timeout);
        alone::end(member);
        return answer;
    }
    poll_many(fds, count, timeout)
}

#[inline(never)]
fn poll_many(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    if let Some(answer) = straight(fds, count, || call::poll(fds, count, timeout)) {
        return answer;
    }
    if aftermath::are_there() {
        return aftermath::poll(fds, count, |now| call::poll(fds, count, if now { 0 } else { timeout }));
    }
    match ours(fds, count) {
        Some(slice) => {
            let until = Until::after_ms(timeout);
            let native = |slice: &mut [pollfd]| call::poll(slice.as_mut_ptr(), count, timeout);
            sliced(slice, until, std::ptr::null(), native)
                .unwrap_or_else(|| poll_many(fds, count, until.ms()))
        }
        None => {
            gather::flush();
            call::poll(fds, count, timeout)
        }
    }
}

pub(crate) fn poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, room: size_t) -> c_int {
    if room / size_of::<pollfd>() < count as usize {
        return call::__poll_chk(fds, count, timeout, room);
    }
    poll(fds, count, timeout)
}

#[inline]
pub(crate) fn ppoll(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    if let Some(member) = begin_one(fds, count) {
        let answer = call::ppoll(fds, count, timeout, mask);
        alone::end(member);
        return answer;
    }
    ppoll_many(fds, count, timeout, mask)
}

#[inline(never)]
fn ppoll_many(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int {
    if let Some(answer) = straight(fds, count, || call::ppoll(fds, count, timeout, mask)) {
        return answer;
    }
    if aftermath::are_there() {
        let time = |now| if now { &raw const aftermath::NOW } else { timeout };
        return aftermath::poll(fds, count, |now| call::ppoll(fds, count, time(now), mask));
    }
    // What is no time is for the kernel to refuse.
    let until = |slice| Until::after(timeout).map(|until| (until, slice));
    match ours(fds, count).and_then(until) {
        Some((until, slice)) => {
            let native = |slice: &mut [pollfd]| call::ppoll(slice.as_mut_ptr(), count, timeout, mask);
            sliced(slice, until, mask, native)
                .unwrap_or_else(|| until.with_time(|left| ppoll_many(fds, count, left, mask)))
        }
        None => {
            gather::flush();
            call::ppoll(fds, count, timeout, mask)
        }
    }
}

pub(crate) fn ppoll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
    room: size_t,
) -> c_int {
    if room / size_of::<pollfd>() < count as usize {
        return call::__ppoll_chk(fds, count, timeout, mask, room);
    }
    ppoll(fds, count, timeout, mask)
}

/// The program's array, if a socket with or before lanes is in it.
fn ours<'a>(fds: *mut pollfd, count: nfds_t) -> Option<&'a mut [pollfd]> {
    // More than the process may have descriptors are refused, and not read.
    if fds.is_null() || count == 0 || count > entries::MOST as nfds_t && count > open::limit() {
        return None;
    }
    // SAFETY: the program's array of `count`, which the kernel would read and write here, too.
    let fds = unsafe { std::slice::from_raw_parts_mut(fds, count as usize) };
    fds.iter().for_each(|at| epoll::waited_for(at.fd));
    fds.iter().any(|at| managed(at).is_some() || is_hidden(at)).then_some(fds)
}

/// Whether an entry names a descriptor that the program does not have: it is told so, and the wait ends at once.
fn is_hidden(at: &pollfd) -> bool {
    hidden::seen(at.fd) != at.fd
}

/// The socket that an entry waits to receive from, if it is one to look after.
fn managed(at: &pollfd) -> Option<(&'static Sock, &'static Shared)> {
    if at.events & READ == 0 {
        return None;
    }
    let sock = table::sock(at.fd)?;
    let shared = sock.shared()?;
    is_managed(shared).then_some((sock, shared))
}

/// poll(2) over descriptors of which some are sockets to look after; `native` is the program's own
/// call. None: what is left of the wait is for that (the sockets are plain since an earlier turn, or
/// the library stands aside).
pub(crate) fn sliced(
    fds: &mut [pollfd],
    until: Until,
    mask: *const sigset_t,
    native: impl Fn(&mut [pollfd]) -> c_int,
) -> Option<c_int> {
    // Alone with every socket: the program's own call.
    let alone = |(sock, _): (&'static Sock, _)| alone::of(sock).and_then(alone::Place::begin).is_some();
    if !fds.iter().any(is_hidden) && fds.iter().filter_map(managed).all(alone) {
        gather::flush();
        let answer = inside::out(|| native(fds));
        fds.iter().filter_map(managed).for_each(|(sock, shared)| end(sock, shared));
        return Some(answer);
    }
    if !inside::enter() {
        return None;
    }
    let answer = in_slices(fds, until, mask, native);
    if answer.is_some() {
        inside::leave()
    } else {
        inside::step_aside()
    }
    answer
}

fn in_slices(
    fds: &mut [pollfd],
    until: Until,
    mask: *const sigset_t,
    native: impl Fn(&mut [pollfd]) -> c_int,
) -> Option<c_int> {
    let held = signals::Held::not();
    let mut native = |fds: &mut [pollfd]| {
        // A wait of the program's own, once.
        held.let_go();
        inside::out(|| native(fds))
    };
    let answer = entries::with_room(fds.len(), |all| in_turns(fds, all, until, (&held, mask), &mut native));
    held.let_go();
    answer.unwrap_or_else(|| Some(unsliced(fds, mask, native)))
}

/// More entries than can be looked through: waits for all as the program said.
#[cold]
fn unsliced(fds: &mut [pollfd], mask: *const sigset_t, native: impl FnOnce(&mut [pollfd]) -> c_int) -> c_int {
    let begin = |at: &pollfd| managed(at).is_some_and(|(sock, shared)| begin_unsliced(sock, shared, at.fd));
    // Of all, not up to the first one.
    let older = fds.iter().filter(|at| begin(at)).count() > 0;
    queues::flush();
    gather::flush();
    let answer = if older {
        let now = timespec_of(Duration::ZERO);
        call::ppoll(fds.as_mut_ptr(), fds.len() as nfds_t, &raw const now, mask)
    } else {
        native(fds)
    };
    if older && answer >= 0 {
        for at in fds.iter_mut() {
            if managed(at).is_some_and(|(sock, shared)| elsewhere(sock, shared, at.fd, 0)) {
                at.revents |= at.events & READ;
            }
        }
    }
    fds.iter().filter_map(managed).for_each(|(sock, shared)| end(sock, shared));
    if answer < 0 { answer } else { fds.iter().filter(|at| at.revents != 0).count() as c_int }
}

/// The calling thread is about to wait for `sock` and no lane of it: a socket with other receivers becomes plain. Whether its
/// lanes still hold something, for which there is no wait.
pub(crate) fn begin_unsliced(sock: &'static Sock, shared: &Shared, fd: c_int) -> bool {
    if begin(sock, shared, fd) == Watch::Native {
        return false;
    }
    lanes::fall_back(sock, fd, Reason::Events);
    elsewhere(sock, shared, fd, 0)
}

fn in_turns(
    fds: &mut [pollfd],
    all: &mut [pollfd],
    until: Until,
    (held, mask): (&signals::Held, *const sigset_t),
    mut native: impl FnMut(&mut [pollfd]) -> c_int,
) -> Option<c_int> {
    // Behind the program's entries in `all`, the queues of the lanes.
    let mut first = true;
    // What was found is gone: the next round waits for a slice.
    let mut in_vain = false;
    loop {
        if inside::is_due() {
            return None;
        }
        let mut any = false;
        let mut count = fds.len();
        for (nth, from) in fds.iter().enumerate() {
            all[nth] = pollfd { fd: hidden::seen(from.fd), ..*from };
            any |= is_hidden(from);
            let Some((sock, shared)) = managed(from) else { continue };
            if let Watch::Sliced(lane) = begin(sock, shared, from.fd) {
                any = true;
                all[nth].fd = sock.fd_of(lane, from.fd);
                count = queues::append(sock, shared, 1 << lane, all, count);
            }
        }
        queues::flush();
        let frames = any && has_frames(fds);
        if !frames {
            gather::flush();
        }
        let copy = &mut all[..fds.len()];
        let slice = until.slice();
        // Before a wait: only where the answer would be "nothing", or what is there is older than any lane's.
        let now = any && !in_vain && (slice.is_zero() || !first || has_leftovers(fds));
        let found = now && look(fds, copy);
        let mut answer = match (any, found || frames) {
            (false, _) if first => native(fds),
            // The socket is plain since an earlier turn, which has taken its time.
            (false, _) => return None,
            (true, true) => calls::ppoll_raw(copy, Some(timespec_of(Duration::ZERO)), held.mask(mask)),
            // The C library's own: a thread can be cancelled in it.
            (true, false) => {
                let paused = if first { pause(fds, copy, until, (held, mask)) } else { None };
                paused.unwrap_or_else(|| {
                    let all = all.as_mut_ptr();
                    let wait = |time| call::ppoll(all, count as nfds_t, &timespec_of(time), held.mask(mask));
                    let slice = until.slice();
                    let look = || Some(wait(Duration::ZERO)).filter(|answer| *answer != 0);
                    let found = if slice.is_zero() { None } else { held.before_wait(look) };
                    found.unwrap_or_else(|| wait(slice))
                })
            }
        };
        let copy = &mut all[..fds.len()];
        if any && answer >= 0 {
            answer = add_frames(fds, copy, found);
        }
        for at in fds.iter() {
            if let Some(sock) = table::sock(at.fd)
                && let Some(shared) = sock.shared()
            {
                end(sock, shared);
            }
        }
        if !any || answer < 0 {
            return Some(answer);
        }
        if answer > 0 {
            add_elsewhere(fds, copy);
        }
        first = false;
        let late = until.left().is_some_and(|left| left.is_zero());
        in_vain = found && answer == 0;
        if answer > 0 || (late && look(fds, copy)) {
            add_frames(fds, copy, late);
            return Some(hand_over(fds, copy));
        }
        if late {
            fds.iter_mut().for_each(|at| at.revents = 0);
            return Some(0);
        }
        if !slice.is_zero() {
            fds.iter().for_each(|at| _ = identity::sock(at.fd));
        }
    }
}

/// A pause before a wait, if one pays: see `pace.rs`. Descriptors that are none of our sockets end it.
fn pause(
    fds: &[pollfd],
    copy: &mut [pollfd],
    until: Until,
    (held, mask): (&signals::Held, *const sigset_t),
) -> Option<c_int> {
    let pays = |at: &pollfd| managed(at).is_some_and(|(_, shared)| pace::pays(shared));
    let lane = fds.iter().zip(copy.iter()).find(|(at, _)| pays(at))?.1.fd;
    let copy = Cell::from_mut(copy).as_slice_of_cells();
    let count = copy.len() as nfds_t;
    let at = copy.as_ptr().cast_mut().cast::<pollfd>();
    let look = || {
        let now = timespec_of(Duration::ZERO);
        let answer = call::ppoll(at, count, &raw const now, held.mask(mask));
        (answer != 0).then_some(answer)
    };
    let rest = |time: timespec| {
        held.hold_back();
        let mask = held.mask(mask);
        if fds.iter().all(|at| at.fd < 0 || pays(at)) {
            let answer = call::ppoll(std::ptr::null_mut(), 0, &raw const time, mask);
            return (answer < 0).then_some(answer);
        }
        // What is negative is passed over: sockets with lanes are turned, and turned back.
        let turn = |to: &Cell<pollfd>| to.set(pollfd { fd: !to.get().fd, ..to.get() });
        fds.iter().zip(copy).filter(|(from, _)| pays(from)).for_each(|(_, to)| turn(to));
        let answer = call::ppoll(at, count, &raw const time, mask);
        fds.iter()
            .zip(copy)
            .filter(|(from, to)| from.fd >= 0 && to.get().fd < 0)
            .for_each(|(_, to)| turn(to));
        (answer < 0).then_some(answer)
    };
    pace::before_sleep(lane, until.left(), look, rest)
}

fn has_leftovers(fds: &[pollfd]) -> bool {
    fds.iter().filter_map(managed).any(|(sock, shared)| is_look_due(sock, shared))
}

/// Whether some socket has something in a lane that is not watched; the copy then asks about that lane, and holds the
/// kernel's answer.
fn look(fds: &[pollfd], copy: &mut [pollfd]) -> bool {
    let mut any = false;
    for (from, to) in fds.iter().zip(copy.iter_mut()) {
        let Some((sock, shared)) = managed(from) else { continue };
        let watched = watched(sock, shared);
        if elsewhere(sock, shared, from.fd, watched) {
            any |= has_older(sock, shared, from.fd);
            // The wait is then for the lane that has it.
            if let Some(lane) = lane_with(sock, shared, from.fd, watched) {
                to.fd = sock.fd_of(lane, from.fd);
                any = true;
            }
        }
    }
    if any {
        let now = timespec_of(Duration::ZERO);
        any = calls::ppoll_raw(copy, Some(now), std::ptr::null()) > 0 || add_frames(fds, copy, true) > 0;
    }
    any
}

/// Whether a lane that is watched has something that the kernel does not know of.
fn has_frames(fds: &[pollfd]) -> bool {
    fds.iter()
        .filter_map(managed)
        .any(|(sock, shared)| in_memory(sock, shared, 1 << watched(sock, shared)) != 0)
}

/// Says of entries that they can be read because of queues or of what was taken ahead, which the kernel was not asked about: those of the lanes that
/// are watched, and if `wide`, of all that the caller would take from. How many entries have something to say then.
fn add_frames(fds: &[pollfd], copy: &mut [pollfd], wide: bool) -> c_int {
    for (from, to) in fds.iter().zip(copy.iter_mut()) {
        let Some((sock, shared)) = managed(from) else { continue };
        let own = watched(sock, shared);
        let mut mask = 1 << own;
        if wide && shared.mode() == LANED {
            mask |= uncovered(sock, shared, Some(own));
        }
        if in_memory(sock, shared, mask) != 0 || has_older(sock, shared, from.fd) {
            to.revents |= from.events & READ;
        }
    }
    copy.iter().filter(|at| at.revents != 0).count() as c_int
}

/// A wait ends before its slice: says of entries that tell of nothing to receive that they can be read because of other lanes, if
/// a look at these is overdue.
fn add_elsewhere(fds: &[pollfd], copy: &mut [pollfd]) {
    let datagrams =
        fds.iter().zip(copy.iter()).any(|(from, to)| to.revents & READ != 0 && managed(from).is_some());
    for (from, to) in fds.iter().zip(copy.iter_mut()).filter(|(_, to)| to.revents & READ == 0) {
        if let Some((sock, shared)) = managed(from)
            && is_look_overdue(sock, shared, datagrams)
            && elsewhere(sock, shared, from.fd, watched(sock, shared))
        {
            to.revents |= from.events & READ;
        }
    }
}

fn watched(sock: &'static Sock, shared: &Shared) -> usize {
    me::known(sock, shared)
        .map_or(0, |member| usize::try_from(member.lane.load(Ordering::Acquire)).unwrap_or(0))
}

fn lane_with(sock: &'static Sock, shared: &Shared, fd: c_int, watched: usize) -> Option<usize> {
    let own = ready(sock, shared, fd, 1 << watched);
    if own != 0 {
        return Some(watched);
    }
    let mut mask = shared.retired.load(Ordering::Acquire) & !hold::HOLDS;
    if shared.mode() == LANED {
        mask |= uncovered(sock, shared, Some(watched)) | shared.first.load(Ordering::Acquire);
    }
    let has = ready(sock, shared, fd, mask);
    (has != 0).then(|| has.trailing_zeros() as usize)
}

/// What the kernel said of the lanes is what the program is told of its own descriptors.
fn hand_over(fds: &mut [pollfd], copy: &[pollfd]) -> c_int {
    let mut count = 0;
    for (to, from) in fds.iter_mut().zip(copy) {
        to.revents = from.revents;
        count += c_int::from(from.revents != 0);
    }
    count
}
