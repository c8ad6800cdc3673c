//! The paper's optimisations: a lane with all of them, without each, and without any; and the gap
//! between the kernel's stack and the one in user space.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Result;
use manylane_bench::check_stop;
use manylane_bench::experiments::proxy::trial::{Generator, LaneStack, LibraryProxy, Subject};
use manylane_bench::schema::ProxySample;

use crate::part::Setups;
use crate::row::Row;

// Names of the tables.
pub(super) const OPTIMISATIONS: &str = "optimisations";
pub(super) const GAP: &str = "gap";

// Lines of both.
pub(super) const ALL: &str = "one lane, all optimisations";
pub(super) const NONE: &str = "one lane, no optimisation";
pub(super) const ALL_INSTANCES: &str = "two lanes, all optimisations";
const KERNEL: &str = "kernel's stack";
const KERNEL_INSTANCES: &str = "kernel's stack, two threads";

// Columns of the gap.
pub(super) const RATE_GAP: &str = "requests per second";
pub(super) const LATENCY_GAP: &str = "latency";

/// Bytes of a small buffer: the least with which several segments fit.
const SMALL_BUFFER: usize = 4096;

/// Each line of the gap, and the line that it is compared with.
const GAPS: [(&str, &str); 3] = [(NONE, KERNEL), (ALL, KERNEL), (ALL_INSTANCES, KERNEL_INSTANCES)];

/// One line of the table.
struct Variant {
    line: &'static str,
    lanes: usize,
    proxy: LibraryProxy,
}

/// The lines, the kernel's stack first.
fn variants() -> [Variant; 12] {
    let (batch, buffer, delays) = (None, None, true);
    let optimised = LaneStack::Xdp { batch, buffer, delays };
    let all = LibraryProxy { stack: optimised, is_pinned: true, offloads: true };
    let kernel = LibraryProxy { stack: LaneStack::Kernel, ..all };
    let with = |line, proxy| Variant { line, lanes: 1, proxy };
    let small = Some(SMALL_BUFFER);
    [
        with(KERNEL, kernel),
        with("kernel's stack, without pinning", LibraryProxy { is_pinned: false, ..kernel }),
        with("kernel's stack, without offload", LibraryProxy { offloads: false, ..kernel }),
        with(ALL, all),
        with("one lane, without pinning", LibraryProxy { is_pinned: false, ..all }),
        with("one lane, without offload", LibraryProxy { offloads: false, ..all }),
        with(
            "one lane, one frame at a time",
            LibraryProxy { stack: LaneStack::Xdp { batch: Some(1), buffer, delays }, ..all },
        ),
        with(
            "one lane, without delays",
            LibraryProxy { stack: LaneStack::Xdp { batch, buffer, delays: false }, ..all },
        ),
        with(
            "one lane, small buffers",
            LibraryProxy { stack: LaneStack::Xdp { batch, buffer: small, delays }, ..all },
        ),
        with(
            NONE,
            LibraryProxy {
                stack: LaneStack::Xdp { batch: Some(1), buffer: small, delays: false },
                is_pinned: false,
                offloads: false,
            },
        ),
        Variant { line: KERNEL_INSTANCES, lanes: 2, proxy: kernel },
        Variant { line: ALL_INSTANCES, lanes: 2, proxy: all },
    ]
}

/// Requests, and bytes in bulk.
struct Sample {
    requests: ProxySample,
    bulk: ProxySample,
}

/// One round of all lines.
pub(super) fn rows(places: &mut Setups, stop: &AtomicBool) -> Result<Vec<Row>> {
    let duration = Duration::from_millis(places.scale.sample_ms);
    let mut samples = Vec::new();
    for variant in variants() {
        check_stop(stop)?;
        let sample = measure(places, &variant, duration, stop);
        samples.push((variant.line, sample));
    }
    Ok(to_rows(&samples))
}

fn measure(places: &mut Setups, variant: &Variant, duration: Duration, stop: &AtomicBool) -> Result<Sample> {
    let hosts = places.proxy_hosts(variant.lanes)?;
    let subject = Subject::Library(variant.proxy);
    let requests = hosts.sample(subject, Generator::Own, duration, stop)?;
    Ok(Sample { requests, bulk: hosts.bulk(subject, duration, stop)? })
}

