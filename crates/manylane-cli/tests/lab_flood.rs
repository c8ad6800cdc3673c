//! The floods of `manylane lab sarma`. They are a test program of their own, so that no test runs
//! beside them: the kernel queues what crosses a veth pair in one queue for each CPU, which all
//! network namespaces share, and a flood that overflows it makes others lose datagrams. They take
//! some seconds: four floods of at most 400 ms, and for each a generator and a server.

#![allow(clippy::unwrap_used, reason = "also outside the test functions, all here is a test")]
#![cfg(feature = "bench")]

#[path = "cli/lab_rows.rs"]
mod lab_rows;

use std::thread;

use manylane_testbed::skip::{self, Forced};
use serde_json::Value;

use self::lab_rows::{in_table, rows};

#[test]
fn netns_sarma_floods_are_measured() {
    let name = "netns_sarma_floods_are_measured";
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    if !skip::need_live_sender(name)
        || !skip::need_unless_forced(name, cpus > 1, Forced::Cpus, "it takes two CPUs")
    {
        return;
    }
    let words = ["sarma", "--quick", "--flood-duration", "400ms", "--parts", "softirqs"];
    let rows = rows("lab-flood", &words);
    assert_eq!(in_table(&rows, "figure 7").len(), 20);
    assert_eq!(in_table(&rows, "figure 8").len(), 20);
    assert_eq!(in_table(&rows, "flood").len(), 18);
    assert_eq!(in_table(&rows, "figure 9").len(), 8);
    let flood = |table: &str, column: &str| {
        let found = in_table(&rows, table).into_iter().filter(|row| row["column"] == column).cloned();
        found.collect::<Vec<Value>>()
    };
    for row in flood("flood", "unanswered, %") {
        let counts = &row["counts"];
        assert!(counts["flood"].as_u64().unwrap() > 0, "{row}");
        assert!(counts["answered"].as_u64().unwrap() <= counts["asked"].as_u64().unwrap(), "{row}");
    }
    // The kernel has no neighbour entries for 5.0.0.0/8, and tries to resolve every address.
    for row in flood("flood", "neighbours, max") {
        assert!(row["value"].as_f64().unwrap() > 1.0, "{row}");
    }
}
