//! `manylane run`: an unmodified server on lanes.
//!
//! The exit code is the program's. 125, 126 and 127 are those of `env(1)` and `nohup(1)`: Manylane
//! failed, the program cannot be executed, there is no such program.
//!
//! | module | does |
//! |---|---|
//! | [`find`](crate::find) | finds the program and the library |
//! | [`loadable`](crate::loadable) | decides whether the library can be loaded into the program |
//! | [`lessor`] | opens devices for engine `xdp`, and leases their queues to the program |
//! | [`launch`] | starts it, forwards signals, waits for its end |
//! | [`report`] | reads the library's counters of lanes and fallbacks |
//! | [`reporter`] | prints them: live, at the end, as JSON |

mod backlog;
mod launch;
mod lessor;
mod report;
mod reporter;

use std::env;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use manylane::control::ControlSocket;
use manylane::{Engine, Filter, MetricsPort};
use manylane_ipc::LANES_MAX;
use manylane_ipc::ports::{PORTS_ENV_VAR, PortRanges};
use manylane_sys::process::{self, Signals};

use self::backlog::Backlog;
use self::launch::{Exit, Running};
use self::report::SharedReport;
use self::reporter::Reporter;
use crate::args::RunArgs;
use crate::find;
use crate::loadable::{self, NotLoadable};
use crate::metrics;
use crate::output;

/// Manylane failed, and the program has not been started.
const EXIT_LAUNCH_FAILED: u8 = 125;
/// Time after which a started program has loaded its libraries, or will not.
const LOAD_TIMEOUT: Duration = Duration::from_secs(1);
/// Longest interval between two checks.
const WAIT_INTERVAL_MAX: Duration = Duration::from_secs(3600);

/// Runs the program.
pub(crate) fn run(args: &RunArgs) -> ExitCode {
    let name = &args.command[0];
    let file = match find::program(name) {
        Ok(file) => file,
        // The parser takes a misspelt option for the program's name.
        Err(_) if name.as_encoded_bytes().starts_with(b"-") => {
            let name = Path::new(name).display();
            output::eprint_line(&format!("manylane: unknown option {name}: see 'manylane run --help'"));
            return ExitCode::from(EXIT_LAUNCH_FAILED);
        }
        Err(missing) => {
            output::eprint_line(&format!("manylane: {}: {}", Path::new(name).display(), missing.reason()));
            return ExitCode::from(missing.exit_code());
        }
    };
    match start(args, &file) {
        Ok(code) => code,
        Err(err) => {
            output::eprint_line(&format!("manylane: {err:#}"));
            ExitCode::from(EXIT_LAUNCH_FAILED)
        }
    }
}

fn start(args: &RunArgs, file: &Path) -> Result<ExitCode> {
    let filter = check(args)?;
    let library = find::library()?;
    let beyond = loadable::check(file).err();
    if let Some(beyond) = &beyond {
        let outcome = if args.strict { "is not started (--strict)" } else { "runs without lanes" };
        output::eprint_line(&format!("manylane: {}; it {outcome}", beyond.message()));
        if args.strict {
            return Ok(ExitCode::from(EXIT_LAUNCH_FAILED));
        }
    }
    let mut command = Command::new(file);
    command.arg0(&args.command[0]).args(&args.command[1..]);
    for (name, value) in env_settings(args) {
        command.env(name, value);
    }
    if !beyond.as_ref().is_some_and(NotLoadable::cannot_load) {
        command.env("LD_PRELOAD", find::ld_preload(env::var_os("LD_PRELOAD"), &library));
    }
    if args.exec {
        let err = command.exec();
        return Ok(exec_failed(file, &err));
    }
    let shared = SharedReport::new()?;
    command.env("MANYLANE_REPORT", shared.path());
    // Now, so that an error is reported before the program runs, and while signals still end this
    // process: a FIFO is not open before it has a reader.
    let json = args.json_file.as_deref().map(output::create).transpose()?;
    let port = args.common.metrics.map(MetricsPort::bind).transpose()?;
    // Before the threads of the lessor: a signal that one of them does not block stops or ends this
    // process.
    let signals = Signals::block()?;
    // Before the program: if this fails, the program is not started.
    let lessor =
        if lessor::is_requested(args) { Some(lessor::open(args, filter, &mut command)?) } else { None };
    let running = match Running::start(command, signals, args.follow, lessor.is_some()) {
        Ok(running) => running,
        Err(err) => return Ok(exec_failed(file, &err)),
    };
    let filter = lessor.as_ref().map(lessor::OpenDevices::filter);
    let rings = lessor.as_ref().map(lessor::OpenDevices::rings);
    if let Some(lessor) = lessor {
        lessor.start()?;
    }
    let page = || {
        let (read, filter, rings) = (shared.reader(), filter.clone(), rings.clone());
        move || reporter::metrics_page(&read(), &Backlog::snapshot(rings.as_ref()), filter.as_ref())
    };
    // Without it only `top` and `limit` do not work.
    let _control = ControlSocket::with_page(page(), filter.clone())
        .map_err(|err| log::warn!("'manylane top' and 'limit' cannot reach this process: {err}"));
    // Only now, because its thread inherits the signal mask and leaves signals to this one.
    if let Some(port) = port {
        metrics::keep(port.serve(page())?);
    }
    let reporter = Reporter::new(shared, file, args, filter);
    let end = supervise(running, &reporter, args, beyond.is_some())?;
    log::logger().flush();
    reporter.finish(end, json)?;
    Ok(exit_as(end))
}

