//! The edge of a connection: its numbers as they are on the wire, what of a segment may pass to the
//! state machine, and how a segment of the state machine becomes one of ours.
//!
//! The state machine (`endpoint.rs`) has initial sequence numbers, a window scale and addresses of
//! its own. Here they are translated. Here are also what it lacks: resets and SYNs are checked as
//! in RFC 5961, time stamps are those of RFC 7323, and nothing passes that is outside of the
//! window which was advertised.

use std::time::Duration;

use manylane_wire::tcp::{Flags, HEADER_LEN, OPTIONS_LEN_MAX, Options, Tcp, TcpHeader};

use crate::flow::Flow;
use crate::inner::{INNER_IP_LEN, write_inner_ip};
use crate::packet::{Control, Segment, ip_header_len, length32, write_headers};
use crate::sequence::{is_before, later};
use crate::time::Time;

/// Length of the time stamps among the options.
pub(crate) const TIMESTAMPS_LEN: usize = 12;
/// Payloads of segments that a path may allow: the first one is all that IP allows, so that the
/// MSS of the connection decides. Those of a path are rounded down to one of these (RFC 1191,
/// section 7.1).
pub(crate) const PATH_MSS: [u16; 8] = [65_495, 8948, 1440, 1400, 1348, 1200, 1000, 476];
/// Least MTU that we believe, with IPv4 (Linux, `min_pmtu`) and IPv6 (RFC 8200, section 5).
const MTU_MIN: (u16, u16) = (552, 1280);
/// Least time between challenge ACKs of a connection, so that they are no amplifier (RFC 5961,
/// section 7).
const CHALLENGE_INTERVAL: Duration = Duration::from_millis(500);

/// What the handshake has found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    /// Our first number after SYN, and the peer's.
    pub(crate) send_from: u32,
    pub(crate) receive_from: u32,
    /// Bytes of payload in a segment, at most.
    pub(crate) mss: u16,
    /// The peer's window, in bytes.
    pub(crate) window: u32,
    /// The window that we have advertised, in bytes.
    pub(crate) advertised: u32,
    /// Shifts of both sides' windows, if both scale.
    pub(crate) shifts: Option<(u8, u8)>,
    pub(crate) sack: bool,
    /// The peer's last time stamp, if both send them.
    pub(crate) timestamp: Option<u32>,
}

/// What is to be done with a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The state machine gets it.
    Pass(Passed),
    /// The connection is reset.
    Reset,
    /// It is answered with an ACK that says what we expect.
    Acknowledge,
    /// The same, but not more often than allowed.
    Challenge,
    /// Nothing.
    Drop,
}

/// What the state machine gets of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Passed {
    pub(crate) sequence: u32,
    /// Bytes of its payload: what is within the window.
    pub(crate) payload: usize,
    pub(crate) fin: bool,
    pub(crate) acknowledgment: u32,
    pub(crate) window: u16,
    /// It says another window than the segments before.
    pub(crate) tells_window: bool,
}

/// What was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sent {
    /// Its number, and the one behind it.
    pub(crate) sequence: u32,
    pub(crate) end: u32,
    /// Some of it had been sent before.
    pub(crate) again: bool,
    /// It did not leave, because the peer has it.
    pub(crate) skipped: bool,
}

/// Numbers of a connection, on the wire.
#[derive(Clone, Debug)]
pub(crate) struct Edge {
    pub(crate) flow: Flow,
    /// The oldest number that the peer has not acknowledged, and the one after the last sent.
    pub(crate) unacknowledged: u32,
    pub(crate) send_next: u32,
    /// The next number that we expect, and the one after the window that we have advertised.
    pub(crate) receive_next: u32,
    pub(crate) receive_edge: u32,
    /// The number behind the last byte that we have, also behind a hole.
    pub(crate) receive_last: u32,
    /// The number that we have acknowledged last.
    pub(crate) acknowledged: u32,
    /// The peer's window, in bytes, and the numbers of the segment that has told it.
    pub(crate) window: u32,
    window_sequence: u32,
    window_acknowledgment: u32,
    /// The largest window that it has told, at least that of a peer without scaling.
    window_max: u32,
    /// The window that the state machine was told last, shifted.
    pub(crate) passed_window: u16,
    /// The last byte that was sent is a probe of a closed window, which the state machine does not
    /// count as sent.
    is_probed: bool,
    pub(crate) mss: u16,
    /// What the path allows: a place in [`PATH_MSS`].
    pub(crate) path: u8,
    /// Shift of the peer's windows, and of ours.
    pub(crate) send_shift: u8,
    receive_shift: u8,
    /// Shift of the state machine's windows.
    pub(crate) inner_shift: u8,
    /// What is added to a number of the state machine to get ours.
    pub(crate) offset: u32,
    pub(crate) sack: bool,
    timestamps: bool,
    recent: u32,
    challenged: Option<Time>,
}

