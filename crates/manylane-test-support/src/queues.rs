//! The number of queues of a network device.

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd as _;

use crate::errno::check;

/// `struct ethtool_channels` of linux/ethtool.h.
#[repr(C)]
#[derive(Default)]
struct Channels {
    command: u32,
    max: [u32; 4],
    receive: u32,
    send: u32,
    other: u32,
    combined: u32,
}

/// Sets the number of queues in each direction (`ETHTOOL_SCHANNELS`): those of drivers that count
/// them separately, such as veth (Linux 5.15), and the larger number for drivers whose queues serve
/// both directions.
///
/// # Errors
/// `EINVAL` above the maximum of the device, or if an XDP program or an XSK prevents it; `EPERM`
/// without CAP_NET_ADMIN; `EOPNOTSUPP`; `ENODEV`.
///
/// # Panics
/// If the name is longer than any device's.
pub fn set_queues(name: &str, receive: u32, send: u32) -> io::Result<()> {
    const ETHTOOL_GCHANNELS: u32 = 0x3c;
    const ETHTOOL_SCHANNELS: u32 = 0x3d;
    let mut channels = Channels { command: ETHTOOL_GCHANNELS, ..Channels::default() };
    request(name, &mut channels)?;
    let [.., combined_max] = channels.max;
    if combined_max > 0 {
        channels.combined = receive.max(send);
    } else {
        (channels.receive, channels.send) = (receive, send);
    }
    channels.command = ETHTOOL_SCHANNELS;
    request(name, &mut channels)
}

#[allow(clippy::unnecessary_cast, reason = "the type of an ioctl number differs between C libraries")]
fn request(name: &str, channels: &mut Channels) -> io::Result<()> {
    // The last byte of the name stays zero: the kernel requires a terminated name.
    assert!(name.len() < libc::IF_NAMESIZE, "device name too long: {name}");
    // SAFETY: `ifreq` is plain integers and a pointer that may be null: all zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = std::ptr::from_mut(channels).cast();
    // Any socket will do, of the namespace of this thread.
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    // SAFETY: the kernel uses `request`, and by its pointer `channels`, only during the call. Both
    // commands read and write one `struct ethtool_channels`.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut request) }).map(drop)
}
