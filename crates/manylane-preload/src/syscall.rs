//! syscall(2): handles calls that close descriptors (libuv makes them) and calls that install a
//! seccomp filter (libseccomp makes them). All others go on unchanged.
//!
//! The C library's function takes arguments that its caller need not have given, and so does this
//! one: it reads registers and a word of the caller's stack that may hold no argument, and hands
//! them on. The calling conventions of x86-64 and arm64 pass numbers to a function with variable
//! arguments as to any other. Elsewhere nothing is exported.

use std::ffi::c_void;
use std::mem::transmute;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::c_long;

use crate::real;

type Syscall = unsafe extern "C-unwind" fn(c_long, c_long, c_long, c_long, c_long, c_long, c_long) -> c_long;

static REAL: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Looks up the C library's function.
pub(crate) fn find() {
    real::find(&REAL, c"syscall");
}

/// Makes a system call through the C library's function, or directly if that is not looked up yet.
///
/// # Safety
/// As of the system call.
pub(crate) unsafe fn call(number: c_long, args: &[c_long]) -> c_long {
    let mut all = [0; 6];
    all.iter_mut().zip(args).for_each(|(to, from)| *to = *from);
    let [a, b, c, d, e, f] = all;
    let at = REAL.load(Ordering::Relaxed);
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    if at.is_null() {
        // SAFETY: the caller keeps the contract of the system call.
        return unsafe { raw_syscall(number, all) };
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let at = if at.is_null() { real::find(&REAL, c"syscall") } else { at };
    if at.is_null() {
        real::set_errno(libc::ENOSYS);
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
        real::set_errno(-answer as libc::c_int);
        return -1;
    }
    answer
}

/// The exported function, which the program calls.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod exports {
    use libc::{c_int, c_long, c_uint, c_ulong};

    use crate::{descriptors, detached, seccomp, start};

    #[cfg_attr(not(test), unsafe(no_mangle))]
    pub(super) extern "C-unwind" fn syscall(
        number: c_long,
        a: c_long,
        b: c_long,
        c: c_long,
        d: c_long,
        e: c_long,
        f: c_long,
    ) -> c_long {
        // SAFETY: the program's call, with its own arguments.
        let own = || unsafe { super::call(number, &[a, b, c, d, e, f]) };
        match number {
            libc::SYS_close if start::is_ready() => {
                descriptors::close_with(a as c_int, || own() as c_int).into()
            }
            libc::SYS_close_range if start::is_ready() => {
                descriptors::close_range(a as c_uint, b as c_uint, c as c_int).into()
            }
            libc::SYS_close if detached::has_leftovers() => detached::close(a as c_int).into(),
            libc::SYS_prctl if start::is_ready() => {
                seccomp::prctl(a as c_int, b as c_ulong, c as c_ulong, d as c_ulong, e as c_ulong).into()
            }
            libc::SYS_seccomp if start::is_ready() => {
                seccomp::seccomp(a, b, c);
                own()
            }
            _ => own(),
        }
    }
}
