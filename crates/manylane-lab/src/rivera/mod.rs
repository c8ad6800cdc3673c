//! Rivera and others: several threads do not read one UDP socket faster than one. The tables show
//! the locks that serialize them.
//!
//! | module | reproduces |
//! |---|---|
//! | `reading` | one cell of figures 2 and 4: a number of units, read by a number of threads |
//! | `lock_sample` | what the kernel tells of locks while they are read |
//! | `contention` | Tables I to III, and the callers that wait |
//! | `acquisitions` | locks of the receive path per datagram, of each receiver |

mod acquisitions;
mod contention;
mod lock_sample;
mod reading;

use manylane::Steering;
use manylane_bench as bench;
use manylane_bench::receivers::Kind;
use manylane_bench::stats::interleaved;
use manylane_sys::kernel_module;

use self::acquisitions::{ACQUIRED, CONTENDED};
use self::contention::{
    ACQUISITIONS, CALLERS, CONTENTIONS, HOLD_TIME, HOLD_TIME_MEAN, TABLE_1, TABLE_2, TABLE_3, WAIT_TIME,
    WAIT_TIME_MEAN,
};
pub(super) use self::lock_sample::{ContentionSample, sample_contention};
use self::reading::{Reader, UNIT_SIZE};
use crate::lockstat;
use crate::number::format_number;
use crate::paper::PaperValue;
use crate::paper_table::{Baseline, Plot, Table};
use crate::part::Part;
use crate::row::Row;
use crate::settings::Scale;

// Names of the tables of figures.
const FIGURE_2: &str = "figure 2";
const FIGURE_2_CPU: &str = "figure 2, CPU time";
const FIGURE_4: &str = "figure 4";

/// Numbers of reading threads.
const READER_COUNTS: [usize; 4] = [1, 2, 4, 8];

/// Flows of figure 2: enough for the kernel's hash to give each of eight sockets some.
const FLOWS: u16 = 64;

/// The readers of figure 2, whose locks are counted, too. A further kind of receiver is added here.
fn readers() -> Vec<Reader> {
    let udp = |kind| Reader::Udp(kind, Steering::Flow, FLOWS);
    available(vec![
        Reader::Pipe,
        udp(Kind::SocketRecvfrom),
        udp(Kind::ModuleRecvfrom),
        udp(Kind::SocketRecvmmsg),
        udp(Kind::ReuseportRecvmmsg),
        udp(Kind::LaneMmsg),
        udp(Kind::LaneUring),
        udp(Kind::LaneXdp),
    ])
}

/// Those of `readers` that are measured here: with the kernel module only where it is loaded.
fn available(mut readers: Vec<Reader>) -> Vec<Reader> {
    readers.retain(|reader| {
        !matches!(reader, Reader::Udp(kind, ..) if kind.needs_module()) || kernel_module::is_loaded()
    });
    readers
}

/// The receivers for which another paper's question is measured, too.
pub(super) fn udp_readers() -> Vec<Reader> {
    readers().into_iter().filter(|reader| *reader != Reader::Pipe).collect()
}

/// The readers of figure 4: all units are from one source, as in the paper.
fn queue_readers() -> Vec<Reader> {
    available(vec![
        Reader::Udp(Kind::SocketRecvfrom, Steering::Flow, 1),
        Reader::Udp(Kind::ModuleRecvfrom, Steering::RoundRobin, 1),
        Reader::Udp(Kind::ReuseportRecvmmsg, Steering::Flow, 1),
        Reader::Udp(Kind::LaneMmsg, Steering::RoundRobin, 1),
        Reader::Udp(Kind::LaneUring, Steering::RoundRobin, 1),
        // The device selects the queue, and so the lane.
        Reader::Udp(Kind::LaneXdp, Steering::Flow, 1),
    ])
}

