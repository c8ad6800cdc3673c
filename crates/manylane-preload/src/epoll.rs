//! epoll: an instance that one thread waits on watches that thread's lane, with the program's own events and data.
//!
//! The program adds its descriptor, and the kernel watches it: lane 0. When the thread that waits has another lane, the
//! entry moves there, always from within that thread's own wait, which has a bound since there were two receivers; back
//! again when the socket falls back. What is in other lanes and not waited for is told after a slice, as poll does it.
//!
//! An instance that several threads or processes wait on stays with the program's own socket, which then is plain.

use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLLET, EPOLLIN, EPOLLONESHOT, EPOLLRDNORM};
use libc::{c_int, epoll_event, pollfd, sigset_t, timespec};
use manylane_sys::lend::QUEUES;
use manylane_sys::shim::Reason;

use crate::calls::call;
use crate::lock::{Guard, lock};
use crate::look::in_memory;
use crate::memory::{self, Atomics};
use crate::receive::is_managed;
use crate::sock::{LANED, Member, PLAIN, Shared, Sock};
use crate::table::{self, Entry};
use crate::wait::{self, Until, Watch};
use crate::{alone, descriptors, gather, hold, lanes, me, pace, queues, real, signals};

/// Epoll instances of a process that the library can know, and UDP sockets in each.
const MAX_EPOLLS: usize = 1024;
const MAX_ITEMS: usize = 32;

/// A UDP socket in an epoll instance.
#[repr(C)]
struct Item {
    /// Its index, and one; 0 if the item is free.
    sock: AtomicU32,
    generation: AtomicU32,
    /// The descriptor that the program added.
    fd: AtomicI32,
    /// The lane that the kernel watches.
    lane: AtomicU32,
    events: AtomicU32,
    data: AtomicU64,
}

/// An epoll instance.
#[repr(C)]
pub(crate) struct Epoll {
    used: AtomicU32,
    refs: AtomicU32,
    lock: AtomicU64,
    /// Items that there are.
    count: AtomicU32,
    /// Items behind these were never used.
    top: AtomicU32,
    /// The descriptor by which its one receiver goes straight through, and one: `alone.rs`.
    noted: AtomicI32,
    /// It is in another one.
    nested: AtomicU32,
    /// Waits with queues, to give the kernel its turn.
    looks: AtomicU32,
    /// The thread that waits on it.
    waiter: AtomicU64,
    items: [Item; MAX_ITEMS],
}

// SAFETY: atomics; zeroes are a slot that is not in use.
unsafe impl Atomics for Epoll {}

static EPOLLS: AtomicPtr<Epoll> = AtomicPtr::new(ptr::null_mut());

impl Epoll {
    /// Maps the slots; once, at start.
    pub(crate) fn start() -> bool {
        let Some(epolls) = memory::map::<Epoll>(MAX_EPOLLS, false) else { return false };
        EPOLLS.store(epolls.as_ptr().cast_mut(), Ordering::Release);
        true
    }

