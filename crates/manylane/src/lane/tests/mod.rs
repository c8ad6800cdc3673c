//! Lanes on a simulated network and clock: each datagram is delivered or counted, replies leave,
//! and waits end when they should. Tests open sockets and sleep only in `loopback_faults`, which
//! adds the same faults to engines on kernel sockets.

mod loopback_faults;
mod sim_counters;
mod sim_receive;
mod sim_replies;

use std::fs::File;
use std::io::ErrorKind;
use std::net::UdpSocket;

use manylane_sys::{errno, sock};

use super::*;
use crate::config::{Builder, Engine, Gro};
use crate::counters::{Counters, LaneCounters};
use crate::group::LaneParts;
use crate::io::faults::{FaultInjector, Faults};
use crate::io::kernel_socket::{self, PortSharing};
use crate::io::sim::{POLL_TIME, Packet, Sent, Sim};
use crate::io::{self, SocketEngine};
use crate::lane_shared::Offloads;
use crate::skip;
use crate::steer::{Steer, Steering, SteeringBackend};
use crate::wait::WaitPolicy;

pub(crate) const BATCH: usize = 8;
const MICROS: Duration = Duration::from_micros(1);
pub(crate) const MILLIS: Duration = Duration::from_millis(1);
const HOUR: Duration = Duration::from_secs(3600);

/// Lanes of an engine without sockets.
pub(crate) fn lanes_with(
    engine: &Arc<impl SocketEngine + 'static>,
    count: usize,
    change: impl FnOnce(&mut Builder),
) -> Vec<Lane> {
    let mut builder = Builder::new("192.0.2.1:53").unwrap();
    builder.lanes(count).batch(BATCH).datagram_size(2000);
    change(&mut builder);
    let config = builder.check().unwrap();
    // The network grants all that is asked for.
    let offloads = Offloads { gro: config.gro != Gro::Off, gso: config.gso };
    let addr = config.addr;
    let shared = Arc::new(Shared::new(config, addr, Vec::new(), count, steer(), engine.clone()));
    let lane = |_| {
        let no_socket = File::open("/dev/null").unwrap().into();
        make_lane(&shared, shared.add_open(no_socket, offloads).unwrap())
    };
    (0..count).map(lane).collect()
}

fn steer() -> Steer {
    Steer::new(Steering::Flow, SteeringBackend::Kernel, false).unwrap()
}

fn make_lane(shared: &Arc<Shared>, (parts, admitted): (LaneParts, Result<()>)) -> Lane {
    let LaneParts { lane_shared, io } = parts;
    admitted.unwrap();
    Lane::new(Arc::clone(shared), lane_shared, io)
}

fn lane_with(engine: &Arc<impl SocketEngine + 'static>, change: impl FnOnce(&mut Builder)) -> Lane {
    lanes_with(engine, 1, change).remove(0)
}

fn lane(engine: &Arc<impl SocketEngine + 'static>) -> Lane {
    lane_with(engine, |_| ())
}

/// A simulated network, and the same behind faults.
fn sim_with_faults(seed: u64) -> (Arc<Sim>, Arc<FaultInjector>) {
    let sim = Sim::new(1);
    let injector = FaultInjector::new(sim.clone(), seed, 1);
    (sim, injector)
}

/// Engines on kernel sockets that this machine has. Reports the skips of test `name`.
pub(crate) fn kernel_engines(name: &str) -> Vec<Engine> {
    let mut engines = vec![Engine::Mmsg];
    if skip::need_uring(name) {
        engines.push(Engine::Uring);
    }
    engines
}

/// A lane on 127.0.0.1 behind faults, and a socket to send to it.
pub(crate) fn loopback_lane(engine: Engine, seed: u64) -> (Lane, Arc<FaultInjector>, UdpSocket) {
    let mut builder = Builder::new("127.0.0.1:0").unwrap();
    builder.engine(engine).lanes(1).batch(BATCH).rx_coalesce(Duration::ZERO);
    let config = builder.check().unwrap();
    let (fd, offloads) = kernel_socket::open(&config, &config.addr, PortSharing::Exclusive).unwrap();
    let addr = sock::local_addr(fd.as_fd()).unwrap();
    let injector = FaultInjector::new(io::open(&config, addr).unwrap(), seed, 1);
    let shared = Arc::new(Shared::new(config, addr, Vec::new(), 1, steer(), injector.clone()));
    let lane = make_lane(&shared, shared.add_open(fd, offloads).unwrap());
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client.connect(addr).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    (lane, injector, client)
}

/// A datagram from the lane to the socket of [`loopback_lane`].
pub(crate) fn recv_from_lane(client: &UdpSocket) -> Vec<u8> {
    let mut bytes = vec![0; 2000];
    loop {
        match client.recv(&mut bytes) {
            // A ring that is closed may interrupt a call of the thread that made it.
            Err(err) if err.kind() == ErrorKind::Interrupted => {}
            received => {
                bytes.truncate(received.unwrap());
                return bytes;
            }
        }
    }
}

/// True if no datagram is queued at the socket of [`loopback_lane`].
pub(crate) fn is_silent(client: &UdpSocket) -> bool {
    client.set_nonblocking(true).unwrap();
    let received = client.recv(&mut [0]);
    client.set_nonblocking(false).unwrap();
    received.is_err_and(|err| err.kind() == ErrorKind::WouldBlock)
}

fn peer(number: u16) -> SocketAddr {
    ([198, 51, 100, 7], number).into()
}

/// A datagram from peer `number`, with a number as its payload.
pub(crate) fn datagram(number: u16) -> Packet {
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

/// Datagrams that the lane refused, and those dropped at its queue.
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
