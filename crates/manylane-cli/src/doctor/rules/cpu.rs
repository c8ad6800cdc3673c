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
        id: "halts-at-once",
        cost: 26,
        meaning: "Idle processors of this virtual machine halt without looking for work first: the hypervisor wakes them, tens of microseconds late, and each lane that sleeps pays for that.",
        remedy: "`echo 200000 > /sys/module/haltpoll/parameters/guest_halt_poll_ns`, if the host has processors to spare: idle ones then look for so many nanoseconds at most, which the host sees as work. For the processors of lanes alone, `echo n/a > /sys/devices/system/cpu/cpuN/power/pm_qos_resume_latency_us`: such a one never halts.",
        judge: halts_at_once,
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

fn halts_at_once(facts: &Facts, found: &mut Found<'_>) {
    /// The kernel's own setting: who has another one has chosen it.
    const USUAL_NS: u64 = 200_000;
    match facts.cpu.idle_governor.as_deref() {
        Some("haltpoll") => {}
        Some(_) => return,
        None => {
            return found.unknown(
                "the kernel does not tell how its processors idle (no /sys/devices/system/cpu/cpuidle)",
            );
        }
    }
    match facts.cpu.halt_poll_ns {
        Some(0) => {
            let target =
                Target::ModuleParameter { module: "haltpoll".into(), name: "guest_halt_poll_ns".into() };
            found
                .add(
                    Severity::Note,
                    "an idle processor halts at once (cpuidle governor haltpoll, guest_halt_poll_ns is 0)",
                    "A lane that sleeps is woken by way of the hypervisor; one whose processor still looks has it in a few microseconds.",
                )
                // The host pays for it, and the kernel's own setting is another: somebody wanted it so.
                .set_if_named(Change::new(target, USUAL_NS));
        }
        Some(_) => {}
        None => found.unknown("/sys/module/haltpoll/parameters cannot be read"),
    }
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
