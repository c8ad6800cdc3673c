//! Rules: facts in, findings out. No rule reads a file or depends on another rule.

mod cpu;
mod device;
mod loss;
mod rule;
mod sending;
mod socket;
mod system;
#[cfg(test)]
mod tests;

use super::facts::Facts;
use super::finding::Verdict;
use rule::FindingSink;

pub(crate) use rule::{Rule, format_cpus};

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
