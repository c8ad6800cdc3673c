//! CPUs.

use std::collections::BTreeSet;

use super::super::change::{Change, Target};
use super::super::facts::{Facts, Idle, Lane};
use super::super::finding::Severity;
use super::rule::{FindingSink, Rule, format_cpus, pluralize};

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "governor-slow",
        cost: 28,
        meaning: "CPUs run at a low frequency until they have been busy for a while: bursts meet a slow CPU.",
        remedy: "`cpupower frequency-set -g performance`.",
        check: governor_slow,
    },
    Rule {
        id: "autogroup-shares",
        cost: 27,
        meaning: "Lanes wait by `adaptive` in a session whose threads share the weight of one thread (autogroup). If another thread runs on its CPU, such a lane may wait for a tick.",
        remedy: "`sysctl -w kernel.sched_autogroup_enabled=0` before the program starts, or more weight for its session: `echo -10 > /proc/PID/autogroup`. Without autogroup, programs of a desktop user share the CPU by their number of threads.",
        check: autogroup_shares,
    },
    Rule {
        id: "halts-at-once",
        cost: 26,
        meaning: "Idle CPUs of this virtual machine halt without polling first: the hypervisor wakes them tens of microseconds late, which delays each lane that sleeps.",
        remedy: "`echo 200000 > /sys/module/haltpoll/parameters/guest_halt_poll_ns` (nanoseconds of polling before a halt, which the host sees as work), if the host has CPUs to spare. For the CPUs of lanes alone, see `idle-leaves-late`.",
        check: halts_at_once,
    },
    Rule {
        id: "idle-leaves-late",
        cost: 25,
        meaning: "CPUs of lanes (or all CPUs, if no lanes are found) may enter idle states with a long exit latency, which delays each lane that sleeps. `WRONG` only if lanes wait by `adaptive`, otherwise a note.",
        remedy: "`echo 10 > /sys/devices/system/cpu/cpuN/power/pm_qos_resume_latency_us` (microseconds; 0: no limit) for the CPUs of lanes. This costs power, and leaves less of it for other cores. `n/a` in a virtual machine that halts at once: such a CPU never halts, which the host sees as work.",
        check: idle_leaves_late,
    },
    Rule {
        id: "smt-shared",
        cost: 6,
        meaning: "CPUs are pairs of hardware threads of one core: two lanes there share the core.",
        remedy: "One lane per core: `--placement` with a list.",
        check: smt_shared,
    },
    Rule {
        id: "isolated-idle",
        cost: 4,
        meaning: "CPUs are isolated: neither the scheduler nor Manylane uses them unless they are named.",
        remedy: "`--placement` with their list, for lanes without other threads on their CPUs.",
        check: isolated_idle,
    },
];

fn governor_slow(facts: &Facts, found: &mut FindingSink<'_>) {
    const SLOW_GOVERNORS: [&str; 3] = ["powersave", "conservative", "ondemand"];
    let governors = &facts.cpu.governors;
    if governors.is_empty() {
        return found.unknown(
            "the kernel has no frequency governors here (a virtual machine, or the firmware decides)",
        );
    }
    let slow: Vec<(usize, &str)> = governors
        .iter()
        .filter(|(_, governor)| SLOW_GOVERNORS.contains(&governor.as_str()))
        .map(|(cpu, governor)| (*cpu, governor.as_str()))
        .collect();
    let [(_, governor), ..] = slow.as_slice() else { return };
    let cpus: Vec<usize> = slow.iter().map(|(cpu, _)| *cpu).collect();
    let finding = found.add(
        Severity::Note,
        format!("CPUs {} have the frequency governor {governor}", format_cpus(&cpus)),
        "Such a CPU raises its frequency only after it has been busy for a while. Until then replies are slow, and a short burst overruns queues.",
    );
    for cpu in cpus {
        let target = Target::CpuFile { cpu, file: "cpufreq/scaling_governor".into() };
        finding.set(Change::new(target, "performance"));
    }
    // One line for all.
    finding.run = vec!["cpupower frequency-set -g performance".into()];
}

fn autogroup_shares(facts: &Facts, found: &mut FindingSink<'_>) {
    let is_adaptive = |lane: &&Lane| lane.wait.as_deref() == Some("adaptive");
    let lanes = facts.lanes.iter().filter(is_adaptive).count() as u64;
    // Not every kernel has it.
    if facts.sysctl("kernel.sched_autogroup_enabled").unwrap_or(0) == 0 || lanes == 0 {
        return;
    }
    found
        .add(
            Severity::Note,
            format!("{} with wait policy adaptive, in a session whose threads share the weight of one thread", pluralize(lanes, "lane")),
            "Such a lane yields its CPU when it sleeps. If another thread runs there, the lane may have to wait for the next tick. The setting takes effect for programs that start later.",
        )
        // Desktops need it.
        .set_if_named(Change::sysctl("kernel.sched_autogroup_enabled", 0));
}