    fn all() -> &'static [Epoll] {
        let at = EPOLLS.load(Ordering::Acquire);
        // SAFETY: the array that start() mapped, never unmapped; calls come in only after it (start::is_ready).
        unsafe { std::slice::from_raw_parts(at, MAX_EPOLLS) }
    }

    /// The slot `index`, which came from the table.
    #[inline]
    pub(crate) fn at(index: u32) -> &'static Epoll {
        &Self::all()[index as usize % MAX_EPOLLS]
    }

    fn take() -> Option<u32> {
        let at = Self::all()
            .iter()
            .position(|at| at.used.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok())?;
        let epoll = &Self::all()[at];
        epoll.refs.store(1, Ordering::Relaxed);
        epoll.lock.store(0, Ordering::Relaxed);
        epoll.count.store(0, Ordering::Relaxed);
        epoll.top.store(0, Ordering::Relaxed);
        epoll.noted.store(0, Ordering::Relaxed);
        epoll.nested.store(0, Ordering::Relaxed);
        epoll.waiter.store(0, Ordering::Relaxed);
        epoll.items.iter().for_each(|item| item.sock.store(0, Ordering::Relaxed));
        Some(at as u32)
    }

    /// In the child of a fork: what threads of the parent had locked is a copy, and nobody will open it.
    pub(crate) fn in_child() {
        let used = Self::all().iter().filter(|at| at.used.load(Ordering::Relaxed) == 1);
        used.for_each(|at| at.lock.store(0, Ordering::Relaxed));
    }

    fn index(&self) -> u32 {
        ((ptr::from_ref(self) as usize - Self::all().as_ptr() as usize) / size_of::<Self>()) as u32
    }

    /// While this is held, nobody moves entries of the instance, by whichever descriptor.
    pub(crate) fn hold_still(&self) -> Option<Guard<'_>> {
        if self.count.load(Ordering::Acquire) == 0 { None } else { lock(&self.lock, true) }
    }

    /// A descriptor of it.
    fn any_fd(&self) -> Option<c_int> {
        let entry = Entry::Epoll(self.index());
        table::known(0, u32::MAX).find(|(_, at)| *at == entry).map(|(fd, _)| fd)
    }

    /// One descriptor more.
    pub(crate) fn hold(&self) {
        self.refs.fetch_add(1, Ordering::AcqRel);
    }

    /// One descriptor less.
    pub(crate) fn release(&self) {
        if self.refs.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.used.store(0, Ordering::Release);
        }
    }

    fn items(&self) -> impl Iterator<Item = (&Item, &'static Sock)> {
        let top = self.top.load(Ordering::Acquire) as usize;
        self.items[..top.min(MAX_ITEMS)].iter().filter_map(|item| {
            let index = item.sock.load(Ordering::Acquire).checked_sub(1)?;
            let sock = Sock::at(index);
            (sock.generation.load(Ordering::Relaxed) == item.generation.load(Ordering::Relaxed))
                .then_some((item, sock))
        })
    }

    /// Whether all sockets in it are plain for good (a server that shares its port by itself), and watched as the program said.
    fn is_kernels(&self) -> bool {
        let is_kernels = |shared: &Shared| shared.mode() == PLAIN && !is_managed(shared);
        self.items().all(|(item, sock)| {
            item.lane.load(Ordering::Relaxed) == 0 && sock.shared().is_some_and(is_kernels)
        })
    }

    fn item(&self, sock: &Sock, fd: c_int) -> Option<&Item> {
        let of = ptr::from_ref(sock);
        self.items()
            .find(|(item, at)| ptr::eq(*at, of) && item.fd.load(Ordering::Relaxed) == fd)
            .map(|(item, _)| item)
    }

    fn forget(&self, item: &Item, _guard: &Guard<'_>) {
        if item.sock.swap(0, Ordering::AcqRel) != 0 {
            self.count.fetch_sub(1, Ordering::AcqRel);
        }
        self.changes();
    }

    /// Notes that the calling thread's only socket in it is `sock`, which it is alone with.
    #[cold]
    fn note(&self, epfd: c_int, sock: &Sock) {
        if self.noted.compare_exchange(0, epfd + 1, Ordering::SeqCst, Ordering::Relaxed).is_ok()
            && alone::note_instance(epfd, sock)
        {
            // Either whoever changes it sees the note, or we see the change.
            fence(Ordering::SeqCst);
            let is_it = self.items().all(|(_, at)| ptr::eq(at, sock))
                && self.count.load(Ordering::SeqCst) == 1
                && table::entry(epfd) == Entry::Epoll(self.index());
            if !is_it {
                self.changes();
            }
        }
    }

    /// What is in it changes, or has changed.
    fn changes(&self) {
        fence(Ordering::SeqCst);
        let noted = self.noted.swap(0, Ordering::SeqCst);
        alone::forget_instance(noted - 1);
    }
}

