//! In which order a receive looks at lanes, and what it waits for: one call of the program as an operation on its own lane first.
//!
//! [`Call::run`] goes by the mode of the socket: its own kernel socket while there are no lanes; with lanes, what was peeked at,
//! what is older than the lanes, the caller's own lane, the others' (the order that keeps flows in theirs); after a fall, what
//! the lanes still hold, then the kernel socket for good.

use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use libc::{EAGAIN, EINTR, MSG_DONTWAIT, MSG_PEEK, c_int, pollfd, timespec};
use manylane_sys::lend::QUEUES;

use crate::calls::{self, call};
use crate::deliver::Into;
use crate::hold::{Filled, Hold};
use crate::look::{in_memory, lane_polls};
use crate::open::SLICE_MS;
use crate::reach::uncovered;
use crate::receive::is_managed;
use crate::sock::{
    BLOCKS, BUSY, LANED, LEARN, MAX_LANES, Member, PLAIN, SINGLE, Shared, Sock, UNBOUNDED, WAITS_ON,
};
use crate::{
    gather, hold, identity, inside, lanes, me, mend, mirror, pace, queues, real, rest, signals, start,
};

/// What one try on one descriptor brought.
enum Got {
    /// The answer of the call, to be given to the program.
    Answer(isize),
    /// Nothing there.
    Nothing,
}

/// One call of the program.
pub(crate) struct Call<'a, Op> {
    pub(crate) sock: &'static Sock,
    pub(crate) shared: &'a Shared,
    pub(crate) member: &'a Member,
    /// The program's descriptor: lane 0.
    pub(crate) fd: c_int,
    pub(crate) flags: c_int,
    pub(crate) into: Into,
    pub(crate) op: Op,
    /// The answer was taken ahead, by a call that counted already.
    pub(crate) was_held: Cell<bool>,
    pub(crate) signals: signals::Held,
}

