//! A rule, its findings, and what several rules use.

use super::super::change::Change;
use super::super::facts::{Device, Facts};
use super::super::finding::{Finding, Severity, Unknown, Verdict};

/// A rule. Its texts are those of docs/doctor.md.
pub(crate) struct Rule {
    pub(crate) id: &'static str,
    /// Cost compared with other rules, 0 to 100; determines the order.
    pub(crate) cost: u8,
    /// Meaning of the finding.
    pub(crate) meaning: &'static str,
    /// Remedy.
    pub(crate) remedy: &'static str,
    pub(super) check: fn(&Facts, &mut FindingSink<'_>),
}

/// Collects the findings of a rule.
pub(crate) struct FindingSink<'a> {
    pub(super) rule: &'static Rule,
    pub(super) verdict: &'a mut Verdict,
}

impl FindingSink<'_> {
    /// Adds a finding, to be filled in.
    pub(super) fn add(
        &mut self,
        severity: Severity,
        seen: impl Into<String>,
        why: impl Into<String>,
    ) -> &mut Finding {
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

    pub(super) fn unknown(&mut self, because: impl Into<String>) {
        self.verdict.unknown.push(Unknown { id: self.rule.id, because: because.into() });
    }
}

impl Finding {
    pub(super) fn subject(&mut self, subject: impl Into<String>) -> &mut Self {
        self.subject = Some(subject.into());
        self
    }

    pub(super) fn lost(&mut self, lost: u64) -> &mut Self {
        self.lost = Some(lost);
        self
    }

    /// An action that is not a setting.
    pub(super) fn run(&mut self, line: impl Into<String>) -> &mut Self {
        self.run.push(line.into());
        self
    }

    /// A setting to change, with the command for it.
    pub(super) fn set(&mut self, change: Change) -> &mut Self {
        self.run.push(change.command());
        self.changes.push(change);
        self
    }

    /// A setting to change only if the user names the finding.
    pub(super) fn set_if_named(&mut self, change: Change) -> &mut Self {
        self.only_named = true;
        self.set(change)
    }

    /// A sysctl to raise, unless it is that high already. If it cannot be read, the command to
    /// read it.
    pub(super) fn raise(&mut self, facts: &Facts, name: &str, value: u64) -> &mut Self {
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
pub(super) fn rx_devices(facts: &Facts) -> impl Iterator<Item = &Device> {
    let is_port = |device: &&Device| {
        device.up && !device.loopback && matches!(device.kind.as_deref(), None | Some("veth"))
    };
    facts.devices.iter().filter(is_port)
}

/// CPUs for network work: those that are online and not isolated.
pub(super) fn usable_cpus(facts: &Facts) -> Vec<usize> {
    let cpu = &facts.cpu;
    cpu.online.iter().copied().filter(|number| !cpu.isolated.contains(number)).collect()
}

/// CPUs in words.
pub(crate) fn format_cpus(cpus: &[usize]) -> String {
    cpus.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// `1 datagram`, `2 datagrams`.
pub(super) fn pluralize(number: u64, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}