/// Whether some instance of this process tells of edges of a socket.
pub(crate) fn has_edges(sock: &Sock) -> bool {
    let used = Epoll::all().iter().filter(|epoll| epoll.used.load(Ordering::Acquire) == 1);
    used.flat_map(Epoll::items)
        .any(|(item, at)| ptr::eq(at, sock) && item.events.load(Ordering::Relaxed) & EPOLLET as u32 != 0)
}

/// A socket closes. Its lanes do, too, unless another process has them: then this one's instances let go of them.
pub(crate) fn forget_sock(sock: &Sock) {
    let of = ptr::from_ref(sock);
    for epoll in Epoll::all().iter().filter(|epoll| epoll.used.load(Ordering::Acquire) == 1) {
        if epoll.count.load(Ordering::Acquire) == 0 || !epoll.items().any(|(_, at)| ptr::eq(at, of)) {
            continue;
        }
        let Some(guard) = lock(&epoll.lock, true) else { continue };
        let epfd = epoll.any_fd();
        for (item, at) in epoll.items() {
            if !ptr::eq(at, of) {
                continue;
            }
            let lane = item.lane.load(Ordering::Relaxed) as usize;
            if let (Some(epfd), true) = (epfd, lane > 0) {
                call::epoll_ctl(epfd, EPOLL_CTL_DEL, sock.fd_of(lane, -1), ptr::null_mut());
            }
            epoll.forget(item, &guard);
        }
    }
}

pub(crate) fn epoll_create(size: c_int) -> c_int {
    created(call::epoll_create(size))
}

pub(crate) fn epoll_create1(flags: c_int) -> c_int {
    created(call::epoll_create1(flags))
}

fn created(fd: c_int) -> c_int {
    if fd >= 0 && me::is_ours() {
        descriptors::remember(fd, Epoll::take().map_or(Entry::None, Entry::Epoll));
    }
    fd
}

pub(crate) fn epoll_ctl(epfd: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
    let entry = table::entry(fd);
    if entry == Entry::None {
        return call::epoll_ctl(epfd, op, fd, event);
    }
    if let (Entry::Epoll(inner), EPOLL_CTL_ADD) = (entry, op) {
        nested(Epoll::at(inner));
    }
    let (Entry::Sock(index), true) = (entry, me::is_ours()) else {
        return call::epoll_ctl(epfd, op, fd, event);
    };
    let sock = Sock::at(index);
    let Some(epoll) = table::epoll(epfd) else {
        // An instance from before our time: who waits on it is not known.
        if op == EPOLL_CTL_ADD {
            lanes::fall_back(sock, fd, Reason::SharedEpoll);
        }
        return call::epoll_ctl(epfd, op, fd, event);
    };
    // SAFETY: null, or the program's event, which the kernel would read here, too.
    let wanted = unsafe { event.as_ref() }.map(|event| (event.events, event.u64));
    if let (Some((events, _)), EPOLL_CTL_ADD | EPOLL_CTL_MOD) = (wanted, op) {
        // Whether it has fired already is the kernel's secret: such an entry cannot move from lane to lane.
        if events & EPOLLONESHOT as u32 != 0 {
            lanes::fall_back(sock, fd, Reason::Events);
        } else if events & EPOLLET as u32 != 0
            && let Some(shared) = sock.shared()
        {
            // An edge is told while the kernel's queue has something: nothing may be taken ahead of it.
            hold::one_by_one(shared, fd, Reason::OneEdges);
        }
        if epoll.nested.load(Ordering::Acquire) != 0 {
            lanes::fall_back(sock, fd, Reason::NestedEpoll);
        }
    }
    sock.watched.store(1, Ordering::Release);
    let Some(guard) = lock(&epoll.lock, true) else { return call::epoll_ctl(epfd, op, fd, event) };
    match (op, epoll.item(sock, fd)) {
        (EPOLL_CTL_ADD, None) => {
            let done = call::epoll_ctl(epfd, op, fd, event);
            if let (0, Some(wanted)) = (done, wanted)
                && !add(epoll, sock, fd, wanted)
            {
                drop(guard);
                lanes::fall_back(sock, fd, Reason::Full);
            }
            done
        }
        (EPOLL_CTL_MOD | EPOLL_CTL_DEL, Some(item)) => {
            let watched = sock.fd_of(item.lane.load(Ordering::Relaxed) as usize, fd);
            let done = call::epoll_ctl(epfd, op, watched, event);
            match (done, wanted) {
                (0, _) if op == EPOLL_CTL_DEL => epoll.forget(item, &guard),
                (0, Some((events, data))) => {
                    item.events.store(events, Ordering::Relaxed);
                    item.data.store(data, Ordering::Relaxed);
                }
                _ => {}
            }
            done
        }
        // It is in already, on whichever lane.
        (EPOLL_CTL_ADD, Some(item)) if item.lane.load(Ordering::Relaxed) != 0 => {
            real::set_errno(libc::EEXIST);
            -1
        }
        _ => call::epoll_ctl(epfd, op, fd, event),
    }
}

