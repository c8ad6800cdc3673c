//! The list: every function that the library stands in front of, and the function that handles it.
//!
//! It is expanded twice: into the C library's functions (`real.rs`), which all modules may call,
//! and into the exports of the same names (`exports.rs`), which call the modules.
//!
//! # Safety
//!
//! Each `unsafe fn` of the list, its handler, and each other one that passes pointers of the
//! program on have one contract, *program arguments*: pointers, and numbers that are addresses,
//! are those that the program passed to the C function of that name, or the library's own with the
//! same meaning. Until the call returns, the library may read and write through them what the
//! kernel may by that function's contract; null is checked where the kernel checks it. A type that
//! keeps such pointers has a constructor with this contract, and is safe to use during the call.

/// Types and numbers that the list names.
pub(crate) mod types {
    pub(crate) use libc::{
        FILE, SYS_accept, SYS_accept4, SYS_bind, SYS_close, SYS_close_range, SYS_connect, SYS_dup, SYS_dup3,
        SYS_epoll_create1, SYS_epoll_ctl, SYS_eventfd2, SYS_execveat, SYS_exit_group, SYS_fcntl,
        SYS_getpeername, SYS_getsockname, SYS_getsockopt, SYS_inotify_init1, SYS_ioctl, SYS_memfd_create,
        SYS_nanosleep, SYS_openat, SYS_pipe2, SYS_prctl, SYS_read, SYS_readv, SYS_recvfrom, SYS_recvmmsg,
        SYS_recvmsg, SYS_sendmmsg, SYS_sendmsg, SYS_sendto, SYS_setns, SYS_setsockopt, SYS_shutdown,
        SYS_socket, SYS_socketpair, SYS_timerfd_create, SYS_unshare, SYS_write, SYS_writev, c_char, c_int,
        c_uint, c_ulong, c_void, epoll_event, fd_set, iovec, mmsghdr, mode_t, msghdr, nfds_t, pid_t, pollfd,
        sighandler_t, sigset_t, size_t, sockaddr, socklen_t, ssize_t, timespec, timeval, uid_t,
    };

    /// Not every architecture has the call.
    #[cfg(target_arch = "x86_64")]
    pub(crate) const OPEN: Option<libc::c_long> = Some(libc::SYS_open);
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) const OPEN: Option<libc::c_long> = None;

    /// A vector of arguments that ends with a null pointer, as for execv(3).
    pub(crate) type Args = *const *const c_char;
}

