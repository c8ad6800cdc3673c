//! Orlowsky: message headers that the kernel stores, so that no call copies them. The table of the
//! paper repeats four numbers, and its experiment between two hosts was not run. Both experiments
//! are here, on an unmodified kernel: headers and buffers are registered with io_uring or built
//! once, or with the kernel module, where it is loaded.

use std::sync::atomic::AtomicBool;

use anyhow::Result;
use manylane_bench::Options;
use manylane_bench::experiments::batch::{self, Plan, RecvMethod};
use manylane_sys::kernel_module;

use crate::paper_table::{Baseline, Plot, Table};
use crate::part::{Part, Setups, SilentController};
use crate::row::Row;
use crate::settings::Scale;

const LOCAL_TABLE: &str = "local experiment";
const REAL_WORLD_TABLE: &str = "real-world experiment";

/// Bytes of a message, as in the paper.
const MESSAGE_SIZES: [usize; 4] = [64, 256, 1024, 8192];
/// Maximum number of messages of a call, the last as in the paper.
const MESSAGES_PER_CALL: [usize; 3] = [1, 64, 1000];
/// A value of the paper. `recvmmsg` accepts at most 1024 (UIO_MAXIOV).
const UNSUPPORTED_BATCHES: [usize; 3] = [10_000, 100_000, 1_000_000];
/// The method of a regular kernel.
const BASELINE: &str = "socket/recvmmsg";
/// Seconds for the paper's 100 million messages, per nanosecond of one.
const SECONDS_PER_NANO: f64 = 0.1;

pub(super) fn tables() -> Vec<Table> {
    let table = |name, title| {
        Table::new(name, title, Some(Plot::Bars("receiver"))).compared_with(Baseline::Column(BASELINE))
    };
    vec![
        table(LOCAL_TABLE, "Local experiment: seconds of CPU time to receive 100 million queued messages"),
        table(REAL_WORLD_TABLE, "Real-world experiment: the same between two hosts of the testbed"),
    ]
}

/// A part for each round of each size.
pub(super) fn parts(scale: &Scale) -> Vec<Part> {
    let mut parts = Vec::new();
    for round in 1..=scale.rounds {
        for (name, table) in [("local", LOCAL_TABLE), ("real-world", REAL_WORLD_TABLE)] {
            for size in MESSAGE_SIZES {
                let id = format!("orlowsky/{name}/{size}-bytes/round-{round}");
                parts.push(Part::new(id, move |places, stop| Ok(rows(places, table, size, stop))));
            }
        }
    }
    parts
}

fn line_name(size: usize, messages: usize) -> String {
    format!("{size} bytes, {messages} per call")
}

/// Loopback has no device, and the kernel module has a column only where it is loaded.
fn is_measured(by: RecvMethod, table: &str) -> bool {
    !(by.needs_device() && table == LOCAL_TABLE) && (!by.needs_module() || kernel_module::is_loaded())
}

/// One sample of each receiver, by messages per call.
fn rows(places: &mut Setups, table: &str, size: usize, stop: &AtomicBool) -> Vec<Row> {
    let mut rows = Vec::new();
    for messages in MESSAGES_PER_CALL {
        for by in RecvMethod::ALL {
            if !is_measured(by, table) {
                continue;
            }
            let (line, column) = (line_name(size, messages), by.name());
            rows.push(match sample(places, table, by, (size, messages), stop) {
                Ok((samples, counts)) => Row::new(table, &line, column, "s", samples).with_counts(&counts),
                Err(err) => Row::unavailable(table, &line, column, "s", &format!("{err:#}")),
            });
        }
    }
    for messages in UNSUPPORTED_BATCHES {
        let why = "recvmmsg receives at most 1024 messages per call (UIO_MAXIOV): see the row for 1000";
        rows.push(Row::unavailable(table, &line_name(size, messages), BASELINE, "s", why));
    }
    rows
}