/// An instance is waited for as a descriptor, with others, in a wait without a bound: it has to watch the programs' own sockets.
#[cold]
pub(crate) fn nested(epoll: &'static Epoll) {
    epoll.nested.store(1, Ordering::Release);
    for (item, sock) in epoll.items() {
        lanes::fall_back(sock, item.fd.load(Ordering::Relaxed), Reason::NestedEpoll);
    }
}

/// Whether a wait for the instance behind `fd` as a descriptor would change anything.
#[inline]
pub(crate) fn is_nested_now(fd: c_int) -> Option<&'static Epoll> {
    let epoll = table::epoll(fd)?;
    (epoll.nested.load(Ordering::Acquire) == 0).then_some(epoll)
}

/// A socket has become plain: what watches its lanes here watches the socket itself from now on, also while its thread
/// sleeps. (Other processes' threads move their entries when they return from a slice.)
pub(crate) fn fallen(sock: &Sock) {
    for epoll in Epoll::all().iter().filter(|epoll| epoll.used.load(Ordering::Acquire) == 1) {
        let moved = |item: &Item| item.lane.load(Ordering::Relaxed) != 0;
        if !epoll.items().any(|(item, at)| ptr::eq(at, sock) && moved(item)) {
            continue;
        }
        let Some(epfd) = epoll.any_fd() else { continue };
        for (item, at) in epoll.items().filter(|(_, at)| ptr::eq(*at, sock)) {
            move_to(epoll, item, at, epfd, 0);
        }
    }
}

