//! Table 2's question: the locks of a hot path. The paper counted acquisitions in a modified
//! kernel. A stock kernel reports waits for locks. One with CONFIG_LOCK_STAT also reports
//! acquisitions.

use std::io::Write;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use manylane_bench as bench;

use crate::lockstat::LockStatSession;
use crate::part::Setups;
use crate::rivera::{ContentionSample, sample_contention, udp_readers};
use crate::row::Row;

/// Name of the table.
pub(super) const TABLE_2: &str = "table 2";

pub(super) const WRITE: &str = "write() of 4 KiB";
pub(super) const ACQUISITIONS: &str = "locks taken";
const CONTENTIONS: &str = "waits per million";
const SOCKET_CONTENTIONS: &str = "of these, the socket's";

/// One observation of each receiver, with one thread and with two.
pub(super) fn rows(places: &mut Setups, stop: &AtomicBool) -> Result<Vec<Row>> {
    const NO_LOCK_STAT: &str = "this kernel does not count uncontended locks (needs CONFIG_LOCK_STAT)";
    let cell = |line: &str, column: &str, value: Result<f64>| Row::measured(TABLE_2, line, column, "", value);
    let mut rows =
        vec![cell(WRITE, ACQUISITIONS, locks_per_write().and_then(|locks| locks.context(NO_LOCK_STAT)))];
    for reader in udp_readers() {
        for threads in [1, 2] {
            bench::check_stop(stop)?;
            let line = format!("{}, {threads}", reader.name());
            let seen = match sample_contention(places, reader, threads, stop) {
                Ok(seen) => seen,
                Err(err) => {
                    rows.push(cell(&line, CONTENTIONS, Err(err)));
                    continue;
                }
            };
            let ContentionSample { contentions: seen, reading, lock_classes: taken } = seen;
            let per_unit = |count: u64| count as f64 / reading.delivered.max(1) as f64;
            let taken = taken.map(|taken| per_unit(taken.total().acquisitions)).context(NO_LOCK_STAT);
            let counts = [("contentions", seen.count()), ("delivered", reading.delivered)];
            rows.extend([
                cell(&line, ACQUISITIONS, taken),
                cell(&line, CONTENTIONS, Ok(1e6 * per_unit(seen.count()))).with_counts(&counts),
                cell(&line, SOCKET_CONTENTIONS, Ok(1e6 * per_unit(seen.socket_waits()))),
            ]);
        }
    }
    Ok(rows)
}

/// Acquisitions for a write of 4 KiB, if the kernel counts them.
fn locks_per_write() -> Result<Option<f64>> {
    const WRITES: u32 = 1000;
    let mut file = tempfile::tempfile().context("cannot create a temporary file")?;
    let Some(counting) = LockStatSession::start()? else { return Ok(None) };
    for _ in 0..WRITES {
        file.write_all(&[0; 4096]).context("cannot write to a temporary file")?;
    }
    Ok(Some(counting.read()?.total().acquisitions as f64 / f64::from(WRITES)))
}
