//! The list: every function that the library stands in front of, and the function that handles it.
//!
//! It is expanded twice: into the C library's functions (`real.rs`), which all modules may call,
//! and into the exports of the same names (`exports.rs`), which call the modules.

/// Types and numbers that the list names.
pub(crate) mod types {
    pub(crate) use libc::{
        FILE, SYS_accept, SYS_accept4, SYS_bind, SYS_close, SYS_close_range, SYS_connect, SYS_dup, SYS_dup3,
        SYS_epoll_create1, SYS_epoll_ctl, SYS_eventfd2, SYS_exit_group, SYS_fcntl, SYS_getpeername,
        SYS_getsockname, SYS_getsockopt, SYS_inotify_init1, SYS_ioctl, SYS_memfd_create, SYS_nanosleep,
        SYS_openat, SYS_pipe2, SYS_prctl, SYS_read, SYS_readv, SYS_recvfrom, SYS_recvmmsg, SYS_recvmsg,
        SYS_sendmmsg, SYS_sendmsg, SYS_sendto, SYS_setns, SYS_setsockopt, SYS_shutdown, SYS_socket,
        SYS_socketpair, SYS_timerfd_create, SYS_unshare, SYS_write, SYS_writev, c_char, c_int, c_uint,
        c_ulong, c_void, epoll_event, fd_set, iovec, mmsghdr, mode_t, msghdr, nfds_t, pid_t, pollfd,
        sighandler_t, sigset_t, size_t, sockaddr, socklen_t, ssize_t, timespec, timeval, uid_t,
    };

    /// Not every architecture has the call.
    #[cfg(target_arch = "x86_64")]
    pub(crate) const OPEN: Option<libc::c_long> = Some(libc::SYS_open);
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) const OPEN: Option<libc::c_long> = None;

    pub(crate) type Args = *const *const c_char;
}