fn add(epoll: &Epoll, sock: &Sock, fd: c_int, (events, data): (u32, u64)) -> bool {
    let free = |item: &Item| {
        let sock = item.sock.load(Ordering::Relaxed);
        sock == 0
            || Sock::at(sock - 1).generation.load(Ordering::Relaxed)
                != item.generation.load(Ordering::Relaxed)
    };
    let Some(at) = epoll.items.iter().position(free) else { return false };
    let item = &epoll.items[at];
    if item.sock.load(Ordering::Relaxed) == 0 {
        epoll.count.fetch_add(1, Ordering::AcqRel);
    }
    item.generation.store(sock.generation.load(Ordering::Relaxed), Ordering::Relaxed);
    item.fd.store(fd, Ordering::Relaxed);
    item.lane.store(0, Ordering::Relaxed);
    item.events.store(events, Ordering::Relaxed);
    item.data.store(data, Ordering::Relaxed);
    item.sock.store(sock.index() + 1, Ordering::Release);
    epoll.top.fetch_max(at as u32 + 1, Ordering::AcqRel);
    epoll.changes();
    true
}

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
    match with_sockets(epfd, count) {
        Some(epoll) => sliced(epoll, epfd, events, count, Until::after_ms(timeout), ptr::null(), || {
            call::epoll_wait(epfd, events, count, timeout)
        }),
        None => {
            gather::flush();
            call::epoll_wait(epfd, events, count, timeout)
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
    match with_sockets(epfd, count) {
        Some(epoll) => sliced(epoll, epfd, events, count, Until::after_ms(timeout), mask, || {
            call::epoll_pwait(epfd, events, count, timeout, mask)
        }),
        None => {
            gather::flush();
            call::epoll_pwait(epfd, events, count, timeout, mask)
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
    match with_sockets(epfd, count) {
        Some(epoll) => sliced(epoll, epfd, events, count, Until::after(timeout), mask, || {
            call::epoll_pwait2(epfd, events, count, timeout, mask)
        }),
        None => {
            gather::flush();
            call::epoll_pwait2(epfd, events, count, timeout, mask)
        }
    }
}

/// The instance behind `epfd`, if UDP sockets are in it that are not the kernel's alone.
#[inline]
fn with_sockets(epfd: c_int, count: c_int) -> Option<&'static Epoll> {
    let epoll = table::epoll(epfd)?;
    if epoll.count.load(Ordering::Acquire) == 0 || count <= 0 {
        return None;
    }
    if epoll.is_kernels() {
        // Others may come into it while this thread waits.
        claim(epoll);
        return None;
    }
    Some(epoll)
}

/// epoll_wait(2) on an instance with UDP sockets in it; `native` is the program's own call.
fn sliced(
    epoll: &'static Epoll,
    epfd: c_int,
    events: *mut epoll_event,
    count: c_int,
    until: Until,
    mask: *const sigset_t,
    native: impl Fn() -> c_int,
) -> c_int {
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
        return answer;
    }
    claim(epoll);
    let held = signals::Held::not();
    let answer = in_turns(epoll, epfd, events, count, until, (&held, mask), || {
        // A wait of the program's own, once.
        held.let_go();
        native()
    });
    held.let_go();
    answer
}

fn in_turns(
    epoll: &'static Epoll,
    epfd: c_int,
    events: *mut epoll_event,
    count: c_int,
    until: Until,
    (held, mask): (&signals::Held, *const sigset_t),
    mut native: impl FnMut() -> c_int,
) -> c_int {
    // Something may be there that the kernel does not tell of again (EPOLLET): then the next round waits for a slice.
    let mut in_vain = false;
    let mut first = true;
    loop {
        let any = begin(epoll, epfd);
        let due = any
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
            let ms = c_int::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(c_int::MAX);
            call::epoll_pwait(epfd, events, count, ms, mask)
        };
        let slice = if due { Duration::ZERO } else { until.slice() };
        let look = || Some(wait(Duration::ZERO)).filter(|answer| *answer != 0);
        let first_wait = |time: Duration| {
            let found = if time.is_zero() { None } else { held.before_wait(look) };
            found.unwrap_or_else(|| wait(time))
        };
        let answer = match any {
            true if first && !due => {
                pause(epoll, until, (held, mask), wait).unwrap_or_else(|| first_wait(until.slice()))
            }
            true if slice.is_zero() => wait(slice),
            true => first_wait(slice),
            false => {
                gather::flush();
                native()
            }
        };
        first = false;
        let errno = real::errno();
        for (_, sock) in epoll.items() {
            if let Some(shared) = sock.shared() {
                wait::end(sock, shared);
            }
        }
        real::set_errno(errno);
        if !any || answer != 0 {
            return answer;
        }
        // After a slice, and before the program is told that there is nothing.
        let found = elsewhere(epoll, events, count);
        if found > 0 || until.left() == Some(Duration::ZERO) {
            return found;
        }
        in_vain = slice.is_zero();
    }
}

