//! Table 3's question: the cost of finding a file by its descriptor. If only one thread has the
//! descriptor table, a call uses the file without a reference. If threads share the table, it takes
//! a reference: an atomic operation on a line that all callers of the file share. A file that is
//! registered with io_uring is found without either.

use std::io::Write;
use std::net::UdpSocket;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};
use manylane_bench::{self as bench, run_pinned};
use manylane_measure::machine;
use manylane_sys::uring::{Lookup, LookupRing};
use manylane_sys::{cpu, process};

use crate::row::Row;
use crate::settings::Scale;

// Names of the tables.
pub(super) const TABLE_3: &str = "table 3";
pub(super) const TABLE_3_WRITES: &str = "table 3, writes";

const RECV_CALL: &str = "recv() of an empty socket";
const NO_FILE: &str = "io_uring request without a file";
const BY_DESCRIPTOR: &str = "io_uring request, descriptor";
const REGISTERED: &str = "io_uring request, registered file";

pub(super) const OWN_TABLE: &str = "own table";
const SHARED_TABLE: &str = "shared table";
const SHARED_BUSY: &str = "shared, two callers";

/// The paper's own experiment.
pub(super) const WRITES: &str = "a million writes of one byte";
/// Its columns: fget_light() takes no reference if the table is not shared. Without it, a
/// reference is always taken.
pub(super) const FGET_LIGHT: &str = OWN_TABLE;
pub(super) const FGET: &str = SHARED_TABLE;
const MILLION: u32 = 1_000_000;

/// Requests of one call.
const BATCH_SIZE: u32 = 64;

/// One sample of each cell.
pub(super) fn rows(scale: &Scale, stop: &AtomicBool) -> Result<Vec<Row>> {
    let calls = if scale.quick { 30_000 } else { 1_000_000 };
    let mut rows = Vec::new();
    for (column, sharing) in
        [(OWN_TABLE, Sharing::None), (SHARED_TABLE, Sharing::Idle), (SHARED_BUSY, Sharing::Busy)]
    {
        bench::check_stop(stop)?;
        let measured = measure(sharing, calls)?;
        let row = |(line, ns)| Row::measured(TABLE_3, line, column, "ns", ns);
        rows.extend(measured.into_iter().map(row));
    }
    let writes = if scale.quick { MILLION / 10 } else { MILLION };
    for (column, sharing) in [(FGET_LIGHT, Sharing::None), (FGET, Sharing::Idle)] {
        bench::check_stop(stop)?;
        let ns = run_in_fd_table(sharing, |_| measure_writes(writes))?;
        let seconds = ns / f64::from(writes) * f64::from(MILLION) / 1e9;
        rows.push(Row::new(TABLE_3_WRITES, WRITES, column, "s", vec![seconds]));
    }
    Ok(rows)
}

/// CPU time in nanoseconds of a number of one-byte writes, each a call.
fn measure_writes(count: u32) -> Result<f64> {
    let mut file = tempfile::tempfile().context("cannot create a temporary file")?;
    let before = cpu::thread_cpu_time();
    (0..count).try_for_each(|_| file.write_all(&[0])).context("cannot write to a temporary file")?;
    Ok(cpu::thread_cpu_time().saturating_sub(before).as_nanos() as f64)
}

/// The other thread with the same table.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sharing {
    /// None.
    None,
    /// A thread that sleeps.
    Idle,
    /// A thread that makes calls with the same descriptor all the time.
    Busy,
}

/// All lines, in a copy of the process's descriptor table.
fn measure(sharing: Sharing, calls: u32) -> Result<Vec<(&'static str, Result<f64, String>)>> {
    if sharing == Sharing::Busy && machine::allowed_cpus().len() < 2 {
        let why = || Err("there is one CPU".to_owned());
        return Ok([RECV_CALL, NO_FILE, BY_DESCRIPTOR, REGISTERED].map(|line| (line, why())).to_vec());
    }
    run_in_fd_table(sharing, |socket| measure_lines(socket, calls))
}