pub(super) fn tables(scale: &Scale) -> Vec<Table> {
    let units = format_number(scale.units as f64);
    let what = format!("{units} units of {UNIT_SIZE} bytes");
    let lines = Some(Plot::Lines("reading threads"));
    let shared = Baseline::Line("socket/recvfrom");
    vec![
        Table::new(FIGURE_2, format!("Figure 2: seconds to read {what}, by reading threads"), lines)
            .compared_with(shared),
        Table::new(
            FIGURE_2_CPU,
            "In addition to figure 2: nanoseconds of CPU time of the reading threads, per unit",
            lines,
        )
        .compared_with(shared),
        Table::new(
            FIGURE_4,
            format!("Figure 4: seconds to read {what} from one source: one queue, and a queue per thread"),
            lines,
        )
        .compared_with(shared),
        Table::new(TABLE_1, format!("Table I: lock of the receive queue, one socket, {what}"), None),
        Table::new(TABLE_2, format!("Table II: lock of the whole socket, one socket, {what}"), None),
        Table::new(TABLE_3, "Table III: lock of the receive queue, without memory accounting", None),
        Table::new(ACQUIRED, "Acquisitions of locks per datagram, by reading threads", None),
        Table::new(CONTENDED, "Contentions of locks per million datagrams, by reading threads", None),
        Table::new(
            CALLERS,
            format!("Waits for locks by caller, {what}: contentions per million units, and time"),
            None,
        ),
    ]
}

/// Every round of each figure is a separate part for each number of threads. The lock statistics
/// are one part for each number.
pub(super) fn parts(scale: &Scale) -> Vec<Part> {
    let mut parts = Vec::new();
    for (figure, tables, who) in [
        ("figure2", (FIGURE_2, Some(FIGURE_2_CPU)), readers as fn() -> Vec<Reader>),
        ("figure4", (FIGURE_4, None), queue_readers as fn() -> Vec<Reader>),
    ] {
        for (round, order) in interleaved(scale.rounds, who().len()).enumerate() {
            for threads in READER_COUNTS {
                let order = order.clone();
                parts.push(Part::new(
                    format!("rivera/{figure}/{threads}-readers/round-{}", round + 1),
                    move |places, stop| {
                        let readers = who();
                        let mut rows: Vec<(usize, Vec<Row>)> = Vec::new();
                        for &index in &order {
                            bench::check_stop(stop)?;
                            rows.push((index, reading::rows(places, readers[index], threads, tables, stop)));
                        }
                        // Lines in the same order in every round.
                        rows.sort_by_key(|(index, _)| *index);
                        Ok(rows.into_iter().flat_map(|(_, rows)| rows).collect())
                    },
                ));
            }
        }
    }
    for threads in READER_COUNTS {
        let id = format!("rivera/locks/{threads}-readers");
        parts.push(Part::new(id, move |places, stop| contention::rows(places, &readers(), threads, stop)));
    }
    parts
}

