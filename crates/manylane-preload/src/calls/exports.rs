//! The exported functions, which the program calls: one for each of the list (`functions.rs`).
//! Until the library is ready, and after it has detached, it calls the C library's function of that
//! name.
//!
//! And syscall(2), which handles calls that close descriptors (libuv makes them) and calls that
//! install a seccomp filter (libseccomp makes them). The C library's function takes arguments that
//! its caller need not have given, and so does this one: it reads registers and a word of the
//! caller's stack that may hold no argument, and hands them on. The calling conventions of x86-64
//! and arm64 pass numbers to a function with variable arguments as to any other. Elsewhere it is
//! not exported.

use libc::c_long;

use crate::base::functions::{function, functions, types::*};
use crate::base::real::{self, call};
use crate::base::{quiesce, state};
use crate::batching::send_batch;
use crate::calls::{close_range, descriptors, handlers, new_fds, options, process, seccomp};
use crate::lanes::registry;
use crate::transfer::{detached, receive, send};
use crate::waiting::{epoll, poll, select};

/// Handles a call of the program, as the flags say; again, if the library has detached.
macro_rules! handle {
    ([short $($flag:ident)*] $ours:path, $name:ident $args:tt) => {{
        let Some(inside) = quiesce::enter() else { return self::$name $args };
        let answer = handle!([$($flag)*] $ours, $name $args);
        inside.leave();
        answer
    }};
    ([before] $ours:path, $name:ident $args:tt) => {{
        $ours();
        call::$name $args
    }};
    ([after $($arg:ident)?] $ours:path, $name:ident $args:tt) => {
        $ours(call::$name $args $(, $arg)?)
    };
    ([] $ours:path, $name:ident $args:tt) => {
        $ours $args
    };
}

/// Calls the replacement of the program's own call while there are leftovers.
macro_rules! leftovers_first {
    ([] $args:tt) => {};
    ([$after:path] ($($arg:ident),*)) => {
        if detached::has_leftovers() {
            return $after($($arg),*);
        }
    };
}

macro_rules! exports {
    ($($safety:ident fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty, $raw:expr => $ours:path $([$($flag:ident)+])? $(| $after:path)?;)*) => {
        $(function! {
            $safety
            [
                #[cfg_attr(not(test), unsafe(no_mangle))]
                #[allow(non_snake_case, reason = "as the C library calls them")]
            ]
            [extern "C-unwind" fn $name($($arg: $ty),*) -> $ret]
            {
                if !state::is_ready() {
                    leftovers_first!([$($after)?] ($($arg),*));
                    return call::$name($($arg),*);
                }
                handle!([$($($flag)+)?] $ours, $name($($arg),*))
            }
        })*
    };
}

functions!(exports);

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[expect(non_upper_case_globals, reason = "numbers have the names that libc gives them")]
unsafe extern "C-unwind" fn syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    // SAFETY: program arguments.
    let own = || unsafe { real::syscall(number, &[a, b, c, d, e, f]) };
    match number {
        SYS_close if state::is_ready() => descriptors::close_with(a as c_int, || own() as c_int).into(),
        SYS_close_range if state::is_ready() => {
            close_range::close_range(a as c_uint, b as c_uint, c as c_int).into()
        }
        SYS_close if detached::has_leftovers() => detached::close(a as c_int).into(),
        SYS_close_range if detached::has_leftovers() => {
            detached::close_range(a as c_uint, b as c_uint, c as c_int).into()
        }
        SYS_prctl if state::is_ready() => {
            // SAFETY: program arguments.
            unsafe { seccomp::prctl(a as c_int, b as c_ulong, c as c_ulong, d as c_ulong, e as c_ulong) }
                .into()
        }
        libc::SYS_seccomp if state::is_ready() => {
            seccomp::seccomp(a, b, c);
            own()
        }
        _ => own(),
    }
}