/// Runs `work` on a thread whose descriptor table is shared only in this way, with no other thread
/// of this process.
fn run_in_fd_table<T: Send>(
    sharing: Sharing,
    work: impl FnOnce(&UdpSocket) -> Result<T> + Send,
) -> Result<T> {
    let cpus = machine::allowed_cpus();
    let (first, second) = (cpus[0], cpus.get(1).copied());
    run_pinned(Some(first), || {
        process::unshare_fd_table().context("cannot unshare the descriptor table")?;
        let socket = UdpSocket::bind("127.0.0.1:0").context("cannot bind a socket")?;
        socket.set_nonblocking(true)?;
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            if sharing != Sharing::None {
                scope.spawn(|| run_sharer(sharing, second, &socket, &over));
            }
            let done = work(&socket);
            over.store(true, Ordering::Relaxed);
            done
        })
    })
}

/// The other thread, until it ends.
fn run_sharer(sharing: Sharing, cpu: Option<usize>, socket: &UdpSocket, over: &AtomicBool) {
    if let Some(cpu) = cpu {
        // If it cannot be pinned, it still shares the table.
        let _ = cpu::pin(cpu);
    }
    let mut byte = [0];
    while !over.load(Ordering::Relaxed) {
        match sharing {
            Sharing::Busy => _ = socket.recv(&mut byte),
            _ => thread::sleep(std::time::Duration::from_millis(5)),
        }
    }
}

fn measure_lines(socket: &UdpSocket, calls: u32) -> Result<Vec<(&'static str, Result<f64, String>)>> {
    let mut byte = [0];
    let start = Instant::now();
    for _ in 0..calls {
        let _ = socket.recv(&mut byte);
    }
    let ns = start.elapsed().as_nanos() as f64 / f64::from(calls);
    let mut lines = vec![(RECV_CALL, Ok(ns))];
    for (line, how) in
        [(NO_FILE, Lookup::None), (BY_DESCRIPTOR, Lookup::Descriptor), (REGISTERED, Lookup::Registered)]
    {
        lines.push((line, measure_requests(socket.as_fd(), how, calls)));
    }
    Ok(lines)
}

fn measure_requests(socket: BorrowedFd<'_>, how: Lookup, calls: u32) -> Result<f64, String> {
    let why = |err: std::io::Error| match how {
        Lookup::None => format!("io_uring: {err}"),
        _ => format!("file lookups by io_uring need Linux 6.13: {err}"),
    };
    let mut lookups = LookupRing::new(socket, BATCH_SIZE).map_err(why)?;
    lookups.run(how).map_err(why)?;
    let (start, mut done) = (Instant::now(), 0);
    while done < calls {
        done += lookups.run(how).map_err(why)?;
    }
    Ok(start.elapsed().as_nanos() as f64 / f64::from(done))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Paper;
    use crate::table::assert_compared;

    #[test]
    fn every_cell_has_a_figure_or_a_reason() {
        let rows = rows(&Scale::quick(), &AtomicBool::new(false)).unwrap();
        assert_eq!(rows.iter().filter(|row| row.table == TABLE_3).count(), 12);
        let writes: Vec<&Row> = rows.iter().filter(|row| row.table == TABLE_3_WRITES).collect();
        assert_eq!(writes.len(), 2);
        // Scaled to a million; a tenth of that is written.
        assert!(writes.iter().all(|row| row.value.is_some_and(|s| (0.01..100.0).contains(&s))), "{writes:?}");
        for row in &rows {
            assert!(row.value.is_some_and(|ns| ns > 0.0) || row.why_not.is_some(), "{row:?}");
        }
        assert_compared(Paper::Sarma, TABLE_3, &rows);
        assert_compared(Paper::Sarma, TABLE_3_WRITES, &rows);
    }
}
