//! Congestion control, for which the paper wants a stack in user space: throughput and fairness of
//! a lane's algorithms beside the kernel's, over a link with a rate, a delay and losses.
//!
//! A client reads as fast as it can, from one server or two. Both are on the same host, behind the
//! same [relay](manylane_testbed::relay): one on sockets of the kernel, one on a lane.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Result;
use manylane::tcp::congestion::Algorithm;
use manylane_bench::check_stop;

use crate::congestion_hosts::Server;
use crate::part::Setups;
use crate::row::Row;

// Names of the tables.
pub(super) const THROUGHPUT: &str = "throughput by loss";
pub(super) const FAIRNESS: &str = "fairness";

// Columns of fairness.
const BESIDE_KERNEL: &str = "beside the kernel's CUBIC, %";
const BESIDE_ITSELF: &str = "the smaller of two alike, %";
const SUM: &str = "sum of the two alike, Mbit/s";

/// The line that others are compared with.
pub(super) const BASELINE: &str = "kernel, cubic";

/// Frames with data that are lost, of 10,000, and the name of the column.
const LOSSES: [(u64, &str); 4] = [(0, "0 %"), (10, "0.1 %"), (100, "1 %"), (500, "5 %")];
/// A transfer, in samples of the run, which are for requests of microseconds.
const SAMPLES: u32 = 3;

/// One round of all cells.
pub(super) fn rows(places: &mut Setups, round: usize, stop: &AtomicBool) -> Result<Vec<Row>> {
    let duration = Duration::from_millis(places.scale.sample_ms) * SAMPLES;
    // The same losses for all servers.
    let seed = round as u64;
    let hosts = places.congestion_hosts()?;
    let mut rows = Vec::new();
    for server in Server::all() {
        let line = &server.line();
        for (losses, column) in LOSSES {
            check_stop(stop)?;
            let rate = hosts.rates(&[server], losses, seed, duration).map(|rates| rates[0]);
            rows.push(Row::measured(THROUGHPUT, line, column, "Mbit/s", rate));
        }
        let kernel = hosts.rates(&[server, Server::Kernel(Algorithm::Cubic)], 0, seed, duration);
        let alike = hosts.rates(&[server, server], 0, seed, duration);
        let mut add = |column, unit, value: Result<f64, &anyhow::Error>| {
            rows.push(Row::measured(FAIRNESS, line, column, unit, value));
        };
        add(BESIDE_KERNEL, "%", kernel.as_ref().map(|rates| share(rates[0], rates)));
        add(BESIDE_ITSELF, "%", alike.as_ref().map(|rates| share(rates[0].min(rates[1]), rates)));
        add(SUM, "Mbit/s", alike.as_ref().map(|rates| rates.iter().sum()));
    }
    Ok(rows)
}

/// Percent of the sum.
fn share(rate: f64, rates: &[f64]) -> f64 {
    100.0 * rate / rates.iter().sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_the_sum() {
        assert_eq!(share(10.0, &[10.0, 30.0]), 25.0);
    }

    #[test]
    fn each_algorithm_has_a_line_for_both_stacks() {
        let lines: Vec<_> = Server::all().map(Server::line).collect();
        assert!(lines.contains(&BASELINE.to_owned()), "{lines:?}");
        assert_eq!(lines.len(), 6);
    }
}
