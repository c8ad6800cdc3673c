//! Opening a socket: selects the engine, opens the lanes, and attaches the queues of devices last.

use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;

use manylane_sys::{cpu, sock};

use super::{Server, Socket};
use crate::config::{Builder, Config, Engine};
use crate::error::{Error, Result};
use crate::group::{LaneParts, Shared};
use crate::io::mmsg::{self, PortSharing};
use crate::io::uring;
use crate::io::xdp::XdpControl;
use crate::lane::Lane;
use crate::steer::Steer;
use crate::wait::{EffectiveWait, WaitPolicy};
use crate::{placement, probe};

impl Builder {
    /// Checks the options and opens the socket. When this returns, every lane is bound and ready.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) for invalid options, and any error of
    /// opening a lane. The message names the option, the capability, the limit or the sysctl to
    /// change.
    pub fn open(&self) -> Result<Socket> {
        match self.config.engine {
            Engine::Auto => self.open_auto(),
            Engine::Uring => self.open_uring(),
            Engine::Mmsg | Engine::Xdp => open(self.check()?),
        }
    }

    fn open_uring(&self) -> Result<Socket> {
        let config = self.check()?;
        let Err(err) = uring::check(&config) else { return open(config) };
        let why = err.chain();
        let socket = open(Config { engine: Engine::Mmsg, fallback: Some(why.clone()), ..config })?;
        log::info!("{}: engine mmsg, not uring: {why}", socket.local_addr());
        Ok(socket)
    }

    /// Engine `auto`.
    fn open_auto(&self) -> Result<Socket> {
        let mut fallback = None;
        if self.config.xdp.devices.is_some() {
            let mut by_xdp = self.clone();
            by_xdp.config.engine = Engine::Xdp;
            match by_xdp.check().and_then(open) {
                Ok(socket) => return Ok(socket),
                // No other engine has a filter.
                Err(err) if self.has_filter() => return Err(err),
                Err(err) => fallback = Some(err.chain()),
            }
        }
        let socket = open(Config { fallback, ..self.check()? })?;
        if let Some(why) = socket.fallback() {
            log::info!("{}: engine {}, not xdp: {why}", socket.local_addr(), socket.engine());
        }
        Ok(socket)
    }
}

fn open(mut config: Config) -> Result<Socket> {
    let allowed = cpu::affinity().map_err(|err| Error::system("reading the CPU affinity", err))?;
    let cpus =
        config.placement.order(&placement::topology(Path::new("/sys/devices/system/cpu"), &allowed))?;
    let cores = if cpus.is_empty() { allowed.len() } else { cpus.len() };
    let waiting = resolve_policy(config.wait, config.engine, config.lanes, cores);
    (config.wait, config.wait_fallback) = (waiting.policy, waiting.reason);
    let steer = Steer::new(config.steering, config.steering_backend, config.reuse_port)?;
    let join = if config.reuse_port { PortSharing::ReusePort } else { PortSharing::Exclusive };
    let (first, can) = mmsg::open(&config, &config.addr, join)?;
    let addr =
        sock::local_addr(first.as_fd()).map_err(|err| Error::system("reading the bound address", err))?;
    (config.gro, config.gso) = (can.gro, can.gso);
    let lanes = config.lanes;
    let xdp = (config.engine == Engine::Xdp).then(|| XdpControl::open(&config, addr)).transpose()?;
    let shared = Arc::new(Shared::new(config, addr, cpus, steer, xdp));
    let mut socket = Socket { lanes: Vec::with_capacity(lanes), server: Arc::new(Server::default()), shared };
    let first = make_lane(&socket.shared, socket.shared.add_first(first, can)?)?;
    socket.lanes.push(first);
    for at in 1..lanes {
        let named = |err: Error| Error::with(err.kind(), format!("lane {} of {lanes}: {err}", at + 1), err);
        let lane = socket.shared.open_lane().and_then(|parts| make_lane(&socket.shared, parts));
        socket.lanes.push(lane.map_err(named)?);
    }
    if let Some(xdp) = &socket.shared.xdp {
        // The first call measures: do that here, where no datagram waits.
        socket.shared.rx_coalesce();
        // Last, so that every companion is ready for datagrams that XDP does not take.
        xdp.start()?;
    }
    log::info!("{addr}: {lanes} lanes, engine {}, steering {}", socket.engine(), socket.steering());
    Ok(socket)
}

/// Opens one more lane of a socket.
pub(super) fn open_lane(shared: &Arc<Shared>) -> Result<Lane> {
    let lane = make_lane(shared, shared.open_lane()?)?;
    if let Some(xdp) = &shared.xdp {
        xdp.rebalance();
    }
    Ok(lane)
}

/// Makes a lane from its parts; a lane that could not be steered to closes again.
fn make_lane(shared: &Arc<Shared>, (parts, admitted): (LaneParts, Result<()>)) -> Result<Lane> {
    let LaneParts { lane_shared, io, caps } = parts;
    let lane = Lane::new(Arc::clone(shared), lane_shared, io, caps);
    admitted.map(|()| lane)
}

/// The policy available for `wanted` with this engine, `lanes` and `cores`.
fn resolve_policy(wanted: WaitPolicy, engine: Engine, lanes: usize, cores: usize) -> EffectiveWait {
    let (policy, why) = match wanted {
        WaitPolicy::Adaptive if lanes > cores => (
            WaitPolicy::Sleep,
            Some(format!("{lanes} lanes share {cores} cores: one that spins keeps another waiting")),
        ),
        WaitPolicy::BusyPoll(time) => match try_busy_poll(engine) {
            Ok(()) => (wanted, None),
            Err(err) => (WaitPolicy::Spin(time), Some(err.chain())),
        },
        _ => (wanted, None),
    };
    EffectiveWait { policy, reason: why }
}

/// Checks whether lanes of this engine can busy poll.
fn try_busy_poll(engine: Engine) -> Result<()> {
    match engine {
        Engine::Uring => probe::try_uring_napi(),
        Engine::Xdp => probe::try_socket_busy_poll().and_then(|()| probe::try_epoll_busy_poll()),
        Engine::Mmsg | Engine::Auto => probe::try_socket_busy_poll(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn lanes_that_share_a_core_do_not_spin_by_themselves() {
        let settled = |policy, lanes| resolve_policy(policy, Engine::Mmsg, lanes, 2);
        assert_eq!(
            settled(WaitPolicy::Adaptive, 2),
            EffectiveWait { policy: WaitPolicy::Adaptive, reason: None }
        );
        let crowded = settled(WaitPolicy::Adaptive, 3);
        assert_eq!(crowded.policy, WaitPolicy::Sleep);
        assert!(crowded.reason.unwrap().starts_with("3 lanes share 2 cores"));
        // An explicit policy stays in force.
        let spin = WaitPolicy::Spin(Duration::from_micros(5));
        assert_eq!(settled(spin, 3).policy, spin);
    }
}
