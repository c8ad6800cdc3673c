//! Table 2's question: which locks a hot path meets. The paper counted locks taken in a changed kernel; a stock kernel tells of
//! locks that somebody waits for, and one with CONFIG_LOCK_STAT how many were taken.

use std::io::Write;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};

use super::TABLE_2;
use crate::bench;
use crate::lab::lockstat::Counting;
use crate::lab::rivera::{Looked, look, usual};
use crate::lab::{Places, Row};

pub(super) const WRITE: &str = "write() of 4 KiB";
pub(super) const TAKEN: &str = "locks taken";
const WAITS: &str = "waits per million";
const SHARE: &str = "of them for the socket";

/// One look at each way to receive, with one thread and with two.
pub(super) fn rows(places: &mut Places, stop: &AtomicBool) -> Result<Vec<Row>> {
    const WHY: &str =
        "a stock kernel does not count locks that are free when they are wanted (no CONFIG_LOCK_STAT)";
    let mut rows = vec![match written() {
        Ok(Some(locks)) => Row::new(TABLE_2, WRITE, TAKEN, "", vec![locks]),
        Ok(None) => Row::cannot(TABLE_2, WRITE, TAKEN, "", WHY),
        Err(err) => Row::cannot(TABLE_2, WRITE, TAKEN, "", &format!("{err:#}")),
    }];
    for reader in usual() {
        for threads in [1, 2] {
            bench::go_on(stop)?;
            let line = format!("{}, {threads}", reader.name());
            match look(places, reader, threads, stop) {
                Ok(Looked { seen, reading, taken }) => {
                    let units = reading.delivered.max(1) as f64;
                    rows.push(match taken {
                        Some(taken) => {
                            let locks = taken.all().acquisitions as f64 / units;
                            Row::new(TABLE_2, &line, TAKEN, "", vec![locks])
                        }
                        None => Row::cannot(TABLE_2, &line, TAKEN, "", WHY),
                    });
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

/// Locks that the machine takes for a write of 4 KiB, where the kernel counts them.
fn written() -> Result<Option<f64>> {
    const WRITES: u32 = 1000;
    let mut file = tempfile::tempfile().context("cannot create a temporary file")?;
    let Some(counting) = Counting::start()? else { return Ok(None) };
    for _ in 0..WRITES {
        file.write_all(&[0; 4096]).context("cannot write to a temporary file")?;
    }
    Ok(Some(counting.read()?.all().acquisitions as f64 / f64::from(WRITES)))
}

/// Waits for locks in all, and for those of sockets alone, of one line.
pub(super) fn waits(rows: &crate::lab::Rows<'_>, line: &str) -> Option<(f64, f64)> {
    Some((rows.value(TABLE_2, line, WAITS)?, rows.value(TABLE_2, line, SHARE)?))
}
