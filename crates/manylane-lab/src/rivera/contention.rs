//! Tables I to III: number and time of holds and waits of locks while units are read, and the
//! callers that wait.

use std::sync::atomic::AtomicBool;

use anyhow::Result;
use manylane_bench as bench;
use manylane_bench::receivers::Kind;

use super::acquisitions;
use super::lock_sample::{ContentionSample, sample_contention, sample_without_accounting};
use super::reading::Reader;
use crate::locks::{RECV_QUEUE_LOCK, SOCKET_LOCK};
use crate::lockstat::{BOTH_QUEUES_CLASSES, SOCKET_CLASSES};
use crate::part::Setups;
use crate::row::Row;

// Names of the tables.
pub(super) const TABLE_1: &str = "table I";
pub(super) const TABLE_2: &str = "table II";
pub(super) const TABLE_3: &str = "table III";
pub(super) const CALLERS: &str = "callers";

// Columns of Tables I to III. The paper heads its times with ms; they are the microseconds that
// the kernel prints: 2,001,099 ms of holding would be half an hour for a run of seconds.
pub(super) const HOLD_TIME: &str = "held, µs";
pub(super) const ACQUISITIONS: &str = "acquisitions";
pub(super) const HOLD_TIME_MEAN: &str = "mean hold, µs";
pub(super) const WAIT_TIME: &str = "waited, µs";
pub(super) const CONTENTIONS: &str = "contentions";
pub(super) const WAIT_TIME_MEAN: &str = "mean wait, µs";

/// Maximum number of callers that are listed; the others are joined.
const CALLERS_MAX: usize = 5;

/// One observation of each of `readers` with this number of threads, and of the first one of the
/// paper without memory accounting.
pub(super) fn rows(
    places: &mut Setups,
    readers: &[Reader],
    threads: usize,
    stop: &AtomicBool,
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for &reader in readers {
        bench::check_stop(stop)?;
        let is_papers = matches!(reader, Reader::Udp(Kind::SocketRecvfrom, ..));
        let seen = sample_contention(places, reader, threads, stop).map_err(|err| format!("{err:#}"));
        let seen = seen.as_ref().map_err(String::as_str);
        rows.extend(caller_rows(&format!("{}, {threads}", reader.name()), seen));
        if let Reader::Udp(..) = reader {
            rows.extend(acquisitions::rows(&reader.name(), threads, seen));
        }
        if is_papers {
            rows.extend(paper_rows(TABLE_1, threads, RECV_QUEUE_LOCK, &BOTH_QUEUES_CLASSES, seen));
            rows.extend(paper_rows(TABLE_2, threads, SOCKET_LOCK, &SOCKET_CLASSES, seen));
            bench::check_stop(stop)?;
            let seen = sample_without_accounting(places, reader, threads, stop);
            let seen = seen.as_ref().map_err(String::as_str);
            rows.extend(paper_rows(TABLE_3, threads, RECV_QUEUE_LOCK, &BOTH_QUEUES_CLASSES, seen));
        }
    }
    Ok(rows)
}

/// A line of Tables I to III. Without waits or holds their mean is 0, as the kernel prints it.
fn paper_rows(
    table: &str,
    threads: usize,
    lock: &str,
    classes: &[&str],
    seen: Result<&ContentionSample, &str>,
) -> Vec<Row> {
    const NO_LOCK_STAT: &str =
        "this kernel does not count acquisitions and hold times (needs CONFIG_LOCK_STAT)";
    let line = threads.to_string();
    let stats = seen.map(|seen| seen.lock_classes.as_ref().map(|known| known.total_of(classes)));
    let held = stats.and_then(|stats| stats.map(|sum| (sum.acquisitions, sum.held_ns)).ok_or(NO_LOCK_STAT));
    let waited = seen.and_then(|seen| {
        let counted = stats?.map(|sum| (sum.contentions, sum.waited_ns));
        Ok(counted.unwrap_or_else(|| seen.contentions.totals_for(lock)))
    });
    let cells = |[time, count, mean]: [&str; 3], sum: Result<(u64, u64), &str>| {
        let us = sum.map(|(_, ns)| ns as f64 / 1e3);
        let each = sum.and_then(|(count, _)| us.map(|us| us / count.max(1) as f64));
        [
            Row::measured(table, &line, time, "µs", us),
            Row::measured(table, &line, count, "", sum.map(|(count, _)| count as f64)),
            Row::measured(table, &line, mean, "µs", each),
        ]
    };
    let mut rows = Vec::from(cells([HOLD_TIME, ACQUISITIONS, HOLD_TIME_MEAN], held));
    rows.extend(cells([WAIT_TIME, CONTENTIONS, WAIT_TIME_MEAN], waited));
    rows
}

