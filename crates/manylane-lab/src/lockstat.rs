//! `/proc/lock_stat`: acquisitions and hold time of each class of locks. Only kernels built with
//! CONFIG_LOCK_STAT have it, and few machines in production run one. The numbers are machine-wide,
//! and a class covers all sockets of a family. Other programs may use the counters, so this module
//! does not clear them. It computes differences.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

/// The file, and the switch (`kernel.lock_stat`).
const LOCK_STAT_PATH: &str = "/proc/lock_stat";
const LOCK_STAT_SYSCTL: &str = "/proc/sys/kernel/lock_stat";

/// The format that is read here, of all kernels since 3.14.
const VERSION_LINE: &str = "lock_stat version 0.4";
/// Numbers after a class: two times bounces, a count, and the minimum, maximum, total and mean
/// time.
const FIELD_COUNT: usize = 12;

/// Classes of the locks of UDP receive queues.
pub(crate) const RECV_QUEUE_CLASSES: [&str; 2] = ["rlock-AF_INET", "rlock-AF_INET6"];
/// Classes of the spinlocks of whole sockets.
pub(crate) const SOCKET_CLASSES: [&str; 2] = ["slock-AF_INET", "slock-AF_INET6"];

/// Counters of some locks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct LockStats {
    /// Number of acquisitions.
    pub acquisitions: u64,
    /// Total hold time in nanoseconds.
    pub held_ns: u64,
}

impl LockStats {
    fn add(&mut self, other: Self) {
        self.acquisitions = self.acquisitions.saturating_add(other.acquisitions);
        self.held_ns = self.held_ns.saturating_add(other.held_ns);
    }

