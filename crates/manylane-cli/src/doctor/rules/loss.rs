//! Losses, by place.

use super::super::change::{Change, Target};
use super::super::facts::{Facts, Socket, Udp};
use super::super::finding::Severity;
use super::rule::{FindingSink, Rule, format_cpus, pluralize};

const MIB: u64 = 1 << 20;

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "socket-drops",
        cost: 100,
        meaning: "A socket lost datagrams: its receive buffer was full.",
        remedy: "A larger receive buffer for short pauses (`net.core.rmem_default`, or `net.core.rmem_max` and the program's own setting). If the program cannot keep up, more lanes: `manylane run`.",
        check: socket_drops,
    },
    Rule {
        id: "receive-buffer-full",
        cost: 95,
        meaning: "Receive buffers overflowed at sockets that are closed now, or that this user cannot see.",
        remedy: "As for `socket-drops`. `manylane doctor --duration 10s` during the loss names the socket.",
        check: receive_buffer_full,
    },
    Rule {
        id: "udp-memory-full",
        cost: 94,
        meaning: "Datagrams were lost because all UDP sockets together reached their memory limit.",
        remedy: "`sysctl -w net.ipv4.udp_mem=\"MIN PRESSURE MAX\"` (pages), or smaller buffers for fewer sockets.",
        check: udp_memory_full,
    },
    Rule {
        id: "device-ring-full",
        cost: 92,
        meaning: "The device lost frames: a receive ring had no free descriptor, because the CPU was late.",
        remedy: "Longer rings (`ethtool -G`), more queues (`ethtool -L`), interrupts on different CPUs.",
        check: device_ring_full,
    },
    Rule {
        id: "backlog-full",
        cost: 90,
        meaning: "A CPU's backlog was full. Frames from RPS, loopback and devices without NAPI wait there.",
        remedy: "`net.core.netdev_max_backlog`; RPS to more CPUs.",
        check: backlog_full,
    },
    Rule {
        id: "checksum-errors",
        cost: 60,
        meaning: "Datagrams with a wrong checksum were dropped.",
        remedy: "Find the device, cable or sender that corrupts them: `ethtool -S DEVICE`.",
        check: checksum_errors,
    },
    Rule {
        id: "frames-broken",
        cost: 59,
        meaning: "The device received frames with a wrong check sequence: a cable, transceiver or port is faulty.",
        remedy: "Replace the cable or the transceiver; `ethtool -S DEVICE` has more counters.",
        check: frames_broken,
    },
    Rule {
        id: "softirq-squeezed",
        cost: 50,
        meaning: "A CPU's receive work ended with frames left, because its budget or time was used up. They wait, and rings fill.",
        remedy: "`net.core.netdev_budget`, `net.core.netdev_budget_usecs`; spread the work over more CPUs.",
        check: softirq_squeezed,
    },
    Rule {
        id: "refused-at-sockets",
        cost: 21,
        meaning: "Sockets dropped datagrams for another reason than room, memory or checksum: a socket filter (`SO_ATTACH_FILTER`, `SO_ATTACH_BPF`) or an IPsec policy.",
        remedy: "Nothing, if the program intends it. Otherwise `perf trace -e skb:kfree_skb` shows reason and place of each drop.",
        check: refused_at_sockets,
    },
    Rule {
        id: "device-dropped",
        cost: 20,
        meaning: "Frames were dropped behind the device. This includes frames that no protocol handles (unknown protocols, other VLANs), so it need not be a loss.",
        remedy: "`dropwatch` or `perf trace -e skb:kfree_skb` shows the reason of each drop.",
        check: device_dropped,
    },
];

fn socket_drops(facts: &Facts, found: &mut FindingSink<'_>) {
    if let Some(why) = facts.gaps.get("sockets") {
        return found.unknown(why);
    }
    for socket in facts.sockets.iter().filter(|socket| socket.drops > 0) {
        let owners: Vec<_> = facts.owners(socket.inode).collect();
        let who = match owners.as_slice() {
            [] => "a process that this user cannot see".into(),
            [one] => format!("process {} ({})", one.pid, one.name),
            [one, ..] => format!("{} processes, including {} ({})", owners.len(), one.pid, one.name),
        };
        let since =
            if facts.watched.is_some() { facts.describe_period() } else { "since it was opened".into() };
        let lost = pluralize(socket.drops, "datagram");
        let buffer = socket.buffer.map(|size| format!(" (receive buffer: {size} bytes)")).unwrap_or_default();
        let finding = found.add(
            Severity::Loss,
            format!("UDP socket {} of {who} lost {lost} {since}{buffer}", socket.local),
            "Its receive buffer was full: the program received too late or too slowly. The kernel also counts datagrams here that have a wrong checksum, or that the socket's filter refuses.",
        );
        finding.subject(socket.local.to_string()).lost(socket.drops);
        if let Some(change) = buffer_change(facts, socket) {
            finding
                .set(change)
                .run("then restart the program: a socket gets its buffer size when it is opened");
        } else {
            finding
                .run("make the program set a larger receive buffer (SO_RCVBUF), if it has a setting for it");
        }
        if owners.iter().any(|owner| owner.beyond.is_none() && !owner.on_lanes) {
            finding.run("give each receiving thread a lane: start it with 'manylane run -- PROGRAM'");
        }
    }
}