/// Calls the macro `$then` with the list: `fn NAME(ARGS) -> RETURN, SYSCALL => HANDLER;` with
/// `SYSCALL` the number to use before the C library's function is found, or if it has none.
/// `[short]` marks a function that never waits, but may make system calls of the library's own
/// (`quiesce.rs`). `| AFTER` replaces it while there are leftovers (`detached.rs`).
macro_rules! functions {
    ($then:ident) => {
        $then! {
    fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int, Some(SYS_socket) => descriptors::socket [short];
    fn bind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int, Some(SYS_bind) => descriptors::bind [short];
    fn connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int, Some(SYS_connect) => descriptors::connect;
    fn __connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int, Some(SYS_connect)
        => descriptors::connect;
    fn shutdown(fd: c_int, how: c_int) -> c_int, Some(SYS_shutdown) => descriptors::shutdown [short];
    fn getsockname(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int, Some(SYS_getsockname)
        => descriptors::getsockname [short];
    fn getpeername(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int, Some(SYS_getpeername)
        => descriptors::getpeername [short];
    fn close(fd: c_int) -> c_int, Some(SYS_close) => descriptors::close [short] | detached::close;
    fn __close(fd: c_int) -> c_int, Some(SYS_close) => descriptors::close [short] | detached::close;
    fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int, Some(SYS_close_range)
        => descriptors::close_range [short] | detached::close_range;
    fn closefrom(first: c_int) -> (), None => descriptors::closefrom [short] | detached::closefrom;
    fn fclose(file: *mut FILE) -> c_int, None => descriptors::fclose | detached::fclose;
    fn dup(fd: c_int) -> c_int, Some(SYS_dup) => descriptors::dup [short];
    fn dup2(fd: c_int, to: c_int) -> c_int, None => descriptors::dup2 [short] | detached::dup2;
    fn __dup2(fd: c_int, to: c_int) -> c_int, None => descriptors::dup2 [short] | detached::dup2;
    fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int, Some(SYS_dup3) => descriptors::dup3 [short] | detached::dup3;
    fn fcntl(fd: c_int, command: c_int, arg: c_ulong) -> c_int, Some(SYS_fcntl) => descriptors::fcntl;
    fn __fcntl(fd: c_int, command: c_int, arg: c_ulong) -> c_int, Some(SYS_fcntl) => descriptors::fcntl;
    fn fcntl64(fd: c_int, command: c_int, arg: c_ulong) -> c_int, Some(SYS_fcntl) => descriptors::fcntl;
    fn ioctl(fd: c_int, request: c_ulong, arg: *mut c_void) -> c_int, Some(SYS_ioctl) => options::ioctl | detached::ioctl;

    fn open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int, OPEN => new_fds::open;
    fn open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int, OPEN => new_fds::open64;
    fn openat(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int, Some(SYS_openat)
        => new_fds::openat;
    fn openat64(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int, Some(SYS_openat)
        => new_fds::openat64;
    fn __open_2(path: *const c_char, flags: c_int) -> c_int, None => new_fds::open_2;
    fn __open64_2(path: *const c_char, flags: c_int) -> c_int, None => new_fds::open64_2;
    fn __openat_2(folder: c_int, path: *const c_char, flags: c_int) -> c_int, None => new_fds::openat_2;
    fn __openat64_2(folder: c_int, path: *const c_char, flags: c_int) -> c_int, None => new_fds::openat64_2;
    fn creat(path: *const c_char, mode: mode_t) -> c_int, None => new_fds::creat;
    fn creat64(path: *const c_char, mode: mode_t) -> c_int, None => new_fds::creat64;
    fn memfd_create(name: *const c_char, flags: c_uint) -> c_int, Some(SYS_memfd_create) => new_fds::memfd_create [short];
    fn pipe(fds: *mut c_int) -> c_int, None => new_fds::pipe [short];
    fn pipe2(fds: *mut c_int, flags: c_int) -> c_int, Some(SYS_pipe2) => new_fds::pipe2 [short];
    fn socketpair(domain: c_int, kind: c_int, protocol: c_int, fds: *mut c_int) -> c_int, Some(SYS_socketpair)
        => new_fds::socketpair [short];
    fn accept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int, Some(SYS_accept) => new_fds::accept;
    fn accept4(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int, Some(SYS_accept4)
        => new_fds::accept4;
    fn eventfd(count: c_uint, flags: c_int) -> c_int, Some(SYS_eventfd2) => new_fds::eventfd [short];
    fn timerfd_create(clock: c_int, flags: c_int) -> c_int, Some(SYS_timerfd_create) => new_fds::timerfd_create [short];
    fn signalfd(fd: c_int, mask: *const sigset_t, flags: c_int) -> c_int, None => new_fds::signalfd [short];
    fn inotify_init() -> c_int, None => new_fds::inotify_init [short];
    fn inotify_init1(flags: c_int) -> c_int, Some(SYS_inotify_init1) => new_fds::inotify_init1 [short];

    fn setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int,
        Some(SYS_setsockopt) => options::setsockopt [short];
    fn getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int,
        Some(SYS_getsockopt) => options::getsockopt [short];

    fn recv(fd: c_int, to: *mut c_void, len: size_t, flags: c_int) -> ssize_t, None => receive::recv | receive::recv;
    fn recvfrom(fd: c_int, to: *mut c_void, len: size_t, flags: c_int, from: *mut sockaddr, fromlen: *mut socklen_t)
        -> ssize_t, Some(SYS_recvfrom) => receive::recvfrom | receive::recvfrom;
    fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t, Some(SYS_recvmsg) => receive::recvmsg | receive::recvmsg;
    fn recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int,
        Some(SYS_recvmmsg) => receive::recvmmsg | receive::recvmmsg;
    fn read(fd: c_int, to: *mut c_void, len: size_t) -> ssize_t, Some(SYS_read) => receive::read | receive::read;
    fn __read(fd: c_int, to: *mut c_void, len: size_t) -> ssize_t, Some(SYS_read) => receive::read | receive::read;
    fn readv(fd: c_int, to: *const iovec, count: c_int) -> ssize_t, Some(SYS_readv) => receive::readv | receive::readv;
    fn __recv_chk(fd: c_int, to: *mut c_void, len: size_t, room: size_t, flags: c_int) -> ssize_t, None
        => receive::recv_chk | receive::recv_chk;
    fn __recvfrom_chk(
        fd: c_int, to: *mut c_void, len: size_t, room: size_t, flags: c_int, from: *mut sockaddr,
        fromlen: *mut socklen_t
    ) -> ssize_t, None => receive::recvfrom_chk | receive::recvfrom_chk;
    fn __read_chk(fd: c_int, to: *mut c_void, len: size_t, room: size_t) -> ssize_t, None => receive::read_chk | receive::read_chk;

    fn send(fd: c_int, from: *const c_void, len: size_t, flags: c_int) -> ssize_t, None => send::send;
    fn __send(fd: c_int, from: *const c_void, len: size_t, flags: c_int) -> ssize_t, None => send::send;
    fn sendto(fd: c_int, from: *const c_void, len: size_t, flags: c_int, to: *const sockaddr, tolen: socklen_t)
        -> ssize_t, Some(SYS_sendto) => send::sendto;
    fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t, Some(SYS_sendmsg) => send::sendmsg;
    fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int, Some(SYS_sendmmsg)
        => send::sendmmsg;
    fn __sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int, Some(SYS_sendmmsg)
        => send::sendmmsg;
    fn write(fd: c_int, from: *const c_void, len: size_t) -> ssize_t, Some(SYS_write) => send::write;
    fn __write(fd: c_int, from: *const c_void, len: size_t) -> ssize_t, Some(SYS_write) => send::write;
    fn writev(fd: c_int, from: *const iovec, count: c_int) -> ssize_t, Some(SYS_writev) => send::writev;

    fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int, None => wait::poll | wait::poll;
    fn __poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int, None => wait::poll | wait::poll;
    fn __poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, room: size_t) -> c_int, None => wait::poll_chk | wait::poll_chk;
    fn ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int, None
        => wait::ppoll | wait::ppoll;
    fn __ppoll_chk(
        fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t, room: size_t
    ) -> c_int, None => wait::ppoll_chk | wait::ppoll_chk;
    fn select(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval) -> c_int,
        None => select::select | select::select;
    fn __select(
        count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval
    ) -> c_int, None => select::select | select::select;
    fn pselect(
        count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *const timespec,
        mask: *const sigset_t
    ) -> c_int, None => select::pselect | select::pselect;

    fn epoll_create(size: c_int) -> c_int, None => epoll::epoll_create [short];
    fn epoll_create1(flags: c_int) -> c_int, Some(SYS_epoll_create1) => epoll::epoll_create1 [short];
    fn epoll_ctl(epfd: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int, Some(SYS_epoll_ctl)
        => epoll::epoll_ctl [short] | detached::epoll_ctl;
    fn epoll_wait(epfd: c_int, events: *mut epoll_event, count: c_int, timeout: c_int) -> c_int, None
        => epoll::epoll_wait | epoll::epoll_wait;
    fn epoll_pwait(epfd: c_int, events: *mut epoll_event, count: c_int, timeout: c_int, mask: *const sigset_t)
        -> c_int, None => epoll::epoll_pwait | epoll::epoll_pwait;
    fn epoll_pwait2(
        epfd: c_int, events: *mut epoll_event, count: c_int, timeout: *const timespec, mask: *const sigset_t
    ) -> c_int, None => epoll::epoll_pwait2 | epoll::epoll_pwait2;

    fn sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int, None
        => handlers::sigaction [short];
    fn __sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int, None
        => handlers::sigaction [short];
    fn signal(signal: c_int, handler: sighandler_t) -> sighandler_t, None => handlers::signal [short];
    fn bsd_signal(signal: c_int, handler: sighandler_t) -> sighandler_t, None => handlers::bsd_signal [short];
    fn ssignal(signal: c_int, handler: sighandler_t) -> sighandler_t, None => handlers::ssignal [short];
    fn sysv_signal(signal: c_int, handler: sighandler_t) -> sighandler_t, None => handlers::sysv_signal [short];
    fn __sysv_signal(signal: c_int, handler: sighandler_t) -> sighandler_t, None => handlers::sysv_signal_alias [short];
    fn sigset(signal: c_int, handler: sighandler_t) -> sighandler_t, None => handlers::sigset [short];
    fn sigignore(signal: c_int) -> c_int, None => handlers::sigignore [short];
    fn siginterrupt(signal: c_int, interrupts: c_int) -> c_int, None => handlers::siginterrupt [short];

    fn prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int, Some(SYS_prctl) => seccomp::prctl;

    fn unshare(what: c_int) -> c_int, Some(SYS_unshare) => process::unshare;
    fn setns(fd: c_int, kind: c_int) -> c_int, Some(SYS_setns) => process::setns;
    fn setuid(uid: uid_t) -> c_int, None => process::setuid [short];
    fn seteuid(uid: uid_t) -> c_int, None => process::seteuid [short];
    fn setreuid(real: uid_t, effective: uid_t) -> c_int, None => process::setreuid [short];
    fn setresuid(real: uid_t, effective: uid_t, saved: uid_t) -> c_int, None => process::setresuid [short];
    fn execve(path: *const c_char, args: Args, env: Args) -> c_int, None => process::execve;
    fn execv(path: *const c_char, args: Args) -> c_int, None => process::execv;
    fn execvp(path: *const c_char, args: Args) -> c_int, None => process::execvp;
    fn execvpe(path: *const c_char, args: Args, env: Args) -> c_int, None => process::execvpe;
    fn fexecve(fd: c_int, args: Args, env: Args) -> c_int, None => process::fexecve;
    fn posix_spawn(
        pid: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, args: Args, env: Args
    ) -> c_int, None => process::posix_spawn;
    fn _exit(status: c_int) -> (), Some(SYS_exit_group) => process::exit_now;
    fn _Exit(status: c_int) -> (), Some(SYS_exit_group) => process::exit_now;
    fn quick_exit(status: c_int) -> (), None => process::quick_exit;
    fn sleep(seconds: c_uint) -> c_int, None => process::sleep;
    fn usleep(microseconds: c_uint) -> c_int, None => process::usleep;
    fn nanosleep(time: *const timespec, left: *mut timespec) -> c_int, Some(SYS_nanosleep) => process::nanosleep;
    fn clock_nanosleep(clock: c_int, flags: c_int, time: *const timespec, left: *mut timespec) -> c_int, None
        => process::clock_nanosleep;
    fn posix_spawnp(
        pid: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, args: Args, env: Args
    ) -> c_int, None => process::posix_spawnp;
        }
    };
}
pub(crate) use functions;
