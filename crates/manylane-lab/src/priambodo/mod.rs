//! Priambodo and Ashari: receivers in datagrams per second, and round-trip times by wait policy.
//!
//! | module | reproduces |
//! |---|---|
//! | `throughput` | Table 1 |
//! | `latency` | Table 2 |
//! | `cores` | shared against dedicated cores |

mod cores;
mod latency;
mod throughput;

use self::cores::CORES;
use self::latency::TABLE_2;
use self::throughput::TABLE_1;
use crate::paper::PaperValue;
use crate::paper_table::{Baseline, Plot, Table};
use crate::part::Part;
use crate::row::Row;
use crate::settings::Scale;

// Names of the tables of gaps.
const GAP_1: &str = "table 1, gap";
const GAP_2: &str = "table 2, gap";

/// Numbers of the paper's nine runs.
const RUNS: [&str; 9] = ["1", "2", "3", "4", "5", "6", "7", "8", "9"];

pub(super) fn tables() -> Vec<Table> {
    vec![
        Table::new(TABLE_1, "Table 1: datagrams per second, by run", Some(Plot::Bars("method"))),
        Table::new(
            GAP_1,
            "Table 1, columns Gap: change of datagrams per second against the default of the same run, %",
            None,
        ),
        Table::new(TABLE_2, "Table 2: round-trip time in ms, by run", None),
        Table::new(
            GAP_2,
            "Table 2, columns Gap: change of the round-trip time against the default of the same run, %",
            None,
        ),
        Table::new(
            CORES,
            "Shared against dedicated cores: ms for a fixed loop, and the transfer time of a cache line between the CPUs",
            None,
        )
        .compared_with(Baseline::Line(cores::ONE_THREAD)),
    ]
}

/// A part for each run of each table.
pub(super) fn parts(scale: &Scale) -> Vec<Part> {
    let mut parts = Vec::new();
    for run in RUNS.into_iter().take(scale.rounds) {
        parts.push(Part::new(format!("priambodo/table1/run-{run}"), move |places, stop| {
            let rows = throughput::rows(places, run, stop)?;
            let gaps = relative_changes(&rows, throughput::DEFAULT, GAP_1);
            Ok([rows, gaps].concat())
        }));
        parts.push(Part::new(format!("priambodo/table2/run-{run}"), move |places, stop| {
            let rows = latency::rows(places, run, stop)?;
            let gaps = relative_changes(&rows, latency::DEFAULT, GAP_2);
            Ok([rows, gaps].concat())
        }));
    }
    parts.push(Part::new("priambodo/cores".into(), |places, stop| cores::rows(&places.scale, stop)));
    parts
}

/// Tables 1 and 2 of the paper. The default of Table 1 is one number for all runs.
pub(super) fn paper_values() -> Vec<PaperValue> {
    const RATES: [[f64; 4]; 9] = [
        [430.0, 609.0, 495.0, 1114.0],
        [428.0, 657.0, 480.0, 1147.0],
        [432.0, 649.0, 461.0, 1126.0],
        [425.0, 653.0, 486.0, 1138.0],
        [427.0, 640.0, 490.0, 1142.0],
        [431.0, 651.0, 477.0, 1129.0],
        [428.0, 655.0, 485.0, 1131.0],
        [431.0, 623.0, 491.0, 1136.0],
        [433.0, 641.0, 481.0, 1121.0],
    ];
    const DEFAULT: f64 = 451.3;
    const TIMES: [[f64; 4]; 9] = [
        [57.224, 56.646, 49.886, 37.426],
        [60.170, 55.216, 50.224, 40.399],
        [61.892, 54.891, 50.960, 39.086],
        [58.672, 53.228, 49.706, 36.128],
        [60.065, 49.781, 50.676, 38.412],
        [57.640, 52.248, 50.469, 39.018],
        [61.042, 52.817, 49.102, 40.124],
        [58.671, 50.890, 51.610, 38.798],
        [61.672, 51.743, 49.718, 41.006],
    ];
    let mut all = paper_gaps();
    for (run, rates) in RUNS.into_iter().zip(RATES) {
        let columns =
            [throughput::NUMA, throughput::ADDRESSES, throughput::THREADS, throughput::PORT_BINDING];
        let cells = std::iter::once((throughput::DEFAULT, DEFAULT)).chain(columns.into_iter().zip(rates));
        all.extend(cells.map(|(column, rate)| PaperValue {
            table: TABLE_1,
            line: run,
            column,
            value: rate * 1e3,
        }));
    }
    for (run, times) in RUNS.into_iter().zip(TIMES) {
        let columns = [latency::DEFAULT, latency::PINNED, latency::BUSY_POLL, latency::POLLING];
        let cells = columns.into_iter().zip(times);
        all.extend(cells.map(|(column, value)| PaperValue { table: TABLE_2, line: run, column, value }));
    }
    all
}

