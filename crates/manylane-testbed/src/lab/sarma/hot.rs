//! Table 2's question: which locks a hot path meets. The paper counted locks taken in a changed kernel; a stock kernel tells of
//! locks that somebody waits for.

use std::sync::atomic::AtomicBool;

use anyhow::Result;

use super::TABLE_2;
use crate::bench;
use crate::lab::rivera::{look, usual};
use crate::lab::{Places, Row};

pub(super) const WRITE: &str = "write() of 4 KiB, ext3";
pub(super) const TAKEN: &str = "locks taken";
const WAITS: &str = "waits per million";
const SHARE: &str = "of them for the socket";

/// One look at each way to receive, with one thread and with two.
pub(super) fn rows(places: &mut Places, stop: &AtomicBool) -> Result<Vec<Row>> {
    const WHY: &str = "a stock kernel does not count locks that are free when they are wanted";
    let mut rows = vec![Row::cannot(TABLE_2, WRITE, TAKEN, "", WHY)];
    for reader in usual() {
        for threads in [1, 2] {
            bench::go_on(stop)?;
            let line = format!("{}, {threads}", reader.name());
            rows.push(Row::cannot(TABLE_2, &line, TAKEN, "", WHY));
            match look(places, reader, threads, stop) {
                Ok((seen, reading)) => {
                    let units = reading.delivered.max(1) as f64;
                    let per = |count: u64| count as f64 * 1e6 / units;
                    let counts = [("contentions", seen.count()), ("delivered", reading.delivered)];
                    rows.push(Row::new(TABLE_2, &line, WAITS, "", vec![per(seen.count())]).with(&counts));
                    rows.push(Row::new(TABLE_2, &line, SHARE, "", vec![per(seen.of_sockets())]));
                }
                Err(err) => {
                    bench::go_on(stop)?;
                    rows.push(Row::cannot(TABLE_2, &line, WAITS, "", &format!("{err:#}")));
                }
            }
        }
    }
    Ok(rows)
}

/// Waits for locks in all, and for those of sockets alone, of one line.
pub(super) fn waits(rows: &crate::lab::Rows<'_>, line: &str) -> Option<(f64, f64)> {
    Some((rows.value(TABLE_2, line, WAITS)?, rows.value(TABLE_2, line, SHARE)?))
}
