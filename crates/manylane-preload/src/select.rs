//! select(2), by way of poll(2) where a socket to look after is in a set.

use libc::{POLLERR, POLLHUP, POLLIN, POLLNVAL, POLLOUT, POLLPRI, POLLRDNORM, POLLWRNORM};
use libc::{c_int, fd_set, pollfd, sigset_t, timespec, timeval};

use crate::calls::call;
use crate::receive::is_managed;
use crate::wait::{self, Until};
use crate::{epoll, gather, real, table};

/// Descriptors that a set holds.
const SET: usize = libc::FD_SETSIZE;
/// The bands that the kernel counts as readable and as writable.
const RDBAND: i16 = 0x80;
const WRBAND: i16 = 0x200;

pub(crate) fn select(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    let mut fds = [pollfd { fd: -1, events: 0, revents: 0 }; SET];
    let Some(used) = collect(count, read, write, except, &mut fds) else {
        gather::flush();
        return call::select(count, read, write, except, timeout);
    };
    // SAFETY: null, or the program's timeval, which the kernel would read here, too.
    let time = unsafe { timeout.as_ref() }
        .map(|time| timespec { tv_sec: time.tv_sec, tv_nsec: time.tv_usec * 1000 });
    if time.is_some_and(|time| time.tv_sec < 0 || time.tv_nsec < 0) {
        return call::select(count, read, write, except, timeout);
    }
    let until = Until::after(time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref));
    let answer = wait::sliced(&mut fds[..used], until, std::ptr::null(), |fds| {
        call::poll(fds.as_mut_ptr(), fds.len() as u64, until.left().map_or(-1, ms))
    });
    // Linux says how much of the time was left.
    // SAFETY: as above; nobody else of ours has a reference to it.
    if let (Some(left), Some(timeout)) = (until.left(), unsafe { timeout.as_mut() }) {
        timeout.tv_sec = left.as_secs() as i64;
        timeout.tv_usec = i64::from(left.subsec_micros());
    }
    spread(answer, read, write, except, &fds[..used], count)
}

pub(crate) fn pselect(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    let mut fds = [pollfd { fd: -1, events: 0, revents: 0 }; SET];
    let Some(used) = collect(count, read, write, except, &mut fds) else {
        gather::flush();
        return call::pselect(count, read, write, except, timeout, mask);
    };
    let answer = wait::sliced(&mut fds[..used], Until::after(timeout), mask, |fds| {
        call::ppoll(fds.as_mut_ptr(), fds.len() as u64, timeout, mask)
    });
    spread(answer, read, write, except, &fds[..used], count)
}

/// Milliseconds, rounded up: a wait must not end early.
fn ms(left: std::time::Duration) -> c_int {
    c_int::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(c_int::MAX)
}

fn is_set(set: *mut fd_set, fd: usize) -> bool {
    // SAFETY: null, or the program's set, which has room for FD_SETSIZE descriptors; `fd` is below that.
    !set.is_null() && unsafe { libc::FD_ISSET(fd as c_int, set) }
}

/// The sets as an array for poll(2), if there is a socket to look after in the first one.
fn collect(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    fds: &mut [pollfd; SET],
) -> Option<usize> {
    // Sets longer than the C library's own are not looked through.
    let count = usize::try_from(count).ok().filter(|count| *count <= SET)?;
    let instances =
        (0..count).filter(|fd| is_set(read, *fd)).filter_map(|fd| epoll::is_nested_now(fd as c_int));
    instances.for_each(epoll::nested);
    let ours = |fd: usize| table::sock(fd as c_int).and_then(|sock| sock.shared()).is_some_and(is_managed);
    if !(0..count).any(|fd| is_set(read, fd) && ours(fd)) {
        return None;
    }
    let mut used = 0;
    for fd in 0..count {
        let mut events = 0;
        if is_set(read, fd) {
            events |= POLLIN | POLLRDNORM | RDBAND;
        }
        if is_set(write, fd) {
            events |= POLLOUT | POLLWRNORM | WRBAND;
        }
        if is_set(except, fd) {
            events |= POLLPRI;
        }
        if events != 0 {
            fds[used] = pollfd { fd: fd as c_int, events, revents: 0 };
            used += 1;
        }
    }
    Some(used)
}

/// The answer of poll(2) as the sets that select(2) leaves behind.
fn spread(
    answer: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    fds: &[pollfd],
    count: c_int,
) -> c_int {
    if answer < 0 {
        return answer;
    }
    if fds.iter().any(|at| at.revents & POLLNVAL != 0) {
        real::set_errno(libc::EBADF);
        return -1;
    }
    let mut total = 0;
    let groups = [
        (read, POLLIN | POLLRDNORM, POLLIN | POLLRDNORM | RDBAND | POLLHUP | POLLERR),
        (write, POLLOUT | POLLWRNORM, POLLOUT | POLLWRNORM | WRBAND | POLLERR),
        (except, POLLPRI, POLLPRI),
    ];
    for (set, asked, says) in groups {
        if set.is_null() {
            continue;
        }
        for fd in 0..count {
            // SAFETY: the program's set; `fd` is below FD_SETSIZE (collect made sure).
            unsafe { libc::FD_CLR(fd, set) };
        }
        for at in fds.iter().filter(|at| at.events & asked != 0 && at.revents & says != 0) {
            // SAFETY: as above.
            unsafe { libc::FD_SET(at.fd, set) };
            total += 1;
        }
    }
    total
}
