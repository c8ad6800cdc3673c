//! The doctor's report for people.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::facts::{Device, Facts};
use super::finding::{Finding, Severity, Verdict};
use super::rules::Rule;

/// Columns of the text, at most, unless a command is longer.
const WIDTH: usize = 100;

pub(super) fn report(facts: &Facts, verdict: &Verdict) -> String {
    let mut out = String::new();
    heading(facts, &mut out);
    let mut rest = verdict.findings.as_slice();
    while let Some((finding, behind)) = rest.split_first() {
        out.push('\n');
        entry(finding, &mut out);
        // A machine may have a hundred devices of which the same is to be said.
        let same = |other: &&Finding| {
            finding.severity == Severity::Note && other.id == finding.id && other.why == finding.why
        };
        let others: Vec<String> = behind.iter().take_while(same).map(Finding::name).collect();
        if !others.is_empty() {
            wrap(&mut out, "      ", &format!("The same: {}", others.join(", ")));
        }
        rest = &behind[others.len()..];
    }
    unknown(verdict, &mut out);
    out.push('\n');
    out.push_str(&summary(verdict));
    out
}

/// All rules in their own words.
pub(super) fn list(rules: &[&Rule]) -> String {
    let mut out = String::new();
    for rule in rules {
        let _ = writeln!(out, "{} ({})", rule.id, rule.cost);
        wrap(&mut out, "      ", rule.meaning);
        wrap(&mut out, "      > ", rule.remedy);
    }
    out
}

fn heading(facts: &Facts, out: &mut String) {
    let cpus = facts.cpu.online.len();
    let _ = writeln!(out, "Linux {}, {cpus} processors; losses are those {}.", facts.kernel, facts.since());
    let works: Vec<&str> =
        facts.features.iter().filter(|feature| feature.missing.is_none()).map(|f| f.name.as_str()).collect();
    wrap(out, "works here: ", &works.join(", "));
    for (engine, why) in &facts.engines {
        wrap(out, &format!("engine auto, {engine}: "), why);
    }
    for device in facts.devices.iter().filter(|device| device.up && !device.loopback) {
        wrap(out, &format!("{}: ", device.name), &about(device));
    }
}

fn about(device: &Device) -> String {
    let mut parts = Vec::new();
    parts.extend(device.driver.clone().or_else(|| device.kind.clone()));
    parts.extend(device.rx_queues.map(|queues| {
        if queues == 1 { "1 receive queue".into() } else { format!("{queues} receive queues") }
    }));
    parts.extend(device.ring.map(|ring| format!("rings of {} (of {})", ring.rx, ring.rx_max)));
    parts.extend(device.gro.map(|on| format!("GRO {}", if on { "on" } else { "off" })));
    parts.extend(device.threaded.filter(|on| *on).map(|_| "threaded NAPI".into()));
    parts.extend(device.xdp_attached.as_ref().map(|how| format!("XDP attached ({how})")));
    parts.extend(device.numa.map(|node| format!("NUMA node {node}")));
    if device.default_route {
        parts.push("default route".into());
    }
    parts.join(", ")
}

fn entry(finding: &Finding, out: &mut String) {
    let head = format!("{:5} ", finding.severity.word());
    wrap(out, &head, &format!("{} [{}]", finding.seen, finding.name()));
    wrap(out, "      ", &finding.why);
    for line in &finding.run {
        let _ = writeln!(out, "      > {line}");
    }
    if !finding.changes.is_empty() {
        let _ = writeln!(out, "      > or: manylane tune {}", finding.name());
    }
}

/// Rules that do not know, by reason.
fn unknown(verdict: &Verdict, out: &mut String) {
    let mut by_reason: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for unknown in &verdict.unknown {
        by_reason.entry(&unknown.because).or_default().push(unknown.id);
    }
    if !by_reason.is_empty() {
        out.push('\n');
    }
    for (reason, ids) in by_reason {
        wrap(out, "unknown ", &format!("{}: {reason}", ids.join(", ")));
    }
}

fn summary(verdict: &Verdict) -> String {
    let of = |severity| verdict.findings.iter().filter(|finding| finding.severity == severity).count();
    let (loss, wrong, notes) = (of(Severity::Loss), of(Severity::Wrong), of(Severity::Note));
    let advice = verdict.findings.iter().any(|finding| !finding.changes.is_empty() && !finding.only_named);
    let mut line = match (loss, wrong) {
        (0, 0) => "Nothing is wrong".to_owned(),
        _ => format!("{loss} where datagrams were lost, {wrong} that hold this machine back"),
    };
    let _ = write!(line, "; notes: {notes}; not known: {}.", verdict.unknown.len());
    if advice {
        line += " 'manylane tune --dry-run --all' shows what could be set.";
    }
    line + "\n"
}

/// Writes words into lines, each after the first one as far to the right as the first.
fn wrap(out: &mut String, head: &str, text: &str) {
    let indent = head.chars().count().min(12);
    let mut at = head.chars().count();
    out.push_str(head);
    for (number, word) in text.split(' ').enumerate() {
        let len = word.chars().count();
        if number > 0 {
            if at + 1 + len > WIDTH {
                let _ = write!(out, "\n{:indent$}", "");
                at = indent;
            } else {
                out.push(' ');
                at += 1;
            }
        }
        out.push_str(word);
        at += len;
    }
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_broken_between_words() {
        let mut out = String::new();
        wrap(&mut out, "note  ", &"word ".repeat(40));
        assert!(out.lines().count() == 3 && out.lines().all(|line| line.chars().count() <= WIDTH), "{out}");
        assert!(out.lines().nth(1).unwrap().starts_with("      word"));
    }

    #[test]
    fn the_same_of_many_devices_is_said_once() {
        let finding = |subject: &str, severity| Finding {
            id: "gro-off",
            subject: Some(subject.into()),
            severity,
            cost: 1,
            lost: None,
            seen: format!("GRO of {subject} is off"),
            why: "Because.".into(),
            run: Vec::new(),
            changes: Vec::new(),
            only_named: false,
        };
        let said = |severity| {
            let findings = ["veth1", "veth2", "veth3"].map(|name| finding(name, severity)).into();
            report(&Facts::default(), &Verdict { findings, unknown: Vec::new() })
        };
        let text = said(Severity::Note);
        assert!(text.contains("The same: gro-off:veth2, gro-off:veth3\n"), "{text}");
        assert!(text.matches("Because.").count() == 1 && text.contains("notes: 3"), "{text}");
        // What is wrong is said of each.
        assert_eq!(said(Severity::Wrong).matches("Because.").count(), 3);
    }

    #[test]
    fn a_healthy_machine_is_told_so() {
        let text = report(&Facts::default(), &Verdict::default());
        assert!(text.contains("Nothing is wrong") && !text.contains("tune"), "{text}");
    }
}