/// Calls the macro `$then` with the list: `SAFETY fn NAME(ARGS) -> RETURN, SYSCALL => HANDLER;`.
/// `SAFETY` is `unsafe` if an argument is a pointer, or a number that may be an address: the
/// contract is that of *program arguments* above. `SYSCALL` is the number to use before the C
/// library's function is found, or if it has none.
/// `[short]` marks a function that never waits, but may make system calls of the library's own
/// (`quiesce.rs`). `[before]`: the handler runs before the C library's function. `[after]`: it gets
/// that function's result, and returns it; `[after ARG]`: with that argument of the call. `| AFTER`
/// replaces the handler while there are leftovers (`detached.rs`).
macro_rules! functions {
    ($then:ident) => {
        $then! {
    safe fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int, Some(SYS_socket) => descriptors::socket [short];
    unsafe fn bind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int, Some(SYS_bind) => descriptors::bind [short];
    unsafe fn connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int, Some(SYS_connect) => descriptors::connect;
    unsafe fn __connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int, Some(SYS_connect)
        => descriptors::connect;
    safe fn shutdown(fd: c_int, how: c_int) -> c_int, Some(SYS_shutdown) => descriptors::shutdown [short];
    unsafe fn getsockname(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int, Some(SYS_getsockname)
        => descriptors::getsockname [short];
    unsafe fn getpeername(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int, Some(SYS_getpeername)
        => descriptors::getpeername [short];
    safe fn close(fd: c_int) -> c_int, Some(SYS_close) => descriptors::close [short] | detached::close;
    safe fn __close(fd: c_int) -> c_int, Some(SYS_close) => descriptors::close [short] | detached::close;
    safe fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int, Some(SYS_close_range)
        => close_range::close_range [short] | detached::close_range;
    safe fn closefrom(first: c_int) -> (), None => close_range::closefrom [short] | detached::closefrom;
    unsafe fn fclose(file: *mut FILE) -> c_int, None => descriptors::fclose | detached::fclose;
    safe fn dup(fd: c_int) -> c_int, Some(SYS_dup) => descriptors::dup [short];
    safe fn dup2(fd: c_int, to: c_int) -> c_int, None => descriptors::dup2 [short] | detached::dup2;
    safe fn __dup2(fd: c_int, to: c_int) -> c_int, None => descriptors::dup2 [short] | detached::dup2;
    safe fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int, Some(SYS_dup3) => descriptors::dup3 [short] | detached::dup3;
    unsafe fn fcntl(fd: c_int, command: c_int, arg: c_ulong) -> c_int, Some(SYS_fcntl) => descriptors::fcntl;
    unsafe fn __fcntl(fd: c_int, command: c_int, arg: c_ulong) -> c_int, Some(SYS_fcntl) => descriptors::fcntl;
    unsafe fn fcntl64(fd: c_int, command: c_int, arg: c_ulong) -> c_int, Some(SYS_fcntl) => descriptors::fcntl;
    unsafe fn ioctl(fd: c_int, request: c_ulong, arg: *mut c_void) -> c_int, Some(SYS_ioctl) => options::ioctl | detached::ioctl;

    unsafe fn open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int, OPEN => registry::clear_stale [after];
    unsafe fn open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int, OPEN => registry::clear_stale [after];
    unsafe fn openat(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int, Some(SYS_openat)
        => new_fds::openat;
    unsafe fn openat64(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int, Some(SYS_openat)
        => new_fds::openat64;
    unsafe fn __open_2(path: *const c_char, flags: c_int) -> c_int, None => registry::clear_stale [after];
    unsafe fn __open64_2(path: *const c_char, flags: c_int) -> c_int, None => registry::clear_stale [after];
    unsafe fn __openat_2(folder: c_int, path: *const c_char, flags: c_int) -> c_int, None => new_fds::openat_2;
    unsafe fn __openat64_2(folder: c_int, path: *const c_char, flags: c_int) -> c_int, None => new_fds::openat64_2;
    unsafe fn creat(path: *const c_char, mode: mode_t) -> c_int, None => registry::clear_stale [after];
    unsafe fn creat64(path: *const c_char, mode: mode_t) -> c_int, None => registry::clear_stale [after];
    unsafe fn memfd_create(name: *const c_char, flags: c_uint) -> c_int, Some(SYS_memfd_create) => registry::clear_stale [short after];
    unsafe fn pipe(fds: *mut c_int) -> c_int, None => new_fds::pipe [short];
    unsafe fn pipe2(fds: *mut c_int, flags: c_int) -> c_int, Some(SYS_pipe2) => new_fds::pipe2 [short];
    unsafe fn socketpair(domain: c_int, kind: c_int, protocol: c_int, fds: *mut c_int) -> c_int, Some(SYS_socketpair)
        => new_fds::socketpair [short];
    unsafe fn accept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int, Some(SYS_accept) => new_fds::accept;
    unsafe fn accept4(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int, Some(SYS_accept4)
        => new_fds::accept4;
    safe fn eventfd(count: c_uint, flags: c_int) -> c_int, Some(SYS_eventfd2) => registry::clear_stale [short after];
    safe fn timerfd_create(clock: c_int, flags: c_int) -> c_int, Some(SYS_timerfd_create) => registry::clear_stale [short after];
    unsafe fn signalfd(fd: c_int, mask: *const sigset_t, flags: c_int) -> c_int, None => new_fds::signalfd [short];
    safe fn inotify_init() -> c_int, None => registry::clear_stale [short after];
    safe fn inotify_init1(flags: c_int) -> c_int, Some(SYS_inotify_init1) => registry::clear_stale [short after];

    unsafe fn setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int,
        Some(SYS_setsockopt) => options::setsockopt [short];
    unsafe fn getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int,
        Some(SYS_getsockopt) => options::getsockopt [short];

    unsafe fn recv(fd: c_int, to: *mut c_void, len: size_t, flags: c_int) -> ssize_t, None => receive::recv | receive::recv;
    unsafe fn recvfrom(fd: c_int, to: *mut c_void, len: size_t, flags: c_int, from: *mut sockaddr, fromlen: *mut socklen_t)
        -> ssize_t, Some(SYS_recvfrom) => receive::recvfrom | receive::recvfrom;
    unsafe fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t, Some(SYS_recvmsg) => receive::recvmsg | receive::recvmsg;
    unsafe fn recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int,
        Some(SYS_recvmmsg) => receive::recvmmsg | receive::recvmmsg;
    unsafe fn read(fd: c_int, to: *mut c_void, len: size_t) -> ssize_t, Some(SYS_read) => receive::read | receive::read;
    unsafe fn __read(fd: c_int, to: *mut c_void, len: size_t) -> ssize_t, Some(SYS_read) => receive::read | receive::read;
    unsafe fn readv(fd: c_int, to: *const iovec, count: c_int) -> ssize_t, Some(SYS_readv) => receive::readv | receive::readv;
    unsafe fn __recv_chk(fd: c_int, to: *mut c_void, len: size_t, room: size_t, flags: c_int) -> ssize_t, None
        => receive::recv_chk | receive::recv_chk;
    unsafe fn __recvfrom_chk(
        fd: c_int, to: *mut c_void, len: size_t, room: size_t, flags: c_int, from: *mut sockaddr,
        fromlen: *mut socklen_t
    ) -> ssize_t, None => receive::recvfrom_chk | receive::recvfrom_chk;
    unsafe fn __read_chk(fd: c_int, to: *mut c_void, len: size_t, room: size_t) -> ssize_t, None => receive::read_chk | receive::read_chk;

    unsafe fn send(fd: c_int, from: *const c_void, len: size_t, flags: c_int) -> ssize_t, None => send::send;
    unsafe fn __send(fd: c_int, from: *const c_void, len: size_t, flags: c_int) -> ssize_t, None => send::send;
    unsafe fn sendto(fd: c_int, from: *const c_void, len: size_t, flags: c_int, to: *const sockaddr, tolen: socklen_t)
        -> ssize_t, Some(SYS_sendto) => send::sendto;
    unsafe fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t, Some(SYS_sendmsg) => send::sendmsg;
    unsafe fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int, Some(SYS_sendmmsg)
        => send::sendmmsg;
    unsafe fn __sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int, Some(SYS_sendmmsg)
        => send::sendmmsg;
    unsafe fn write(fd: c_int, from: *const c_void, len: size_t) -> ssize_t, Some(SYS_write) => send::write;
    unsafe fn __write(fd: c_int, from: *const c_void, len: size_t) -> ssize_t, Some(SYS_write) => send::write;
    unsafe fn writev(fd: c_int, from: *const iovec, count: c_int) -> ssize_t, Some(SYS_writev) => send::writev;

    unsafe fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int, None => poll::poll | poll::poll;
    unsafe fn __poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int, None => poll::poll | poll::poll;
    unsafe fn __poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, room: size_t) -> c_int, None => poll::poll_chk | poll::poll_chk;
    unsafe fn ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int, None
        => poll::ppoll | poll::ppoll;
    unsafe fn __ppoll_chk(
        fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t, room: size_t
    ) -> c_int, None => poll::ppoll_chk | poll::ppoll_chk;
    unsafe fn select(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval) -> c_int,
        None => select::select | select::select;
    unsafe fn __select(
        count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval
    ) -> c_int, None => select::select | select::select;
    unsafe fn pselect(
        count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *const timespec,
        mask: *const sigset_t
    ) -> c_int, None => select::pselect | select::pselect;

    safe fn epoll_create(size: c_int) -> c_int, None => epoll::epoll_create [short];
    safe fn epoll_create1(flags: c_int) -> c_int, Some(SYS_epoll_create1) => epoll::epoll_create1 [short];
    unsafe fn epoll_ctl(epfd: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int, Some(SYS_epoll_ctl)
        => epoll::epoll_ctl [short] | detached::epoll_ctl;
    unsafe fn epoll_wait(epfd: c_int, events: *mut epoll_event, count: c_int, timeout: c_int) -> c_int, None
        => epoll::epoll_wait | epoll::epoll_wait;
    unsafe fn epoll_pwait(epfd: c_int, events: *mut epoll_event, count: c_int, timeout: c_int, mask: *const sigset_t)
        -> c_int, None => epoll::epoll_pwait | epoll::epoll_pwait;
    unsafe fn epoll_pwait2(
        epfd: c_int, events: *mut epoll_event, count: c_int, timeout: *const timespec, mask: *const sigset_t
    ) -> c_int, None => epoll::epoll_pwait2 | epoll::epoll_pwait2;

    unsafe fn sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int, None
        => handlers::sigaction [short];
    unsafe fn __sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int, None
        => handlers::sigaction [short];
    unsafe fn signal(signal: c_int, handler: sighandler_t) -> sighandler_t, None => handlers::refresh [short after signal];
    unsafe fn bsd_signal(signal: c_int, handler: sighandler_t) -> sighandler_t, None => handlers::refresh [short after signal];
    unsafe fn ssignal(signal: c_int, handler: sighandler_t) -> sighandler_t, None => handlers::refresh [short after signal];
    unsafe fn sysv_signal(signal: c_int, handler: sighandler_t) -> sighandler_t, None => handlers::refresh [short after signal];
    unsafe fn __sysv_signal(signal: c_int, handler: sighandler_t) -> sighandler_t, None => handlers::refresh [short after signal];
    unsafe fn sigset(signal: c_int, handler: sighandler_t) -> sighandler_t, None => handlers::refresh [short after signal];
    safe fn sigignore(signal: c_int) -> c_int, None => handlers::refresh [short after signal];
    safe fn siginterrupt(signal: c_int, interrupts: c_int) -> c_int, None => handlers::refresh [short after signal];

    unsafe fn prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int, Some(SYS_prctl) => seccomp::prctl;

    safe fn unshare(what: c_int) -> c_int, Some(SYS_unshare) => process::unshare;
    safe fn setns(fd: c_int, kind: c_int) -> c_int, Some(SYS_setns) => process::setns;
    safe fn setuid(uid: uid_t) -> c_int, None => process::before_privilege_drop [short before];
    safe fn seteuid(uid: uid_t) -> c_int, None => process::before_privilege_drop [short before];
    safe fn setreuid(real: uid_t, effective: uid_t) -> c_int, None => process::before_privilege_drop [short before];
    safe fn setresuid(real: uid_t, effective: uid_t, saved: uid_t) -> c_int, None => process::before_privilege_drop [short before];
    unsafe fn execve(path: *const c_char, args: Args, env: Args) -> c_int, None => process::before_exec [before];
    unsafe fn execv(path: *const c_char, args: Args) -> c_int, None => process::before_exec [before];
    unsafe fn execvp(path: *const c_char, args: Args) -> c_int, None => process::before_exec [before];
    unsafe fn execvpe(path: *const c_char, args: Args, env: Args) -> c_int, None => process::before_exec [before];
    unsafe fn fexecve(fd: c_int, args: Args, env: Args) -> c_int, None => process::fexecve;
    unsafe fn execveat(folder: c_int, path: *const c_char, args: Args, env: Args, flags: c_int) -> c_int, Some(SYS_execveat)
        => process::execveat;
    unsafe fn posix_spawn(
        pid: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, args: Args, env: Args
    ) -> c_int, None => process::before_exec [before];
    unsafe fn posix_spawn_file_actions_adddup2(actions: *mut c_void, fd: c_int, to: c_int) -> c_int, None
        => process::after_adddup2 [short after fd];
    safe fn _exit(status: c_int) -> (), Some(SYS_exit_group) => process::before_exit [before];
    safe fn _Exit(status: c_int) -> (), Some(SYS_exit_group) => process::before_exit [before];
    safe fn quick_exit(status: c_int) -> (), None => process::before_exit [before];
    safe fn sleep(seconds: c_uint) -> c_int, None => send_batch::flush [before];
    safe fn usleep(microseconds: c_uint) -> c_int, None => send_batch::flush [before];
    unsafe fn nanosleep(time: *const timespec, left: *mut timespec) -> c_int, Some(SYS_nanosleep) => send_batch::flush [before];
    unsafe fn clock_nanosleep(clock: c_int, flags: c_int, time: *const timespec, left: *mut timespec) -> c_int, None
        => send_batch::flush [before];
    unsafe fn posix_spawnp(
        pid: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, args: Args, env: Args
    ) -> c_int, None => process::before_exec [before];
        }
    };
}
pub(crate) use functions;

/// Makes a function of the list. Only the body of an unsafe one may pass on program arguments.
macro_rules! function {
    (safe [$($before:tt)*] [$($signature:tt)*] { $($body:tt)* }) => {
        $($before)* $($signature)* { $($body)* }
    };
    (unsafe [$($before:tt)*] [$($signature:tt)*] { $($body:tt)* }) => {
        $($before)* unsafe $($signature)* {
            // SAFETY: program arguments.
            unsafe { $($body)* }
        }
    };
}
pub(crate) use function;
