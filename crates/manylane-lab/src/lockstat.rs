//! `/proc/lock_stat`: acquisitions, contentions, hold and wait time of each class of locks. Only
//! kernels built with CONFIG_LOCK_STAT have it, and few machines in production run one. The numbers
//! are machine-wide, and a class covers all sockets of a family. Other programs may use the
//! counters, so this module does not clear them. It computes differences.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::switch::SwitchGuard;

/// The file, and the switch (`kernel.lock_stat`).
const LOCK_STAT_PATH: &str = "/proc/lock_stat";
const LOCK_STAT_SYSCTL: &str = "/proc/sys/kernel/lock_stat";

/// The format that is read here, of all kernels since 3.14.
const VERSION_LINE: &str = "lock_stat version 0.4";
/// Numbers after a class: two times bounces, a count, and the minimum, maximum, total and mean
/// time.
const FIELD_COUNT: usize = 12;

/// Classes of the locks of UDP receive queues, to which datagrams are appended.
pub(crate) const RECV_QUEUE_CLASSES: [&str; 2] = ["rlock-AF_INET", "rlock-AF_INET6"];
/// Classes of the spinlocks of whole sockets.
pub(crate) const SOCKET_CLASSES: [&str; 2] = ["slock-AF_INET", "slock-AF_INET6"];

/// Class of the locks of the readers' queues of UDP sockets (since Linux 4.13), to which a reader
/// moves all of a receive queue. It has this name only in a kernel with
/// tests/vm/kernel/lock-stat.patch; elsewhere it is one of many without a name of their own.
pub(crate) const READER_QUEUE_CLASSES: [&str; 1] = ["reader_queue-UDP"];
/// Both, which were one lock in the paper's kernel.
pub(crate) const BOTH_QUEUES_CLASSES: [&str; 3] =
    [RECV_QUEUE_CLASSES[0], RECV_QUEUE_CLASSES[1], READER_QUEUE_CLASSES[0]];
/// Class of the locks of the wait queues of all sockets.
pub(crate) const WAIT_QUEUE_CLASSES: [&str; 1] = ["&ei->socket.wq.wait"];

/// Counters of some locks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct LockStats {
    /// Number of acquisitions.
    pub acquisitions: u64,
    /// Total hold time in nanoseconds.
    pub held_ns: u64,
    /// Number of acquisitions that had to wait.
    pub contentions: u64,
    /// Total wait time in nanoseconds.
    pub waited_ns: u64,
}

impl LockStats {
    fn add(&mut self, other: Self) {
        *self = self.with(other, u64::saturating_add);
    }

    /// Another program may clear the statistics meanwhile. Then only the current values are known.
    fn since(self, before: Self) -> Self {
        self.with(before, |now, then| now.checked_sub(then).unwrap_or(now))
    }

    fn with(self, other: Self, each: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            acquisitions: each(self.acquisitions, other.acquisitions),
            held_ns: each(self.held_ns, other.held_ns),
            contentions: each(self.contentions, other.contentions),
            waited_ns: each(self.waited_ns, other.waited_ns),
        }
    }
}

/// Sums by class. Classes of readers and writers, nested ones and those of equal name are joined.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LockClasses(BTreeMap<String, LockStats>);

impl LockClasses {
    /// Reads the kernel's text.
    ///
    /// # Errors
    /// Fails if it has another format, or says that it has stopped counting.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let mut lines = text.lines();
        let version = lines.next().unwrap_or_default();
        ensure!(
            version.trim() == VERSION_LINE,
            "{LOCK_STAT_PATH} has an unknown format: {version:?}, not {VERSION_LINE:?}"
        );
        let mut classes = Self::default();
        for line in lines {
            if line.starts_with("*WARNING*") {
                bail!(
                    "the kernel stopped counting locks, because it found a lock that was used wrongly (see {LOCK_STAT_PATH})"
                );
            }
            if let Some((name, sums)) = parse_class(line) {
                classes.0.entry(base_name(name).to_owned()).or_default().add(sums);
            }
        }
        Ok(classes)
    }

    /// True if the kernel has one of these classes.
    pub(crate) fn has_any(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.0.contains_key(*name))
    }

    /// Those of some classes together.
    pub(crate) fn total_of(&self, names: &[&str]) -> LockStats {
        let mut sum = LockStats::default();
        names.iter().filter_map(|name| self.0.get(*name)).for_each(|sums| sum.add(*sums));
        sum
    }

    /// All locks.
    pub(crate) fn total(&self) -> LockStats {
        let mut sum = LockStats::default();
        self.0.values().for_each(|sums| sum.add(*sums));
        sum
    }

    fn since(mut self, before: &Self) -> Self {
        for (name, sums) in &mut self.0 {
            *sums = sums.since(before.0.get(name).copied().unwrap_or_default());
        }
        self
    }
}

