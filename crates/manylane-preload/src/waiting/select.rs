//! select(2), through poll(2) if a set contains a socket that the library manages.
//!
//! Sets may be longer than the C library's own. The kernel takes them to be as long as its table
//! of descriptors, which no call reports. In longer sets, only bits of known descriptors are
//! checked, and their sockets become plain once they have a second receiver.

use std::cell::Cell;
use std::time::Duration;

use libc::{POLLNVAL, c_int, c_ulong, fd_set, pollfd, sigset_t, timespec, timeval};

use crate::base::by_select::SET_EVENTS;
use crate::base::real::{self, call, fail_with_errno};
use crate::base::{pollfds, quiesce};
use crate::batching::send_batch;
use crate::fds::{hidden_fds, sock_fds, table};
use crate::lanes::fallback;
use crate::shared::sock::{Shared, Sock};
use crate::transfer::detached;
use crate::waiting::poll::{self, Caller};
use crate::waiting::wait::{self, Deadline, timespec_of};
use crate::xdp::queues;

pub(crate) unsafe fn select(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    // SAFETY: program arguments.
    unsafe {
        let own = |timeout| call::select(count, read, write, except, timeout);
        if detached::has_leftovers() {
            let mut over = detached::zero_timeval();
            let mut time = |now| if now { &raw mut over } else { timeout };
            return detached::select(count, read, |now| own(time(now)));
        }
        let sets = FdSets::new(count, [read, write, except]);
        let until = || Deadline::from_timespec(timeout.as_ref().map(normalize_timeval).as_ref());
        let (answer, left) = sets.wait(until, None, || own(timeout));
        // Linux writes the remaining time.
        if let (Some(left), Some(timeout)) = (left, timeout.as_mut()) {
            timeout.tv_sec = left.as_secs() as i64;
            timeout.tv_usec = i64::from(left.subsec_micros());
        }
        // Wait for the remaining time.
        answer.unwrap_or_else(|| select(count, read, write, except, timeout))
    }
}

pub(crate) unsafe fn pselect(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: program arguments.
    unsafe {
        let own = |timeout| call::pselect(count, read, write, except, timeout, mask);
        if detached::has_leftovers() {
            let time = |now| if now { &raw const real::NO_WAIT } else { timeout };
            return detached::select(count, read, |now| own(time(now)));
        }
        let sets = FdSets::new(count, [read, write, except]);
        let until = || Deadline::from_timespec(timeout.as_ref());
        let (answer, left) = sets.wait(until, mask.as_ref(), || own(timeout));
        answer.unwrap_or_else(|| {
            let left = left.map(timespec_of);
            pselect(count, read, write, except, real::or_null(left.as_ref()), mask)
        })
    }
}

/// Converts as the C library does (glibc since 2.34): it takes 32 bits of the microseconds, of
/// which whole seconds count as seconds, and refuses a time if either part is negative.
fn normalize_timeval(time: &timeval) -> timespec {
    const USEC_PER_SEC: i64 = 1_000_000;
    let usec = i64::from(time.tv_usec as i32);
    let is_negative = time.tv_sec < 0 || usec < 0;
    timespec {
        tv_sec: if is_negative { -1 } else { time.tv_sec.saturating_add(usec / USEC_PER_SEC) },
        tv_nsec: usec % USEC_PER_SEC * 1000,
    }
}

/// The sets of a call of the program.
struct FdSets {
    count: c_int,
    sets: [*mut fd_set; 3],
}

impl FdSets {
    /// Program arguments, as long as the value is used.
    unsafe fn new(count: c_int, sets: [*mut fd_set; 3]) -> Self {
        Self { count, sets }
    }

    /// The result, and the remaining time unless the kernel has written it. No result: the caller
    /// must make the program's own call for the remaining time.
    fn wait(
        &self,
        until: impl FnOnce() -> Option<Deadline>,
        mask: Option<&sigset_t>,
        native: impl Fn() -> c_int,
    ) -> (Option<c_int>, Option<Duration>) {
        if self.has_hidden_fd() {
            return (Some(fail_with_errno(libc::EBADF)), None);
        }
        self.tracked_fds().for_each(fallback::mark_nested);
        let until = if self.managed_socks().next().is_some() { until() } else { None };
        let Some(until) = until else {
            send_batch::flush();
            return (Some(native()), None);
        };
        let own = Cell::new(false);
        let native = || {
            own.set(true);
            quiesce::run_outside(&native)
        };
        let by_poll = |room: &mut [pollfd]| {
            let used = self.fill_pollfds(room);
            let fds = &mut room[..used];
            let answer = match poll::poll_alone(fds, |_| native()) {
                Some(answer) => answer,
                None => poll::poll_sliced(fds, Caller::Select, until, mask, |_| native())?,
            };
            Some(if own.get() { answer } else { self.write_back(answer, &room[..used]) })
        };
        let room = if self.is_within_setsize() { self.count_entries() } else { usize::MAX };
        let sliced =
            || pollfds::with_pollfds(room, by_poll).unwrap_or_else(|| Some(self.wait_unsliced(mask, native)));
        (quiesce::run_inside(sliced).flatten(), until.remaining().filter(|_| !own.get()))
    }

    /// Word `nth` of a set. Bits beyond the count are zero.
    fn word(&self, set: usize, nth: usize) -> c_ulong {
        let set = self.sets[set].cast::<c_ulong>();
        let bits = c_ulong::BITS as usize;
        let left = (self.count as usize).saturating_sub(nth * bits);
        if set.is_null() || left == 0 {
            return 0;
        }
        // SAFETY: program arguments: the kernel reads up to the word with the last of the `count`
        // bits; of sets longer than FD_SETSIZE only words of open descriptors are read here, up to
        // which the kernel's table reaches.
        let word = unsafe { set.add(nth).read() };
        if left < bits { word & ((1 << left) - 1) } else { word }
    }

