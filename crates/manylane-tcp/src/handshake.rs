//! Handshakes: SYNs of both sides, until each knows the other's numbers.
//!
//! For a peer's SYN a small record is made. Once there are too many, nothing is stored any more:
//! our number is a cookie, from which the record is made when the peer's ACK brings it back (RFC
//! 4987, section 3.6).

use std::time::Duration;

use manylane_wire::tcp::{Flags, Options};

use crate::congestion::NewController;
use crate::connection::{Handshake, Open, PeerSyn, Phase};
use crate::core::Core;
use crate::edge::{TIMESTAMPS_LEN, Terms, may_challenge, timestamp};
use crate::event::{Id, Reason, What};
use crate::flow::Flow;
use crate::output::Output;
use crate::packet::{Control, Segment};
use crate::secret::CookieOptions;
use crate::sequence::is_before;
use crate::time::Time;

/// First timeout of a SYN (RFC 6298, section 2).
const TIMEOUT: Duration = Duration::from_secs(1);
/// How many times a SYN that answers one is sent, like Linux (`tcp_synack_retries`): 63 seconds.
const ANSWERS_MAX: u8 = 6;
/// For how long cookies are accepted after the last one was given out: as long as one is valid.
const COOKIES_VALID: Duration = Duration::from_secs(120);
/// MSS of a peer that does not tell one (RFC 9293, section 3.7.1), with IPv4 and IPv6.
const MSS_DEFAULT: (u16, u16) = (536, 1220);
/// Least MSS that we believe, so that no peer makes us send one byte a segment. Linux has 48.
const MSS_MIN: u16 = 88;

/// What becomes of a segment of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// It is dealt with.
    Done,
    /// It has completed the handshake; it is no SYN, and may have data.
    Established,
}

/// Takes the SYN of a connection that does not exist. `after`: the last number of the one before.
pub(crate) fn accept(
    core: &mut Core,
    segment: &Segment,
    controller: NewController,
    after: Option<u32>,
    now: Time,
    out: &mut impl Output,
) {
    if core.table.is_full() {
        core.counters.dropped_full += 1;
        return;
    }
    let (flow, peer) = (segment.flow, PeerSyn::of(segment));
    let cookie = |core: &Core| {
        let options = CookieOptions { mss: peer.mss, shift: peer.shift, sack: peer.sack };
        core.secret.cookie(&flow, peer.sequence, &options, now)
    };
    if core.backlog >= core.config.backlog {
        core.cookies_until = Some(now + COOKIES_VALID);
        core.counters.cookies_sent += 1;
        core.send(&syn(core, flow, cookie(core), Some(&peer), now), out);
        return;
    }
    // A copy of this SYN may have got a cookie, and both answers have to agree.
    let has_cookies = core.cookies_until.is_some_and(|until| now <= until);
    let mut first = if has_cookies { cookie(core) } else { core.secret.initial_sequence(&flow, now) };
    if let Some(after) = after.filter(|after| !is_before(*after, first)) {
        // The peer has to see that it is a new one. Linux goes as far.
        first = after.wrapping_add(u32::from(u16::MAX) + 2);
    }
    let handshake = Handshake {
        flow,
        first,
        peer: Some(peer),
        is_active: false,
        controller,
        tries: 0,
        begun: now,
        sent: now,
        challenged: None,
    };
    if let Some(id) = core.table.add(&core.secret, Phase::Handshake(handshake)) {
        core.backlog += 1;
        drive(core, id.index, now, out);
    }
}

/// Asks for a connection. `None` if there are too many; the flow must have none.
pub(crate) fn connect(core: &mut Core, flow: Flow, controller: NewController, now: Time) -> Option<Id> {
    let first = core.secret.initial_sequence(&flow, now);
    let handshake = Handshake {
        flow,
        first,
        peer: None,
        is_active: true,
        controller,
        tries: 0,
        begun: now,
        sent: now,
        challenged: None,
    };
    let id = core.table.add(&core.secret, Phase::Handshake(handshake))?;
    core.mark_ready(id.index);
    Some(id)
}

/// True if a segment may have overtaken the one that brings a cookie back: it has data or FIN, and
/// cookies were given out.
pub(crate) fn may_follow_cookie(core: &Core, segment: &Segment, now: Time) -> bool {
    core.cookies_until.is_some_and(|until| now <= until) && (segment.payload > 0 || segment.has(Flags::FIN))
}

