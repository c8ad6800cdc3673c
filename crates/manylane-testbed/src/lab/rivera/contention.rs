//! Tables I to III: which locks are waited for while units are read, how often, how long, and by whom.

use std::sync::atomic::AtomicBool;

use anyhow::Result;

use super::reading::{self, Moment, Reader, Reading};
use super::{CALLERS, HELD, HELD_EACH, TABLE_1, TABLE_2, TABLE_3, TAKEN, WAITED, WAITED_EACH, WAITS};
use crate::bench;
use crate::lab::locks::{QUEUE, SOCKET, Seen, Watch};
use crate::lab::lockstat::{Classes, Counting, QUEUES, SOCKETS};
use crate::lab::{Places, Row};
use crate::receiver::Kind;

/// Callers that are told one by one; the others are told as one.
const CALLERS_TOLD: usize = 5;

/// One look at each of `readers` with so many threads.
pub(super) fn rows(
    places: &mut Places,
    readers: &[Reader],
    threads: usize,
    stop: &AtomicBool,
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for &reader in readers {
        bench::go_on(stop)?;
        let line = format!("{}, {threads}", reader.name());
        match look(places, reader, threads, stop) {
            Ok(Looked { seen, reading, taken }) => {
                if matches!(reader, Reader::Udp(Kind::SocketRecvfrom, ..)) {
                    rows.extend(paper_rows(&seen, taken.as_ref(), threads));
                }
                rows.extend(caller_rows(&line, &seen, &reading));
            }
            Err(err) => {
                bench::go_on(stop)?;
                let why = format!("{err:#}");
                rows.push(Row::cannot(CALLERS, &line, "per million", "", &why));
                if matches!(reader, Reader::Udp(Kind::SocketRecvfrom, ..)) {
                    let tables = [TABLE_1, TABLE_2];
                    rows.extend(
                        tables.map(|table| Row::cannot(table, &threads.to_string(), WAITS, "", &why)),
                    );
                }
            }
        }
    }
    Ok(rows)
}

/// What was seen while units were read.
pub(in crate::lab) struct Looked {
    pub(in crate::lab) seen: Seen,
    pub(in crate::lab) reading: Reading,
    /// Of a kernel that counts all locks that are taken.
    pub(in crate::lab) taken: Option<Classes>,
}

/// What is waited for while units are read: neither when the readers come nor when they go.
pub(in crate::lab) fn look(
    places: &mut Places,
    reader: Reader,
    threads: usize,
    stop: &AtomicBool,
) -> Result<Looked> {
    let (mut watch, mut seen) = (None, Seen::default());
    let (mut counting, mut taken) = (None, None);
    let mut around = |moment| {
        match (moment, &watch) {
            (Moment::Begins, _) => {
                watch = Some(Watch::start()?);
                counting = Counting::start()?;
            }
            (Moment::Ends, Some(watch)) => {
                taken = counting.as_ref().map(Counting::read).transpose()?;
                seen = watch.read()?;
            }
            (Moment::Ends, None) => {}
        }
        Ok(())
    };
    let reading = reading::read(places, reader, threads, stop, &mut around)?;
    Ok(Looked { seen, reading, taken })
}

/// The lines of Tables I to III.
fn paper_rows(seen: &Seen, taken: Option<&Classes>, threads: usize) -> Vec<Row> {
    let line = threads.to_string();
    let mut rows = Vec::new();
    for (table, lock, classes) in [(TABLE_1, QUEUE, QUEUES), (TABLE_2, SOCKET, SOCKETS)] {
        let each = |column, us: f64, count: u64, why| match count {
            0 => Row::cannot(table, &line, column, "µs", why),
            _ => Row::new(table, &line, column, "µs", vec![us / count as f64]),
        };
        if let Some(taken) = taken {
            let sums = taken.of(&classes);
            let us = sums.held_ns as f64 / 1e3;
            rows.push(Row::new(table, &line, HELD, "µs", vec![us]));
            rows.push(Row::new(table, &line, TAKEN, "", vec![sums.acquisitions as f64]));
            rows.push(each(HELD_EACH, us, sums.acquisitions, "nobody took it"));
        } else {
            let why = "this kernel counts neither acquisitions nor hold times (no CONFIG_LOCK_STAT)";
            let columns = [(HELD, "µs"), (TAKEN, ""), (HELD_EACH, "µs")];
            rows.extend(columns.map(|(column, unit)| Row::cannot(table, &line, column, unit, why)));
        }
        let (count, ns) = seen.of(lock);
        let us = ns as f64 / 1e3;
        rows.push(Row::new(table, &line, WAITED, "µs", vec![us]));
        rows.push(Row::new(table, &line, WAITS, "", vec![count as f64]));
        rows.push(each(WAITED_EACH, us, count, "nobody waited"));
    }
    for column in [HELD, TAKEN, HELD_EACH, WAITED, WAITS, WAITED_EACH] {
        let why = "memory accounting cannot be switched off in a stock kernel";
        rows.push(Row::cannot(TABLE_3, &line, column, "", why));
    }
    rows
}

