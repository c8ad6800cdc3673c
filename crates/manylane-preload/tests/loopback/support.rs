//! Runs programs in C, preloaded and natively.
//!
//! Each program binds ports that the kernel selects, and talks to itself only. So all can share the
//! loopback device. As root, each has a network namespace of its own all the same: a socket that
//! sets SO_REUSEPORT before it binds may get the port of another program's lanes.

use std::fmt;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};
use std::thread;
use std::time::Duration;

use manylane_ipc::report::{FREE, NO_LANE, Reason, Receiver, ReportFile};
use manylane_sys::fd;
use manylane_sys::netns::NetNs;
use manylane_test_support::wait_for_at_most;
use manylane_testbed::skip;

/// True if `MANYLANE_TEST_PREFETCH` has an effect. A release build of the library ignores it, so
/// that a test then finds only that results are the same.
pub(crate) const FORCES_PREFETCH: bool = cfg!(debug_assertions);

/// The library, in the folder where cargo builds it for the tests of its own crate.
pub(crate) fn library() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    let deps = exe.parent().unwrap();
    let found = [deps, deps.parent().unwrap()].map(|folder| folder.join("libmanylane_preload.so"));
    found.into_iter().find(|path| path.exists()).expect("cargo builds libmanylane_preload.so with its tests")
}

/// Cargo's folder for the files of tests: a run that crashes leaves nothing elsewhere.
const TARGET_TMPDIR: &str = env!("CARGO_TARGET_TMPDIR");
/// Ten of them at once, with 8 emulated CPUs on two of the host, take two minutes.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(300);

/// Builds `tests/programs/NAME.c`.
pub(crate) fn build(name: &str) -> PathBuf {
    compile(name, name, &[])
}

/// Builds `tests/programs/NAME.c` as a library to be preloaded.
pub(crate) fn build_library(name: &str) -> PathBuf {
    compile(name, &format!("lib{name}.so"), &["-shared", "-fPIC"])
}

