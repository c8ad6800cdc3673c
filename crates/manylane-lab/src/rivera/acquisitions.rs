//! Locks of the receive path per datagram, of each receiver: acquisitions and contentions. It needs
//! a kernel with statistics of locks.

use super::lock_sample::ContentionSample;
use crate::lockstat::{
    LockClasses, LockStats, READER_QUEUE_CLASSES, RECV_QUEUE_CLASSES, SOCKET_CLASSES, WAIT_QUEUE_CLASSES,
};
use crate::row::Row;

// Names of the tables.
pub(super) const ACQUIRED: &str = "acquisitions";
pub(super) const CONTENDED: &str = "contentions";

/// The locks of a socket and their classes, in the order in which a datagram meets them.
const LOCKS: [(&str, &[&str]); 4] = [
    ("receive queue", &RECV_QUEUE_CLASSES),
    ("wait queue", &WAIT_QUEUE_CLASSES),
    (READER_QUEUE, &READER_QUEUE_CLASSES),
    ("whole socket", &SOCKET_CLASSES),
];
const READER_QUEUE: &str = "readers' queue";

/// The cells of a receiver with this number of threads.
pub(super) fn rows(reader: &str, threads: usize, seen: Result<&ContentionSample, &str>) -> Vec<Row> {
    let counted = seen.and_then(|seen| {
        const NO_LOCK_STAT: &str = "this kernel does not count acquisitions (needs CONFIG_LOCK_STAT)";
        Ok((seen.lock_classes.as_ref().ok_or(NO_LOCK_STAT)?, seen.reading.delivered))
    });
    let (classes, delivered) = match counted {
        Ok(counted) => counted,
        Err(why) => {
            let cell = |table| Row::unavailable(table, reader, &threads.to_string(), "", why);
            return vec![cell(ACQUIRED), cell(CONTENDED)];
        }
    };
    let cells = |(lock, names)| {
        cells(&format!("{reader}: {lock}"), threads, delivered, count_class(classes, lock, names))
    };
    LOCKS.into_iter().flat_map(cells).collect()
}

/// A class that the kernel does not list has no acquisitions yet. Every datagram passes the
/// readers' queue, so if that one is not listed, it has no name.
fn count_class(classes: &LockClasses, lock: &str, names: &[&str]) -> Result<LockStats, &'static str> {
    if lock == READER_QUEUE && !classes.has_any(names) {
        return Err("the lock has no name in this kernel (see docs/lab.md)");
    }
    Ok(classes.total_of(names))
}

fn cells(line: &str, threads: usize, delivered: u64, sum: Result<LockStats, &str>) -> [Row; 2] {
    let column = threads.to_string();
    let cell = |table, scale: f64, count: fn(LockStats) -> u64| {
        let each = sum.map(|sum| scale * count(sum) as f64 / delivered.max(1) as f64);
        let counts =
            sum.map_or_else(|_| Vec::new(), |sum| vec![("locks", count(sum)), ("datagrams", delivered)]);
        Row::measured(table, line, &column, "", each).with_counts(&counts)
    };
    [cell(ACQUIRED, 1.0, |sum| sum.acquisitions), cell(CONTENDED, 1e6, |sum| sum.contentions)]
}

#[cfg(test)]
mod tests {
    use super::super::reading::ReadSample;
    use super::*;
    use crate::locks::Contentions;

    #[test]
    fn counts_are_per_delivered_datagram() {
        let classes = LockClasses::parse(include_str!("../lockstat/documented.txt")).unwrap();
        let mut seen = ContentionSample {
            contentions: Contentions::default(),
            reading: ReadSample { delivered: 1_000_000, ..ReadSample::default() },
            lock_classes: Some(classes),
        };
        let found = rows("lane/mmsg", 4, Ok(&seen));
        assert_eq!(found.len(), 2 * LOCKS.len());
        let cell = |table: &str, lock: &str| {
            let line = format!("lane/mmsg: {lock}");
            let row = found.iter().find(|row| (&*row.table, &row.line) == (table, &line)).unwrap();
            assert_eq!(row.column, "4");
            (row.value, row.why_not.is_some())
        };
        assert_eq!(cell(ACQUIRED, "receive queue"), (Some(3.000_021), false));
        assert_eq!(cell(CONTENDED, "receive queue"), (Some(430.0), false));
        assert_eq!(cell(ACQUIRED, "wait queue"), (Some(0.0), false), "not listed: never acquired");
        assert_eq!(cell(ACQUIRED, READER_QUEUE), (None, true), "not listed: without a name");

        seen.lock_classes = None;
        for (seen, why) in [(Ok(&seen), "CONFIG_LOCK_STAT"), (Err("no device"), "no device")] {
            let found = rows("lane/xdp", 2, seen);
            let tables: Vec<&str> = found.iter().map(|row| &*row.table).collect();
            assert_eq!(tables, [ACQUIRED, CONTENDED]);
            assert!(found.iter().all(|row| row.why_not.as_ref().is_some_and(|text| text.contains(why))));
        }
    }
}
