//! Tests every rule both ways: no rule fires on a healthy machine, and each fires on its own fault.
//! The details of single rules are in `details.rs`.

mod details;

use std::collections::{BTreeMap, BTreeSet};

use manylane_test_support::docs::check_table;

use super::super::facts::{
    Channels, Coalescing, Cpu, Device, DeviceCounters, Facts, Feature, Idle, Irq, Lane, Losses, Privileges,
    Program, Ring, Socket, Softnet, Udp,
};
use super::super::finding::{Finding, Severity};
use super::{all, evaluate};

fn irq(number: u32, cpu: usize) -> Irq {
    Irq { number, name: format!("eth0-TxRx-{number}"), allowed: vec![cpu], effective: vec![cpu] }
}

/// A healthy server: two CPUs, a NIC with two queues.
fn healthy_facts() -> Facts {
    let device = Device {
        name: "eth0".into(),
        index: 2,
        up: true,
        driver: Some("ice".into()),
        rx_queues: Some(2),
        channels: Some(Channels { combined: 2, combined_max: 8, ..Channels::default() }),
        ring: Some(Ring { rx: 2048, rx_max: 8160 }),
        coalescing: Some(Coalescing { rx_usecs: Some(50), rx_frames: None, adaptive: Some(true) }),
        gro: Some(true),
        xdp_features: Some(0x7f),
        hash_udp4: Some(0xf0),
        hash_udp6: Some(0xf0),
        rss_queues: Some([0, 1].into()),
        rps: Some(vec![vec![], vec![]]),
        rfs: Some(vec![0, 0]),
        xps: Some(vec![vec![0], vec![1]]),
        threaded: Some(false),
        numa: Some(0),
        irqs: vec![irq(40, 0), irq(41, 1)],
        counters: DeviceCounters { rx_packets: 1_000_000, ..DeviceCounters::default() },
        ..Device::default()
    };
    let sysctls = [
        ("net.core.rmem_max", 16 << 20),
        ("net.core.rmem_default", 212_992),
        ("net.core.netdev_max_backlog", 1000),
        ("net.core.netdev_budget", 300),
        ("net.core.netdev_budget_usecs", 2000),
        ("net.core.busy_poll", 0),
        ("net.core.busy_read", 0),
        ("net.core.rps_sock_flow_entries", 0),
        ("net.core.bpf_jit_enable", 1),
        ("kernel.unprivileged_bpf_disabled", 2),
        ("kernel.io_uring_disabled", 0),
    ];
    let softnet = |cpu| Softnet { cpu, processed: 500_000, dropped: 0, squeezed: 0 };
    Facts {
        kernel: "6.18.0".into(),
        uptime: Some(7300.0),
        features: ["ebpf-steering", "io-uring", "udp-gro"]
            .map(|name| Feature { name: name.into(), missing: None })
            .into(),
        privileges: Privileges { uid: Some(0), capabilities: Some(u64::MAX), memlock: Some(8 << 20) },
        sysctls: sysctls.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
        cpu: Cpu {
            online: vec![0, 1],
            governors: [(0, "performance".to_owned()), (1, "performance".to_owned())].into(),
            idle_governor: Some("menu".into()),
            nodes: [(0, 0), (1, 0)].into(),
            // Polls, halts, halts and slows down.
            idle: [0, 1].map(|cpu| (cpu, Idle { latencies: vec![0, 1, 10], limit: "0".into() })).into(),
            ..Cpu::default()
        },
        devices: vec![
            Device {
                name: "lo".into(),
                index: 1,
                up: true,
                loopback: true,
                gro: Some(false),
                ..Device::default()
            },
            device,
        ],
        losses: Losses {
            udp4: Some(Udp { in_datagrams: 1_000_000, ..Udp::default() }),
            udp6: Some(Udp::default()),
            softnet: vec![softnet(0), softnet(1)],
        },
        ..Facts::default()
    }
}

fn socket(drops: u64, buffer: u64) -> Socket {
    Socket {
        local: "0.0.0.0:53".parse().unwrap(),
        peer: None,
        inode: 77,
        drops,
        queued: 0,
        buffer: Some(buffer),
    }
}

