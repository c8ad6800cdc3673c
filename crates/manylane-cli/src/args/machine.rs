//! Options of `doctor` and `tune`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::values::interval;

/// `manylane doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Check the sockets of this process
    ///
    /// Shows which lose datagrams, how many threads share one, and what `manylane run` would
    /// change.
    #[arg(long, value_name = "PID")]
    pub(crate) pid: Option<u32>,
    /// Check the sockets on this port
    #[arg(long, value_name = "PORT")]
    pub(crate) port: Option<u16>,
    /// Count losses during the next TIME, such as 10s, instead of since boot
    #[arg(long, value_name = "TIME", value_parser = interval)]
    pub(crate) duration: Option<Duration>,
    /// List all possible findings with meaning and remedy, and check nothing
    #[arg(long, conflicts_with_all = ["pid", "port", "duration", "json"])]
    pub(crate) list: bool,
    /// Print everything as JSON (manylane.doctor.v1)
    #[arg(long)]
    pub(crate) json: bool,
}

/// `manylane tune`.
#[derive(Debug, Args)]
pub(crate) struct TuneArgs {
    /// Findings to act on, such as rmem-max-small or gro-off:eth0
    ///
    /// As `manylane doctor` names them. With --undo, the findings whose changes are reverted.
    #[arg(value_name = "FINDING")]
    pub(crate) findings: Vec<String>,
    /// Act on all findings, except those that have to be named
    ///
    /// These are halts-at-once, idle-leaves-late and autogroup-shares, at the cost of other
    /// programs.
    #[arg(long, conflicts_with = "findings")]
    pub(crate) all: bool,
    /// Show what would change, and change nothing
    #[arg(long, short = 'n')]
    pub(crate) dry_run: bool,
    /// Restore the previous values
    #[arg(long, conflicts_with = "all")]
    pub(crate) undo: bool,
    /// File that the previous values are saved to
    #[arg(long, value_name = "FILE", default_value = "/var/lib/manylane/tune.json")]
    pub(crate) state: PathBuf,
    /// Also make changes that briefly take down a link in use
    ///
    /// Without this, a link that the default route or an ssh session needs is not taken down.
    #[arg(long)]
    pub(crate) allow_link_reset: bool,
    /// Print the changes as JSON (manylane.tune.v1)
    #[arg(long)]
    pub(crate) json: bool,
}
