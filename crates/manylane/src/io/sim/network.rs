//! The simulated network of one lane: its clock, the packets in flight, and those lost and sent.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use manylane_sys::addr::Source;
use manylane_sys::mmsg::SendBatch;

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

/// A scheduled event.
enum Event {
    Arrival(Packet),
    /// Wakes the lane, as a stop of the socket does.
    Call(Box<dyn FnOnce() + Send>),
}

/// The network of one lane, and its clock.
pub(crate) struct Network {
    start: Instant,
    /// Time since the start.
    pub(crate) now: Duration,
    /// Events by their time.
    events: Vec<(Duration, Event)>,
    pub(super) queue: VecDeque<Packet>,
    /// Maximum number of packets in the queue.
    pub(crate) queue_max: usize,
    /// Number of datagrams that arrived after the lane had left.
    pub(crate) lost: u64,
    /// Number of datagrams that found the queue full.
    pub(crate) dropped: u64,
    /// Queues that the lane would still have to serve in its round, if it had more than one.
    pub(crate) round: usize,
    /// The lane has left: it takes no more packets.
    has_left: bool,
    /// Datagrams that the lane has sent.
    pub(crate) sent: Vec<Sent>,
}

impl Network {
    pub(super) fn new(start: Instant) -> Self {
        Self {
            start,
            now: Duration::ZERO,
            events: Vec::new(),
            queue: VecDeque::new(),
            queue_max: usize::MAX,
            lost: 0,
            dropped: 0,
            round: 0,
            has_left: false,
            sent: Vec::new(),
        }
    }

    /// The time as a lane sees it.
    pub(crate) fn clock(&self) -> Instant {
        self.start + self.now
    }

    /// Sends a packet to the lane; it arrives after `delay`.
    pub(crate) fn send(&mut self, packet: Packet, delay: Duration) {
        self.schedule(Event::Arrival(packet), delay);
    }

    /// Runs `call` after `delay`, and wakes the lane. `call` must not use this network.
    pub(crate) fn call(&mut self, delay: Duration, call: impl FnOnce() + Send + 'static) {
        self.schedule(Event::Call(Box::new(call)), delay);
    }

    fn schedule(&mut self, event: Event, delay: Duration) {
        let at = self.now + delay;
        // After all events of the same time, so that the order is kept.
        let place = self.events.partition_point(|(other, _)| *other <= at);
        self.events.insert(place, (at, event));
        self.advance(Duration::ZERO);
    }

    /// Advances the clock, and runs the events that are due.
    pub(crate) fn advance(&mut self, by: Duration) {
        self.now += by;
        let due = self.events.partition_point(|(at, _)| *at <= self.now);
        for (_, event) in self.events.drain(..due) {
            match event {
                Event::Arrival(packet) if self.has_left => self.lost += packet.datagrams(),
                Event::Arrival(packet) if self.queue.len() < self.queue_max => self.queue.push_back(packet),
                Event::Arrival(packet) => self.dropped += packet.datagrams(),
                Event::Call(call) => call(),
            }
        }
    }

    /// Ends the lane's reception. Packets in flight are lost, because no other lane gets them.
    pub(super) fn leave(&mut self) {
        self.has_left = true;
        for (_, event) in self.events.drain(..) {
            if let Event::Arrival(packet) = event {
                self.lost += packet.datagrams();
            }
        }
    }

    /// Waits for a packet or a call, for at most `timeout`.
    pub(super) fn wait_readable(&mut self, timeout: Duration) {
        let next = self.events.first().map_or(timeout, |(at, _)| at.saturating_sub(self.now));
        let wait = if self.queue.is_empty() { next.min(timeout) } else { Duration::ZERO };
        self.advance(wait);
    }

    /// Sends the queued messages from `from` on; returns their number.
    pub(crate) fn transmit(&mut self, queue: &mut SendBatch<'_>, from: usize) -> usize {
        for index in from..queue.messages() {
            let (datagrams, _) = queue.message_counts(index);
            let (peer, source, payload) = queue.copy_message(index);
            let peer = peer.to_std().unwrap();
            self.sent.push(Sent { at: self.now, peer, source, payload, datagrams });
        }
        queue.messages() - from
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
