//! UDP GRO of a lane's kernel socket, turned on by what arrives.
//!
//! GRO pays where *trains* arrive: datagrams of one size that a sender sends one after the other.
//! Where none do, it costs: while any socket of the machine has it, the kernel looks up the socket
//! of each packet that a device delivers, before it looks it up again (`udp4_gro_receive` in
//! net/ipv4/udp_offload.c). So a lane starts without GRO, and turns it on after [`TRAINS_MIN`]
//! batches with trains, of those that it looks at.
//!
//! It stays on. The kernel goes on with the lookups until the socket closes
//! (`udp_tunnel_encap_enable`), so that little would be saved. And it reports the sizes of what it
//! has joined only while the option is on: messages that are queued while it is turned off would
//! be received as one long datagram.

use std::os::fd::BorrowedFd;

use manylane_sys::sock::{self, Flag};

use super::messages::Messages;

/// A smaller batch has no train that is worth joining.
const BATCH_MIN: usize = 16;
/// One batch in so many is looked at.
const LOOK_INTERVAL: u32 = 64;
/// Batches with trains, in a row, that turn it on.
const TRAINS_MIN: u32 = 4;
/// Trains of several senders may mix: the kernel joins them nevertheless. Each slot has the last
/// message of the senders whose ports end with its number.
const SLOTS: usize = 16;

/// Decides when a lane turns on GRO.
pub(super) struct GroSwitch {
    /// False once it is on, or was refused, or where it is not allowed.
    is_watching: bool,
    batches: u32,
    trains: u32,
}

impl GroSwitch {
    /// `is_watching`: GRO is allowed, and still off.
    pub(super) fn new(is_watching: bool) -> Self {
        Self { is_watching, batches: 0, trains: 0 }
    }

    /// Looks at a batch of `count` messages of `socket`, now and then.
    #[inline]
    pub(super) fn observe(&mut self, messages: Messages<'_>, count: usize, socket: BorrowedFd<'_>) {
        if !self.is_watching || count < BATCH_MIN {
            return;
        }
        self.batches = self.batches.wrapping_add(1);
        if self.batches.is_multiple_of(LOOK_INTERVAL) {
            self.look(messages, count, socket);
        }
    }

    #[cold]
    fn look(&mut self, messages: Messages<'_>, count: usize, socket: BorrowedFd<'_>) {
        self.trains = if has_trains(messages, count) { self.trains + 1 } else { 0 };
        if self.trains < TRAINS_MIN {
            return;
        }
        self.is_watching = false;
        match sock::set_flag(socket, Flag::Gro, true) {
            Ok(()) => log::debug!("GRO is on: senders send trains of datagrams"),
            Err(err) => log::debug!("GRO stays off: UDP_GRO: {err}"),
        }
    }
}

/// True if at least half of the messages have the size of the one before, by the same sender.
fn has_trains(messages: Messages<'_>, count: usize) -> bool {
    let mut last: [Option<(&[u8], usize)>; SLOTS] = [None; SLOTS];
    let follows = |index: &usize| {
        let message = messages.message(*index);
        let (peer, len) = (message.peer.as_bytes(), message.full_len);
        // Family, then the port, as on the wire.
        let slot = peer.get(3).map_or(0, |port| usize::from(*port) % SLOTS);
        last[slot].replace((peer, len)) == Some((peer, len))
    };
    (0..count).filter(follows).count() * 2 >= count
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsFd as _;

    use manylane_sys::mmsg::{RecvOptions, RecvRing, Wait};

    use super::*;

    /// Receives datagrams of these sizes, each from the next of `senders` sockets.
    fn recv(sizes: &[usize], senders: usize) -> (RecvRing, UdpSocket) {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let senders: Vec<_> = (0..senders).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
        for (size, sender) in sizes.iter().zip(senders.iter().cycle()) {
            sender.send_to(&vec![0; *size], socket.local_addr().unwrap()).unwrap();
        }
        let mut ring = RecvRing::new(RecvOptions { batch: 64, buffer: 2048, control: false }).unwrap();
        assert_eq!(ring.recv(socket.as_fd(), Wait::Never).unwrap(), sizes.len());
        (ring, socket)
    }

    fn trains(sizes: &[usize], senders: usize) -> bool {
        has_trains(Messages::Mmsg(&recv(sizes, senders).0), sizes.len())
    }

    #[test]
    fn loopback_trains_are_of_one_sender_and_size() {
        assert!(trains(&[100; 32], 1));
        assert!(!trains(&[100; 32], 32));
        let sizes: Vec<_> = (0..32).collect();
        assert!(!trains(&sizes, 1));
        // Half of them: 15 follow their like, and then 16.
        let mixed = |same: usize| [vec![500; same], (0..32 - same).collect()].concat();
        assert!(!trains(&mixed(16), 1));
        assert!(trains(&mixed(17), 1));
    }

    #[test]
    fn loopback_it_is_turned_on_by_trains_in_a_row() {
        let (train, socket) = recv(&[100; 32], 1);
        let sizes: Vec<_> = (0..32).collect();
        let (other, _) = recv(&sizes, 1);
        let (train, other) = (Messages::Mmsg(&train), Messages::Mmsg(&other));
        let is_on = || sock::has_gro(socket.as_fd()).unwrap();
        let mut switch = GroSwitch::new(true);
        let mut observe = |messages, count, looks: u32| {
            (0..looks * LOOK_INTERVAL).for_each(|_| switch.observe(messages, count, socket.as_fd()));
            is_on()
        };
        assert!(!observe(train, 32, TRAINS_MIN - 1));
        assert!(!observe(other, 32, 1), "the trains have ended");
        assert!(!observe(train, BATCH_MIN - 1, 2 * TRAINS_MIN), "small batches");
        assert!(!observe(train, 32, TRAINS_MIN - 1));
        assert!(observe(train, 32, 1));
        // It is not looked at any more: the user's own choice stays.
        sock::set_flag(socket.as_fd(), Flag::Gro, false).unwrap();
        assert!(!observe(train, 32, 2 * TRAINS_MIN));
    }

    #[test]
    fn loopback_it_stays_off_where_it_is_not_allowed() {
        let (train, socket) = recv(&[100; 32], 1);
        let mut switch = GroSwitch::new(false);
        for _ in 0..2 * TRAINS_MIN * LOOK_INTERVAL {
            switch.observe(Messages::Mmsg(&train), 32, socket.as_fd());
        }
        assert!(!sock::has_gro(socket.as_fd()).unwrap());
    }
}