/// Seconds of each sample, and the numbers of messages that were sent and delivered.
type SampleCounts = (Vec<f64>, [(&'static str, u64); 2]);

fn sample(
    places: &mut Setups,
    table: &str,
    by: RecvMethod,
    (size, messages): (usize, usize),
    stop: &AtomicBool,
) -> Result<SampleCounts> {
    let quick = places.scale.quick;
    let setup = match table {
        REAL_WORLD_TABLE => {
            anyhow::ensure!(size <= 1400, "a frame of the testbed carries at most 1500 bytes");
            places.testbed()?
        }
        _ => places.loopback(),
    };
    let options = Options { sizes: vec![size], quick, ..Options::new(Vec::new()) };
    let plan = Plan { methods: vec![by], messages: vec![messages], fills: if quick { 1 } else { 4 } };
    let run = batch::run(setup, &options, &plan, &mut SilentController(stop))?;
    let samples = run.rows.iter().flat_map(|row| &row.samples);
    let (mut seconds, mut sent, mut delivered) = (Vec::new(), 0, 0);
    for sample in samples {
        seconds.push(sample.rx_cpu_ns * SECONDS_PER_NANO);
        sent += sample.sent;
        delivered += sample.delivered;
    }
    Ok((seconds, [("sent", sent), ("delivered", delivered)]))
}

pub(super) fn differences() -> Vec<String> {
    [
        "The paper's table has four pairs of numbers (87837 and 787, 78 and 5415, 778 and 7507 twice), the same for every size. They are placeholders, and are omitted here. Its real-world section is empty.",
        "module/remembered is the paper's own change, without its limits: the kernel module stores the headers, and calls pass a count. It has a column where the module is loaded (kernel/README.md).",
        "Otherwise the kernel is not modified. With socket/recvmmsg, user space builds the headers once, and each call copies them into the kernel. With io_uring (uring/plain, lane/uring), headers, buffers and the socket are registered once, and no headers are copied into the kernel: this was the purpose of the paper's system call. uring/single submits each receive separately.",
        "The paper receives 1,000 to 1,000,000 messages per call. recvmmsg receives at most 1024 (UIO_MAXIOV), so only the paper's 1,000 can be measured, of which lane/uring receives 128 at a time. The table also has 1 and 64.",
        "The time is the CPU time of the receiving thread while it drains full queues, scaled to the paper's 100 million messages. The paper's time includes the sender.",
        "A frame of the testbed cannot carry 8192 bytes.",
    ]
    .map(String::from)
    .to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Paper;
    use crate::table::assert_compared;

    #[test]
    fn loopback_all_messages_are_received() {
        let scale = Scale { rounds: 1, ..Scale::quick() };
        let mut places = Setups::new(scale);
        let rows = rows(&mut places, LOCAL_TABLE, 64, &AtomicBool::new(false));
        let here = RecvMethod::ALL.iter().filter(|by| is_measured(**by, LOCAL_TABLE)).count();
        assert_eq!(rows.len(), MESSAGES_PER_CALL.len() * here + UNSUPPORTED_BATCHES.len());
        assert!(rows.iter().all(|row| row.value.is_some() != row.why_not.is_some()));
        let taken = rows.iter().filter(|row| row.value.is_some());
        let taken: Vec<&Row> =
            taken.filter(|row| row.column == BASELINE || row.column == "lane/mmsg").collect();
        assert_eq!(taken.len(), 2 * MESSAGES_PER_CALL.len());
        for row in taken {
            assert_eq!(row.counts["sent"], 2048, "{row:?}");
            assert_eq!(row.counts["delivered"], 2048, "{row:?}");
        }
        assert_compared(Paper::Orlowsky, LOCAL_TABLE, &rows);
        // The other table has the same columns.
        let elsewhere = rows.into_iter().map(|row| Row { table: REAL_WORLD_TABLE.into(), ..row });
        assert_compared(Paper::Orlowsky, REAL_WORLD_TABLE, &elsewhere.collect::<Vec<_>>());
    }
}
