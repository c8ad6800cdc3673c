//! Calls that open, copy and close descriptors: the table follows them.
//!
//! Any thread may close a descriptor at any time, and its number may then mean something else. A
//! thread that acts on a socket without a call of the program on it (before a fork, falling back,
//! recovery) first makes a copy of its own (`hidden_fds::HiddenFd`) and checks that it is the
//! right socket. A copy cannot stand in for an entry of an epoll instance, which belongs to the
//! number that the program added. There a thread that closes a descriptor, or gives its number
//! away, waits until the instance has been updated ([`lock_entry`]).

use std::sync::atomic::Ordering;
use std::time::Duration;

use libc::{FILE, c_int, c_ulong, sockaddr, socklen_t};
use manylane_ipc::report::Reason;

use crate::base::quiesce;
use crate::base::real::{self, call, fail_with_errno};
use crate::batching::send_batch;
use crate::calls::options;
use crate::fds::table::{self, Entry};
use crate::fds::{hidden_fds, identity};
use crate::lanes::create;
use crate::lanes::entries::{self, lock_entry, release};
use crate::lanes::epoll_set::Epoll;
use crate::lanes::fallback;
use crate::lanes::registry::{clear_stale, register, release_replaced};
use crate::shared::sock::Sock;
use crate::shared::{report, thread};
use crate::transfer::detached;

/// Checks of a number that the library uses for a moment, and the time between two. In total as
/// long as the wait for a lock.
const FD_BUSY_RETRIES: u32 = 10_000;
const RETRY_INTERVAL: Duration = Duration::from_micros(500);

pub(crate) fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    let fd = call::socket(domain, kind, protocol);
    if fd < 0 {
        return fd;
    }
    let udp = matches!(domain, libc::AF_INET | libc::AF_INET6)
        && kind & !(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) == libc::SOCK_DGRAM
        && matches!(protocol, 0 | libc::IPPROTO_UDP);
    let entry = if udp && thread::is_own_process() { Sock::alloc(identity::cookie(fd)) } else { None };
    register(fd, entry.map_or(Entry::None, |sock| Entry::Sock(sock.index())));
    fd
}

/// The entry for `copy`, a duplicate of `fd`, which is counted as one more descriptor.
fn share(fd: c_int, copy: c_int) -> Entry {
    let entry = table::entry(fd);
    match entry {
        Entry::Sock(index) if identity::is_same_socket(Sock::at(index), copy) => {
            Sock::at(index).refs.fetch_add(1, Ordering::AcqRel);
        }
        Entry::Epoll(index) => Epoll::at(index).acquire(),
        _ => return Entry::None,
    }
    entry
}

/// Registers `new` as a duplicate of `fd`.
fn add_dup(fd: c_int, new: c_int) {
    if thread::is_own_process() {
        register(new, share(fd, new));
    } else {
        // In the child of a vfork: for the program that it is about to execute. The parent's table
        // does not show copies, so one that closes on exec counts, too: a copy of it may not.
        fallback::before_exec_with_copy(fd, new);
    }
}

pub(crate) unsafe fn bind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: program arguments.
    let own = |fd| unsafe { call::bind(fd, addr, len) };
    let Some(sock) = entries::sock(fd).filter(|_| thread::is_own_process()) else {
        return own(hidden_fds::kernel_fd(fd));
    };
    create::before_bind(sock, fd);
    let mut done = own(fd);
    // SAFETY: program arguments.
    let sweep = || unsafe { entries::sweep_addr(addr, len) };
    // The port may belong to lanes, or to a group with lanes, of a socket that was closed unseen.
    if done == 0 {
        sweep();
    } else if real::errno() == libc::EADDRINUSE && sweep() {
        done = own(fd);
    }
    if done == 0 {
        create::bind(sock, fd);
    }
    done
}

pub(crate) unsafe fn connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
    send_batch::flush_unless_vforked();
    fallback::fall_back_fd(fd, Reason::Connect);
    // SAFETY: program arguments.
    unsafe { call::connect(hidden_fds::kernel_fd(fd), addr, len) }
}

pub(crate) fn shutdown(fd: c_int, how: c_int) -> c_int {
    send_batch::flush_unless_vforked();
    fallback::fall_back_fd(fd, Reason::Shutdown);
    call::shutdown(hidden_fds::kernel_fd(fd), how)
}

pub(crate) unsafe fn getsockname(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: program arguments.
    unsafe { call::getsockname(hidden_fds::kernel_fd(fd), addr, len) }
}

pub(crate) unsafe fn getpeername(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: program arguments.
    unsafe { call::getpeername(hidden_fds::kernel_fd(fd), addr, len) }
}

pub(crate) fn close(fd: c_int) -> c_int {
    close_with(fd, || call::close(fd))
}

/// The program closes `fd` with the call `close`.
pub(crate) fn close_with(fd: c_int, close: impl FnOnce() -> c_int) -> c_int {
    // Also from outside: syscall(2), fclose(3).
    match quiesce::run_inside(|| before_close(fd)) {
        Some(true) => {}
        Some(false) => return fail_with_errno(libc::EBADF),
        None => detached::before_close(fd),
    }
    close()
}

/// The program is about to close `fd`. False if it does not have this descriptor.
fn before_close(fd: c_int) -> bool {
    send_batch::flush_unless_vforked();
    match table::entry(fd) {
        Entry::None => {}
        _ if !thread::is_own_process() => {}
        Entry::Hidden => return false,
        _ => unregister(fd),
    }
    true
}