/// Checks options that depend on each other, and the ports in the environment, before anything is
/// created. Returns the filter.
fn check(args: &RunArgs) -> Result<Filter> {
    let filter = args.common.filter.to_filter()?;
    if lessor::is_requested(args) {
        ensure!(!args.exec, "engine xdp needs the launcher: leave out --exec");
    } else {
        ensure!(filter.is_empty(), "--limit, --allow and --deny need --engine xdp");
        ensure!(args.common.interface.is_empty(), "--interface needs --engine xdp");
    }
    ensure!(args.common.engine != Some(Engine::Uring), "engine uring is not for programs: use mmsg or xdp");
    if let Some(lanes) = args.common.lanes {
        ensure!(lanes <= LANES_MAX, "--lanes {lanes}: a socket of a program has at most {LANES_MAX} lanes");
    }
    if args.ports.is_none()
        && let Some(value) = env::var_os(PORTS_ENV_VAR).filter(|value| !value.is_empty())
    {
        let value = value.to_string_lossy();
        let ports = value.parse::<PortRanges>();
        ports.with_context(|| format!("invalid {PORTS_ENV_VAR}={value}"))?;
    }
    Ok(filter)
}

/// The given options, as environment variables of the library.
fn env_settings(args: &RunArgs) -> Vec<(&'static str, String)> {
    let mut all = Vec::new();
    let mut add = |name, value: Option<String>| all.extend(value.map(|value| (name, value)));
    add("MANYLANE_ENGINE", args.common.engine.map(|engine| engine.to_string()));
    add("MANYLANE_STEERING", args.common.steering.map(|steering| steering.to_string()));
    add("MANYLANE_LANES", args.common.lanes.map(|lanes| lanes.to_string()));
    add(PORTS_ENV_VAR, args.ports.as_ref().map(|ports| ports.to_string()));
    add("MANYLANE_RX_USECS", args.common.rx_usecs.map(|delay| delay.to_string()));
    all
}

/// The kernel refused to execute it after all.
fn exec_failed(file: &Path, err: &std::io::Error) -> ExitCode {
    output::eprint_line(&format!("manylane: {}: {err}", file.display()));
    let missing = if err.kind() == std::io::ErrorKind::NotFound {
        find::Missing::NotFound
    } else {
        find::Missing::NotExecutable
    };
    ExitCode::from(missing.exit_code())
}

/// Represents the program until it ends, and prints progress meanwhile.
fn supervise(mut running: Running, reporter: &Reporter, args: &RunArgs, is_beyond: bool) -> Result<Exit> {
    let failed = "cannot wait for the program";
    let start = Instant::now();
    let mut load_deadline = (!is_beyond).then_some(start + LOAD_TIMEOUT);
    let interval = args.common.interval.filter(|interval| !interval.is_zero());
    let mut next = interval.and_then(|interval| start.checked_add(interval));
    let mut follows = false;
    loop {
        let now = Instant::now();
        let until =
            [load_deadline, next, Some(now + WAIT_INTERVAL_MAX)].into_iter().flatten().min().unwrap_or(now);
        if let Some(end) = running.wait_until(until).context(failed)? {
            return Ok(end);
        }
        let now = Instant::now();
        if running.is_followed() && !std::mem::replace(&mut follows, true) {
            output::eprint_line("manylane: the program runs in the background now; waiting until it ends");
        }
        if load_deadline.is_some_and(|load_deadline| now >= load_deadline) {
            load_deadline = None;
            if reporter.report().processes == 0 && !is_before_exec(running.pid()) {
                output::eprint_line(&format!(
                    "manylane: process {} runs without lanes: the dynamic linker has not loaded the library (its message, if any, gives the reason)",
                    running.pid()
                ));
            }
        }
        if let (Some(due), Some(interval)) = (next, interval)
            && now >= due
        {
            reporter.print_progress();
            next = now.checked_add(interval);
        }
    }
}

/// True if the child has not called exec yet.
fn is_before_exec(pid: i32) -> bool {
    let exe = |pid: &dyn std::fmt::Display| fs::read_link(format!("/proc/{pid}/exe")).ok();
    let theirs: Option<PathBuf> = exe(&pid);
    theirs.is_some() && theirs == exe(&"self")
}

/// Ends as the program ended: its code, or by its signal.
fn exit_as(end: Exit) -> ExitCode {
    match end {
        // Only the lower eight bits of exit(2)'s argument are visible to other processes.
        Exit::Code(code) => ExitCode::from((code & 0xff) as u8),
        Exit::Signal(signal) => {
            process::exit_by_signal(signal);
            // The signal did not end this process.
            ExitCode::from(u8::try_from(128 + signal).unwrap_or(EXIT_LAUNCH_FAILED))
        }
    }
}
