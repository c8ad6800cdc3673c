//! Tests that cannot run on this machine are reported as skipped.
//!
//! A skip is printed past the test harness, which hides the output of passing tests. It is also
//! appended to the file that `MANYLANE_SKIPS` names, so that a run can list its skips at the end.
//! With `CI=true` it is a failure, unless the machine itself forces it.

use std::fmt;
use std::fs::OpenOptions;
use std::io::Write as _;

/// Requirements that no set-up of a machine can provide: the only reasons to skip in CI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Forced {
    /// The kernel is older than the feature, or was built without it.
    Kernel,
    /// There are fewer CPUs than the test needs.
    Cpus,
}

impl fmt::Display for Forced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Forced::Kernel => "this kernel",
            Forced::Cpus => "too few CPUs",
        })
    }
}

/// True if `condition` holds, which the test `name` needs. If not, the skip is reported with
/// `why`. For requirements that any machine can meet (a package, a privilege), so that it fails in
/// CI.
///
/// # Panics
/// In CI, when the condition does not hold.
#[must_use]
pub fn need(name: &str, condition: bool, why: &str) -> bool {
    if !condition {
        skip(name, None, why);
    }
    condition
}

/// As [`need`], for requirements that depend on the machine: allowed in CI, too.
#[must_use]
pub fn need_unless_forced(name: &str, condition: bool, forced: Forced, why: &str) -> bool {
    if !condition {
        skip(name, Some(forced), why);
    }
    condition
}

/// True if the kernel is Linux `since` or later, which the test `name` needs for `feature`. Reports
/// the skip if not.
#[must_use]
pub fn need_kernel(name: &str, since: (u32, u32), feature: &str) -> bool {
    let why = format!("{feature}: since Linux {}.{}", since.0, since.1);
    need_unless_forced(name, is_kernel(since), Forced::Kernel, &why)
}

/// True if the kernel is Linux `since` or later.
#[must_use]
pub fn is_kernel(since: (u32, u32)) -> bool {
    kernel_version() >= since
}

/// True if queues can be leased to another process: the rings of an XSK that is bound can be
/// mapped. Reports the skip of the test `name` if not.
#[must_use]
pub fn need_leases(name: &str) -> bool {
    need_kernel(name, (6, 4), "queues leased to programs")
}

/// True if io_uring is available, as its probe says. Reports the skip of the test `name` if not.
#[must_use]
pub fn need_uring<E: fmt::Display>(name: &str, probe: Result<(), E>) -> bool {
    match probe {
        Ok(()) => true,
        Err(err) => need_unless_forced(name, false, Forced::Kernel, &format!("no io_uring: {err}")),
    }
}

/// True if GSO messages cross the loopback device, and veth devices, whole (Linux 5.11).
#[must_use]
pub fn passes_whole_gso() -> bool {
    is_kernel((5, 11))
}

/// The same, for the test `name`, which needs it. Reports the skip if not.
#[must_use]
pub fn need_whole_gso(name: &str) -> bool {
    need_unless_forced(
        name,
        passes_whole_gso(),
        Forced::Kernel,
        "GSO messages are segmented before Linux 5.11",
    )
}

/// The first two numbers of the kernel's release.
fn kernel_version() -> (u32, u32) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

fn skip(name: &str, forced: Option<Forced>, why: &str) {
    let line = match forced {
        Some(forced) => format!("SKIP {name}: {why} (forced by {forced})\n"),
        None => format!("SKIP {name}: {why}\n"),
    };
    // Not eprint!, which the test harness captures. Errors are ignored, because a skip that cannot
    // be printed is not worth a failure.
    let _ = std::io::stderr().write_all(line.as_bytes());
    if let Some(path) = std::env::var_os("MANYLANE_SKIPS") {
        // One write in append mode: tests run in parallel, also in several processes.
        let appended = OpenOptions::new().create(true).append(true).open(&path);
        if let Err(err) = appended.and_then(|mut file| file.write_all(line.as_bytes())) {
            let _ = writeln!(std::io::stderr(), "MANYLANE_SKIPS={}: {err}", path.display());
        }
    }
    if forced.is_none() && std::env::var_os("CI").is_some_and(|ci| ci == "true") {
        panic!("{name} may not be skipped in CI: {why}");
    }
}
