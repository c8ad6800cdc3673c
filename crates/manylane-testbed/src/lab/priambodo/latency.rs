//! Table 2: round-trip times, by how the server waits.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Result, ensure};
use manylane::{Steering, WaitPolicy};

use super::TABLE_2;
use crate::bench::rtt::asker::Asker;
use crate::bench::rtt::place::{Cpus, Placement};
use crate::bench::{self, RING, Setup};
use crate::lab::{Places, Row};
use crate::receiver::{Kind, ReceiverOptions, Work};
use crate::toil::Toil;

pub(super) const DEFAULT: &str = "default";
pub(super) const PINNED: &str = "pinned";
pub(super) const BUSY: &str = "SO_BUSY_POLL";
pub(super) const POLLING: &str = "polling in the program";

/// Bytes of a request.
const SIZE: usize = 10;
const BUSY_TIME: Duration = Duration::from_micros(100);
const SPIN_TIME: Duration = Duration::from_millis(1);
/// Ping-pong before anything is measured.
const WARM_UP: Duration = Duration::from_millis(20);

/// Columns: who serves, how it waits, whether it is pinned.
fn methods() -> [(&'static str, Kind, WaitPolicy, bool); 8] {
    let spin = WaitPolicy::Spin(SPIN_TIME);
    [
        (DEFAULT, Kind::SocketRecvfrom, WaitPolicy::Sleep, false),
        (PINNED, Kind::SocketRecvfrom, WaitPolicy::Sleep, true),
        (BUSY, Kind::SocketRecvfrom, WaitPolicy::BusyPoll(BUSY_TIME), true),
        (POLLING, Kind::SocketRecvfrom, spin, true),
        ("lane/mmsg, adaptive", Kind::LaneMmsg, WaitPolicy::Adaptive, true),
        ("lane/mmsg, spin", Kind::LaneMmsg, spin, true),
        ("lane/uring, spin", Kind::LaneUring, spin, true),
        ("lane/xdp, spin", Kind::LaneXdp, spin, true),
    ]
}

/// Columns of what is ours.
pub(super) const LANES: [&str; 4] =
    ["lane/mmsg, adaptive", "lane/mmsg, spin", "lane/uring, spin", "lane/xdp, spin"];

/// One run of all methods.
pub(super) fn rows(places: &mut Places, run: &str, stop: &AtomicBool) -> Result<Vec<Row>> {
    let stretch = Duration::from_millis(places.scale.stretch_ms);
    let mut rows = Vec::new();
    for (column, kind, wait, pinned) in methods() {
        bench::go_on(stop)?;
        let got = places.testbed().and_then(|setup| round_trips(setup, kind, wait, pinned, stretch, stop));
        rows.push(match got {
            Ok(got) => Row::new(TABLE_2, run, column, "ms", vec![got.millis])
                .with(&[("asked", got.asked), ("answered", got.answered)]),
            Err(err) => {
                bench::go_on(stop)?;
                Row::cannot(TABLE_2, run, column, "ms", &format!("{err:#}"))
            }
        });
    }
    Ok(rows)
}

struct RoundTrips {
    millis: f64,
    asked: u64,
    answered: u64,
}

fn round_trips(
    setup: &mut Setup,
    kind: Kind,
    wait: WaitPolicy,
    pinned: bool,
    stretch: Duration,
    stop: &AtomicBool,
) -> Result<RoundTrips> {
    let cpus = if pinned { Placement::Apart.cpus(setup) } else { Cpus { server: None, generator: None } };
    let options = ReceiverOptions {
        addr: setup.bind_addr(),
        work: Work::Echo,
        toil: Toil::default(),
        threads: 1,
        batch: 64,
        recv_buffer: 1 << 20,
        size: SIZE,
        cpus: cpus.server.into_iter().collect(),
        linger: Duration::ZERO,
        devices: setup.device_names(),
        ring: RING,
        wait,
        steering: Steering::Flow,
    };
    let running = setup.start(kind, &options)?;
    let mut asker = Asker::open(setup, running.addr(), SIZE)?;
    let asked = asker.pinned(cpus, |asker| {
        asker.ping_pong(WARM_UP, stop)?;
        asker.ping_pong(stretch, stop)
    })?;
    running.stop()?;
    bench::go_on(stop)?;
    ensure!(asked.answered > 0, "no request was answered");
    let millis = asked.latency.value_at_quantile(0.5) as f64 / 1e6;
    Ok(RoundTrips { millis, asked: asked.asked, answered: asked.answered })
}
