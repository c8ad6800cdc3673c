//! `manylane tune`: the doctor's advice carried out, and taken back.
//!
//! | module | does |
//! |---|---|
//! | [`guard`] | says what could cut the user off |
//! | [`apply`] | makes a change, takes one back |
//! | [`journal`] | keeps what was there, on the disk before each change |
//! | [`settings`] | the machine, or one for tests |

mod apply;
pub(crate) mod guard;
mod journal;
mod settings;
#[cfg(test)]
mod tests;

use anyhow::{Context, Result, bail};
use manylane_testbed::machine::Machine;
use serde::Serialize;
use serde_json::json;

use self::apply::Outcome;
use self::guard::Guard;
use self::journal::{Entry, Journal};
use self::settings::Here;
use crate::args::TuneArgs;
use crate::doctor::change::Change;
use crate::doctor::finding::Finding;
use crate::doctor::gather::{self, Asked};
use crate::doctor::rules;
use crate::output::{self, Unwell, Usage};

/// What became of a setting.
#[derive(Debug, Serialize)]
struct Row {
    finding: String,
    setting: String,
    /// What was there.
    before: String,
    /// What it is, or was to be.
    after: String,
    outcome: Outcome,
    why: Option<String>,
}

/// Applies, takes back, or shows.
pub(crate) fn run(args: &TuneArgs) -> Result<()> {
    check(args)?;
    let rows = if args.undo { undo(args)? } else { advise(args)? };
    if args.json {
        output::print_json(&json!({
            "schema": "manylane.tune.v1",
            "machine": Machine::read(),
            "settings": { "undo": args.undo, "dry_run": is_dry(args), "state": args.state },
            "rows": rows,
        }))?;
    }
    if rows.iter().any(|row| row.outcome.is_bad()) { Err(Unwell.into()) } else { Ok(()) }
}

/// Without a finding to act on, it only shows.
fn is_dry(args: &TuneArgs) -> bool {
    args.dry_run || !(args.undo || args.all || !args.findings.is_empty())
}

/// Words that mean no finding at all.
fn check(args: &TuneArgs) -> Result<()> {
    let ids: Vec<&str> = rules::all().iter().map(|rule| rule.id).collect();
    for word in &args.findings {
        let id = word.split(':').next().unwrap_or_default();
        if !ids.contains(&id) {
            let all = ids.join(", ");
            bail!(Usage(format!("the doctor has no finding called {word}; it has {all}")));
        }
    }
    Ok(())
}

/// Says a line: results on standard output, unless that is for JSON.
fn say(args: &TuneArgs, line: &str) -> Result<()> {
    if args.json {
        output::tell(line);
        return Ok(());
    }
    output::print(&format!("{line}\n"))
}

fn advise(args: &TuneArgs) -> Result<Vec<Row>> {
    let facts = gather::everything(Asked::default());
    let findings = rules::judge(&facts).findings;
    // Without names it is all but what has to be named.
    let is_wanted = |finding: &&Finding| match &args.findings[..] {
        [] => !finding.only_named,
        names => names.iter().any(|word| finding.is_named(word)),
    };
    let wanted: Vec<&Finding> = findings.iter().filter(is_wanted).collect();
    if args.findings.is_empty() {
        for finding in findings.iter().filter(|finding| finding.only_named) {
            say(args, &format!("only by its name: {}: {}", finding.name(), finding.run.join("; ")))?;
        }
    }
    for word in &args.findings {
        if !wanted.iter().any(|finding| finding.is_named(word)) {
            say(args, &format!("{word}: not found on this machine; nothing to do"))?;
        }
    }
    let resets = wanted.iter().flat_map(|finding| &finding.changes).any(|change| change.target.resets_link());
    let guard = protected(resets && !args.allow_link_reset)?;
    let dry = is_dry(args);
    let mut journal = if dry { Journal::look(&args.state)? } else { Journal::open(&args.state)? };
    let mut rows = Vec::new();
    for finding in wanted {
        if finding.changes.is_empty() && !args.findings.is_empty() {
            say(args, &format!("{}: no setting helps; {}", finding.name(), finding.run.join("; ")))?;
        }
        for change in &finding.changes {
            rows.push(advance(args, &mut journal, &guard, &finding.name(), change)?);
        }
    }
    if rows.is_empty() {
        say(args, "nothing to change")?;
    }
    if is_dry(args) && !args.dry_run {
        list(args, &journal)?;
        if !rows.is_empty() {
            say(args, "to change these: manylane tune --all, or the names of findings")?;
        }
    } else if rows.iter().any(|row| row.outcome == Outcome::Done) {
        say(args, "to take it back: manylane tune --undo")?;
    }
    Ok(rows)
}

