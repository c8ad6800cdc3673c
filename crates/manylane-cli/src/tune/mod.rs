//! `manylane tune`: applies the doctor's advice, and reverts it.
//!
//! | module | does |
//! |---|---|
//! | [`protected_links`] | finds changes that could interrupt the user's connection |
//! | [`apply`] | makes a change, reverts one |
//! | [`journal`] | saves the previous value, on the disk before each change |
//! | [`settings`] | the machine, or one for tests |

mod apply;
mod journal;
pub(crate) mod protected_links;
mod settings;
#[cfg(test)]
mod tests;

use anyhow::{Context, Result, bail};
use manylane_measure::Machine;
use serde::Serialize;
use serde_json::json;

use self::apply::Outcome;
use self::journal::{Entry, Journal};
use self::protected_links::ProtectedLinks;
use self::settings::LocalMachine;
use crate::args::TuneArgs;
use crate::doctor::change::Change;
use crate::doctor::collect::{self, Scope};
use crate::doctor::finding::Finding;
use crate::doctor::rules;
use crate::output::{self, AlreadyReported, UsageError};

/// The outcome for a setting.
#[derive(Debug, Serialize)]
struct Row {
    finding: String,
    setting: String,
    /// The previous value.
    before: String,
    /// The value now, or the intended one.
    after: String,
    outcome: Outcome,
    why: Option<String>,
}

/// Applies, reverts, or shows changes.
pub(crate) fn run(args: &TuneArgs) -> Result<()> {
    check(args)?;
    let rows = if args.undo { undo(args)? } else { apply_findings(args)? };
    if args.json {
        output::print_json(&json!({
            "schema": "manylane.tune.v1",
            "machine": Machine::read(),
            "settings": { "undo": args.undo, "dry_run": is_dry_run(args), "state": args.state },
            "rows": rows,
        }))?;
    }
    if rows.iter().any(|row| row.outcome.is_failure()) { Err(AlreadyReported.into()) } else { Ok(()) }
}

/// Without findings to act on, only show them.
fn is_dry_run(args: &TuneArgs) -> bool {
    args.dry_run || !(args.undo || args.all || !args.findings.is_empty())
}

/// Words that do not name a finding.
fn check(args: &TuneArgs) -> Result<()> {
    let ids: Vec<&str> = rules::all().iter().map(|rule| rule.id).collect();
    for word in &args.findings {
        let id = word.split(':').next().unwrap_or_default();
        if !ids.contains(&id) {
            let all = ids.join(", ");
            bail!(UsageError(format!("unknown finding {word}: expected one of {all}")));
        }
    }
    Ok(())
}

/// Prints a line to standard output, or to standard error with --json.
fn print_line(args: &TuneArgs, line: &str) -> Result<()> {
    if args.json {
        output::eprint_line(line);
        return Ok(());
    }
    output::print(&format!("{line}\n"))
}

fn apply_findings(args: &TuneArgs) -> Result<Vec<Row>> {
    let facts = collect::collect_all(Scope::default());
    let findings = rules::evaluate(&facts).findings;
    // Without names: all except those that have to be named.
    let is_wanted = |finding: &&Finding| match &args.findings[..] {
        [] => !finding.only_named,
        names => names.iter().any(|word| finding.is_named(word)),
    };
    let wanted: Vec<&Finding> = findings.iter().filter(is_wanted).collect();
    if args.findings.is_empty() {
        for finding in findings.iter().filter(|finding| finding.only_named) {
            print_line(args, &format!("only if named: {}: {}", finding.name(), finding.run.join("; ")))?;
        }
    }
    for word in &args.findings {
        if !wanted.iter().any(|finding| finding.is_named(word)) {
            print_line(args, &format!("{word}: not found on this machine, nothing to do"))?;
        }
    }
    let resets = wanted.iter().flat_map(|finding| &finding.changes).any(|change| change.target.resets_link());
    let guard = detect_protected(resets && !args.allow_link_reset)?;
    let dry = is_dry_run(args);
    let mut journal = if dry { Journal::open_read_only(&args.state)? } else { Journal::open(&args.state)? };
    let mut rows = Vec::new();
    for finding in wanted {
        if finding.changes.is_empty() && !args.findings.is_empty() {
            print_line(
                args,
                &format!("{}: no setting to change; instead: {}", finding.name(), finding.run.join("; ")),
            )?;
        }
        for change in &finding.changes {
            rows.push(apply_change(args, &mut journal, &guard, &finding.name(), change)?);
        }
    }
    if rows.is_empty() {
        print_line(args, "nothing to change")?;
    }
    if is_dry_run(args) && !args.dry_run {
        list(args, &journal)?;
        if !rows.is_empty() {
            print_line(args, "to make these changes: manylane tune --all, or name the findings")?;
        }
    } else if rows.iter().any(|row| row.outcome == Outcome::Done) {
        print_line(args, "to revert: manylane tune --undo")?;
    }
    Ok(rows)
}

