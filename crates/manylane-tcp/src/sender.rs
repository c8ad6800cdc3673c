//! What the segments of a connection tell about its path, and how much may be sent: the state
//! machine's own congestion control is off.
//!
//! Losses are seen as RFC 5681 and RFC 6582 have it: three duplicate ACKs are one, and nothing is
//! another until all that was in flight is acknowledged. The state machine sends the oldest segment
//! again after three duplicate ACKs; it is made to do so, too, when an ACK in a recovery shows that
//! another one is missing, and when nothing comes back for two round trips (a tail loss probe, RFC
//! 8985, section 7; here of the oldest segment, not of the last one). That it does so on its own
//! shows a timeout. It then sends all segments again, which are held back here to what the window
//! allows.
//!
//! If the peer tells what it has received behind a loss, only what it lacks is sent again: see
//! `selective`.

use std::time::Duration;

use crate::congestion::{Acked, Controller, NewController, RateSampler};
use crate::device::Skip;
use crate::edge::{Edge, Sent};
use crate::selective::Selective;
use crate::sequence::is_before;
use crate::time::Time;

/// Duplicate ACKs that show a loss.
const DUPLICATES: u8 = 3;
/// Least time that is taken for a retransmission timeout.
const TIMEOUT_MIN: Duration = Duration::from_millis(200);
/// How often it doubles.
const DOUBLINGS_MAX: u8 = 6;
/// What a probe waits beyond two round trips, for an ACK that comes a little late (Linux,
/// `TCP_TIMEOUT_MIN`).
const PROBE_MARGIN: Duration = Duration::from_millis(2);
/// Frames that may be sent at once in spite of pacing, so that a timer is not set for each.
const PACED_BURST: u32 = 4;

/// What is to be done after an ACK.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reaction {
    /// It shows a loss that was not known before.
    pub(crate) is_loss: bool,
    /// The oldest segment is to be sent again.
    pub(crate) resends: bool,
}

/// The sending side of a connection.
#[derive(Debug)]
pub(crate) struct Sender {
    controller: Box<dyn Controller>,
    /// For controllers that need it, while data is on its way.
    sampler: Option<Box<RateSampler>>,
    needs_rate: bool,
    mss: u16,
    /// Smoothed round trip (RFC 6298), if it is known.
    round_trip: Option<Duration>,
    /// A segment whose ACK is awaited for measuring: the number behind it, and when it was sent.
    timed: Option<(u32, Time)>,
    /// Duplicate ACKs in a row.
    duplicates: u8,
    /// The state machine will send the oldest segment again because of them. It does so once until
    /// something is acknowledged, whatever else comes.
    expects_resend: bool,
    is_resent: bool,
    /// Bytes above the window, for segments that have left the network (RFC 5681, section 3.2).
    inflation: u32,
    /// What the peer has behind a loss, while there is something to remember of it.
    selective: Option<Box<Selective>>,
    /// The end of a recovery, and that of what was sent before a timeout.
    recover: Option<u32>,
    timed_out: Option<u32>,
    /// The end of what was on its way when it was probed.
    probed: Option<u32>,
    /// Timeouts since something was acknowledged for the first time.
    timeouts: u8,
    /// The number behind what the state machine has sent, again or for the first time.
    sent_to: u32,
    /// The number behind a probe of the peer's closed window, if it is the last of what was sent.
    probed_to: Option<u32>,
    /// When a segment was sent last, and when one was acknowledged.
    sent_at: Time,
    acked_at: Time,
    /// There was less to send than was allowed, all the time since what is in flight was sent.
    app_limited: bool,
    /// The number behind what was in flight when the window limited the sending.
    limited_to: u32,
    /// When the next segment may be sent, by the pacing rate.
    paced_to: Time,
}

impl Sender {
    pub(crate) fn new(new: NewController, edge: &Edge, round_trip: Option<Duration>, now: Time) -> Sender {
        let controller = new(edge.mss);
        Sender {
            needs_rate: controller.needs_rate(),
            controller,
            sampler: None,
            mss: edge.mss,
            round_trip,
            timed: None,
            duplicates: 0,
            expects_resend: false,
            is_resent: false,
            inflation: 0,
            selective: None,
            recover: None,
            timed_out: None,
            probed: None,
            timeouts: 0,
            sent_to: edge.send_next,
            probed_to: None,
            sent_at: now,
            acked_at: now,
            app_limited: true,
            limited_to: edge.send_next,
            paced_to: now,
        }
    }

    /// The smoothed round trip, if it is known.
    pub(crate) fn round_trip(&self) -> Option<Duration> {
        self.round_trip
    }

    /// Bytes that may be unacknowledged.
    fn allowance(&self) -> u32 {
        let gone = self.active().map_or(self.inflation, |selective| selective.scoreboard.count());
        self.controller.window().saturating_add(gone)
    }

