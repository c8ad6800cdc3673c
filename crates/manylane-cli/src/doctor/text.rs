//! The doctor's report as text.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use manylane_sys::device::HASH_PORTS;

use super::ethtool::{XDP_BASIC, XDP_REDIRECT, XDP_ZERO_COPY};
use super::facts::{Device, Facts, Privileges};
use super::finding::{Finding, Severity, Verdict};
use super::rules::{self, Rule};

/// Maximum width of the text, unless a command is longer.
const LINE_WIDTH_MAX: usize = 100;

pub(super) fn report(facts: &Facts, verdict: &Verdict) -> String {
    let mut out = String::new();
    heading(facts, &mut out);
    let mut rest = verdict.findings.as_slice();
    while let Some((finding, behind)) = rest.split_first() {
        out.push('\n');
        entry(finding, &mut out);
        // A machine may have a hundred devices with the same finding.
        let same = |other: &&Finding| {
            finding.severity == Severity::Note && other.id == finding.id && other.why == finding.why
        };
        let others: Vec<String> = behind.iter().take_while(same).map(Finding::name).collect();
        if !others.is_empty() {
            wrap(&mut out, "      ", &format!("The same for {}", others.join(", ")));
        }
        rest = &behind[others.len()..];
    }
    unknown(verdict, &mut out);
    out.push('\n');
    out.push_str(&summary(verdict));
    out
}

/// All rules with their texts.
pub(super) fn list(rules: &[&Rule]) -> String {
    let mut out = String::new();
    for rule in rules {
        let _ = writeln!(out, "{} ({})", rule.id, rule.cost);
        wrap(&mut out, "      ", rule.meaning);
        wrap(&mut out, "      > ", rule.remedy);
    }
    out
}

/// All facts, including healthy ones, so that the reader knows what was checked.
fn heading(facts: &Facts, out: &mut String) {
    let cpus = facts.cpu.online.len();
    let _ = writeln!(out, "Linux {}, {cpus} CPUs. Losses: {}.", facts.kernel, facts.describe_period());
    let works: Vec<&str> =
        facts.features.iter().filter(|feature| feature.missing.is_none()).map(|f| f.name.as_str()).collect();
    wrap(out, "available: ", &works.join(", "));
    wrap(out, "privileges: ", &privileges(facts));
    wrap(out, "CPUs: ", &describe_cpus(facts));
    let settings = facts.sysctls.iter().filter(|(name, _)| name.starts_with("net."));
    let settings: Vec<String> =
        settings.map(|(name, value)| format!("{} {value}", name.trim_start_matches("net."))).collect();
    wrap(out, "net.*: ", &join_or(&settings, "not visible here"));
    wrap(out, "counted: ", &describe_counters(facts));
    for device in facts.devices.iter().filter(|device| device.up && !device.loopback) {
        wrap(out, &format!("{}: ", device.name), &describe_device(device));
    }
}

fn join_or(parts: &[String], none: &str) -> String {
    if parts.is_empty() { none.into() } else { parts.join(", ") }
}

fn privileges(facts: &Facts) -> String {
    let own = &facts.privileges;
    let mut parts: Vec<String> = own.uid.iter().map(|uid| format!("user {uid}")).collect();
    let wanted = [
        ("CAP_NET_ADMIN", Privileges::NET_ADMIN),
        ("CAP_NET_RAW", Privileges::NET_RAW),
        ("CAP_BPF", Privileges::BPF),
        ("CAP_SYS_ADMIN", Privileges::SYS_ADMIN),
    ];
    let of = |has: bool| -> Vec<&str> {
        wanted.iter().filter(|(_, bit)| own.has(*bit) == Some(has)).map(|(name, _)| *name).collect()
    };
    for (word, names) in [("with", of(true)), ("without", of(false))] {
        parts.extend((!names.is_empty()).then(|| format!("{word} {}", names.join(" and "))));
    }
    parts.extend(own.memlock.map(|bytes| match bytes {
        u64::MAX => "may lock any memory".into(),
        _ => format!("may lock {} KiB of memory", bytes >> 10),
    }));
    join_or(&parts, "unknown")
}

