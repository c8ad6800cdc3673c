//! Table 3's question: what it costs to find a file by its descriptor. In a table of descriptors that one thread has, a call
//! borrows the file; in one that threads share, it takes a reference, an atomic operation on a line that all callers of the
//! file share; a file that is registered with io_uring is found without either.

use std::io::Write;
use std::net::UdpSocket;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use manylane_sys::uring::{Lookup, Lookups};
use manylane_sys::{cpu, process};

use super::{TABLE_3, TABLE_3_WRITES};
use crate::lab::{Row, Scale};
use crate::{bench, machine};

const CALL: &str = "recv() of an empty socket";
const NONE: &str = "io_uring request without a file";
const BY_NUMBER: &str = "io_uring request, descriptor";
const REGISTERED: &str = "io_uring request, registered file";

const OWN: &str = "own table";
const SHARED: &str = "shared table";
const BOTH: &str = "shared, two callers";

/// The paper's own experiment.
pub(super) const WRITES: &str = "a million writes of one byte";
/// Its columns: fget_light() takes no reference where nobody shares the table; before it, one was taken always.
pub(super) const LIGHT: &str = OWN;
pub(super) const ALWAYS: &str = SHARED;
const MILLION: u32 = 1_000_000;

/// Requests of one call.
const BATCH: u32 = 64;

/// One sample of each cell.
pub(super) fn rows(scale: &Scale, stop: &AtomicBool) -> Result<Vec<Row>> {
    let calls = if scale.quick { 30_000 } else { 1_000_000 };
    let mut rows = Vec::new();
    for (column, sharing) in [(OWN, Sharing::None), (SHARED, Sharing::Idle), (BOTH, Sharing::Busy)] {
        bench::go_on(stop)?;
        let measured = measure(sharing, calls)?;
        rows.extend(measured.into_iter().map(|(line, ns)| match ns {
            Ok(ns) => Row::new(TABLE_3, line, column, "ns", vec![ns]),
            Err(why) => Row::cannot(TABLE_3, line, column, "ns", &why),
        }));
    }
    let writes = if scale.quick { MILLION / 10 } else { MILLION };
    for (column, sharing) in [(LIGHT, Sharing::None), (ALWAYS, Sharing::Idle)] {
        bench::go_on(stop)?;
        let ns = in_table(sharing, |_| write(writes))?;
        let seconds = ns / f64::from(writes) * f64::from(MILLION) / 1e9;
        rows.push(Row::new(TABLE_3_WRITES, WRITES, column, "s", vec![seconds]));
    }
    Ok(rows)
}

/// Nanoseconds of processor time for so many writes of a byte, each a call.
fn write(count: u32) -> Result<f64> {
    let mut file = tempfile::tempfile().context("cannot create a temporary file")?;
    let before = cpu::thread_time();
    (0..count).try_for_each(|_| file.write_all(&[0])).context("cannot write to a temporary file")?;
    Ok(cpu::thread_time().saturating_sub(before).as_nanos() as f64)
}

/// Who else has the table.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sharing {
    /// Nobody.
    None,
    /// A thread that sleeps.
    Idle,
    /// A thread that calls with the same descriptor all the time.
    Busy,
}

/// All lines, in a table of descriptors that is a copy of the process's.
fn measure(sharing: Sharing, calls: u32) -> Result<Vec<(&'static str, Result<f64, String>)>> {
    if sharing == Sharing::Busy && machine::allowed_cpus().len() < 2 {
        let why = || Err("there is one processor".to_owned());
        return Ok([CALL, NONE, BY_NUMBER, REGISTERED].map(|line| (line, why())).to_vec());
    }
    in_table(sharing, |socket| all(socket, calls))
}

