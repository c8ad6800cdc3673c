//! The C library's own functions: looked up once by name, called with the program's own arguments.
//!
//! From the list in `functions.rs`, this makes the table of addresses, and a function in the module
//! [`call`] for each.

use std::cell::Cell;
use std::ffi::CStr;
use std::mem::transmute;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{c_int, c_long, c_ulong, c_void, epoll_event, nfds_t, pollfd, sigset_t, timespec};

use crate::base::by_select;
use crate::base::functions::{function, functions, types::*};

/// The return type of a function.
pub(crate) trait FromSyscall {
    /// Converts the result of a system call to the function's type; -1 stands for a function that
    /// cannot be called at all.
    fn from_syscall(returned: c_long) -> Self;
}

impl FromSyscall for c_int {
    fn from_syscall(returned: c_long) -> Self {
        returned as Self
    }
}

impl FromSyscall for isize {
    fn from_syscall(returned: c_long) -> Self {
        returned as Self
    }
}

impl FromSyscall for usize {
    fn from_syscall(returned: c_long) -> Self {
        returned as Self
    }
}

impl FromSyscall for () {
    fn from_syscall(_: c_long) {}
}

/// Finds the next function called `name` after this library, and stores it.
pub(crate) fn find(cell: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    // SAFETY: the name ends with a zero; the result is an address that is only stored.
    let at = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if !at.is_null() {
        cell.store(at, Ordering::Relaxed);
    }
    at
}

/// The calling thread's `errno`.
pub(crate) fn errno() -> c_int {
    // SAFETY: the C library gives each thread an `errno` of its own, which lives as long as the
    // thread.
    unsafe { *libc::__errno_location() }
}

/// Sets the calling thread's `errno`.
pub(crate) fn set_errno(value: c_int) {
    // SAFETY: as in errno().
    unsafe { *libc::__errno_location() = value }
}

/// True if the calling thread runs a signal handler on an alternate stack, which may be small.
#[cold]
pub(crate) fn is_on_signal_stack() -> bool {
    let mut now = std::mem::MaybeUninit::<libc::stack_t>::zeroed();
    // SAFETY: sigaltstack fills the struct, which zeroes are a value of in any case; nothing is
    // changed.
    unsafe {
        libc::sigaltstack(ptr::null(), now.as_mut_ptr());
        now.assume_init().ss_flags & libc::SS_ONSTACK != 0
    }
}

type Syscall = unsafe extern "C-unwind" fn(c_long, c_long, c_long, c_long, c_long, c_long, c_long) -> c_long;

static SYSCALL: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Makes a system call through the C library's function, or directly if that is not looked up yet.
///
/// # Safety
/// As of the system call.
pub(crate) unsafe fn syscall(number: c_long, args: &[c_long]) -> c_long {
    let mut all = [0; 6];
    all.iter_mut().zip(args).for_each(|(to, from)| *to = *from);
    let [a, b, c, d, e, f] = all;
    let at = SYSCALL.load(Ordering::Relaxed);
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    if at.is_null() {
        // SAFETY: the caller keeps the contract of the system call.
        return unsafe { raw_syscall(number, all) };
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let at = if at.is_null() { find(&SYSCALL, c"syscall") } else { at };
    if at.is_null() {
        set_errno(libc::ENOSYS);
        return -1;
    }
    // SAFETY: the address is the C library's function's; the caller keeps the call's contract.
    unsafe { transmute::<*mut c_void, Syscall>(at)(number, a, b, c, d, e, f) }
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
unsafe fn raw_syscall(number: c_long, [a, b, c, d, e, f]: [c_long; 6]) -> c_long {
    let answer: c_long;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the kernel's convention: it changes these registers and, as the call says, memory.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number => answer,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a => answer,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f,
            options(nostack),
        );
    }
    if (-4095..0).contains(&answer) {
        set_errno(-answer as c_int);
        return -1;
    }
    answer
}

/// `ppoll(2)` as a direct system call, which is no cancellation point. The number of entries has no
/// limit.
pub(crate) fn ppoll_raw(fds: &mut [pollfd], timeout: timespec, mask: Option<&sigset_t>) -> c_int {
    let mut time = timeout;
    let (at, bits) = (&raw mut time, or_null(mask));
    // The kernel's signal set has 64 bits; the C library's is longer.
    let size = 8_usize;
    // SAFETY: all arguments live through the call.
    let answer = unsafe { libc::syscall(libc::SYS_ppoll, fds.as_mut_ptr(), fds.len(), at, bits, size) };
    if is_refused(answer as c_int) {
        return by_select::ppoll(Cell::from_mut(fds).as_slice_of_cells(), timeout, mask);
    }
    answer as c_int
}

/// A timeout of zero: a wait that only polls.
pub(crate) static NO_WAIT: timespec = timespec { tv_sec: 0, tv_nsec: 0 };

/// `ppoll(2)` by the C library's function. The number of entries has no limit.
pub(crate) fn ppoll(fds: &mut [pollfd], timeout: timespec, mask: Option<&sigset_t>) -> c_int {
    ppoll_cells(Cell::from_mut(fds).as_slice_of_cells(), None, timeout, mask)
}

/// [`ppoll`], for entries with more than one reference. For a call of the program that has a limit
/// of entries, the first ones are its `own`: if there are too many of these, it fails as the
/// program's call does, and if there are too many with the others, these are left out.
pub(crate) fn ppoll_cells(
    fds: &[Cell<pollfd>],
    own: Option<usize>,
    timeout: timespec,
    mask: Option<&sigset_t>,
) -> c_int {
    let ppoll = |fds: &[Cell<pollfd>]| {
        let (at, count) = (fds.as_ptr().cast_mut().cast(), fds.len() as nfds_t);
        // SAFETY: all arguments live through the call; the entries may change, as cells.
        unsafe { call::ppoll(at, count, &raw const timeout, or_null(mask)) }
    };
    let answer = ppoll(fds);
    if !is_refused(answer) {
        return answer;
    }
    match own {
        None => by_select::ppoll(fds, timeout, mask),
        Some(own) => ppoll(&fds[..own]),
    }
}

