//! The stack of a lane: what the caller has.

use std::net::SocketAddr;

use manylane_wire::tcp::Flags;

use crate::config::Config;
use crate::congestion::NewController;
use crate::connection::{Need, Phase};
use crate::core::Core;
use crate::counters::Counters;
use crate::error::{Error, Result};
use crate::established;
use crate::event::{Event, Id, NetworkError, Reason};
use crate::flow::Flow;
use crate::handshake::{self, Next};
use crate::output::Output;
use crate::packet::{Control, Segment, Unfit, parse_quoted};
use crate::secret::Secret;
use crate::time::Time;
use crate::time_wait::Answer;

/// TCP for one lane.
///
/// [`input`](Self::input) takes packets and raises events, which the application answers by reads
/// and writes. [`flush`](Self::flush) sends what has come of it, a batch at a time, and what is due
/// by time. Between two batches the caller waits, until [`next`](Self::next) at most.
#[derive(Debug)]
pub struct Stack {
    core: Core,
    /// Those whose turn it is in a flush; empty outside of it.
    driven: Vec<u32>,
}

impl Stack {
    /// A stack without connections. `secret`: of random bytes.
    ///
    /// # Errors
    /// If a setting is out of its range.
    pub fn new(config: Config, secret: Secret, now: Time) -> Result<Stack> {
        config.check()?;
        Ok(Stack { core: Core::new(config, secret, now), driven: Vec::new() })
    }

    /// Accepts connections to an address; to all addresses of the family, if it is unspecified.
    ///
    /// # Errors
    /// If the port is zero, or connections to it are already accepted.
    pub fn listen(&mut self, local: SocketAddr) -> Result<()> {
        self.listen_with(local, self.core.config.controller)
    }

    /// The same, with a congestion control of its own.
    ///
    /// # Errors
    /// As those of [`listen`](Self::listen).
    pub fn listen_with(&mut self, local: SocketAddr, controller: NewController) -> Result<()> {
        if local.port() == 0 {
            return Err(Error::NoPort);
        }
        if self.core.listeners.iter().any(|(listener, _)| *listener == local) {
            return Err(Error::InUse(local));
        }
        self.core.listeners.push((local, controller));
        Ok(())
    }

    /// Accepts no more connections to an address. Those that there are live on.
    pub fn stop_listening(&mut self, local: SocketAddr) {
        self.core.listeners.retain(|(listener, _)| *listener != local);
    }

    /// Asks a peer for a connection. An event tells what has come of it.
    ///
    /// # Errors
    /// If the addresses are of different families, a port is zero, both ends have a connection
    /// already, or there are too many.
    pub fn connect(&mut self, local: SocketAddr, remote: SocketAddr, now: Time) -> Result<Id> {
        self.connect_with(local, remote, self.core.config.controller, now)
    }

    /// The same, with a congestion control of its own.
    ///
    /// # Errors
    /// As those of [`connect`](Self::connect).
    pub fn connect_with(
        &mut self,
        local: SocketAddr,
        remote: SocketAddr,
        controller: NewController,
        now: Time,
    ) -> Result<Id> {
        if local.port() == 0 || remote.port() == 0 {
            return Err(Error::NoPort);
        }
        if local.is_ipv4() != remote.is_ipv4() {
            return Err(Error::Families);
        }
        let flow = Flow::new(local, remote, 0);
        if self.core.table.find(&self.core.secret, &flow).is_some()
            || self.core.time_wait.has(&self.core.secret, &flow)
        {
            return Err(Error::InUse(local));
        }
        handshake::connect(&mut self.core, flow, controller, now).ok_or(Error::TooMany)
    }

    /// Takes a packet, an IP header in front, and changes its headers. `is_verified`: its
    /// checksums are known to be valid.
    pub fn input(&mut self, now: Time, packet: &mut [u8], is_verified: bool, out: &mut impl Output) {
        self.input_over(0, now, packet, is_verified, out);
    }