fn program(waiting: u32, beyond: Option<&str>) -> Program {
    Program {
        pid: 4711,
        name: "named".into(),
        threads: 5,
        sockets: vec![77],
        waiting: BTreeMap::from([(77, waiting)]),
        on_lanes: false,
        beyond: beyond.map(Into::into),
    }
}

fn lane(wait: &str, cpus: &[usize]) -> Lane {
    Lane { pid: 4711, wait: Some(wait.into()), cpus: cpus.into(), ..Lane::default() }
}

/// Changes the facts.
type Cause = fn(&mut Facts);

/// The fault that makes each rule fire on an otherwise healthy machine.
fn causes() -> Vec<(&'static str, Severity, Cause)> {
    use Severity::{Loss, Note, Wrong};
    vec![
        ("socket-drops", Loss, |f| f.sockets = vec![socket(17, 212_992)]),
        ("receive-buffer-full", Loss, |f| f.losses.udp4.as_mut().unwrap().receive_buffer = 5),
        ("refused-at-sockets", Note, |f| f.losses.udp4.as_mut().unwrap().in_errors = 5),
        ("udp-memory-full", Loss, |f| f.losses.udp6.as_mut().unwrap().memory = 1),
        ("device-ring-full", Loss, |f| f.devices[1].counters.rx_missed = 3),
        ("backlog-full", Loss, |f| f.losses.softnet[1].dropped = 9),
        ("checksum-errors", Loss, |f| f.losses.udp4.as_mut().unwrap().checksum = 2),
        ("frames-broken", Loss, |f| f.devices[1].counters.rx_crc = 2),
        ("softirq-squeezed", Wrong, |f| f.losses.softnet[0].squeezed = 1000),
        ("device-dropped", Note, |f| f.devices[1].counters.rx_dropped = 1),
        // The fields that a NIC hashes by default: addresses.
        ("udp-ports-not-hashed", Wrong, |f| f.devices[1].hash_udp4 = Some(0x30)),
        ("rss-narrow", Wrong, |f| f.devices[1].rss_queues = Some([0].into())),
        ("queues-unused", Wrong, |f| {
            f.devices[1].channels.as_mut().unwrap().combined = 1;
            f.devices[1].rx_queues = Some(1);
        }),
        ("interrupts-on-one-core", Wrong, |f| f.devices[1].irqs[1].effective = vec![0]),
        ("gro-off", Wrong, |f| f.devices[1].gro = Some(false)),
        ("xdp-generic", Wrong, |f| f.devices[1].xdp_attached = Some("generic".into())),
        ("one-queue", Note, |f| {
            f.devices[1].channels = Some(Channels { combined: 1, combined_max: 1, ..Channels::default() });
            (f.devices[1].rx_queues, f.devices[1].rps) = (Some(1), Some(vec![vec![]]));
        }),
        ("interrupts-far", Wrong, |f| {
            f.cpu.nodes.insert(1, 1);
        }),
        ("rfs-half-set", Wrong, |f| {
            f.sysctls.insert("net.core.rps_sock_flow_entries".into(), 32768);
        }),
        ("irqbalance-moves", Note, |f| f.irqbalance = Some(99)),
        ("no-native-xdp", Note, |f| f.devices[1].xdp_features = Some(0)),
        ("no-zero-copy", Note, |f| f.devices[1].xdp_features = Some(0x77)),
        ("coalescing-long", Note, |f| {
            f.devices[1].coalescing =
                Some(Coalescing { rx_usecs: Some(250), rx_frames: None, adaptive: Some(false) });
        }),
        ("coalescing-off", Note, |f| {
            f.devices[1].coalescing =
                Some(Coalescing { rx_usecs: Some(0), rx_frames: Some(1), adaptive: Some(false) });
        }),
        ("xps-off", Note, |f| f.devices[1].xps = Some(vec![vec![], vec![]])),
        ("threaded-napi", Note, |f| f.devices[1].threaded = Some(true)),
        ("jit-off", Wrong, |f| {
            f.sysctls.insert("net.core.bpf_jit_enable".into(), 0);
        }),
        ("rmem-max-small", Note, |f| {
            f.sysctls.insert("net.core.rmem_max".into(), 212_992);
        }),
        ("ebpf-refused", Note, |f| f.features[0].missing = Some("EPERM".into())),
        ("busy-poll-for-all", Note, |f| {
            f.sysctls.insert("net.core.busy_poll".into(), 50);
        }),
        ("memlock-small", Note, |f| f.privileges.capabilities = Some(!(1 << Privileges::IPC_LOCK))),
        ("io-uring-disabled", Note, |f| {
            f.sysctls.insert("kernel.io_uring_disabled".into(), 2);
        }),
        ("xdp-needs-privileges", Note, |f| f.privileges.capabilities = Some(!(1 << Privileges::NET_RAW))),
        ("feature-missing", Note, |f| f.features[2].missing = Some("ENOPROTOOPT".into())),
        ("governor-slow", Note, |f| {
            f.cpu.governors.insert(1, "powersave".into());
        }),
        ("autogroup-shares", Note, |f| {
            f.sysctls.insert("kernel.sched_autogroup_enabled".into(), 1);
            f.lanes = vec![lane("sleep", &[0]), lane("adaptive", &[1])];
        }),
        ("halts-at-once", Note, |f| {
            (f.cpu.idle_governor, f.cpu.halt_poll_ns) = (Some("haltpoll".into()), Some(0));
            // Except the CPUs of lanes.
            (f.lanes, f.cpu.idle.get_mut(&1).unwrap().limit) = (vec![lane("sleep", &[1])], "n/a".into());
        }),
        ("idle-leaves-late", Note, |f| f.cpu.idle.get_mut(&1).unwrap().latencies.push(133)),
        ("idle-leaves-late", Wrong, |f| {
            f.cpu.idle.get_mut(&1).unwrap().latencies.push(133);
            f.lanes = vec![lane("adaptive", &[1])];
        }),
        ("smt-shared", Note, |f| f.cpu.siblings = vec![vec![0, 1]]),
        ("isolated-idle", Note, |f| f.cpu.isolated = vec![1]),
        ("socket-shared", Wrong, |f| {
            (f.asked, f.sockets, f.programs) = (true, vec![socket(0, 212_992)], vec![program(4, None)]);
        }),
        ("beyond-reach", Note, |f| {
            (f.asked, f.sockets) = (true, vec![socket(0, 212_992)]);
            f.programs = vec![program(1, Some("is statically linked"))];
        }),
    ]
}