/// Removes the entry of a program's descriptor that is about to be closed.
pub(super) fn unregister(fd: c_int) {
    let guard = lock_entry(fd);
    let before = table::set(fd, Entry::None);
    drop(guard);
    release(before.unwrap_or(Entry::None));
}

pub(crate) unsafe fn fclose(file: *mut FILE) -> c_int {
    let errno = real::errno();
    // SAFETY: program arguments.
    let fd = unsafe { libc::fileno(file) };
    real::set_errno(errno);
    // SAFETY: program arguments.
    close_with(fd, || unsafe { call::fclose(file) })
}

pub(crate) fn dup(fd: c_int) -> c_int {
    let new = call::dup(hidden_fds::kernel_fd(fd));
    if new >= 0 {
        add_dup(fd, new);
    }
    new
}

pub(crate) fn dup2(fd: c_int, to: c_int) -> c_int {
    dup_to(fd, to, call::dup2)
}

pub(crate) fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    dup_to(fd, to, |fd, to| call::dup3(fd, to, flags))
}

/// The program duplicates `fd` to a number of its choice, with the call `by`.
fn dup_to(fd: c_int, to: c_int, by: impl Fn(c_int, c_int) -> c_int) -> c_int {
    send_batch::flush_unless_vforked();
    let seen = hidden_fds::kernel_fd(fd);
    if seen != fd {
        return by(seen, if fd == to { seen } else { to });
    }
    if fd == to {
        return by(fd, to);
    }
    if !thread::is_own_process() {
        let new = by(fd, to);
        if new >= 0 {
            add_dup(fd, new);
        }
        return new;
    }
    for _ in 0..FD_BUSY_RETRIES {
        let numbers = hidden_fds::lock();
        let mut moved = false;
        if table::entry(to) == Entry::Hidden {
            match vacate(to) {
                Vacated::Moved => moved = true,
                Vacated::Overwrite => {}
                Vacated::Refused => break,
                Vacated::Busy => {
                    drop(numbers);
                    std::thread::sleep(RETRY_INTERVAL);
                    continue;
                }
            }
        }
        let guard = lock_entry(to);
        let new = by(fd, to);
        if new < 0 {
            if moved {
                let errno = real::errno();
                call::close(to);
                real::set_errno(errno);
            }
            return new;
        }
        let entry = share(fd, to);
        let before = table::set(to, entry);
        drop(guard);
        drop(numbers);
        release_replaced(to, entry, before);
        return new;
    }
    fail_with_errno(libc::EBUSY)
}

pub(crate) unsafe fn fcntl(fd: c_int, command: c_int, arg: c_ulong) -> c_int {
    // SAFETY: program arguments.
    let own = |fd| unsafe { call::fcntl(fd, command, arg) };
    let entry = table::entry(fd);
    if entry == Entry::None {
        let done = own(fd);
        return if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) {
            clear_stale(done)
        } else {
            done
        };
    }
    let tracked = || {
        let done = own(hidden_fds::kernel_fd(fd));
        after_fcntl(fd, command, arg, done);
        done
    };
    quiesce::run_inside(tracked).unwrap_or_else(|| own(fd))
}

fn after_fcntl(fd: c_int, command: c_int, arg: c_ulong, done: c_int) {
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC if done >= 0 => add_dup(fd, done),
        libc::F_SETFL if done >= 0 => {
            if let Some((sock, shared)) = entries::sock(fd).and_then(|sock| Some((sock, sock.shared()?))) {
                options::update_nonblocking(fd, shared);
                if arg & libc::O_ASYNC as c_ulong != 0 {
                    fallback::fall_back(sock, fd, Reason::Ioctl);
                }
            }
        }
        _ => {}
    }
}

/// Outcome for a hidden descriptor whose number the program wants.
enum Vacated {
    /// It was a lane's, and has moved: the number is free.
    Moved,
    /// The kernel decides: it is not worth failing the call for.
    Overwrite,
    /// It is in use for a moment: try again.
    Busy,
    Refused,
}

/// The program wants the number of a hidden descriptor. Requires the lock.
fn vacate(to: c_int) -> Vacated {
    // The kernel refuses it: the program has lowered its limit below the number.
    if to as u64 >= hidden_fds::fd_limit() {
        return Vacated::Overwrite;
    }
    // Queues cannot move.
    if is_leased(to) {
        return Vacated::Refused;
    }
    if report::is_report_fd(to) || hidden_fds::readable_fd_if_open() == Some(to) {
        return Vacated::Overwrite;
    }
    let lanes = Sock::in_use().flat_map(|sock| sock.lane_fds().map(move |(lane, fd)| (sock, lane, fd)));
    let Some((sock, lane, _)) = lanes.into_iter().find(|(_, _, fd)| *fd == to) else { return Vacated::Busy };
    let new = real::dup_from(to, to as c_ulong + 1);
    if new < 0 {
        return Vacated::Refused;
    }
    table::set(new, Entry::Hidden);
    // A thread that has waited too long for the lock takes its lanes without it.
    if !sock.replace_lane_fd(lane, to, Some(new)) {
        hidden_fds::close_locked(new);
        return Vacated::Busy;
    }
    table::replace(to, Entry::Hidden, Entry::None);
    Vacated::Moved
}

/// True if a descriptor belongs to a lease.
fn is_leased(fd: c_int) -> bool {
    Sock::in_use().filter_map(Sock::lease).any(|lease| lease.has_fd(fd))
}