    /// The same, for a packet that came over a link (a VLAN) which the caller has given a number.
    /// Connections that it begins go over that link: it is told to the output.
    pub fn input_over(
        &mut self,
        link: u16,
        now: Time,
        packet: &mut [u8],
        is_verified: bool,
        out: &mut impl Output,
    ) {
        let core = &mut self.core;
        core.counters.segments_in += 1;
        core.link_max = core.link_max.max(link);
        let segment = match Segment::parse(packet, link, is_verified) {
            Ok(segment) => segment,
            Err(Unfit::Malformed) => {
                core.counters.dropped_malformed += 1;
                return;
            }
            Err(Unfit::Checksum) => {
                core.counters.dropped_checksum += 1;
                return;
            }
        };
        let Some(index) = core.table.find(&core.secret, &segment.flow) else {
            return input_unknown(core, packet, &segment, now, out);
        };
        if let Some(Phase::Handshake(_)) = core.table.phase(index)
            && handshake::input(core, index, &segment, now, out) == Next::Done
        {
            return;
        }
        established::input(core, index, packet, &segment, now, out);
    }

    /// Takes an ICMP error: what it says, and the packet of ours that it quotes, of which routers
    /// may send no more than the first eight bytes of TCP. It counts only if the number is one that
    /// was sent and not acknowledged (RFC 5927). A path that allows less makes later segments
    /// shorter; a peer that cannot be reached ends a connection only while we ask for it.
    pub fn network_error(&mut self, error: NetworkError, quoted: &[u8]) {
        let core = &mut self.core;
        let Some((flow, sequence)) = parse_quoted(quoted) else { return };
        // It may come over another link than the packet went.
        let find = |link| core.table.find(&core.secret, &flow.over(link));
        let Some(index) = (0..=core.link_max).find_map(find) else { return };
        match (error, core.table.phase_mut(index)) {
            (NetworkError::TooBig { mtu }, Some(Phase::Open(open))) => {
                let is_news = open.edge.is_in_flight(sequence) && open.edge.limit(mtu);
                if is_news {
                    open.sender.set_mss(open.edge.path_mss());
                    core.mark_ready(index);
                }
            }
            (NetworkError::Unreachable, Some(Phase::Handshake(handshake)))
                if handshake.is_active && handshake.peer.is_none() && handshake.first == sequence =>
            {
                core.end(index, Reason::Unreachable);
            }
            _ => {}
        }
    }

    /// Sends what is due. Call it after each batch of packets, and when [`next`](Self::next) has
    /// come. What the output does not take is sent by a later call.
    pub fn flush(&mut self, now: Time, out: &mut impl Output) {
        let core = &mut self.core;
        core.time_wait.expire(&core.secret, now);
        while let Some(index) = core.wheel.pop(now) {
            core.mark_ready(index);
        }
        std::mem::swap(&mut core.ready, &mut self.driven);
        let mut is_full = false;
        for index in self.driven.drain(..) {
            match core.table.phase(index) {
                Some(Phase::Handshake(_)) => handshake::drive(core, index, now, out),
                Some(Phase::Open(_)) if !is_full => {
                    is_full = !established::drive(core, index, now, out);
                    if is_full {
                        core.mark_ready(index);
                    }
                }
                Some(Phase::Open(_)) => core.ready.push(index),
                None => {}
            }
        }
    }

    /// When [`flush`](Self::flush) has something to do without a packet, at the earliest.
    #[must_use]
    pub fn next(&self, now: Time) -> Option<Time> {
        if !self.core.ready.is_empty() {
            return Some(now);
        }
        [self.core.wheel.next(), self.core.time_wait.next(now)].into_iter().flatten().min()
    }

    /// What has happened, in its order.
    pub fn event(&mut self) -> Option<Event> {
        self.core.event()
    }