fn find<'a>(findings: &'a [Finding], id: &str) -> &'a Finding {
    findings.iter().find(|finding| finding.id == id).unwrap_or_else(|| panic!("{id} did not fire"))
}

#[test]
fn a_healthy_machine_has_no_findings() {
    let verdict = evaluate(&healthy_facts());
    let ids: Vec<_> = verdict.findings.iter().map(Finding::name).collect();
    assert!(ids.is_empty() && verdict.unknown.is_empty(), "{ids:?} {:?}", verdict.unknown);
    assert!(!verdict.has_problems());
}

#[test]
fn each_rule_fires_alone_on_its_symptom() {
    for (id, severity, cause) in causes() {
        let mut facts = healthy_facts();
        cause(&mut facts);
        let verdict = evaluate(&facts);
        let ids: Vec<_> = verdict.findings.iter().map(|finding| finding.id).collect();
        // An isolated or distant CPU gets no interrupts, which another rule may report, too.
        assert_eq!(ids, [id]);
        let finding = &verdict.findings[0];
        assert_eq!(finding.severity, severity, "{id}");
        assert!(!finding.seen.is_empty() && !finding.why.is_empty() && !finding.run.is_empty(), "{id}");
        assert_eq!(verdict.has_problems(), severity < Severity::Note, "{id}");
        assert!(finding.is_named(id) && finding.is_named(&finding.name()) && !finding.is_named("x"), "{id}");
    }
    let tried: BTreeSet<_> = causes().iter().map(|(id, ..)| *id).collect();
    let rules: BTreeSet<_> = all().iter().map(|rule| rule.id).collect();
    assert_eq!(tried, rules, "a rule without a test");
    assert_eq!(rules.len(), all().len(), "two rules of one name");
}

