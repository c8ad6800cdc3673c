//! `manylane doctor`: checks what limits UDP on this machine. `tune` makes the changes.
//!
//! ```text
//! collect/ ─► facts.rs ─► rules/ ─► finding.rs ─► text.rs, JSON, exit code
//!  /proc, /sys, netlink,   plain     facts in,         └─► change.rs ─► manylane tune
//!  the library's probe     values    findings out
//! ```
//!
//! - Only [`collect`] reads the machine, and it never fails. A value that cannot be read becomes a
//!   gap with its reason.
//! - A rule sees facts and nothing else, and keeps no state. It reports a finding, no finding, or
//!   that it cannot judge. A rule is data: its id, meaning, remedy and cost are a row of
//!   docs/doctor.md. Tests check every rule both ways.
//! - A finding names the changes that `tune` would make: the setting and its value. Nothing is
//!   changed here.

pub(crate) mod change;
pub(crate) mod collect;
pub(crate) mod ethtool;
pub(crate) mod facts;
pub(crate) mod finding;
pub(crate) mod link;
pub(crate) mod netlink;
pub(crate) mod rules;
mod text;

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use manylane_measure::Machine;
use manylane_sys::process;
use serde_json::json;

use self::collect::Scope;
use self::facts::Facts;
use self::finding::Verdict;
use crate::args::DoctorArgs;
use crate::output::{self, AlreadyReported};

/// Gathers facts, judges them, prints the findings.
pub(crate) fn run(args: &DoctorArgs) -> Result<()> {
    if args.list {
        return output::print(&text::list(&rules::all()));
    }
    let asked = Scope { pid: args.pid, port: args.port };
    if let Some(pid) = asked.pid {
        ensure!(process::exists(pid), "there is no process {pid}");
    }
    let facts = collect_facts(asked, args.duration)?;
    let verdict = rules::evaluate(&facts);
    if args.json {
        output::print_json(&document(args, &facts, &verdict))?;
    } else {
        output::print(&text::report(&facts, &verdict))?;
    }
    if verdict.has_problems() { Err(AlreadyReported.into()) } else { Ok(()) }
}

/// The facts, with losses since boot or during `duration`.
fn collect_facts(asked: Scope, duration: Option<Duration>) -> Result<Facts> {
    let before = collect::collect_all(asked);
    if before.asked && before.sockets.is_empty() {
        bail!("{}", no_socket_message(asked, &before));
    }
    let mut facts = match duration {
        None => before,
        Some(duration) => {
            let start = Instant::now();
            std::thread::sleep(duration);
            collect::collect_all(asked).delta_since(&before, start.elapsed().as_secs_f64())
        }
    };
    if !facts.asked {
        facts.sockets.retain(|socket| socket.drops > 0);
        let sockets = &facts.sockets;
        facts.programs.retain(|program| sockets.iter().any(|socket| program.sockets.contains(&socket.inode)));
    }
    Ok(facts)
}

fn no_socket_message(asked: Scope, facts: &Facts) -> String {
    if let (Some(pid), Some(why)) = (asked.pid, facts.gaps.get("processes")) {
        return format!("process {pid}: {why}");
    }
    let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/net")).ok();
    if let Some(pid) = asked.pid
        && namespace(&pid.to_string()).is_some_and(|theirs| Some(theirs) != namespace("self"))
    {
        return format!(
            "process {pid} is in another network namespace: nsenter --target {pid} --net manylane doctor --pid {pid}"
        );
    }
    let of = asked.pid.map_or(String::new(), |pid| format!(" of process {pid}"));
    let on = asked.port.map_or(String::new(), |port| format!(" on port {port}"));
    format!("there is no UDP socket{of}{on} in this network namespace")
}

fn document(args: &DoctorArgs, facts: &Facts, verdict: &Verdict) -> serde_json::Value {
    json!({
        "schema": "manylane.doctor.v1",
        "machine": Machine::read(),
        "settings": {
            "pid": args.pid,
            "port": args.port,
            "duration": args.duration.map(|duration| duration.as_secs_f64()),
        },
        "rows": verdict.findings,
        "unknown": verdict.unknown,
        "facts": facts,
    })
}
