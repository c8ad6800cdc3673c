//! The simulated network of one lane: its faults, its clock, and what was lost and sent.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use manylane_sys::addr::{SockAddr, Source};
use manylane_sys::mmsg::SendBatch;

use crate::error::EAGAIN;

/// A reordered packet arrives this much later.
const REORDER_DELAY: Duration = Duration::from_micros(50);

/// Chances of faults, in 1000.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    pub(crate) loss: u64,
    pub(crate) reordering: u64,
}

/// A packet on its way to the lane: one datagram, or several of one size as a GRO message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Packet {
    pub(crate) peer: SocketAddr,
    pub(crate) payload: Vec<u8>,
    /// Bytes of each datagram of a GRO message; 0 for a single datagram.
    pub(crate) segment_size: u16,
    /// Type of service; none is reported if it is 0.
    pub(crate) tos: u8,
}

/// A message that the lane has sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sent {
    pub(crate) at: Duration,
    pub(crate) peer: SocketAddr,
    pub(crate) source: Option<Source>,
    pub(crate) payload: Vec<u8>,
    pub(crate) datagrams: u64,
}

/// The network of one lane, and its clock.
#[derive(Debug)]
pub(crate) struct Network {
    random: u64,
    pub(crate) faults: Faults,
    /// Time since the start.
    pub(crate) now: Duration,
    /// Packets by the time of their arrival.
    in_flight: Vec<(Duration, Packet)>,
    pub(super) queue: VecDeque<Packet>,
    /// Packets that the queue holds.
    pub(crate) queue_max: usize,
    /// Datagrams that never arrived, and those that found the queue full.
    pub(crate) lost: u64,
    pub(crate) dropped: u64,
    /// The lane takes no more packets.
    has_left: bool,
    /// The next receive fails with this.
    pub(crate) recv_error: Option<i32>,
    /// What the lane has sent; each message needs room in the send buffer.
    pub(crate) sent: Vec<Sent>,
    pub(crate) send_room: usize,
    /// Times at which the send buffer gets room, and for how many messages.
    pub(crate) send_drains: VecDeque<(Duration, usize)>,
    /// Errors of the next messages, and of every message that needs GSO.
    pub(crate) send_errors: VecDeque<i32>,
    pub(crate) gso_error: Option<i32>,
}

impl Network {
    /// A network without faults, in which all that is random follows from `seed`.
    pub(super) fn new(seed: u64) -> Self {
        Self {
            // Zero would stay zero.
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            faults: Faults::default(),
            now: Duration::ZERO,
            in_flight: Vec::new(),
            queue: VecDeque::new(),
            queue_max: usize::MAX,
            lost: 0,
            dropped: 0,
            has_left: false,
            recv_error: None,
            sent: Vec::new(),
            send_room: usize::MAX,
            send_drains: VecDeque::new(),
            send_errors: VecDeque::new(),
            gso_error: None,
        }
    }

