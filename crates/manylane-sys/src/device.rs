//! Network devices: what the kernel tells about them by ioctl, in the namespace of the calling thread.

use std::ffi::CStr;
use std::io;

use crate::netns::{ioctl, request};

/// Name of the device with this index.
///
/// # Errors
/// `ENXIO` when there is none.
pub fn name(index: u32) -> io::Result<String> {
    let mut name = [0_u8; libc::IF_NAMESIZE];
    // SAFETY: the kernel's limit for names is the size of the array, and if_indextoname(3) terminates it.
    if unsafe { libc::if_indextoname(index, name.as_mut_ptr().cast()) }.is_null() {
        return Err(io::Error::last_os_error());
    }
    let name = CStr::from_bytes_until_nul(&name).map_err(io::Error::other)?;
    Ok(name.to_string_lossy().into_owned())
}

/// Hardware address of an Ethernet device.
///
/// # Errors
/// `ENODEV` when there is no such device; `ENOTSUP` when it is not Ethernet.
pub fn mac(name: &str) -> io::Result<[u8; 6]> {
    let mut request = request(name)?;
    ioctl(libc::SIOCGIFHWADDR, &mut request)?;
    // SAFETY: SIOCGIFHWADDR filled this member of the union.
    let addr = unsafe { request.ifr_ifru.ifru_hwaddr };
    if addr.sa_family != libc::ARPHRD_ETHER {
        return Err(io::Error::from_raw_os_error(libc::ENOTSUP));
    }
    let mut mac = [0; 6];
    for (to, from) in mac.iter_mut().zip(addr.sa_data) {
        *to = from as u8;
    }
    Ok(mac)
}

/// Largest IP packet that the device sends, in bytes.
///
/// # Errors
/// `ENODEV` when there is no such device.
pub fn mtu(name: &str) -> io::Result<u32> {
    let mut request = request(name)?;
    ioctl(libc::SIOCGIFMTU, &mut request)?;
    // SAFETY: SIOCGIFMTU filled this member of the union.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    u32::try_from(mtu).map_err(io::Error::other)
}

/// Whether the device is up.
///
/// # Errors
/// `ENODEV` when there is no such device.
pub fn is_up(name: &str) -> io::Result<bool> {
    let mut request = request(name)?;
    ioctl(libc::SIOCGIFFLAGS, &mut request)?;
    // SAFETY: SIOCGIFFLAGS filled this member of the union.
    let flags = i32::from(unsafe { request.ifr_ifru.ifru_flags });
    Ok(flags & libc::IFF_UP != 0)
}

/// `struct ethtool_channels` of linux/ethtool.h.
#[repr(C)]
#[derive(Default)]
struct Channels {
    cmd: u32,
    max: [u32; 4],
    rx: u32,
    tx: u32,
    other: u32,
    combined: u32,
}

impl Channels {
    const GET: u32 = 0x3c;
    const SET: u32 = 0x3d;

    fn ask(&mut self, name: &str, cmd: u32) -> io::Result<()> {
        self.cmd = cmd;
        let mut request = request(name)?;
        // The kernel reads and writes through this pointer during the ioctl only; `self` outlives it.
        request.ifr_ifru.ifru_data = std::ptr::from_mut(self).cast();
        ioctl(libc::SIOCETHTOOL, &mut request)
    }
}

/// Receive queues that the device has in use (`ETHTOOL_GCHANNELS`). One where the driver does not say.
///
/// # Errors
/// `ENODEV` when there is no such device.
pub fn receive_queues(name: &str) -> io::Result<u32> {
    let mut channels = Channels::default();
    match channels.ask(name, Channels::GET) {
        Ok(()) => Ok((channels.rx + channels.combined).max(1)),
        Err(err) if err.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(1),
        Err(err) => Err(err),
    }
}

/// Sets how many queues the device uses in each direction (`ETHTOOL_SCHANNELS`), of a driver that counts them apart,
/// as veth does (Linux 5.15).
///
/// # Errors
/// `EINVAL` beyond what the device was made with, or if an XDP program or an XSK is in the way; `EPERM` without
/// CAP_NET_ADMIN; `EOPNOTSUPP`; `ENODEV`.
pub fn set_queues(name: &str, receive: u32, send: u32) -> io::Result<()> {
    let mut channels = Channels::default();
    channels.ask(name, Channels::GET)?;
    (channels.rx, channels.tx) = (receive, send);
    channels.ask(name, Channels::SET)
}

/// Name of the driver (`ETHTOOL_GDRVINFO`); empty where there is none.
///
/// # Errors
/// `ENODEV` when there is no such device.
pub fn driver(name: &str) -> io::Result<String> {
    /// `struct ethtool_drvinfo` of linux/ethtool.h.
    #[repr(C)]
    struct Info {
        cmd: u32,
        driver: [u8; 32],
        rest: [u8; 160],
    }
    const ETHTOOL_GDRVINFO: u32 = 3;
    let mut info = Info { cmd: ETHTOOL_GDRVINFO, driver: [0; 32], rest: [0; 160] };
    let mut request = request(name)?;
    // The kernel reads and writes through this pointer during the ioctl only; `info` outlives it and is as long as
    // the kernel's struct (196 bytes).
    request.ifr_ifru.ifru_data = std::ptr::addr_of_mut!(info).cast();
    match ioctl(libc::SIOCETHTOOL, &mut request) {
        Ok(()) => {
            let end = info.driver.iter().position(|&byte| byte == 0).unwrap_or(info.driver.len());
            Ok(String::from_utf8_lossy(&info.driver[..end]).into_owned())
        }
        Err(err) if err.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(String::new()),
        Err(err) => Err(err),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_about_loopback() {
        let name = name(1).unwrap();
        assert_eq!(name, "lo");
        assert!(mtu(&name).unwrap() >= 1280);
        assert_eq!(mac(&name).unwrap_err().raw_os_error(), Some(libc::ENOTSUP));
        assert_eq!(receive_queues(&name).unwrap(), 1);
        assert!(driver(&name).is_ok() && is_up(&name).is_ok());
        assert!(mtu("nosuchdevice").is_err() && set_queues("nosuchdevice", 1, 1).is_err());
    }
}
