//! Start-up, in this order: addresses of the C library's functions, memory, settings, report, fork
//! handlers. Then calls come in. Before that, and if memory or fork handlers fail, each call is
//! the C library's own.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use libc::c_int;
use manylane_sys::barrier;

use crate::epoll::Epoll;
use crate::settings::Settings;
use crate::sock::Sock;
use crate::{calls, failpoint, inherited, liveness, process, quiesce, report, send_batch, syscall, thread};

static READY: AtomicBool = AtomicBool::new(false);
/// Whether replies of kernel sockets are batched: not yet, yes, no longer.
static SEND_BATCHING: AtomicU32 = AtomicU32::new(INACTIVE);
const INACTIVE: u32 = 0;
const ACTIVE: u32 = 1;
const STOPPED: u32 = 2;
static SETTINGS: OnceLock<Settings> = OnceLock::new();

/// True if the library handles calls.
#[inline]
pub(crate) fn is_ready() -> bool {
    READY.load(Ordering::Acquire)
}

/// Makes all calls the C library's own, for good: `seccomp.rs`.
pub(crate) fn detach() {
    READY.store(false, Ordering::Release);
}

/// The settings from the environment.
pub(crate) fn settings() -> Option<&'static Settings> {
    SETTINGS.get()
}

/// True if replies of kernel sockets may be batched.
#[inline]
pub(crate) fn is_send_batching() -> bool {
    SEND_BATCHING.load(Ordering::SeqCst) == ACTIVE
}

/// A socket has outboxes: its replies may be batched.
pub(crate) fn start_send_batching() {
    _ = SEND_BATCHING.compare_exchange(INACTIVE, ACTIVE, Ordering::SeqCst, Ordering::Relaxed);
}

/// The process ends: no more replies are batched.
pub(crate) fn stop_send_batching() {
    SEND_BATCHING.store(STOPPED, Ordering::SeqCst);
}

/// Writes one line to standard error.
pub(crate) fn log(line: &str) {
    let text = format!("manylane: {line}\n");
    // SAFETY: the bytes live through the call. A failed write is ignored.
    _ = unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
}

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

/// The program has ended by `exit` or by leaving `main`, and its own handlers have run.
#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;

extern "C" fn end() {
    send_batch::flush_at_exit(true);
}

extern "C" fn start() {
    calls::find_all();
    syscall::find();
    if !Sock::start() || !Epoll::start() {
        log("no memory for the library's tables: everything goes its usual way");
        return;
    }
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let mut settings = Settings::read(
        |name| std::env::var(name).ok(),
        cpus,
        |name, value, known| log(&format!("{name}={value}: {known} would be understood; ignored")),
    );
    let processors = manylane_sys::cpu::affinity().map_or(0, |all| all.len());
    // The standard library rounds a quota down.
    settings.quota = (cpus < processors).then_some(cpus as u32 + 1);
    _ = SETTINGS.set(settings);
    report::start();
    liveness::start();
    quiesce::start();
    failpoint::start();
    thread::start();
    // While there is only one thread.
    barrier::register();
    // SAFETY: the handlers are our functions and take no arguments.
    let handlers = unsafe { libc::pthread_atfork(Some(process::before_fork), None, Some(process::in_child)) };
    if handlers != 0 {
        log("no fork handlers: everything goes its usual way");
        return;
    }
    inherited::find();
    READY.store(true, Ordering::Release);
}

/// The result of a call that the library fails without calling the kernel.
pub(crate) fn fail_with_errno(errno: c_int) -> c_int {
    crate::real::set_errno(errno);
    -1
}
