//! Tables I to III: contended locks while units are read, with the number of waits, their time,
//! and the callers.

use std::sync::atomic::AtomicBool;

use anyhow::Result;
use manylane_bench as bench;
use manylane_bench::receivers::Kind;

use super::reading::{self, Phase, ReadSample, Reader};
use crate::locks::{Contentions, LockMonitor, RECV_QUEUE_LOCK, SOCKET_LOCK};
use crate::lockstat::{LockClasses, LockStatSession, RECV_QUEUE_CLASSES, SOCKET_CLASSES};
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

/// One observation of each of `readers` with this number of threads.
pub(super) fn rows(
    places: &mut Setups,
    readers: &[Reader],
    threads: usize,
    stop: &AtomicBool,
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for &reader in readers {
        bench::check_stop(stop)?;
        let line = format!("{}, {threads}", reader.name());
        match sample_contention(places, reader, threads, stop) {
            Ok(ContentionSample { contentions: seen, reading, lock_classes: taken }) => {
                if matches!(reader, Reader::Udp(Kind::SocketRecvfrom, ..)) {
                    rows.extend(paper_rows(&seen, taken.as_ref(), threads));
                }
                rows.extend(caller_rows(&line, &seen, &reading));
            }
            Err(err) => {
                let why = format!("{err:#}");
                rows.push(Row::unavailable(CALLERS, &line, "per million", "", &why));
                if matches!(reader, Reader::Udp(Kind::SocketRecvfrom, ..)) {
                    let tables = [TABLE_1, TABLE_2];
                    rows.extend(
                        tables.map(|table| {
                            Row::unavailable(table, &threads.to_string(), CONTENTIONS, "", &why)
                        }),
                    );
                }
            }
        }
    }
    Ok(rows)
}

/// The observations while units were read.
pub(crate) struct ContentionSample {
    pub(crate) contentions: Contentions,
    pub(crate) reading: ReadSample,
    /// Of a kernel that counts all acquisitions.
    pub(crate) lock_classes: Option<LockClasses>,
}

/// Waits while units are read, without those at the start and end of the readers.
pub(crate) fn sample_contention(
    places: &mut Setups,
    reader: Reader,
    threads: usize,
    stop: &AtomicBool,
) -> Result<ContentionSample> {
    let (mut watch, mut seen) = (None, Contentions::default());
    let (mut counting, mut taken) = (None, None);
    let mut around = |moment| {
        match (moment, &watch) {
            (Phase::Started, _) => {
                watch = Some(LockMonitor::start()?);
                counting = LockStatSession::start()?;
            }
            (Phase::Finished, Some(watch)) => {
                taken = counting.as_ref().map(LockStatSession::read).transpose()?;
                seen = watch.read()?;
            }
            (Phase::Finished, None) => {}
        }
        Ok(())
    };
    let reading = reading::read_units(places, reader, threads, stop, &mut around)?;
    Ok(ContentionSample { contentions: seen, reading, lock_classes: taken })
}

/// The lines of Tables I to III.
fn paper_rows(seen: &Contentions, taken: Option<&LockClasses>, threads: usize) -> Vec<Row> {
    let line = threads.to_string();
    let mut rows = Vec::new();
    for (table, lock, classes) in
        [(TABLE_1, RECV_QUEUE_LOCK, RECV_QUEUE_CLASSES), (TABLE_2, SOCKET_LOCK, SOCKET_CLASSES)]
    {
        let each = |column, us: f64, count: u64, why| match count {
            0 => Row::unavailable(table, &line, column, "µs", why),
            _ => Row::new(table, &line, column, "µs", vec![us / count as f64]),
        };
        if let Some(taken) = taken {
            let sums = taken.total_of(&classes);
            let us = sums.held_ns as f64 / 1e3;
            rows.push(Row::new(table, &line, HOLD_TIME, "µs", vec![us]));
            rows.push(Row::new(table, &line, ACQUISITIONS, "", vec![sums.acquisitions as f64]));
            rows.push(each(HOLD_TIME_MEAN, us, sums.acquisitions, "no acquisitions"));
        } else {
            let why = "this kernel does not count acquisitions and hold times (needs CONFIG_LOCK_STAT)";
            let columns = [(HOLD_TIME, "µs"), (ACQUISITIONS, ""), (HOLD_TIME_MEAN, "µs")];
            rows.extend(columns.map(|(column, unit)| Row::unavailable(table, &line, column, unit, why)));
        }
        let (count, ns) = seen.totals_for(lock);
        let us = ns as f64 / 1e3;
        rows.push(Row::new(table, &line, WAIT_TIME, "µs", vec![us]));
        rows.push(Row::new(table, &line, CONTENTIONS, "", vec![count as f64]));
        rows.push(each(WAIT_TIME_MEAN, us, count, "no waits"));
    }
    for column in [HOLD_TIME, ACQUISITIONS, HOLD_TIME_MEAN, WAIT_TIME, CONTENTIONS, WAIT_TIME_MEAN] {
        let why = "a stock kernel cannot turn off memory accounting";
        rows.push(Row::unavailable(TABLE_3, &line, column, "", why));
    }
    rows
}

