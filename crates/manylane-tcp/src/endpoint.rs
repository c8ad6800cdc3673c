//! The state machine of a connection with data: smoltcp's, one socket in a set of its own, with the
//! buffers. Nothing outside of this file and of `device.rs` knows it.
//!
//! smoltcp gets packets of its own making: IPv4 between two fixed addresses, with the numbers that
//! `edge.rs` translates. It gets a clock that is [`SPEED`] times faster than the time, so that its
//! least retransmission timeout, one second, is 200 ms.
//!
//! A connection is opened at any numbers by a handshake that only smoltcp sees. So a connection
//! needs an endpoint only while it has data, and endpoints are used again: their buffers are
//! allocated once.

use std::time::Duration;

use manylane_wire::tcp::{Flags, Options, Tcp, TcpHeader};
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::time::Instant;
use smoltcp::wire::{HardwareAddress, IpCidr};

use crate::device::{Rehearsal, Skip, Wire};
use crate::edge::{Edge, PATH_MSS, Sent};
use crate::inner::{INNER_LOCAL, INNER_REMOTE};
use crate::output::Output;
use crate::sequence::is_before;
use crate::time::Time;

/// How many times faster than the time smoltcp's clock runs.
const SPEED: u64 = 5;
/// How long an ACK waits for data to go with.
const ACK_DELAY: Duration = Duration::from_millis(40);
/// Later than any timer of smoltcp: its longest timeout is a minute of its clock.
const FUTURE: Duration = Duration::from_secs(60);
/// Round trip of a connection whose own is not known: it makes the first timeout one second (RFC
/// 6298, section 2).
pub(crate) const UNKNOWN_ROUND_TRIP: Duration = Duration::from_millis(333);

/// What the endpoints of a lane share: an interface for each length of segments that a path may
/// allow, because smoltcp takes it from there.
pub(crate) struct Machine {
    interfaces: [Interface; PATH_MSS.len()],
}

impl std::fmt::Debug for Machine {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Machine")
    }
}

impl Machine {
    /// `seed`: of smoltcp's initial numbers, which no one sees.
    pub(crate) fn new(seed: u64) -> Machine {
        let interfaces = PATH_MSS.map(|mss| {
            let mut config = Config::new(HardwareAddress::Ip);
            config.random_seed = seed;
            let mut interface = Interface::new(config, &mut Rehearsal::of_mss(mss), Instant::ZERO);
            interface.update_ip_addrs(|addresses| {
                // One of two that it has space for.
                let _ = addresses.push(IpCidr::new(INNER_LOCAL.into(), 24));
            });
            interface
        });
        Machine { interfaces }
    }

    fn interface(&mut self, edge: &Edge) -> &mut Interface {
        &mut self.interfaces[usize::from(edge.path).min(PATH_MSS.len() - 1)]
    }
}

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Open, or closed by one side.
    Going,
    /// Closed by both sides, and our ACK of the peer's FIN may be lost.
    TimeWait,
    /// Over.
    Over,
}

/// The state machine of a connection, and its buffers.
pub(crate) struct Endpoint {
    sockets: SocketSet<'static>,
    handle: SocketHandle,
    /// Number of the next byte that the application reads, and of the next that it writes.
    read_next: u32,
    write_next: u32,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.socket().fmt(formatter)
    }
}

impl Endpoint {
    /// Buffers of these sizes.
    pub(crate) fn new(receive: usize, send: usize) -> Endpoint {
        let mut socket = Socket::new(SocketBuffer::new(vec![0; receive]), SocketBuffer::new(vec![0; send]));
        socket.set_nagle_enabled(false);
        socket.set_ack_delay(Some(inner_duration(ACK_DELAY)));
        let mut sockets = SocketSet::new(Vec::with_capacity(1));
        let handle = sockets.add(socket);
        Endpoint { sockets, handle, read_next: 0, write_next: 0 }
    }

