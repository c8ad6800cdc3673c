//! Rules: facts in, findings out. No rule reads a file or depends on another rule.

mod cpu;
mod device;
mod loss;
mod sending;
mod socket;
mod system;
#[cfg(test)]
mod tests;

use super::change::Change;
use super::facts::{Device, Facts};
use super::finding::{Finding, Severity, Unknown, Verdict};

/// A rule. Its texts are those of docs/doctor.md.
pub(crate) struct Rule {
    pub(crate) id: &'static str,
    /// Cost compared with other rules, 0 to 100; determines the order.
    pub(crate) cost: u8,
    /// Meaning of the finding.
    pub(crate) meaning: &'static str,
    /// Remedy.
    pub(crate) remedy: &'static str,
    check: fn(&Facts, &mut FindingSink<'_>),
}

/// All rules, the most costly first.
pub(crate) fn all() -> Vec<&'static Rule> {
    let mut all: Vec<&Rule> =
        [loss::RULES, socket::RULES, device::RULES, sending::RULES, system::RULES, cpu::RULES]
            .into_iter()
            .flatten()
            .collect();
    all.sort_by_key(|rule| std::cmp::Reverse(rule.cost));
    all
}

/// Applies all rules; the most costly findings come first.
pub(crate) fn evaluate(facts: &Facts) -> Verdict {
    let mut verdict = Verdict::default();
    for rule in all() {
        (rule.check)(facts, &mut FindingSink { rule, verdict: &mut verdict });
    }
    verdict.findings.sort_by_key(|finding| {
        (finding.severity, std::cmp::Reverse(finding.cost), std::cmp::Reverse(finding.lost))
    });
    verdict
}

/// Collects the findings of a rule.
pub(crate) struct FindingSink<'a> {
    rule: &'static Rule,
    verdict: &'a mut Verdict,
}

impl FindingSink<'_> {
    /// Adds a finding, to be filled in.
    fn add(&mut self, severity: Severity, seen: impl Into<String>, why: impl Into<String>) -> &mut Finding {
        self.verdict.findings.push(Finding {
            id: self.rule.id,
            subject: None,
            severity,
            cost: self.rule.cost,
            lost: None,
            seen: seen.into(),
            why: why.into(),
            run: Vec::new(),
            changes: Vec::new(),
            only_named: false,
        });
        // Just pushed.
        let last = self.verdict.findings.len() - 1;
        &mut self.verdict.findings[last]
    }

    fn unknown(&mut self, because: impl Into<String>) {
        self.verdict.unknown.push(Unknown { id: self.rule.id, because: because.into() });
    }
}

impl Finding {
    fn subject(&mut self, subject: impl Into<String>) -> &mut Self {
        self.subject = Some(subject.into());
        self
    }

    fn lost(&mut self, lost: u64) -> &mut Self {
        self.lost = Some(lost);
        self
    }

    /// An action that is not a setting.
    fn run(&mut self, line: impl Into<String>) -> &mut Self {
        self.run.push(line.into());
        self
    }

    /// A setting to change, with the command for it.
    fn set(&mut self, change: Change) -> &mut Self {
        self.run.push(change.command());
        self.changes.push(change);
        self
    }

    /// A setting to change only if the user names the finding.
    fn set_if_named(&mut self, change: Change) -> &mut Self {
        self.only_named = true;
        self.set(change)
    }

    /// A sysctl to raise, unless it is that high already. If it cannot be read, the command to
    /// read it.
    fn raise(&mut self, facts: &Facts, name: &str, value: u64) -> &mut Self {
        match facts.sysctl(name) {
            Some(now) if now >= value => self.run(format!(
                "{name} is {now} already; to see if that is still too little: manylane doctor --duration 10s"
            )),
            Some(_) => self.set(Change::sysctl(name, value)),
            None => self.run(format!(
                "in the initial network namespace (it is not visible in this one): sysctl -w {name}={value}"
            )),
        }
    }
}

/// Devices that are up and have receive queues of their own, not frames of another device.
fn rx_devices(facts: &Facts) -> impl Iterator<Item = &Device> {
    let is_port = |device: &&Device| {
        device.up && !device.loopback && matches!(device.kind.as_deref(), None | Some("veth"))
    };
    facts.devices.iter().filter(is_port)
}

/// CPUs for network work: those that are online and not isolated.
fn usable_cpus(facts: &Facts) -> Vec<usize> {
    let cpu = &facts.cpu;
    cpu.online.iter().copied().filter(|number| !cpu.isolated.contains(number)).collect()
}

/// CPUs in words.
pub(crate) fn format_cpus(cpus: &[usize]) -> String {
    cpus.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// `1 datagram`, `2 datagrams`.
fn pluralize(number: u64, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}
