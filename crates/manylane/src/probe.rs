//! Capabilities of this machine and this process, found by trying.
//!
//! The builder's fallbacks, `manylane doctor` and the tests' skips use the same results.

use std::net::SocketAddr;
use std::os::fd::AsFd;

use manylane_sys::epoll::Epoll;
use manylane_sys::sock::{self, Flag};
use manylane_sys::uring::UringRecv;
use manylane_sys::{barrier, busy_poll, cbpf};

use crate::config::Engine;
use crate::error::{Error, Result};
use crate::io::uring;
use crate::steer;
use crate::wait::BUSY_POLL_DEFAULT;

/// The features that can be used; for each of the others the reason why not.
#[derive(Debug)]
#[non_exhaustive]
pub struct Probe {
    /// Steering by eBPF.
    pub ebpf: Result<()>,
    /// Steering by classic BPF.
    pub classic_bpf: Result<()>,
    /// UDP GRO: several datagrams are received as one message.
    pub gro: Result<()>,
    /// UDP GSO: several datagrams are sent as one message.
    pub gso: Result<()>,
    /// Multishot receives by io_uring, which [`Engine::Uring`] needs.
    pub uring: Result<()>,
    /// Busy polling in calls on a kernel socket, which
    /// [`WaitPolicy::BusyPoll`](crate::WaitPolicy::BusyPoll) needs with engine `mmsg`.
    pub busy_poll: Result<()>,
    /// Busy polling in waits on an epoll, which engine `xdp` needs in addition.
    pub epoll_busy_poll: Result<()>,
    /// Busy polling in waits on a ring, for engine `uring`.
    pub uring_napi: Result<()>,
    /// IPv6 sockets.
    pub ipv6: Result<()>,
    /// RCU grace periods to wait for steering to settle (else a fixed delay is used).
    pub grace_period: Result<()>,
    /// Drop counts of a single socket (`SO_MEMINFO`).
    pub socket_drops: Result<()>,
}

/// Tries every feature once. Takes some milliseconds.
#[must_use]
pub fn probe() -> Probe {
    let v4 = SocketAddr::from(([127, 0, 0, 1], 0));
    let with = |what: &'static str, try_it: &dyn Fn(std::os::fd::BorrowedFd<'_>) -> std::io::Result<()>| {
        let fd =
            sock::open(&v4).and_then(|fd| sock::set_flag(fd.as_fd(), Flag::ReusePort, true).map(|()| fd));
        let tried = fd.and_then(|fd| {
            sock::bind(fd.as_fd(), &v4)?;
            try_it(fd.as_fd())
        });
        tried.map_err(|err| Error::system(what, err))
    };
    // Always selects the first socket.
    let first = [cbpf::insn(cbpf::RET_K, 0)];
    let unsupported = || std::io::Error::from(std::io::ErrorKind::Unsupported);
    Probe {
        ebpf: steer::try_load_ebpf(),
        classic_bpf: with("SO_ATTACH_REUSEPORT_CBPF", &|fd| sock::attach_reuseport_cbpf(fd, &first)),
        gro: with("UDP_GRO", &|fd| sock::set_flag(fd, Flag::Gro, true)),
        gso: with("UDP_SEGMENT", &|fd| if sock::supports_gso(fd) { Ok(()) } else { Err(unsupported()) }),
        uring: uring::probe(),
        busy_poll: try_socket_busy_poll(),
        epoll_busy_poll: try_epoll_busy_poll(),
        uring_napi: try_uring_napi(),
        ipv6: sock::open(&SocketAddr::from(([0; 8], 0))).map(drop).map_err(|err| Error::system("IPv6", err)),
        grace_period: barrier::grace_period().map_err(|err| Error::system("membarrier", err)),
        socket_drops: with("SO_MEMINFO", &|fd| sock::queue_state(fd).map(drop)),
    }
}

/// Checks whether lanes of this engine can busy poll.
pub(crate) fn try_busy_poll(engine: Engine) -> Result<()> {
    match engine {
        Engine::Uring => try_uring_napi(),
        Engine::Xdp => try_socket_busy_poll().and_then(|()| try_epoll_busy_poll()),
        Engine::Mmsg | Engine::Auto => try_socket_busy_poll(),
    }
}

/// Tries to enable busy polling on a socket.
fn try_socket_busy_poll() -> Result<()> {
    busy_poll::probe().map_err(|err| {
        let advice =
            "SO_BUSY_POLL: needs CONFIG_NET_RX_BUSY_POLL, and CAP_NET_ADMIN or the sysctl net.core.busy_read";
        Error::system(advice, err)
    })
}

/// Tries to enable busy polling on an epoll.
fn try_epoll_busy_poll() -> Result<()> {
    let tried = Epoll::new(1).and_then(|watch| watch.busy_poll(BUSY_POLL_DEFAULT, busy_poll::BUDGET_PACKETS));
    tried.map_err(|err| Error::system("EPIOCSPARAMS: needs Linux 6.9", err))
}

/// Tries to enable busy polling on a ring.
fn try_uring_napi() -> Result<()> {
    uring::run_in_thread(|| {
        let tried = UringRecv::probe_busy_poll();
        tried.map_err(|err| Error::system("IORING_REGISTER_NAPI: needs Linux 6.9", err))
    })
}
