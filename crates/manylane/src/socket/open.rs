//! Opening a socket: selects the engine, opens the lanes, and attaches the queues of devices last.

use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;

use manylane_sys::{cpu, sock};

use super::Socket;
use super::lanes::make_lane;
use super::server::Server;
use crate::config::{Builder, Config, Engine};
use crate::error::{Error, Result};
use crate::group::Shared;
use crate::io::kernel_socket::{self, PortSharing};
use crate::steer::Steer;
use crate::wait::{EffectiveWait, WaitPolicy};
use crate::{io, placement, probe};

impl Socket {
    /// Opens a socket with the default options: see [`Builder`].
    ///
    /// # Errors
    /// As for [`Builder::open`].
    pub fn bind(addr: impl std::net::ToSocketAddrs) -> Result<Self> {
        Builder::new(addr)?.open()
    }

    /// Starts with the address to bind: [`Builder::new`].
    ///
    /// # Errors
    /// As for [`Builder::new`].
    pub fn builder(addr: impl std::net::ToSocketAddrs) -> Result<Builder> {
        Builder::new(addr)
    }
}

impl Builder {
    /// Checks the options and opens the socket. When this returns, every lane is bound and ready.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) for invalid options, and any error of
    /// opening a lane. The message names the option, the capability, the limit or the sysctl to
    /// change.
    pub fn open(&self) -> Result<Socket> {
        let asked = self.check()?;
        let (engine, substitute) = io::select(&asked);
        let config = Config { engine, ..asked.clone() };
        let usable = io::check(&config);
        let Some(substitute) = substitute else { return usable.and_then(|()| open(config)) };
        let why = match usable {
            // The engine was named and is usable: any other error is final.
            Ok(()) if asked.engine == engine => return open(config),
            Ok(()) => match open(config.clone()) {
                Ok(socket) => return Ok(socket),
                Err(err) => err,
            },
            Err(err) => err,
        };
        let config = Config { engine: substitute, fallback: Some(why.chain()), ..config };
        // The options may need the first engine.
        if io::check(&config).is_err() {
            return Err(why);
        }
        let socket = open(config)?;
        log::info!("{}: engine {substitute}, not {engine}: {}", socket.local_addr(), why.chain());
        Ok(socket)
    }
}

fn open(mut config: Config) -> Result<Socket> {
    let allowed = cpu::affinity().map_err(|err| Error::system("reading the CPU affinity", err))?;
    let cpus =
        config.placement.order(&placement::topology(Path::new("/sys/devices/system/cpu"), &allowed))?;
    let cpu_count = if cpus.is_empty() { allowed.len() } else { cpus.len() };
    let waiting = resolve_policy(config.wait, config.engine, config.lanes, cpu_count);
    (config.wait, config.wait_fallback) = (waiting.policy, waiting.reason);
    config.batch = config.batch.min(io::batch_max(config.engine));
    let steer = Steer::new(config.steering, config.steering_backend, config.reuse_port)?;
    let join = if config.reuse_port { PortSharing::ReusePort } else { PortSharing::Exclusive };
    let (first, offloads) = kernel_socket::open(&config, &config.addr, join)?;
    let addr =
        sock::local_addr(first.as_fd()).map_err(|err| Error::system("reading the bound address", err))?;
    let lanes = config.lanes;
    let engine = io::open(&config, addr)?;
    let shared = Arc::new(Shared::new(config, addr, cpus, cpu_count, steer, engine));
    let mut socket = Socket { lanes: Vec::with_capacity(lanes), server: Arc::new(Server::default()), shared };
    let first = make_lane(&socket.shared, socket.shared.add_open(first, offloads)?)?;
    socket.lanes.push(first);
    for at in 1..lanes {
        let named = |err: Error| Error::with(err.kind(), format!("lane {} of {lanes}: {err}", at + 1), err);
        let lane = socket.shared.open_lane().and_then(|parts| make_lane(&socket.shared, parts));
        socket.lanes.push(lane.map_err(named)?);
    }
    // Last, so that every kernel socket is ready for datagrams that the engine does not take.
    socket.shared.engine.start()?;
    log::info!("{addr}: {lanes} lanes, engine {}, steering {}", socket.engine(), socket.steering());
    Ok(socket)
}

/// The policy available for `wanted` with this engine, `lanes` and `cpu_count`.
fn resolve_policy(wanted: WaitPolicy, engine: Engine, lanes: usize, cpu_count: usize) -> EffectiveWait {
    let (policy, why) = match wanted {
        WaitPolicy::Adaptive if lanes > cpu_count => (
            WaitPolicy::Sleep,
            Some(format!(
                "{lanes} lanes share {cpu_count} CPUs, and a lane that polls keeps another from its CPU"
            )),
        ),
        WaitPolicy::BusyPoll(time) => match probe::try_busy_poll(engine) {
            Ok(()) => (wanted, None),
            Err(err) => (WaitPolicy::Spin(time), Some(err.chain())),
        },
        _ => (wanted, None),
    };
    EffectiveWait { policy, reason: why }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn lanes_sharing_a_core_do_not_spin_by_default() {
        let settled = |policy, lanes| resolve_policy(policy, Engine::Auto, lanes, 2);
        assert_eq!(
            settled(WaitPolicy::Adaptive, 2),
            EffectiveWait { policy: WaitPolicy::Adaptive, reason: None }
        );
        let crowded = settled(WaitPolicy::Adaptive, 3);
        assert_eq!(crowded.policy, WaitPolicy::Sleep);
        assert!(crowded.reason.unwrap().starts_with("3 lanes share 2 CPUs"));
        // An explicit policy stays in force.
        let spin = WaitPolicy::Spin(Duration::from_micros(5));
        assert_eq!(settled(spin, 3).policy, spin);
    }
}