#[test]
fn unreadable_facts_are_unknown_and_not_healthy() {
    let cases: [(&str, Cause); 20] = [
        ("socket-drops", |f| f.note_gap("sockets", "x")),
        ("receive-buffer-full", |f| f.losses.udp4 = None),
        ("udp-memory-full", |f| f.losses.udp4 = None),
        ("checksum-errors", |f| f.losses.udp4 = None),
        ("refused-at-sockets", |f| f.losses.udp4 = None),
        ("backlog-full", |f| f.note_gap("softnet", "x")),
        ("device-ring-full", |f| f.note_gap("devices", "x")),
        ("udp-ports-not-hashed", |f| (f.devices[1].hash_udp4, f.devices[1].hash_udp6) = (None, None)),
        ("interrupts-on-one-core", |f| f.devices[1].irqs[0].effective.clear()),
        ("one-queue", |f| {
            f.devices[1].channels = None;
            (f.devices[1].rx_queues, f.devices[1].rps) = (Some(1), None);
        }),
        ("xps-off", |f| {
            f.note_gap("sysfs", "x");
            f.devices[1].xps = None;
        }),
        ("no-native-xdp", |f| f.devices[1].xdp_features = None),
        ("jit-off", |f| f.sysctls.retain(|name, _| name != "net.core.bpf_jit_enable")),
        ("rmem-max-small", |f| f.sysctls.retain(|name, _| name != "net.core.rmem_max")),
        ("governor-slow", |f| f.cpu.governors.clear()),
        ("halts-at-once", |f| f.cpu.idle_governor = None),
        ("halts-at-once", |f| f.cpu.idle_governor = Some("haltpoll".into())),
        ("idle-leaves-late", |f| f.cpu.idle.clear()),
        ("idle-leaves-late", |f| f.cpu.idle_governor = Some("haltpoll".into())),
        ("xdp-needs-privileges", |f| f.privileges.capabilities = None),
    ];
    for (id, hide) in cases {
        let mut facts = healthy_facts();
        hide(&mut facts);
        let verdict = evaluate(&facts);
        assert!(verdict.findings.iter().all(|finding| finding.id != id), "{id} fired");
        let unknown = verdict.unknown.iter().find(|unknown| unknown.id == id);
        assert!(unknown.is_some_and(|unknown| !unknown.because.is_empty()), "{id} says nothing");
    }
    // Without any facts, no rule fires and none fails.
    let verdict = evaluate(&Facts::default());
    assert!(!verdict.has_problems() && verdict.unknown.len() >= 10);
}

#[test]
fn a_watch_counts_losses_of_its_interval() {
    let mut before = healthy_facts();
    before.losses.softnet[0].dropped = 100;
    before.losses.udp4.as_mut().unwrap().receive_buffer = 50;
    before.devices[1].counters.rx_missed = 7;
    before.sockets = vec![socket(50, 212_992)];
    let still = before.clone().delta_since(&before, 10.0);
    assert!(evaluate(&still).findings.is_empty());
    let mut after = before.clone();
    after.losses.udp4.as_mut().unwrap().receive_buffer = 53;
    after.sockets = vec![socket(53, 212_992)];
    let lost = after.delta_since(&before, 10.0);
    let verdict = evaluate(&lost);
    assert_eq!(verdict.findings.len(), 1);
    let finding = find(&verdict.findings, "socket-drops");
    assert!(finding.lost == Some(3) && finding.seen.contains("in the last 10.0 seconds"), "{}", finding.seen);
}

#[test]
fn findings_are_sorted_by_loss() {
    let mut facts = healthy_facts();
    for (_, _, cause) in causes().into_iter().rev() {
        cause(&mut facts);
    }
    let findings = evaluate(&facts).findings;
    assert!(findings.len() > 20);
    let order: Vec<_> = findings.iter().map(|f| (f.severity, std::cmp::Reverse(f.cost))).collect();
    assert!(order.is_sorted());
    assert_eq!(findings[0].id, "socket-drops");
}

#[test]
fn doctor_docs_describe_every_rule() {
    let rows = all().into_iter().map(|rule| {
        [format!("`{}`", rule.id), rule.meaning.into(), rule.remedy.into(), rule.cost.to_string()]
    });
    check_table("doctor.md", "findings", ["finding", "means", "what helps", "cost"], rows);
}