/// A name, then con-bounces, contentions, min, max, total, avg, acq-bounces, acquisitions, min,
/// max, total, avg. Other lines are ignored.
fn parse_class(line: &str) -> Option<(&str, LockStats)> {
    // A name may contain colons; numbers do not.
    let (name, numbers) = line.rsplit_once(':')?;
    let numbers: Vec<&str> = numbers.split_whitespace().collect();
    if numbers.len() != FIELD_COUNT || name.trim().is_empty() {
        return None;
    }
    let sums = LockStats {
        contentions: numbers[1].parse().ok()?,
        waited_ns: parse_time_ns(numbers[4])?,
        acquisitions: numbers[7].parse().ok()?,
        held_ns: parse_time_ns(numbers[10])?,
    };
    Some((name.trim(), sums))
}

/// The name without the suffix of writers and readers (`-W`, `-R`), the depth (`/1`) and the
/// number of a name (`#2`).
fn base_name(name: &str) -> &str {
    let name = name.strip_suffix("-W").or_else(|| name.strip_suffix("-R")).unwrap_or(name);
    let without = |name, mark| match str::rsplit_once(name, mark) {
        Some((rest, number)) if !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()) => {
            rest
        }
        _ => name,
    };
    without(without(name, '/'), '#')
}

/// Microseconds with two decimals, of which the kernel truncates those that do not fit its field.
fn parse_time_ns(text: &str) -> Option<u64> {
    let (whole, rest) = text.split_once('.').unwrap_or((text, ""));
    let mut ns = whole.parse::<u64>().ok()?.checked_mul(1000)?;
    for (digit, worth) in rest.bytes().zip([100, 10, 1]) {
        ns = ns.checked_add(u64::from(char::from(digit).to_digit(10)?) * worth)?;
    }
    (rest.len() <= 3).then_some(ns)
}

/// Counts from its start on. Statistics that were switched on for it are off again when it is
/// dropped.
#[derive(Debug)]
pub(crate) struct LockStatSession {
    stat_path: PathBuf,
    before: LockClasses,
    _switch: Option<SwitchGuard>,
}

impl LockStatSession {
    /// Starts to count; none if the kernel has no statistics.
    ///
    /// # Errors
    /// Without root, and when the text has another format.
    pub(crate) fn start() -> Result<Option<Self>> {
        if !is_supported() {
            return Ok(None);
        }
        Self::start_at(Path::new(LOCK_STAT_PATH), Path::new(LOCK_STAT_SYSCTL)).map(Some)
    }

    fn start_at(statistics: &Path, switch: &Path) -> Result<Self> {
        let switch = SwitchGuard::set(switch, "1")?;
        Ok(Self { stat_path: statistics.into(), before: read(statistics)?, _switch: switch })
    }

    /// The machine-wide counts since the start.
    ///
    /// # Errors
    /// Fails if the text has another format, or the kernel has stopped counting.
    pub(crate) fn read(&self) -> Result<LockClasses> {
        Ok(read(&self.stat_path)?.since(&self.before))
    }
}

/// True if the kernel has statistics of its locks.
pub(crate) fn is_supported() -> bool {
    Path::new(LOCK_STAT_PATH).exists()
}

fn read(path: &Path) -> Result<LockClasses> {
    let text =
        fs::read_to_string(path).with_context(|| format!("reading {} (needs root)", path.display()))?;
    LockClasses::parse(&text)
}

#[cfg(test)]
mod tests;
