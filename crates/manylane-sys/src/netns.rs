//! Unnamed network namespaces, and the few ioctls that a test network needs.
//!
//! A namespace lives as long as something refers to it: a thread inside, a descriptor, a socket.
//! These are held by a descriptor and never mounted. So the kernel removes them, with all their
//! devices, when the process ends in any way.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::thread;

use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::sock;

/// A network namespace.
#[derive(Debug)]
pub struct NetNs {
    fd: OwnedFd,
}

impl NetNs {
    /// Makes an empty namespace; its loopback device is down.
    ///
    /// # Errors
    /// `EPERM` without CAP_SYS_ADMIN, `ENOSPC` at the limit of `user.max_net_namespaces`.
    pub fn create() -> io::Result<NetNs> {
        // On a thread of its own: unsharing moves the calling thread, and the caller must stay in
        // its namespace.
        thread::scope(|scope| {
            let made = thread::Builder::new().name("netns".into()).spawn_scoped(scope, || {
                // SAFETY: this changes the namespace of the calling thread only, which ends here.
                unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
                NetNs::open("/proc/thread-self/ns/net")
            })?;
            made.join()
                .unwrap_or_else(|_| Err(io::Error::other("the thread that creates a namespace panicked")))
        })
    }

    /// Opens the namespace at `path`, such as `/proc/PID/ns/net`.
    ///
    /// # Errors
    /// `ENOENT` if there is none, `EACCES` without permission.
    pub fn open(path: &str) -> io::Result<NetNs> {
        Ok(NetNs { fd: File::open(path)?.into() })
    }

    /// Moves the calling thread into this namespace. Threads that it starts later are in it too.
    ///
    /// # Errors
    /// `EPERM` without CAP_SYS_ADMIN.
    pub fn enter(&self) -> io::Result<()> {
        enter(self.fd.as_fd())
    }

    /// Makes `command` run in this namespace.
    ///
    /// # Errors
    /// If the descriptor cannot be duplicated.
    #[cfg(any(test, feature = "bench"))]
    pub fn enter_in_child(&self, command: &mut std::process::Command) -> io::Result<()> {
        use std::os::unix::process::CommandExt as _;
        let fd = self.fd.try_clone()?;
        // SAFETY: the closure runs in the child between fork and exec, where only async-signal-safe
        // calls are allowed: it does one setns on a descriptor that it owns, and allocates nothing
        // (an `io::Error` of a raw OS code is not on the heap).
        unsafe { command.pre_exec(move || enter(fd.as_fd())) };
        Ok(())
    }

    /// A path by which another process of the same user can open this namespace while this process
    /// lives.
    #[must_use]
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.fd.as_raw_fd())
    }
}