/// Tables I to III of the paper (Linux 3.12.5, Intel i5-2400, four cores).
pub(super) fn paper_values() -> Vec<PaperValue> {
    type Line = (&'static str, [f64; 6]);
    const TABLE_1_LINES: [Line; 4] = [
        ("1", [241_739.56, 1_498_456.0, 0.16133, 14.69, 72.0, 0.20403]),
        ("2", [491_475.11, 3_000_009.0, 0.16382, 83.76, 427.0, 0.19616]),
        ("4", [999_715.69, 6_001_903.0, 0.16657, 193.33, 956.0, 0.20223]),
        ("8", [2_001_099.30, 12_002_304.0, 0.16673, 300.51, 1479.0, 0.20318]),
    ];
    const TABLE_2_LINES: [Line; 4] = [
        ("1", [1_727_674.73, 1_000_102.0, 1.72750, 122.21, 222.0, 0.55050]),
        ("2", [3_546_050.22, 2_000_037.0, 1.77299, 1417.54, 1235.0, 1.14781]),
        ("4", [7_253_937.17, 4_000_143.0, 1.81342, 3163.35, 2576.0, 1.22801]),
        ("8", [14_511_741.72, 8_000_053.0, 1.81396, 5301.16, 4281.0, 1.23830]),
    ];
    const TABLE_3_LINES: [Line; 4] = [
        ("1", [475_795.94, 1_995_714.0, 0.23841, 173.13, 543.0, 0.31884]),
        ("2", [983_877.62, 4_000_453.0, 0.24594, 677.32, 1743.0, 0.38859]),
        ("4", [1_988_615.96, 8_004_417.0, 0.24844, 1147.46, 3679.0, 0.31189]),
        ("8", [3_976_472.06, 16_007_064.0, 0.24842, 2429.32, 8650.0, 0.28085]),
    ];
    let mut all = Vec::new();
    for (table, lines) in [(TABLE_1, TABLE_1_LINES), (TABLE_2, TABLE_2_LINES), (TABLE_3, TABLE_3_LINES)] {
        for (line, values) in lines {
            let columns = [HOLD_TIME, ACQUISITIONS, HOLD_TIME_MEAN, WAIT_TIME, CONTENTIONS, WAIT_TIME_MEAN];
            let cells = columns.into_iter().zip(values);
            all.extend(cells.map(|(column, value)| PaperValue { table, line, column, value }));
        }
    }
    all
}

pub(super) fn differences(scale: &Scale) -> Vec<String> {
    let mut all = vec![
        "The paper plots figures 2 and 4 without their numbers. Only Tables I to III have the paper's numbers beside ours.".into(),
        format!(
            "Here all threads together read {} units. The acquisitions in the paper's tables grow with the number of threads (three per unit and thread), so each of its threads seems to have read 500,000 units. Compare per unit.",
            format_number(scale.units as f64)
        ),
        "The sender waits while as many units are pending as the receive buffer holds for certain. So no unit is lost, and every count is exact. The paper does not describe its sender.".into(),
        "The FIFO is an unnamed pipe, which uses the same functions of the kernel.".into(),
        "lane/xdp receives frames from a device: it runs between two hosts of the testbed, where XDP generates the frames. All others run over loopback, as in the paper. The generator does not wait for readers, but sends 500,000 frames per second, which determines the seconds of lane/xdp. Compare its CPU time instead. Notes below the table give lost units.".into(),
        "The testbed's device receives all frames on the queue of the sender's CPU. So only one queue of lane/xdp has frames, with any number of lanes.".into(),
        "module/recvfrom is the paper's own change: one socket with a queue for each processor, for the program of socket/recvfrom. It has a row where the kernel module is loaded (kernel/README.md).".into(),
        "As in the paper, threads are not pinned. Sender and readers share this machine's CPUs.".into(),
    ];
    all.push("The paper gives the times of Tables I to III in ms. They must be microseconds, as in /proc/lock_stat: 14,511,742 ms would be four hours of holding a lock in a run of seconds. Ours are microseconds, too.".into());
    if lockstat::is_supported() {
        all.push("All figures of Tables I to III come from /proc/lock_stat, which counts all UDP sockets of the machine. Since Linux 4.13 the receive queue is two queues: softirqs append datagrams to one (class rlock-AF_INET), and readers move all of them at once to their own (reader_queue-UDP). Tables I and III have both together; if the second one has no name in this kernel, only the first. Table II is class slock-AF_INET, the wait queue &ei->socket.wq.wait. The waits by caller come from tracepoints, of this process alone, and call both queues receive queue.".into());
        all.push("Table III: the paper turned off memory accounting, and thereby the lock of the whole socket. Since Linux 4.10 accounting of UDP uses the lock of the receive queue, and receiving does not acquire the other one.".into());
    } else {
        all.push("This kernel keeps no lock statistics (CONFIG_LOCK_STAT). Contentions and waits come from the tracepoints lock:contention_begin and _end, of this process alone. There are no hold times and acquisitions. The paper ran a kernel with lockdep, whose cost is included in its times.".into());
    }
    if scale.units < Scale::full().units {
        all.push("This run has fewer units than the paper.".into());
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Paper;
    use crate::table::assert_compared;

    #[test]
    fn figures_are_compared_with_one_of_their_readers() {
        for (figure, readers) in
            [(FIGURE_2, readers()), (FIGURE_2_CPU, readers()), (FIGURE_4, queue_readers())]
        {
            let row = |reader: Reader| Row::new(figure, &reader.name(), "1", "s", vec![1.0]);
            assert_compared(Paper::Rivera, figure, &readers.into_iter().map(row).collect::<Vec<_>>());
        }
    }
}
