//! Settings of the kernel, CPUs, and privileges of this process.

use super::super::facts::{Facts, Idle};
use super::files::FileTree;

/// Settings that rules check.
const SYSCTLS: [&str; 15] = [
    "net.core.rmem_max",
    "net.core.rmem_default",
    "net.core.netdev_max_backlog",
    "net.core.netdev_budget",
    "net.core.netdev_budget_usecs",
    "net.core.dev_weight",
    "net.core.busy_poll",
    "net.core.busy_read",
    "net.core.rps_sock_flow_entries",
    "net.core.bpf_jit_enable",
    "net.ipv4.udp_rmem_min",
    "kernel.unprivileged_bpf_disabled",
    "kernel.io_uring_disabled",
    "kernel.numa_balancing",
    "kernel.sched_autogroup_enabled",
];

pub(crate) fn collect(files: &FileTree, facts: &mut Facts) {
    facts.kernel = files.text("proc/sys/kernel/osrelease").unwrap_or_default();
    facts.uptime = files.text("proc/uptime").and_then(|text| text.split_whitespace().next()?.parse().ok());
    for name in SYSCTLS {
        let path = format!("proc/sys/{}", name.replace('.', "/"));
        facts.sysctls.extend(files.number(&path).map(|value| (name.into(), value)));
    }
    privileges(files, facts);
    cpu(files, facts);
    irqbalance(files, facts);
}

fn privileges(files: &FileTree, facts: &mut Facts) {
    let status = files.text("proc/self/status").unwrap_or_default();
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    // Real, effective, saved, of the file system.
    facts.privileges.uid = field("Uid:").and_then(|ids| ids.split_whitespace().nth(1)?.parse().ok());
    facts.privileges.capabilities = field("CapEff:").and_then(|bits| u64::from_str_radix(bits, 16).ok());
    let limits = files.text("proc/self/limits").unwrap_or_default();
    let soft = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"));
    facts.privileges.memlock = soft.and_then(|line| match line.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        bytes => bytes.parse().ok(),
    });
}

fn cpu(files: &FileTree, facts: &mut Facts) {
    const SYSFS_CPU: &str = "sys/devices/system/cpu";
    let cpu = &mut facts.cpu;
    cpu.online = files.cpu_list(&format!("{SYSFS_CPU}/online")).unwrap_or_default();
    cpu.isolated = files.cpu_list(&format!("{SYSFS_CPU}/isolated")).unwrap_or_default();
    cpu.idle_governor = files.text(&format!("{SYSFS_CPU}/cpuidle/current_governor"));
    cpu.halt_poll_ns = files.number("sys/module/haltpoll/parameters/guest_halt_poll_ns");
    for &number in &cpu.online {
        let siblings = files.cpu_list(&format!("{SYSFS_CPU}/cpu{number}/topology/thread_siblings_list"));
        if let Some(siblings) = siblings
            && siblings.len() > 1
            && !cpu.siblings.contains(&siblings)
        {
            cpu.siblings.push(siblings);
        }
        let governor = files.text(&format!("{SYSFS_CPU}/cpu{number}/cpufreq/scaling_governor"));
        cpu.governors.extend(governor.map(|governor| (number, governor)));
        cpu.idle.extend(idle(files, &format!("{SYSFS_CPU}/cpu{number}")).map(|idle| (number, idle)));
    }
    for node in files.names("sys/devices/system/node") {
        let Some(number) = node.strip_prefix("node").and_then(|number| number.parse().ok()) else { continue };
        let members = files.cpu_list(&format!("sys/devices/system/node/{node}/cpulist")).unwrap_or_default();
        cpu.nodes.extend(members.into_iter().map(|cpu| (cpu, number)));
    }
}

/// The idle states of the CPU with this folder.
fn idle(files: &FileTree, folder: &str) -> Option<Idle> {
    let limit = files.text(&format!("{folder}/power/pm_qos_resume_latency_us"))?;
    let states = files.names(&format!("{folder}/cpuidle"));
    let state = |name: &String| {
        let state = format!("{folder}/cpuidle/{name}");
        let is_off = files.number(&format!("{state}/disable")).is_some_and(|off| off != 0);
        files.number(&format!("{state}/latency")).filter(|_| !is_off)
    };
    let latencies: Vec<u64> = states.iter().filter_map(state).collect();
    (!latencies.is_empty()).then_some(Idle { latencies, limit })
}

fn irqbalance(files: &FileTree, facts: &mut Facts) {
    let pids = files.names("proc").into_iter().filter_map(|name| name.parse::<u32>().ok());
    facts.irqbalance =
        pids.into_iter().find(|pid| files.text(&format!("proc/{pid}/comm")).as_deref() == Some("irqbalance"));
}
