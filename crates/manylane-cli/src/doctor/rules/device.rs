//! Features of devices that are not in use.

use manylane_sys::device::{HASH_ADDRESSES, HASH_PORTS};

use super::super::change::{Change, Target};
use super::super::collect::files::format_cpu_mask;
use super::super::ethtool::{XDP_BASIC, XDP_REDIRECT, XDP_ZERO_COPY};
use super::super::facts::{Device, Facts};
use super::super::finding::Severity;
use super::rule::{FindingSink, Rule, format_cpus, rx_devices, usable_cpus};

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "udp-ports-not-hashed",
        cost: 85,
        meaning: "The device hashes UDP by addresses alone: all datagrams between two hosts use one queue and one CPU.",
        remedy: "`ethtool -N DEVICE rx-flow-hash udp4 sdfn`, and `udp6`. Fragments then use another queue than the rest of their flow.",
        check: udp_ports_not_hashed,
    },
    Rule {
        id: "queues-unused",
        cost: 80,
        meaning: "The device uses fewer receive queues than it has, and fewer than there are CPUs.",
        remedy: "`ethtool -L DEVICE combined N` (or `rx N`). This takes the link down for a moment.",
        check: queues_unused,
    },
    Rule {
        id: "rss-narrow",
        cost: 79,
        meaning: "The device's table for hashes (RSS) names fewer receive queues than are in use: the others get only what filters direct to them.",
        remedy: "`ethtool -X DEVICE equal N`, or `ethtool -X DEVICE default`, unless filters (`ethtool -N`) use the other queues.",
        check: rss_narrow,
    },
    Rule {
        id: "interrupts-on-one-core",
        cost: 75,
        meaning: "All receive queues of the device interrupt the same CPU, which does all receive work.",
        remedy: "Spread them: `/proc/irq/N/smp_affinity_list`, or irqbalance.",
        check: interrupts_on_one_core,
    },
    Rule {
        id: "gro-off",
        cost: 65,
        meaning: "Generic receive offload is off: each frame passes the stack alone, and UDP GRO merges nothing. A veth device without it runs no NAPI, and accepts no frames from XDP.",
        remedy: "`ethtool -K DEVICE gro on`.",
        check: gro_off,
    },
    Rule {
        id: "xdp-generic",
        cost: 55,
        meaning: "An XDP program is attached in generic mode, though the driver supports native mode: each frame is copied into an skb first.",
        remedy: "Attach it in native mode; `manylane` does so unless `--xdp-generic` is given.",
        check: xdp_generic,
    },
    Rule {
        id: "one-queue",
        cost: 45,
        meaning: "The device has one receive queue, and nothing spreads its frames: one CPU does all receive work.",
        remedy: "RPS: `/sys/class/net/DEVICE/queues/rx-0/rps_cpus`. For a virtual machine: more queues from the host.",
        check: one_queue,
    },
    Rule {
        id: "interrupts-far",
        cost: 35,
        meaning: "Queues of the device interrupt CPUs of another NUMA node than the device's: each frame crosses nodes.",
        remedy: "`/proc/irq/N/smp_affinity_list` with CPUs of the device's node.",
        check: interrupts_far,
    },
    Rule {
        id: "rfs-half-set",
        cost: 30,
        meaning: "Receive flow steering has only one of its two settings, and has no effect.",
        remedy: "`net.core.rps_sock_flow_entries`, and `/sys/class/net/DEVICE/queues/rx-N/rps_flow_cnt`.",
        check: rfs_half_set,
    },
    Rule {
        id: "irqbalance-moves",
        cost: 24,
        meaning: "irqbalance moves the interrupts of a device with several queues away from the CPUs of pinned lanes.",
        remedy: "Stop irqbalance if lanes are pinned, or ban these interrupts (`--banirq`).",
        check: irqbalance_moves,
    },
    Rule {
        id: "no-native-xdp",
        cost: 19,
        meaning: "The driver runs no XDP programs, or none that redirect: engine `xdp` works in generic mode at best, and gains less.",
        remedy: "Nothing on this device. Use engine `mmsg`, or another device.",
        check: no_native_xdp,
    },
    Rule {
        id: "coalescing-long",
        cost: 16,
        meaning: "The device delays interrupts for long: this gains throughput and delays every reply.",
        remedy: "`ethtool -C DEVICE adaptive-rx on`, or a lower `rx-usecs`.",
        check: coalescing_long,
    },
    Rule {
        id: "coalescing-off",
        cost: 15,
        meaning: "The device interrupts for each frame.",
        remedy: "`ethtool -C DEVICE adaptive-rx on`, or an `rx-usecs` above 0.",
        check: coalescing_off,
    },
    Rule {
        id: "threaded-napi",
        cost: 12,
        meaning: "Receive work of the device runs in ordinary kernel threads.",
        remedy: "Pin the threads `napi/DEVICE-N` (taskset) and set their priority (chrt), or turn it off: `/sys/class/net/DEVICE/threaded`.",
        check: threaded_napi,
    },
    Rule {
        id: "no-zero-copy",
        cost: 10,
        meaning: "The driver runs XDP programs, but copies each frame for AF_XDP.",
        remedy: "Nothing on this device.",
        check: no_zero_copy,
    },
];