/// The setting of the machine that limits the socket's buffer, if it is not large.
fn buffer_change(facts: &Facts, socket: &Socket) -> Option<Change> {
    let (max, default) = (facts.sysctl("net.core.rmem_max")?, facts.sysctl("net.core.rmem_default")?);
    let buffer = socket.buffer?;
    // The kernel doubles the size that a program requests, up to twice the maximum.
    if buffer == default && default < 4 * MIB {
        Some(Change::sysctl("net.core.rmem_default", 4 * MIB))
    } else if buffer == max * 2 && max < 16 * MIB {
        Some(Change::sysctl("net.core.rmem_max", 16 * MIB))
    } else {
        None
    }
}

/// The sum of a UDP counter over IPv4 and IPv6. None if it cannot be read, which `found` records.
fn udp_losses(facts: &Facts, found: &mut FindingSink<'_>, counter: fn(Udp) -> u64) -> Option<u64> {
    let Some(udp4) = facts.losses.udp4 else {
        found.unknown("the counters of UDP cannot be read");
        return None;
    };
    Some(counter(udp4) + facts.losses.udp6.map_or(0, counter))
}

fn receive_buffer_full(facts: &Facts, found: &mut FindingSink<'_>) {
    let Some(all) = udp_losses(facts, found, |udp| udp.receive_buffer) else { return };
    // For one socket, the answer is in its own finding.
    if facts.asked {
        return;
    }
    let named: u64 = facts.sockets.iter().map(|socket| socket.drops).sum();
    let rest = all.saturating_sub(named);
    if rest == 0 {
        return;
    }
    let also = if named > 0 {
        format!(", in addition to {named} at sockets that are open now")
    } else {
        String::new()
    };
    let finding = found.add(
        Severity::Loss,
        format!("{} lost because a receive buffer was full, {}{also}", pluralize(rest, "datagram"), facts.describe_period()),
        "The sockets are closed now, or this user cannot see them. RcvbufErrors of this network namespace counts these losses.",
    );
    finding.lost(rest).raise(facts, "net.core.rmem_default", 4 * MIB);
    finding.run("to find the socket, during the loss: manylane doctor --duration 10s");
}

fn udp_memory_full(facts: &Facts, found: &mut FindingSink<'_>) {
    let Some(lost) = udp_losses(facts, found, |udp| udp.memory) else { return };
    if lost > 0 {
        found
            .add(
                Severity::Loss,
                format!("{} lost {} because UDP was out of memory", pluralize(lost, "datagram"), facts.describe_period()),
                "All UDP sockets together had reached the limit of net.ipv4.udp_mem.",
            )
            .lost(lost)
            .run("sysctl net.ipv4.udp_mem, then sysctl -w net.ipv4.udp_mem=\"MIN PRESSURE MAX\" with larger values, in pages");
    }
}

fn device_ring_full(facts: &Facts, found: &mut FindingSink<'_>) {
    if let Some(why) = facts.gaps.get("devices") {
        return found.unknown(why);
    }
    for device in facts.devices.iter().filter(|device| device.counters.rx_overruns() > 0) {
        let lost = device.counters.rx_overruns();
        let finding = found.add(
            Severity::Loss,
            format!("{} lost {} {}: a receive ring was full", device.name, pluralize(lost, "frame"), facts.describe_period()),
            "The CPU of a queue did not refill its ring in time. The device drops frames that arrive then, before the kernel sees them.",
        );
        finding.subject(&device.name).lost(lost);
        match device.ring {
            Some(ring) if ring.rx < ring.rx_max => {
                let target = Target::ReceiveRing { device: device.name.clone() };
                finding.set(Change::new(target, ring.rx_max));
            }
            _ => {
                finding.run("its rings have their maximum length, or the driver does not report it: spread its queues over more CPUs");
            }
        }
    }
}