fn describe_cpus(facts: &Facts) -> String {
    let cpu = &facts.cpu;
    let groups: Vec<String> = cpu.siblings.iter().map(|group| rules::format_cpus(group)).collect();
    let share = if groups.is_empty() { "no two".into() } else { groups.join("; ") };
    let governors: BTreeSet<&str> = cpu.governors.values().map(String::as_str).collect();
    let governors: Vec<&str> = governors.into_iter().collect();
    let nodes: BTreeSet<u32> = cpu.nodes.values().copied().collect();
    let mut parts = vec![
        format!("{share} share a core (SMT)"),
        if cpu.isolated.is_empty() {
            "none isolated".into()
        } else {
            format!("{} isolated", rules::format_cpus(&cpu.isolated))
        },
        format!(
            "frequency governor {}",
            if governors.is_empty() { "none".into() } else { governors.join(", ") }
        ),
    ];
    parts.extend(cpu.idle_governor.as_ref().map(|governor| format!("idle governor {governor}")));
    parts.extend((!nodes.is_empty()).then(|| format!("NUMA nodes {}", nodes.len())));
    parts.push(match facts.irqbalance {
        Some(pid) => format!("irqbalance runs (process {pid})"),
        None => "no irqbalance".into(),
    });
    parts.join(", ")
}

/// Received datagrams and losses, by place.
fn describe_counters(facts: &Facts) -> String {
    let losses = &facts.losses;
    let mut parts = Vec::new();
    for (name, udp) in [("IPv4", losses.udp4), ("IPv6", losses.udp6)] {
        parts.extend(udp.map(|udp| {
            format!(
                "UDP over {name} {} received, {} errors ({} buffer full, {} checksum, {} memory)",
                udp.in_datagrams, udp.in_errors, udp.receive_buffer, udp.checksum, udp.memory
            )
        }));
    }
    let at_sockets: u64 = facts.sockets.iter().map(|socket| socket.drops).sum();
    parts.push(format!("open sockets {at_sockets} dropped"));
    if !losses.softnet.is_empty() {
        let of = |value: fn(&super::facts::Softnet) -> u64| losses.softnet.iter().map(value).sum::<u64>();
        let (frames, dropped, squeezed) =
            (of(|row| row.processed), of(|row| row.dropped), of(|row| row.squeezed));
        parts.push(format!("softnet {frames} frames, {dropped} dropped, {squeezed} early ends"));
    }
    let of = |value: fn(&Device) -> u64| {
        facts.devices.iter().filter(|device| !device.loopback).map(value).sum::<u64>()
    };
    let (no_room, dropped) =
        (of(|device| device.counters.rx_overruns()), of(|device| device.counters.rx_dropped));
    parts.push(format!("devices {no_room} ring full, {dropped} dropped"));
    parts.join("; ")
}

fn describe_device(device: &Device) -> String {
    let on = |on: bool| if on { "on" } else { "off" };
    let mut parts = Vec::new();
    parts.extend(device.driver.clone().or_else(|| device.kind.clone()));
    parts.extend(device.rx_queues.map(|queues| {
        if queues == 1 { "1 receive queue".into() } else { format!("{queues} receive queues") }
    }));
    parts.extend(device.ring.map(|ring| format!("rings of {} (of {})", ring.rx, ring.rx_max)));
    parts.extend(device.xdp_features.map(describe_xdp));
    parts.extend(device.xdp_attached.as_ref().map(|how| format!("XDP attached ({how})")));
    // With one queue there is no spread.
    parts.extend(describe_hash(device).filter(|_| device.rx_queues != Some(1)));
    parts.extend(device.rss_queues.as_ref().map(|queues| format!("RSS to {} of them", queues.len())));
    if !device.irqs.is_empty() {
        let cpus: BTreeSet<usize> = device.irqs.iter().flat_map(|irq| irq.effective.clone()).collect();
        let cpus: Vec<usize> = cpus.into_iter().collect();
        parts.push(format!("interrupts to CPUs {}", rules::format_cpus(&cpus)));
    }
    parts.extend(device.coalescing.map(|c| {
        let after =
            [c.rx_usecs.map(|micros| format!("{micros} µs")), c.rx_frames.map(|n| format!("{n} frames"))];
        let after: Vec<String> = after.into_iter().flatten().collect();
        let adapts = if c.adaptive == Some(true) { "adaptive " } else { "" };
        format!("{adapts}coalescing {}", if after.is_empty() { "unknown".into() } else { after.join(" / ") })
    }));
    parts.extend(
        device.rps.as_ref().map(|queues| format!("RPS {}", on(queues.iter().any(|q| !q.is_empty())))),
    );
    parts.extend(device.rfs.as_ref().map(|queues| format!("RFS {}", on(queues.iter().any(|q| *q > 0)))));
    parts.extend(
        device.xps.as_ref().map(|queues| format!("XPS {}", on(queues.iter().any(|q| !q.is_empty())))),
    );
    parts.extend(device.gro.map(|gro| format!("GRO {}", on(gro))));
    parts.extend(device.threaded.map(|threaded| format!("threaded NAPI {}", on(threaded))));
    parts.extend(device.numa.map(|node| format!("NUMA node {node}")));
    if device.default_route {
        parts.push("default route".into());
    }
    parts.join(", ")
}