/// The cells of both tables.
fn to_rows(samples: &[(&str, Result<Sample>)]) -> Vec<Row> {
    let mut rows = Vec::new();
    for (line, sample) in samples {
        let mut add = |column, unit, value: fn(&Sample) -> f64| {
            rows.push(Row::measured(OPTIMISATIONS, line, column, unit, sample.as_ref().map(value)));
        };
        add("requests/s", "requests/s", |sample| sample.requests.requests_per_s);
        add("p50, µs", "µs", |sample| sample.requests.p50_ns / 1e3);
        add("p99, µs", "µs", |sample| sample.requests.p99_ns / 1e3);
        add("CPU, µs/request", "µs", |sample| sample.requests.proxy_cpu_ns / 1e3);
        add("bulk, MB/s", "MB/s", |sample| sample.bulk.bytes_per_s / 1e6);
        add("bulk, MB per s of CPU", "MB/s", |sample| sample.bulk.bytes_per_cpu_s / 1e6);
    }
    let of = |line: &str| samples.iter().find(|(name, _)| *name == line).map(|(_, sample)| sample);
    for (line, base) in GAPS {
        let (Some(lane), Some(kernel)) = (of(line), of(base)) else { continue };
        for (column, gap) in [
            (RATE_GAP, (|lane, kernel| kernel.requests_per_s / lane.requests_per_s) as Ratio),
            (LATENCY_GAP, |lane, kernel| lane.p50_ns / kernel.p50_ns),
        ] {
            let value = match (lane, kernel) {
                (Ok(lane), Ok(kernel)) => Ok(gap(&lane.requests, &kernel.requests)),
                (Err(err), _) | (_, Err(err)) => Err(err),
            };
            rows.push(Row::measured(GAP, line, column, "", value));
        }
    }
    rows
}

/// How many times slower the first one is.
type Ratio = fn(&ProxySample, &ProxySample) -> f64;

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;
    use crate::Paper;
    use crate::salesforce::paper_values;
    use crate::table::assert_compared;

    fn sample(requests_per_s: f64, p50_ns: f64) -> Result<Sample> {
        let requests = ProxySample { requests_per_s, p50_ns, ..Default::default() };
        Ok(Sample { requests, bulk: ProxySample::default() })
    }

    #[test]
    fn the_gap_is_how_many_times_slower_a_lane_is() {
        let samples: Vec<_> = variants()
            .into_iter()
            .map(|variant| {
                let sample = match variant.line {
                    KERNEL => sample(1000.0, 30.0),
                    NONE => sample(100.0, 240.0),
                    ALL_INSTANCES | KERNEL_INSTANCES => Err(anyhow!("needs 3 CPUs")),
                    _ => sample(2000.0, 15.0),
                };
                (variant.line, sample)
            })
            .collect();
        let rows = to_rows(&samples);
        let gap = |line: &str, column: &str| {
            rows.iter().find(|row| (&*row.table, &*row.line, &*row.column) == (GAP, line, column)).unwrap()
        };
        assert_eq!([RATE_GAP, LATENCY_GAP].map(|column| gap(NONE, column).value.unwrap()), [10.0, 8.0]);
        assert_eq!([RATE_GAP, LATENCY_GAP].map(|column| gap(ALL, column).value.unwrap()), [0.5, 0.5]);
        assert_eq!(gap(ALL_INSTANCES, RATE_GAP).why_not.as_deref(), Some("needs 3 CPUs"));
        assert_compared(Paper::Salesforce, OPTIMISATIONS, &rows);
        // The paper's numbers are beside ours.
        for printed in paper_values() {
            gap(printed.line, printed.column);
        }
    }

    #[test]
    fn each_line_lacks_one_optimisation() {
        let variants = variants();
        let all = variants.iter().find(|variant| variant.line == ALL).unwrap().proxy;
        let lacking = |proxy: &LibraryProxy| {
            let LaneStack::Xdp { batch, buffer, delays } = proxy.stack else { return 0 };
            let lacks = [!proxy.is_pinned, !proxy.offloads, batch.is_some(), !delays, buffer.is_some()];
            lacks.into_iter().filter(|lacks| *lacks).count()
        };
        let counts: Vec<usize> = variants
            .iter()
            .filter(|variant| variant.proxy.stack != LaneStack::Kernel)
            .map(|variant| lacking(&variant.proxy))
            .collect();
        assert_eq!((lacking(&all), counts), (0, vec![0, 1, 1, 1, 1, 1, 5, 0]));
    }
}