    /// A random number below `limit` (xorshift).
    fn random(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) % limit
    }

    /// Sends a packet to the lane; it arrives after `delay`, if it does.
    pub(crate) fn send(&mut self, packet: Packet, delay: Duration) {
        let Faults { loss, reordering } = self.faults;
        if self.random(1000) < loss || self.has_left {
            self.lost += packet.datagrams();
            return;
        }
        let late = if self.random(1000) < reordering { REORDER_DELAY } else { Duration::ZERO };
        let at = self.now + delay + late;
        // Behind all that arrive at the same time, so that order is kept.
        let place = self.in_flight.partition_point(|(other, _)| *other <= at);
        self.in_flight.insert(place, (at, packet));
        self.advance(Duration::ZERO);
    }

    /// Advances the clock; packets that are due arrive.
    pub(crate) fn advance(&mut self, by: Duration) {
        self.now += by;
        let due = self.in_flight.partition_point(|(at, _)| *at <= self.now);
        for (_, packet) in self.in_flight.drain(..due) {
            if self.queue.len() < self.queue_max {
                self.queue.push_back(packet);
            } else {
                self.dropped += packet.datagrams();
            }
        }
    }

    /// The lane is out of steering. What is in flight is lost, as there is no other lane.
    pub(super) fn leave(&mut self) {
        self.has_left = true;
        self.lost += self.in_flight.drain(..).map(|(_, packet)| packet.datagrams()).sum::<u64>();
    }

    /// Waits for a packet, for at most `timeout`.
    pub(super) fn wait_readable(&mut self, timeout: Duration) {
        let next = self.in_flight.first().map_or(timeout, |(at, _)| at.saturating_sub(self.now));
        let wait = if self.queue.is_empty() { next.min(timeout) } else { Duration::ZERO };
        self.advance(wait);
    }

    /// Waits for room in the send buffer, for at most `timeout`; false if there is none.
    pub(crate) fn wait_writable(&mut self, timeout: Duration) -> bool {
        let next = self.send_drains.front().map_or(timeout, |(at, _)| at.saturating_sub(self.now));
        self.advance(if self.send_room > 0 { Duration::ZERO } else { next.min(timeout) });
        while let Some((_, room)) = self.send_drains.front().filter(|(at, _)| *at <= self.now) {
            self.send_room += room;
            self.send_drains.pop_front();
        }
        self.send_room > 0
    }

    /// As `sendmmsg`.
    pub(crate) fn transmit(&mut self, queue: &mut SendBatch<'_>, from: usize) -> io::Result<usize> {
        for index in from..queue.messages() {
            let (datagrams, _) = queue.message_counts(index);
            let (peer, source, payload) = queue.copy_message(index);
            if let Err(err) = self.transmit_message(&peer, source, payload, datagrams) {
                return if index > from { Ok(index - from) } else { Err(err) };
            }
            queue.set_stuck(false);
        }
        Ok(queue.messages() - from)
    }

    /// As [`SendBatch::send_split`].
    pub(crate) fn transmit_split(
        &mut self,
        queue: &mut SendBatch<'_>,
        index: usize,
        skip: u64,
    ) -> (u64, u64, Option<io::Error>) {
        let (peer, source, payload) = queue.copy_message(index);
        let (mut sent, mut bytes) = (0, 0);
        for part in payload.chunks(queue.segment_size(index).into()).skip(skip as usize) {
            if let Err(err) = self.transmit_message(&peer, source, part.to_vec(), 1) {
                return (sent, bytes, Some(err));
            }
            (sent, bytes) = (sent + 1, bytes + part.len() as u64);
            queue.set_stuck(false);
        }
        (sent, bytes, None)
    }

    fn transmit_message(
        &mut self,
        peer: &SockAddr,
        source: Option<Source>,
        payload: Vec<u8>,
        datagrams: u64,
    ) -> io::Result<()> {
        let refused = if datagrams > 1 { self.gso_error } else { None };
        if let Some(code) = refused.or_else(|| self.send_errors.pop_front()) {
            return Err(io::Error::from_raw_os_error(code));
        }
        if self.send_room == 0 {
            return Err(io::Error::from_raw_os_error(EAGAIN));
        }
        self.send_room -= 1;
        let peer = peer.to_std().ok_or(io::ErrorKind::InvalidInput)?;
        self.sent.push(Sent { at: self.now, peer, source, payload, datagrams });
        Ok(())
    }
}

impl Packet {
    /// Datagrams in it.
    pub(crate) fn datagrams(&self) -> u64 {
        match self.segment_size {
            0 => 1,
            size => self.payload.len().div_ceil(size.into()) as u64,
        }
    }

    /// Its ancillary data, as control messages of the kernel.
    pub(super) fn control(&self) -> Vec<u8> {
        // Numbers of bits/socket.h, linux/in.h and linux/udp.h.
        let (tos, gro) = ((0_i32, 1_i32), (17_i32, 104_i32));
        let mut bytes = Vec::new();
        for (is_set, (level, kind), value) in
            [(self.tos > 0, tos, i32::from(self.tos)), (self.segment_size > 0, gro, self.segment_size.into())]
        {
            if is_set {
                bytes.extend_from_slice(&20_usize.to_ne_bytes());
                [level, kind, value, 0].iter().for_each(|word| bytes.extend_from_slice(&word.to_ne_bytes()));
            }
        }
        bytes
    }
}
