//! The default of `--max-memory`.

use std::fs;

use manylane_measure::machine;

/// Divides the memory that the process may use.
const SHARE: u64 = 4;
/// If the memory cannot be read.
const UNKNOWN: u64 = 4 << 30;

/// A quarter of the memory of the machine, or of the limit of the process's cgroup (version 2) if
/// that is lower.
pub(super) fn default_max() -> usize {
    let cgroup = fs::read_to_string("/proc/self/cgroup").ok().and_then(|text| {
        let path = text.lines().find_map(|line| line.strip_prefix("0::"))?.to_owned();
        fs::read_to_string(format!("/sys/fs/cgroup{path}/memory.max")).ok()
    });
    share_of(machine::read_kib("/proc/meminfo", "MemTotal") << 10, &cgroup.unwrap_or_default())
}

/// `cgroup`: bytes, or `max`.
fn share_of(machine: u64, cgroup: &str) -> usize {
    let machine = if machine > 0 { machine } else { UNKNOWN };
    let memory = cgroup.trim().parse().map_or(machine, |limit: u64| machine.min(limit));
    usize::try_from(memory / SHARE).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lower_limit_counts() {
        assert_eq!(share_of(8 << 30, "max\n"), 2 << 30);
        assert_eq!(share_of(8 << 30, "1073741824\n"), 256 << 20);
        assert_eq!(share_of(8 << 30, "9999999999999\n"), 2 << 30);
        assert_eq!(share_of(0, ""), 1 << 30);
        assert!(default_max() > 0);
    }
}
