//! Details of single rules: severity, counts, and changes.

use super::super::super::change::{Change, Target};
use super::super::super::facts::{Channels, Facts, Program, Udp};
use super::super::super::finding::Severity;
use super::super::evaluate;
use super::{find, healthy_facts, irq, lane, program, socket};

#[test]
fn losses_are_counted_once() {
    let mut facts = healthy_facts();
    facts.losses.udp4.as_mut().unwrap().receive_buffer = 100;
    facts.sockets = vec![socket(60, 212_992)];
    facts.programs = vec![program(0, None)];
    let verdict = evaluate(&facts);
    assert_eq!(find(&verdict.findings, "socket-drops").lost, Some(60));
    assert_eq!(find(&verdict.findings, "receive-buffer-full").lost, Some(40));
    // All facts are known.
    facts.sockets = vec![socket(100, 212_992)];
    assert!(evaluate(&facts).findings.iter().all(|finding| finding.id != "receive-buffer-full"));
}

/// The kernel also counts datagrams without room as errors; the remaining errors were refused.
#[test]
fn errors_with_a_reason_are_reported_once() {
    let mut facts = healthy_facts();
    facts.losses.udp4 =
        Some(Udp { in_errors: 10, receive_buffer: 4, checksum: 2, memory: 1, ..Udp::default() });
    facts.losses.udp6 = Some(Udp { in_errors: 5, ..Udp::default() });
    let findings = evaluate(&facts).findings;
    assert_eq!(find(&findings, "refused-at-sockets").lost, Some(3 + 5));
    facts.asked = true;
    assert!(evaluate(&facts).findings.iter().all(|finding| finding.id != "refused-at-sockets"));
}

#[test]
fn the_limiting_buffer_sysctl_is_raised() {
    let set = |buffer, max| {
        let mut facts = healthy_facts();
        facts.sockets = vec![socket(1, buffer)];
        facts.sysctls.insert("net.core.rmem_max".into(), max);
        find(&evaluate(&facts).findings, "socket-drops").changes.clone()
    };
    // The system's default; a requested size that the maximum limited; a requested size that was
    // granted.
    assert_eq!(set(212_992, 4 << 20), [Change::sysctl("net.core.rmem_default", 4 << 20)]);
    assert_eq!(set(8 << 20, 4 << 20), [Change::sysctl("net.core.rmem_max", 16 << 20)]);
    assert_eq!(set(50_000, 4 << 20), []);
}

#[test]
fn raised_settings_are_not_raised_again() {
    let mut facts = healthy_facts();
    facts.losses.softnet[0].dropped = 1;
    assert_eq!(
        find(&evaluate(&facts).findings, "backlog-full").changes,
        [Change::sysctl("net.core.netdev_max_backlog", 16384)]
    );
    facts.sysctls.insert("net.core.netdev_max_backlog".into(), 16384);
    let verdict = evaluate(&facts);
    let finding = find(&verdict.findings, "backlog-full");
    assert!(finding.changes.is_empty() && finding.run[0].contains("--duration"), "{finding:?}");
}

#[test]
fn tune_ignores_findings_it_cannot_change() {
    // Settings that were switched off for safety, or on for latency, are reported and not changed.
    let mut facts = healthy_facts();
    facts.sysctls.insert("kernel.io_uring_disabled".into(), 2);
    facts.sysctls.insert("net.core.busy_read".into(), 50);
    let findings = evaluate(&facts).findings;
    assert!(findings.len() == 2 && findings.iter().all(|finding| finding.changes.is_empty()));
}

#[test]
fn costly_settings_need_to_be_named() {
    let judged = |governor: &str, nanos| {
        let mut facts = healthy_facts();
        (facts.cpu.idle_governor, facts.cpu.halt_poll_ns) = (Some(governor.into()), nanos);
        evaluate(&facts).findings
    };
    let findings = judged("haltpoll", Some(0));
    let finding = find(&findings, "halts-at-once");
    let target = Target::ModuleParameter { module: "haltpoll".into(), name: "guest_halt_poll_ns".into() };
    assert!(target.is_machine_wide() && finding.only_named);
    assert_eq!(finding.changes, [Change::new(target, 200_000)]);
    // A machine whose CPUs never halt, one that polls already, and one with another
    // governor, for which the number means nothing.
    let mut awake = healthy_facts();
    (awake.cpu.idle_governor, awake.cpu.halt_poll_ns) = (Some("haltpoll".into()), Some(0));
    awake.cpu.idle.values_mut().for_each(|idle| idle.limit = "n/a".into());
    assert!(evaluate(&awake).findings.is_empty());
    assert!(judged("haltpoll", Some(50_000)).is_empty() && judged("menu", Some(0)).is_empty());
    // --all includes all others.
    let mut facts = healthy_facts();
    facts.sysctls.insert("net.core.bpf_jit_enable".into(), 0);
    assert!(!find(&evaluate(&facts).findings, "jit-off").only_named);
}

