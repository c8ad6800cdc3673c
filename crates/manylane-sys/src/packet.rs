//! Sends and receives whole frames on a device (`AF_PACKET`), as no UDP socket can.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::{self, AddressFamily, SendFlags, SocketFlags, SocketType};

/// A socket that sends frames, with all their headers, from one device.
#[derive(Debug)]
pub struct PacketSocket {
    fd: OwnedFd,
}

impl PacketSocket {
    /// Opens a socket on the device with this index, in the namespace of the calling thread. It
    /// receives nothing.
    ///
    /// # Errors
    /// `EPERM` without CAP_NET_RAW, `ENODEV` if there is no such device.
    pub fn open(ifindex: u32) -> io::Result<Self> {
        // Protocol 0: nothing is received.
        Self::bind(ifindex, 0)
    }

    /// Opens a socket that also receives every frame of the device, including those that it sends.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn listen(ifindex: u32) -> io::Result<Self> {
        let socket = Self::bind(ifindex, (libc::ETH_P_ALL as u16).to_be())?;
        crate::sock::set(socket.fd.as_fd(), libc::SOL_PACKET, libc::PACKET_AUXDATA, 1_i32)?;
        Ok(socket)
    }

    fn bind(ifindex: u32, protocol: u16) -> io::Result<Self> {
        let fd = net::socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
        // SAFETY: sockaddr_ll is a C struct of integers, for which all zeros are valid.
        let mut addr: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        addr.sll_family = libc::AF_PACKET as u16;
        addr.sll_protocol = protocol;
        addr.sll_ifindex = i32::try_from(ifindex).map_err(io::Error::other)?;
        let len = size_of_val(&addr) as libc::socklen_t;
        // SAFETY: the kernel reads `len` bytes of `addr`, which lives across the call.
        crate::check(unsafe { libc::bind(fd.as_raw_fd(), (&raw const addr).cast(), len) })?;
        Ok(Self { fd })
    }

    /// Sends one frame.
    ///
    /// # Errors
    /// Those of `send(2)`: `ENETDOWN`, `ENOBUFS`, `EMSGSIZE`.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        net::send(&self.fd, frame, SendFlags::empty())?;
        Ok(())
    }

    /// Waits for a frame, up to the receive timeout of the socket. Reinserts a VLAN tag that the
    /// kernel stripped.
    ///
    /// # Errors
    /// Those of `recvmsg(2)`: `EAGAIN` after a timeout, `ENETDOWN`.
    pub fn receive(&self) -> io::Result<Vec<u8>> {
        const MAC_ADDRESSES_LEN: usize = 12;
        const FRAME_LEN_MAX: usize = 65_536;
        let mut frame = vec![0_u8; FRAME_LEN_MAX];
        // At least the size of the kernel's message, and aligned for its header.
        let mut control = [0_u64; 8];
        let mut part = libc::iovec { iov_base: frame.as_mut_ptr().cast(), iov_len: frame.len() };
        // SAFETY: msghdr is a C struct of integers and pointers that may be null: all zeros are
        // valid.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control) as _;
        // SAFETY: `message` and all that it points to live across the call, with the lengths in
        // it.
        let got = unsafe { libc::recvmsg(self.fd.as_raw_fd(), &raw mut message, 0) };
        if got < 0 {
            return Err(io::Error::last_os_error());
        }
        frame.truncate(got as usize);
        if let Some((kind, tag)) = stripped_vlan_tag(&message)
            && frame.len() >= MAC_ADDRESSES_LEN
        {
            let [t0, t1] = kind.to_be_bytes();
            let [c0, c1] = tag.to_be_bytes();
            frame.splice(MAC_ADDRESSES_LEN..MAC_ADDRESSES_LEN, [t0, t1, c0, c1]);
        }
        Ok(frame)
    }
}

/// Type and content of the tag that the kernel stripped from the frame in `message`.
fn stripped_vlan_tag(message: &libc::msghdr) -> Option<(u16, u16)> {
    // SAFETY: the kernel filled `message`, and set the length of the control data that it wrote.
    let header = unsafe { libc::CMSG_FIRSTHDR(message) };
    if header.is_null() {
        return None;
    }
    // SAFETY: CMSG_FIRSTHDR returns a header within the control data, or null, which was ruled
    // out.
    let kind = unsafe { ((*header).cmsg_level, (*header).cmsg_type) };
    if kind != (libc::SOL_PACKET, libc::PACKET_AUXDATA) {
        return None;
    }
    // SAFETY: a message of this type holds a tpacket_auxdata, for which the caller's control data
    // has room. It is plain integers, and is read unaligned.
    let about: libc::tpacket_auxdata =
        unsafe { libc::CMSG_DATA(header).cast::<libc::tpacket_auxdata>().read_unaligned() };
    let is_there = about.tp_status & libc::TP_STATUS_VLAN_VALID != 0;
    is_there.then_some((about.tp_vlan_tpid, about.tp_vlan_tci))
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
