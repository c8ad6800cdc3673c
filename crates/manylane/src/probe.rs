//! What this machine and this process can do, found out by trying.
//!
//! The same answers serve the builder's fallbacks, `manylane doctor`, and the tests' decision to
//! skip.

use std::net::SocketAddr;
use std::os::fd::AsFd;

use manylane_sys::measure::Epoll;
use manylane_sys::sock::{self, Flag};
use manylane_sys::uring::UringRecv;
use manylane_sys::{barrier, busy_poll, cbpf};

use crate::error::{Error, Result};
use crate::io::uring;
use crate::steer;
use crate::wait::BUSY_POLL_DEFAULT;

/// What can be used, each with the reason if it cannot.
#[derive(Debug)]
#[non_exhaustive]
pub struct Probe {
    /// Steering by eBPF.
    pub ebpf: Result<()>,
    /// Steering by classic BPF.
    pub classic_bpf: Result<()>,
    /// Receiving trains of datagrams (UDP GRO).
    pub gro: Result<()>,
    /// Sending trains of datagrams (UDP GSO).
    pub gso: Result<()>,
    /// A receive by io_uring that is armed once: what [`Engine::Uring`](crate::Engine::Uring)
    /// needs.
    pub uring: Result<()>,
    /// Calls on a kernel socket that look at its device before they sleep: what
    /// [`WaitPolicy::BusyPoll`](crate::WaitPolicy::BusyPoll) needs with engine `mmsg`.
    pub busy_poll: Result<()>,
    /// The same for waits on an epoll, which engine `xdp` needs beside it.
    pub epoll_busy_poll: Result<()>,
    /// The same for waits on a ring: engine `uring`.
    pub uring_napi: Result<()>,
    /// IPv6 sockets.
    pub ipv6: Result<()>,
    /// Waiting for steering to settle by an RCU grace period (else by a pause).
    pub grace_period: Result<()>,
    /// The drops of a single socket (`SO_MEMINFO`).
    pub socket_drops: Result<()>,
}

/// Tries everything once; takes some milliseconds.
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
    // Always the first socket.
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

/// Tries to have a socket poll its device.
pub(crate) fn try_socket_busy_poll() -> Result<()> {
    busy_poll::probe().map_err(|err| {
        let advice = "SO_BUSY_POLL: needs CAP_NET_ADMIN, or the sysctl net.core.busy_read, and CONFIG_NET_RX_BUSY_POLL";
        Error::system(advice, err)
    })
}

/// Tries to have an epoll poll devices.
pub(crate) fn try_epoll_busy_poll() -> Result<()> {
    let tried = Epoll::new(1).and_then(|watch| watch.busy_poll(BUSY_POLL_DEFAULT, busy_poll::BUDGET));
    tried.map_err(|err| Error::system("EPIOCSPARAMS: needs Linux 6.9", err))
}

/// Tries to have a ring poll devices.
pub(crate) fn try_uring_napi() -> Result<()> {
    uring::run_in_thread(|| {
        let tried = UringRecv::probe_busy_poll();
        tried.map_err(|err| Error::system("IORING_REGISTER_NAPI: needs Linux 6.9", err))
    })
}
