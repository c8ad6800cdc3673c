//! Start-up, in this order: addresses of the C library's functions, memory, settings, report, fork handlers; then calls
//! come in. Before that, and when something of it fails, each call is the C library's own.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use libc::c_int;
use manylane_sys::barrier;

use crate::epoll::Epoll;
use crate::settings::Settings;
use crate::sock::Sock;
use crate::{calls, gather, inherited, inside, life, me, points, process, report, syscall};

static READY: AtomicBool = AtomicBool::new(false);
/// Replies of kernel sockets are put together: not yet, yes, no more.
static GATHERS: AtomicU32 = AtomicU32::new(NOT_YET);
const NOT_YET: u32 = 0;
const YES: u32 = 1;
const NO_MORE: u32 = 2;
/// Under overload the newest wins.
static NEWEST: AtomicBool = AtomicBool::new(false);
static SETTINGS: OnceLock<Settings> = OnceLock::new();

/// Whether calls are ours.
#[inline]
pub(crate) fn is_ready() -> bool {
    READY.load(Ordering::Acquire)
}

/// From now on calls are the C library's own, for good: `aside.rs`.
pub(crate) fn stand_aside() {
    READY.store(false, Ordering::Release);
}

/// What the environment asked for.
pub(crate) fn settings() -> Option<&'static Settings> {
    SETTINGS.get()
}

/// Whether replies of kernel sockets may be put together.
#[inline]
pub(crate) fn gathers() -> bool {
    GATHERS.load(Ordering::SeqCst) == YES
}

/// There is a socket whose replies may be.
pub(crate) fn gather_from_now_on() {
    _ = GATHERS.compare_exchange(NOT_YET, YES, Ordering::SeqCst, Ordering::Relaxed);
}

/// Whether the newest wins under overload: `overtake.rs`.
#[inline]
pub(crate) fn newest_wins() -> bool {
    NEWEST.load(Ordering::Relaxed)
}

/// The process ends: they are not any more.
pub(crate) fn gather_no_more() {
    GATHERS.store(NO_MORE, Ordering::SeqCst);
}

/// Says one line on standard error.
pub(crate) fn say(line: &str) {
    let text = format!("manylane: {line}\n");
    // SAFETY: the bytes live through the call. What write(2) did not write is not worth an error.
    _ = unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
}

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

/// The program has ended by `exit` or by leaving `main`: its own handlers have run.
#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;

extern "C" fn end() {
    gather::the_end(true);
}

extern "C" fn start() {
    calls::find_all();
    syscall::find();
    if !Sock::start() || !Epoll::start() {
        say("no memory for the library's tables: everything goes its usual way");
        return;
    }
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let mut settings = Settings::read(
        |name| std::env::var(name).ok(),
        cpus,
        |name, value, known| say(&format!("{name}={value}: {known} would be understood; ignored")),
    );
    let processors = manylane_sys::cpu::affinity().map_or(0, |all| all.len());
    // The standard library rounds a quota down.
    settings.quota = (cpus < processors).then_some(cpus as u32 + 1);
    NEWEST.store(settings.newest, Ordering::Relaxed);
    _ = SETTINGS.set(settings);
    report::start();
    life::start();
    inside::start();
    points::start();
    me::start();
    // Now, while there is one thread.
    barrier::register();
    // SAFETY: the handlers are functions of ours that take nothing.
    let handlers = unsafe { libc::pthread_atfork(Some(process::before_fork), None, Some(process::in_child)) };
    if handlers != 0 {
        say("no fork handlers: everything goes its usual way");
        return;
    }
    inherited::find();
    READY.store(true, Ordering::Release);
}

/// The result of a call of ours that failed before the kernel was asked.
pub(crate) fn refuse(errno: c_int) -> c_int {
    crate::real::set_errno(errno);
    -1
}
