//! The options of what looks at the machine and changes it.

use std::path::PathBuf;

use clap::Args;

use super::values::interval;

/// `manylane doctor`.
///
/// Looks at the kernel, devices, settings and counters of the network namespace it runs in, and
/// changes nothing. Each finding says what was seen, why it matters and what to run; those that
/// cost most come first. Exit code 1 if datagrams were lost or something holds the machine back;
/// notes alone are 0. As root it sees more: whose sockets those are.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Look at the sockets of this process: which lose, how many threads share one, what
    /// `manylane run` would change
    #[arg(long, value_name = "PID")]
    pub(crate) pid: Option<u32>,
    /// Look at the sockets on this port
    #[arg(long, value_name = "PORT")]
    pub(crate) port: Option<u16>,
    /// Count what is lost in so many seconds from now, and not what was lost since boot
    #[arg(long, value_name = "SECONDS", value_parser = interval)]
    pub(crate) watch: Option<f64>,
    /// Say what there is to be found, what each means and what helps, and look at nothing
    #[arg(long, conflicts_with_all = ["pid", "port", "watch", "json"])]
    pub(crate) list: bool,
    /// Everything as JSON (manylane.doctor.v1)
    #[arg(long)]
    pub(crate) json: bool,
}

/// `manylane tune`.
///
/// Without a finding and without --all, says what could be changed. Each change is shown before it
/// is made, and what was there is kept in the file of --state before that, so that --undo puts it
/// back, also after a crash or a restart. Settings that somebody else has changed meanwhile are
/// left alone, and named. Settings do not outlive a restart of the machine.
#[derive(Debug, Args)]
pub(crate) struct TuneArgs {
    /// Findings of `manylane doctor` to act on, such as rmem-max-small or gro-off:eth0; with
    /// --undo, what to take back
    #[arg(value_name = "FINDING")]
    pub(crate) findings: Vec<String>,
    /// Act on all findings, but for those that have to be named since others pay for them
    /// (halts-at-once, idle-leaves-late, autogroup-shares)
    #[arg(long, conflicts_with = "findings")]
    pub(crate) all: bool,
    /// Show what would be changed, and change nothing
    #[arg(long, short = 'n')]
    pub(crate) dry_run: bool,
    /// Put back what was there before
    #[arg(long, conflicts_with = "all")]
    pub(crate) undo: bool,
    /// File that keeps what was there
    #[arg(long, value_name = "FILE", default_value = "/var/lib/manylane/tune.json")]
    pub(crate) state: PathBuf,
    /// Also make changes that take down, for a moment, a link which the default route or an ssh
    /// session needs
    #[arg(long)]
    pub(crate) allow_link_reset: bool,
    /// What was done as JSON (manylane.tune.v1)
    #[arg(long)]
    pub(crate) json: bool,
}