fn backlog_full(facts: &Facts, found: &mut FindingSink<'_>) {
    if let Some(why) = facts.gaps.get("softnet") {
        return found.unknown(why);
    }
    let dropped: u64 = facts.losses.softnet.iter().map(|row| row.dropped).sum();
    if dropped > 0 {
        let cpus: Vec<usize> =
            facts.losses.softnet.iter().filter(|row| row.dropped > 0).map(|row| row.cpu).collect();
        found
            .add(
                Severity::Loss,
                format!(
                    "{} lost {} because a CPU's backlog was full (CPUs {}; the whole machine)",
                    pluralize(dropped, "frame"),
                    facts.describe_period(),
                    format_cpus(&cpus)
                ),
                "Frames from RPS and loopback wait in a CPU's backlog, whose length is limited.",
            )
            .lost(dropped)
            .raise(facts, "net.core.netdev_max_backlog", 16384);
    }
}

fn checksum_errors(facts: &Facts, found: &mut FindingSink<'_>) {
    let Some(lost) = udp_losses(facts, found, |udp| udp.checksum) else { return };
    if lost > 0 {
        found
            .add(
                Severity::Loss,
                format!("{} with a wrong checksum {}", pluralize(lost, "datagram"), facts.describe_period()),
                "A device or cable on the path corrupts datagrams, or the sender computes the checksum wrongly.",
            )
            .lost(lost)
            .run("for link errors, ethtool -S DEVICE; to find the sender, manylane capture or tcpdump -v");
    }
}

fn frames_broken(facts: &Facts, found: &mut FindingSink<'_>) {
    if let Some(why) = facts.gaps.get("devices") {
        return found.unknown(why);
    }
    for device in facts.devices.iter().filter(|device| device.counters.rx_crc > 0) {
        let lost = device.counters.rx_crc;
        found
            .add(
                Severity::Loss,
                format!(
                    "{} received {} with a wrong check sequence {}",
                    device.name,
                    pluralize(lost, "frame"),
                    facts.describe_period()
                ),
                "Frames are corrupted on the wire: a cable, transceiver or port is faulty.",
            )
            .subject(&device.name)
            .lost(lost)
            .run(format!("ethtool -S {}; replace the cable or the transceiver", device.name));
    }
}

fn softirq_squeezed(facts: &Facts, found: &mut FindingSink<'_>) {
    if let Some(why) = facts.gaps.get("softnet") {
        return found.unknown(why);
    }
    let rows = &facts.losses.softnet;
    let squeezed: u64 = rows.iter().map(|row| row.squeezed).sum();
    if squeezed == 0 {
        return;
    }
    let processed: u64 = rows.iter().map(|row| row.processed).sum();
    // A poll takes up to 64 frames. An occasional early end costs nothing.
    let is_often = squeezed.saturating_mul(10_000) >= processed;
    let severity = if is_often { Severity::Wrong } else { Severity::Note };
    found
        .add(
            severity,
            format!(
                "receive work ended early {squeezed} times while it processed {}, {} (the whole machine)",
                pluralize(processed, "frame"),
                facts.describe_period()
            ),
            "A round of receive work is limited in frames (net.core.netdev_budget) and in time (netdev_budget_usecs). The remaining frames wait, rings fill, and latency grows.",
        )
        .raise(facts, "net.core.netdev_budget", 1200)
        .raise(facts, "net.core.netdev_budget_usecs", 8000);
}

fn refused_at_sockets(facts: &Facts, found: &mut FindingSink<'_>) {
    // The kernel counts each of the others as an error, too.
    let rest = |udp: Udp| udp.in_errors.saturating_sub(udp.receive_buffer + udp.checksum + udp.memory);
    let Some(refused) = udp_losses(facts, found, rest) else { return };
    if refused > 0 && !facts.asked {
        found
            .add(
                Severity::Note,
                format!(
                    "{} refused at sockets {}, though there was room",
                    pluralize(refused, "datagram"),
                    facts.describe_period()
                ),
                "A program's socket filter or an IPsec policy drops them. InErrors of UDP counts them.",
            )
            .lost(refused)
            .run("for the reason of each drop (SOCKET_FILTER, XFRM_POLICY): perf trace -e skb:kfree_skb");
    }
}

fn device_dropped(facts: &Facts, found: &mut FindingSink<'_>) {
    if let Some(why) = facts.gaps.get("devices") {
        return found.unknown(why);
    }
    for device in facts.devices.iter().filter(|device| device.counters.rx_dropped > 0) {
        let dropped = device.counters.rx_dropped;
        found
            .add(
                Severity::Note,
                format!("{} dropped {} behind the device {}", device.name, pluralize(dropped, "frame"), facts.describe_period()),
                "This counts frames of protocols and VLANs that this machine does not use, but also frames that were lost.",
            )
            .subject(&device.name)
            .run("for the reason of each drop: perf trace -e skb:kfree_skb, or dropwatch");
    }
}