/// Takes an ACK of a connection that does not exist: it may bring a cookie back. `None` if it does
/// not. Returns the place of the connection, if there is one left.
pub(crate) fn redeem(
    core: &mut Core,
    segment: &Segment,
    controller: NewController,
    now: Time,
) -> Option<Option<u32>> {
    core.cookies_until.filter(|until| now <= *until)?;
    let (peer, cookie) = (segment.sequence.wrapping_sub(1), segment.acknowledgment.wrapping_sub(1));
    let options = core.secret.open_cookie(&segment.flow, peer, cookie, now)?;
    let peer = PeerSyn {
        sequence: peer,
        window: segment.window,
        mss: options.mss,
        shift: options.shift,
        sack: options.sack,
        timestamp: segment.options.timestamps.map(|(value, _)| value),
    };
    let terms = terms(core, &segment.flow, cookie, &peer);
    let open = Open::new(segment.flow, &terms, controller, None, now);
    let Some(id) = core.table.add(&core.secret, Phase::Open(open)) else {
        // As with a SYN: when it comes again, there may be a place.
        core.counters.dropped_full += 1;
        return Some(None);
    };
    core.counters.cookies_accepted += 1;
    core.counters.accepted += 1;
    core.tell(id.index, What::Accepted);
    core.mark_ready(id.index);
    Some(Some(id.index))
}

/// Takes a segment of a connection in the handshake.
pub(crate) fn input(
    core: &mut Core,
    index: u32,
    segment: &Segment,
    now: Time,
    out: &mut impl Output,
) -> Next {
    let Some(Phase::Handshake(handshake)) = core.table.phase_mut(index) else { return Next::Done };
    let expected = handshake.first.wrapping_add(1);
    let acknowledges = segment.has(Flags::ACK) && segment.acknowledgment == expected;
    let Some(peer) = handshake.peer else {
        return input_before_syn(core, index, segment, acknowledges, now, out);
    };
    let (is_active, start) = (handshake.is_active, peer.sequence.wrapping_add(1));
    let is_in_window = segment.sequence.wrapping_sub(start) < u32::from(core.first_window());
    if segment.has(Flags::RST) {
        if segment.sequence == start {
            core.end(index, Reason::Refused);
        } else if is_in_window {
            challenge(core, index, expected, &peer, now, out);
        }
    } else if segment.has(Flags::SYN) {
        if segment.sequence == peer.sequence && !(is_active && acknowledges) {
            // Ours was lost, or both come at once.
            answer(core, index, now, out);
        } else if segment.sequence == peer.sequence {
            return establish(core, index, &peer, segment, now, out);
        } else {
            // Of another connection, or an old one: the peer says which (RFC 5961, section 4.2).
            challenge(core, index, expected, &peer, now, out);
        }
    } else if !is_in_window {
        challenge(core, index, expected, &peer, now, out);
    } else if acknowledges {
        return establish(core, index, &peer, segment, now, out);
    } else if segment.has(Flags::ACK) {
        reset(core, segment, out);
    }
    Next::Done
}

/// Answers what is not acceptable with an ACK that says what we expect, but not more often than an
/// established connection does: if the peer takes our answer for not acceptable, too, both would
/// answer for ever.
fn challenge(core: &mut Core, index: u32, sequence: u32, peer: &PeerSyn, now: Time, out: &mut impl Output) {
    let Some(Phase::Handshake(handshake)) = core.table.phase_mut(index) else { return };
    if !may_challenge(&mut handshake.challenged, now) {
        return;
    }
    let flow = handshake.flow;
    let timestamps = peer.timestamp.map(|recent| (timestamp(now), recent));
    let challenge = Control {
        flow,
        sequence,
        acknowledgment: peer.sequence.wrapping_add(1),
        flags: Flags::ACK,
        window: core.first_window(),
        options: Options { timestamps, ..Options::default() },
    };
    core.counters.challenges_sent += 1;
    core.send(&challenge, out);
}

/// Takes a segment while the peer's SYN has not come (SYN-SENT, RFC 9293, section 3.10.7.3).
fn input_before_syn(
    core: &mut Core,
    index: u32,
    segment: &Segment,
    acknowledges: bool,
    now: Time,
    out: &mut impl Output,
) -> Next {
    if segment.has(Flags::ACK) && !acknowledges {
        if !segment.has(Flags::RST) {
            reset(core, segment, out);
            // The peer may have had a connection from our port before, which it remembers as closed
            // (TIME-WAIT), and which the reset ends. Once, and without the timeout, as in Linux.
            if matches!(core.table.phase(index), Some(Phase::Handshake(handshake)) if handshake.tries == 1) {
                answer(core, index, now, out);
            }
        }
    } else if segment.has(Flags::RST) {
        if acknowledges {
            core.end(index, Reason::Refused);
        }
    } else if segment.has(Flags::SYN) {
        let peer = PeerSyn::of(segment);
        let Some(Phase::Handshake(handshake)) = core.table.phase_mut(index) else { return Next::Done };
        handshake.peer = Some(peer);
        if acknowledges {
            return establish(core, index, &peer, segment, now, out);
        }
        // Both have sent one.
        answer(core, index, now, out);
    }
    Next::Done
}

