//! Settings of the kernel, and features that this process may use.

use super::super::change::Change;
use super::super::facts::{Facts, Privileges};
use super::super::finding::Severity;
use super::rule::{FindingSink, Rule};

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "jit-off",
        cost: 70,
        meaning: "eBPF programs are interpreted: steering and XDP cost several times as much.",
        remedy: "`sysctl -w net.core.bpf_jit_enable=1`.",
        check: jit_off,
    },
    Rule {
        id: "rmem-max-small",
        cost: 58,
        meaning: "Receive buffers are limited to a small size: a pause of some milliseconds loses datagrams.",
        remedy: "`sysctl -w net.core.rmem_max=16777216`.",
        check: rmem_max_small,
    },
    Rule {
        id: "ebpf-refused",
        cost: 22,
        meaning: "Steering by eBPF is not available. Classic BPF supports `flow`, `cpu` and `random`; other policies are refused.",
        remedy: "Run as root, or with `CAP_BPF` (and `CAP_NET_ADMIN` for engine `xdp`).",
        check: ebpf_refused,
    },
    Rule {
        id: "busy-poll-for-all",
        cost: 18,
        meaning: "Every `poll`, `select` and `epoll_wait`, or every read of a socket, busy-polls first.",
        remedy: "`sysctl -w net.core.busy_poll=0 net.core.busy_read=0`; use `--wait busy-poll` where it pays.",
        check: busy_poll_for_all,
    },
    Rule {
        id: "memlock-small",
        cost: 9,
        meaning: "The limit of locked memory is low. It includes the frames of engine `xdp`, and eBPF maps before Linux 5.11.",
        remedy: "`ulimit -l unlimited`, `LimitMEMLOCK=infinity` of systemd, or `CAP_IPC_LOCK`.",
        check: memlock_small,
    },
    Rule {
        id: "io-uring-disabled",
        cost: 8,
        meaning: "io_uring is disabled by sysctl: engine `uring` falls back to `mmsg`.",
        remedy: "`sysctl -w kernel.io_uring_disabled=0`, if the reason for it does not apply here.",
        check: io_uring_disabled,
    },
    Rule {
        id: "xdp-needs-privileges",
        cost: 7,
        meaning: "This user may not use engine `xdp`.",
        remedy: "Run as root, or with `CAP_NET_ADMIN`, `CAP_NET_RAW` and `CAP_BPF`. `manylane run --engine xdp` as root starts servers of ordinary users.",
        check: xdp_needs_privileges,
    },
    Rule {
        id: "feature-missing",
        cost: 5,
        meaning: "The kernel lacks a feature that Manylane uses, or does not let this process use it.",
        remedy: "A newer kernel: see KERNELS.md, also for the fallbacks.",
        check: feature_missing,
    },
];

fn jit_off(facts: &Facts, found: &mut FindingSink<'_>) {
    match facts.sysctl("net.core.bpf_jit_enable") {
        Some(0) => {
            found
                .add(
                    Severity::Wrong,
                    "eBPF programs are interpreted (net.core.bpf_jit_enable is 0)",
                    "Steering runs for each datagram, and XDP for each frame. Interpreted, they cost several times as much.",
                )
                .set(Change::sysctl("net.core.bpf_jit_enable", 1));
        }
        Some(_) => {}
        None => found.unknown(
            "net.core.bpf_jit_enable is visible only in the initial network namespace, or not to this user",
        ),
    }
}

fn rmem_max_small(facts: &Facts, found: &mut FindingSink<'_>) {
    const RMEM_MAX_BYTES_RECOMMENDED: u64 = 4 << 20;
    let Some(max) = facts.sysctl("net.core.rmem_max") else {
        return found.unknown("net.core.rmem_max is not visible in this network namespace (older kernels)");
    };
    if max >= RMEM_MAX_BYTES_RECOMMENDED {
        return;
    }
    let lost = [facts.losses.udp4, facts.losses.udp6].into_iter().flatten().any(|udp| udp.receive_buffer > 0);
    let severity = if lost { Severity::Wrong } else { Severity::Note };
    found
        .add(
            severity,
            format!("a program gets a receive buffer of at most {} bytes (net.core.rmem_max: {max}, doubled)", max * 2),
            "Each queued datagram takes at least 768 bytes of it. If the program pauses, datagrams are lost once it is full.",
        )
        .raise(facts, "net.core.rmem_max", 16 << 20);
}