impl<Op: Fn(c_int, c_int) -> isize> Call<'_, Op> {
    /// The answer, and whether it came from a lane that is not the caller's. None: the library stands
    /// aside.
    pub(crate) fn run(&self) -> Option<(isize, bool)> {
        let answer = self.in_turns();
        self.signals.let_go();
        answer
    }

    /// Before a wait that may be renewed: a signal is to interrupt it whenever it comes.
    fn hold_back(&self) {
        if self.is_interrupted() {
            self.signals.hold_back();
        }
    }

    /// Whether a handler interrupts the call.
    fn is_interrupted(&self) -> bool {
        !signals::restarts() || self.shared.timeout_us.load(Ordering::Relaxed) != 0
    }

    /// Before the first wait of the call, where a handler would interrupt it: what is there already, or signals are held back.
    fn look_first(&self, lane: usize) -> Option<isize> {
        let look = || match self.try_lane(lane) {
            Got::Answer(answer) => Some(answer),
            Got::Nothing => None,
        };
        if self.is_interrupted() { self.signals.before_wait(look) } else { None }
    }

    fn in_turns(&self) -> Option<(isize, bool)> {
        let mut until = None;
        let mut rounds = Rounds::default();
        let mut again = false;
        loop {
            if inside::is_due() {
                return None;
            }
            let nonblock =
                self.flags & MSG_DONTWAIT != 0 || self.shared.nonblock.load(Ordering::Relaxed) != 0;
            if !nonblock {
                let kind = self.member.kind.load(Ordering::Relaxed);
                if kind & BLOCKS == 0 {
                    self.member.kind.store(kind | BLOCKS, Ordering::Relaxed);
                }
            }
            match self.shared.mode() {
                SINGLE | LEARN if queues::are_open(self.shared) => {
                    if let Some(answer) = self.with_queues(nonblock, &mut until) {
                        return Some((answer, false));
                    }
                }
                SINGLE if nonblock => return Some(((self.op)(self.fd, 0), false)),
                SINGLE => {
                    // SeqCst, as where lanes are made: a mode that has changed is seen here, or this state there.
                    self.member.state.swap(UNBOUNDED, Ordering::SeqCst);
                    if self.shared.mode.load(Ordering::SeqCst) != SINGLE {
                        self.member.state.store(BUSY, Ordering::Release);
                        continue;
                    }
                    let answer = inside::out(|| (self.op)(self.fd, 0));
                    if inside::is_due() {
                        // What ended it may be a bound of ours.
                        let goes_on = answer < 0 && self.waits_on(&mut until);
                        return (!goes_on).then_some((answer, false));
                    }
                    self.member.state.store(BUSY, Ordering::Release);
                    let bounded = self.shared.bounded.load(Ordering::Acquire) != 0;
                    if answer >= 0 || !bounded || !self.waits_on(&mut until) {
                        return Some((answer, false));
                    }
                }
                LEARN if nonblock => return Some(((self.op)(self.fd, 0), false)),
                LEARN => match self.wait_on(0, &mut until) {
                    Got::Answer(answer) => return Some((answer, false)),
                    Got::Nothing => mend::look(self.sock, self.shared),
                },
                LANED => {
                    if let Some(answer) = self.laned(nonblock, again, &mut until) {
                        return Some(answer);
                    }
                }
                PLAIN => {
                    if let Some(answer) = self.pending_error() {
                        return Some((answer, false));
                    }
                    if let Some(answer) = self.empty_retired() {
                        return Some((answer, true));
                    }
                    if nonblock {
                        return Some(((self.op)(self.fd, 0), false));
                    }
                    if self.shared.retired.load(Ordering::Acquire) == 0 && !queues::are_draining(self.shared)
                    {
                        return Some((inside::out(|| (self.op)(self.fd, 0)), false));
                    }
                    match self.wait_on(0, &mut until) {
                        Got::Answer(answer) => return Some((answer, false)),
                        Got::Nothing => {}
                    }
                }
                _ => return Some(((self.op)(self.fd, 0), false)),
            }
            // A wait that brought nothing: the descriptor may be closed by now, past the library.
            if !identity::look(self.sock, self.fd) {
                return Some((inside::out(|| (self.op)(self.fd, 0)), false));
            }
            rounds.rest();
            again = true;
        }
    }

    /// One try on a lane, without waiting: its queues, if it has any, and its kernel socket.
    #[inline]
    fn try_lane(&self, lane: usize) -> Got {
        if !queues::are_open(self.shared) {
            return self.try_kernel(lane);
        }
        // Its companion has a turn, too, should the queues never be empty.
        if self.member.beat.load(Ordering::Relaxed).is_multiple_of(queues::TURN)
            && let Got::Answer(answer) = self.try_kernel(lane)
        {
            return Got::Answer(answer);
        }
        if let Some(answer) = queues::receive(self.sock, self.shared, lane, self.flags, &self.into) {
            return Got::Answer(answer);
        }
        queues::flush();
        self.try_kernel(lane)
    }

    /// One try on what was peeked at.
    fn try_peeked(&self, peeked: usize) -> Got {
        match queues::receive_peeked(self.sock, peeked, self.flags, &self.into) {
            Some(answer) => Got::Answer(answer),
            None => self.try_kernel(peeked & 0xff),
        }
    }

    /// One receiver, or several that have no lanes of their own yet, with queues: all are those of lane 0.
    fn with_queues(&self, nonblock: bool, until: &mut Option<Instant>) -> Option<isize> {
        if let Some(peeked) = me::take_peeked(self.sock)
            && let Got::Answer(answer) = self.try_peeked(peeked)
        {
            return Some(answer);
        }
        if let Got::Answer(answer) = self.try_lane(0) {
            return Some(answer);
        }
        if nonblock {
            real::set_errno(EAGAIN);
            return Some(-1);
        }
        if let Some(answer) = self.pause(0, until) {
            return Some(answer);
        }
        match self.wait_on(0, until) {
            Got::Answer(answer) => Some(answer),
            Got::Nothing => None,
        }
    }

    /// Waits for a lane's queues and its kernel socket for a slice at most; what a receive on the socket would have returned.
    fn wait_for_queues(&self, lane: usize) -> isize {
        if let Got::Answer(answer) = self.try_lane(lane) {
            return answer;
        }
        queues::flush();
        let mut fds = [pollfd { fd: -1, events: libc::POLLIN, revents: 0 }; 1 + QUEUES];
        fds[0].fd = self.sock.fd_of(lane, self.fd);
        let count = queues::append(self.sock, self.shared, 1 << lane, &mut fds, 1);
        let slice = timespec { tv_sec: 0, tv_nsec: i64::from(SLICE_MS) * 1_000_000 };
        let mask = self.signals.mask(std::ptr::null());
        if call::ppoll(fds.as_mut_ptr(), count as libc::nfds_t, &raw const slice, mask) < 0 {
            return -1;
        }
        match self.try_lane(lane) {
            Got::Answer(answer) => answer,
            Got::Nothing => {
                real::set_errno(EAGAIN);
                -1
            }
        }
    }

    /// One try on what was taken ahead of a lane, and for its owner on what there is to take. No answer: the kernel is to be
    /// asked for one. `sleeps`: where this brings nothing, the caller sleeps.
    fn try_hold(&self, hold: &Hold, lane: usize, sleeps: bool) -> Option<Got> {
        let take = || {
            let answer = hold.take(self.flags, &self.into)?;
            self.was_held.set(true);
            if self.flags & MSG_PEEK != 0 {
                me::peek(self.sock, lane);
            }
            Some(Got::Answer(answer))
        };
        if let Some(got) = take() {
            return Some(got);
        }
        if self.into.is_many() || !self.may_take_ahead(lane) || !hold.is_worth_it() {
            return None;
        }
        match hold.fill(self.shared, self.member, self.sock.fd_of(lane, self.fd), sleeps) {
            Filled::Some => {
                let got = take();
                // One call of the kernel, and this one has the first that it brought.
                self.was_held.set(false);
                got
            }
            Filled::Nothing => Some(Got::Nothing),
            Filled::Failed => Some(Got::Answer(-1)),
            Filled::No => None,
        }
    }

    /// Whether the lane is the caller's own, and nobody else's, and nothing of it comes any other way.
    fn may_take_ahead(&self, lane: usize) -> bool {
        self.shared.owner_of(lane).is_some_and(|owner| std::ptr::eq(owner, self.member))
            && self.member.lane.load(Ordering::Relaxed) == lane as i32
            && self.shared.crowded.load(Ordering::Relaxed) & 1 << lane == 0
            && self.shared.one_by_one.load(Ordering::Relaxed) == 0
            && !queues::are_open(self.shared)
            && rest::may_take_ahead(self.shared)
    }

    /// Waits for a lane's kernel socket for a slice at most, with the program's signals; what a receive would have returned.
    fn wait_with_mask(&self, lane: usize) -> isize {
        let fd = self.sock.fd_of(lane, self.fd);
        let mut at = pollfd { fd, events: libc::POLLIN, revents: 0 };
        let slice = timespec { tv_sec: 0, tv_nsec: i64::from(SLICE_MS) * 1_000_000 };
        let mask = self.signals.mask(std::ptr::null());
        match call::ppoll(&raw mut at, 1, &raw const slice, mask) {
            ready if ready < 0 => -1,
            // What a poll tells of may not be there to be received: then there was none.
            _ => (self.op)(fd, MSG_DONTWAIT),
        }
    }

    /// One try on a lane's kernel socket, without waiting.
    #[inline]
    fn try_kernel(&self, lane: usize) -> Got {
        if start::gathers() && self.member.lane.load(Ordering::Relaxed) != lane as i32 {
            gather::before_taking(self.sock, self.shared, self.fd, lane);
        }
        if let Some(hold) = hold::of(self.sock, lane)
            && let Some(got) = self.try_hold(hold, lane, false)
        {
            return got;
        }
        let answer = (self.op)(self.sock.fd_of(lane, self.fd), MSG_DONTWAIT);
        if answer < 0 && real::errno() == EAGAIN {
            return Got::Nothing;
        }
        if answer >= 0 && self.flags & MSG_PEEK != 0 {
            me::peek(self.sock, lane);
        }
        Got::Answer(answer)
    }

    /// The program's own timeout counts from the first wait of a call.
    fn start_clock(&self, until: &mut Option<Instant>) {
        let timeout = self.shared.timeout_us.load(Ordering::Relaxed);
        if timeout > 0 && until.is_none() {
            *until = Some(Instant::now() + Duration::from_micros(timeout));
        }
    }

    /// A pause before a wait on the caller's own lane, if one pays: see `pace.rs`. What it brought, if it brought anything.
    fn pause(&self, own: usize, until: &mut Option<Instant>) -> Option<isize> {
        self.start_clock(until);
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let lane = self.sock.fd_of(own, self.fd);
        let look = || match self.try_lane(own) {
            Got::Answer(answer) => Some(answer),
            Got::Nothing => None,
        };
        let rest = |time: timespec| {
            self.member.state.store(WAITS_ON + own as u32, Ordering::Release);
            self.hold_back();
            let mask = self.signals.mask(std::ptr::null());
            let ended = call::ppoll(std::ptr::null_mut(), 0, &raw const time, mask);
            self.member.state.store(BUSY, Ordering::Release);
            lanes::beat(self.member);
            (ended < 0 && !self.waits_on(until)).then_some(-1)
        };
        pace::before_sleep(lane, left, look, rest)
    }

    /// Waits on a lane for a slice at most.
    fn wait_on(&self, lane: usize, until: &mut Option<Instant>) -> Got {
        self.start_clock(until);
        self.member.state.store(WAITS_ON + lane as u32, Ordering::Release);
        if let Some(answer) = self.look_first(lane) {
            self.member.state.store(BUSY, Ordering::Release);
            lanes::beat(self.member);
            return Got::Answer(answer);
        }
        let with_queues = queues::are_open(self.shared);
        let answer = if with_queues {
            self.wait_for_queues(lane)
        } else if self.signals.is_on() {
            self.wait_with_mask(lane)
        } else {
            (self.op)(self.sock.fd_of(lane, self.fd), 0)
        };
        self.member.state.store(BUSY, Ordering::Release);
        lanes::beat(self.member);
        if answer >= 0 {
            if self.flags & MSG_PEEK != 0 && !with_queues {
                me::peek(self.sock, lane);
            }
            return Got::Answer(answer);
        }
        if self.waits_on(until) { Got::Nothing } else { Got::Answer(answer) }
    }

    /// A wait ended without a datagram: whether the program would still be waiting.
    fn waits_on(&self, until: &mut Option<Instant>) -> bool {
        let timeout = self.shared.timeout_us.load(Ordering::Relaxed);
        match real::errno() {
            EAGAIN if timeout == 0 => true,
            EAGAIN => {
                let until = *until.get_or_insert_with(|| Instant::now() + Duration::from_micros(timeout));
                Instant::now() < until
            }
            // With a timeout of its own, the kernel would not have gone on, either.
            EINTR => timeout == 0 && signals::restarts(),
            _ => false,
        }
    }

    /// Mode LANED: the answer, or nothing when the mode may have changed. `again`: after a wait of the same call.
    fn laned(&self, nonblock: bool, again: bool, until: &mut Option<Instant>) -> Option<(isize, bool)> {
        let own = usize::try_from(self.member.lane.load(Ordering::Acquire)).ok();
        // 1. What was peeked at.
        if let Some(lane) = me::take_peeked(self.sock)
            && let Got::Answer(answer) = self.try_peeked(lane)
        {
            return Some((answer, own != Some(lane & 0xff)));
        }
        // Whoever finds datagrams in its own lane each time looks now and then, too, if the others' owners are there, and at what
        // they have kept to be sent. So does who waits, after each slice, which is only sooner.
        let now_and_then = self.member.beat.load(Ordering::Relaxed) % 16 < 2;
        if now_and_then {
            uncovered(self.sock, self.shared, own);
        }
        if now_and_then || again {
            gather::look(self.sock, self.shared, self.fd);
        }
        // 2. What is older than the lanes, or was left behind in one.
        let first = self.shared.first.load(Ordering::Acquire);
        if first != 0 {
            for lane in (0..MAX_LANES).filter(|lane| first & 1 << lane != 0) {
                match self.try_kernel(lane) {
                    Got::Answer(answer) => {
                        lanes::drained_first(self.shared);
                        return Some((answer, own != Some(lane)));
                    }
                    Got::Nothing => _ = self.shared.first.fetch_and(!(1 << lane), Ordering::AcqRel),
                }
            }
        }
        let Some(own) = own else { return self.as_guest(nonblock, until) };
        // 3. The caller's own lane, 4. lanes whose owners are not waiting.
        if nonblock || self.member.helps.load(Ordering::Relaxed) != 0 {
            if let Got::Answer(answer) = self.try_lane(own) {
                return Some((answer, false));
            }
            if let Got::Answer(answer) = self.help(Some(own)) {
                return Some((answer, true));
            }
            if nonblock {
                real::set_errno(EAGAIN);
                return Some((-1, false));
            }
        }
        if let Some(hold) = hold::of(self.sock, own)
            && let Some(Got::Answer(answer)) = self.try_hold(hold, own, true)
        {
            return Some((answer, false));
        }
        // Others may have taken meanwhile what was held.
        gather::flush();
        if pace::pays(self.shared)
            && let Some(answer) = self.pause(own, until)
        {
            return Some((answer, false));
        }
        match self.wait_on(own, until) {
            Got::Answer(answer) if answer >= 0 || real::errno() != EAGAIN => Some((answer, false)),
            // The slice is over, or the program's own time: a last look at the others in either case.
            outcome => match (self.look_at_others(own), outcome) {
                (Got::Answer(answer), _) => Some((answer, true)),
                (Got::Nothing, Got::Answer(_)) => {
                    real::set_errno(EAGAIN);
                    Some((-1, false))
                }
                (Got::Nothing, Got::Nothing) => None,
            },
        }
    }

    /// A thread without a lane takes from all of them.
    fn as_guest(&self, nonblock: bool, until: &mut Option<Instant>) -> Option<(isize, bool)> {
        if let Got::Answer(answer) = self.help(None) {
            return Some((answer, true));
        }
        if nonblock {
            real::set_errno(EAGAIN);
            return Some((-1, false));
        }
        self.start_clock(until);
        gather::flush();
        let all = lanes::lanes_mask(self.shared);
        let (lane_fds, count) = lane_polls(self.sock, self.fd, all);
        let mut fds = [pollfd { fd: -1, events: 0, revents: 0 }; MAX_LANES + QUEUES];
        fds[..count].copy_from_slice(&lane_fds[..count]);
        queues::flush();
        let count = queues::append(self.sock, self.shared, all, &mut fds, count);
        let slice = timespec { tv_sec: 0, tv_nsec: i64::from(SLICE_MS) * 1_000_000 };
        self.hold_back();
        let mask = self.signals.mask(std::ptr::null());
        let ready = call::ppoll(fds.as_mut_ptr(), count as libc::nfds_t, &raw const slice, mask);
        lanes::beat(self.member);
        if ready < 0 {
            return (!self.waits_on(until)).then_some((-1, false));
        }
        real::set_errno(EAGAIN);
        if ready == 0 && !self.waits_on(until) {
            return Some((-1, false));
        }
        None
    }

    /// After a slice: what waits in lanes.
    fn look_at_others(&self, own: usize) -> Got {
        rest::after_slice(self.sock, self.shared);
        self.help(Some(own))
    }

    /// Looks at the lanes that are nobody's business at the moment, and takes from one that has something. A guest
    /// looks at all.
    fn help(&self, own: Option<usize>) -> Got {
        let errno = real::errno();
        let mask = match own {
            Some(own) => uncovered(self.sock, self.shared, Some(own)),
            None => {
                mend::look(self.sock, self.shared);
                lanes::lanes_mask(self.shared)
            }
        };
        if mask != 0 {
            let (mut fds, count) = lane_polls(self.sock, self.fd, mask);
            let now = timespec { tv_sec: 0, tv_nsec: 0 };
            let frames = in_memory(self.sock, self.shared, mask);
            if calls::ppoll_raw(&mut fds[..count], Some(now), std::ptr::null()) > 0 || frames != 0 {
                let lanes = (0..MAX_LANES).filter(|lane| mask & 1 << lane != 0);
                for (lane, _) in
                    lanes.zip(&fds).filter(|(lane, at)| at.revents != 0 || frames & 1 << lane != 0)
                {
                    if let Got::Answer(answer) = self.try_lane(lane) {
                        self.member.helps.store(1, Ordering::Relaxed);
                        return Got::Answer(answer);
                    }
                }
            }
        }
        self.member.helps.store(0, Ordering::Relaxed);
        real::set_errno(errno);
        Got::Nothing
    }

    /// Mode PLAIN, while lanes still hold something: the kernel tells of an error of the socket before all that is queued.
    fn pending_error(&self) -> Option<isize> {
        let error = if is_managed(self.shared) {
            mirror::number(self.fd, libc::SOL_SOCKET, libc::SO_ERROR).unwrap_or(0)
        } else {
            0
        };
        (error != 0).then(|| {
            real::set_errno(error);
            -1
        })
    }

    /// Mode PLAIN: what lanes still hold goes first; it is older.
    fn empty_retired(&self) -> Option<isize> {
        if queues::are_draining(self.shared) {
            if let Some(peeked) = me::take_peeked(self.sock)
                && let Got::Answer(answer) = self.try_peeked(peeked)
            {
                return Some(answer);
            }
            if let Some(answer) = queues::drain(self.sock, self.shared, self.flags, &self.into) {
                return Some(answer);
            }
        }
        let retired = self.shared.retired.load(Ordering::Acquire);
        if retired & hold::HOLDS != 0 {
            // Of any lane: it is older than what the kernel has.
            if let Some(peeked) = me::take_peeked(self.sock)
                && let Some(hold) = hold::of(self.sock, peeked & 0xff)
                && let Some(Got::Answer(answer)) = self.try_hold(hold, peeked & 0xff, false)
            {
                return Some(answer);
            }
            if let Some(answer) = hold::drain(self.sock, self.shared, self.fd, self.flags, &self.into) {
                return Some(answer);
            }
        }
        for lane in (1..MAX_LANES).filter(|lane| retired & 1 << lane != 0) {
            match self.try_kernel(lane) {
                Got::Answer(answer) => return Some(answer),
                Got::Nothing => lanes::emptied(self.sock, self.shared, self.fd, lane),
            }
        }
        None
    }
}