    /// When the next segment may be sent: now, or later, or after an ACK, but for a timeout's time.
    /// `written`: bytes that are written and not acknowledged.
    pub(crate) fn may_send_at(&self, edge: &Edge, written: usize, now: Time) -> Time {
        let is_sent_again = !self.expects_resend && is_before(self.sent_to, edge.send_next);
        if let (true, Some(selective)) = (is_sent_again, self.active()) {
            let (mss, window) = (u32::from(self.mss), self.controller.window());
            return match selective.may_pass(edge, self.sent_to, mss, window) {
                true => self.paced_at(now),
                false => self.sent_at + self.timeout(),
            };
        }
        let outstanding = self.outstanding(edge);
        let has_unsent = written > usize::try_from(outstanding).unwrap_or(usize::MAX);
        // What is due if all is sent is an ACK, or comes from a timer.
        if self.expects_resend || outstanding == 0 || !has_unsent {
            return now;
        }
        if outstanding >= self.allowance() {
            return self.sent_at + self.timeout();
        }
        self.paced_at(now)
    }

    /// When pacing lets the next segment go.
    fn paced_at(&self, now: Time) -> Time {
        if self.controller.pacing_rate().is_some() { self.paced_to } else { now }
    }

    /// While segments are sent selectively.
    fn active(&self) -> Option<&Selective> {
        self.selective.as_deref().filter(|selective| selective.is_active)
    }