impl Edge {
    pub(crate) fn new(flow: Flow, terms: &Terms) -> Edge {
        let (send_shift, receive_shift) = terms.shifts.unwrap_or((0, 0));
        Edge {
            flow,
            unacknowledged: terms.send_from,
            send_next: terms.send_from,
            receive_next: terms.receive_from,
            receive_edge: terms.receive_from.wrapping_add(terms.advertised),
            receive_last: terms.receive_from,
            acknowledged: terms.receive_from,
            window: terms.window,
            window_max: terms.window.max(u32::from(u16::MAX)),
            passed_window: 0,
            is_probed: false,
            window_sequence: terms.receive_from.wrapping_sub(1),
            window_acknowledgment: terms.send_from,
            mss: terms.mss,
            path: 0,
            send_shift,
            receive_shift,
            inner_shift: 0,
            offset: 0,
            sack: terms.sack,
            timestamps: terms.timestamp.is_some(),
            recent: terms.timestamp.unwrap_or(0),
            challenged: None,
        }
    }

    /// Takes what a router says: that a packet of ours was longer than `mtu`. False if it tells
    /// nothing new.
    pub(crate) fn limit(&mut self, mtu: u16) -> bool {
        let least = if self.flow.is_ipv4() { MTU_MIN.0 } else { MTU_MIN.1 };
        let options = if self.timestamps { TIMESTAMPS_LEN } else { 0 };
        let headers = ip_header_len(&self.flow) + HEADER_LEN + options;
        let mss = usize::from(mtu.max(least)).saturating_sub(headers);
        let fits = |allowed: &u16| usize::from(*allowed) <= mss;
        let path = PATH_MSS.iter().position(fits).unwrap_or(PATH_MSS.len() - 1);
        let path = u8::try_from(path).unwrap_or(u8::MAX);
        let is_news = mss < usize::from(self.mss) && path > self.path;
        if is_news {
            self.path = path;
        }
        is_news
    }

    /// Bytes of payload in a segment at most, by the peer and the path.
    pub(crate) fn path_mss(&self) -> u16 {
        let path = PATH_MSS.get(usize::from(self.path)).copied().unwrap_or(self.mss);
        self.mss.min(path)
    }

    /// True if a number was sent and is not acknowledged (RFC 5927, section 4.1).
    pub(crate) fn is_in_flight(&self, sequence: u32) -> bool {
        !is_before(sequence, self.unacknowledged) && is_before(sequence, self.send_next)
    }

    /// Bytes that were sent and not acknowledged.
    pub(crate) fn in_flight(&self) -> u32 {
        self.send_next.wrapping_sub(self.unacknowledged)
    }

    /// True if nothing but a probe of a closed window is not acknowledged.
    pub(crate) fn is_probing(&self) -> bool {
        self.is_probed && self.in_flight() == 1
    }

    /// True if bytes are missing in front of some that we have.
    pub(crate) fn has_hole(&self) -> bool {
        is_before(self.receive_next, self.receive_last)
    }