    /// Hands `take` the bytes that were received, as far as they lie in one piece; it says how many
    /// it has used up. Returns that number: zero if there are none.
    pub fn read(&mut self, id: Id, take: impl FnOnce(&[u8]) -> usize) -> usize {
        let Some(index) = self.core.table.place(id) else { return 0 };
        let Some(Phase::Open(open)) = self.core.table.phase_mut(index) else { return 0 };
        let Some(endpoint) = &mut open.endpoint else { return 0 };
        let taken = endpoint.read(take);
        open.told_readable &= endpoint.readable() > 0 || endpoint.has_peer_finished();
        if taken > 0 {
            // The window has grown.
            self.core.mark_ready(index);
        }
        taken
    }

    /// True if the peer has sent its last byte, and all are read. False if the connection is over:
    /// it may have been cut off.
    #[must_use]
    pub fn is_at_end(&self, id: Id) -> bool {
        let place = self.core.table.place(id).and_then(|index| self.core.table.phase(index));
        let Some(Phase::Open(open)) = place else { return false };
        open.endpoint
            .as_ref()
            .is_some_and(|endpoint| endpoint.readable() == 0 && endpoint.has_peer_finished())
    }

    /// Takes as many bytes as there is room for, and returns their number. If it is less than were
    /// given, an event comes when there is room again.
    pub fn write(&mut self, id: Id, bytes: &[u8], now: Time) -> usize {
        self.write_for(Need::Output, id, bytes, now)
    }

    fn write_for(&mut self, need: Need, id: Id, bytes: &[u8], now: Time) -> usize {
        let Some(index) = self.core.table.place(id) else { return 0 };
        let is_awake = self.core.wake(index, need, now);
        let Some(Phase::Open(open)) = self.core.table.phase_mut(index) else { return 0 };
        let taken = match &mut open.endpoint {
            Some(endpoint) if is_awake && !open.is_finishing => endpoint.write(bytes),
            _ => 0,
        };
        open.active = now;
        open.wants_to_write |= taken < bytes.len();
        self.core.mark_ready(index);
        taken
    }

    /// Moves bytes that one connection has received into another one, as many as that has room for,
    /// and returns their number. What is left stays received: if it was for want of room, an event
    /// comes for `to` when there is some.
    pub fn forward(&mut self, from: Id, to: Id, now: Time) -> usize {
        let (Some(index), true) = (self.core.table.place(from), from != to) else { return 0 };
        let Some(Phase::Open(open)) = self.core.table.phase_mut(index) else { return 0 };
        let Some(mut endpoint) = open.endpoint.take() else { return 0 };
        let (mut moved, need) = (0, open.need.forwarded());
        // They are in two pieces where the buffer ends.
        for _ in 0..2 {
            let mut write = |bytes: &[u8]| self.write_for(need, to, bytes, now);
            match endpoint.read(|bytes| if bytes.is_empty() { 0 } else { write(bytes) }) {
                0 => break,
                taken => moved += taken,
            }
        }
        if let Some(Phase::Open(open)) = self.core.table.phase_mut(index) {
            open.told_readable &= endpoint.readable() > 0 || endpoint.has_peer_finished();
            open.endpoint = Some(endpoint);
        }
        if moved > 0 {
            // The window has grown.
            self.core.mark_ready(index);
        }
        moved
    }

    /// Nothing more is written: the peer gets FIN after the last byte. Reading goes on.
    pub fn shutdown(&mut self, id: Id, now: Time) {
        let Some(index) = self.core.table.place(id) else { return };
        self.core.wake(index, Need::Answer, now);
        let Some(Phase::Open(open)) = self.core.table.phase_mut(index) else { return };
        match &mut open.endpoint {
            Some(endpoint) => endpoint.finish(),
            None => open.is_finishing = true,
        }
        self.core.mark_ready(index);
    }