    /// Opens it at the numbers of `edge`, of a connection without data on the way. False if smoltcp
    /// does not do what is expected of it.
    pub(crate) fn open(
        &mut self,
        machine: &mut Machine,
        edge: &mut Edge,
        now: Time,
        round_trip: Duration,
    ) -> bool {
        let socket = self.socket_mut();
        socket.abort();
        if socket.listen(edge.flow.local().port()).is_err() {
            return false;
        }
        let (at, before) = (instant(now), instant(Time(now.0.saturating_sub(micros(round_trip)))));
        let syn = Options {
            mss: Some(edge.mss),
            window_scale: Some(edge.send_shift),
            sack_permitted: edge.sack,
            ..Options::default()
        };
        let first = edge.receive_next.wrapping_sub(1);
        let mut device = Rehearsal::of_mss(edge.mss);
        device.receive(&inner_header(edge, first, 0, Flags::SYN, u16::MAX, syn));
        let interface = machine.interface(edge);
        interface.poll_ingress_single(before, &mut device, &mut self.sockets);
        interface.poll_egress(before, &mut device, &mut self.sockets);
        let Some(answer) = device.sent().and_then(|packet| Tcp::parse(packet).ok()) else { return false };
        let answer_options = Options::parse(answer.options, true);
        let start = answer.sequence.wrapping_add(1);
        edge.inner_shift = answer_options.window_scale.unwrap_or(0);
        edge.offset = edge.send_next.wrapping_sub(start);
        edge.receive_last = edge.receive_next;
        let window = u16::try_from(edge.window >> edge.send_shift).unwrap_or(u16::MAX);
        edge.passed_window = window;
        for sequence in [edge.receive_next, first] {
            // The second one is a probe: the answer sets the window, which a SYN cannot say.
            device.receive(&inner_header(edge, sequence, start, Flags::ACK, window, Options::default()));
            machine.interface(edge).poll_ingress_single(at, &mut device, &mut self.sockets);
        }
        self.read_next = edge.receive_next;
        self.write_next = edge.send_next;
        self.socket().state() == State::Established
    }

    /// Takes a segment that `edge` has passed. It may be answered at once.
    pub(crate) fn input<O: Output>(
        &mut self,
        machine: &mut Machine,
        edge: &mut Edge,
        inner: &[u8],
        now: Time,
        out: &mut O,
    ) -> Option<Sent> {
        let interface = machine.interface(edge);
        let mut device = Wire::new(Some(inner), edge, out, now, Skip::Nothing);
        interface.poll_ingress_single(instant(now), &mut device, &mut self.sockets);
        let sent = device.sent();
        self.update(edge);
        sent
    }

    /// True if duplicate ACKs make it send its oldest segment again: not FIN alone, for which
    /// smoltcp would stop its timer, and not in LAST-ACK, where it does not count them.
    pub(crate) fn can_resend(&self) -> bool {
        self.unacknowledged() > 0 && self.socket().state() != State::LastAck
    }

    /// True if the window has grown so much that the peer has to be told: it has doubled, as in
    /// Linux.
    pub(crate) fn has_window_to_tell(&self, edge: &Edge) -> bool {
        let socket = self.socket();
        let told = edge.receive_edge.wrapping_sub(edge.receive_next);
        let free = len32(socket.recv_capacity() - socket.recv_queue());
        socket.may_recv() && free > 0 && free / 2 >= told
    }

    /// Makes it send its oldest segment again at the next output, by three duplicate ACKs that only
    /// smoltcp sees. Only if it [can](Self::can_resend).
    pub(crate) fn resend_oldest(&mut self, machine: &mut Machine, edge: &Edge, now: Time) {
        let acknowledgment = edge.unacknowledged.wrapping_sub(edge.offset);
        let options = Options::default();
        let ack =
            inner_header(edge, edge.receive_next, acknowledgment, Flags::ACK, edge.passed_window, options);
        let mut device = Rehearsal::of_mss(edge.mss);
        for _ in 0..3 {
            device.receive(&ack);
            machine.interface(edge).poll_ingress_single(instant(now), &mut device, &mut self.sockets);
        }
    }

    /// Sends one segment, if one is due.
    pub(crate) fn output<O: Output>(
        &mut self,
        machine: &mut Machine,
        edge: &mut Edge,
        now: Time,
        out: &mut O,
        skip: Skip<'_>,
    ) -> Option<Sent> {
        let interface = machine.interface(edge);
        let mut device = Wire::new(None, edge, out, now, skip);
        interface.poll_egress(instant(now), &mut device, &mut self.sockets);
        device.sent()
    }