/// A line for each of the callers that waited most, one for all others, one for the sum.
fn caller_rows(reader: &str, seen: &Seen, reading: &Reading) -> Vec<Row> {
    let units = reading.delivered.max(1) as f64;
    let line = |name: &str, count: u64, ns: u64, longest: u64| {
        let name = format!("{reader}: {name}");
        let cell = |column: &str, unit: &str, value: f64| Row::new(CALLERS, &name, column, unit, vec![value]);
        let mut cells = vec![
            cell("per million", "", count as f64 * 1e6 / units).with(&[
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
    let most = |waits: &[crate::lab::locks::Contention]| {
        waits.iter().fold((0, 0, 0), |(count, ns, longest), wait| {
            (count + wait.count, ns + wait.ns, wait.longest_ns.max(longest))
        })
    };
    let all = most(&seen.waits);
    let mut rows = line("all locks", all.0, all.1, all.2);
    let (told, others) = seen.waits.split_at(seen.waits.len().min(CALLERS_TOLD));
    for wait in told {
        rows.extend(line(&format!("{} in {}", wait.lock, wait.caller), wait.count, wait.ns, wait.longest_ns));
    }
    if !others.is_empty() {
        let (count, ns, longest) = most(others);
        rows.extend(line("all others", count, ns, longest));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::locks::Contention;

    #[test]
    fn the_lines_of_callers_add_up_to_all() {
        let wait = |caller: usize, count, ns| Contention {
            lock: QUEUE.into(),
            caller: format!("f{caller}"),
            count,
            ns,
            longest_ns: ns,
        };
        let waits = (0..8).map(|n| wait(n, 2 + n as u64, 1000 * (9 - n as u64))).collect();
        let seen = Seen { waits, missed: 0 };
        let reading = Reading { delivered: 500_000, ..Reading::default() };
        let rows = caller_rows("socket/recvfrom, 2", &seen, &reading);
        let counts = |row: &&Row| row.column == "per million";
        let all: Vec<u64> = rows.iter().filter(counts).map(|row| row.counts["contentions"]).collect();
        assert_eq!(all.len(), 7, "the sum, five callers, all others");
        assert_eq!(all[0], all[1..].iter().sum::<u64>());
        assert_eq!(rows.iter().find(counts).unwrap().value, Some(2.0 * all[0] as f64));
    }

    #[test]
    fn the_papers_tables_are_whole_also_where_nobody_waited() {
        let rows = paper_rows(&Seen::default(), None, 4);
        assert_eq!(rows.len(), 18);
        assert!(rows.iter().all(|row| row.line == "4" && row.value.is_some() != row.why_not.is_some()));
        let waited = |row: &&Row| row.table == TABLE_1 && row.column == WAITS;
        assert_eq!(rows.iter().find(waited).unwrap().value, Some(0.0));
    }

    #[test]
    fn hold_times_are_those_of_the_kernels_statistics() {
        let waits = vec![Contention {
            lock: QUEUE.into(),
            caller: "f".into(),
            count: 4,
            ns: 6_000,
            longest_ns: 3_000,
        }];
        let taken = Classes::parse(include_str!("../lockstat.txt")).unwrap();
        let rows = paper_rows(&Seen { waits, missed: 0 }, Some(&taken), 2);
        assert_eq!(rows.len(), 18);
        let at = |table: &str, column: &str| {
            let own = |row: &&Row| row.table == table && row.column == column;
            rows.iter().find(own).unwrap().value
        };
        // Both families together, in microseconds.
        assert_eq!((at(TABLE_1, HELD), at(TABLE_1, TAKEN)), (Some(491_477.51), Some(3_000_021.0)));
        assert!((at(TABLE_1, HELD_EACH).unwrap() - 491_477.51 / 3_000_021.0).abs() < 1e-12);
        assert_eq!((at(TABLE_1, WAITED), at(TABLE_1, WAITED_EACH)), (Some(6.0), Some(1.5)));
        assert_eq!((at(TABLE_2, HELD), at(TABLE_2, TAKEN)), (Some(90_000.5), Some(2_000_037.0)));
        assert_eq!((at(TABLE_2, WAITS), at(TABLE_2, WAITED_EACH)), (Some(0.0), None));
    }
}