#[test]
fn lane_cpus_get_a_latency_limit() {
    let target = |cpu| Target::CpuFile { cpu, file: "power/pm_qos_resume_latency_us".into() };
    let set = |value: &str, cpus: &[usize]| -> Vec<Change> {
        cpus.iter().map(|&cpu| Change::new(target(cpu), value)).collect()
    };
    // Severity and changes depend on the machine and its lanes.
    let judged = |change: &dyn Fn(&mut Facts)| {
        let mut facts = healthy_facts();
        facts.cpu.idle.values_mut().for_each(|idle| idle.latencies.push(133));
        change(&mut facts);
        let found = evaluate(&facts).findings.into_iter().find(|finding| finding.id == "idle-leaves-late");
        found.map(|finding| {
            assert!(
                finding.only_named && finding.changes.iter().all(|change| change.target.is_machine_wide())
            );
            (finding.severity, finding.changes, finding.run.join("; "))
        })
    };
    let all = judged(&|_| {}).unwrap();
    assert_eq!((all.0, all.1), (Severity::Note, set("10", &[0, 1])));
    assert_eq!(
        all.2,
        "for n in 0 1; do echo 10 > /sys/devices/system/cpu/cpu$n/power/pm_qos_resume_latency_us; done"
    );
    // If there are lanes, the finding is about their CPUs, the ones that wait least first.
    let one = judged(&|f| f.lanes = vec![lane("sleep", &[1])]).unwrap();
    assert_eq!((one.0, one.1), (Severity::Note, set("10", &[1])));
    assert_eq!(one.2, "echo 10 > /sys/devices/system/cpu/cpu1/power/pm_qos_resume_latency_us");
    let adaptive = judged(&|f| f.lanes = vec![lane("sleep", &[1]), lane("adaptive", &[0])]).unwrap();
    assert_eq!((adaptive.0, adaptive.1), (Severity::Wrong, set("10", &[0])));
    // When these are set, the others are only a note.
    let limited = |f: &mut Facts, cpu, limit: &str| f.cpu.idle.get_mut(&cpu).unwrap().limit = limit.into();
    let rest = judged(&|f| {
        f.lanes = vec![lane("sleep", &[1]), lane("adaptive", &[0])];
        limited(f, 0, "10");
    });
    assert_eq!(rest.map(|rest| (rest.0, rest.1)), Some((Severity::Note, set("10", &[1]))));
    for (limit, is_enough) in [("10", true), ("n/a", true), ("132", true), ("133", false), ("0", false)] {
        let found = judged(&|f| {
            f.lanes = vec![lane("adaptive", &[0])];
            limited(f, 0, limit);
        });
        assert_eq!(found.is_none(), is_enough, "{limit}");
    }
    // A virtual machine that halts at once, whatever its table says; no value helps.
    let guest = |nanos, limit: &'static str| {
        judged(&move |f| {
            (f.cpu.idle_governor, f.cpu.halt_poll_ns) = (Some("haltpoll".into()), Some(nanos));
            f.cpu.idle.values_mut().for_each(|idle| idle.latencies = vec![0, 1]);
            f.lanes = vec![lane("adaptive", &[1])];
            limited(f, 1, limit);
        })
    };
    let halts = guest(0, "1").unwrap();
    assert_eq!((halts.0, halts.1), (Severity::Wrong, set("n/a", &[1])));
    assert!(guest(0, "n/a").is_none() && guest(200_000, "0").is_none());
}

#[test]
fn autogroup_matters_only_to_adaptive_lanes() {
    let judged = |enabled: u64, wait: &str| {
        let mut facts = healthy_facts();
        facts.sysctls.insert("kernel.sched_autogroup_enabled".into(), enabled);
        facts.lanes = vec![lane(wait, &[1])];
        evaluate(&facts).findings
    };
    let findings = judged(1, "adaptive");
    let finding = find(&findings, "autogroup-shares");
    assert!(finding.only_named);
    assert_eq!(finding.changes, [Change::sysctl("kernel.sched_autogroup_enabled", 0)]);
    assert!(
        judged(0, "adaptive").is_empty() && judged(1, "sleep").is_empty() && judged(1, "spin:5").is_empty()
    );
}

#[test]
fn the_rx_hash_adds_ports_and_keeps_its_fields() {
    let set = |fields| {
        let mut facts = healthy_facts();
        facts.devices[1].hash_udp4 = Some(fields);
        find(&evaluate(&facts).findings, "udp-ports-not-hashed").changes.clone()
    };
    let target = || Target::Hash4 { device: "eth0".into() };
    assert_eq!(set(0x30), [Change::new(target(), 0xf0)]);
    assert_eq!(set(0), [Change::new(target(), 0xf0)]);
    assert_eq!(set(0x34), [Change::new(target(), 0xf4)]);
}