/// Links that must stay up, if a change may take one down.
fn detect_protected(is_needed: bool) -> Result<ProtectedLinks> {
    let context = "use --allow-link-reset to change them without this check";
    if is_needed { ProtectedLinks::detect().context(context) } else { Ok(ProtectedLinks::default()) }
}

/// Prints one change, and makes it.
fn apply_change(
    args: &TuneArgs,
    journal: &mut Journal,
    guard: &ProtectedLinks,
    finding: &str,
    change: &Change,
) -> Result<Row> {
    let Change { target, value } = change;
    let row = |before: &str, outcome, why| Row {
        finding: finding.into(),
        setting: target.to_string(),
        before: before.into(),
        after: value.clone(),
        outcome,
        why,
    };
    let current = match target.read() {
        Ok(current) => current,
        Err(err) => {
            print_line(args, &format!("{finding}: {err:#}"))?;
            return Ok(row("", Outcome::Failed, Some(format!("{err:#}"))));
        }
    };
    print_line(args, &format!("{finding}: {target}: {current} -> {value}"))?;
    if target.is_same(&current, value) {
        return Ok(row(&current, Outcome::Already, None));
    }
    if let Some(why) = guard.refusal(target) {
        print_line(args, &format!("  refused: {why}"))?;
        return Ok(row(&current, Outcome::Refused, Some(why)));
    }
    if is_dry_run(args) {
        return Ok(row(&current, Outcome::Would, None));
    }
    match apply::apply(&LocalMachine, journal, finding, change) {
        Ok(outcome) => Ok(row(&current, outcome, None)),
        Err(err) => {
            print_line(args, &format!("  failed: {err:#}"))?;
            Ok(row(&current, Outcome::Failed, Some(format!("{err:#}"))))
        }
    }
}

/// The changes in force.
fn list(args: &TuneArgs, journal: &Journal) -> Result<()> {
    for entry in &journal.entries {
        let Entry { finding, target, before, after, intent, .. } = entry;
        let now = after.as_ref().or(intent.as_ref()).map_or("?", String::as_str);
        print_line(args, &format!("changed earlier: {finding}: {target}: {before} -> {now}"))?;
    }
    Ok(())
}

fn undo(args: &TuneArgs) -> Result<Vec<Row>> {
    let mut journal =
        if args.dry_run { Journal::open_read_only(&args.state)? } else { Journal::open(&args.state)? };
    let is_wanted = |entry: &Entry| {
        let names = |word: &String| *word == entry.finding || entry.finding.split(':').next() == Some(word);
        args.findings.is_empty() || args.findings.iter().any(names)
    };
    // The last one first. Each is removed from the journal when it is done.
    let wanted: Vec<usize> =
        (0..journal.entries.len()).rev().filter(|&at| is_wanted(&journal.entries[at])).collect();
    let resets = wanted.iter().any(|&at| journal.entries[at].target.resets_link());
    let guard = detect_protected(resets && !args.allow_link_reset)?;
    let mut rows = Vec::new();
    for at in wanted {
        rows.push(undo_entry(args, &mut journal, &guard, at)?);
    }
    if rows.is_empty() {
        print_line(args, "nothing to revert")?;
    }
    Ok(rows)
}

/// Reverts one change, and prints the outcome.
fn undo_entry(args: &TuneArgs, journal: &mut Journal, guard: &ProtectedLinks, at: usize) -> Result<Row> {
    let entry = journal.entries[at].clone();
    let target = &entry.target;
    let row = |current: &str, outcome, why| Row {
        finding: entry.finding.clone(),
        setting: target.to_string(),
        before: current.into(),
        after: entry.before.clone(),
        outcome,
        why,
    };
    let planned = apply::plan_undo(&LocalMachine, &entry);
    if let Ok((Outcome::Would, current)) = &planned {
        print_line(args, &format!("{}: {target}: {current} -> {}", entry.finding, entry.before))?;
        if let Some(why) = guard.refusal(target) {
            print_line(args, &format!("  refused: {why}"))?;
            return Ok(row(current, Outcome::Refused, Some(why)));
        }
    }
    let done = if args.dry_run { planned } else { apply::undo(&LocalMachine, journal, at) };
    let (outcome, current) = match done {
        Ok(done) => done,
        Err(err) => {
            print_line(args, &format!("{}: {target}: failed: {err:#}", entry.finding))?;
            return Ok(row("", Outcome::Failed, Some(format!("{err:#}"))));
        }
    };
    let before = &entry.before;
    let why = match outcome {
        Outcome::Already => Some(format!("already has the old value {current}")),
        Outcome::Foreign => {
            Some(format!("changed to {current} since then, left alone (old value: {before})"))
        }
        Outcome::Gone => {
            Some(format!("the device is gone, or another one has its name (old value: {before})"))
        }
        Outcome::Elsewhere => Some("belongs to another network namespace: run tune --undo there".into()),
        _ => None,
    };
    if let Some(why) = &why {
        print_line(args, &format!("{}: {target}: {why}", entry.finding))?;
    }
    Ok(row(&current, outcome, why))
}
