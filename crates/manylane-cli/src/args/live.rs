//! The options of what looks at running processes and changes what they let in.

use std::time::Duration;

use clap::Args;
use manylane::{Limit, Prefix};

use super::values::positive;
use crate::parse;

/// What a socket lets in, for `echo` and `run`.
#[derive(Debug, Args)]
pub(crate) struct FilterArgs {
    /// Datagrams per second that each source may send, and how many at once, as
    /// RATE[/BURST][,per=LEN[:LEN6]]: 1000/50, or 20k,per=24 for each /24 (of IPv6 each /56). Twice
    /// at most. What is above it the XDP program drops (engine xdp)
    #[arg(long, value_name = "LIMIT")]
    pub(crate) limit: Vec<Limit>,
    /// Prefix to let in, past all limits, such as 192.0.2.0/24; the longest prefix decides (engine
    /// xdp)
    #[arg(long, value_name = "PREFIX")]
    pub(crate) allow: Vec<Prefix>,
    /// Prefix whose datagrams the XDP program drops, such as 198.51.100.0/24 or 2001:db8::/32
    /// (engine xdp)
    #[arg(long, value_name = "PREFIX")]
    pub(crate) deny: Vec<Prefix>,
}

impl FilterArgs {
    pub(crate) fn is_empty(&self) -> bool {
        self.limit.is_empty() && self.allow.is_empty() && self.deny.is_empty()
    }
}

/// `manylane limit`.
///
/// Without an option, says what is in force and what was dropped for it. All changes of a call come
/// into force together, or none does. Root may, and the user that the process runs as. It holds for
/// datagrams that come in frames of the devices of engine xdp, to addresses and ports of the
/// process; fragments, packets with IP options, and what was sent on this machine are not held
/// back.
#[derive(Debug, Args)]
pub(crate) struct LimitArgs {
    /// Number of the process: one of `manylane echo`, the launcher `manylane run`, or one that
    /// opens a control socket by the library
    #[arg(value_name = "PID")]
    pub(crate) pid: u32,
    /// Limit that takes the place of those there are, as RATE[/BURST][,per=LEN[:LEN6]]; twice at
    /// most
    #[arg(long, value_name = "LIMIT")]
    pub(crate) limit: Vec<Limit>,
    /// Take all limits away
    #[arg(long, conflicts_with = "limit")]
    pub(crate) unlimited: bool,
    /// Prefix to let in, past all limits; the longest prefix decides
    #[arg(long, value_name = "PREFIX")]
    pub(crate) allow: Vec<Prefix>,
    /// Prefix whose datagrams are dropped
    #[arg(long, value_name = "PREFIX")]
    pub(crate) deny: Vec<Prefix>,
    /// Prefix that is neither allowed nor denied any more
    #[arg(long, value_name = "PREFIX")]
    pub(crate) forget: Vec<Prefix>,
    /// What is in force as JSON (manylane.limit.v1)
    #[arg(long)]
    pub(crate) json: bool,
}

/// `manylane top`.
///
/// Shows the lanes of `manylane echo`, of programs under `manylane run`, and of programs that open
/// a control socket by the library (manylane::control), in the network namespace it runs in. Root
/// sees all, a user those of their own. Keys: q or Esc ends, up and down (or k and j) pick a lane,
/// s sorts by another column, space stops and goes on.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Show this process alone, also one in another network namespace (as root)
    #[arg(value_name = "PID")]
    pub(crate) pid: Option<u32>,
    /// Time between two looks, such as 500ms or 2s
    #[arg(long, short, default_value = "1s", value_name = "TIME", value_parser = parse::duration)]
    pub(crate) interval: Duration,
    /// Look twice, print a table and end
    #[arg(long)]
    pub(crate) once: bool,
    /// The same as JSON (manylane.top.v1)
    #[arg(long)]
    pub(crate) json: bool,
    /// Lines of the table that is printed
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = positive)]
    pub(crate) rows: usize,
}