/// A line for each of the callers with the longest waits, one for all others, one for the sum.
fn caller_rows(reader: &str, seen: &Contentions, reading: &ReadSample) -> Vec<Row> {
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
    use super::*;
    use crate::locks::Contention;

    #[test]
    fn the_lines_of_callers_add_up_to_all() {
        let wait = |caller: usize, count, ns| Contention {
            lock: RECV_QUEUE_LOCK.into(),
            caller: format!("f{caller}"),
            count,
            ns,
            longest_ns: ns,
        };
        let waits = (0..8).map(|n| wait(n, 2 + n as u64, 1000 * (9 - n as u64))).collect();
        let seen = Contentions { waits, missed: 0 };
        let reading = ReadSample { delivered: 500_000, ..ReadSample::default() };
        let rows = caller_rows("socket/recvfrom, 2", &seen, &reading);
        let counts = |row: &&Row| row.column == "per million";
        let all: Vec<u64> = rows.iter().filter(counts).map(|row| row.counts["contentions"]).collect();
        assert_eq!(all.len(), 7, "the sum, five callers, all others");
        assert_eq!(all[0], all[1..].iter().sum::<u64>());
        assert_eq!(rows.iter().find(counts).unwrap().value, Some(2.0 * all[0] as f64));
    }

    #[test]
    fn the_papers_tables_include_rows_without_waits() {
        let rows = paper_rows(&Contentions::default(), None, 4);
        assert_eq!(rows.len(), 18);
        assert!(rows.iter().all(|row| row.line == "4" && row.value.is_some() != row.why_not.is_some()));
        let waited = |row: &&Row| row.table == TABLE_1 && row.column == CONTENTIONS;
        assert_eq!(rows.iter().find(waited).unwrap().value, Some(0.0));
    }

    #[test]
    fn hold_times_match_lock_stat() {
        let waits = vec![Contention {
            lock: RECV_QUEUE_LOCK.into(),
            caller: "f".into(),
            count: 4,
            ns: 6_000,
            longest_ns: 3_000,
        }];
        let taken = LockClasses::parse(include_str!("../lockstat.txt")).unwrap();
        let rows = paper_rows(&Contentions { waits, missed: 0 }, Some(&taken), 2);
        assert_eq!(rows.len(), 18);
        let at = |table: &str, column: &str| {
            let own = |row: &&Row| row.table == table && row.column == column;
            rows.iter().find(own).unwrap().value
        };
        // Both families together, in microseconds.
        assert_eq!(
            (at(TABLE_1, HOLD_TIME), at(TABLE_1, ACQUISITIONS)),
            (Some(491_477.51), Some(3_000_021.0))
        );
        assert!((at(TABLE_1, HOLD_TIME_MEAN).unwrap() - 491_477.51 / 3_000_021.0).abs() < 1e-12);
        assert_eq!((at(TABLE_1, WAIT_TIME), at(TABLE_1, WAIT_TIME_MEAN)), (Some(6.0), Some(1.5)));
        assert_eq!((at(TABLE_2, HOLD_TIME), at(TABLE_2, ACQUISITIONS)), (Some(90_000.5), Some(2_000_037.0)));
        assert_eq!((at(TABLE_2, CONTENTIONS), at(TABLE_2, WAIT_TIME_MEAN)), (Some(0.0), None));
    }
}