    fn has(&self, set: usize, fd: c_int) -> bool {
        let bits = c_ulong::BITS as usize;
        self.word(set, fd as usize / bits) & 1 << (fd as usize % bits) != 0
    }

    /// Words of the sets, up to FD_SETSIZE.
    fn word_count(&self) -> usize {
        usize::try_from(self.count).unwrap_or(0).min(libc::FD_SETSIZE).div_ceil(c_ulong::BITS as usize)
    }

    fn is_within_setsize(&self) -> bool {
        self.count as usize <= libc::FD_SETSIZE
    }

    /// Word `nth` of the union of the sets.
    fn any_word(&self, nth: usize) -> c_ulong {
        (0..SET_EVENTS.len()).fold(0, |any, set| any | self.word(set, nth))
    }

    /// Number of descriptors in any of the sets.
    fn count_entries(&self) -> usize {
        (0..self.word_count()).map(|nth| self.any_word(nth).count_ones() as usize).sum()
    }

    /// The sockets and instances in the first set.
    fn tracked_fds(&self) -> impl Iterator<Item = c_int> {
        (0..self.count.min(table::fd_end()))
            .filter(|fd| table::entry(*fd) != table::Entry::None && self.has(0, *fd))
    }

    /// True if a set that is not longer than FD_SETSIZE contains a descriptor that the program
    /// does not have.
    fn has_hidden_fd(&self) -> bool {
        let bits = c_ulong::BITS as usize;
        let is_hidden = |fd: usize| hidden_fds::kernel_fd(fd as c_int) != fd as c_int;
        self.is_within_setsize()
            && (0..self.word_count()).any(|nth| {
                let word = self.any_word(nth);
                word != 0 && (0..bits).any(|bit| word >> bit & 1 != 0 && is_hidden(nth * bits + bit))
            })
    }

    /// The sockets in the first set that the library manages.
    fn managed_socks(&self) -> impl Iterator<Item = (c_int, (&'static Sock, &'static Shared))> {
        self.tracked_fds().filter_map(|fd| Some((fd, sock_fds::managed(fd)?)))
    }

    /// Fills an array for poll(2) from the sets. Returns the number of entries.
    fn fill_pollfds(&self, fds: &mut [pollfd]) -> usize {
        let mut used = 0;
        let bits = c_ulong::BITS as usize;
        for nth in 0..self.word_count() {
            let words: [c_ulong; SET_EVENTS.len()] = std::array::from_fn(|set| self.word(set, nth));
            let mut any = words.into_iter().fold(0, |any, word| any | word);
            while any != 0 {
                let bit = any.trailing_zeros();
                any &= any - 1;
                let asked = words.into_iter().zip(SET_EVENTS).filter(|(word, _)| word >> bit & 1 != 0);
                let events = asked.fold(0, |events, (_, (asked, _))| events | asked);
                // Another thread may change the sets meanwhile.
                let Some(at) = fds.get_mut(used) else { return used };
                *at = pollfd { fd: (nth * bits) as c_int + bit as c_int, events, revents: 0 };
                used += 1;
            }
        }
        used
    }

    /// Writes the result of poll(2) into the sets, as select(2) does.
    fn write_back(&self, answer: c_int, fds: &[pollfd]) -> c_int {
        if answer < 0 {
            return answer;
        }
        if fds.iter().any(|at| at.revents & POLLNVAL != 0) {
            return fail_with_errno(libc::EBADF);
        }
        let mut total = 0;
        for (set, (asked, says)) in self.sets.into_iter().zip(SET_EVENTS).filter(|(set, _)| !set.is_null()) {
            for nth in 0..self.word_count() {
                // SAFETY: as in word(); the kernel writes whole words, too.
                unsafe { set.cast::<c_ulong>().add(nth).write(0) };
            }
            for at in fds.iter().filter(|at| at.events & asked != 0 && at.revents & says != 0) {
                // SAFETY: as above.
                unsafe { libc::FD_SET(at.fd, set) };
                total += 1;
            }
        }
        total
    }

    /// Too many entries, or no memory for them: waits as the program said.
    #[cold]
    fn wait_unsliced(&self, mask: Option<&sigset_t>, native: impl FnOnce() -> c_int) -> c_int {
        let mut older = [-1; pollfds::STACK_POLLFDS_MAX];
        let mut count = 0;
        for (fd, (sock, shared)) in self.managed_socks() {
            // The next call reports those that have no room here.
            if wait::start_unsliced(sock, shared, fd) && count < older.len() {
                older[count] = fd;
                count += 1;
            }
        }
        queues::flush();
        send_batch::flush();
        let mut answer = if count == 0 {
            native()
        } else {
            let [read, write, except] = self.sets;
            // SAFETY: program arguments.
            unsafe {
                call::pselect(self.count, read, write, except, &raw const real::NO_WAIT, real::or_null(mask))
            }
        };
        let reported = if answer < 0 { &[] } else { &older[..count] };
        for fd in reported {
            let bits = c_ulong::BITS as usize;
            let (nth, bit) = (*fd as usize / bits, 1 << (*fd as usize % bits));
            // SAFETY: a word that was read from this set before.
            let word = unsafe { &mut *self.sets[0].cast::<c_ulong>().add(nth) };
            answer += c_int::from(*word & bit == 0);
            *word |= bit;
        }
        for fd in 0..self.count.min(table::fd_end()) {
            if let Some((sock, shared)) = sock_fds::managed(fd) {
                wait::finish_wait(sock, shared);
            }
        }
        answer
    }
}
