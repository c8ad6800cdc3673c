//! Start-up, in this order: addresses of the C library's functions, memory, settings, report, fork
//! handlers. Then calls come in. Before that, and if memory or fork handlers fail, each call is
//! the C library's own.

use manylane_sys::barrier;

use crate::base::settings::Settings;
use crate::base::{quiesce, real, state};
use crate::batching::send_batch;
use crate::calls::process;
use crate::fds::table::{self, Entry};
use crate::lanes::epoll_set::Epoll;
use crate::lanes::{inherited, members};
use crate::shared::sock::Sock;
use crate::shared::{failpoint, liveness, processes, report, thread};

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
    real::find_all();
    // A program with privileges that its user does not have takes nothing from its environment. It
    // has the library only if the administrator says so (ld.so.preload).
    // SAFETY: getauxval(3) takes a number, and reads what the kernel left at start.
    if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 {
        return;
    }
    if !Sock::start() || !Epoll::start() {
        real::log("out of memory: the program runs without lanes");
        return;
    }
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    // Lossy: a value that is not UTF-8 is set, and no setting accepts it.
    let var = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    let mut settings = Settings::read(var, cpus, real::log);
    let allowed = manylane_sys::cpu::affinity().map_or(0, |all| all.len());
    // The standard library rounds a quota down.
    settings.quota = (cpus < allowed).then_some(cpus as u32 + 1);
    state::set_settings(settings);
    if let Some(fd) = report::start() {
        // Hidden from the program, but inherited by programs that it starts.
        table::set(fd, Entry::Hidden);
    }
    liveness::start();
    processes::start();
    quiesce::start();
    failpoint::start();
    thread::start();
    members::start();
    // While there is only one thread.
    barrier::register();
    // SAFETY: the handlers are our functions and take no arguments.
    let handlers = unsafe { libc::pthread_atfork(Some(process::before_fork), None, Some(process::in_child)) };
    if handlers != 0 {
        real::log("pthread_atfork failed: the program runs without lanes");
        return;
    }
    inherited::find();
    state::set_ready();
}