fn compile(name: &str, to: &str, more: &[&str]) -> PathBuf {
    static BUILD: Mutex<()> = Mutex::new(());
    // If a program does not compile, only its own test fails.
    let _one = BUILD.lock().unwrap_or_else(PoisonError::into_inner);
    let program = Path::new(TARGET_TMPDIR).join(to);
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs");
    let headers = sources.join("../../../../abi");
    if !is_newer(&program, &sources) || !is_newer(&program, &headers) {
        // Under a temporary name first, because another test may be starting the old program.
        let fresh = program.with_extension(format!("{}.new", std::process::id()));
        let flags = ["-O2", "-D_FORTIFY_SOURCE=2", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"];
        let source = sources.join(format!("{name}.c"));
        let mut command =
            sanitizer().map_or_else(|| Command::new("cc"), |name| sanitizer_compiler(&name, to));
        let done = command.args(flags).arg(&fresh).arg("-I").arg(headers).args(more).arg(source).status();
        assert!(done.expect("a C compiler called cc: make setup installs it").success());
        std::fs::rename(&fresh, &program).unwrap();
    }
    program
}

/// The sanitizer that the library was built with (`address` or `thread`), set by
/// `scripts/sanitize.sh`.
pub(crate) fn sanitizer() -> Option<String> {
    std::env::var("MANYLANE_SANITIZER").ok()
}

/// True if the test `name` can run. If it cannot, because of one of these sanitizers, reports the
/// skip with `why`.
pub(crate) fn can_run_without(sanitizers: &[&str], name: &str, why: &str) -> bool {
    skip::need(name, !sanitizer().is_some_and(|ours| sanitizers.contains(&&*ours)), why)
}

/// A compiler for programs that contain the runtime of the sanitizer `name`, because a preloaded
/// library cannot bring it. It is Rust's own runtime, since the compiler's may be of another
/// version. Libraries of the program find it there.
fn sanitizer_compiler(name: &str, to: &str) -> Command {
    let mut command = Command::new("clang");
    // Not by the driver's option, for which clang would link its own runtime.
    command.args(["-g", "-DSANITIZED", "-Xclang", &format!("-fsanitize={name}")]);
    if !to.ends_with(".so") {
        if name == "thread" {
            command.args(["-include", concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/bypass_tsan.h")]);
        }
        let runtime = std::env::var("MANYLANE_SANITIZER_RUNTIME").expect("the path of the runtime");
        command.arg(format!("-Wl,--whole-archive,{runtime},--no-whole-archive"));
        command.args(["-rdynamic", "-lrt", "-lm", "-ldl", "-lresolv"]);
    }
    command
}

/// True if `program` exists and was built after the last change of any file in `sources`.
fn is_newer(program: &Path, sources: &Path) -> bool {
    let changed = |path: &Path| path.metadata().and_then(|about| about.modified());
    let Ok(built) = changed(program) else { return false };
    sources.read_dir().unwrap().all(|file| changed(&file.unwrap().path()).unwrap() < built)
}

/// The output of a program, and the library's report of it.
pub(crate) struct Outcome {
    pub(crate) output: String,
    report: Option<ReportFile>,
}

impl Outcome {
    /// Number of lanes whose own receivers received datagrams.
    pub(crate) fn lanes(&self) -> usize {
        let mut lanes: Vec<u32> =
            self.receivers().map(|(lane, _)| lane).filter(|lane| *lane != NO_LANE).collect();
        lanes.sort_unstable();
        lanes.dedup();
        lanes.len()
    }

    /// Number of threads that received, with a lane or without one.
    pub(crate) fn receiver_count(&self) -> usize {
        self.receivers().count()
    }

    /// Number of datagrams that all receivers received.
    pub(crate) fn delivered(&self) -> u64 {
        self.receivers().map(|(_, datagrams)| datagrams).sum()
    }

    /// Number of system calls that received datagrams.
    pub(crate) fn calls(&self) -> u64 {
        let report = self.report.as_ref().expect("a run with the library").report();
        report.receivers.iter().map(|slot| slot.batches.load(Ordering::Relaxed)).sum()
    }

    /// Number of datagrams that all receivers sent, and of system calls for that.
    pub(crate) fn sent(&self) -> (u64, u64) {
        let report = self.report.as_ref().expect("a run with the library").report();
        let sum = |of: fn(&Receiver) -> &AtomicU64| {
            report.receivers.iter().map(|slot| of(slot).load(Ordering::Relaxed)).sum()
        };
        (sum(|slot| &slot.sent), sum(|slot| &slot.send_calls))
    }

    /// Number of datagrams that receivers took from other lanes than their own.
    pub(crate) fn delivered_from_other_lanes(&self) -> u64 {
        let report = self.report.as_ref().expect("a run with the library").report();
        report.receivers.iter().map(|slot| slot.delivered_from_other_lanes.load(Ordering::Relaxed)).sum()
    }

    /// The same, of the main thread only.
    pub(crate) fn main_delivered_from_other_lanes(&self) -> u64 {
        let report = self.report.as_ref().expect("a run with the library").report();
        let is_main = |slot: &&Receiver| {
            slot.state.load(Ordering::Relaxed) != FREE
                && slot.tid.load(Ordering::Relaxed) == slot.pid.load(Ordering::Relaxed)
        };
        report
            .receivers
            .iter()
            .filter(is_main)
            .map(|slot| slot.delivered_from_other_lanes.load(Ordering::Relaxed))
            .sum()
    }

    /// Number of datagrams that each receiver got from its own lane.
    pub(crate) fn own(&self) -> Vec<u64> {
        let report = self.report.as_ref().expect("a run with the library").report();
        let taken = report.receivers.iter().filter(|slot| slot.state.load(Ordering::Relaxed) != FREE);
        let own = |slot: &Receiver| {
            slot.delivered.load(Ordering::Relaxed) - slot.delivered_from_other_lanes.load(Ordering::Relaxed)
        };
        taken.map(own).collect()
    }

    /// The thread ids of all receivers.
    pub(crate) fn tids(&self) -> Vec<u32> {
        let report = self.report.as_ref().expect("a run with the library").report();
        let taken = report.receivers.iter().filter(|slot| slot.state.load(Ordering::Relaxed) != FREE);
        taken.map(|slot| slot.tid.load(Ordering::Relaxed)).collect()
    }

    fn receivers(&self) -> impl Iterator<Item = (u32, u64)> {
        let report = self.report.as_ref().expect("a run with the library").report();
        report
            .receivers
            .iter()
            .filter(|slot| slot.state.load(Ordering::Relaxed) != FREE)
            .map(|slot| (slot.lane.load(Ordering::Relaxed), slot.delivered.load(Ordering::Relaxed)))
    }

    /// Number of processes with the library: those started with it, and those that they forked.
    pub(crate) fn processes(&self) -> u32 {
        let report = self.report.as_ref().expect("a run with the library").report();
        report.header.processes.load(Ordering::Relaxed)
    }

    /// Number of sockets that were bound.
    pub(crate) fn sockets(&self) -> u64 {
        let report = self.report.as_ref().expect("a run with the library").report();
        report.header.sockets.load(Ordering::Relaxed).into()
    }

    /// Number of sockets that became plain for this reason.
    pub(crate) fn count(&self, reason: Reason) -> u64 {
        let report = self.report.as_ref().expect("a run with the library").report();
        report.reasons[reason as usize].count.load(Ordering::Relaxed)
    }

    /// All reasons that were counted.
    pub(crate) fn reasons(&self) -> Vec<&'static str> {
        Reason::ALL.into_iter().filter(|reason| self.count(*reason) > 0).map(Reason::name).collect()
    }
}

/// The library's report of a running program, printed as the counters of each receiver.
struct Counters<'a>(Option<&'a ReportFile>);

impl fmt::Debug for Counters<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let receivers = self.0.into_iter().flat_map(|file| &file.report().receivers);
        let used = receivers.filter(|slot| slot.state.load(Ordering::Relaxed) != FREE);
        let counters = used.map(|slot| {
            let [tid, lane] = [&slot.tid, &slot.lane].map(|value| value.load(Ordering::Relaxed));
            let [received, of_other_lanes, sent] =
                [&slot.delivered, &slot.delivered_from_other_lanes, &slot.sent]
                    .map(|count| count.load(Ordering::Relaxed));
            let lane = if lane == NO_LANE { "no lane".to_owned() } else { format!("lane {lane}") };
            format!("thread {tid}, {lane}: received {received}, of other lanes {of_other_lanes}, sent {sent}")
        });
        f.debug_list().entries(counters).finish()
    }
}

