//! Table 2's question: the locks of a hot path. The paper counted acquisitions in a changed
//! kernel. A stock kernel reports waits for locks, and one with CONFIG_LOCK_STAT acquisitions.

use std::io::Write;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};

use super::TABLE_2;
use crate::lockstat::LockStatSession;
use crate::rivera::{ContentionSample, sample_contention, udp_readers};
use crate::{Row, Setups};
use manylane_bench as bench;

pub(super) const WRITE: &str = "write() of 4 KiB";
pub(super) const ACQUISITIONS: &str = "locks taken";
const CONTENTIONS: &str = "waits per million";
const SOCKET_CONTENTIONS: &str = "of them for the socket";

/// One observation of each receiver, with one thread and with two.
pub(super) fn rows(places: &mut Setups, stop: &AtomicBool) -> Result<Vec<Row>> {
    const NO_LOCK_STAT: &str =
        "a stock kernel does not count locks that are free when they are wanted (no CONFIG_LOCK_STAT)";
    let mut rows = vec![match locks_per_write() {
        Ok(Some(locks)) => Row::new(TABLE_2, WRITE, ACQUISITIONS, "", vec![locks]),
        Ok(None) => Row::unavailable(TABLE_2, WRITE, ACQUISITIONS, "", NO_LOCK_STAT),
        Err(err) => Row::unavailable(TABLE_2, WRITE, ACQUISITIONS, "", &format!("{err:#}")),
    }];
    for reader in udp_readers() {
        for threads in [1, 2] {
            bench::check_stop(stop)?;
            let line = format!("{}, {threads}", reader.name());
            match sample_contention(places, reader, threads, stop) {
                Ok(ContentionSample { contentions: seen, reading, lock_classes: taken }) => {
                    let units = reading.delivered.max(1) as f64;
                    rows.push(match taken {
                        Some(taken) => {
                            let locks = taken.total().acquisitions as f64 / units;
                            Row::new(TABLE_2, &line, ACQUISITIONS, "", vec![locks])
                        }
                        None => Row::unavailable(TABLE_2, &line, ACQUISITIONS, "", NO_LOCK_STAT),
                    });
                    let per = |count: u64| count as f64 * 1e6 / units;
                    let counts = [("contentions", seen.count()), ("delivered", reading.delivered)];
                    rows.push(
                        Row::new(TABLE_2, &line, CONTENTIONS, "", vec![per(seen.count())])
                            .with_counts(&counts),
                    );
                    rows.push(Row::new(
                        TABLE_2,
                        &line,
                        SOCKET_CONTENTIONS,
                        "",
                        vec![per(seen.socket_waits())],
                    ));
                }
                Err(err) => {
                    bench::check_stop(stop)?;
                    rows.push(Row::unavailable(TABLE_2, &line, CONTENTIONS, "", &format!("{err:#}")));
                }
            }
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
