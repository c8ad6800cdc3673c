//! `manylane limit`: shows and changes the filter of a running process through its control socket.

use anyhow::{Context, Result, bail};
use manylane::control;
use manylane_measure::Document;
use serde::Serialize;

use crate::args::LimitArgs;
use crate::output;

/// Name of the document.
const SCHEMA: &str = "manylane.limit.v1";

/// Makes the requested changes, then prints the filter in force.
pub(crate) fn run(args: &LimitArgs) -> Result<()> {
    let pid = args.pid;
    let sockets = control::find_control_sockets(Some(pid))?;
    if sockets.is_empty() {
        bail!(
            "process {pid} has no control socket: 'manylane echo' and the launcher 'manylane run' have one, and programs that open one by the library"
        );
    }
    // A process may also have sockets with other engines.
    let (mut guarded, mut why) = (Vec::new(), None);
    for (client, reply) in sockets.iter().zip(control::fetch_filters(&sockets)) {
        match reply {
            Ok(_) => guarded.push(client.clone()),
            Err(err) => why = Some(err),
        }
    }
    if let (true, Some(err)) = (guarded.is_empty(), why) {
        return Err(err.into());
    }
    let changes = changes(args);
    if !changes.is_empty() {
        for client in &guarded {
            client.change(&changes).context("nothing was changed there")?;
        }
    }
    let replies = control::fetch_filters(&guarded).into_iter();
    let rows = replies.map(|reply| Row::parse(pid, &reply?)).collect::<Result<Vec<_>>>()?;
    if args.json {
        let settings = Settings { command: output::command_line(), pid };
        return output::print_json(&Document::new(SCHEMA, settings, rows));
    }
    let text: String = rows.iter().map(Row::text).collect();
    output::print(&text)
}

/// As the control socket reads them.
fn changes(args: &LimitArgs) -> Vec<String> {
    let mut lines: Vec<String> = args.limit.iter().map(|limit| format!("limit {limit}")).collect();
    if args.unlimited {
        lines.push("unlimited".into());
    }
    for (verb, prefixes) in [("forget", &args.forget), ("allow", &args.allow), ("deny", &args.deny)] {
        lines.extend(prefixes.iter().map(|prefix| format!("{verb} {prefix}")));
    }
    lines
}

/// The settings of the call.
#[derive(Debug, Serialize)]
struct Settings {
    command: String,
    pid: u32,
}

/// The filter that a control socket reports.
#[derive(Debug, Default, Serialize)]
struct Row {
    pid: u32,
    limits: Vec<String>,
    allow: Vec<String>,
    deny: Vec<String>,
    denied: u64,
    limited: u64,
}

impl Row {
    fn parse(pid: u32, filter: &str) -> Result<Self> {
        let mut row = Self { pid, ..Self::default() };
        for line in filter.lines() {
            match line.split_once(' ') {
                Some(("limit", limit)) => row.limits.push(limit.into()),
                Some(("allow", prefix)) => row.allow.push(prefix.into()),
                Some(("deny", prefix)) => row.deny.push(prefix.into()),
                Some(("denied", count)) => row.denied = count.parse()?,
                Some(("limited", count)) => row.limited = count.parse()?,
                // A line of a later version.
                _ => {}
            }
        }
        Ok(row)
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for (what, all) in [("limit", &self.limits), ("allow", &self.allow), ("deny", &self.deny)] {
            text.extend(all.iter().map(|one| format!("{what:<8}{one}\n")));
        }
        if text.is_empty() {
            text.push_str("everything is let in\n");
        }
        text + &format!("dropped {} denied, {} over a limit\n", self.denied, self.limited)
    }
}
