//! The flows of a client as lanes: for each source port a socket with one lane, all of one thread.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use manylane::{Builder, Engine, Lane, Placement, WaitPolicy};
use manylane_measure::client::{OnReply, Plan, Transport};
use manylane_sys::epoll::Epoll;

/// Number of lanes that one wait reports.
const EPOLL_EVENTS_MAX: usize = 64;
/// Time for which a receive polls the device, with `--busy-poll`: once.
const BUSY_POLL_TIME: Duration = Duration::from_micros(1);

/// A lane for each flow.
pub(super) struct Lanes {
    to: SocketAddr,
    lanes: Vec<Lane>,
    /// Watches the lanes; none with `--busy-poll`.
    epoll: Option<Epoll>,
}

impl Lanes {
    /// Opens the lanes of a plan.
    pub(super) fn open(plan: &Plan, engine: Engine, devices: &[String]) -> Result<Self> {
        let from = source_address(plan.to).with_context(|| format!("cannot reach {}", plan.to))?;
        let lanes: Vec<_> = (0..plan.flows)
            .map(|_| open_lane(from, engine, devices, plan.busy_poll))
            .collect::<Result<_>>()?;
        let epoll = if plan.busy_poll { None } else { Some(Epoll::new(EPOLL_EVENTS_MAX)?) };
        for (flow, lane) in lanes.iter().enumerate() {
            if let Some(epoll) = &epoll {
                epoll.add(lane, flow as u64).context("cannot watch a lane")?;
            }
        }
        Ok(Self { to: plan.to, lanes, epoll })
    }
}

impl Transport for Lanes {
    fn send(&mut self, flow: usize, request: &[u8]) -> Result<bool> {
        let mut out = self.lanes[flow].sender();
        out.send_to(self.to, request);
        Ok(out.flush().lost == 0)
    }

    fn recv(&mut self, wait: Duration, on_reply: OnReply<'_>) -> Result<usize> {
        let Some(epoll) = &mut self.epoll else {
            let mut count = 0;
            for (flow, lane) in self.lanes.iter_mut().enumerate() {
                count += recv_batch(flow, lane, BUSY_POLL_TIME, on_reply)?;
            }
            return Ok(count);
        };
        // Level-triggered: it reports again what these receives leave.
        let ready = epoll.wait(wait).context("cannot wait for replies")?;
        let mut count = 0;
        for flow in ready.map(|token| token as usize) {
            count += recv_batch(flow, &mut self.lanes[flow], Duration::ZERO, on_reply)?;
        }
        Ok(count)
    }

    /// Lanes do not report it.
    fn refused(&self) -> u64 {
        0
    }
}

fn recv_batch(flow: usize, lane: &mut Lane, wait: Duration, on_reply: OnReply<'_>) -> Result<usize> {
    let mut count = 0;
    for reply in lane.recv_timeout(wait)?.batch {
        on_reply(flow, reply.payload());
        count += 1;
    }
    Ok(count)
}

fn open_lane(from: IpAddr, engine: Engine, devices: &[String], busy_poll: bool) -> Result<Lane> {
    let mut builder = Builder::new((from, 0))?;
    builder.engine(engine).lanes(1).placement(Placement::None);
    if !devices.is_empty() {
        builder.xdp_devices(devices);
    }
    if busy_poll {
        builder.wait(WaitPolicy::BusyPoll(BUSY_POLL_TIME));
    }
    let socket = builder.open()?;
    if let Some(reason) = socket.fallback() {
        bail!("engine {engine} is not available: {reason}");
    }
    if let Some(reason) = socket.waiting().reason {
        bail!("cannot poll devices (--busy-poll): {reason}");
    }
    socket.into_lanes().pop().context("a socket without a lane")
}

/// The address that the kernel sends from.
fn source_address(to: SocketAddr) -> std::io::Result<IpAddr> {
    let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0_u16; 8].into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(to)?;
    Ok(socket.local_addr()?.ip())
}
