//! ppoll(2) by select(2). ppoll(2) refuses more entries than the limit of open files
//! (`RLIMIT_NOFILE`), and a program may lower that below the number of entries that the library
//! polls: to 1 or to 0, so that it can open nothing. select(2) has no such limit.

use std::cell::Cell;
use std::ptr;

use libc::{POLLERR, POLLHUP, POLLIN, POLLOUT, POLLPRI, POLLRDNORM, POLLWRNORM};
use libc::{c_int, c_long, c_ulong, pollfd, sigset_t, timespec};

/// The band events that the kernel counts as readable and as writable.
const RDBAND: i16 = 0x80;
const WRBAND: i16 = 0x200;

/// For each set of select(2), the events to poll for, and the results that count for it; in the
/// order of the call's arguments.
pub(crate) const SET_EVENTS: [(i16, i16); 3] = [
    (POLLIN | POLLRDNORM | RDBAND, POLLIN | POLLRDNORM | RDBAND | POLLHUP | POLLERR),
    (POLLOUT | POLLWRNORM | WRBAND, POLLOUT | POLLWRNORM | WRBAND | POLLERR),
    (POLLPRI, POLLPRI),
];

const WORD_BITS: usize = c_ulong::BITS as usize;

/// A set of the C library's size.
type Set = [c_ulong; libc::FD_SETSIZE / WORD_BITS];

/// As ppoll(2), but an error of a file counts as readable and writable, and a descriptor that is
/// not open fails the call with EBADF. A descriptor beyond the sets is polled and not waited for.
/// No cancellation point.
#[cold]
#[inline(never)]
pub(crate) fn ppoll(fds: &[Cell<pollfd>], timeout: timespec, mask: Option<&sigset_t>) -> c_int {
    let mut sets: [Set; SET_EVENTS.len()] = Default::default();
    let (mut end, mut ready) = (0, 0);
    for entry in fds {
        let at = pollfd { revents: 0, ..entry.get() };
        entry.set(at);
        let Ok(fd) = usize::try_from(at.fd) else { continue };
        if fd >= libc::FD_SETSIZE {
            ready += c_int::from(poll_alone(entry));
            continue;
        }
        for (set, (asked, _)) in sets.iter_mut().zip(SET_EVENTS) {
            set[fd / WORD_BITS] |= c_ulong::from(at.events & asked != 0) << (fd % WORD_BITS);
        }
        end = end.max(fd + 1);
    }
    if pselect(end, &mut sets, if ready > 0 { ZERO } else { timeout }, mask) < 0 {
        return -1;
    }
    for entry in fds {
        let at = entry.get();
        let Some(fd) = usize::try_from(at.fd).ok().filter(|fd| *fd < libc::FD_SETSIZE) else { continue };
        let is_set = |set: &Set| set[fd / WORD_BITS] >> (fd % WORD_BITS) & 1 != 0;
        let found = sets.iter().zip(SET_EVENTS).filter(|(set, _)| is_set(set));
        let revents = at.events & found.fold(0, |all, (_, (asked, _))| all | asked);
        entry.set(pollfd { revents, ..at });
        ready += c_int::from(revents != 0);
    }
    ready
}

const ZERO: timespec = timespec { tv_sec: 0, tv_nsec: 0 };

/// Size of the kernel's signal set; the C library's is longer.
const KERNEL_MASK_LEN: usize = 8;

/// pselect(2) as a direct system call, of descriptors before `end`.
fn pselect(end: usize, sets: &mut [Set; 3], mut timeout: timespec, mask: Option<&sigset_t>) -> c_long {
    /// The last argument.
    #[repr(C)]
    struct Mask(*const sigset_t, usize);
    let mask = Mask(mask.map_or(ptr::null(), ptr::from_ref), KERNEL_MASK_LEN);
    let [read, write, except] = sets;
    // SAFETY: all arguments live through the call; `end` is at most the size of the sets.
    unsafe {
        libc::syscall(
            libc::SYS_pselect6,
            end,
            read.as_mut_ptr(),
            write.as_mut_ptr(),
            except.as_mut_ptr(),
            &raw mut timeout,
            &raw const mask,
        )
    }
}

/// Polls one entry; true if it has an event. If the limit is zero, it may have any: whoever acts on
/// it finds out.
fn poll_alone(entry: &Cell<pollfd>) -> bool {
    let (mut time, no_mask) = (ZERO, ptr::null::<sigset_t>());
    // SAFETY: all arguments live through the call, which writes the entry, a cell.
    let done =
        unsafe { libc::syscall(libc::SYS_ppoll, entry.as_ptr(), 1, &raw mut time, no_mask, KERNEL_MASK_LEN) };
    if done < 0 {
        entry.set(pollfd { revents: entry.get().events, ..entry.get() });
    }
    entry.get().revents != 0
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
    use std::time::{Duration, Instant};

    use manylane_testbed::skip;

    use super::*;

    fn polled(entries: &[(c_int, i16)], timeout: timespec) -> (c_int, Vec<i16>) {
        let entry = |(fd, events): &(c_int, i16)| Cell::new(pollfd { fd: *fd, events: *events, revents: -1 });
        let fds: Vec<_> = entries.iter().map(entry).collect();
        (ppoll(&fds, timeout, None), fds.iter().map(|at| at.get().revents).collect())
    }

    #[test]
    fn select_returns_the_results_of_poll() {
        let [full, empty] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        full.send_to(b"x", full.local_addr().unwrap()).unwrap();
        let (full, empty) = (full.as_raw_fd(), empty.as_raw_fd());
        let entries = [
            (full, POLLIN),
            (empty, POLLIN),
            (full, POLLPRI),
            (empty, POLLIN | POLLOUT),
            (full, 0),
            (-1, POLLIN),
        ];
        let hour = timespec { tv_sec: 3600, tv_nsec: 0 };
        for timeout in [ZERO, hour] {
            assert_eq!(polled(&entries, timeout), (2, vec![POLLIN, 0, 0, POLLOUT, 0, 0]));
        }
        assert_eq!(polled(&[(empty, POLLIN)], ZERO), (0, vec![0]));
        let start = Instant::now();
        assert_eq!(polled(&[(empty, POLLIN)], timespec { tv_sec: 0, tv_nsec: 10_000_000 }), (0, vec![0]));
        assert!(start.elapsed() >= Duration::from_millis(10));
        assert_eq!(polled(&[(full, POLLIN), (c_int::MAX, 0)], ZERO).0, 2, "one that is not open");
    }

    #[test]
    fn descriptors_beyond_the_sets_are_polled_by_themselves() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let first = libc::FD_SETSIZE as c_int;
        // SAFETY: the argument of this command is a number.
        let high = unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_DUPFD_CLOEXEC, first) };
        let name = "descriptors_beyond_the_sets_are_polled_by_themselves";
        if !skip::need(name, high >= 0, "the limit of open files is at most 1024") {
            return;
        }
        // SAFETY: the descriptor is new and has no other owner.
        let _high = unsafe { OwnedFd::from_raw_fd(high) };
        let entries = [(socket.as_raw_fd(), POLLIN), (high, POLLIN)];
        assert_eq!(polled(&entries, ZERO), (0, vec![0, 0]));
        socket.send_to(b"x", socket.local_addr().unwrap()).unwrap();
        assert_eq!(polled(&entries, ZERO), (2, vec![POLLIN, POLLIN]));
    }
}