/// Devices that are known to use several queues.
fn multi_queue_devices(facts: &Facts) -> impl Iterator<Item = &Device> {
    rx_devices(facts).filter(|device| device.rx_queues.is_some_and(|queues| queues > 1))
}

fn udp_ports_not_hashed(facts: &Facts, found: &mut FindingSink<'_>) {
    for device in multi_queue_devices(facts) {
        let name = || device.name.clone();
        let hashes = [
            (device.hash_udp4, "IPv4", Target::Hash4 { device: name() }),
            (device.hash_udp6, "IPv6", Target::Hash6 { device: name() }),
        ];
        if hashes.iter().all(|(fields, ..)| fields.is_none()) {
            // Veth has no hash of its own. The kernel's includes the ports.
            if device.kind.is_none() {
                found
                    .unknown(format!("the driver of {} does not report which fields it hashes", device.name));
            }
            continue;
        }
        let lacking: Vec<_> = hashes
            .into_iter()
            .filter_map(|(fields, family, target)| Some((fields?, family, target)))
            .filter(|(fields, ..)| fields & HASH_PORTS != HASH_PORTS)
            .collect();
        if lacking.is_empty() {
            continue;
        }
        let families: Vec<_> = lacking.iter().map(|(_, family, _)| *family).collect();
        let finding = found.add(
            Severity::Wrong,
            format!("{} does not hash the ports of UDP over {}", device.name, families.join(" and ")),
            "All datagrams between two hosts arrive on one queue, so one CPU receives all of them.",
        );
        finding.subject(&device.name);
        for (fields, _, target) in lacking {
            finding.set(Change::new(target, fields | HASH_ADDRESSES | HASH_PORTS));
        }
    }
}

fn queues_unused(facts: &Facts, found: &mut FindingSink<'_>) {
    let cpus = u32::try_from(usable_cpus(facts).len()).unwrap_or(u32::MAX);
    for device in rx_devices(facts) {
        let Some(channels) = device.channels else { continue };
        let name = device.name.clone();
        let (now, max, target) = if channels.combined_max > 0 {
            (channels.combined, channels.combined_max, Target::CombinedQueues { device: name })
        } else {
            (channels.rx, channels.rx_max, Target::ReceiveQueues { device: name })
        };
        let want = max.min(cpus);
        if now < want {
            // Between veth devices, the sender's CPU does the work unless they run NAPI.
            let is_veth = device.kind.as_deref() == Some("veth");
            found
                .add(
                    if is_veth { Severity::Note } else { Severity::Wrong },
                    format!(
                        "{} uses {now} of {max} receive queues, and {cpus} CPUs are available",
                        device.name
                    ),
                    format!("Each queue has its own interrupt: at most {now} CPUs do the receive work."),
                )
                .subject(&device.name)
                .set(Change::new(target, want));
        }
    }
}

fn rss_narrow(facts: &Facts, found: &mut FindingSink<'_>) {
    for device in multi_queue_devices(facts) {
        let (Some(named), Some(queues)) = (&device.rss_queues, device.rx_queues) else { continue };
        if named.len() < queues as usize {
            found
                .add(
                    Severity::Wrong,
                    format!("{} spreads flows to {} of {queues} receive queues", device.name, named.len()),
                    "The other queues stay idle, and so do their CPUs, unless filters direct flows to them.",
                )
                .subject(&device.name)
                .run(format!("ethtool -X {} equal {queues}", device.name));
        }
    }
}

