//! A lane: its queues, its stack, and the loop around them.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use manylane_bpf::abi::PORT_BLOCK;
use manylane_sys::raw_ip::IcmpErrors;
use manylane_tcp::congestion::NewController;
use manylane_tcp::time::Time;
use manylane_tcp::{Counters, Event, Id, Levels, NetworkError, Output, Stack};
use manylane_wire::icmp::IcmpError;

use super::coalescing::Coalescing;
use super::group::{Group, lane_id};
use super::handover::Handover;
use super::stream::TcpStream;
use crate::error::{Error, ErrorKind, Result};
use crate::io::packets::{PacketOut, PacketQueues, Received};
use crate::io::{EngineShared as _, FilterHandle};

/// Batches that a wait takes at most before the application has its turn.
const BATCHES_MAX: usize = 4;
/// While packets come, a lane looks for ICMP errors, which is a system call, once in this many
/// waits.
const WAITS_PER_ICMP_POLL: u32 = 64;
/// ICMP errors that are read at a time.
const ICMP_BATCH: usize = 16;
/// How long our address towards a peer is remembered: routes may change.
const SOURCE_VALID: Duration = Duration::from_secs(10);
/// Peers whose source address is remembered.
const SOURCES_MAX: usize = 1024;
/// Longest sleep: every wait has a bound.
const SLEEP_MAX: Duration = Duration::from_secs(60);

/// Counts of a lane since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TcpCounters {
    /// Those of the stack.
    pub stack: Counters,
    /// Frames that are no IP packets.
    pub malformed: u64,
    /// Packets sent by the kernel, because their next hop was not known yet.
    pub sent_by_kernel: u64,
    /// Packets that neither the device nor the kernel took. They are sent again.
    pub unsent: u64,
    /// Answers to SYNs, and resets, that were dropped: the kernel would have had to resolve too
    /// many neighbours, as in a flood from addresses on the link.
    pub unresolved: u64,
    /// Packets of other lanes' connections, handed over.
    pub handed_over: u64,
    /// The same, dropped because the other lane's box was full. Their senders send them again.
    pub handover_full: u64,
    /// ICMP errors that were read.
    pub icmp_errors: u64,
    /// Frames that the kernel dropped at the lane's queues, because a ring was full.
    pub xsk_dropped: u64,
}

/// A lane: a thread's share of the connections.
pub struct TcpLane {
    packets: PacketQueues,
    stack: Stack,
    now: Time,
    handover: Handover,
    icmp_v4: IcmpErrors,
    icmp_v6: Option<IcmpErrors>,
    icmp_errors: u64,
    waits: u32,
    coalescing: Coalescing,
    /// First ports of the blocks that connections to others come from.
    blocks: Vec<u16>,
    /// The number of the next port. It begins at random: servers may still have connections of an
    /// earlier process.
    next_port: usize,
    /// Our address towards a peer, and until when that is remembered.
    sources: HashMap<IpAddr, (IpAddr, Time)>,
    /// Behind the queues: the last lane ends the group.
    group: Arc<Group>,
}

/// The ICMP errors of a lane.
pub(super) struct Icmp {
    pub(super) v4: IcmpErrors,
    pub(super) v6: Option<IcmpErrors>,
}

impl TcpLane {
    pub(super) fn new(
        group: Arc<Group>,
        packets: PacketQueues,
        stack: Stack,
        handover: Handover,
        icmp: Icmp,
        (blocks, next_port): (Vec<u16>, usize),
    ) -> Self {
        let coalescing = Coalescing::new(group.rx_coalesce, packets.ring_capacity());
        Self {
            packets,
            stack,
            now: group.now(),
            handover,
            icmp_v4: icmp.v4,
            icmp_v6: icmp.v6,
            icmp_errors: 0,
            waits: 0,
            coalescing,
            blocks,
            next_port,
            sources: HashMap::new(),
            group,
        }
    }

    /// Sends what was written, and receives; sleeps for at most `timeout` if there is nothing to
    /// receive. With a timeout of zero it only looks. On busy CPUs it delays before it sleeps:
    /// see [`TcpBuilder::rx_coalesce`](super::TcpBuilder::rx_coalesce).
    ///
    /// # Errors
    /// If the system refuses to wait.
    pub fn wait(&mut self, timeout: Duration) -> Result<()> {
        self.now = self.group.now();
        self.packets.set_time(Duration::from_micros(self.now.0));
        self.flush();
        let timeout = self.next_timeout().min(timeout);
        if !timeout.is_zero() {
            if !self.has_received() {
                self.coalescing.delay(timeout);
            }
            if !self.has_received() {
                self.packets.wait(timeout)?;
            }
            self.now = self.group.now();
        }
        self.waits = self.waits.wrapping_add(1);
        // If there are packets, it is hardly an error that has woken the lane.
        if !self.receive() || self.waits.is_multiple_of(WAITS_PER_ICMP_POLL) {
            self.receive_errors();
        }
        Ok(())
    }

