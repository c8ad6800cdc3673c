//! `manylane limit`: shows and changes the filter of a running process through its control socket.

use anyhow::{Context, Error, Result, bail};
use manylane::ErrorKind;
use manylane::control::{self, ControlClient};
use manylane_measure::Document;
use serde::Serialize;

use crate::args::LimitArgs;
use crate::output;

/// Name of the document.
const SCHEMA: &str = "manylane.limit.v1";
/// Maximum number of failed sockets that an error names: any user may make some that fail.
const FAILED_NAMES_MAX: usize = 8;

/// Makes the requested changes, then prints the filters in force. A socket that fails does not keep
/// others from being changed.
pub(crate) fn run(args: &LimitArgs) -> Result<()> {
    let pid = args.pid;
    let sockets = control::find_control_sockets(Some(pid))?;
    if sockets.is_empty() {
        bail!(
            "process {pid} has no control socket: give the PID of 'manylane echo', of the launcher 'manylane run', or of a program that opens one (manylane::control)"
        );
    }
    let (filtered, mut failed) = find_filtered(&sockets)?;
    let changes = changes(args);
    let (verb, done) = if changes.is_empty() {
        ("read", filtered.iter().map(name).collect())
    } else {
        let (changed, refused) = change(&filtered, &changes);
        failed.extend(refused);
        ("changed", changed)
    };
    let shown = if done.is_empty() { Ok(()) } else { show(args, &filtered) };
    outcome(verb, &done, failed).and(shown)
}

/// A socket that failed, with the reason.
type Failure = (String, Error);

/// The sockets with a filter, and those that may have one and did not answer.
fn find_filtered(sockets: &[ControlClient]) -> Result<(Vec<ControlClient>, Vec<Failure>)> {
    let (mut filtered, mut failed, mut why) = (Vec::new(), Vec::new(), None);
    for (client, reply) in sockets.iter().zip(control::fetch_filters(sockets)) {
        match reply {
            Ok(_) => filtered.push(client.clone()),
            Err(err) if matches!(err.kind(), ErrorKind::Io | ErrorKind::Limit) => {
                failed.push((name(client), err.into()));
            }
            // It has another engine, was closed meanwhile, or belongs to another process.
            Err(err) => why = Some(err),
        }
    }
    match why {
        Some(err) if filtered.is_empty() && failed.is_empty() => Err(err.into()),
        _ => Ok((filtered, failed)),
    }
}

/// Changes the filter of each socket. Returns the names of those that are changed, and the others.
fn change(filtered: &[ControlClient], changes: &[String]) -> (Vec<String>, Vec<Failure>) {
    let (mut changed, mut failed) = (Vec::new(), Vec::new());
    for client in filtered {
        match client.change(changes) {
            Ok(()) => changed.push(name(client)),
            Err(err) => failed.push((name(client), err.into())),
        }
    }
    (changed, failed)
}

/// An error if some sockets failed, which names those that were changed or read, and the first
/// reason.
fn outcome(verb: &str, done: &[String], failed: Vec<Failure>) -> Result<()> {
    let done = if done.is_empty() { "nothing".into() } else { done.join(", ") };
    let (mut names, errors): (Vec<String>, Vec<Error>) = failed.into_iter().unzip();
    let more = names.len().saturating_sub(FAILED_NAMES_MAX);
    names.truncate(FAILED_NAMES_MAX);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    match errors.into_iter().next() {
        Some(err) => Err(err.context(format!("{verb} {done}; failed at {}{more}", names.join(", ")))),
        None => Ok(()),
    }
}

/// The name of a socket, for a terminal.
fn name(client: &ControlClient) -> String {
    output::strip_control(client.name())
}

/// Prints the filters in force.
fn show(args: &LimitArgs, filtered: &[ControlClient]) -> Result<()> {
    let pid = args.pid;
    let replies = control::fetch_filters(filtered);
    let parse =
        |reply: manylane::Result<String>| Row::parse(pid, &reply.context("cannot read the filter in force")?);
    let rows = replies.map(parse).collect::<Result<Vec<_>>>()?;
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
        // What another process says reaches a terminal.
        for line in filter.lines().map(output::strip_control) {
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
            text.push_str("no filter\n");
        }
        text + &format!("dropped {} denied, {} over a limit\n", self.denied, self.limited)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::time::Duration;

    use manylane::FilterHandle;
    use manylane::control::ControlSocket;
    use manylane_sys::unix_socket;
    use manylane_test_support::wait_for;

    use super::*;

    #[test]
    fn what_a_process_says_does_not_control_a_terminal() {
        let row = Row::parse(1, "limit 5\x1b[2J\ndeny \u{9b}2Jx\ndenied 1\nlimited 2\n").unwrap();
        assert_eq!((&row.limits[..], &row.deny[..]), (&["5[2J".to_owned()][..], &["2Jx".to_owned()][..]));
    }

    #[test]
    fn an_error_names_some_failed_sockets_and_counts_the_others() {
        let failed = |count: usize| (0..count).map(|at| (format!("s{at}"), Error::msg("silent"))).collect();
        assert!(outcome("changed", &[], failed(0)).is_ok());
        let text = |count| format!("{:#}", outcome("changed", &["a".into()], failed(count)).unwrap_err());
        assert_eq!(text(2), "changed a; failed at s0, s1: silent");
        assert!(text(FAILED_NAMES_MAX).ends_with("s6, s7: silent"));
        assert!(text(FAILED_NAMES_MAX + 3).ends_with("s6, s7 and 3 more: silent"));
    }

    #[test]
    fn loopback_a_partial_change_is_an_error_with_the_names() {
        let pid = std::process::id();
        let filter = FilterHandle::default();
        let control = ControlSocket::with_page(String::new, Some(filter.clone())).unwrap();
        let changed = control::find_control_sockets(Some(pid)).unwrap();
        let [changed] = &changed[..] else { panic!("{changed:?}") };
        // Another one whose backlog is full.
        let silent = format!("manylane.control.{pid}.900000");
        let listener = unix_socket::listen(&silent).unwrap();
        let connect = || unix_socket::connect_now_without_fds(&silent, Duration::from_secs(1)).ok();
        let queued: Vec<OwnedFd> = std::iter::from_fn(connect).collect();

        let mut args = LimitArgs {
            pid,
            limit: Vec::new(),
            unlimited: false,
            allow: Vec::new(),
            deny: vec!["10.0.0.0/8".parse().unwrap()],
            forget: Vec::new(),
            json: false,
        };
        // Again, as long as the socket that replies has no CPU for the 2 s that it has for it.
        let said = |args: &LimitArgs, expected: &str| {
            let text = || format!("{:#}", run(args).unwrap_err());
            wait_for(expected, text, |text| text.starts_with(expected));
        };
        said(&args, &format!("changed {}; failed at {silent}: process {pid} does not reply", changed.name()));
        assert_eq!(filter.current().rules().count(), 1);
        args.deny.clear();
        said(&args, &format!("read {}; failed at {silent}", changed.name()));

        drop((control, queued, listener));
        // A child that another test has just forked may still have copies of them.
        let left = || {
            let left = control::find_control_sockets(Some(pid)).unwrap();
            left.iter().map(|client| client.name().to_owned()).collect::<Vec<String>>()
        };
        wait_for("no control socket", left, Vec::is_empty);
        let ours = FilterHandle::default();
        let control = ControlSocket::with_page(String::new, Some(ours)).unwrap();
        wait_for("a reply", || run(&args).map_err(|err| format!("{err:#}")), Result::is_ok).unwrap();
        drop(control);
    }
}