fn halts_at_once(facts: &Facts, found: &mut FindingSink<'_>) {
    /// The kernel's default. Any other value was chosen on purpose.
    const HALT_POLL_DEFAULT_NS: u64 = 200_000;
    match facts.cpu.idle_governor.as_deref() {
        Some("haltpoll") => {}
        Some(_) => return,
        None => {
            return found.unknown(
                "the kernel does not report its idle governor (no /sys/devices/system/cpu/cpuidle)",
            );
        }
    }
    match facts.cpu.halt_poll_ns {
        // Nothing halts.
        Some(0)
            if facts.cpu.idle.len() >= facts.cpu.online.len().max(1)
                && facts.cpu.idle.values().all(Idle::is_polling) => {}
        Some(0) => {
            let target =
                Target::ModuleParameter { module: "haltpoll".into(), name: "guest_halt_poll_ns".into() };
            found
                .add(
                    Severity::Note,
                    "an idle CPU halts at once (cpuidle governor haltpoll, guest_halt_poll_ns is 0)",
                    "The hypervisor has to wake a halted CPU, which takes tens of microseconds. A CPU that still polls runs the lane within a few.",
                )
                // It costs the host, and it is not the kernel's default, so it was set on purpose.
                .set_if_named(Change::new(target, HALT_POLL_DEFAULT_NS));
        }
        Some(_) => {}
        None => found.unknown("/sys/module/haltpoll/parameters cannot be read"),
    }
}

fn idle_leaves_late(facts: &Facts, found: &mut FindingSink<'_>) {
    /// Microseconds: about what an interrupt and the scheduler take anyway. The first idle states
    /// of most CPUs have a shorter exit latency.
    const EXIT_LATENCY_MAX_US: u64 = 10;
    let cpu = &facts.cpu;
    if cpu.idle.is_empty() {
        return found.unknown(
            "the kernel does not report exit latencies of idle states, or accepts no limit (no cpuidle, no pm_qos_resume_latency_us)",
        );
    }
    // A virtual machine's table of states does not include the cost of halting.
    let halts = match (cpu.idle_governor.as_deref(), cpu.halt_poll_ns) {
        (Some("haltpoll"), Some(0)) => true,
        // It polls first.
        (Some("haltpoll"), Some(_)) => return,
        (Some("haltpoll"), None) => {
            return found.unknown("/sys/module/haltpoll/parameters cannot be read");
        }
        _ => false,
    };
    let is_late =
        |idle: &Idle| if halts { !idle.is_polling() } else { idle.exit_latency_max() > EXIT_LATENCY_MAX_US };
    let late_of = |cpus: BTreeSet<usize>| -> Vec<usize> {
        cpus.into_iter().filter(|number| cpu.idle.get(number).is_some_and(is_late)).collect()
    };
    let cpus_of = |lanes: &[&Lane]| lanes.iter().flat_map(|lane| &lane.cpus).copied().collect();
    let all: Vec<&Lane> = facts.lanes.iter().filter(|lane| !lane.cpus.is_empty()).collect();
    let adaptive: Vec<&Lane> =
        all.iter().copied().filter(|lane| lane.wait.as_deref() == Some("adaptive")).collect();
    let (severity, late, whose) = match (late_of(cpus_of(&adaptive)), late_of(cpus_of(&all))) {
        (late, _) if !late.is_empty() => (Severity::Wrong, late, ", where lanes wait by adaptive,"),
        (_, late) if !late.is_empty() => (Severity::Note, late, ", where lanes run,"),
        _ if all.is_empty() => (Severity::Note, late_of(cpu.online.iter().copied().collect()), ""),
        _ => return,
    };
    let longest = late.iter().filter_map(|number| cpu.idle.get(number)).map(Idle::exit_latency_max).max();
    let Some(longest) = longest else { return };
    let late_cpus = format_cpus(&late);
    let (seen, value) = if halts {
        let seen = format!("idle CPUs {late_cpus}{whose} halt at once, and the hypervisor has to wake them");
        (seen, "n/a".to_owned())
    } else {
        let seen =
            format!("idle CPUs {late_cpus}{whose} may enter states with an exit latency of {longest} µs");
        (seen, EXIT_LATENCY_MAX_US.to_string())
    };
    let finding = found.add(
        severity,
        seen,
        "A lane that sleeps there wakes up later by that time. A limit costs power all the time, and leaves less of it for other cores. It pays only on CPUs whose lanes must reply early.",
    );
    for &cpu in &late {
        let target = Target::CpuFile { cpu, file: "power/pm_qos_resume_latency_us".into() };
        finding.set_if_named(Change::new(target, &value));
    }
    if late.len() > 1 {
        // One line for all.
        let numbers: Vec<String> = late.iter().map(ToString::to_string).collect();
        finding.run = vec![format!(
            "for n in {}; do echo {value} > /sys/devices/system/cpu/cpu$n/power/pm_qos_resume_latency_us; done",
            numbers.join(" ")
        )];
    }
}

fn smt_shared(facts: &Facts, found: &mut FindingSink<'_>) {
    if facts.cpu.online.is_empty() {
        return found.unknown("/sys/devices/system/cpu cannot be read");
    }
    if facts.cpu.siblings.is_empty() {
        return;
    }
    let firsts: Vec<usize> = facts.cpu.siblings.iter().filter_map(|group| group.first().copied()).collect();
    let groups: Vec<String> = facts.cpu.siblings.iter().map(|group| format_cpus(group)).collect();
    found
        .add(
            Severity::Note,
            format!("CPUs share cores: {}", groups.join("; ")),
            "Two lanes on one core do little more work than one lane alone.",
        )
        .run(format!(
            "if latency matters, use one lane per core: --placement {} --lanes {}",
            format_cpus(&firsts),
            firsts.len()
        ));
}

fn isolated_idle(facts: &Facts, found: &mut FindingSink<'_>) {
    let isolated = &facts.cpu.isolated;
    if !isolated.is_empty() {
        found
            .add(
                Severity::Note,
                format!("CPUs {} are isolated", format_cpus(isolated)),
                "Only pinned threads run on an isolated CPU. Advice on spreading interrupts omits these CPUs.",
            )
            .run(format!("to give these CPUs to lanes alone: --placement {}", format_cpus(isolated)));
    }
}
