//! The socket: queries and control, from the thread that opened it and from others.
//!
//! | file | what it holds |
//! |---|---|
//! | [`open`] | opening: selects the engine, opens the lanes, and attaches the queues of devices last |
//! | [`lanes`] | opening of one lane |
//! | [`handle`] | control from any thread |
//! | [`server`] | events for the loop of `serve` |
//!
//! `group` has the state that its lanes share.

mod handle;
mod lanes;
mod open;
mod server;

use std::net::SocketAddr;
use std::sync::Arc;

use crate::config::{Config, Engine, Gro};
use crate::group::Shared;
use crate::io::{Capabilities, DeviceQueue};
use crate::lane::Lane;
use crate::lane_shared::Offloads;
use crate::steer::EffectiveSteering;
use crate::wait::EffectiveWait;

pub use handle::Handle;
pub(crate) use server::{Event, Server};

/// One bound address with many lanes.
///
/// [`serve`](Self::serve) runs a thread per lane; [`into_lanes`](Self::into_lanes) returns the
/// lanes instead.
pub struct Socket {
    pub(crate) shared: Arc<Shared>,
    pub(crate) server: Arc<Server>,
    pub(crate) lanes: Vec<Lane>,
}

impl Socket {
    /// The queues of devices that feed lanes. Empty with any engine but `xdp`.
    #[must_use]
    pub fn device_queues(&self) -> Vec<DeviceQueue> {
        self.shared.engine.device_queues()
    }

    /// The address that the socket is bound to, with the port that the kernel picked for port 0.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.shared.addr
    }

    /// Number of lanes that the socket was opened with.
    #[must_use]
    pub fn lane_count(&self) -> usize {
        self.lanes.len()
    }

    /// The engine in use; never [`Engine::Auto`].
    #[must_use]
    pub fn engine(&self) -> Engine {
        self.shared.config.engine
    }

    /// The reason why the engine is not the one that was named, or that [`Engine::Auto`] prefers.
    #[must_use]
    pub fn fallback(&self) -> Option<&str> {
        self.shared.config.fallback.as_deref()
    }

    /// The wait policy in force, and why it is not the requested one, if it differs.
    #[must_use]
    pub fn waiting(&self) -> EffectiveWait {
        let Config { wait, wait_fallback: waits_otherwise, .. } = &self.shared.config;
        EffectiveWait { policy: *wait, reason: waits_otherwise.clone() }
    }

    /// The steering in force, and why it is not the requested one, if it differs.
    #[must_use]
    pub fn steering(&self) -> EffectiveSteering {
        self.handle().steering()
    }

    /// The features that the engine was granted on all lanes that the socket was opened with:
    /// where they differ, the weakest value. A lane that is added later has its own:
    /// [`Lane::capabilities`].
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        let config = &self.shared.config;
        let asked = Capabilities::of(config, Offloads { gro: config.gro != Gro::Off, gso: config.gso });
        self.lanes.iter().map(Lane::capabilities).fold(asked, Capabilities::weakest)
    }

    /// A handle for other threads: counters, adding and removing lanes, stopping.
    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle { shared: Arc::clone(&self.shared), server: Arc::clone(&self.server) }
    }

    /// Returns the lanes, for a program that drives them itself.
    #[must_use]
    pub fn into_lanes(self) -> Vec<Lane> {
        self.lanes
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use manylane_test_support::seccomp::{self, Syscall};

    use super::*;
    use crate::config::{Builder, DATAGRAM_SIZE_MAX, Engine};
    use crate::lane::tests::kernel_engines;

    /// `UDP_GRO`; missing in rustix.
    const UDP_GRO: u32 = 104;

    #[test]
    fn loopback_an_engine_may_shorten_batches() {
        for engine in kernel_engines("loopback_an_engine_may_shorten_batches") {
            let batch = |batch| {
                let mut builder = Builder::new("127.0.0.1:0").unwrap();
                builder.engine(engine).lanes(1).batch(batch).open().unwrap().capabilities().batch
            };
            assert_eq!([batch(100), batch(1000)], [100, if engine == Engine::Uring { 128 } else { 1000 }]);
        }
    }

    #[test]
    fn loopback_a_refused_capability_is_not_reported() {
        // A thread of its own: the seccomp filter ends with it.
        let test = || {
            let open = || {
                Builder::new("127.0.0.1:0").unwrap().lanes(1).gro(true).datagram_size(2048).open().unwrap()
            };
            let mut socket = open();
            let granted = socket.capabilities();
            assert_eq!(socket.lanes[0].capabilities(), granted);
            assert!(granted.gro && granted.gso);
            assert_eq!(granted.datagram_size, DATAGRAM_SIZE_MAX);
            seccomp::forbid(Syscall::SetSocketOption(UDP_GRO)).unwrap();
            let later = socket.handle().open_lane().unwrap();
            let refused = Capabilities { gro: false, datagram_size: 2048, ..granted };
            assert_eq!(later.capabilities(), refused);
            // The lanes of a socket differ, so it reports the weakest.
            socket.lanes.push(later);
            assert_eq!(socket.lanes[0].capabilities(), granted);
            assert_eq!(socket.capabilities(), refused);
            // A lane that takes over a parked socket has what that was granted. A new socket would
            // be refused GRO.
            drop(socket.lanes.remove(0));
            assert_eq!(socket.handle().open_lane().unwrap().capabilities(), granted);
            assert_eq!(open().capabilities(), refused);
        };
        thread::spawn(test).join().unwrap();
    }
}