    /// Judges a segment, in the order of RFC 9293, section 3.10.7.4. Notes the peer's time stamp
    /// and window.
    pub(crate) fn judge(&mut self, segment: &Segment) -> Verdict {
        let starts_in_window = self.is_in_window(segment.sequence);
        if segment.has(Flags::RST) {
            return match segment.sequence == self.receive_next {
                true => Verdict::Reset,
                false if starts_in_window => Verdict::Challenge,
                false => Verdict::Drop,
            };
        }
        if self.is_old(segment) {
            return Verdict::Challenge;
        }
        let room = self.receive_edge.wrapping_sub(segment.sequence).cast_signed();
        let payload = usize::try_from(room).unwrap_or(0).min(segment.payload);
        let is_acceptable = match segment.payload {
            0 => starts_in_window || segment.sequence == self.receive_next,
            _ => payload > 0 && is_before(self.receive_next, segment.end()),
        };
        if !is_acceptable {
            // Data or FIN again, whose ACK was lost, or a probe of our window: its sender waits.
            let is_waiting = segment.payload > 0 || segment.has(Flags::FIN);
            return if is_waiting { Verdict::Acknowledge } else { Verdict::Challenge };
        }
        if segment.has(Flags::SYN) {
            return Verdict::Challenge;
        }
        if !segment.has(Flags::ACK) {
            return Verdict::Drop;
        }
        // What we have never sent is not acknowledged, and neither is what lies far back (RFC 5961,
        // section 5.2).
        let acknowledged = segment.acknowledgment.wrapping_sub(self.unacknowledged).cast_signed();
        let oldest = self.unacknowledged.wrapping_sub(self.window_max);
        if is_before(self.send_next, segment.acknowledgment) || is_before(segment.acknowledgment, oldest) {
            return Verdict::Challenge;
        }
        if let (true, Some((value, _))) = (self.timestamps, segment.options.timestamps)
            && !is_before(self.acknowledged, segment.sequence)
        {
            self.recent = value;
        }
        let fin = segment.has(Flags::FIN) && payload == segment.payload;
        if acknowledged < 0 && payload == 0 && !fin {
            return Verdict::Drop;
        }
        // A segment that was overtaken does not tell the window of now. One that acknowledges more
        // was not, also if its data was sent before.
        let is_newer = acknowledged > 0
            || is_before(self.window_sequence, segment.sequence)
            || self.window_sequence == segment.sequence
                && !is_before(segment.acknowledgment, self.window_acknowledgment);
        let before = self.window;
        if is_newer {
            self.window = u32::from(segment.window) << self.send_shift;
            self.window_max = self.window_max.max(self.window);
            self.window_sequence = segment.sequence;
            self.window_acknowledgment = segment.acknowledgment;
        }
        // smoltcp drops FIN with data that is known: FIN alone is new.
        let is_known = fin && !is_before(self.receive_next, segment.sequence.wrapping_add(length32(payload)));
        let (sequence, payload) = if is_known { (self.receive_next, 0) } else { (segment.sequence, payload) };
        // With an older one, the state machine would drop the data.
        let acknowledgment = later(segment.acknowledgment, self.unacknowledged);
        // A window that was taken back must not stop the retransmission of what is on the way (RFC
        // 9293, section 3.8.6): smoltcp would probe behind it instead.
        let in_flight = self.send_next.wrapping_sub(acknowledgment);
        let is_only_probe = in_flight == 1 && self.is_probed;
        let window = if self.window == 0 && !is_only_probe { in_flight } else { self.window };
        let window = (window >> self.send_shift).max(u32::from(window > 0));
        self.passed_window = u16::try_from(window).unwrap_or(u16::MAX);
        Verdict::Pass(Passed {
            sequence,
            payload,
            fin,
            acknowledgment,
            window: self.passed_window,
            tells_window: self.window != before,
        })
    }

