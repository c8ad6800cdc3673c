//! Table 2: round-trip times, by wait policy of the server.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Result, ensure};
use manylane::WaitPolicy;
use manylane_bench::experiments::rtt::cpu_layout::{CpuLayout, Cpus};
use manylane_bench::experiments::rtt::generator::{Generator, RequestStats};
use manylane_bench::receivers::{Kind, ReceiverOptions, Work};
use manylane_bench::{self as bench, Setup};

use crate::part::Setups;
use crate::row::Row;

/// Name of the table.
pub(super) const TABLE_2: &str = "table 2";

pub(super) const DEFAULT: &str = "default";
pub(super) const PINNED: &str = "pinned";
pub(super) const BUSY_POLL: &str = "SO_BUSY_POLL";
pub(super) const POLLING: &str = "polling in the program";

/// Bytes of a request.
const REQUEST_SIZE: usize = 10;
const BUSY_POLL_TIME: Duration = Duration::from_micros(100);
const SPIN_TIME: Duration = Duration::from_millis(1);
/// Warm-up ping-pong.
const WARM_UP_TIME: Duration = Duration::from_millis(20);

/// Columns: the receiver, its wait policy, whether it is pinned.
fn methods() -> [(&'static str, Kind, WaitPolicy, bool); 8] {
    let spin = WaitPolicy::Spin(SPIN_TIME);
    [
        (DEFAULT, Kind::SocketRecvfrom, WaitPolicy::Sleep, false),
        (PINNED, Kind::SocketRecvfrom, WaitPolicy::Sleep, true),
        (BUSY_POLL, Kind::SocketRecvfrom, WaitPolicy::BusyPoll(BUSY_POLL_TIME), true),
        (POLLING, Kind::SocketRecvfrom, spin, true),
        ("lane/mmsg, adaptive", Kind::LaneMmsg, WaitPolicy::Adaptive, true),
        ("lane/mmsg, spin", Kind::LaneMmsg, spin, true),
        ("lane/uring, spin", Kind::LaneUring, spin, true),
        ("lane/xdp, spin", Kind::LaneXdp, spin, true),
    ]
}

/// One run of all methods.
pub(super) fn rows(places: &mut Setups, run: &str, stop: &AtomicBool) -> Result<Vec<Row>> {
    let duration = Duration::from_millis(places.scale.sample_ms);
    let mut rows = Vec::new();
    for (column, kind, wait, pinned) in methods() {
        bench::check_stop(stop)?;
        let got = places.testbed().and_then(|setup| measure_rtt(setup, kind, wait, pinned, duration, stop));
        let counts = got.as_ref().map(|got| [("asked", got.requests), ("answered", got.replies)]);
        let median = got.as_ref().map(|got| got.latency.value_at_quantile(0.5) as f64 / 1e6);
        let row = Row::measured(TABLE_2, run, column, "ms", median);
        rows.push(row.with_counts(counts.as_ref().map_or(&[], |counts| counts)));
    }
    Ok(rows)
}

fn measure_rtt(
    setup: &mut Setup,
    kind: Kind,
    wait: WaitPolicy,
    pinned: bool,
    duration: Duration,
    stop: &AtomicBool,
) -> Result<RequestStats> {
    let cpus =
        if pinned { CpuLayout::SeparateCpus.cpus(setup) } else { Cpus { server: None, generator: None } };
    let options = ReceiverOptions {
        work: Work::Echo,
        recv_buffer: 1 << 20,
        cpus: cpus.server.into_iter().collect(),
        wait,
        ..setup.receiver(1, REQUEST_SIZE)
    };
    let running = setup.start(kind, &options)?;
    let mut generator = Generator::open(setup, running.addr(), REQUEST_SIZE)?;
    let asked = generator.run_pinned(cpus, |generator| {
        generator.ping_pong(WARM_UP_TIME, stop)?;
        generator.ping_pong(duration, stop)
    })?;
    running.stop()?;
    bench::check_stop(stop)?;
    ensure!(asked.replies > 0, "no request was answered");
    Ok(asked)
}