/// A line for each of the callers with the longest waits, one for all others, one for the sum.
fn caller_rows(reader: &str, seen: Result<&ContentionSample, &str>) -> Vec<Row> {
    let ContentionSample { contentions: seen, reading, .. } = match seen {
        Ok(seen) => seen,
        Err(why) => return vec![Row::unavailable(CALLERS, reader, "per million", "", why)],
    };
    let units = reading.delivered.max(1) as f64;
    let line = |name: &str, count: u64, ns: u64, longest: u64| {
        let name = format!("{reader}: {name}");
        let cell = |column: &str, unit: &str, value: f64| Row::new(CALLERS, &name, column, unit, vec![value]);
        let mut cells = vec![
            cell("per million", "", count as f64 * 1e6 / units).with_counts(&[
                ("contentions", count),
                ("delivered", reading.delivered),
                ("missed", seen.missed),
            ]),
            cell("waited, ms", "ms", ns as f64 / 1e6),
        ];
        if count > 0 {
            cells.push(cell("each, µs", "µs", ns as f64 / 1e3 / count as f64));
            cells.push(cell("longest, µs", "µs", longest as f64 / 1e3));
        }
        cells
    };
    let sum = |waits: &[crate::locks::Contention]| {
        waits.iter().fold((0, 0, 0), |(count, ns, longest), wait| {
            (count + wait.count, ns + wait.ns, wait.longest_ns.max(longest))
        })
    };
    let all = sum(&seen.waits);
    let mut rows = line("all locks", all.0, all.1, all.2);
    let (told, others) = seen.waits.split_at(seen.waits.len().min(CALLERS_MAX));
    for wait in told {
        rows.extend(line(&format!("{} in {}", wait.lock, wait.caller), wait.count, wait.ns, wait.longest_ns));
    }
    if !others.is_empty() {
        let (count, ns, longest) = sum(others);
        rows.extend(line("all others", count, ns, longest));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::super::reading::ReadSample;
    use super::*;
    use crate::locks::{Contention, Contentions};
    use crate::lockstat::LockClasses;

    fn sample(waits: Vec<Contention>, lock_classes: Option<LockClasses>) -> ContentionSample {
        let reading = ReadSample { delivered: 500_000, ..ReadSample::default() };
        ContentionSample { contentions: Contentions { waits, missed: 0 }, reading, lock_classes }
    }

    fn wait(caller: &str, count: u64, ns: u64) -> Contention {
        Contention { lock: RECV_QUEUE_LOCK.into(), caller: caller.into(), count, ns, longest_ns: ns }
    }

    fn value(rows: &[Row], column: &str) -> Option<f64> {
        rows.iter().find(|row| row.column == column).unwrap().value
    }

    #[test]
    fn the_lines_of_callers_add_up_to_all() {
        let waits = (0..8).map(|n| wait(&format!("f{n}"), 2 + n, 1000 * (9 - n))).collect();
        let rows = caller_rows("socket/recvfrom, 2", Ok(&sample(waits, None)));
        let counts = |row: &&Row| row.column == "per million";
        let all: Vec<u64> = rows.iter().filter(counts).map(|row| row.counts["contentions"]).collect();
        assert_eq!(all.len(), 7, "the sum, five callers, all others");
        assert_eq!(all[0], all[1..].iter().sum::<u64>());
        assert_eq!(rows.iter().find(counts).unwrap().value, Some(2.0 * all[0] as f64));
        let rows = caller_rows("lane/xdp, 2", Err("no device"));
        assert_eq!((rows.len(), rows[0].why_not.as_deref()), (1, Some("no device")));
    }

    #[test]
    fn a_stock_kernel_has_waits_alone() {
        let seen = sample(vec![wait("f", 4, 6_000)], None);
        let rows = paper_rows(TABLE_1, 4, RECV_QUEUE_LOCK, &BOTH_QUEUES_CLASSES, Ok(&seen));
        assert_eq!(rows.len(), 6);
        assert!(rows.iter().all(|row| row.line == "4" && row.value.is_some() != row.why_not.is_some()));
        assert_eq!((value(&rows, HOLD_TIME), value(&rows, ACQUISITIONS)), (None, None));
        assert_eq!((value(&rows, CONTENTIONS), value(&rows, WAIT_TIME_MEAN)), (Some(4.0), Some(1.5)));
        let rows = paper_rows(TABLE_2, 4, SOCKET_LOCK, &SOCKET_CLASSES, Ok(&seen));
        assert_eq!((value(&rows, CONTENTIONS), value(&rows, WAIT_TIME_MEAN)), (Some(0.0), Some(0.0)));
        let rows = paper_rows(TABLE_3, 4, RECV_QUEUE_LOCK, &BOTH_QUEUES_CLASSES, Err("no switch"));
        assert!(rows.len() == 6 && rows.iter().all(|row| row.why_not.as_deref() == Some("no switch")));
    }

    #[test]
    fn statistics_of_locks_fill_each_cell() {
        let classes = LockClasses::parse(include_str!("../lockstat/documented.txt")).unwrap();
        // Of another clock, and of this process alone: not mixed with the kernel's.
        let seen = sample(vec![wait("f", 4, 6_000)], Some(classes));
        let rows = paper_rows(TABLE_1, 2, RECV_QUEUE_LOCK, &BOTH_QUEUES_CLASSES, Ok(&seen));
        // Both families together, in microseconds.
        assert_eq!(
            (value(&rows, HOLD_TIME), value(&rows, ACQUISITIONS)),
            (Some(491_477.51), Some(3_000_021.0))
        );
        assert!((value(&rows, HOLD_TIME_MEAN).unwrap() - 491_477.51 / 3_000_021.0).abs() < 1e-12);
        assert_eq!((value(&rows, WAIT_TIME), value(&rows, CONTENTIONS)), (Some(84.78), Some(430.0)));
        let rows = paper_rows(TABLE_2, 2, SOCKET_LOCK, &SOCKET_CLASSES, Ok(&seen));
        assert_eq!(
            (value(&rows, HOLD_TIME), value(&rows, ACQUISITIONS)),
            (Some(90_000.5), Some(2_000_037.0))
        );
        assert_eq!((value(&rows, CONTENTIONS), value(&rows, WAIT_TIME_MEAN)), (Some(0.0), Some(0.0)));
    }
}