/// Receives the next datagram that the lanes of a plain socket still hold, without waiting; none if
/// they are empty.
pub(crate) fn next_leftover<Op: Fn(c_int, c_int) -> isize>(
    sock: &'static Sock,
    shared: &Shared,
    fd: c_int,
    into: Into,
    op: Op,
) -> Option<isize> {
    // A member's lane does not matter any more: none has one.
    let member = me::known(sock, shared).unwrap_or(&shared.members[0]);
    let signals = signals::Held::not();
    Call { sock, shared, member, fd, flags: 0, into, op, was_held: Cell::new(false), signals }.empty_retired()
}

/// Waits of one call that brought nothing. Each is to last for a slice; where that is not so (a poll that tells of what cannot
/// be received, a socket that somebody else made non-blocking, a thread without a lane that is always woken together with the
/// owner of one and too late), the thread sleeps all the same.
#[derive(Default)]
struct Rounds {
    count: u32,
    since: Option<Instant>,
}

impl Rounds {
    /// Waits that are measured together.
    const SOME: u32 = 16;

    #[inline]
    fn rest(&mut self) {
        // What a signal interrupts may be short.
        if real::errno() != EAGAIN {
            return;
        }
        self.count += 1;
        let since = *self.since.get_or_insert_with(Instant::now);
        if self.count < Self::SOME {
            return;
        }
        let slice = Duration::from_millis(SLICE_MS as u64);
        if since.elapsed() < slice * Self::SOME / 4 {
            let slice = timespec { tv_sec: 0, tv_nsec: i64::from(SLICE_MS) * 1_000_000 };
            // An empty entry, so that this is told from a pause, which has none, in `/proc/PID/task/TID/syscall`.
            let mut none = pollfd { fd: -1, events: 0, revents: 0 };
            call::ppoll(&raw mut none, 1, &raw const slice, std::ptr::null());
        }
        *self = Self::default();
    }
}