    fn has_received(&self) -> bool {
        self.packets.can_receive() || self.handover.has_mail()
    }

    /// The time after which [`wait`](Self::wait) has something to do without a packet, for loops
    /// that wait for the lane's descriptor (`AsFd`) and others.
    #[must_use]
    pub fn next_timeout(&self) -> Duration {
        match self.stack.next(self.now) {
            // A full device: the lane is woken when it may have room.
            Some(next) if next <= self.now && self.packets.is_stalled() => SLEEP_MAX,
            Some(next) => next.since(self.now).min(SLEEP_MAX),
            None => SLEEP_MAX,
        }
    }

    fn flush(&mut self) {
        self.packets.end_batch();
        let (_, out) = self.packets.split();
        let mut out = LaneOut { packets: out, handover: &mut self.handover, asked: 0 };
        self.stack.flush(self.now, &mut out);
        out.packets.finish();
    }

    /// Takes what has come. False if that was nothing.
    fn receive(&mut self) -> bool {
        let found = self.handover.has_mail();
        if found {
            self.receive_handed();
        }
        let mut total = 0;
        for _ in 0..BATCHES_MAX {
            let received = self.packets.receive();
            if received == 0 {
                break;
            }
            total += received;
            let mut malformed = 0;
            let (mut batch, out) = self.packets.split();
            let mut out = LaneOut { packets: out, handover: &mut self.handover, asked: 0 };
            while let Some(received) = batch.next() {
                match received {
                    Received::Packet { packet, link, is_verified } => {
                        self.stack.input_over(link, self.now, packet, is_verified, &mut out);
                    }
                    Received::Malformed => malformed += 1,
                }
            }
            out.packets.finish();
            self.packets.add_malformed(malformed);
        }
        self.coalescing.note(total);
        found || total > 0
    }

    /// Takes what other lanes have handed over.
    #[cold]
    fn receive_handed(&mut self) {
        self.packets.end_batch();
        self.handover.clear();
        let (_, out) = self.packets.split();
        let mut out = LaneOut { packets: out, handover: &mut self.handover, asked: 0 };
        while let Some(mut handed) = out.handover.next() {
            out.asked = handed.asked;
            // The lane that it arrived at has checked it.
            self.stack.input_over(handed.link, self.now, handed.bytes_mut(), true, &mut out);
        }
        out.packets.finish();
    }

    /// Takes ICMP errors.
    #[cold]
    fn receive_errors(&mut self) {
        for _ in 0..ICMP_BATCH {
            let Some(error) = self.icmp_v4.receive() else { break };
            self.icmp_errors += 1;
            report(&mut self.stack, IcmpError::parse_v4(error));
        }
        let Some(icmp_v6) = &mut self.icmp_v6 else { return };
        for _ in 0..ICMP_BATCH {
            let Some(error) = icmp_v6.receive() else { break };
            self.icmp_errors += 1;
            report(&mut self.stack, IcmpError::parse_v6(error));
        }
    }

    /// The next event, in the order in which they happened.
    pub fn event(&mut self) -> Option<Event> {
        self.stack.event()
    }

