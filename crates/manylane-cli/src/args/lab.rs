//! Options of `manylane lab`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::values::within;

/// `manylane lab`.
#[derive(Debug, Args)]
pub(crate) struct LabArgs {
    /// The paper
    #[arg(value_enum)]
    pub(crate) paper: LabPaper,
    /// At most 60 seconds for each paper: fewer rounds and datagrams, shorter floods
    #[arg(long)]
    pub(crate) quick: bool,
    /// Rounds of each experiment [default: 9; 2 with --quick]
    #[arg(long, value_name = "N", value_parser = within(1..))]
    pub(crate) rounds: Option<usize>,
    /// Units that all readers of a run receive (rivera) [default: 500000]
    ///
    /// 25000 with --quick.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) units: Option<u64>,
    /// Length of a flood (sarma) [default: 60s; 2s with --quick]
    #[arg(long, value_name = "TIME", value_parser = crate::parse::duration)]
    pub(crate) flood_duration: Option<std::time::Duration>,
    /// Length of a sample in all other experiments [default: 1s; 300ms with --quick]
    #[arg(long, value_name = "TIME", value_parser = crate::parse::duration)]
    pub(crate) duration: Option<std::time::Duration>,
    /// Parts to run: those whose names contain one of these (see --list) [default: all]
    #[arg(long, value_delimiter = ',', value_name = "PART,…")]
    pub(crate) parts: Vec<String>,
    /// List the parts, and run nothing
    #[arg(long)]
    pub(crate) list: bool,
    /// Continue an interrupted run from FILE, which it named
    #[arg(long, value_name = "FILE")]
    pub(crate) resume: Option<PathBuf>,
    /// Folder for the state, the JSON with all samples, and the HTML report
    #[arg(long, default_value = "report", value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Print the result as JSON on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

/// The papers that can be selected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LabPaper {
    /// Threads that read one UDP socket: figures 2 and 4, Tables I to III
    Rivera,
    /// Atomic operations, locks, floods and starvation: Tables 1 to 3, figures 7 to 9
    Sarma,
    /// Cost of receiving many messages with one call, and the announced two-host test
    Orlowsky,
    /// Receivers compared by datagrams per second and round-trip time: Tables 1 and 2
    Priambodo,
    /// A TCP proxy on the kernel's stack and on one in user space: figures 2 and 3
    Salesforce,
    /// All papers, in one report
    All,
    /// List the papers
    List,
}