/// The events of an entry that tell of something to receive, if it is to be told of that.
fn is_wanted(item: &Item) -> u32 {
    item.events.load(Ordering::Relaxed) & (EPOLLIN | EPOLLRDNORM) as u32
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
    for (item, sock) in epoll.items().filter(|(item, _)| is_wanted(item) != 0) {
        let lane = item.lane.load(Ordering::Relaxed);
        if let Some(shared) = sock.shared() {
            used = queues::append(sock, shared, 1 << lane, &mut fds, used);
        }
    }
    let frames = || epoll.items().any(|(item, sock)| is_wanted(item) != 0 && has_frames(item, sock));
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
    for (item, sock) in epoll.items() {
        let wanted = is_wanted(item);
        if wanted == 0 || !has_frames(item, sock) {
            continue;
        }
        let data = item.data.load(Ordering::Relaxed);
        // SAFETY: the program's array of `count` events, of which `found` are filled; an event may be at any address.
        let told = (0..found as usize).map(|nth| unsafe { &mut *events.wrapping_add(nth) });
        if let Some(event) = told.into_iter().find(|event| { event.u64 } == data) {
            event.events |= wanted;
        } else if found < count {
            // SAFETY: as above.
            unsafe { events.wrapping_add(found as usize).write(epoll_event { events: wanted, u64: data }) };
            found += 1;
        }
    }
    found
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
        if is_wanted(item) == 0 {
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

/// Watches another lane: level and edge both tell what is there already, so that nothing is missed.
fn move_to(epoll: &Epoll, item: &Item, sock: &Sock, epfd: c_int, lane: usize) {
    let Some(_guard) = lock(&epoll.lock, true) else { return };
    let before = item.lane.load(Ordering::Relaxed) as usize;
    // Another thread that waits on the instance may have been here, or have taken the entry out.
    if before == lane || item.sock.load(Ordering::Acquire) != sock.index() + 1 {
        return;
    }
    // Another thread may close the instance's descriptor or the socket's, and their numbers come to mean something else: it has
    // to wait with that, or has done so before.
    let Some(_numbers) = lock(&sock.numbers, true) else { return };
    if table::entry(epfd) != Entry::Epoll(epoll.index()) {
        return;
    }
    let added = item.fd.load(Ordering::Relaxed);
    // The program may have closed the descriptor that it added, and go on with another one for the same socket.
    let is_open = table::entry(added) == Entry::Sock(sock.index());
    let Some(fd) = (if is_open { Some(added) } else { lanes::any_fd(sock) }) else { return };
    let from = sock.fd_of(before, fd);
    let to = sock.fd_of(lane, fd);
    let mut event =
        epoll_event { events: item.events.load(Ordering::Relaxed), u64: item.data.load(Ordering::Relaxed) };
    // First the new one: an instance that watches both for a moment tells too much, not too little.
    if call::epoll_ctl(epfd, EPOLL_CTL_ADD, to, &raw mut event) == 0 || real::errno() == libc::EEXIST {
        call::epoll_ctl(epfd, EPOLL_CTL_DEL, from, &raw mut event);
        item.lane.store(lane as u32, Ordering::Release);
    }
}

/// Tells of sockets that have something in a lane that is not watched.
fn elsewhere(epoll: &Epoll, events: *mut epoll_event, count: c_int) -> c_int {
    let mut found = 0;
    for (item, sock) in epoll.items() {
        let Some(shared) = sock.shared() else { continue };
        let wanted = is_wanted(item);
        let fd = item.fd.load(Ordering::Relaxed);
        let lane = item.lane.load(Ordering::Relaxed) as usize;
        if wanted == 0 || found >= count || !wait::elsewhere(sock, shared, fd, lane) {
            continue;
        }
        let event = epoll_event { events: wanted, u64: item.data.load(Ordering::Relaxed) };
        // SAFETY: the program's array of `count` events, of which `found` are filled.
        unsafe { events.wrapping_add(found as usize).write(event) };
        found += 1;
    }
    found
}
