//! Receiving: the program's calls become one operation, done on the caller's own lane first.
//!
//! One function, [`receive`], decides where; each call of the C library says how. With one receiving thread it is the
//! program's own call on the program's own socket.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use libc::{EAGAIN, EINTR, MSG_DONTWAIT, MSG_ERRQUEUE, MSG_OOB, MSG_PEEK, MSG_TRUNC, MSG_WAITFORONE};
use libc::{
    c_int, c_uint, c_void, iovec, mmsghdr, msghdr, pollfd, size_t, sockaddr, socklen_t, ssize_t, timespec,
};

use manylane_sys::lend::QUEUES;

use crate::calls::{self, call};
use crate::frames::Into;
use crate::open::SLICE_MS;
use crate::reach::uncovered;
use crate::sock::{
    BLOCKS, BUSY, LANED, LEARN, MAX_LANES, Member, PLAIN, SINGLE, Shared, Sock, UNBOUND, UNBOUNDED, WAITS_ON,
};
use crate::{alone, lanes, loan, me, mend, pace, queues, real, report, signals, table};

pub(crate) fn recv(fd: c_int, to: *mut c_void, len: size_t, flags: c_int) -> ssize_t {
    let op = |fd, more| call::recv(fd, to, len, flags | more);
    let into = bytes(to, len);
    receive(fd, flags, into, op, |got| (1, if flags & MSG_TRUNC == 0 { got } else { got.min(len as isize) }))
}

pub(crate) fn recvfrom(
    fd: c_int,
    to: *mut c_void,
    len: size_t,
    flags: c_int,
    from: *mut sockaddr,
    fromlen: *mut socklen_t,
) -> ssize_t {
    // A receive that brings nothing leaves the length alone, so that a second try finds it as the program set it.
    let into = Into::Bytes { to, len, from, fromlen };
    let op = |fd, more| call::recvfrom(fd, to, len, flags | more, from, fromlen);
    receive(fd, flags, into, op, |got| (1, got))
}

pub(crate) fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    let op = |fd, more| call::recvmsg(fd, message, flags | more);
    receive(fd, flags, Into::Message(message), op, |got| (1, got))
}

pub(crate) fn read(fd: c_int, to: *mut c_void, len: size_t) -> ssize_t {
    if len == 0 || (alone::find(fd).is_none() && table::sock(fd).is_none()) {
        return call::read(fd, to, len);
    }
    receive(fd, 0, bytes(to, len), |fd, more| call::recv(fd, to, len, more), |got| (1, got))
}

pub(crate) fn readv(fd: c_int, to: *const iovec, count: c_int) -> ssize_t {
    if table::sock(fd).is_none() || !(1..=1024).contains(&count) {
        return call::readv(fd, to, count);
    }
    let op = |fd, more| {
        // SAFETY: zeroes are a value of a msghdr (no address, no control messages).
        let mut message: msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = to.cast_mut();
        message.msg_iovlen = count as usize;
        call::recvmsg(fd, &raw mut message, more)
    };
    receive(fd, 0, Into::Pieces { to, count: count as usize }, op, |got| (1, got))
}

/// A buffer without an address.
fn bytes(to: *mut c_void, len: size_t) -> Into {
    Into::Bytes { to, len, from: std::ptr::null_mut(), fromlen: std::ptr::null_mut() }
}

pub(crate) fn recv_chk(fd: c_int, to: *mut c_void, len: size_t, room: size_t, flags: c_int) -> ssize_t {
    if len > room { call::__recv_chk(fd, to, len, room, flags) } else { recv(fd, to, len, flags) }
}

pub(crate) fn recvfrom_chk(
    fd: c_int,
    to: *mut c_void,
    len: size_t,
    room: size_t,
    flags: c_int,
    from: *mut sockaddr,
    fromlen: *mut socklen_t,
) -> ssize_t {
    if len > room {
        return call::__recvfrom_chk(fd, to, len, room, flags, from, fromlen);
    }
    recvfrom(fd, to, len, flags, from, fromlen)
}

pub(crate) fn read_chk(fd: c_int, to: *mut c_void, len: size_t, room: size_t) -> ssize_t {
    if len > room { call::__read_chk(fd, to, len, room) } else { read(fd, to, len) }
}

