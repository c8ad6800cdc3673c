//! ppoll(2) by select(2). ppoll(2) refuses more entries than the limit of open files
//! (`RLIMIT_NOFILE`), and a program may lower that below the number of entries that the library
//! polls: to 1 or to 0, so that it can open nothing. select(2) has no such limit, and sets may be
//! longer than the C library's.

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

/// Words of the three sets that are on the stack, which may be small: for the C library's size of a
/// set.
const STACK_WORDS: usize = SET_EVENTS.len() * libc::FD_SETSIZE / WORD_BITS;

/// As ppoll(2), but an error of a file counts as readable and writable, and a descriptor that is
/// not open fails the call with EBADF. No cancellation point.
#[cold]
#[inline(never)]
pub(crate) fn ppoll(fds: &[Cell<pollfd>], timeout: timespec, mask: Option<&sigset_t>) -> c_int {
    let end = fds.iter().map(|entry| i64::from(entry.get().fd) + 1).max().unwrap_or(0).max(0) as usize;
    let len = end.div_ceil(WORD_BITS);
    let words = SET_EVENTS.len() * len;
    if words <= STACK_WORDS {
        return ppoll_in(&mut [0; STACK_WORDS][..words], end, fds, timeout, mask);
    }
    let Some(mapping) = Mapping::new(words) else { return -1 };
    // SAFETY: the mapping has room for so many words, is zero, and only this call has it.
    let sets = unsafe { std::slice::from_raw_parts_mut(mapping.at, words) };
    ppoll_in(sets, end, fds, timeout, mask)
}

/// [`ppoll`] of descriptors before `end`, by three sets of equal length, all zero.
fn ppoll_in(
    sets: &mut [c_ulong],
    end: usize,
    fds: &[Cell<pollfd>],
    timeout: timespec,
    mask: Option<&sigset_t>,
) -> c_int {
    let len = sets.len() / SET_EVENTS.len();
    for entry in fds {
        let at = entry.get();
        let Ok(fd) = usize::try_from(at.fd) else { continue };
        for (nth, (asked, _)) in SET_EVENTS.iter().enumerate() {
            let bit = c_ulong::from(at.events & asked != 0) << (fd % WORD_BITS);
            sets[nth * len + fd / WORD_BITS] |= bit;
        }
    }
    if pselect(end, sets, timeout, mask) < 0 {
        return -1;
    }
    let mut ready = 0;
    for entry in fds {
        let mut at = pollfd { revents: 0, ..entry.get() };
        if let Ok(fd) = usize::try_from(at.fd) {
            for (nth, (asked, _)) in SET_EVENTS.iter().enumerate() {
                let is_set = sets[nth * len + fd / WORD_BITS] >> (fd % WORD_BITS) & 1 != 0;
                at.revents |= if is_set { at.events & asked } else { 0 };
            }
        }
        entry.set(at);
        ready += c_int::from(at.revents != 0);
    }
    ready
}

/// Words of sets, all zero, until it is dropped.
struct Mapping {
    at: *mut c_ulong,
    bytes: usize,
}

impl Mapping {
    /// None, with `errno`, if there is no memory.
    fn new(words: usize) -> Option<Self> {
        let bytes = words * size_of::<c_ulong>();
        let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let at = unsafe { libc::mmap(ptr::null_mut(), bytes, rights, kind, -1, 0) };
        (at != libc::MAP_FAILED).then_some(Self { at: at.cast(), bytes })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, which is no longer used.
        unsafe { libc::munmap(self.at.cast(), self.bytes) };
    }
}

/// Size of the kernel's signal set; the C library's is longer.
const KERNEL_MASK_LEN: usize = 8;

/// pselect(2) as a direct system call, of descriptors before `end`.
fn pselect(end: usize, sets: &mut [c_ulong], mut timeout: timespec, mask: Option<&sigset_t>) -> c_long {
    /// The last argument.
    #[repr(C)]
    struct Mask(*const sigset_t, usize);
    let mask = Mask(mask.map_or(ptr::null(), ptr::from_ref), KERNEL_MASK_LEN);
    let len = sets.len() / SET_EVENTS.len();
    let [read, write, except] = [0, 1, 2].map(|nth| sets[nth * len..].as_mut_ptr());
    // SAFETY: all arguments live through the call; each set has a bit for every descriptor before
    // `end`.
    unsafe { libc::syscall(libc::SYS_pselect6, end, read, write, except, &raw mut timeout, &raw const mask) }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
    use std::time::{Duration, Instant};

    use manylane_testbed::skip;

    use super::*;

    const ZERO: timespec = timespec { tv_sec: 0, tv_nsec: 0 };

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
    }

    #[test]
    fn descriptors_beyond_the_sets_of_the_c_library_are_waited_for() {
        let (quiet, socket) =
            (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        let first = libc::FD_SETSIZE as c_int;
        // SAFETY: the argument of this command is a number.
        let high = unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_DUPFD_CLOEXEC, first) };
        let name = "descriptors_beyond_the_sets_of_the_c_library_are_waited_for";
        if !skip::need(name, high >= 0, "the limit of open files is at most 1024") {
            return;
        }
        // SAFETY: the descriptor is new and has no other owner.
        let _high = unsafe { OwnedFd::from_raw_fd(high) };
        let entries = [(quiet.as_raw_fd(), POLLIN), (high, POLLIN), (-1, POLLIN)];
        let start = Instant::now();
        assert_eq!(polled(&entries, timespec { tv_sec: 0, tv_nsec: 10_000_000 }), (0, vec![0; 3]));
        assert!(start.elapsed() >= Duration::from_millis(10));
        let (peer, to) = (UdpSocket::bind("127.0.0.1:0").unwrap(), socket.local_addr().unwrap());
        let sender = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            peer.send_to(b"x", to).unwrap()
        });
        let long = timespec { tv_sec: 120, tv_nsec: 0 };
        assert_eq!(polled(&entries, long), (1, vec![0, POLLIN, 0]));
        sender.join().unwrap();
    }
}