    /// The application is done with a connection: what was written is still sent, then FIN. If
    /// there are bytes that it has not read, or some come, the peer gets a reset. The id is no
    /// longer valid.
    pub fn close(&mut self, id: Id, now: Time) {
        let Some(index) = self.core.table.place(id) else { return };
        let Some(Phase::Open(open)) = self.core.table.phase(index) else { return self.abort(id) };
        let has_unread = open.endpoint.as_ref().is_some_and(|endpoint| endpoint.readable() > 0);
        if has_unread {
            return self.abort(id);
        }
        self.shutdown(id, now);
        if let Some(Phase::Open(open)) = self.core.table.phase_mut(index) {
            open.orphaned = Some(now);
        }
        self.core.forget(index);
    }

    /// The application is done with a connection: the peer gets a reset. The id is no longer valid.
    pub fn abort(&mut self, id: Id) {
        let Some(index) = self.core.table.place(id) else { return };
        self.core.forget(index);
        match self.core.table.phase(index) {
            Some(Phase::Open(_)) => established::abort(&mut self.core, index),
            _ => self.core.remove(index),
        }
    }

    /// The addresses of a connection: ours and the peer's.
    #[must_use]
    pub fn addresses(&self, id: Id) -> Option<(SocketAddr, SocketAddr)> {
        let flow = self.core.table.phase(self.core.table.place(id)?)?.flow();
        Some((flow.local(), flow.remote()))
    }

    /// Counts since the start.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.core.counters
    }

    /// What there is now.
    #[must_use]
    pub fn levels(&self) -> Levels {
        let (buffers_used, buffers) = self.core.buffers();
        Levels {
            connections: self.core.table.len(),
            backlog: self.core.backlog,
            time_wait: self.core.time_wait.len(),
            buffers_used,
            buffers,
            buffers_max: self.core.config.buffers_max,
            buffers_len: self.core.config.receive_buffer + self.core.config.send_buffer,
        }
    }
}

/// What a stack has at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Levels {
    /// Connections, in the handshake or established.
    pub connections: usize,
    /// Connections of peers that are in the handshake.
    pub backlog: usize,
    /// Connections in TIME-WAIT.
    pub time_wait: usize,
    /// Pairs of buffers that connections have.
    pub buffers_used: usize,
    /// Pairs of buffers that were allocated.
    pub buffers: usize,
    /// Pairs of buffers at most.
    pub buffers_max: usize,
    /// Bytes of a pair.
    pub buffers_len: usize,
}

/// Takes a segment that belongs to no connection.
fn input_unknown(core: &mut Core, packet: &mut [u8], segment: &Segment, now: Time, out: &mut impl Output) {
    let mut after = None;
    match core.time_wait.input(&core.secret, segment, now) {
        Some(Answer::Nothing) => return,
        Some(Answer::Acknowledge(control)) => {
            core.send(&control, out);
            return;
        }
        Some(Answer::Reopen { after: number }) => after = Some(number),
        None => {}
    }
    let kind = segment.flags.0 & Flags::SYN.with(Flags::ACK).with(Flags::RST).0;
    let mut may_follow = false;
    if let Some(controller) = core.listener(segment.flow.local()) {
        if kind == Flags::SYN.0 {
            return handshake::accept(core, segment, controller, after, now, out);
        }
        if kind == Flags::ACK.0 {
            if let Some(place) = handshake::redeem(core, segment, controller, now) {
                if let Some(index) = place {
                    established::input(core, index, packet, segment, now, out);
                }
                return;
            }
            may_follow = handshake::may_follow_cookie(core, segment, now);
        }
    }
    // A SYN begins a connection, which no other stack has.
    if kind != Flags::SYN.0 && out.pass_on(segment.flow.local(), segment.flow.link(), packet) {
        core.counters.passed_on += 1;
        return;
    }
    core.counters.dropped_unknown += 1;
    if !segment.has(Flags::RST) && !may_follow {
        core.counters.resets_sent += 1;
        core.send(&Control::reset(segment), out);
    }
}
