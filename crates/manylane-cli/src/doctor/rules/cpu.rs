//! Processors.

use super::super::change::{Change, Target};
use super::super::facts::Facts;
use super::super::finding::Severity;
use super::{Found, Rule, list};

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "governor-slow",
        cost: 28,
        meaning: "Processors run slower than they could until they have been busy for a while: bursts of datagrams meet a slow core.",
        remedy: "`cpupower frequency-set -g performance`.",
        judge: governor_slow,
    },
    Rule {
        id: "smt-shared",
        cost: 6,
        meaning: "Two processors each are threads of one core: two lanes there share what one would have.",
        remedy: "One lane for each core: `--placement` with a list.",
        judge: smt_shared,
    },
    Rule {
        id: "isolated-idle",
        cost: 4,
        meaning: "Processors are isolated: the scheduler puts nothing there, and neither does Manylane unless they are named.",
        remedy: "`--placement` with their list, for lanes that shall have them alone.",
        judge: isolated_idle,
    },
];

fn governor_slow(facts: &Facts, found: &mut Found<'_>) {
    const SLOW: [&str; 3] = ["powersave", "conservative", "ondemand"];
    let governors = &facts.cpu.governors;
    if governors.is_empty() {
        return found.unknown(
            "the kernel has no frequency governors here (a virtual machine, or the firmware decides)",
        );
    }
    let slow: Vec<(usize, &str)> = governors
        .iter()
        .filter(|(_, governor)| SLOW.contains(&governor.as_str()))
        .map(|(cpu, governor)| (*cpu, governor.as_str()))
        .collect();
    let [(_, governor), ..] = slow.as_slice() else { return };
    let cpus: Vec<usize> = slow.iter().map(|(cpu, _)| *cpu).collect();
    let finding = found.add(
        Severity::Note,
        format!("processors {} have the frequency governor {governor}", list(&cpus)),
        "They become fast only after they were busy: latency grows, and short bursts overrun queues.",
    );
    for cpu in cpus {
        let target = Target::CpuFile { cpu, file: "cpufreq/scaling_governor".into() };
        finding.set(Change::new(target, "performance"));
    }
    // One line for all.
    finding.run = vec!["cpupower frequency-set -g performance".into()];
}

fn smt_shared(facts: &Facts, found: &mut Found<'_>) {
    if facts.cpu.online.is_empty() {
        return found.unknown("/sys/devices/system/cpu cannot be read");
    }
    if facts.cpu.siblings.is_empty() {
        return;
    }
    let firsts: Vec<usize> = facts.cpu.siblings.iter().filter_map(|group| group.first().copied()).collect();
    let groups: Vec<String> = facts.cpu.siblings.iter().map(|group| list(group)).collect();
    found
        .add(
            Severity::Note,
            format!("processors share cores: {}", groups.join("; ")),
            "Two lanes on one core get together little more than one would alone.",
        )
        .run(format!(
            "where latency counts, one lane for each core: --placement {} --lanes {}",
            list(&firsts),
            firsts.len()
        ));
}

fn isolated_idle(facts: &Facts, found: &mut Found<'_>) {
    let isolated = &facts.cpu.isolated;
    if !isolated.is_empty() {
        found
            .add(
                Severity::Note,
                format!("processors {} are isolated", list(isolated)),
                "Nothing runs there unless it is pinned there; advice on spreading interrupts leaves them out.",
            )
            .run(format!("for lanes that shall have them alone: --placement {}", list(isolated)));
    }
}