/// Kills the program if the test panics.
struct Running(Option<Child>);

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            _ = child.kill();
            _ = child.wait();
        }
    }
}

/// Runs `check` for all cases at once, because their programs mostly wait.
pub(crate) fn for_each_at_once<T: Copy + Send>(cases: &[T], check: impl Fn(T) + Sync) {
    let check = &check;
    thread::scope(|scope| {
        for &case in cases {
            scope.spawn(move || check(case));
        }
    });
}

/// Runs a program without the library.
pub(crate) fn run_native(program: &Path, args: &[&str]) -> Outcome {
    run(program, args, None, false)
}

/// Runs a program with the library and these environment variables.
pub(crate) fn run_preloaded(program: &Path, args: &[&str], vars: &[(&str, &str)]) -> Outcome {
    run(program, args, Some(vars), false)
}

/// The same, with a descriptor for the report, as the launcher passes it.
pub(crate) fn run_preloaded_with_fd(program: &Path, args: &[&str]) -> Outcome {
    run(program, args, Some(&[]), true)
}

/// Runs a case until it ends with `lanes`, a few times at most, and returns the last outcome: a
/// thread that is held up for long loses its lane until it has received twice, and may end without
/// one. `run` checks all that does not depend on that.
pub(crate) fn run_until_lanes(lanes: usize, run: impl Fn() -> Outcome) -> Outcome {
    run_until(|with| with.lanes() == lanes, run)
}

/// Runs a case until `is_fine`, a few times at most, and returns the last outcome.
pub(crate) fn run_until(is_fine: impl Fn(&Outcome) -> bool, run: impl Fn() -> Outcome) -> Outcome {
    const RUNS_MAX: usize = 4;
    (1..RUNS_MAX).map(|_| run()).find(is_fine).unwrap_or_else(&run)
}

/// A network namespace whose loopback device is up. None if this user may not create it, or
/// without iproute2.
fn loopback_namespace() -> Option<NetNs> {
    let namespace = NetNs::create().ok()?;
    let mut up = Command::new("ip");
    up.args(["link", "set", "lo", "up"]);
    namespace.enter_in_child(&mut up).unwrap();
    up.status().is_ok_and(|status| status.success()).then_some(namespace)
}

fn run(program: &Path, args: &[&str], vars: Option<&[(&str, &str)]>, inherits: bool) -> Outcome {
    /// Held for writing while this process has a descriptor that programs inherit, and for reading
    /// while a program is started that must not.
    static INHERITANCE: RwLock<()> = RwLock::new(());
    let exclusive = inherits.then(|| INHERITANCE.write().unwrap_or_else(PoisonError::into_inner));
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    let report = vars.map(|vars| {
        let (report, fd) = ReportFile::create().unwrap();
        let fd = if inherits { fd::dup_inheritable(fd.as_fd()).unwrap() } else { fd };
        command.env("LD_PRELOAD", library()).env("MANYLANE_REPORT", ReportFile::path(fd.as_fd()));
        command.envs(vars.iter().copied());
        (report, fd)
    });
    if let Some(namespace) = loopback_namespace() {
        namespace.enter_in_child(&mut command).unwrap();
    }
    let shared = (!inherits).then(|| INHERITANCE.read().unwrap_or_else(PoisonError::into_inner));
    let mut running = Running(Some(command.spawn().unwrap()));
    drop(shared);
    let what = format!("the end of {} {args:?} (status, counters)", program.display());
    let counters = || Counters(report.as_ref().map(|(report, _)| report));
    let end = || (running.0.as_mut().unwrap().try_wait().unwrap(), counters());
    let (status, _) = wait_for_at_most(PROGRAM_TIMEOUT, &what, end, |(status, _)| status.is_some());
    let status = status.unwrap();
    let child = running.0.take().unwrap();
    let output = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    let report = report.map(|(report, _)| report);
    drop(exclusive);
    assert!(status.success(), "{} {args:?}: {status}\n{output}", program.display());
    Outcome { output, report }
}