/// The CPUs that get interrupts of a device's queues, if all are known.
fn irq_cpus(device: &Device) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for irq in &device.irqs {
        cpus.push(*irq.effective.first()?);
    }
    (!cpus.is_empty()).then_some(cpus)
}

fn interrupts_on_one_core(facts: &Facts, found: &mut FindingSink<'_>) {
    let cpus = usable_cpus(facts);
    for device in rx_devices(facts).filter(|device| device.irqs.len() > 1) {
        let Some(interrupted) = irq_cpus(device) else {
            found
                .unknown(format!("/proc/irq does not show which CPUs get the interrupts of {}", device.name));
            continue;
        };
        let is_one = interrupted.iter().all(|cpu| *cpu == interrupted[0]);
        if !is_one || cpus.len() < 2 {
            continue;
        }
        let near = local_cpus(facts, device, &cpus);
        let finding = found.add(
            Severity::Wrong,
            format!(
                "all {} receive queues of {} interrupt CPU {}",
                device.irqs.len(),
                device.name,
                interrupted[0]
            ),
            "One CPU does all receive work of the device, and limits its rate.",
        );
        finding.subject(&device.name);
        for (irq, cpu) in device.irqs.iter().zip(near.iter().cycle()) {
            finding.set(Change::new(Target::Interrupt { number: irq.number }, cpu));
        }
        if facts.irqbalance.is_some() {
            finding.run("irqbalance runs and may move them again: see irqbalance-moves");
        }
    }
}

/// The CPUs of a device's NUMA node, or all.
fn local_cpus(facts: &Facts, device: &Device, cpus: &[usize]) -> Vec<usize> {
    let is_near = |cpu: &&usize| device.numa.is_some() && facts.cpu.nodes.get(cpu) == device.numa.as_ref();
    let near: Vec<usize> = cpus.iter().filter(is_near).copied().collect();
    if near.is_empty() { cpus.to_vec() } else { near }
}

fn interrupts_far(facts: &Facts, found: &mut FindingSink<'_>) {
    for device in rx_devices(facts).filter(|device| device.numa.is_some()) {
        let node_of = |cpu: &usize| facts.cpu.nodes.get(cpu).copied();
        let is_far = |cpu: &usize| node_of(cpu).is_some() && node_of(cpu) != device.numa;
        let far: Vec<_> =
            device.irqs.iter().filter(|irq| irq.effective.first().is_some_and(is_far)).collect();
        let near = local_cpus(facts, device, &usable_cpus(facts));
        // The node has no usable CPU.
        if far.is_empty() || near.iter().any(is_far) {
            continue;
        }
        let finding = found.add(
            Severity::Wrong,
            format!(
                "{} of {} receive queues of {} interrupt CPUs of another NUMA node than its own",
                far.len(),
                device.irqs.len(),
                device.name
            ),
            "Each frame and each ring descriptor crosses nodes.",
        );
        finding.subject(&device.name);
        for (irq, cpu) in far.iter().zip(near.iter().cycle()) {
            finding.set(Change::new(Target::Interrupt { number: irq.number }, cpu));
        }
    }
}

fn gro_off(facts: &Facts, found: &mut FindingSink<'_>) {
    for device in rx_devices(facts).filter(|device| device.gro == Some(false)) {
        let is_veth = device.kind.as_deref() == Some("veth");
        let why = if is_veth {
            "A veth device without GRO runs no NAPI: it accepts no frames from XDP, and GRO does not merge its frames."
        } else {
            "Each frame passes the stack alone, and sockets with UDP GRO get one datagram per message."
        };
        let severity = if is_veth { Severity::Note } else { Severity::Wrong };
        let target = Target::Feature { device: device.name.clone(), name: "rx-gro".into() };
        found
            .add(severity, format!("generic receive offload of {} is off", device.name), why)
            .subject(&device.name)
            .set(Change::new(target, "on"));
    }
}