/// What has to stay up, if anything may go down.
fn protected(is_needed: bool) -> Result<Guard> {
    let context = "--allow-link-reset goes without";
    if is_needed { Guard::here().context(context) } else { Ok(Guard::default()) }
}

/// One change: says it, makes it.
fn advance(
    args: &TuneArgs,
    journal: &mut Journal,
    guard: &Guard,
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
            say(args, &format!("{finding}: {err:#}"))?;
            return Ok(row("", Outcome::Failed, Some(format!("{err:#}"))));
        }
    };
    say(args, &format!("{finding}: {target}: {current} -> {value}"))?;
    if target.is_same(&current, value) {
        return Ok(row(&current, Outcome::Already, None));
    }
    if let Some(why) = guard.refuses(target) {
        say(args, &format!("  refused: {why}"))?;
        return Ok(row(&current, Outcome::Refused, Some(why)));
    }
    if is_dry(args) {
        return Ok(row(&current, Outcome::Would, None));
    }
    match apply::apply(&Here, journal, finding, change) {
        Ok(outcome) => Ok(row(&current, outcome, None)),
        Err(err) => {
            say(args, &format!("  failed: {err:#}"))?;
            Ok(row(&current, Outcome::Failed, Some(format!("{err:#}"))))
        }
    }
}

/// What is in force.
fn list(args: &TuneArgs, journal: &Journal) -> Result<()> {
    for entry in &journal.entries {
        let Entry { finding, target, before, after, intent, .. } = entry;
        let now = after.as_ref().or(intent.as_ref()).map_or("?", String::as_str);
        say(args, &format!("changed before: {finding}: {target}: {before} -> {now}"))?;
    }
    Ok(())
}

fn undo(args: &TuneArgs) -> Result<Vec<Row>> {
    let mut journal = if args.dry_run { Journal::look(&args.state)? } else { Journal::open(&args.state)? };
    let is_wanted = |entry: &Entry| {
        let names = |word: &String| *word == entry.finding || entry.finding.split(':').next() == Some(word);
        args.findings.is_empty() || args.findings.iter().any(names)
    };
    // The last first; each goes from the journal when it is done.
    let wanted: Vec<usize> =
        (0..journal.entries.len()).rev().filter(|&at| is_wanted(&journal.entries[at])).collect();
    let resets = wanted.iter().any(|&at| journal.entries[at].target.resets_link());
    let guard = protected(resets && !args.allow_link_reset)?;
    let mut rows = Vec::new();
    for at in wanted {
        rows.push(retreat(args, &mut journal, &guard, at)?);
    }
    if rows.is_empty() {
        say(args, "nothing to take back")?;
    }
    Ok(rows)
}

/// Takes one change back, and says what became of it.
fn retreat(args: &TuneArgs, journal: &mut Journal, guard: &Guard, at: usize) -> Result<Row> {
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
    let planned = apply::plan(&Here, &entry);
    if let Ok((Outcome::Would, current)) = &planned {
        say(args, &format!("{}: {target}: {current} -> {}", entry.finding, entry.before))?;
        if let Some(why) = guard.refuses(target) {
            say(args, &format!("  refused: {why}"))?;
            return Ok(row(current, Outcome::Refused, Some(why)));
        }
    }
    let done = if args.dry_run { planned } else { apply::undo(&Here, journal, at) };
    let (outcome, current) = match done {
        Ok(done) => done,
        Err(err) => {
            say(args, &format!("{}: {target}: failed: {err:#}", entry.finding))?;
            return Ok(row("", Outcome::Failed, Some(format!("{err:#}"))));
        }
    };
    let before = &entry.before;
    let why = match outcome {
        Outcome::Already => Some(format!("is {current} as before")),
        Outcome::Foreign => {
            Some(format!("somebody has made it {current} since: left alone (it was {before} before)"))
        }
        Outcome::Gone => {
            Some(format!("the device is gone, or another one of that name (it was {before} before)"))
        }
        Outcome::Elsewhere => Some("is of another network namespace: take it back from there".into()),
        _ => None,
    };
    if let Some(why) = &why {
        say(args, &format!("{}: {target}: {why}", entry.finding))?;
    }
    Ok(row(&current, outcome, why))
}