/// True if ppoll(2) with valid arguments was refused: there are more entries than the limit of open
/// files.
fn is_refused(answer: c_int) -> bool {
    answer < 0 && errno() == libc::EINVAL
}

/// True if a signal handler has ended a call. After another error of a poll, each entry may have an
/// event.
pub(crate) fn is_interrupted(answer: c_int) -> bool {
    answer < 0 && errno() == libc::EINTR
}

/// [`ppoll`] without entries: only sleeps.
pub(crate) fn ppoll_none(timeout: timespec, mask: Option<&sigset_t>) -> c_int {
    // SAFETY: as above, without entries.
    unsafe { call::ppoll(ptr::null_mut(), 0, &raw const timeout, or_null(mask)) }
}

/// `epoll_ctl(2)`; only the removal of an entry needs no event.
pub(crate) fn epoll_ctl(epfd: c_int, op: c_int, fd: c_int, event: Option<&mut epoll_event>) -> c_int {
    // SAFETY: the event lives through the call, or is null.
    unsafe { call::epoll_ctl(epfd, op, fd, event.map_or(ptr::null_mut(), ptr::from_mut)) }
}

/// `F_DUPFD_CLOEXEC` of `fcntl(2)`: duplicates to the first free number from `first` on.
pub(crate) fn dup_from(fd: c_int, first: c_ulong) -> c_int {
    // SAFETY: the argument of this command is a number.
    unsafe { call::fcntl(fd, libc::F_DUPFD_CLOEXEC, first) }
}

/// `F_GETFL` of `fcntl(2)`; negative: an error.
pub(crate) fn status_flags(fd: c_int) -> c_int {
    // SAFETY: the command has no argument.
    unsafe { call::fcntl(fd, libc::F_GETFL, 0) }
}

/// True if the descriptor is open, and stays open in programs that the process starts.
pub(crate) fn is_inherited_on_exec(fd: c_int) -> bool {
    // SAFETY: as above.
    unsafe { call::fcntl(fd, libc::F_GETFD, 0) & libc::FD_CLOEXEC == 0 }
}

/// The pointer for a call of the C library.
pub(crate) fn or_null<T>(at: Option<&T>) -> *const T {
    at.map_or(ptr::null(), ptr::from_ref)
}

/// The result of a call that the library fails without calling the kernel.
pub(crate) fn fail_with_errno<T: FromSyscall>(errno: c_int) -> T {
    set_errno(errno);
    T::from_syscall(-1)
}

/// Writes one line to standard error.
pub(crate) fn log(line: &str) {
    let text = format!("manylane: {line}\n");
    // SAFETY: the bytes live through the call. A failed write is ignored.
    _ = unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
}

/// The C library's functions of the list.
macro_rules! prototypes {
    ($($safety:ident fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty, $raw:expr => $ours:path $([$($flag:ident)+])? $(| $after:path)?;)*) => {
        /// Addresses of the C library's functions.
        #[allow(non_snake_case, reason = "as the C library calls them")]
        struct Table { $($name: AtomicPtr<c_void>,)* }
        static TABLE: Table = Table { $($name: AtomicPtr::new(std::ptr::null_mut()),)* };

        /// Looks up every function.
        pub(crate) fn find_all() {
            find(&SYSCALL, c"syscall");
            $(find(
                &TABLE.$name,
                std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()).unwrap_or_default(),
            );)*
        }

        /// The C library's functions. The contract of the unsafe ones is *program arguments*.
        pub(crate) mod call {
            use super::*;
            $(function! {
                $safety
                [
                    #[inline]
                    #[allow(non_snake_case, reason = "as the C library calls them")]
                    #[allow(unused_unsafe, reason = "some of the list are safe")]
                    pub(crate)
                ]
                [fn $name($($arg: $ty),*) -> $ret]
                {
                    /// The function is not looked up yet, or missing. Out of line: it needs
                    /// registers that the call itself does not.
                    #[cold]
                    #[inline(never)]
                    unsafe fn missing($($arg: $ty),*) -> $ret {
                        let raw: Option<libc::c_long> = $raw;
                        if let Some(number) = raw {
                            // SAFETY: program arguments, of the system call that implements the
                            // function.
                            let returned = unsafe { super::syscall(number, &[$($arg as libc::c_long),*]) };
                            return <$ret as FromSyscall>::from_syscall(returned);
                        }
                        let at = find(
                            &TABLE.$name,
                            std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes())
                                .unwrap_or_default(),
                        );
                        if at.is_null() {
                            return fail_with_errno(libc::ENOSYS);
                        }
                        // SAFETY: program arguments.
                        unsafe { self::$name($($arg),*) }
                    }
                    let at = TABLE.$name.load(Ordering::Relaxed);
                    if at.is_null() {
                        // SAFETY: program arguments.
                        return unsafe { missing($($arg),*) };
                    }
                    // SAFETY: the address is that of the C library's function of this name, whose
                    // prototype is the one in the list; program arguments. A thread that is
                    // cancelled in it unwinds through here: no frame on the way has anything to
                    // drop.
                    unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn($($ty),*) -> $ret>(at)($($arg),*)
                    }
                }
            })*
        }
    };
}

functions!(prototypes);