fn xdp_generic(facts: &Facts, found: &mut FindingSink<'_>) {
    for device in facts.devices.iter().filter(|device| device.xdp_attached.as_deref() == Some("generic")) {
        match device.xdp_features {
            Some(features) if features & XDP_BASIC != 0 => {
                found
                    .add(
                        Severity::Wrong,
                        format!("an XDP program is attached to {} in generic mode, though the driver supports native mode", device.name),
                        "In generic mode the kernel copies each frame into an skb first, which costs most of what XDP saves.",
                    )
                    .subject(&device.name)
                    .run(format!("attach it in native mode (without --xdp-generic); to detach it: ip link set dev {} xdpgeneric off", device.name));
            }
            Some(_) => {}
            None => found.unknown(format!(
                "the kernel does not report whether the driver of {} runs XDP programs (needs Linux 6.3)",
                device.name
            )),
        }
    }
}

fn one_queue(facts: &Facts, found: &mut FindingSink<'_>) {
    let cpus = usable_cpus(facts);
    if cpus.len() < 2 {
        return;
    }
    let dropped = facts.losses.softnet.iter().any(|row| row.dropped > 0);
    for device in rx_devices(facts) {
        let max = device.channels.map_or(1, |channels| channels.combined_max.max(channels.rx_max));
        if device.rx_queues != Some(1) || max > 1 {
            continue;
        }
        let Some(rps) = &device.rps else {
            let why = facts.gaps.get("sysfs").map_or("/sys does not show its queues", String::as_str);
            found.unknown(format!("cannot see if RPS spreads the frames of {}: {why}", device.name));
            continue;
        };
        if rps.iter().all(Vec::is_empty) {
            // Spreading has a cost. Its absence is wrong only if one CPU was not enough.
            let severity = if dropped { Severity::Wrong } else { Severity::Note };
            let file = "queues/rx-0/rps_cpus".into();
            let target = Target::DeviceFile { device: device.name.clone(), file };
            found
                .add(
                    severity,
                    format!("{} has one receive queue, and RPS is off", device.name),
                    format!("One CPU does all receive work up to the sockets. RPS shares it with {} more, and costs an interrupt between CPUs.", cpus.len() - 1),
                )
                .subject(&device.name)
                .set(Change::new(target, format_cpu_mask(&cpus)));
        }
    }
}

fn rfs_half_set(facts: &Facts, found: &mut FindingSink<'_>) {
    let Some(entries) = facts.sysctl("net.core.rps_sock_flow_entries") else {
        return found
            .unknown("net.core.rps_sock_flow_entries is visible only in the initial network namespace");
    };
    let counts = || rx_devices(facts).filter_map(|device| Some((device, device.rfs.as_ref()?)));
    let is_on = |counts: &[u64]| counts.iter().any(|&count| count > 0);
    if entries == 0 {
        for (device, _) in counts().filter(|(_, counts)| is_on(counts)) {
            found
                .add(
                    Severity::Wrong,
                    format!(
                        "{} has tables for receive flow steering, but net.core.rps_sock_flow_entries is 0",
                        device.name
                    ),
                    "Without the global flow table, the kernel steers nothing.",
                )
                .subject(&device.name)
                .set(Change::sysctl("net.core.rps_sock_flow_entries", 32768));
        }
    } else if counts().next().is_some() && !counts().any(|(_, counts)| is_on(counts)) {
        let finding = found.add(
            Severity::Wrong,
            format!("net.core.rps_sock_flow_entries is {entries}, but no receive queue has a flow table"),
            "Each datagram updates the global flow table, but the kernel steers nothing.",
        );
        for (device, counts) in counts() {
            for queue in 0..counts.len() {
                let share = (entries / counts.len() as u64).max(1).next_power_of_two();
                let file = format!("queues/rx-{queue}/rps_flow_cnt");
                finding.set(Change::new(Target::DeviceFile { device: device.name.clone(), file }, share));
            }
        }
    }
}