    /// What the state machine is about to send and need not.
    pub(crate) fn skip(&self) -> Skip<'_> {
        // Three duplicate ACKs make it send the oldest segment, also if it was sent again already.
        let resent_to = self.expects_resend.then_some(self.sent_to);
        self.active().map_or(Skip::Nothing, |selective| Skip::Known(&selective.scoreboard, resent_to))
    }

    /// How the state machine is to be rewound, if it is, and how often it was since something was
    /// acknowledged.
    pub(crate) fn wants_rewind(&self) -> Option<(Skip<'static>, u16)> {
        let selective = self.selective.as_deref().filter(|selective| selective.wants_rewind);
        let selective = selective.filter(|_| !self.expects_resend)?;
        // The oldest segment was just sent again because of three duplicate ACKs.
        let skip = if selective.is_active { Skip::Nothing } else { Skip::Everything };
        Some((skip, selective.rewinds))
    }

    /// It was, from the oldest segment on: none if it could not.
    pub(crate) fn on_rewound(&mut self, edge: &Edge, oldest: Option<&Sent>, now: Time) {
        self.note_rewind(now);
        let (Some(oldest), Some(selective)) = (oldest, &mut self.selective) else { return };
        selective.begin(edge, oldest.end);
        self.inflation = 0;
        self.sent_to = oldest.end;
        if !oldest.skipped {
            // It is not known which of both an ACK will be for.
            self.timed = None;
            let bytes = oldest.end.wrapping_sub(oldest.sequence);
            self.controller.on_sent(now, bytes, edge.in_flight());
            self.sent_at = now;
            self.pace(bytes, now);
        }
    }

    /// The timer of the state machine is off.
    pub(crate) fn note_rewind(&mut self, now: Time) {
        self.selective.get_or_insert_default().note_rewind(now);
    }

    /// When a timeout comes if the state machine's timer is off, and how often it was rewound.
    pub(crate) fn timeout_at(&self, edge: &Edge) -> Option<(Time, u16)> {
        let selective = self.selective.as_deref()?;
        let is_ours = selective.rewinds > 0 && edge.in_flight() > 0;
        is_ours.then(|| (selective.rewound_at.max(self.acked_at) + self.timeout(), selective.rewinds))
    }

    /// A segment was skipped.
    pub(crate) fn on_skipped(&mut self, sent: &Sent) {
        if is_before(self.sent_to, sent.end) {
            self.sent_to = sent.end;
        }
        self.expects_resend = false;
    }

    /// A time after which the state machine's timeout has come: it doubles (RFC 6298, section 5).
    fn timeout(&self) -> Duration {
        TIMEOUT_MIN.max(self.round_trip.unwrap_or_default() * 2) * (1 << self.timeouts.min(DOUBLINGS_MAX))
    }

    /// Notes what was sent. `before`: bytes that were in flight before it. True if a timeout has
    /// come.
    pub(crate) fn on_sent(&mut self, edge: &Edge, sent: &Sent, before: u32, now: Time) -> bool {
        let bytes = sent.end.wrapping_sub(sent.sequence);
        if bytes == 0 {
            return false;
        }
        let mut is_timeout = false;
        // Not the next one after a timeout.
        let goes_back = sent.sequence == edge.unacknowledged && is_before(sent.sequence, self.sent_to);
        if self.probed_to.take() == Some(self.sent_to) {
            // The probe again, whose loss says nothing of the path, or the peer has opened its
            // window: what follows the probe begins with it.
            self.timed = None;
        } else if sent.again {
            // It is not known which of both the ACK is for (Karn, RFC 6298, section 3).
            self.timed = None;
            if !self.expects_resend && goes_back {
                self.inflation = 0;
                if let Some(selective) = &mut self.selective {
                    // What the peer had may be gone (RFC 2018, section 8).
                    selective.end();
                    selective.scoreboard.clear();
                }
                self.recover = None;
                self.probed = None;
                self.timed_out = Some(edge.send_next);
                self.timeouts = self.timeouts.saturating_add(1);
                self.sent_to = sent.end;
                self.controller.on_timeout(now, before);
                is_timeout = true;
            }
            self.expects_resend = false;
        } else {
            if before == 0 && now.since(self.sent_at) > self.timeout() {
                self.controller.on_restart(now);
            }
            self.timed = self.timed.or(Some((sent.end, now)));
            if self.needs_rate {
                let sampler =
                    self.sampler.get_or_insert_with(|| Box::new(RateSampler::new(sent.sequence, self.mss)));
                sampler.on_sent(now, sent.end, before);
            }
        }
        if is_before(self.sent_to, sent.end) {
            self.sent_to = sent.end;
        }
        self.probed_to = edge.is_probing().then_some(sent.end);
        self.controller.on_sent(now, bytes, before);
        self.sent_at = now;
        self.pace(bytes, now);
        is_timeout
    }

    /// Moves the time of the next segment.
    fn pace(&mut self, bytes: u32, now: Time) {
        let Some(rate) = self.controller.pacing_rate().filter(|rate| *rate > 0) else { return };
        let micros = |bytes: u32| Duration::from_micros(u64::from(bytes).saturating_mul(1_000_000) / rate);
        let earliest = Time(now.0.saturating_sub(
            u64::try_from(micros(PACED_BURST * u32::from(self.mss)).as_micros()).unwrap_or(u64::MAX),
        ));
        self.paced_to = self.paced_to.max(earliest) + micros(bytes);
    }

    /// Notes an ACK that the state machine has taken: `bytes` are acknowledged by it for the first
    /// time, and `blocks` are what the peer has behind that. `is_duplicate`: it says the same as
    /// the one before. `can_resend`: the state machine can be made to send its oldest segment
    /// again.
    pub(crate) fn on_ack(
        &mut self,
        edge: &Edge,
        bytes: u32,
        blocks: &[Option<(u32, u32)>],
        (is_duplicate, can_resend): (bool, bool),
        now: Time,
    ) -> Reaction {
        self.note_blocks(edge, bytes, blocks, now);
        if bytes == 0 {
            // The state machine counts duplicates, too, and sends again at the third.
            let is_loss = is_duplicate && self.on_duplicate(edge, now);
            return Reaction { is_loss, resends: false };
        }
        self.acked_at = now;
        self.duplicates = 0;
        self.timeouts = 0;
        (self.expects_resend, self.is_resent) = (false, false);
        if is_before(self.sent_to, edge.unacknowledged) {
            self.sent_to = edge.unacknowledged;
        }
        let in_flight = edge.in_flight();
        let rtt = self.measure(edge, now);
        let rate = self.sampler.as_mut().and_then(|sampler| sampler.on_ack(now, edge.unacknowledged));
        let app_limited = self.app_limited;
        self.controller.on_ack(&Acked { now, bytes, rtt, in_flight, app_limited, rate });
        let is_reached = |end: &u32| !is_before(edge.unacknowledged, *end);
        self.timed_out = self.timed_out.filter(|end| !is_reached(end));
        if in_flight == 0 {
            self.sampler = None;
        }
        let probed = self.probed.take();
        if self.recover.is_some_and(|end| is_reached(&end)) {
            self.recover = None;
            self.inflation = 0;
            if let Some(selective) = &mut self.selective {
                selective.end();
            }
            self.controller.on_recovered(now, in_flight);
            Reaction::default()
        } else if self.active().is_some() {
            Reaction::default()
        } else if self.recover.is_some() {
            // One segment has left the network, and those that are acknowledged no longer count.
            self.inflation = self.inflation.saturating_sub(bytes).saturating_add(u32::from(self.mss));
            if can_resend {
                self.expect_resend();
            }
            Reaction { is_loss: false, resends: can_resend }
        } else if can_resend && probed.is_some_and(|end| !is_reached(&end)) {
            // The probe has filled one hole, and there is another one.
            self.expect_resend();
            self.begin_recovery(edge, now);
            Reaction { is_loss: true, resends: true }
        } else {
            Reaction::default()
        }
    }

    /// Takes what an ACK says of what the peer has.
    fn note_blocks(&mut self, edge: &Edge, bytes: u32, blocks: &[Option<(u32, u32)>], now: Time) {
        for block in blocks.iter().map_while(|block| *block).filter(|_| edge.sack) {
            let scoreboard = &mut self.selective.get_or_insert_default().scoreboard;
            scoreboard.add(block, edge.unacknowledged, edge.send_next);
        }
        let Some(selective) = &mut self.selective else { return };
        selective.scoreboard.acknowledge(edge.unacknowledged);
        if bytes > 0 {
            selective.rewinds = 0;
        }
        if selective.is_active {
            let round_trip = self.round_trip.unwrap_or_default();
            selective.note_arrivals(edge, self.sent_to, u32::from(self.mss), round_trip, now);
        }
        if selective.is_over() {
            self.selective = None;
        }
    }

    /// The state machine is to be rewound if the peer has told what it has.
    fn want_rewind(&mut self) {
        if let Some(selective) = &mut self.selective {
            selective.wants_rewind = !selective.scoreboard.is_empty();
        }
    }

    /// The oldest segment will be sent again, if it was not already.
    fn expect_resend(&mut self) {
        self.expects_resend |= !self.is_resent;
        self.is_resent = true;
    }

    /// A segment was lost.
    fn begin_recovery(&mut self, edge: &Edge, now: Time) {
        self.recover = Some(edge.send_next);
        self.inflation = u32::from(DUPLICATES) * u32::from(self.mss);
        self.want_rewind();
        self.controller.on_loss(now, edge.in_flight());
    }

    /// When the oldest segment is to be sent again because nothing has come back: once for what is
    /// on its way. Never for one segment alone, whose ACK the peer may delay for as long as a
    /// timeout takes.
    pub(crate) fn probe_at(&self, edge: &Edge) -> Option<Time> {
        let is_settled = self.recover.or(self.timed_out).or(self.probed).is_none();
        let delay = self.round_trip? * 2 + PROBE_MARGIN;
        (is_settled && edge.window > 0 && edge.in_flight() > u32::from(self.mss) && delay < TIMEOUT_MIN)
            .then(|| self.sent_at.max(self.acked_at) + delay)
    }

    /// The oldest segment will be sent again as a probe.
    pub(crate) fn note_probe(&mut self, edge: &Edge) {
        self.expect_resend();
        self.probed = Some(edge.send_next);
    }

    /// Notes a duplicate ACK. True if it shows a loss.
    fn on_duplicate(&mut self, edge: &Edge, now: Time) -> bool {
        let mss = u32::from(self.mss);
        self.duplicates = self.duplicates.saturating_add(1);
        if let Some(sampler) = &mut self.sampler {
            sampler.on_out_of_order(mss);
        }
        if self.duplicates == DUPLICATES {
            self.expect_resend();
            if self.recover.is_none() && self.timed_out.is_none() {
                self.begin_recovery(edge, now);
                return true;
            }
        }
        if self.recover.is_some() && self.active().is_none() {
            self.inflation = self.inflation.saturating_add(mss);
            self.want_rewind();
        }
        false
    }

    /// Takes the round trip that the ACK of a timed segment shows.
    fn measure(&mut self, edge: &Edge, now: Time) -> Option<Duration> {
        let (end, sent) = self.timed?;
        if is_before(edge.unacknowledged, end) {
            return None;
        }
        self.timed = None;
        let sample = now.since(sent);
        self.round_trip = Some(self.round_trip.map_or(sample, |smoothed| (smoothed * 7 + sample) / 8));
        Some(sample)
    }

    /// Notes what has limited the sending: the window, or that there was nothing more to send, or
    /// the peer's window was full. `written`: bytes that are written and not acknowledged.
    pub(crate) fn note_limit(&mut self, edge: &Edge, written: usize) {
        let (outstanding, mss) = (self.outstanding(edge), u32::from(self.mss));
        let free = self.allowance().saturating_sub(outstanding);
        let has_unsent = written > usize::try_from(outstanding).unwrap_or(usize::MAX);
        let is_paced = has_unsent && outstanding.saturating_add(mss) <= edge.window;
        if is_paced || free < mss {
            self.app_limited = false;
            self.limited_to = edge.send_next;
            return;
        }
        self.app_limited |= !is_before(edge.unacknowledged, self.limited_to);
        if let Some(sampler) = &mut self.sampler {
            sampler.on_app_limited(edge.in_flight());
        }
    }

    /// Bytes that the state machine has sent, again or for the first time, and not acknowledged.
    fn outstanding(&self, edge: &Edge) -> u32 {
        u32::try_from(self.sent_to.wrapping_sub(edge.unacknowledged).cast_signed()).unwrap_or(0)
    }

    /// The segments are shorter from now on.
    pub(crate) fn set_mss(&mut self, mss: u16) {
        self.mss = mss;
        self.controller.set_mss(mss);
    }
}