    /// Sends the oldest segment, and makes the state machine send all behind it again, one by one,
    /// as after a timeout: by a look far into the future. Its timer is as far away then, until
    /// something is acknowledged. `times`: how often that was done since something was.
    pub(crate) fn rewind<O: Output>(
        &mut self,
        machine: &mut Machine,
        edge: &mut Edge,
        now: Time,
        out: &mut O,
        (skip, times): (Skip<'_>, u16),
    ) -> Option<Sent> {
        let interface = machine.interface(edge);
        let mut device = Wire::new(None, edge, out, now, skip);
        let later = instant(now + FUTURE * (u32::from(times) + 1));
        interface.poll_egress(later, &mut device, &mut self.sockets);
        device.sent()
    }

    /// When something is due: `now` or earlier, if it is now.
    pub(crate) fn deadline(&self, machine: &mut Machine, edge: &Edge, now: Time) -> Option<Time> {
        let at = machine.interface(edge).poll_at(instant(now), &self.sockets)?;
        Some(Time(u64::try_from(at.total_micros()).unwrap_or(0).div_ceil(SPEED)))
    }

    /// Brings the numbers of the edge up to those of the state machine.
    fn update(&self, edge: &mut Edge) {
        let socket = self.socket();
        let fin = u32::from(self.has_peer_finished());
        edge.receive_next = self.read_next.wrapping_add(len32(socket.recv_queue())).wrapping_add(fin);
        let is_fin_acknowledged =
            matches!(socket.state(), State::FinWait2 | State::TimeWait) || self.progress() == Progress::Over;
        let oldest = self.write_next.wrapping_sub(len32(socket.send_queue()));
        let oldest = if is_fin_acknowledged { edge.send_next } else { oldest };
        if is_before(edge.unacknowledged, oldest) {
            edge.unacknowledged = oldest;
        }
    }

    /// True if the peer has sent its last byte, and we have them all.
    pub(crate) fn has_peer_finished(&self) -> bool {
        matches!(self.socket().state(), State::CloseWait | State::LastAck | State::Closing | State::TimeWait)
    }

    pub(crate) fn progress(&self) -> Progress {
        match self.socket().state() {
            State::TimeWait => Progress::TimeWait,
            State::Closed | State::Listen => Progress::Over,
            _ => Progress::Going,
        }
    }

    /// True if nothing is on the way or waits, so that the edge knows all there is to know.
    pub(crate) fn is_idle(&self, edge: &Edge) -> bool {
        let socket = self.socket();
        socket.state() == State::Established
            && socket.recv_queue() == 0
            && socket.send_queue() == 0
            && edge.acknowledged == edge.receive_next
            && edge.in_flight() == 0
    }

    /// Bytes that wait to be read.
    pub(crate) fn readable(&self) -> usize {
        self.socket().recv_queue()
    }

    /// Bytes that were written and are not acknowledged.
    pub(crate) fn unacknowledged(&self) -> usize {
        self.socket().send_queue()
    }

    /// Bytes that can be written.
    pub(crate) fn writable(&self) -> usize {
        let socket = self.socket();
        if socket.may_send() { socket.send_capacity() - socket.send_queue() } else { 0 }
    }

    /// Hands the bytes that can be read without a gap to `take`, which says how many it has used.
    pub(crate) fn read(&mut self, take: impl FnOnce(&[u8]) -> usize) -> usize {
        let mut used = 0;
        // An error says that there is nothing.
        let _ = self.socket_mut().recv(|bytes| {
            used = if bytes.is_empty() { 0 } else { take(bytes).min(bytes.len()) };
            (used, ())
        });
        self.read_next = self.read_next.wrapping_add(len32(used));
        used
    }

    /// Takes as many of the bytes as there is room for.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> usize {
        let taken = self.socket_mut().send_slice(bytes).unwrap_or(0);
        self.write_next = self.write_next.wrapping_add(len32(taken));
        taken
    }

    /// No more is written: FIN goes after the last byte.
    pub(crate) fn finish(&mut self) {
        self.socket_mut().close();
    }

    fn socket(&self) -> &Socket<'static> {
        self.sockets.get(self.handle)
    }

    fn socket_mut(&mut self) -> &mut Socket<'static> {
        self.sockets.get_mut(self.handle)
    }
}

/// A header of the handshake that only smoltcp sees.
fn inner_header(
    edge: &Edge,
    sequence: u32,
    acknowledgment: u32,
    flags: Flags,
    window: u16,
    options: Options,
) -> TcpHeader {
    TcpHeader {
        source: (INNER_REMOTE, edge.flow.remote().port()).into(),
        destination: (INNER_LOCAL, edge.flow.local().port()).into(),
        sequence,
        acknowledgment,
        flags,
        window,
        urgent: 0,
        options,
    }
}

fn instant(time: Time) -> Instant {
    Instant::from_micros(i64::try_from(time.0.saturating_mul(SPEED)).unwrap_or(i64::MAX))
}

fn inner_duration(duration: Duration) -> smoltcp::time::Duration {
    smoltcp::time::Duration::from_micros(micros(duration).saturating_mul(SPEED))
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// The length of a buffer as a difference of numbers. No buffer is that large.
fn len32(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