pub(crate) fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    if flags & (MSG_DONTWAIT | MSG_WAITFORONE) != 0
        && let Some(alone) = alone::find(fd)
    {
        let op = |fd, _| call::recvmmsg(fd, messages, count, flags, timeout) as isize;
        if let Some(got) = straight(alone, fd, flags, op, |got| sum(messages, 0, got)) {
            return got as c_int;
        }
    }
    let managed = table::sock(fd).and_then(Sock::shared).is_some_and(is_managed);
    if !managed || flags & (MSG_ERRQUEUE | MSG_OOB) != 0 || count == 0 {
        return call::recvmmsg(fd, messages, count, flags, timeout);
    }
    // The kernel looks at the time only after a datagram; so does this.
    // SAFETY: null, or the program's timespec, which the kernel would read here, too.
    let limit = unsafe { timeout.as_ref() };
    let limit = limit
        .map(|time| Instant::now() + Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec.max(0) as u32));
    let mut done: c_uint = 0;
    loop {
        let fill = done;
        let op = |fd, more| {
            // The rest of the array; the kernel's own timeout is not used, since it would wait past it on one lane.
            let at = messages.wrapping_add(fill as usize);
            let wait_for_one = if more & MSG_DONTWAIT == 0 { MSG_WAITFORONE } else { 0 };
            call::recvmmsg(fd, at, count - fill, flags | more | wait_for_one, std::ptr::null_mut()) as isize
        };
        let bytes = |got| sum(messages, fill, got);
        let more = if done > 0 && flags & MSG_WAITFORONE != 0 { MSG_DONTWAIT } else { 0 };
        let at = messages.wrapping_add(fill as usize);
        let into = Into::Messages { to: at, count: (count - fill) as usize };
        let got = receive(fd, flags | more, into, |fd, extra| op(fd, extra | more), bytes);
        if got < 0 {
            return if done > 0 { done as c_int } else { -1 };
        }
        done += got as c_uint;
        let late = limit.is_some_and(|limit| Instant::now() >= limit);
        // Without a wait, what one lane had is an answer; a further call looks at the others.
        let nonblock =
            (flags & MSG_DONTWAIT) != 0 || table::sock(fd).and_then(Sock::shared).is_some_and(is_nonblocking);
        if done >= count || late || nonblock || flags & MSG_WAITFORONE != 0 {
            return done as c_int;
        }
    }
}

/// Datagrams and bytes of `got` messages behind the first `fill`.
fn sum(messages: *mut mmsghdr, fill: c_uint, got: isize) -> (u64, isize) {
    let filled = fill as usize..fill as usize + got.max(0) as usize;
    // SAFETY: the kernel has just filled these messages of the program's array.
    let bytes: u64 = filled.map(|at| u64::from(unsafe { (*messages.wrapping_add(at)).msg_len })).sum();
    (got as u64, bytes as isize)
}

fn is_nonblocking(shared: &'static Shared) -> bool {
    shared.nonblock.load(Ordering::Relaxed) != 0
}

/// Whether the library has a say in what happens on a socket.
#[inline]
pub(crate) fn is_managed(shared: &Shared) -> bool {
    match shared.mode() {
        UNBOUND => false,
        PLAIN => shared.retired.load(Ordering::Acquire) != 0 || queues::are_draining(shared),
        _ => true,
    }
}

/// What one try on one descriptor brought.
enum Got {
    /// The answer of the call, to be given to the program.
    Answer(isize),
    /// Nothing there.
    Nothing,
}

/// Receives for the program. `op` does it on a descriptor, with further flags; `into` says where a frame would go; `size` says
/// how many datagrams and bytes an answer means.
fn receive(
    fd: c_int,
    flags: c_int,
    into: Into,
    op: impl Fn(c_int, c_int) -> isize,
    size: impl Fn(isize) -> (u64, isize),
) -> isize {
    if let Some(alone) = alone::find(fd)
        && let Some(answer) = straight(alone, fd, flags, &op, &size)
    {
        return answer;
    }
    the_long_way(fd, flags, into, op, size)
}

/// The one receiver of a socket: the program's own call. No answer when that has changed, and the call has to be made again.
#[inline]
fn straight(
    alone: &alone::Place,
    fd: c_int,
    flags: c_int,
    op: impl Fn(c_int, c_int) -> isize,
    size: impl Fn(isize) -> (u64, isize),
) -> Option<isize> {
    if !alone.begin() {
        return None;
    }
    let answer = op(fd, 0);
    alone.end();
    if answer >= 0 {
        if flags & (MSG_PEEK | MSG_ERRQUEUE | MSG_OOB) == 0 {
            alone.received(size(answer));
        }
        return Some(answer);
    }
    // While it waited, a second receiver came: what ended the wait may be the bound that waits have since then.
    let goes_on = || match real::errno() {
        EAGAIN => true,
        EINTR => signals::restarts() && has_no_timeout(fd),
        _ => false,
    };
    let again = !alone.is_mine() && goes_on();
    (!again).then_some(answer)
}