/// XDP features of the driver.
fn describe_xdp(features: u64) -> String {
    match [XDP_BASIC, XDP_REDIRECT, XDP_ZERO_COPY].map(|bit| features & bit != 0) {
        [false, ..] => "XDP generic only".into(),
        [_, false, _] => "XDP native without redirects".into(),
        [.., true] => "XDP native with zero-copy".into(),
        [.., false] => "XDP native without zero-copy".into(),
    }
}

/// The fields by which a NIC with several queues spreads UDP.
fn describe_hash(device: &Device) -> Option<String> {
    let by = |fields: u64| match fields & HASH_PORTS == HASH_PORTS {
        true => "addresses and ports",
        false if fields == 0 => "nothing",
        false => "addresses without ports",
    };
    let (four, six) = (device.hash_udp4.map(by), device.hash_udp6.map(by));
    match (four, six) {
        (None, None) => None,
        (Some(four), Some(six)) if four == six => Some(format!("UDP hashed by {four}")),
        (four, six) => {
            let told = |by: Option<&'static str>| by.unwrap_or("unknown fields");
            Some(format!("UDP hashed by {} (IPv6: {})", told(four), told(six)))
        }
    }
}

fn entry(finding: &Finding, out: &mut String) {
    let head = format!("{:5} ", finding.severity.label());
    wrap(out, &head, &format!("{} [{}]", finding.seen, finding.name()));
    wrap(out, "      ", &finding.why);
    for line in &finding.run {
        let _ = writeln!(out, "      > {line}");
    }
    if !finding.changes.is_empty() {
        let _ = writeln!(out, "      > or: manylane tune {}", finding.name());
    }
}

/// Rules that could not be judged, by reason.
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
        (0, 0) => "no problems found".to_owned(),
        _ => format!("losses: {loss}; wrong settings: {wrong}"),
    };
    let _ = write!(line, "; notes: {notes}; unknown: {}.", verdict.unknown.len());
    if advice {
        line += " 'manylane tune --dry-run --all' shows the changes that would help.";
    }
    line + "\n"
}

