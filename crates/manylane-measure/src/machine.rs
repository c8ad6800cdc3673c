//! The machine that a result was measured on, as far as a reader needs it to judge the figures.

use std::fs;

use manylane_sys::cpu;
use serde::{Deserialize, Serialize};

/// CPUs, kernel and memory of the machine that ran a measurement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Number of online CPUs.
    pub cpus: usize,
    /// Model name of the CPU, or `unknown`.
    pub model: String,
    /// Release of the running kernel, with its architecture.
    pub kernel: String,
    /// Memory in bytes; 0 when `/proc/meminfo` cannot be read.
    pub memory_bytes: u64,
    /// True if the CPU reports a hypervisor: timings are noisier there.
    pub virtual_machine: bool,
    /// Mitigations of CPU flaws that cost time at each system call, as the kernel words them.
    pub mitigations: Vec<String>,
    /// `net.core.rmem_max`: the largest receive buffer that needs no privilege.
    pub rmem_max: u64,
    /// The cpuidle governor, and in a virtual machine the time that CPUs poll before they
    /// halt, which determine the latency of wake-ups. Empty if the kernel does not report it.
    #[serde(default)]
    pub idle: String,
}

impl Machine {
    /// Reads `/proc` and `/sys`. Values that cannot be read are left at their neutral value,
    /// because a result without the name of the CPU is still a result.
    pub fn read() -> Self {
        let cpuinfo = read_file("/proc/cpuinfo");
        Self {
            cpus: online_cpus().len(),
            model: find_field(&cpuinfo, "model name").unwrap_or_else(|| "unknown".into()),
            kernel: format!("{} {}", read_file("/proc/sys/kernel/osrelease").trim(), std::env::consts::ARCH),
            memory_bytes: find_field(&read_file("/proc/meminfo"), "MemTotal")
                .and_then(|size| size.split_whitespace().next()?.parse::<u64>().ok())
                .unwrap_or(0)
                * 1024,
            virtual_machine: find_field(&cpuinfo, "flags")
                .is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor")),
            mitigations: mitigations(),
            rmem_max: read_file("/proc/sys/net/core/rmem_max").trim().parse().unwrap_or(0),
            idle: idle_policy(
                read_file("/sys/devices/system/cpu/cpuidle/current_governor").trim(),
                read_file("/sys/module/haltpoll/parameters/guest_halt_poll_ns").trim(),
            ),
        }
    }
}

/// The online CPUs, in rising order; never empty.
pub fn online_cpus() -> Vec<usize> {
    let list = cpu::parse_list(&read_file("/sys/devices/system/cpu/online")).unwrap_or_default();
    if list.is_empty() { vec![0] } else { list }
}

/// The CPUs that this process may run on, in rising order; never empty.
pub fn allowed_cpus() -> Vec<usize> {
    let status = read_file("/proc/self/status");
    let list = find_field(&status, "Cpus_allowed_list").and_then(|list| cpu::parse_list(&list));
    list.unwrap_or_else(online_cpus)
}

/// `USER_HZ` is 100 on every architecture of Linux that this project runs on.
const TICK_NS: u64 = 10_000_000;

/// The CPUs in `/proc/stat`: their numbers (none: the sum of all), and the ticks since boot that
/// each spent as user, nice, system, idle, iowait, irq, softirq, steal.
pub fn cpu_ticks(stat: &str) -> impl Iterator<Item = (Option<u32>, [u64; 8])> {
    stat.lines().filter_map(|line| {
        let (name, ticks) = line.split_once(' ')?;
        let number = match name.strip_prefix("cpu")? {
            "" => None,
            number => Some(number.parse().ok()?),
        };
        // Two more are included in the first ones.
        let ticks: Vec<u64> =
            ticks.split_whitespace().take(8).map_while(|ticks| ticks.parse().ok()).collect();
        Some((number, ticks.try_into().ok()?))
    })
}