    /// Another program may clear the statistics meanwhile. Then only the current values are known.
    fn since(self, before: Self) -> Self {
        let less = |now: u64, then: u64| now.checked_sub(then).unwrap_or(now);
        Self {
            acquisitions: less(self.acquisitions, before.acquisitions),
            held_ns: less(self.held_ns, before.held_ns),
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
    let sums = LockStats { acquisitions: numbers[7].parse().ok()?, held_ns: parse_time_ns(numbers[10])? };
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
    _sysctl_guard: Option<SysctlGuard>,
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
        let switch = SysctlGuard::enable(switch)?;
        Ok(Self { stat_path: statistics.into(), before: read(statistics)?, _sysctl_guard: switch })
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

/// The statistics were off, and are on until this is dropped.
#[derive(Debug)]
struct SysctlGuard(PathBuf);

impl SysctlGuard {
    /// None if they are already on.
    fn enable(path: &Path) -> Result<Option<Self>> {
        let state = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        if state.trim() != "0" {
            return Ok(None);
        }
        fs::write(path, "1\n").with_context(|| format!("switching on {} (needs root)", path.display()))?;
        Ok(Some(Self(path.into())))
    }
}

impl Drop for SysctlGuard {
    fn drop(&mut self) {
        // An error cannot be reported here. The next run finds the statistics on, and leaves them
        // on.
        let _ = fs::write(&self.0, "0\n");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tempfile::TempDir;

    use super::*;

    /// In the format of the kernel's Documentation/locking/lockstat.rst: readers and writers,
    /// nested locks, points of contention.
    const TEXT: &str = include_str!("lockstat.txt");

    fn replaced(text: &str, with: &str) -> String {
        let changed = TEXT.replace(text, with);
        assert_ne!(changed, TEXT);
        changed
    }

    #[test]
    fn classes_are_read_as_the_kernel_writes_them() {
        let classes = LockClasses::parse(TEXT).unwrap();
        let memory = classes.total_of(&["&mm->mmap_sem"]);
        assert_eq!((memory.acquisitions, memory.held_ns), (37_239_050, 17_559_036_826_520));
        // With the nested ones, `/1`, and those of the second class of that name, `#2`.
        assert_eq!(classes.total_of(&["&rq->lock"]).acquisitions, 3_453_404 + 38_404 + 7);
        let queue = classes.total_of(&RECV_QUEUE_CLASSES);
        let expected = LockStats { acquisitions: 3_000_009 + 12, held_ns: 491_475_110 + 2_400 };
        assert_eq!(queue, expected);
        assert_eq!(classes.total_of(&SOCKET_CLASSES).acquisitions, 2_000_037);
        assert_eq!(
            classes.total_of(&["(work_completion)(&(&w->d)->work): x"]).acquisitions,
            5,
            "names have colons"
        );
        assert_eq!(classes.total_of(&["no such lock"]), LockStats::default());
        let all = [memory, queue, classes.total_of(&SOCKET_CLASSES), classes.total_of(&["&rq->lock"])];
        let all: u64 = all.iter().map(|sums| sums.acquisitions).sum();
        assert_eq!(classes.total().acquisitions, all + 5, "points of contention are no classes");
    }

    #[test]
    fn times_are_microseconds_with_two_digits_behind_the_point() {
        let cases = [("0.26", Some(260)), ("939.10", Some(939_100)), ("5", Some(5000)), ("5.", Some(5000))];
        for (text, ns) in cases {
            assert_eq!(parse_time_ns(text), ns, "{text}");
        }
        for text in ["", ".", "-1.00", "1.x", "1.2345", "99999999999999999999.00", "18446744073709551615.00"]
        {
            assert_eq!(parse_time_ns(text), None, "{text}");
        }
    }

    #[test]
    fn unknown_formats_and_stopped_statistics_are_errors() {
        let other = LockClasses::parse(&replaced("version 0.4", "version 0.5")).unwrap_err().to_string();
        assert!(other.contains("unknown format") && other.contains("0.5"), "{other}");
        assert!(LockClasses::parse("").is_err());
        let off = replaced(
            "0.4\n",
            "0.4\n*WARNING* lock debugging disabled!! - possibly due to a lockdep warning\n",
        );
        let off = LockClasses::parse(&off).unwrap_err().to_string();
        assert!(off.contains("stopped counting"), "{off}");
    }

    fn files() -> (PathBuf, PathBuf, TempDir) {
        let folder = TempDir::new().unwrap();
        (folder.path().join("lock_stat"), folder.path().join("switch"), folder)
    }

    #[test]
    fn lockstat_counts_differences_and_restores_its_switch() {
        let (statistics, switch, _folder) = files();
        fs::write(&statistics, TEXT).unwrap();
        for (was, meanwhile) in [("0\n", "1\n"), ("1\n", "1\n")] {
            fs::write(&statistics, TEXT).unwrap();
            fs::write(&switch, was).unwrap();
            let counting = LockStatSession::start_at(&statistics, &switch).unwrap();
            assert_eq!(fs::read_to_string(&switch).unwrap(), meanwhile);
            // 1000 more acquisitions, and 1234.56 µs more hold time.
            let later = replaced("3000009", "3001009").replace("491475.11", "492709.67");
            fs::write(&statistics, later).unwrap();
            let classes = counting.read().unwrap();
            let expected = LockStats { acquisitions: 1000, held_ns: 1_234_560 };
            assert_eq!(classes.total_of(&RECV_QUEUE_CLASSES), expected);
            assert_eq!(classes.total(), expected, "of all others nothing was counted");
            // Another program cleared them.
            fs::write(&statistics, replaced("3000009", "9")).unwrap();
            assert_eq!(counting.read().unwrap().total_of(&["rlock-AF_INET"]).acquisitions, 9);
            drop(counting);
            assert_eq!(fs::read_to_string(&switch).unwrap(), was);
            assert_eq!(
                fs::read_to_string(&statistics).unwrap(),
                replaced("3000009", "9"),
                "nothing is cleared"
            );
        }
        // If the statistics cannot be read, they are not left on.
        fs::write(&switch, "0\n").unwrap();
        fs::write(&statistics, "another text").unwrap();
        assert!(LockStatSession::start_at(&statistics, &switch).is_err());
        assert_eq!(fs::read_to_string(&switch).unwrap(), "0\n");
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "\\PC{0,400}") {
            let _ = LockClasses::parse(&text);
            let _ = LockClasses::parse(&format!("{VERSION_LINE}\n{text}"));
        }

        /// The kernel's text with replaced parts: no panic, and no class that does not exist.
        #[test]
        fn a_damaged_text_has_no_more_classes(at in 0..TEXT.len(), length in 0..200_usize, with in "[-:.0-9 a-z\n]{0,80}") {
            let (Some(before), Some(after)) = (TEXT.get(..at), TEXT.get((at + length).min(TEXT.len())..)) else {
                return Ok(());
            };
            if let Ok(classes) = LockClasses::parse(&format!("{before}{with}{after}")) {
                let whole = LockClasses::parse(TEXT).unwrap();
                prop_assert!(classes.0.len() <= whole.0.len() + 1 + with.lines().count());
            }
        }

        #[test]
        fn numbers_round_trip(count in any::<u64>(), ns in 0..1_000_000_000_000_u64) {
            let time = format!("{}.{:02}", ns / 1000, ns % 1000 / 10);
            let line = format!(
                "{:>40}:{:>14} {:>14} {:>14} {:>14} {:>14} {:>14} {:>14} {:>14} {:>14} {:>14} {:>14} {:>14} ",
                "a lock-W", 1, 4, "0.10", "9.99", "19.98", "1.00", 2, count, "0.00", "8.88", time, "2.00"
            );
            let classes = LockClasses::parse(&format!("{VERSION_LINE}\n{line}\n")).unwrap();
            let expected = LockStats { acquisitions: count, held_ns: ns / 10 * 10 };
            prop_assert_eq!(classes.total_of(&["a lock"]), expected);
        }
    }
}
