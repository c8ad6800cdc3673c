//! Priambodo and Ashari: receivers in datagrams per second, and round-trip times by the way to wait.
//!
//! | module | reproduces |
//! |---|---|
//! | `throughput` | Table 1 |
//! | `latency` | Table 2 |
//! | `cores` | shared against dedicated cores |
//! | `say` | the conclusion |

mod cores;
mod latency;
mod say;
mod throughput;

pub(super) use self::say::conclude;
use super::{Part, Plot, Printed, Scale, Table};

const TABLE_1: &str = "table 1";
const TABLE_2: &str = "table 2";
const CORES: &str = "cores";

/// Numbers of the paper's nine runs.
const RUNS: [&str; 9] = ["1", "2", "3", "4", "5", "6", "7", "8", "9"];

pub(super) fn tables() -> Vec<Table> {
    let runs = "method";
    vec![
        Table {
            name: TABLE_1,
            title: "Table 1: datagrams per second, by run".into(),
            plot: Some(Plot::Bars(runs)),
        },
        Table { name: TABLE_2, title: "Table 2: round-trip time in ms, by run".into(), plot: None },
        Table {
            name: CORES,
            title: "Shared against dedicated cores: ms for a fixed loop".into(),
            plot: None,
        },
    ]
}

/// A part for each run of each table.
pub(super) fn parts(scale: &Scale) -> Vec<Part> {
    let mut parts = Vec::new();
    for run in RUNS.into_iter().take(scale.rounds) {
        parts.push(Part::new(format!("priambodo/table1/run-{run}"), move |places, stop| {
            throughput::rows(places, run, stop)
        }));
        parts.push(Part::new(format!("priambodo/table2/run-{run}"), move |places, stop| {
            latency::rows(places, run, stop)
        }));
    }
    parts.push(Part::new("priambodo/cores".into(), |places, stop| cores::rows(&places.scale, stop)));
    parts
}

/// Tables 1 and 2 of the paper. The default of Table 1 is one number for all runs.
pub(super) fn printed() -> Vec<Printed> {
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
    let mut all = Vec::new();
    for (run, rates) in RUNS.into_iter().zip(RATES) {
        let columns = [throughput::NUMA, throughput::ADDRESSES, throughput::THREADS, throughput::BOUND];
        let cells = std::iter::once((throughput::DEFAULT, DEFAULT)).chain(columns.into_iter().zip(rates));
        all.extend(cells.map(|(column, rate)| Printed {
            table: TABLE_1,
            line: run,
            column,
            value: rate * 1e3,
        }));
    }
    for (run, times) in RUNS.into_iter().zip(TIMES) {
        let columns = [latency::DEFAULT, latency::PINNED, latency::BUSY, latency::POLLING];
        let cells = columns.into_iter().zip(times);
        all.extend(cells.map(|(column, value)| Printed { table: TABLE_2, line: run, column, value }));
    }
    all
}

pub(super) fn differs() -> Vec<String> {
    [
        "Between two hosts of the testbed on one machine; the paper had two machines and network cards. The generator has a processor of its own and does, as veth devices are, also what the kernel does before the socket; the receiving threads share what is left.",
        "As on the paper's receiver, two threads receive where several do. With two processors in all they share one here, so that several threads and bound sockets cannot gain what a second core gave the paper.",
        "The paper's column NUMA of Table 2 is, by its text, the run with pinned threads; it stands here as such.",
        "The paper's round trips are 37 to 62 ms, a thousand times those of a local network: whatever was measured there, only ratios can be compared.",
        "Two of the paper's gains are shares, not gains: 1114k of 451.3k are 246.84 % of it, an increase by 146.84 %; 37.426 ms of 57.224 ms are 65.40 % of it, a decrease by 34.60 %. The other columns are true differences. The conclusion computes all of them as differences.",
        "A request has 10 bytes, a ping-pong of one client; each figure is the median of a stretch.",
    ]
    .map(String::from)
    .to_vec()
}