/// Nanoseconds that the CPUs together spent idle since boot.
///
/// The kernel counts idle time by its clock and not by sampling at the tick, so that the wall
/// clock minus idle time is the more exact busy time.
pub fn idle_ns() -> u64 {
    let stat = read_file("/proc/stat");
    let all = cpu_ticks(&stat).find(|(number, _)| number.is_none());
    // Stolen time is not work of this machine.
    all.map_or(0, |(_, [_, _, _, idle, iowait, _, _, steal])| (idle + iowait + steal) * TICK_NS)
}

/// Steal time of each CPU in nanoseconds, by its number, since boot.
pub fn steal_ns() -> Vec<u64> {
    parse_steal(&read_file("/proc/stat"))
}

fn parse_steal(stat: &str) -> Vec<u64> {
    let mut all = Vec::new();
    for (number, [.., steal]) in cpu_ticks(stat) {
        let Some(number) = number.map(|number| number as usize) else { continue };
        all.resize(all.len().max(number + 1), 0);
        all[number] = steal * TICK_NS;
    }
    all
}

/// A size of a file in the style of `/proc/meminfo`, in KiB; 0 when it cannot be read.
pub fn read_kib(path: &str, name: &str) -> u64 {
    find_field(&read_file(path), name)
        .and_then(|size| size.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}

/// The governor of idle CPUs, with its one setting that matters.
fn idle_policy(governor: &str, halt_poll_ns: &str) -> String {
    match (governor, halt_poll_ns) {
        ("haltpoll", nanos) if !nanos.is_empty() => format!("haltpoll, guest_halt_poll_ns {nanos}"),
        _ => governor.to_owned(),
    }
}

fn mitigations() -> Vec<String> {
    let Ok(folder) = fs::read_dir("/sys/devices/system/cpu/vulnerabilities") else {
        return Vec::new();
    };
    let mut found: Vec<String> = folder
        .flatten()
        .filter_map(|entry| {
            let state = fs::read_to_string(entry.path()).ok()?;
            let state = state.trim().strip_prefix("Mitigation: ")?.to_owned();
            Some(format!("{}: {state}", entry.file_name().to_string_lossy()))
        })
        .collect();
    found.sort();
    found
}

fn read_file(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The value of the first `name: value` line of a file in the style of `/proc/cpuinfo`.
fn find_field(text: &str, name: &str) -> Option<String> {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == name)
        .map(|(_, value)| value.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_idle_policy_includes_the_haltpoll_setting() {
        assert_eq!(idle_policy("haltpoll", "0"), "haltpoll, guest_halt_poll_ns 0");
        // The module exists whichever governor is in force.
        assert_eq!(
            (idle_policy("menu", "200000"), idle_policy("haltpoll", ""), idle_policy("", "")),
            ("menu".into(), "haltpoll".into(), String::new())
        );
    }

    #[test]
    fn this_machine_has_a_kernel_and_cpus() {
        let machine = Machine::read();
        assert!(machine.cpus >= 1);
        assert!(machine.kernel.contains('.'));
        assert!(machine.memory_bytes > 0);
        assert!(!allowed_cpus().is_empty());
    }

    #[test]
    fn fields_are_found_by_name() {
        let text = "SlabInfo: 7 kB\nSlab:      42 kB\nMemTotal: 5 kB\n";
        assert_eq!(find_field(text, "Slab").as_deref(), Some("42 kB"));
        assert_eq!(find_field("", "Slab"), None);
        assert_eq!(read_kib("/proc/meminfo", "MemTotal") * 1024, Machine::read().memory_bytes);
        assert_eq!((read_kib("/proc/meminfo", "NoSuch"), read_kib("/nowhere", "Slab")), (0, 0));
    }

    #[test]
    fn stolen_time_is_read_of_each_cpu() {
        let stat = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 1 2 3 4 5 6 7 80 0 0\ncpu2 1 2 3 4 5 6 7 5 0 0\nintr 5\n";
        assert_eq!(parse_steal(stat), [800_000_000, 0, 50_000_000]);
        assert!(parse_steal("cpu  1 2\n").is_empty());
    }

    #[test]
    fn idle_time_does_not_run_backwards() {
        let before = idle_ns();
        assert!(before > 0);
        assert!(idle_ns() >= before);
    }
}