/// Wraps words into lines, with a hanging indent.
fn wrap(out: &mut String, head: &str, text: &str) {
    let indent = head.chars().count().min(12);
    let mut at = head.chars().count();
    out.push_str(head);
    for (number, word) in text.split(' ').enumerate() {
        let len = word.chars().count();
        if number > 0 {
            if at + 1 + len > LINE_WIDTH_MAX {
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
    use super::super::facts::{Coalescing, Cpu, DeviceCounters, Irq, Losses, Ring, Softnet, Udp};
    use super::*;

    #[test]
    fn lines_are_broken_between_words() {
        let mut out = String::new();
        wrap(&mut out, "note  ", &"word ".repeat(40));
        assert!(
            out.lines().count() == 3 && out.lines().all(|line| line.chars().count() <= LINE_WIDTH_MAX),
            "{out}"
        );
        assert!(out.lines().nth(1).unwrap().starts_with("      word"));
    }

    #[test]
    fn equal_findings_of_many_devices_are_merged() {
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
        assert!(text.contains("The same for gro-off:veth2, gro-off:veth3\n"), "{text}");
        assert!(text.matches("Because.").count() == 1 && text.contains("notes: 3"), "{text}");
        // Faults are reported for each device.
        assert_eq!(said(Severity::Wrong).matches("Because.").count(), 3);
    }

    #[test]
    fn healthy_facts_are_listed() {
        let device = Device {
            name: "eth0".into(),
            up: true,
            driver: Some("ice".into()),
            rx_queues: Some(2),
            ring: Some(Ring { rx: 2048, rx_max: 8160 }),
            coalescing: Some(Coalescing { rx_usecs: Some(50), rx_frames: None, adaptive: Some(true) }),
            gro: Some(true),
            xdp_features: Some(0x7f),
            hash_udp4: Some(0xf0),
            hash_udp6: Some(0x30),
            rss_queues: Some([0].into()),
            rps: Some(vec![vec![], vec![1]]),
            rfs: Some(vec![0, 0]),
            xps: Some(vec![vec![0], vec![1]]),
            threaded: Some(false),
            numa: Some(1),
            irqs: vec![
                Irq { effective: vec![1], ..Irq::default() },
                Irq { effective: vec![0], ..Irq::default() },
            ],
            counters: DeviceCounters { rx_missed: 4, rx_dropped: 5, ..DeviceCounters::default() },
            ..Device::default()
        };
        let facts = Facts {
            privileges: Privileges {
                uid: Some(7),
                capabilities: Some(1 << Privileges::BPF),
                memlock: Some(8 << 20),
            },
            sysctls: [("net.core.rmem_max".into(), 212_992), ("kernel.x".into(), 1)].into(),
            cpu: Cpu {
                online: vec![0, 1, 2, 3],
                siblings: vec![vec![0, 2], vec![1, 3]],
                isolated: vec![3],
                governors: [(0, "performance".into()), (1, "performance".into())].into(),
                nodes: [(0, 0), (1, 1)].into(),
                ..Cpu::default()
            },
            irqbalance: Some(99),
            devices: vec![device],
            losses: Losses {
                udp4: Some(Udp { in_datagrams: 10, in_errors: 6, receive_buffer: 3, checksum: 2, memory: 1 }),
                udp6: None,
                softnet: vec![Softnet { cpu: 0, processed: 70, dropped: 8, squeezed: 9 }],
            },
            ..Facts::default()
        };
        let text = report(&facts, &Verdict::default());
        let said = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for hint in [
            "privileges: user 7, with CAP_BPF, without CAP_NET_ADMIN and CAP_NET_RAW and CAP_SYS_ADMIN, may lock 8192 KiB",
            "CPUs: 0,2; 1,3 share a core (SMT), 3 isolated, frequency governor performance, NUMA nodes 2, irqbalance runs",
            "net.*: core.rmem_max 212992 counted:",
            "UDP over IPv4 10 received, 6 errors (3 buffer full, 2 checksum, 1 memory); open sockets 0 dropped; softnet 70 frames, 8 dropped, 9 early ends; devices 4 ring full, 5 dropped",
            "eth0: ice, 2 receive queues, rings of 2048 (of 8160), XDP native with zero-copy, UDP hashed by addresses and ports (IPv6: addresses without ports), RSS to 1 of them, interrupts to CPUs 0,1, adaptive coalescing 50 µs, RPS on, RFS off, XPS on, GRO on, threaded NAPI off, NUMA node 1",
        ] {
            assert!(said.contains(hint), "{hint} is not in\n{text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= LINE_WIDTH_MAX), "{text}");
        for (features, told) in [(0, "generic only"), (1, "without redirects"), (3, "without zero-copy")] {
            assert!(describe_xdp(features).ends_with(told), "{features}");
        }
    }

    #[test]
    fn a_healthy_machine_has_no_findings_and_says_so() {
        let text = report(&Facts::default(), &Verdict::default());
        assert!(text.contains("no problems found") && !text.contains("tune"), "{text}");
    }
}