    /// Makes of a segment one for the state machine, in place: what it has been passed.
    pub(crate) fn pass<'a>(
        &self,
        packet: &'a mut [u8],
        segment: &Segment,
        passed: &Passed,
    ) -> Option<&'a mut [u8]> {
        let start = segment.tcp.start.checked_sub(INNER_IP_LEN)?;
        let end = segment.tcp.end - segment.payload + passed.payload;
        let inner = packet.get_mut(start..end)?;
        write_inner_ip(inner);
        let tcp = inner.get_mut(INNER_IP_LEN..).filter(|tcp| tcp.len() >= HEADER_LEN)?;
        tcp[4..8].copy_from_slice(&passed.sequence.to_be_bytes());
        tcp[8..12].copy_from_slice(&passed.acknowledgment.wrapping_sub(self.offset).to_be_bytes());
        let fin = if passed.fin { Flags::FIN } else { Flags(0) };
        tcp[13] = Flags(segment.flags.0 & Flags::ACK.with(Flags::PSH).0).with(fin).0;
        tcp[14..16].copy_from_slice(&passed.window.to_be_bytes());
        if tcp[12] >> 4 > 5 {
            // The end of the options: they are read here, and smoltcp drops segments with odd ones.
            tcp[HEADER_LEN] = 0;
        }
        Some(inner)
    }

    /// True if a segment is of the time before the numbers wrapped (PAWS, RFC 7323, section 5).
    fn is_old(&self, segment: &Segment) -> bool {
        self.timestamps && segment.options.timestamps.is_some_and(|(value, _)| is_before(value, self.recent))
    }

    /// True if a number is within the window that we have advertised.
    fn is_in_window(&self, sequence: u32) -> bool {
        !is_before(sequence, self.receive_next)
            && is_before(sequence, later(self.receive_edge, self.receive_next.wrapping_add(1)))
    }

    /// An ACK of what we expect, if enough time has passed since the last one.
    pub(crate) fn challenge(&mut self, now: Time) -> Option<Control> {
        may_challenge(&mut self.challenged, now).then(|| self.control(Flags::ACK, self.send_next, now))
    }

    /// A segment without payload, with the numbers and the window of now.
    pub(crate) fn control(&self, flags: Flags, sequence: u32, now: Time) -> Control {
        let window = self.receive_edge.wrapping_sub(self.receive_next) >> self.receive_shift;
        Control {
            flow: self.flow,
            sequence,
            acknowledgment: self.receive_next,
            flags,
            window: u16::try_from(window).unwrap_or(u16::MAX),
            options: self.options(now),
        }
    }

    /// The peer's last time stamp, if both sides send them.
    pub(crate) fn recent_timestamp(&self) -> Option<u32> {
        self.timestamps.then_some(self.recent)
    }

    /// Options of each segment.
    fn options(&self, now: Time) -> Options {
        Options { timestamps: self.timestamps.then(|| (timestamp(now), self.recent)), ..Options::default() }
    }

    /// Where the state machine's packet has to begin, so that its payload is where ours has to be.
    pub(crate) fn inner_start(&self) -> usize {
        let options = if self.timestamps { TIMESTAMPS_LEN } else { 0 };
        ip_header_len(&self.flow) + options - INNER_IP_LEN
    }

    /// Length of the largest packet, with the state machine's headers in front of the payload.
    pub(crate) fn space_needed(&self) -> usize {
        self.inner_start() + INNER_IP_LEN + HEADER_LEN + OPTIONS_LEN_MAX + usize::from(self.mss)
    }

    /// The numbers of a packet of the state machine, as [`translate`](Self::translate) takes it.
    pub(crate) fn numbers(&self, packet: &[u8], length: usize) -> Option<(u32, u32)> {
        let start = self.inner_start() + INNER_IP_LEN;
        let inner = Tcp::parse(packet.get(start..start + length.checked_sub(INNER_IP_LEN)?)?).ok()?;
        let sequence = inner.sequence.wrapping_add(self.offset);
        Some((sequence, sequence.wrapping_add(length32(inner.sequence_len()))))
    }

    /// Makes a packet of ours of one of the state machine, `length` bytes from
    /// [`inner_start`](Self::inner_start) on. Returns the length of ours and what it has sent, or
    /// `None` if it is none that leaves.
    pub(crate) fn translate(&mut self, packet: &mut [u8], length: usize, now: Time) -> Option<(usize, Sent)> {
        let start = self.inner_start() + INNER_IP_LEN;
        let inner = Tcp::parse(packet.get(start..start + length.checked_sub(INNER_IP_LEN)?)?).ok()?;
        let payload = inner.payload.len();
        let payload_at = start + inner.segment.len() - payload;
        let mut options = self.options(now);
        let inner_options = Options::parse(inner.options, false);
        if payload == 0 && self.sack {
            options.sack = inner_options.sack;
        }
        let sequence = inner.sequence.wrapping_add(self.offset);
        let header = TcpHeader {
            source: self.flow.local(),
            destination: self.flow.remote(),
            sequence,
            acknowledgment: inner.acknowledgment,
            flags: inner.flags,
            window: self.scale(inner.window),
            urgent: 0,
            options,
        };
        let sent = self.note(&header, payload);
        let tcp_length = header.encoded_len().ok()?;
        let place = ip_header_len(&self.flow) + tcp_length;
        if payload > 0 && place != payload_at {
            packet.copy_within(payload_at..payload_at + payload, place);
        }
        Some((write_headers(packet, &header, tcp_length, payload)?, sent))
    }

    /// A window of the state machine as one of ours.
    fn scale(&self, window: u16) -> u16 {
        let bytes = u32::from(window) << self.inner_shift;
        u16::try_from(bytes >> self.receive_shift).unwrap_or(u16::MAX)
    }

    /// Notes what is being sent.
    fn note(&mut self, header: &TcpHeader, payload: usize) -> Sent {
        let fin = u32::from(header.flags.contains(Flags::FIN));
        let end = header.sequence.wrapping_add(length32(payload)).wrapping_add(fin);
        let again = end != header.sequence && is_before(header.sequence, self.send_next);
        if end != header.sequence {
            // Nothing new is sent to a closed window but a probe.
            self.is_probed = self.window == 0 && payload == 1 && fin == 0 && (!again || self.is_probed);
        }
        self.send_next = later(self.send_next, end);
        self.acknowledged = header.acknowledgment;
        self.receive_next = later(self.receive_next, header.acknowledgment);
        let window = u32::from(header.window) << self.receive_shift;
        self.receive_edge = later(self.receive_edge, header.acknowledgment.wrapping_add(window));
        Sent { sequence: header.sequence, end, again, skipped: false }
    }
}

/// True if enough time has passed since the last challenge ACK; this is the next one.
pub(crate) fn may_challenge(last: &mut Option<Time>, now: Time) -> bool {
    let may = last.is_none_or(|at| now >= at + CHALLENGE_INTERVAL);
    if may {
        *last = Some(now);
    }
    may
}

/// Our time stamp: milliseconds, as in Linux.
#[expect(clippy::cast_possible_truncation, reason = "time stamps wrap")]
pub(crate) const fn timestamp(now: Time) -> u32 {
    (now.0 / 1000) as u32
}
