//! Tables I to III: which locks are waited for while units are read, how often, how long, and by whom.

use std::sync::atomic::AtomicBool;

use anyhow::Result;

use super::reading::{self, Moment, Reader, Reading};
use super::{CALLERS, HELD, HELD_EACH, TABLE_1, TABLE_2, TABLE_3, TAKEN, WAITED, WAITED_EACH, WAITS};
use crate::bench;
use crate::lab::locks::{QUEUE, SOCKET, Seen, Watch, has_hold_times};
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
            Ok((seen, reading)) => {
                if matches!(reader, Reader::Udp(Kind::SocketRecvfrom, ..)) {
                    rows.extend(paper_rows(&seen, threads));
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

/// What is waited for while units are read: neither when the readers come nor when they go.
pub(in crate::lab) fn look(
    places: &mut Places,
    reader: Reader,
    threads: usize,
    stop: &AtomicBool,
) -> Result<(Seen, Reading)> {
    let (mut watch, mut seen) = (None, Seen::default());
    let mut around = |moment| {
        match (moment, &watch) {
            (Moment::Begins, _) => watch = Some(Watch::start()?),
            (Moment::Ends, Some(watch)) => seen = watch.read()?,
            (Moment::Ends, None) => {}
        }
        Ok(())
    };
    let reading = reading::read(places, reader, threads, stop, &mut around)?;
    Ok((seen, reading))
}

/// The lines of Tables I to III.
fn paper_rows(seen: &Seen, threads: usize) -> Vec<Row> {
    let line = threads.to_string();
    let mut rows = Vec::new();
    for (table, lock) in [(TABLE_1, QUEUE), (TABLE_2, SOCKET)] {
        for column in [HELD, TAKEN, HELD_EACH] {
            let why = if has_hold_times() {
                "this kernel has /proc/lock_stat, which this program does not read yet"
            } else {
                "this kernel counts neither acquisitions nor hold times (no CONFIG_LOCK_STAT)"
            };
            rows.push(Row::cannot(table, &line, column, "", why));
        }
        let (count, ns) = seen.of(lock);
        let millis = ns as f64 / 1e6;
        rows.push(Row::new(table, &line, WAITED, "ms", vec![millis]));
        rows.push(Row::new(table, &line, WAITS, "", vec![count as f64]));
        rows.push(match count {
            0 => Row::cannot(table, &line, WAITED_EACH, "ms", "nobody waited"),
            _ => Row::new(table, &line, WAITED_EACH, "ms", vec![millis / count as f64]),
        });
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
        let rows = paper_rows(&Seen::default(), 4);
        assert_eq!(rows.len(), 18);
        assert!(rows.iter().all(|row| row.line == "4" && row.value.is_some() != row.why_not.is_some()));
        let waited = |row: &&Row| row.table == TABLE_1 && row.column == WAITS;
        assert_eq!(rows.iter().find(waited).unwrap().value, Some(0.0));
    }
}
