//! The C library's own functions: looked up once by name, called with the program's own arguments.
//!
//! [`interpose!`](crate::interpose) makes, from one list, the table of addresses, a function in
//! the module `call` for each, and the exported function of the same name. Until the library is
//! ready, an export calls the C library's function.

use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{c_int, c_void};

/// The return type of a function.
pub(crate) trait FromSyscall {
    /// Converts the result of a system call to the function's type; -1 stands for a function that
    /// cannot be called at all.
    fn from_syscall(returned: libc::c_long) -> Self;
}

impl FromSyscall for c_int {
    fn from_syscall(returned: libc::c_long) -> Self {
        returned as Self
    }
}

impl FromSyscall for isize {
    fn from_syscall(returned: libc::c_long) -> Self {
        returned as Self
    }
}

impl FromSyscall for usize {
    fn from_syscall(returned: libc::c_long) -> Self {
        returned as Self
    }
}

impl FromSyscall for () {
    fn from_syscall(_: libc::c_long) {}
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
        libc::sigaltstack(std::ptr::null(), now.as_mut_ptr());
        now.assume_init().ss_flags & libc::SS_ONSTACK != 0
    }
}

/// Makes prototypes, lookups and exports from one list: `fn NAME(ARGS) -> RETURN, SYSCALL =
/// OURS;`. `SYSCALL` is the number to use before the C library's function is found, or if it has
/// none. `[short]` marks a function that never waits, but may make system calls of the library's
/// own (`quiesce.rs`). `| AFTER` replaces it while there are leftovers (`detached.rs`).
#[macro_export]
macro_rules! interpose {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty, $raw:expr => $ours:path $([$short:ident])? $(| $after:path)?;)*) => {
        /// Addresses of the C library's functions.
        #[allow(non_snake_case, reason = "as the C library calls them")]
        struct Table { $($name: AtomicPtr<c_void>,)* }
        static TABLE: Table = Table { $($name: AtomicPtr::new(std::ptr::null_mut()),)* };

        /// Looks up every function.
        pub(crate) fn find_all() {
            $($crate::real::find(
                &TABLE.$name,
                std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()).unwrap_or_default(),
            );)*
        }

        /// The C library's functions. They are safe to call because each gets either the arguments
        /// that the program passed to the function of that name, or references of ours that live
        /// through the call.
        pub(crate) mod call {
            use super::*;
            $(
                #[inline]
                #[allow(non_snake_case, reason = "as the C library calls them")]
                pub(crate) fn $name($($arg: $ty),*) -> $ret {
                    /// The function is not looked up yet, or missing. Out of line: it needs
                    /// registers that the call itself does not.
                    #[cold]
                    #[inline(never)]
                    fn missing($($arg: $ty),*) -> $ret {
                        let raw: Option<libc::c_long> = $raw;
                        if let Some(number) = raw {
                            // SAFETY: a system call with the arguments of the function that it
                            // implements; memory is the caller's, as for the function itself.
                            let returned = unsafe { $crate::syscall::call(number, &[$($arg as libc::c_long),*]) };
                            return <$ret as $crate::real::FromSyscall>::from_syscall(returned);
                        }
                        let at = $crate::real::find(
                            &TABLE.$name,
                            std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes())
                                .unwrap_or_default(),
                        );
                        if at.is_null() {
                            $crate::real::set_errno(libc::ENOSYS);
                            return <$ret as $crate::real::FromSyscall>::from_syscall(-1);
                        }
                        self::$name($($arg),*)
                    }
                    let at = TABLE.$name.load(Ordering::Relaxed);
                    if at.is_null() {
                        return missing($($arg),*);
                    }
                    // SAFETY: the address is that of the C library's function of this name, whose
                    // prototype is the one in the list; the arguments are the caller's. A thread
                    // that is cancelled in it unwinds through here: no frame on the way has
                    // anything to drop.
                    unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn($($ty),*) -> $ret>(at)($($arg),*)
                    }
                }
            )*
        }

        /// The exported functions, which the program calls.
        mod exports {
            use super::*;
            $(
                #[cfg_attr(not(test), unsafe(no_mangle))]
                #[allow(non_snake_case, reason = "as the C library calls them")]
                pub(super) extern "C-unwind" fn $name($($arg: $ty),*) -> $ret {
                    if !$crate::start::is_ready() {
                        $crate::leftovers_first!([$($after)?] ($($arg),*));
                        return call::$name($($arg),*);
                    }
                    $crate::guarded_call!($($short)?, $ours($($arg),*), self::$name($($arg),*))
                }
            )*
        }
    };
}

/// Calls a function of the library; `again` if the library has detached.
#[macro_export]
macro_rules! guarded_call {
    (, $ours:expr, $again:expr) => {
        $ours
    };
    (short, $ours:expr, $again:expr) => {{
        if !$crate::quiesce::enter() {
            return $again;
        }
        let answer = $ours;
        $crate::quiesce::leave();
        answer
    }};
}

/// Calls the replacement of the program's own call while there are leftovers.
#[macro_export]
macro_rules! leftovers_first {
    ([] $args:tt) => {};
    ([$after:path] ($($arg:ident),*)) => {
        if $crate::detached::has_leftovers() {
            return $after($($arg),*);
        }
    };
}
