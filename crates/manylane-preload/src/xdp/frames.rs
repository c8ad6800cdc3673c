//! Datagrams from frames, which `recv_bufs.rs` hands out, and frames from datagrams:
//! [`TxDatagram`] is what a call sends. No system call, no memory of its own.

use std::marker::PhantomData;
use std::mem::size_of;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::ptr;

use libc::{iovec, msghdr, sockaddr, socklen_t};
use manylane_sys::addr::SockAddr;
use manylane_wire::datagram::Datagram;
use manylane_wire::frame::UdpFrame;

/// The source and the payload of the datagram in a frame that the XDP program passed on, if it is
/// valid; none if the kernel would have dropped it.
#[inline]
pub(crate) fn parse(frame: &[u8], from_veth: bool) -> Option<(SocketAddr, Range<usize>)> {
    let mut datagram = Datagram::default();
    datagram.read_hinted(frame).ok()?;
    let at = usize::from(datagram.payload_offset);
    let payload = at..at + usize::from(datagram.len);
    // Another process may have changed the frame while it was parsed.
    frame.get(payload.clone())?;
    datagram.checksum.is_accepted(from_veth).then(|| (datagram.source(), payload))
}

/// One datagram that a call of the program sends, during which the value may be used.
#[derive(Clone, Copy)]
pub(crate) struct TxDatagram<'call> {
    to: *const sockaddr,
    tolen: socklen_t,
    iovecs: *const iovec,
    count: usize,
    call: PhantomData<&'call [u8]>,
}

/// Maximum length of an address that is used, in bytes.
const NAME_LEN_MAX: usize = 32;

/// Max iovecs that are copied; the kernel sends a message with more.
const IOVECS_MAX: usize = 64;

/// The constructors have the contract *program arguments* (`functions.rs`).
impl<'call> TxDatagram<'call> {
    /// From one piece.
    pub(crate) unsafe fn from_iovec(piece: &'call iovec, to: *const sockaddr, tolen: socklen_t) -> Self {
        Self { to, tolen, iovecs: piece, count: 1, call: PhantomData }
    }

    /// From a message with an address and payload only. None if it has control messages.
    pub(crate) unsafe fn from_msghdr(message: *const msghdr) -> Option<Self> {
        // SAFETY: program arguments.
        let message = unsafe { message.as_ref() }?;
        if message.msg_controllen != 0 {
            return None;
        }
        let (to, tolen) = (message.msg_name.cast_const().cast(), message.msg_namelen);
        let (iovecs, count) = (message.msg_iov.cast_const(), message.msg_iovlen);
        Some(Self { to, tolen, iovecs, count, call: PhantomData })
    }

    /// Length of the payload; none if it has too many iovecs, or one with a null pointer.
    pub(crate) fn len(&self) -> Option<usize> {
        if self.count > IOVECS_MAX || (self.count > 0 && self.iovecs.is_null()) {
            return None;
        }
        (0..self.count).try_fold(0_usize, |sum, nth| {
            // SAFETY: program arguments.
            let piece = unsafe { &*self.iovecs.wrapping_add(nth) };
            let is_somewhere = piece.iov_len == 0 || !piece.iov_base.is_null();
            sum.checked_add(piece.iov_len).filter(|_| is_somewhere)
        })
    }

    /// The address, as the program gave it; none if it is missing, too short or too long.
    pub(crate) fn name(&self) -> Option<&[u8]> {
        self.name_up_to(NAME_LEN_MAX)
    }

    /// The same, at most [`NAME_LEN_MAX`] bytes of it; none if it is longer than `len_max`.
    fn name_up_to(&self, len_max: usize) -> Option<&[u8]> {
        let len = self.tolen as usize;
        if self.to.is_null() || !(size_of::<libc::sockaddr_in>()..=len_max).contains(&len) {
            return None;
        }
        // SAFETY: program arguments.
        Some(unsafe { std::slice::from_raw_parts(self.to.cast::<u8>(), len.min(NAME_LEN_MAX)) })
    }

    /// Copies the payload into `room`, which is as long as [`len`](Self::len) said. The iovecs may
    /// have changed since then.
    pub(crate) fn copy(&self, room: &mut [u8]) {
        let mut done = 0;
        for nth in 0..if self.iovecs.is_null() { 0 } else { self.count } {
            // SAFETY: program arguments.
            let piece = unsafe { self.iovecs.wrapping_add(nth).read() };
            let part = if piece.iov_base.is_null() { 0 } else { piece.iov_len.min(room.len() - done) };
            // SAFETY: program arguments; `room` has space for the part.
            unsafe {
                ptr::copy_nonoverlapping(piece.iov_base.cast_const().cast(), room[done..].as_mut_ptr(), part);
            }
            done += part;
        }
    }

    /// The destination, if it is one peer that a frame can be sent to.
    pub(crate) fn peer(&self, is_v6: bool) -> Option<SocketAddr> {
        // The kernel reports longer ones, and negative ones, or cuts them.
        let name = self.name_up_to(size_of::<libc::sockaddr_storage>())?;
        let peer = SockAddr::parse(name, is_v6)?.to_std()?;
        let (ip, port) = (peer.ip().to_canonical(), peer.port());
        let link_local = matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
        let broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
        let one = port != 0
            && !(ip.is_multicast() || ip.is_unspecified() || ip.is_loopback() || link_local || broadcast);
        one.then(|| SocketAddr::new(ip, port))
    }

    /// Writes the frame of a datagram of `len` bytes, with the headers of `plan`. Returns its
    /// length, or none if it does not fit.
    pub(crate) fn write_frame(&self, room: &mut [u8], len: usize, plan: &UdpFrame<'_>) -> Option<usize> {
        let (head, rest) = room.split_at_mut_checked(plan.len())?;
        let payload = rest.get_mut(..len)?;
        self.copy(payload);
        UdpFrame { payload: &*payload, ..*plan }.write_headers(head).ok()?;
        Some(head.len() + len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_with_a_refused_length_name_no_peer() {
        let addr = SockAddr::from("192.0.2.1:53".parse::<SocketAddr>().unwrap());
        let bytes = addr.as_bytes();
        let mut room = [0_u8; size_of::<libc::sockaddr_storage>()];
        room[..bytes.len()].copy_from_slice(bytes);
        let piece = iovec { iov_base: ptr::null_mut(), iov_len: 0 };
        for (len, is_peer) in
            [(0, false), (15, false), (16, true), (28, true), (128, true), (129, false), (u32::MAX, false)]
        {
            // SAFETY: a local address; no bytes.
            let out = unsafe { TxDatagram::from_iovec(&piece, room.as_ptr().cast(), len) };
            assert_eq!(out.peer(false).is_some(), is_peer, "{len}");
        }
    }
}