/// Does `work` on a thread whose table of descriptors is shared in such a way, and is no other's of this process.
fn in_table<T: Send>(sharing: Sharing, work: impl FnOnce(&UdpSocket) -> Result<T> + Send) -> Result<T> {
    let cpus = machine::allowed_cpus();
    let (first, second) = (cpus[0], cpus.get(1).copied());
    thread::scope(|scope| {
        let worker = scope.spawn(move || {
            process::own_descriptors().context("cannot have a table of descriptors of one's own")?;
            cpu::pin(first).context("cannot pin a thread")?;
            let socket = UdpSocket::bind("127.0.0.1:0").context("cannot bind a socket")?;
            socket.set_nonblocking(true)?;
            let over = AtomicBool::new(false);
            thread::scope(|scope| {
                if sharing != Sharing::None {
                    scope.spawn(|| beside(sharing, second, &socket, &over));
                }
                let done = work(&socket);
                over.store(true, Ordering::Relaxed);
                done
            })
        });
        worker.join().map_err(|_| anyhow!("a thread panicked"))?
    })
}

/// The other thread, until it is over.
fn beside(sharing: Sharing, cpu: Option<usize>, socket: &UdpSocket, over: &AtomicBool) {
    if let Some(cpu) = cpu {
        // Elsewhere it is a neighbour all the same.
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

fn all(socket: &UdpSocket, calls: u32) -> Result<Vec<(&'static str, Result<f64, String>)>> {
    let mut byte = [0];
    let start = Instant::now();
    for _ in 0..calls {
        let _ = socket.recv(&mut byte);
    }
    let ns = start.elapsed().as_nanos() as f64 / f64::from(calls);
    let mut lines = vec![(CALL, Ok(ns))];
    for (line, how) in
        [(NONE, Lookup::None), (BY_NUMBER, Lookup::Descriptor), (REGISTERED, Lookup::Registered)]
    {
        lines.push((line, requests(socket.as_fd(), how, calls)));
    }
    Ok(lines)
}

fn requests(socket: BorrowedFd<'_>, how: Lookup, calls: u32) -> Result<f64, String> {
    let why = |err: std::io::Error| match how {
        Lookup::None => format!("io_uring: {err}"),
        _ => format!("requests that only look up a file (Linux 6.13): {err}"),
    };
    let mut lookups = Lookups::new(socket, BATCH).map_err(why)?;
    lookups.run(how).map_err(why)?;
    let (start, mut done) = (Instant::now(), 0);
    while done < calls {
        done += lookups.run(how).map_err(why)?;
    }
    Ok(start.elapsed().as_nanos() as f64 / f64::from(done))
}

/// What a lookup costs by itself: requests with a file, less those without.
pub(super) fn lookup_cost(rows: &crate::lab::Rows<'_>, registered: bool, column: Column) -> Option<f64> {
    let column = match column {
        Column::Own => OWN,
        Column::Shared => SHARED,
        Column::Both => BOTH,
    };
    let line = if registered { REGISTERED } else { BY_NUMBER };
    Some(rows.value(TABLE_3, line, column)? - rows.value(TABLE_3, NONE, column)?)
}

/// Seconds of the paper's own experiment.
pub(super) fn write_cost(rows: &crate::lab::Rows<'_>) -> Option<[(f64, f64); 2]> {
    let at = |column| {
        Some((rows.value(TABLE_3_WRITES, WRITES, column)?, rows.printed(TABLE_3_WRITES, WRITES, column)?))
    };
    Some([at(LIGHT)?, at(ALWAYS)?])
}

/// What a call costs.
pub(super) fn call_cost(rows: &crate::lab::Rows<'_>, column: Column) -> Option<f64> {
    let column = match column {
        Column::Own => OWN,
        Column::Shared => SHARED,
        Column::Both => BOTH,
    };
    rows.value(TABLE_3, CALL, column)
}

/// Columns of the table.
#[derive(Clone, Copy)]
pub(super) enum Column {
    Own,
    Shared,
    Both,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_has_a_figure_or_a_reason() {
        let rows = rows(&Scale::quick(), &AtomicBool::new(false)).unwrap();
        assert_eq!(rows.iter().filter(|row| row.table == TABLE_3).count(), 12);
        let writes: Vec<&Row> = rows.iter().filter(|row| row.table == TABLE_3_WRITES).collect();
        assert_eq!(writes.len(), 2);
        // Of a million, though a tenth of that is written.
        assert!(writes.iter().all(|row| row.value.is_some_and(|s| (0.01..100.0).contains(&s))), "{writes:?}");
        for row in &rows {
            assert!(row.value.is_some_and(|ns| ns > 0.0) || row.why_not.is_some(), "{row:?}");
        }
    }
}
