//! Figures 2 and 3: requests per second and their latency, by proxy, and the CPU time of each.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Result, bail};
use manylane_bench::check_stop;
use manylane_bench::experiments::proxy::Contender;
use manylane_bench::experiments::proxy::trial::{Generator, Subject};
use manylane_bench::schema::ProxySample;

use crate::part::Setups;
use crate::row::Row;

// Names of the tables.
pub(super) const FIGURE_2: &str = "figure 2";
pub(super) const FIGURE_3: &str = "figure 3";
pub(super) const CPU: &str = "CPU per request";

/// The proxies; the paper has the last two.
pub(super) const CONTENDERS: [Contender; 4] = Contender::ALL;
/// The proxy on the kernel's stack.
pub(super) const BASELINE: &str = Contender::ProxyKernel.name();

/// One round of one proxy, by both generators.
pub(super) fn rows(places: &mut Setups, contender: Contender, stop: &AtomicBool) -> Result<Vec<Row>> {
    let duration = Duration::from_millis(places.scale.sample_ms);
    let mut rows = Vec::new();
    for generator in Generator::ALL {
        check_stop(stop)?;
        rows.extend(cells(contender, generator, &sample(places, contender, generator, duration, stop)));
    }
    Ok(rows)
}

fn sample(
    places: &mut Setups,
    contender: Contender,
    generator: Generator,
    duration: Duration,
    stop: &AtomicBool,
) -> Result<ProxySample> {
    if !generator.is_installed() {
        bail!("{generator} is not installed");
    }
    if !contender.is_installed() {
        bail!("{contender} is not installed");
    }
    places.proxy_hosts(1)?.sample(Subject::Process(contender), generator, duration, stop)
}

/// The cells of all tables, or the same cells with the reason why they are empty.
fn cells(contender: Contender, generator: Generator, sample: &Result<ProxySample>) -> Vec<Row> {
    let cell = |table, column: &str, unit, value: fn(&ProxySample) -> f64| {
        let row = Row::measured(table, contender.name(), column, unit, sample.as_ref().map(value));
        match sample {
            Ok(sample) => row.with_counts(&[("requests", sample.requests), ("failed", sample.failed)]),
            Err(_) => row,
        }
    };
    vec![
        cell(FIGURE_2, generator.name(), "requests/s", |sample| sample.requests_per_s),
        cell(FIGURE_3, &format!("{generator}, p50"), "µs", |sample| sample.p50_ns / 1e3),
        cell(FIGURE_3, &format!("{generator}, p99"), "µs", |sample| sample.p99_ns / 1e3),
        cell(CPU, generator.name(), "µs", |sample| sample.proxy_cpu_ns / 1e3),
    ]
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;
    use crate::Paper;
    use crate::table::assert_compared;

    #[test]
    fn each_proxy_has_its_cells_and_a_ratio_to_the_kernels_stack() {
        let sample = ProxySample { requests: 10, requests_per_s: 20.0, p50_ns: 5000.0, ..Default::default() };
        let mut rows = Vec::new();
        for contender in CONTENDERS {
            for generator in Generator::ALL {
                rows.extend(cells(contender, generator, &Ok(sample)));
            }
        }
        for table in [FIGURE_2, FIGURE_3, CPU] {
            assert_compared(Paper::Salesforce, table, &rows);
        }
        let p50 = rows.iter().find(|row| row.column == "own generator, p50").unwrap();
        assert_eq!((p50.value, p50.counts["requests"]), (Some(5.0), 10));
    }

    #[test]
    fn a_proxy_that_is_not_there_has_the_reason_in_the_same_cells() {
        let there = cells(Contender::Nginx, Generator::Wrk, &Ok(ProxySample::default()));
        let absent = cells(Contender::Nginx, Generator::Wrk, &Err(anyhow!("nginx is not installed")));
        assert_eq!(absent.len(), there.len());
        for (absent, there) in absent.iter().zip(there) {
            assert_eq!((&absent.table, &absent.column), (&there.table, &there.column));
            assert_eq!(absent.why_not.as_deref(), Some("nginx is not installed"));
        }
    }
}
