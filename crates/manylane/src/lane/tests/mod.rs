//! Lanes on a simulated network and clock: each datagram is delivered or counted, replies leave,
//! and waits end when they should. No test here opens a socket or sleeps.

mod sim_receive;
mod sim_replies;
mod sim_sums;

use std::fs::File;

use super::*;
use crate::config::Builder;
use crate::counters::{Counters, LaneCounters};
use crate::error as errno;
use crate::group::LaneParts;
use crate::io::sim::{Faults, POLL_TIME, Packet, Sent, Sim};
use crate::steer::{Steer, Steering, SteeringBackend};
use crate::wait::WaitPolicy;

const BATCH: usize = 8;
const MICROS: Duration = Duration::from_micros(1);
const MILLIS: Duration = Duration::from_millis(1);
const HOUR: Duration = Duration::from_secs(3600);

/// A lane of a simulated network.
fn lane_with(sim: &Arc<Sim>, change: impl FnOnce(&mut Builder)) -> Lane {
    let mut builder = Builder::new("192.0.2.1:53").unwrap();
    builder.lanes(1).batch(BATCH).datagram_size(2000);
    change(&mut builder);
    let config = builder.check().unwrap();
    let addr = config.addr;
    let steer = Steer::new(Steering::Flow, SteeringBackend::Kernel, false).unwrap();
    let shared = Arc::new(Shared::new(config, addr, Vec::new(), steer, sim.clone()));
    let no_socket = File::open("/dev/null").unwrap().into();
    let (LaneParts { lane_shared, io }, admitted) = shared.add_open(no_socket).unwrap();
    admitted.unwrap();
    Lane::new(shared, lane_shared, io)
}

fn lane(sim: &Arc<Sim>) -> Lane {
    lane_with(sim, |_| ())
}

fn peer(number: u16) -> SocketAddr {
    ([198, 51, 100, 7], number).into()
}

/// A datagram from peer `number`, with a number as its payload.
fn datagram(number: u16) -> Packet {
    Packet { peer: peer(number), payload: number.to_be_bytes().into(), segment_size: 0, tos: 0 }
}

/// Sends datagrams, one each `gap`.
fn send(sim: &Sim, numbers: std::ops::Range<u16>, gap: Duration) {
    let mut network = sim.network();
    let first = numbers.start;
    for number in numbers {
        network.send(datagram(number), gap * u32::from(number - first));
    }
}

/// Time of the simulated clock.
fn now(sim: &Sim) -> Duration {
    sim.network().now
}

/// Datagrams lost on the way to the lane, and dropped at its queue.
fn losses(sim: &Sim) -> (u64, u64) {
    let network = sim.network();
    (network.lost, network.dropped)
}

/// The messages that the lane has sent.
fn sent(sim: &Sim) -> Vec<Sent> {
    sim.network().sent.clone()
}

fn number(payload: &[u8]) -> u16 {
    u16::from_be_bytes(payload.try_into().unwrap())
}

/// Receives until there is nothing more within `timeout`, and echoes; returns what was received.
fn echo_all(lane: &mut Lane, timeout: Duration) -> Vec<u16> {
    let mut received = Vec::new();
    loop {
        let Received { batch, mut out } = lane.recv_timeout(timeout).unwrap();
        if batch.is_empty() {
            return received;
        }
        for request in batch {
            received.push(number(request.payload()));
            out.reply_borrowed(&request, request.payload());
        }
    }
}

fn counters(lane: &Lane) -> LaneCounters {
    lane.shared.counters().total()
}

/// Closes a lane and returns the final counters.
fn close(lane: Lane) -> LaneCounters {
    let shared = lane.shared();
    drop(lane);
    let Counters { lanes, closed, .. } = shared.counters();
    assert!(lanes.is_empty());
    closed
}
