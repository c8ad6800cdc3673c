//! Texts of the kernel: read, refused, and compared with an earlier one.

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

/// In the format of the kernel's Documentation/locking/lockstat.rst: readers and writers,
/// nested locks, points of contention.
const TEXT: &str = include_str!("documented.txt");

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
    let expected = LockStats {
        acquisitions: 3_000_009 + 12,
        held_ns: 491_475_110 + 2_400,
        contentions: 427 + 3,
        waited_ns: 83_760 + 1_020,
    };
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

/// Sections that Linux 6.12 wrote after the lab, with tests/vm/kernel/lock-stat.patch.
#[test]
fn linux_6_12_writes_the_documented_format() {
    let classes = LockClasses::parse(include_str!("linux-6.12.txt")).unwrap();
    let receive =
        LockStats { acquisitions: 59_416, held_ns: 185_295_730, contentions: 561, waited_ns: 5_767_401_420 };
    assert_eq!(classes.total_of(&RECV_QUEUE_CLASSES), receive);
    let readers = LockStats {
        acquisitions: 62_931,
        held_ns: 3_121_346_680,
        contentions: 6_725,
        waited_ns: 229_614_180_570,
    };
    assert!(classes.has_any(&READER_QUEUE_CLASSES));
    assert_eq!(classes.total_of(&READER_QUEUE_CLASSES), readers);
    let both = classes.total_of(&BOTH_QUEUES_CLASSES);
    assert_eq!((both.acquisitions, both.contentions), (59_416 + 62_931, 561 + 6_725));
    let others = [(&WAIT_QUEUE_CLASSES[..], 20_094, 1_695), (&SOCKET_CLASSES[..], 9_020, 1)];
    for (names, acquisitions, contentions) in others {
        let stats = classes.total_of(names);
        assert_eq!((stats.acquisitions, stats.contentions), (acquisitions, contentions), "{names:?}");
    }
    let merged = [
        ("&mm->mmap_lock", 2_546 + 22_960),
        ("&base->lock", 43_992),
        ("kn->active", 3 + 180 + 288 + 28 + 288),
    ];
    for (name, acquisitions) in merged {
        assert_eq!(classes.total_of(&[name]).acquisitions, acquisitions, "{name}");
    }
    // Names end after 38 characters, or have a line number.
    assert!(classes.has_any(&["(work_completion)(&(({ do { const voi"]));
    assert!(classes.has_any(&["drivers/char/random.c:1024"]) && !classes.has_any(&["rlock-AF_INET6"]));
}

#[test]
fn times_are_microseconds_with_two_digits_behind_the_point() {
    let cases = [("0.26", Some(260)), ("939.10", Some(939_100)), ("5", Some(5000)), ("5.", Some(5000))];
    for (text, ns) in cases {
        assert_eq!(parse_time_ns(text), ns, "{text}");
    }
    for text in ["", ".", "-1.00", "1.x", "1.2345", "99999999999999999999.00", "18446744073709551615.00"] {
        assert_eq!(parse_time_ns(text), None, "{text}");
    }
}

#[test]
fn unknown_formats_and_stopped_statistics_are_errors() {
    let other = LockClasses::parse(&replaced("version 0.4", "version 0.5")).unwrap_err().to_string();
    assert!(other.contains("unknown format") && other.contains("0.5"), "{other}");
    assert!(LockClasses::parse("").is_err());
    let off =
        replaced("0.4\n", "0.4\n*WARNING* lock debugging disabled!! - possibly due to a lockdep warning\n");
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
        let expected = LockStats { acquisitions: 1000, held_ns: 1_234_560, ..LockStats::default() };
        assert_eq!(classes.total_of(&RECV_QUEUE_CLASSES), expected);
        assert_eq!(classes.total(), expected, "of all others nothing was counted");
        // Another program cleared them.
        fs::write(&statistics, replaced("3000009", "9")).unwrap();
        assert_eq!(counting.read().unwrap().total_of(&["rlock-AF_INET"]).acquisitions, 9);
        drop(counting);
        assert_eq!(fs::read_to_string(&switch).unwrap(), was);
        assert_eq!(fs::read_to_string(&statistics).unwrap(), replaced("3000009", "9"), "nothing is cleared");
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
        let expected = LockStats {
            acquisitions: count,
            held_ns: ns / 10 * 10,
            contentions: 4,
            waited_ns: 19_980,
        };
        prop_assert_eq!(classes.total_of(&["a lock"]), expected);
    }
}