    /// A connection.
    pub fn stream(&mut self, id: Id) -> TcpStream<'_> {
        TcpStream::new(&mut self.stack, id, self.now)
    }

    /// Moves bytes that one connection has received into another one, as many as that has room for,
    /// and returns their number. If it was too little, an event comes for `to` when there is room.
    pub fn forward(&mut self, from: Id, to: Id) -> usize {
        self.stack.forward(from, to, self.now)
    }

    /// Accepts no more connections: peers that ask for one get a reset. Those that there are live
    /// on.
    pub fn stop_listening(&mut self) {
        for (local, _) in &self.group.listeners {
            self.stack.stop_listening(*local);
        }
    }

    /// The time of the last [`wait`](Self::wait).
    #[must_use]
    pub fn now(&self) -> Time {
        self.now
    }

    /// Connects to a peer, from the address that the kernel's routes say (those of the calling
    /// thread's network namespace) and a port of the lane's. An event tells what has come of it.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if the lanes have no [source ports](super::TcpBuilder::source_ports),
    /// [`ErrorKind::Limit`] if all of them are in use to this peer, or there are too many
    /// connections; those of a route that is missing.
    pub fn connect(&mut self, peer: SocketAddr) -> Result<Id> {
        let controller = self.group.controller;
        self.connect_with(peer, controller)
    }

    /// The same, with a congestion control of its own.
    ///
    /// # Errors
    /// As those of [`connect`](Self::connect).
    pub fn connect_with(&mut self, peer: SocketAddr, controller: NewController) -> Result<Id> {
        let ports = self.blocks.len() * usize::from(PORT_BLOCK);
        if ports == 0 {
            let message = "connect needs ports of its own: call source_ports(), with a block for each lane";
            return Err(Error::new(ErrorKind::Config, message));
        }
        let source = self.source_of(peer.ip())?;
        for _ in 0..ports {
            let nth = self.next_port % ports;
            self.next_port = self.next_port.wrapping_add(1);
            let port = self.blocks[nth / usize::from(PORT_BLOCK)] + nth as u16 % PORT_BLOCK;
            match self.stack.connect_with((source, port).into(), peer, controller, self.now) {
                Err(manylane_tcp::Error::InUse(_)) => {}
                result => return result.map_err(|err| Error::new(ErrorKind::Limit, err.to_string())),
            }
        }
        let message =
            format!("all {ports} source ports of the lane are in use to {peer}: add source_ports()");
        Err(Error::new(ErrorKind::Limit, message))
    }

    /// Our address towards a peer.
    fn source_of(&mut self, peer: IpAddr) -> Result<IpAddr> {
        if let Some((source, until)) = self.sources.get(&peer)
            && self.now <= *until
        {
            return Ok(*source);
        }
        let any: IpAddr = match peer {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        // Connecting a UDP socket sends nothing. The port does not matter.
        let asked = UdpSocket::bind((any, 0)).and_then(|socket| {
            socket.connect((peer, 9))?;
            socket.local_addr()
        });
        let source = asked.map_err(|err| Error::system(format!("finding a route to {peer}"), err))?.ip();
        if self.sources.len() >= SOURCES_MAX {
            self.sources.clear();
        }
        self.sources.insert(peer, (source, self.now + SOURCE_VALID));
        Ok(source)
    }

    /// Counts since the lane was opened.
    #[must_use]
    pub fn counters(&self) -> TcpCounters {
        let packets = self.packets.counts();
        TcpCounters {
            stack: self.stack.counters(),
            malformed: packets.malformed,
            sent_by_kernel: packets.sent_by_kernel,
            unsent: packets.unsent,
            unresolved: packets.unresolved,
            handed_over: self.handover.counts.sent,
            handover_full: self.handover.counts.full,
            icmp_errors: self.icmp_errors,
            xsk_dropped: self.group.control.dropped(lane_id(self.handover.own())),
        }
    }

    /// What the XDP programs did with the frames of each device: its name, the outcome, frames. All
    /// lanes of all sockets on a device together.
    #[must_use]
    pub fn frame_counts(&self) -> Vec<(String, &'static str, u64)> {
        self.group.control.frame_counts()
    }

    /// Limits and prefixes, of all lanes together.
    #[must_use]
    pub fn filter(&self) -> Option<FilterHandle> {
        self.group.control.filter().cloned()
    }

    /// What the stack has at the moment.
    #[must_use]
    pub fn levels(&self) -> Levels {
        self.stack.levels()
    }

    /// The addresses that are listened on, with the ports that the kernel picked.
    pub fn listeners(&self) -> impl Iterator<Item = SocketAddr> {
        self.group.listeners.iter().map(|(local, _)| *local)
    }
}

impl AsFd for TcpLane {
    /// Readable when [`wait`](TcpLane::wait) would not sleep, apart from its timers: see
    /// [`next_timeout`](TcpLane::next_timeout).
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.packets.as_fd()
    }
}

impl Drop for TcpLane {
    fn drop(&mut self) {
        let Self { packets, group, handover, .. } = self;
        // Other lanes take its queues over, if there are any.
        packets.release();
        group.control.shut_down(lane_id(handover.own()));
        packets.close();
        group.control.lane_drained(lane_id(handover.own()));
    }
}

fn report(stack: &mut Stack, error: Option<(IcmpError, &[u8])>) {
    match error {
        Some((IcmpError::TooBig(mtu), quoted)) => stack.network_error(NetworkError::TooBig { mtu }, quoted),
        Some((IcmpError::Unreachable, quoted)) => stack.network_error(NetworkError::Unreachable, quoted),
        None => {}
    }
}

/// Where the packets of a lane's stack go.
struct LaneOut<'a> {
    packets: PacketOut<'a>,
    handover: &'a mut Handover,
    /// Lanes that did not have the connection of the packet that is being taken.
    asked: usize,
}

impl Output for LaneOut<'_> {
    #[inline]
    fn space(&mut self, length: usize) -> Option<&mut [u8]> {
        self.packets.space(length)
    }

    #[inline]
    fn send(&mut self, length: usize, link: u16) {
        self.packets.send(length, link);
    }

    fn pass_on(&mut self, local: SocketAddr, link: u16, packet: &[u8]) -> bool {
        self.handover.pass_on(local.port(), link, packet, self.asked)
    }
}