fn has_no_timeout(fd: c_int) -> bool {
    let shared = table::sock(fd).and_then(Sock::shared);
    shared.is_some_and(|shared| shared.timeout_us.load(Ordering::Relaxed) == 0)
}

fn the_long_way(
    fd: c_int,
    flags: c_int,
    into: Into,
    op: impl Fn(c_int, c_int) -> isize,
    size: impl Fn(isize) -> (u64, isize),
) -> isize {
    let Some(sock) = table::sock(fd) else { return op(fd, 0) };
    let Some(shared) = sock.shared() else { return op(fd, 0) };
    if !is_managed(shared) || flags & (MSG_ERRQUEUE | MSG_OOB) != 0 {
        return op(fd, 0);
    }
    let Some(member) = me::member(sock, shared, fd) else { return op(fd, 0) };
    lanes::beat(member);
    let call = Call { sock, shared, member, fd, flags, into, op };
    let (answer, helped) = call.run();
    if answer >= 0 && flags & MSG_PEEK == 0 {
        let (datagrams, bytes) = size(answer);
        report::received(member, datagrams, bytes.max(0) as u64, helped);
        let receives = member.receives.load(Ordering::Relaxed);
        if receives < lanes::COMES_BACK {
            member.receives.store(receives + 1, Ordering::Relaxed);
            if receives + 1 == lanes::COMES_BACK && loan::is_wanted() {
                loan::begin(sock, shared, fd);
            }
        }
        let mode = shared.mode();
        if mode == SINGLE {
            alone::arm(sock, shared, member, fd);
        }
        if mode == LANED || queues::are_open(shared) {
            pace::took(datagrams);
        }
        let without = mode == LANED && member.lane.load(Ordering::Relaxed) < 0;
        if (mode == LEARN || without)
            && receives + 1 >= lanes::COMES_BACK
            && lanes::is_worth_a_look(shared, member)
        {
            lanes::consider(sock, shared, fd);
        }
    }
    // Woken like others for one datagram that another one got: it came to receive all the same.
    if answer < 0 && shared.mode() == LEARN && real::errno() == EAGAIN {
        let receives = member.receives.load(Ordering::Relaxed);
        if receives < lanes::COMES_BACK {
            member.receives.store(receives + 1, Ordering::Relaxed);
        }
    }
    answer
}

/// One call of the program.
struct Call<'a, Op> {
    sock: &'static Sock,
    shared: &'a Shared,
    member: &'a Member,
    /// The program's descriptor: lane 0.
    fd: c_int,
    flags: c_int,
    into: Into,
    op: Op,
}