/// Both sides know each other's numbers.
fn establish(
    core: &mut Core,
    index: u32,
    peer: &PeerSyn,
    segment: &Segment,
    now: Time,
    out: &mut impl Output,
) -> Next {
    let Some(Phase::Handshake(handshake)) = core.table.phase(index) else { return Next::Done };
    let (is_active, flow, controller) = (handshake.is_active, handshake.flow, handshake.controller);
    // With more than one SYN it is not known which one was answered (RFC 6298, section 3).
    let round_trip = (handshake.tries == 1).then(|| now.since(handshake.sent));
    let mut terms = terms(core, &flow, handshake.first, peer);
    if !segment.has(Flags::SYN) {
        terms.window = u32::from(segment.window) << terms.shifts.map_or(0, |(send, _)| send);
    }
    let Some(phase) = core.table.phase_mut(index) else { return Next::Done };
    let open = Open::new(flow, &terms, controller, round_trip, now);
    let acknowledgment = open.edge.control(Flags::ACK, open.edge.send_next, now);
    *phase = Phase::Open(open);
    if is_active {
        core.counters.connected += 1;
        core.tell(index, What::Connected);
    } else {
        core.backlog -= 1;
        core.counters.accepted += 1;
        core.tell(index, What::Accepted);
    }
    core.mark_ready(index);
    if segment.has(Flags::SYN) {
        // Data with it comes again.
        core.send(&acknowledgment, out);
        return Next::Done;
    }
    Next::Established
}

/// Sends our SYN if it is due, again if so, and gives up after the last one.
pub(crate) fn drive(core: &mut Core, index: u32, now: Time, out: &mut impl Output) {
    let Some(Phase::Handshake(handshake)) = core.table.phase(index) else { return };
    if handshake.tries > 0 {
        let due = handshake.sent + timeout(handshake.tries);
        if now < due {
            core.wheel.set(index, due);
            return;
        }
        let is_over = match handshake.is_active {
            true => now.since(handshake.begun) >= core.config.user_timeout,
            false => handshake.tries >= ANSWERS_MAX,
        };
        if is_over {
            core.end(index, Reason::TimedOut);
            return;
        }
    }
    answer(core, index, now, out);
}

/// Sends our SYN.
fn answer(core: &mut Core, index: u32, now: Time, out: &mut impl Output) {
    let Some(Phase::Handshake(handshake)) = core.table.phase(index) else { return };
    let control = syn(core, handshake.flow, handshake.first, handshake.peer.as_ref(), now);
    core.send(&control, out);
    let Some(Phase::Handshake(handshake)) = core.table.phase_mut(index) else { return };
    handshake.tries = handshake.tries.saturating_add(1);
    handshake.sent = now;
    let due = now + timeout(handshake.tries);
    core.wheel.set(index, due);
}

/// Time until the next SYN: it doubles.
fn timeout(tries: u8) -> Duration {
    TIMEOUT * (1 << tries.saturating_sub(1).min(5))
}

fn reset(core: &mut Core, segment: &Segment, out: &mut impl Output) {
    core.counters.resets_sent += 1;
    core.send(&Control::reset(segment), out);
}

/// Our SYN, which offers what the peer's offers.
fn syn(core: &Core, flow: Flow, first: u32, peer: Option<&PeerSyn>, now: Time) -> Control {
    let recent = peer.map_or(Some(0), |peer| peer.timestamp);
    Control {
        flow,
        sequence: first,
        acknowledgment: peer.map_or(0, |peer| peer.sequence.wrapping_add(1)),
        flags: if peer.is_some() { Flags::SYN.with(Flags::ACK) } else { Flags::SYN },
        window: core.first_window(),
        options: Options {
            mss: Some(core.own_mss(&flow)),
            window_scale: peer.is_none_or(|peer| peer.shift.is_some()).then(|| core.own_shift()),
            sack_permitted: peer.is_none_or(|peer| peer.sack),
            timestamps: recent.map(|recent| (timestamp(now), recent)),
            ..Options::default()
        },
    }
}

/// What both sides have agreed on.
fn terms(core: &Core, flow: &Flow, first: u32, peer: &PeerSyn) -> Terms {
    let options = if peer.timestamp.is_some() { TIMESTAMPS_LEN } else { 0 };
    let mss = peer.mss.min(core.own_mss(flow)).max(MSS_MIN);
    let shifts = peer.shift.map(|shift| (shift, core.own_shift()));
    Terms {
        send_from: first.wrapping_add(1),
        receive_from: peer.sequence.wrapping_add(1),
        mss: mss - u16::try_from(options).unwrap_or(0),
        window: u32::from(peer.window),
        advertised: u32::from(core.first_window()),
        shifts,
        sack: peer.sack,
        timestamp: peer.timestamp,
    }
}

impl PeerSyn {
    fn of(segment: &Segment) -> PeerSyn {
        let default = if segment.flow.is_ipv4() { MSS_DEFAULT.0 } else { MSS_DEFAULT.1 };
        let options = &segment.options;
        PeerSyn {
            sequence: segment.sequence,
            window: segment.window,
            mss: options.mss.unwrap_or(default),
            shift: options.window_scale,
            sack: options.sack_permitted,
            timestamp: options.timestamps.map(|(value, _)| value),
        }
    }
}