impl AsFd for NetNs {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn enter(fd: BorrowedFd<'_>) -> io::Result<()> {
    Ok(move_into_link_name_space(fd, Some(LinkNameSpaceType::Network))?)
}

/// Cookie of the calling thread's namespace, which is never reused (Linux 5.14).
///
/// # Errors
/// `ENOPROTOOPT` before Linux 5.14; those of opening a socket.
pub fn cookie() -> io::Result<u64> {
    sock::get(udp_socket()?.as_fd(), libc::SOL_SOCKET, libc::SO_NETNS_COOKIE)
}

/// Index of the device `name` in the namespace of the calling thread.
///
/// # Errors
/// `ENODEV` if there is no such device.
pub fn device_index(name: &str) -> io::Result<u32> {
    Ok(name_to_index(udp_socket()?, name)?)
}

/// True if the device is up and has a carrier, so that a frame sent now is not lost.
///
/// # Errors
/// `ENODEV` if there is no such device.
#[cfg(any(test, feature = "bench"))]
pub fn is_device_running(name: &str) -> io::Result<bool> {
    let flags = device_flags(name)?;
    let is_running = flags & libc::IFF_UP != 0 && flags & libc::IFF_RUNNING != 0;
    if is_running {
        // The kernel sets the flag first, and then replaces the queue that drops all frames
        // (`linkwatch_do_dev`), both under RTNL: a request that takes RTNL returns after the
        // second.
        const ETHTOOL_GLINK: u32 = 0x0a;
        ethtool_value(name, ETHTOOL_GLINK, 0)?;
    }
    Ok(is_running)
}

/// Switches generic receive offload of a device. A veth device with GRO runs NAPI (Linux 5.13),
/// which it needs to receive frames that XDP sends to it.
///
/// # Errors
/// `ENODEV` if there is no such device, `EPERM` without CAP_NET_ADMIN, `EOPNOTSUPP`.
#[cfg(any(test, feature = "bench"))]
pub fn set_device_gro(name: &str, on: bool) -> io::Result<()> {
    const ETHTOOL_SGRO: u32 = 0x2c;
    ethtool_value(name, ETHTOOL_SGRO, on.into()).map(drop)
}

/// Switches checksum offload for sending. Without it, the peer of a veth device receives what a
/// wire would deliver: single frames with checksums.
///
/// # Errors
/// `ENODEV` if there is no such device, `EPERM` without CAP_NET_ADMIN, `EOPNOTSUPP`.
#[cfg(any(test, feature = "bench"))]
pub fn set_device_checksums(name: &str, on: bool) -> io::Result<()> {
    const ETHTOOL_STXCSUM: u32 = 0x17;
    ethtool_value(name, ETHTOOL_STXCSUM, on.into()).map(drop)
}

/// Switches TCP segmentation and generic segmentation offload. Without them, a veth device sends
/// frames no longer than its MTU, one by one.
///
/// # Errors
/// `ENODEV` if there is no such device, `EPERM` without CAP_NET_ADMIN, `EOPNOTSUPP`.
#[cfg(any(test, feature = "bench"))]
pub fn set_device_segmentation(name: &str, on: bool) -> io::Result<()> {
    const ETHTOOL_STSO: u32 = 0x1f;
    const ETHTOOL_SGSO: u32 = 0x24;
    ethtool_value(name, ETHTOOL_STSO, on.into())?;
    ethtool_value(name, ETHTOOL_SGSO, on.into()).map(drop)
}

/// Makes a request with a `struct ethtool_value` of linux/ethtool.h; returns its data after that.
pub(crate) fn ethtool_value(name: &str, command: u32, data: u32) -> io::Result<u32> {
    let mut value = [command, data];
    ethtool(name, &mut value)?;
    Ok(value[1])
}

/// Makes a request of linux/ethtool.h. `value` is the struct of a command, which begins with the
/// command.
pub(crate) fn ethtool<T>(name: &str, value: &mut T) -> io::Result<()> {
    let mut request = ifreq(name)?;
    // The kernel uses this pointer only during the ioctl; `value` outlives it and has the size of
    // the kernel's struct.
    request.ifr_ifru.ifru_data = std::ptr::from_mut(value).cast();
    ioctl(libc::SIOCETHTOOL, &mut request)
}

/// Flags of a device, `IFF_*`.
pub(crate) fn device_flags(name: &str) -> io::Result<i32> {
    let mut request = ifreq(name)?;
    ioctl(libc::SIOCGIFFLAGS, &mut request)?;
    // SAFETY: SIOCGIFFLAGS filled this member of the union.
    Ok(i32::from(unsafe { request.ifr_ifru.ifru_flags }))
}

/// A socket for device requests.
fn udp_socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?)
}

pub(crate) fn ifreq(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: `ifreq` is plain integers and a pointer that may be null: all zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero: the kernel requires a terminated name.
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("device name too long: {name}")));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    Ok(request)
}

#[allow(clippy::unnecessary_cast, reason = "the type of an ioctl number differs between C libraries")]
pub(crate) fn ioctl(number: libc::c_ulong, request: &mut libc::ifreq) -> io::Result<()> {
    let socket = udp_socket()?;
    // SAFETY: every number used in this file takes an `ifreq`, which is borrowed for the call; the
    // pointer inside, if any, is set by the caller to a value that outlives the call.
    if unsafe { libc::ioctl(socket.as_raw_fd(), number as _, std::ptr::from_mut(request)) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