impl<Op: Fn(c_int, c_int) -> isize> Call<'_, Op> {
    /// The answer, and whether it came from a lane that is not the caller's.
    fn run(&self) -> (isize, bool) {
        let mut until = None;
        let mut rounds = Rounds::default();
        loop {
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
                        return (answer, false);
                    }
                }
                SINGLE if nonblock => return ((self.op)(self.fd, 0), false),
                SINGLE => {
                    // SeqCst, as where lanes are made: a mode that has changed is seen here, or this state there.
                    self.member.state.swap(UNBOUNDED, Ordering::SeqCst);
                    if self.shared.mode.load(Ordering::SeqCst) != SINGLE {
                        self.member.state.store(BUSY, Ordering::Release);
                        continue;
                    }
                    let answer = (self.op)(self.fd, 0);
                    self.member.state.store(BUSY, Ordering::Release);
                    let bounded = self.shared.bounded.load(Ordering::Acquire) != 0;
                    if answer >= 0 || !bounded || !self.waits_on(&mut until) {
                        return (answer, false);
                    }
                }
                LEARN if nonblock => return ((self.op)(self.fd, 0), false),
                LEARN => match self.wait_on(0, &mut until) {
                    Got::Answer(answer) => return (answer, false),
                    Got::Nothing => mend::look(self.sock, self.shared),
                },
                LANED => {
                    if let Some(answer) = self.laned(nonblock, &mut until) {
                        return answer;
                    }
                }
                PLAIN => {
                    if let Some(answer) = self.empty_retired() {
                        return (answer, true);
                    }
                    if nonblock {
                        return ((self.op)(self.fd, 0), false);
                    }
                    match self.wait_on(0, &mut until) {
                        Got::Answer(answer) => return (answer, false),
                        Got::Nothing => {}
                    }
                }
                _ => return ((self.op)(self.fd, 0), false),
            }
            rounds.rest();
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
        if call::ppoll(fds.as_mut_ptr(), count as libc::nfds_t, &raw const slice, std::ptr::null()) < 0 {
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

    /// One try on a lane's kernel socket, without waiting.
    #[inline]
    fn try_kernel(&self, lane: usize) -> Got {
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
            let ended = call::ppoll(std::ptr::null_mut(), 0, &raw const time, std::ptr::null());
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
        let with_queues = queues::are_open(self.shared);
        let answer = if with_queues {
            self.wait_for_queues(lane)
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

    /// Mode LANED: the answer, or nothing when the mode may have changed.
    fn laned(&self, nonblock: bool, until: &mut Option<Instant>) -> Option<(isize, bool)> {
        let own = usize::try_from(self.member.lane.load(Ordering::Acquire)).ok();
        // 1. What was peeked at.
        if let Some(lane) = me::take_peeked(self.sock)
            && let Got::Answer(answer) = self.try_peeked(lane)
        {
            return Some((answer, own != Some(lane & 0xff)));
        }
        // Whoever finds datagrams in its own lane each time looks now and then, too, if the others' owners are there.
        if self.member.beat.load(Ordering::Relaxed) % 16 < 2 {
            uncovered(self.sock, self.shared, own);
        }
        // 2. What is older than the lanes, or was left behind in one.
        let first = self.shared.first.load(Ordering::Acquire);
        if first != 0 {
            for lane in (0..MAX_LANES).filter(|lane| first & 1 << lane != 0) {
                match self.try_kernel(lane) {
                    Got::Answer(answer) => return Some((answer, own != Some(lane))),
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
        if pace::pays(self.shared)
            && let Some(answer) = self.pause(own, until)
        {
            return Some((answer, false));
        }
        match self.wait_on(own, until) {
            Got::Answer(answer) if answer >= 0 || real::errno() != EAGAIN => Some((answer, false)),
            // The slice is over, or the program's own time: a last look at the others in either case.
            outcome => match (self.help(Some(own)), outcome) {
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
        let all = lanes::lanes_mask(self.shared);
        let (lane_fds, count) = lane_polls(self.sock, self.shared, self.fd, all);
        let mut fds = [pollfd { fd: -1, events: 0, revents: 0 }; MAX_LANES + QUEUES];
        fds[..count].copy_from_slice(&lane_fds[..count]);
        queues::flush();
        let count = queues::append(self.sock, self.shared, all, &mut fds, count);
        let slice = timespec { tv_sec: 0, tv_nsec: i64::from(SLICE_MS) * 1_000_000 };
        let ready = call::ppoll(fds.as_mut_ptr(), count as libc::nfds_t, &raw const slice, std::ptr::null());
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
            let (mut fds, count) = lane_polls(self.sock, self.shared, self.fd, mask);
            let now = timespec { tv_sec: 0, tv_nsec: 0 };
            let frames = queues::ready(self.sock, self.shared, mask);
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
        for lane in (0..MAX_LANES).filter(|lane| retired & 1 << lane != 0) {
            match self.try_kernel(lane) {
                Got::Answer(answer) => return Some(answer),
                Got::Nothing => lanes::emptied(self.shared, self.fd, lane),
            }
        }
        None
    }
}

/// Waits of one call that brought nothing. Each is to last for a slice; where that is not so (a poll that tells of what cannot
/// be received, a socket that somebody else made non-blocking), the thread sleeps all the same.
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
            call::ppoll(std::ptr::null_mut(), 0, &raw const slice, std::ptr::null());
        }
        *self = Self::default();
    }
}

/// What ppoll(2) is asked about the lanes of `mask`, in their order, and how many there are.
pub(crate) fn lane_polls(
    sock: &Sock,
    _shared: &Shared,
    fd: c_int,
    mask: u64,
) -> ([pollfd; MAX_LANES], usize) {
    let mut fds = [pollfd { fd: -1, events: libc::POLLIN, revents: 0 }; MAX_LANES];
    let mut count = 0;
    for lane in (0..MAX_LANES).filter(|lane| mask & 1 << lane != 0) {
        fds[count].fd = sock.fd_of(lane, fd);
        count += 1;
    }
    (fds, count)
}

/// A bit for each lane of `mask` that has something.
pub(crate) fn ready(sock: &'static Sock, shared: &Shared, fd: c_int, mask: u64) -> u64 {
    if mask == 0 {
        return 0;
    }
    let frames = queues::ready(sock, shared, mask);
    let (mut fds, count) = lane_polls(sock, shared, fd, mask);
    let now = timespec { tv_sec: 0, tv_nsec: 0 };
    if calls::ppoll_raw(&mut fds[..count], Some(now), std::ptr::null()) <= 0 {
        return frames;
    }
    let lanes = (0..MAX_LANES).filter(|lane| mask & 1 << lane != 0);
    let readable = lanes.zip(&fds).filter(|(_, at)| at.revents & libc::POLLIN != 0);
    readable.fold(frames, |all, (lane, _)| all | 1 << lane)
}
