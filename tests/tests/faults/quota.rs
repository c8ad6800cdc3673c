//! A quota of CPU time: a socket has no more lanes by default than the process may use CPUs.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::faults_support::{Child, is_child, is_root, report, wait_for_parent};
use manylane::Builder;
use manylane_sys::fd;
use manylane_test_support::wait_for;
use manylane_testbed::skip::{self, Forced};
use manylane_tests::TEST_TIMEOUT;

/// Prefix of the control groups of this test, before a unique word.
const PREFIX: &str = "manylane-test-";
/// Microseconds of CPU time in this many microseconds make a quota.
const PERIOD_USECS: u64 = 100_000;

/// A control group for CPU time, removed with this value.
struct Cgroup {
    path: PathBuf,
    /// Its directory, locked, which shows that its owner is alive, in any PID namespace.
    _lock: File,
    /// Of the second version of control groups.
    is_v2: bool,
}

impl Cgroup {
    /// Makes one.
    ///
    /// # Errors
    /// The obstacle.
    fn new() -> Result<Self, String> {
        let (at, second) = cgroup_root().ok_or("no hierarchy of control groups for CPU time is mounted")?;
        remove_leftovers(&at);
        loop {
            let word = fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap();
            let path = at.join(format!("{PREFIX}{}", word.trim_end()));
            fs::create_dir(&path).map_err(|err| format!("making {}: {err}", path.display()))?;
            // Before it was locked, another run may have removed it as a leftover.
            if let Some(lock) = lock(&path) {
                return Ok(Self { path, _lock: lock, is_v2: second });
            }
        }
    }

    fn has_quotas(&self) -> bool {
        self.path.join(if self.is_v2 { "cpu.max" } else { "cpu.cfs_quota_us" }).exists()
    }

    /// Lets the processes in the group use `quota` microseconds of CPU time in each period.
    fn set_quota(&self, quota: u64) {
        if self.is_v2 {
            self.write("cpu.max", &format!("{quota} {PERIOD_USECS}"));
        } else {
            self.write("cpu.cfs_period_us", &PERIOD_USECS.to_string());
            self.write("cpu.cfs_quota_us", &quota.to_string());
        }
    }

    /// Moves a process, with all its threads, into the group.
    fn add_process(&self, pid: u32) {
        self.write("cgroup.procs", &pid.to_string());
    }

    fn write(&self, file: &str, value: &str) {
        fs::write(self.path.join(file), value).unwrap();
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A killed process leaves its group a moment later.
        let start = Instant::now();
        while fs::remove_dir(&self.path).is_err() && self.path.exists() && start.elapsed() < TEST_TIMEOUT {
            thread::sleep(Duration::from_millis(2));
        }
    }
}

/// The root of the control groups for CPU time, and whether it is of the second version.
fn cgroup_root() -> Option<(PathBuf, bool)> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let mounts = || mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let first = mounts().find(|mount| mount[2] == "cgroup" && mount[3].split(',').any(|word| word == "cpu"));
    if let Some(mount) = first {
        return Some((mount[1].into(), false));
    }
    mounts().find(|mount| mount[2] == "cgroup2").map(|mount| (mount[1].into(), true))
}

/// Locks the directory of a group; none if another process has the lock, or the group does not
/// exist.
fn lock(path: &Path) -> Option<File> {
    let directory = File::open(path).ok()?;
    fd::try_lock(&directory).ok()?;
    path.exists().then_some(directory)
}

/// Removes groups of earlier runs that were killed: those that have no process in them and no
/// owner.
fn remove_leftovers(at: &Path) {
    for entry in fs::read_dir(at).into_iter().flatten().flatten() {
        let is_ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
        if let Some(_lock) = is_ours.then(|| lock(&entry.path())).flatten() {
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// Two runs must not use the same name, and must not remove each other's group.
#[test]
fn netns_only_leftover_cgroups_are_removed() {
    let name = "netns_only_leftover_cgroups_are_removed";
    if !skip::need(name, is_root(), "control groups are made by root") {
        return;
    }
    let group = Cgroup::new();
    let why = group.as_ref().err().cloned().unwrap_or_default();
    if !skip::need(name, group.is_ok(), &why) {
        return;
    }
    let group = group.unwrap();
    // Of a crashed run in another PID namespace, with a PID that does not exist here.
    let leftover = group.path.with_file_name(format!("{PREFIX}{}", u32::MAX));
    fs::create_dir(&leftover).unwrap();
    let other = Cgroup::new().unwrap();
    assert_ne!(group.path, other.path);
    assert_eq!((group.path.exists(), leftover.exists()), (true, false));
}

fn default_lanes() -> usize {
    Builder::new("127.0.0.1:0").unwrap().open().unwrap().lane_count()
}

#[test]
#[ignore = "started by netns_default_lanes_honour_a_cpu_quota"]
fn child_prints_its_default_lanes() {
    if !is_child("child_prints_its_default_lanes") {
        return;
    }
    report(&default_lanes().to_string());
    let groups = || fs::read_to_string("/proc/self/cgroup").unwrap();
    wait_for("a move into a control group", groups, |groups| groups.contains(PREFIX));
    report(&default_lanes().to_string());
    wait_for_parent();
}

#[test]
fn netns_default_lanes_honour_a_cpu_quota() {
    let name = "netns_default_lanes_honour_a_cpu_quota";
    // Of this process, which may have a quota itself.
    let cpus = thread::available_parallelism().unwrap().get().min(256) as u64;
    if !skip::need(name, is_root(), "control groups are made by root")
        || !skip::need_unless_forced(name, cpus > 1, Forced::Cpus, "one CPU is one lane without a quota too")
    {
        return;
    }
    let one = PERIOD_USECS;
    // Whole CPUs count, but one lane there is in any case.
    for (quota, lanes) in [(one, 1), (one / 2, 1), (one * 2 - 1, 1), (one * cpus, cpus), (one * 1000, cpus)] {
        let group = Cgroup::new();
        let why = group.as_ref().err().cloned().unwrap_or_default();
        if !skip::need(name, group.is_ok(), &why) {
            return;
        }
        let group = group.unwrap();
        let why = "the kernel has no quotas of CPU time, or not in this hierarchy (cgroup.subtree_control)";
        if !skip::need_unless_forced(name, group.has_quotas(), Forced::Kernel, why) {
            return;
        }
        group.set_quota(quota);
        // Created after the group, and so dropped before it.
        let child = Child::start("child_prints_its_default_lanes", None);
        assert_eq!(child.line(), cpus.to_string(), "without a quota");
        group.add_process(child.pid());
        assert_eq!(child.line(), lanes.to_string(), "{quota} of {PERIOD_USECS} microseconds");
        child.finish();
    }
}
