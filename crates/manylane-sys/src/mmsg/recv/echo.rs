//! Echoes received messages with the headers of the receive, as a hand-written echo server does. A
//! baseline for measurements; lanes send by [`SendRing`](crate::mmsg::SendRing).

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;
use std::{io, ptr};

use super::{ControlSlot, RecvRing};
use crate::control::SendControl;
use crate::map::PinnedSlice;
use crate::sock;

/// Maximum wait of one call for room in the send buffer, and its retries of what may pass at once.
const WRITABLE_TIMEOUT: Duration = Duration::from_millis(100);
const SEND_RETRIES: u32 = 10;

/// Control messages of echoed messages: the source address and, for a GSO message, the segment
/// size.
pub struct EchoControls(PinnedSlice<SendControl>);

// SAFETY: this value alone owns the memory; headers point at it only during a call that borrows
// both.
unsafe impl Send for EchoControls {}

impl EchoControls {
    /// Room for as many messages as `ring` receives.
    #[must_use]
    pub fn new(ring: &RecvRing) -> Self {
        Self(PinnedSlice::new(SendControl::new(), ring.capacity()))
    }
}

impl RecvRing {
    /// Sends every message of the last receive back to its source, by one `sendmmsg(2)` if there
    /// is no obstacle, and returns how many were sent. A GRO message is sent as a GSO message
    /// (Linux 4.18). If the ring receives control messages with the local address, that is the
    /// source.
    ///
    /// The messages are unchanged until the next receive.
    ///
    /// # Panics
    /// If `controls` were made for a smaller ring.
    pub fn echo(&mut self, fd: BorrowedFd<'_>, controls: &mut EchoControls) -> usize {
        let (first, end) = (self.skipped, self.written);
        for index in first..end {
            let message = self.message(index - first);
            let (len, ancillary) = (message.data.len(), message.ancillary());
            let segment =
                (1..len).contains(&usize::from(ancillary.segment_size)).then_some(ancillary.segment_size);
            // SAFETY: elements of allocations of the two values, both borrowed mutably; `fill`
            // returns a part of the control message, which lives across the call, and the header
            // is restored before it ends.
            unsafe {
                let header = &mut (*self.headers.ptr_at(index)).msg_hdr;
                (*header.msg_iov).iov_len = len;
                let control = &mut *controls.0.ptr_at(index);
                let (at, len) = control.fill(ancillary.local.as_ref(), segment);
                header.msg_control = ptr::from_mut(control).cast::<u8>().wrapping_add(at).cast();
                header.msg_controllen = len as _;
            }
        }
        let sent = self.send_headers(fd, first, end);
        for index in first..end {
            // SAFETY: elements of the ring's own allocations, which is borrowed mutably.
            unsafe {
                let header = &mut (*self.headers.ptr_at(index)).msg_hdr;
                (*header.msg_iov).iov_len = self.buffer;
                header.msg_control = ptr::null_mut();
                if self.control {
                    header.msg_control =
                        ptr::from_mut::<ControlSlot>(&mut *self.controls.ptr_at(index)).cast();
                }
                // The control messages were parsed already; the next receive sets the length anew.
                header.msg_controllen = 0;
            }
        }
        sent
    }

    fn send_headers(&self, fd: BorrowedFd<'_>, first: usize, end: usize) -> usize {
        let (mut at, mut sent, mut retries) = (first, 0, SEND_RETRIES);
        while at < end {
            let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
            let left = (end - at) as libc::c_uint;
            // SAFETY: the caller has set the headers to point at names, buffers and control
            // messages that live across the call; the kernel writes only the lengths that it sent.
            let done = unsafe { libc::sendmmsg(fd.as_raw_fd(), self.headers.ptr_at(at), left, flags as _) };
            if let Ok(done) = usize::try_from(done) {
                at += done;
                sent += done;
                continue;
            }
            let again = match io::Error::last_os_error().raw_os_error() {
                Some(libc::EAGAIN) => retries > 0 && sock::wait_writable(fd, WRITABLE_TIMEOUT),
                // A signal, or an ICMP error that an earlier datagram left on the socket.
                Some(libc::EINTR | libc::ECONNREFUSED) => retries > 0,
                _ => false,
            };
            retries = retries.saturating_sub(1);
            at += usize::from(!again);
        }
        sent
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    use manylane_test_support::need_whole_gso;

    use super::*;
    use crate::mmsg::{RecvOptions, Wait};
    use crate::send_burst::{self, SendBurst};
    use crate::sock::Flag;

    fn pair() -> (UdpSocket, UdpSocket) {
        let (server, client) =
            (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        client.connect(server.local_addr().unwrap()).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        (server, client)
    }

    #[test]
    fn received_batches_are_echoed() {
        let (server, client) = pair();
        let options = RecvOptions { batch: 4, buffer: 2048, control: false };
        let mut ring = RecvRing::new(options).unwrap();
        let mut controls = EchoControls::new(&ring);
        let mut buffer = [0; 64];
        for round in 0..3_u8 {
            // Shorter ones after longer ones: the reset has to be complete.
            for payload in [&[round; 20][..], &[round; 3], &[]] {
                client.send(payload).unwrap();
            }
            assert_eq!(ring.recv(server.as_fd(), Wait::First).unwrap(), 3);
            assert_eq!(ring.echo(server.as_fd(), &mut controls), 3);
            assert_eq!(ring.message(0).data, [round; 20]);
            for payload in [&[round; 20][..], &[round; 3], &[]] {
                let len = client.recv(&mut buffer).unwrap();
                assert_eq!(&buffer[..len], payload);
            }
        }
    }

    #[test]
    fn a_gro_message_is_echoed_as_datagrams() {
        if !need_whole_gso("a_gro_message_is_echoed_as_datagrams") {
            return;
        }
        let (server, client) = pair();
        sock::set_flag(server.as_fd(), Flag::Gro, true).unwrap();
        send_burst::set_segment_size(client.as_fd(), 10).unwrap();
        let options = RecvOptions { batch: 4, buffer: 65_535, control: true };
        let mut ring = RecvRing::new(options).unwrap();
        let mut controls = EchoControls::new(&ring);
        let mut buffer = [0; 100];
        for _ in 0..2 {
            assert_eq!(SendBurst::new(&[7; 10], 1, true).send(client.as_fd(), 5).unwrap(), 5);
            assert_eq!(ring.recv(server.as_fd(), Wait::First).unwrap(), 1);
            assert_eq!(ring.message(0).ancillary().segment_size, 10);
            assert_eq!(ring.echo(server.as_fd(), &mut controls), 1);
            for _ in 0..5 {
                assert_eq!(client.recv(&mut buffer).unwrap(), 10);
            }
        }
    }

    #[test]
    fn a_wildcard_replies_from_the_destination_address() {
        let server = UdpSocket::bind("0.0.0.0:0").unwrap();
        sock::set_flag(server.as_fd(), Flag::PktInfoV4, true).unwrap();
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let asked = ("127.0.0.99", server.local_addr().unwrap().port());
        client.send_to(b"who", asked).unwrap();
        let options = RecvOptions { batch: 4, buffer: 2048, control: true };
        let mut ring = RecvRing::new(options).unwrap();
        assert_eq!(ring.recv(server.as_fd(), Wait::First).unwrap(), 1);
        let mut controls = EchoControls::new(&ring);
        assert_eq!(ring.echo(server.as_fd(), &mut controls), 1);
        assert_eq!(client.recv_from(&mut [0; 8]).unwrap().1.ip().to_string(), asked.0);
    }
}
