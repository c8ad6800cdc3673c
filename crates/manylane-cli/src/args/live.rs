//! Options of `top` and `limit`, and the filter options of `echo` and `run`.

use std::time::Duration;

use clap::Args;
use manylane::{Filter, Limit, Prefix, Rule};

use super::values::within;
use crate::parse;

/// The filter of a socket, for `echo` and `run`.
#[derive(Debug, Args)]
pub(crate) struct FilterArgs {
    /// Limit for each source: RATE[/BURST][,per=LEN[:LEN6]] (engine xdp)
    ///
    /// Datagrams per second, and the burst: 1000/50, or 20k,per=24 for each /24 (IPv6: each /56).
    /// The XDP program drops datagrams above the limit. May be given twice.
    #[arg(long, help_heading = "Engine xdp", value_name = "LIMIT")]
    pub(crate) limit: Vec<Limit>,
    /// Prefix to admit past all limits, such as 192.0.2.0/24 (engine xdp)
    ///
    /// The longest matching prefix decides.
    #[arg(long, help_heading = "Engine xdp", value_name = "PREFIX")]
    pub(crate) allow: Vec<Prefix>,
    /// Prefix to drop, such as 198.51.100.0/24 or 2001:db8::/32 (engine xdp)
    #[arg(long, help_heading = "Engine xdp", value_name = "PREFIX")]
    pub(crate) deny: Vec<Prefix>,
}

impl FilterArgs {
    /// # Errors
    /// For more limits or prefixes than a socket can have.
    pub(crate) fn to_filter(&self) -> manylane::Result<Filter> {
        let mut filter = Filter::default();
        filter.set_limits(&self.limit)?;
        for (prefixes, rule) in [(&self.allow, Rule::Allow), (&self.deny, Rule::Deny)] {
            prefixes.iter().try_for_each(|prefix| filter.set_rule(*prefix, Some(rule)))?;
        }
        Ok(filter)
    }
}

/// `manylane limit`.
#[derive(Debug, Args)]
pub(crate) struct LimitArgs {
    /// PID of `manylane echo`, `manylane run`, or a program with a control socket
    #[arg(value_name = "PID")]
    pub(crate) pid: u32,
    /// Limit that replaces the current ones: RATE[/BURST][,per=LEN[:LEN6]]
    ///
    /// May be given twice.
    #[arg(long, value_name = "LIMIT")]
    pub(crate) limit: Vec<Limit>,
    /// Remove all limits
    #[arg(long, conflicts_with = "limit")]
    pub(crate) unlimited: bool,
    /// Prefix to admit past all limits; the longest matching prefix decides
    #[arg(long, value_name = "PREFIX")]
    pub(crate) allow: Vec<Prefix>,
    /// Prefix to drop
    #[arg(long, value_name = "PREFIX")]
    pub(crate) deny: Vec<Prefix>,
    /// Prefix to remove from the allowed and denied ones
    #[arg(long, value_name = "PREFIX")]
    pub(crate) forget: Vec<Prefix>,
    /// Print the filter in force as JSON (manylane.limit.v1)
    #[arg(long)]
    pub(crate) json: bool,
}

/// `manylane top`.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Show only this process; as root also one in another network namespace
    #[arg(value_name = "PID")]
    pub(crate) pid: Option<u32>,
    /// Time between two samples, such as 500ms or 2s
    #[arg(long, short, default_value = "1s", value_name = "TIME", value_parser = parse::duration)]
    pub(crate) interval: Duration,
    /// Take two samples, print a table and exit
    #[arg(long)]
    pub(crate) once: bool,
    /// Print the table as JSON (manylane.top.v1)
    #[arg(long)]
    pub(crate) json: bool,
    /// Maximum number of lines of the printed table
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = within(1..))]
    pub(crate) rows: usize,
}