#[test]
fn evidence_raises_the_severity() {
    let mut facts = healthy_facts();
    facts.sysctls.insert("net.core.rmem_max".into(), 212_992);
    facts.losses.udp4.as_mut().unwrap().receive_buffer = 1;
    assert_eq!(find(&evaluate(&facts).findings, "rmem-max-small").severity, Severity::Wrong);
    let mut facts = healthy_facts();
    facts.losses.softnet[0].squeezed = 1;
    assert_eq!(find(&evaluate(&facts).findings, "softirq-squeezed").severity, Severity::Note);
    // GRO is off on veth devices by default.
    let mut facts = healthy_facts();
    (facts.devices[1].gro, facts.devices[1].kind) = (Some(false), Some("veth".into()));
    assert_eq!(find(&evaluate(&facts).findings, "gro-off").severity, Severity::Note);
}

#[test]
fn interrupts_are_spread_over_allowed_cpus() {
    let mut facts = healthy_facts();
    facts.cpu.online = vec![0, 1, 2, 3];
    facts.cpu.nodes = [(0, 0), (1, 0), (2, 1), (3, 1)].into();
    facts.devices[1].channels = None;
    facts.devices[1].irqs = vec![irq(40, 0), irq(41, 0), irq(42, 0)];
    facts.cpu.isolated = vec![1];
    let set = |facts: &Facts| {
        let verdict = evaluate(facts);
        let changes = find(&verdict.findings, "interrupts-on-one-core").changes.clone();
        changes.into_iter().map(|change| change.value).collect::<Vec<_>>()
    };
    // The device's node has only one CPU that is not isolated.
    assert_eq!(set(&facts), ["0", "0", "0"]);
    facts.cpu.isolated.clear();
    assert_eq!(set(&facts), ["0", "1", "0"]);
    facts.devices[1].numa = None;
    assert_eq!(set(&facts), ["0", "1", "2"]);
}

#[test]
fn each_send_queue_gets_cpus_of_its_own() {
    for (cpus, queues, expected) in [
        (vec![0, 1], 2, &["1", "2"][..]),
        (vec![0, 1, 2, 3], 2, &["5", "a"]),
        (vec![0, 1], 4, &["1", "2", "1", "2"]),
    ] {
        let mut facts = healthy_facts();
        facts.cpu.online = cpus;
        facts.devices[1].xps = Some(vec![vec![]; queues]);
        let verdict = evaluate(&facts);
        let changes: Vec<&str> =
            find(&verdict.findings, "xps-off").changes.iter().map(|change| change.value.as_str()).collect();
        assert_eq!(changes, expected);
    }
    // One queue, or a driver that has set them: no finding.
    for xps in [vec![vec![]], vec![vec![0], vec![]]] {
        let mut facts = healthy_facts();
        facts.devices[1].xps = Some(xps);
        assert!(evaluate(&facts).findings.is_empty());
    }
}

#[test]
fn queues_are_as_many_as_cpus_at_most() {
    let mut facts = healthy_facts();
    facts.devices[1].channels = Some(Channels { rx: 1, rx_max: 4, ..Channels::default() });
    let verdict = evaluate(&facts);
    let target = Target::ReceiveQueues { device: "eth0".into() };
    assert_eq!(find(&verdict.findings, "queues-unused").changes, [Change::new(target, 2)]);
    // For a veth device, this is not a fault.
    facts.devices[1].kind = Some("veth".into());
    assert_eq!(find(&evaluate(&facts).findings, "queues-unused").severity, Severity::Note);
    // A link that is down, and a device with lower devices, are not judged.
    (facts.devices[1].up, facts.devices[1].kind) = (false, None);
    assert!(evaluate(&facts).findings.is_empty());
    (facts.devices[1].up, facts.devices[1].kind) = (true, Some("bond".into()));
    assert!(evaluate(&facts).findings.is_empty());
}

#[test]
fn a_shared_socket_finding_recommends_lanes() {
    let shared = |programs: Vec<Program>| {
        let mut facts = healthy_facts();
        (facts.asked, facts.sockets, facts.programs) = (true, vec![socket(0, 212_992)], programs);
        evaluate(&facts).findings.into_iter().find(|finding| finding.id == "socket-shared")
    };
    let finding = shared(vec![program(4, None)]).unwrap();
    assert!(finding.seen.contains("4 threads of 1 process wait"), "{}", finding.seen);
    assert!(finding.run[0].contains("manylane run -- named"), "{:?}", finding.run);
    // Two processes that one process forked.
    let mut second = program(1, None);
    second.pid += 1;
    let finding = shared(vec![program(1, None), second]).unwrap();
    assert!(finding.seen.contains("2 threads of 2 processes wait"), "{}", finding.seen);
    let finding = shared(vec![program(4, Some("it is static"))]).unwrap();
    assert!(finding.run[0].contains("it is static"), "{:?}", finding.run);
    assert!(shared(vec![program(1, None)]).is_none());
    let on_lanes = Program { on_lanes: true, ..program(4, None) };
    assert!(shared(vec![on_lanes]).is_none());
}
