//! The options of `manylane lab`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::values::positive;

/// `manylane lab`.
///
/// Each paper's table is printed in the paper's form, with the paper's numbers beside those of this
/// machine, what differs from the paper's set-up, and a conclusion made from the figures. What is
/// done is kept in a file: a run that was stopped goes on with --resume.
#[derive(Debug, Args)]
pub(crate) struct LabArgs {
    /// The paper
    #[arg(value_enum)]
    pub(crate) paper: LabPaper,
    /// Each paper within 60 seconds: fewer rounds, fewer datagrams, shorter floods
    #[arg(long)]
    pub(crate) quick: bool,
    /// Rounds of each experiment [default: 9; 2 with --quick]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) rounds: Option<usize>,
    /// Units that the readers of one run take together (rivera) [default: 500000; 25000 with
    /// --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) units: Option<u64>,
    /// Length of a flood (sarma) [default: 60s; 2s with --quick]
    #[arg(long, value_name = "TIME", value_parser = crate::parse::duration)]
    pub(crate) flood: Option<std::time::Duration>,
    /// Length of a stretch of traffic in all other experiments [default: 1s; 300ms with --quick]
    #[arg(long, value_name = "TIME", value_parser = crate::parse::duration)]
    pub(crate) stretch: Option<std::time::Duration>,
    /// Only the parts whose names contain this (see --list)
    #[arg(long, value_name = "TEXT")]
    pub(crate) only: Option<String>,
    /// List the parts of the run, and do nothing
    #[arg(long)]
    pub(crate) list: bool,
    /// Go on with a run that was stopped: the file that it named
    #[arg(long, value_name = "FILE")]
    pub(crate) resume: Option<PathBuf>,
    /// Folder for the state, the JSON with all samples, and the HTML report
    #[arg(long, default_value = "report", value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// The result as JSON on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

/// What can be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LabPaper {
    /// Threads that read one UDP socket: figures 2 and 4, Tables I to III
    Rivera,
    /// Atomic operations, locks, floods and starvation: Tables 1 to 3, figures 7 to 9
    Sarma,
    /// What taking many messages by one call costs, and the experiment between two hosts that the
    /// paper announces
    Orlowsky,
    /// Receivers compared in datagrams per second, and round-trip times: Tables 1 and 2
    Priambodo,
    /// Proxies on TCP lanes: not yet available
    Salesforce,
    /// All of them, one report
    All,
    /// What there is
    List,
}