fn ebpf_refused(facts: &Facts, found: &mut FindingSink<'_>) {
    let Some(why) = missing_reason(facts, "ebpf-steering") else { return };
    let finding = found.add(
        Severity::Note,
        format!("steering by eBPF is not available: {why}"),
        "Classic BPF and the kernel's own hash replace it. Steering round-robin, least-loaded and key need eBPF.",
    );
    match (facts.privileges.has(Privileges::BPF), facts.sysctl("kernel.unprivileged_bpf_disabled")) {
        (Some(false), _) if facts.privileges.has(Privileges::SYS_ADMIN) != Some(true) => {
            finding.run("run as root, or with CAP_BPF (systemd: AmbientCapabilities=CAP_BPF CAP_NET_ADMIN)");
        }
        _ => {
            finding.run("privileges suffice: see KERNELS.md for the kernel that it needs");
        }
    }
}

fn busy_poll_for_all(facts: &Facts, found: &mut FindingSink<'_>) {
    let names = ["net.core.busy_poll", "net.core.busy_read"];
    if names.iter().any(|name| facts.sysctl(name).is_none()) {
        return found
            .unknown("net.core.busy_poll and busy_read are visible only in the initial network namespace");
    }
    for name in names {
        match facts.sysctl(name) {
            None | Some(0) => {}
            Some(usecs) => {
                let who = if name.ends_with("poll") {
                    "each poll, select or epoll_wait"
                } else {
                    "each read of a socket"
                };
                found
                    .add(
                        Severity::Note,
                        format!("{who} busy-polls for {usecs} µs first, in all programs ({name})"),
                        "This lowers latency if CPUs are idle. Otherwise it takes CPU time from other threads.",
                    )
                    .subject(name)
                    // It was set on purpose.
                    .run(format!("sysctl -w {name}=0, if it was not meant for all programs"));
            }
        }
    }
}

fn memlock_small(facts: &Facts, found: &mut FindingSink<'_>) {
    let (Some(limit), Some(may_lock)) =
        (facts.privileges.memlock, facts.privileges.has(Privileges::IPC_LOCK))
    else {
        return found.unknown("/proc/self cannot be read");
    };
    if !may_lock && limit < 64 << 20 {
        found
            .add(
                Severity::Note,
                format!("this process may lock {limit} bytes of memory"),
                "Each queue of engine xdp locks its frames: 8 to 16 MiB with the usual sizes.",
            )
            .run("ulimit -l unlimited, LimitMEMLOCK=infinity in systemd, or CAP_IPC_LOCK");
    }
}

fn io_uring_disabled(facts: &Facts, found: &mut FindingSink<'_>) {
    if let Some(how @ 1..) = facts.sysctl("kernel.io_uring_disabled") {
        let whom = if how == 1 { "outside kernel.io_uring_group" } else { "for all users" };
        found
            .add(
                Severity::Note,
                format!("io_uring is disabled {whom} (kernel.io_uring_disabled: {how})"),
                "Engine uring falls back to mmsg, which costs about the same on most machines.",
            )
            // It was set for a reason that `tune` does not know.
            .run("sysctl -w kernel.io_uring_disabled=0, if the reason for it does not apply here");
    }
}

fn xdp_needs_privileges(facts: &Facts, found: &mut FindingSink<'_>) {
    let privileges = &facts.privileges;
    let needed = [
        ("CAP_NET_ADMIN", Privileges::NET_ADMIN),
        ("CAP_NET_RAW", Privileges::NET_RAW),
        ("CAP_BPF", Privileges::BPF),
    ];
    if privileges.capabilities.is_none() {
        return found.unknown("/proc/self/status cannot be read");
    }
    let is_root = privileges.has(Privileges::SYS_ADMIN) == Some(true);
    let lacking: Vec<&str> = needed
        .iter()
        .filter(|(name, bit)| privileges.has(*bit) == Some(false) && !(*name == "CAP_BPF" && is_root))
        .map(|(name, _)| *name)
        .collect();
    if !lacking.is_empty() {
        found
            .add(
                Severity::Note,
                format!("this user lacks {}", lacking.join(", ")),
                "Engine xdp needs them to attach a program to devices and to receive their frames.",
            )
            .run("run as root (a program under sudo manylane run --engine xdp may drop to its own user)");
    }
}

fn feature_missing(facts: &Facts, found: &mut FindingSink<'_>) {
    // Steering by eBPF has a rule of its own.
    for feature in facts.features.iter().filter(|feature| feature.name != "ebpf-steering") {
        let Some(why) = &feature.missing else { continue };
        // Switched off on purpose; another rule covers that.
        if feature.name == "io-uring" && facts.sysctl("kernel.io_uring_disabled").is_some_and(|how| how > 0) {
            continue;
        }
        found
            .add(
                Severity::Note,
                format!("{} is not available: {why}", feature.name),
                "Manylane works without it, but gains less.",
            )
            .subject(&feature.name)
            .run("see KERNELS.md for the first kernel that has it, and for the fallback");
    }
}

fn missing_reason<'a>(facts: &'a Facts, name: &str) -> Option<&'a String> {
    facts.features.iter().find(|feature| feature.name == name)?.missing.as_ref()
}