/// The columns Gap as printed: without signs, and including values that are shares of the default
/// instead of differences.
fn paper_gaps() -> Vec<PaperValue> {
    const RATES: [[f64; 4]; 9] = [
        [4.72, 34.94, 9.68, 246.84],
        [5.16, 45.58, 6.36, 254.16],
        [4.28, 43.81, 2.15, 249.50],
        [5.83, 44.69, 7.69, 252.16],
        [5.38, 41.81, 8.58, 253.05],
        [4.50, 44.25, 5.69, 250.16],
        [5.16, 45.14, 7.47, 250.60],
        [4.50, 38.05, 8.80, 251.72],
        [4.05, 42.03, 6.58, 248.39],
    ];
    const TIMES: [[f64; 3]; 9] = [
        [1.01, 12.82, 65.40],
        [8.23, 16.53, 67.14],
        [11.31, 17.66, 63.15],
        [9.28, 15.28, 61.58],
        [17.12, 15.63, 63.95],
        [9.35, 12.44, 67.69],
        [13.47, 19.56, 65.73],
        [13.26, 12.03, 66.13],
        [16.10, 19.38, 66.49],
    ];
    let mut all = Vec::new();
    for ((run, rates), times) in RUNS.into_iter().zip(RATES).zip(TIMES) {
        let columns =
            [throughput::NUMA, throughput::ADDRESSES, throughput::THREADS, throughput::PORT_BINDING];
        let cells = columns.into_iter().zip(rates);
        all.extend(cells.map(|(column, value)| PaperValue { table: GAP_1, line: run, column, value }));
        let columns = [latency::PINNED, latency::BUSY_POLL, latency::POLLING];
        let cells = columns.into_iter().zip(times);
        all.extend(cells.map(|(column, value)| PaperValue { table: GAP_2, line: run, column, value }));
    }
    all
}

/// A cell for each of `rows` except the default: the change from it.
fn relative_changes(rows: &[Row], default: &str, table: &str) -> Vec<Row> {
    let base = rows.iter().find(|row| row.column == default).and_then(|row| row.value);
    let cell = |row: &Row| match (row.value, base) {
        (Some(value), Some(base)) if base > 0.0 => {
            Row::new(table, &row.line, &row.column, "%", vec![100.0 * (value / base - 1.0)])
        }
        _ => {
            let why = row.why_not.as_deref().unwrap_or("no default to compare with");
            Row::unavailable(table, &row.line, &row.column, "%", why)
        }
    };
    rows.iter().filter(|row| row.column != default).map(cell).collect()
}

pub(super) fn differences() -> Vec<String> {
    [
        "Traffic runs between two hosts of the testbed on one machine. The paper had two machines with network cards. The generator has a CPU of its own, which, as usual with veth devices, also does the kernel's receive work up to the socket. The receiving threads share the other CPUs.",
        "As in the paper, runs with several receiving threads have two. On a machine with two CPUs they share one, so that several threads and bound sockets cannot gain as much as from the paper's second core.",
        "NUMA: the receiver's memory (set_mempolicy, MPOL_BIND) and its thread are bound to the node that does the device's work, which in the testbed is that of the generator's CPU. The thread is not bound to a single CPU, unlike in the other columns. On a machine with several nodes, a second column binds to another node. The paper does not describe its method. The sender allocates the kernel's memory for datagrams, which is not bound.",
        "According to the paper's text, its column NUMA of Table 2 is the run with pinned threads. The table here treats it so.",
        "The paper's round trips take 37 to 62 ms, a thousand times as long as in a local network. So only ratios can be compared.",
        "The paper's columns Gap have no signs: its NUMA is a loss, and all values of its Table 2 are savings. Two of its gains are ratios: 1114k is 246.84 % of 451.3k, an increase by 146.84 % (on average 250.44 %, an increase by 150.7 %), and 37.426 ms is 65.40 % of 57.224 ms, a decrease by 34.60 % (on average 65.83 %, a decrease by 34.7 %). Ours are signed differences in all columns.",
        "Shared and dedicated cores: two CPUs count as threads of one core if a cache line takes less than 25 ns between them. In a virtual machine, the kernel only knows what the hypervisor reports.",
        "One client sends requests of 10 bytes in a ping-pong. Each figure is the median of a sample.",
    ]
    .map(String::from)
    .to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Redundant numbers of the paper agree: the columns Gap follow from the others, apart from
    /// signs and shares.
    #[test]
    fn the_papers_gaps_follow_from_its_figures() {
        let all = paper_values();
        let at = |table: &str, line: &str, column: &str| {
            all.iter()
                .find(|cell| (cell.table, cell.line, cell.column) == (table, line, column))
                .unwrap()
                .value
        };
        let mut checked = 0;
        for cell in all.iter().filter(|cell| [GAP_1, GAP_2].contains(&cell.table)) {
            let table = if cell.table == GAP_1 { TABLE_1 } else { TABLE_2 };
            let share = 100.0 * at(table, cell.line, cell.column) / at(table, cell.line, throughput::DEFAULT);
            let expected = match cell.column {
                throughput::PORT_BINDING | latency::POLLING => share,
                _ => (share - 100.0).abs(),
            };
            assert!((cell.value - expected).abs() < 0.011, "{cell:?}: {expected}");
            checked += 1;
        }
        assert_eq!(checked, 9 * 7);
    }

    #[test]
    fn gaps_are_differences_to_the_default_of_the_run() {
        let cell = |column, value| Row::new(TABLE_1, "3", column, "1/s", vec![value]);
        let rows = [
            cell(throughput::DEFAULT, 200.0),
            Row::unavailable(TABLE_1, "3", throughput::NUMA, "1/s", "one node"),
            cell("lane/xdp", 500.0),
            cell(throughput::THREADS, 150.0),
        ];
        let told = |rows: Vec<Row>| -> Vec<(String, Option<f64>, Option<String>)> {
            rows.into_iter().map(|row| (row.column, row.value, row.why_not)).collect()
        };
        let gaps = relative_changes(&rows, throughput::DEFAULT, GAP_1);
        assert!(gaps.iter().all(|row| row.table == GAP_1 && row.line == "3" && row.unit == "%"));
        let expected = [
            (throughput::NUMA.to_owned(), None, Some("one node".to_owned())),
            ("lane/xdp".to_owned(), Some(150.0), None),
            (throughput::THREADS.to_owned(), Some(-25.0), None),
        ];
        assert_eq!(told(gaps), expected);
        let gaps = told(relative_changes(&rows[1..], throughput::DEFAULT, GAP_1));
        assert_eq!(gaps[1].2.as_deref(), Some("no default to compare with"));
    }
}
