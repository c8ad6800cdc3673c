//! The kernel socket of a lane. Every engine has one: it receives through it, or leaves to it what
//! it does not do itself.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use std::{io, thread};

use manylane_sys::errno::{EACCES, EADDRINUSE};
use manylane_sys::sock::{self, Buffer, Flag};

use super::Capabilities;
use crate::config::{Config, Gro};
use crate::error::{Error, ErrorKind, Result};
use crate::lane_shared::Offloads;
use crate::port_owner;

/// Sharing of the port of a lane's socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortSharing {
    /// Exclusive use of the port, guaranteed by the kernel.
    Exclusive,
    /// Member of the reuseport group.
    ReusePort,
}

/// Opens and binds the socket of one lane, with every option set before the first datagram can
/// reach it.
pub(crate) fn open(config: &Config, addr: &SocketAddr, join: PortSharing) -> Result<(OwnedFd, Offloads)> {
    let fd = sock::open(addr).map_err(|err| Error::system("opening a lane's socket", err))?;
    let socket = fd.as_fd();
    let set = |flag: Flag, on: bool| {
        sock::set_flag(socket, flag, on).map_err(|err| Error::system(format!("socket option {flag:?}"), err))
    };
    let v6 = addr.is_ipv6();
    let dual = v6 && !config.only_v6;
    if v6 {
        set(Flag::OnlyV6, config.only_v6)?;
    }
    if addr.ip().is_unspecified() {
        set(if v6 { Flag::PktInfoV6 } else { Flag::PktInfoV4 }, true)?;
    }
    // The kernel delivers multicast to every socket on the port, not to one of the group: each
    // lane would get a copy for every group that any program on the host has joined. With this
    // off, only a lane that joined a group gets its datagrams.
    let multicast_all = if v6 { Flag::MulticastAllV6 } else { Flag::MulticastAllV4 };
    if sock::set_flag(socket, multicast_all, false).is_err() {
        log::debug!("cannot turn off {multicast_all:?}: every lane gets a copy of multicast datagrams");
    }
    if config.ecn {
        if v6 {
            set(Flag::TosV6, true)?;
        }
        if !v6 || dual {
            set(Flag::TosV4, true)?;
        }
    }
    if config.timestamps {
        set(Flag::Timestamp, true)?;
    }
    set_buffer(socket, Buffer::Receive, config.recv_buffer)?;
    set_buffer(socket, Buffer::Send, config.send_buffer)?;
    let offloads = Offloads {
        gro: match config.gro {
            Gro::Off => false,
            Gro::On => sock::set_flag(socket, Flag::Gro, true).is_ok(),
            Gro::ByTraffic => sock::has_gro(socket).is_ok(),
        },
        gso: config.gso && sock::supports_gso(socket),
    };
    if join == PortSharing::ReusePort {
        set(Flag::ReusePort, true)?;
    }
    bind(socket, addr, config.only_v6)?;
    Ok((fd, offloads))
}

/// Sets a buffer to the requested size, or returns an error that names the limit.
fn set_buffer(socket: BorrowedFd<'_>, which: Buffer, bytes: Option<usize>) -> Result<()> {
    let Some(bytes) = bytes else { return Ok(()) };
    let (option, sysctl) = match which {
        Buffer::Receive => ("recv_buffer", "net.core.rmem_max"),
        Buffer::Send => ("send_buffer", "net.core.wmem_max"),
    };
    let got = sock::set_buffer(socket, which, bytes).map_err(|err| Error::system(option, err))?;
    if got < bytes {
        let message = format!(
            "{option} {bytes}: the kernel allows {got} bytes: raise the sysctl {sysctl}, or run with CAP_NET_ADMIN"
        );
        return Err(Error::new(ErrorKind::Limit, message));
    }
    Ok(())
}

/// Binds. Retries while a process that has just ended still has the port.
fn bind(socket: BorrowedFd<'_>, addr: &SocketAddr, only_v6: bool) -> Result<()> {
    let start = Instant::now();
    loop {
        let Err(err) = sock::bind(socket, addr) else { return Ok(()) };
        if err.raw_os_error() != Some(EADDRINUSE) {
            return Err(bind_error(addr, err));
        }
        let holder = port_owner::find_owner(addr, only_v6);
        if !holder.is_exiting || start.elapsed() > port_owner::HANDOVER_TIMEOUT {
            let by = holder.description.map_or_else(String::new, |who| format!(" by {who}"));
            return Err(Error::with(ErrorKind::InUse, format!("{addr} is in use{by}"), err));
        }
        thread::sleep(Duration::from_millis(1));
    }
}

fn bind_error(addr: &SocketAddr, err: io::Error) -> Error {
    match err.raw_os_error() {
        Some(EACCES) => {
            let advice = "ports below net.ipv4.ip_unprivileged_port_start need CAP_NET_BIND_SERVICE";
            Error::with(ErrorKind::Permission, format!("binding {addr}: {advice}"), err)
        }
        _ => Error::system(format!("binding {addr}"), err),
    }
}

/// True if the kernel adds control messages to the messages of a socket.
pub(super) fn needs_ancillary(config: &Config, caps: Capabilities, addr: &SocketAddr) -> bool {
    caps.gro || caps.timestamps || config.ecn || addr.ip().is_unspecified()
}