fn irqbalance_moves(facts: &Facts, found: &mut FindingSink<'_>) {
    let Some(pid) = facts.irqbalance else { return };
    for device in rx_devices(facts).filter(|device| device.irqs.len() > 1) {
        let irqs: Vec<usize> = device.irqs.iter().map(|irq| irq.number as usize).collect();
        found
            .add(
                Severity::Note,
                format!("irqbalance (process {pid}) moves the interrupts of {}", device.name),
                "A pinned lane runs on its queue's CPU. When irqbalance moves the interrupt, each frame crosses CPUs.",
            )
            .subject(&device.name)
            .run(format!("if lanes are pinned: systemctl stop irqbalance, or --banirq for each of {}", format_cpus(&irqs)));
    }
}

fn no_native_xdp(facts: &Facts, found: &mut FindingSink<'_>) {
    for device in rx_devices(facts) {
        match device.xdp_features {
            Some(features) if features & (XDP_BASIC | XDP_REDIRECT) == XDP_BASIC | XDP_REDIRECT => {}
            Some(_) => {
                found
                    .add(
                        Severity::Note,
                        format!("the driver of {} runs no XDP programs that redirect", device.name),
                        "Engine xdp needs them. In generic mode (--xdp-generic) it gains less.",
                    )
                    .subject(&device.name)
                    .run("nothing on this device: engine mmsg is the fastest here (a virtio device runs them if the host gives it two queues per CPU and turns off LRO)");
            }
            None => found.unknown(format!(
                "the kernel does not report the XDP features of the driver of {} (needs Linux 6.3)",
                device.name
            )),
        }
    }
}

fn no_zero_copy(facts: &Facts, found: &mut FindingSink<'_>) {
    // Between veth devices it saves nothing.
    for device in rx_devices(facts).filter(|device| device.kind.is_none()) {
        let Some(features) = device.xdp_features else {
            found.unknown(format!(
                "the kernel does not report the AF_XDP features of the driver of {} (needs Linux 6.3)",
                device.name
            ));
            continue;
        };
        if features & XDP_BASIC != 0 && features & XDP_ZERO_COPY == 0 {
            found
                .add(
                    Severity::Note,
                    format!("the driver of {} copies each frame for AF_XDP", device.name),
                    "Engine xdp works, but costs a copy per frame.",
                )
                .subject(&device.name)
                .run("nothing on this device");
        }
    }
}

fn coalescing_long(facts: &Facts, found: &mut FindingSink<'_>) {
    for device in rx_devices(facts) {
        let Some(coalescing) = device.coalescing else { continue };
        if let (Some(usecs @ 200..), false) = (coalescing.rx_usecs, coalescing.adaptive == Some(true)) {
            found
                .add(
                    Severity::Note,
                    format!("{} delays interrupts by {usecs} µs", device.name),
                    "A datagram that arrives alone waits that long, and so does its reply.",
                )
                .subject(&device.name)
                .run(format!("ethtool -C {} adaptive-rx on, or rx-usecs 50", device.name));
        }
    }
}

fn coalescing_off(facts: &Facts, found: &mut FindingSink<'_>) {
    for device in rx_devices(facts) {
        let Some(coalescing) = device.coalescing else { continue };
        let is_alone = coalescing.rx_frames.is_none_or(|frames| frames <= 1);
        // A device that reports neither has no such settings. For a virtio device, the host
        // decides.
        if device.driver.as_deref() == Some("virtio_net") {
            continue;
        }
        if coalescing.rx_usecs == Some(0) && is_alone && coalescing.adaptive == Some(false) {
            found
                .add(
                    Severity::Note,
                    format!("{} interrupts for each frame", device.name),
                    "This gives the lowest latency at low rates. Under load, interrupts take the time that datagrams need.",
                )
                .subject(&device.name)
                .run(format!("ethtool -C {} adaptive-rx on, or rx-usecs 20", device.name));
        }
    }
}

fn threaded_napi(facts: &Facts, found: &mut FindingSink<'_>) {
    for device in facts.devices.iter().filter(|device| device.threaded == Some(true)) {
        found
            .add(
                Severity::Note,
                format!("receive work of {} runs in kernel threads (threaded NAPI)", device.name),
                "Receive work then competes with other threads: it cannot starve them, but on a busy CPU it is late.",
            )
            .subject(&device.name)
            .run(format!("pin the threads napi/{}-… (taskset) and set their priority (chrt)", device.name));
    }
}
