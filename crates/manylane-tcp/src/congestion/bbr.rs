//! BBR version 1: the window and the pacing rate follow from the delivery rate and the minimum
//! round-trip time, not from losses (draft-cardwell-iccrg-bbr-congestion-control-00).

use std::time::Duration;

use super::bandwidth::{Bandwidth, RATE_MAX};
use super::controller::{Acked, Controller};
use super::window::{WINDOW_MAX, initial_window, segment};
use crate::time::Time;

/// Gains are multiples of this.
const UNIT: u64 = 1000;
/// 2/ln 2, the least gain that doubles the rate each round (section 4.1.1.4).
const HIGH_GAIN: u64 = 2886;
/// Its inverse: drains in one round the queue that Startup has built.
const DRAIN_GAIN: u64 = 346;
/// Of the window in ProbeBW: room for ACKs that are delayed or come in bursts.
const PROBE_BW_WINDOW_GAIN: u64 = 2000;
/// Of the pacing rate in ProbeBW: one phase to probe, one to drain what this has queued.
const CYCLE: [u64; 8] = [1250, 750, 1000, 1000, 1000, 1000, 1000, 1000];
/// Time for which a minimum of the round-trip time is remembered.
const MIN_RTT_LIFETIME: Duration = Duration::from_secs(10);
/// Time for which ProbeRTT keeps the window at its minimum.
const PROBE_RTT_TIME: Duration = Duration::from_millis(200);
/// Segments of the least window: enough for a receiver that acknowledges every second one.
const WINDOW_MIN_SEGMENTS: u32 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Startup,
    Drain,
    ProbeBw,
    ProbeRtt,
}

/// BBR version 1.
///
/// The phase of ProbeBW in which a connection begins is taken from the time, not from a random
/// number.
#[derive(Clone, Debug)]
pub struct Bbr {
    state: State,
    bandwidth: Bandwidth,
    /// In microseconds; `u32::MAX` before the first sample.
    min_rtt: u32,
    min_rtt_at: Time,
    phase: u8,
    phase_at: Time,
    /// Once in ProbeRTT few bytes are in flight.
    probe_rtt_end: Option<Time>,
    /// Zero before the first sample of the round-trip time.
    pacing_rate: u64,
    window: u32,
    /// The window before a recovery or ProbeRTT.
    prior_window: u32,
    /// Until it exceeds the initial window.
    delivered: u32,
    mss: u16,
    restarted: bool,
    in_recovery: bool,
    /// In the first round of a recovery: no more is sent than arrives.
    is_conserving: bool,
}

const _: () = assert!(size_of::<Bbr>() <= 256);

impl Bbr {
    /// Creates the controller of a new connection.
    #[must_use]
    pub fn new(mss: u16) -> Bbr {
        let mut bbr = Bbr {
            state: State::Startup,
            bandwidth: Bandwidth::default(),
            min_rtt: u32::MAX,
            min_rtt_at: Time::default(),
            phase: 0,
            phase_at: Time::default(),
            probe_rtt_end: None,
            pacing_rate: 0,
            window: initial_window(mss),
            prior_window: 0,
            delivered: 0,
            mss,
            restarted: false,
            in_recovery: false,
            is_conserving: false,
        };
        bbr.window = bbr.window.max(bbr.window_min());
        bbr
    }

    fn window_min(&self) -> u32 {
        WINDOW_MIN_SEGMENTS * segment(self.mss)
    }

    /// Gains of the pacing rate and of the window.
    fn gains(&self) -> (u64, u64) {
        match self.state {
            State::Startup => (HIGH_GAIN, HIGH_GAIN),
            State::Drain => (DRAIN_GAIN, HIGH_GAIN),
            State::ProbeBw => (CYCLE[usize::from(self.phase) % CYCLE.len()], PROBE_BW_WINDOW_GAIN),
            State::ProbeRtt => (UNIT, UNIT),
        }
    }

    /// Bytes in flight at `gain` times the bandwidth-delay product (section 4.2.3.2), with room
    /// for three bursts at the sender and the receiver.
    fn in_flight_at(&self, gain: u64) -> u32 {
        if self.min_rtt == u32::MAX {
            return initial_window(self.mss).max(self.window_min());
        }
        let product = u128::from(self.bandwidth.max()) * u128::from(self.min_rtt) / 1_000_000;
        let bytes = product * u128::from(gain) / u128::from(UNIT);
        let mss = u64::from(segment(self.mss));
        // Section 4.2.2: a millisecond's worth, and a segment or two at low rates.
        let burst = match self.pacing_rate {
            0..150_000 => mss,
            150_000..3_000_000 => 2 * mss,
            rate => (rate / 1000).min(64 * 1024),
        };
        u32::try_from(bytes + u128::from(3 * burst)).unwrap_or(WINDOW_MAX).min(WINDOW_MAX)
    }

    fn enter_probe_bw(&mut self, now: Time) {
        self.state = State::ProbeBw;
        // Any but the phase that drains: nothing was queued before it. Flows that begin together
        // should not probe together.
        let phase = (now.0 % (CYCLE.len() as u64 - 1)) as u8;
        self.phase = if phase == 0 { 0 } else { phase + 1 };
        self.phase_at = now;
    }

    fn check_phase(&mut self, ack: &Acked) {
        let is_long = ack.now.since(self.phase_at).as_micros() > u128::from(self.min_rtt);
        let before = ack.in_flight.saturating_add(ack.bytes);
        let (gain, _) = self.gains();
        let is_over = match self.phase {
            0 => is_long && (self.in_recovery || before >= self.in_flight_at(gain)),
            1 => is_long || before <= self.in_flight_at(UNIT),
            _ => is_long,
        };
        if is_over {
            self.phase = (self.phase + 1) % CYCLE.len() as u8;
            self.phase_at = ack.now;
        }
    }

    /// Follows the minimum of the round-trip time. Once it is too old, ProbeRTT empties the queue
    /// at the bottleneck to measure it again.
    fn check_rtt(&mut self, ack: &Acked) {
        let is_expired = ack.now.since(self.min_rtt_at) > MIN_RTT_LIFETIME;
        if let Some(rtt) = ack.rtt {
            let rtt = u32::try_from(rtt.as_micros()).unwrap_or(u32::MAX).min(u32::MAX - 1);
            if self.pacing_rate == 0 {
                let rate = u64::from(self.window) * 1_000_000 / u64::from(rtt.max(1));
                self.pacing_rate = (rate * HIGH_GAIN / UNIT).min(RATE_MAX);
            }
            if rtt <= self.min_rtt || is_expired {
                (self.min_rtt, self.min_rtt_at) = (rtt, ack.now);
            }
        }
        // After silence the queue is empty anyway.
        if is_expired && self.state != State::ProbeRtt && !self.restarted && self.bandwidth.max() > 0 {
            self.save_window();
            self.state = State::ProbeRtt;
            self.probe_rtt_end = None;
        }
        self.restarted = false;
        if self.state != State::ProbeRtt {
            return;
        }
        match self.probe_rtt_end {
            None if ack.in_flight <= self.window_min() => {
                let round = Duration::from_micros(u64::from(self.min_rtt));
                self.probe_rtt_end = Some(ack.now + PROBE_RTT_TIME.max(round));
            }
            Some(end) if ack.now > end => {
                self.min_rtt_at = ack.now;
                self.window = self.window.max(self.prior_window);
                self.state = State::Startup;
                if self.bandwidth.is_full() {
                    self.enter_probe_bw(ack.now);
                }
            }
            _ => {}
        }
    }

    fn save_window(&mut self) {
        let is_reduced = self.in_recovery || self.state == State::ProbeRtt;
        self.prior_window = if is_reduced { self.prior_window.max(self.window) } else { self.window };
    }

    fn set_pacing_rate(&mut self, gain: u64) {
        let rate = (self.bandwidth.max() * gain / UNIT).min(RATE_MAX);
        // Startup must not slow down because its first samples are low.
        if self.bandwidth.is_full() || rate > self.pacing_rate {
            self.pacing_rate = rate.max(1);
        }
    }

    fn set_window(&mut self, bytes: u32, gain: u64) {
        let target = self.in_flight_at(gain);
        self.delivered = self.delivered.saturating_add(bytes);
        let grown = self.window.saturating_add(bytes).min(WINDOW_MAX);
        if !self.is_conserving {
            if self.bandwidth.is_full() {
                self.window = grown.min(target);
            } else if self.window < target || self.delivered < initial_window(self.mss) {
                self.window = grown;
            }
        }
        self.window = self.window.max(self.window_min());
        if self.state == State::ProbeRtt {
            self.window = self.window_min();
        }
    }
}

impl Controller for Bbr {
    fn on_sent(&mut self, _now: Time, _bytes: u32, in_flight: u32) {
        if in_flight == 0 {
            self.restarted = true;
            if self.state == State::ProbeBw {
                // No probing after silence: whatever the phase was, it is over.
                self.set_pacing_rate(UNIT);
            }
        }
    }

    fn on_ack(&mut self, ack: &Acked) {
        if let Some(sample) = &ack.rate {
            self.is_conserving &= !sample.round_start;
            // Measured over less than a round trip, a rate is that of a burst.
            if sample.interval.as_micros() >= u128::from(self.min_rtt) || self.min_rtt == u32::MAX {
                // ProbeRTT limits the rate as an application does.
                let is_limited = sample.app_limited || self.state == State::ProbeRtt;
                self.bandwidth.update(sample, is_limited);
            }
        }
        if self.state == State::ProbeBw {
            self.check_phase(ack);
        }
        if self.state == State::Startup && self.bandwidth.is_full() {
            self.state = State::Drain;
        }
        if self.state == State::Drain && ack.in_flight <= self.in_flight_at(UNIT) {
            self.enter_probe_bw(ack.now);
        }
        self.check_rtt(ack);
        let (pacing_gain, window_gain) = self.gains();
        self.set_pacing_rate(pacing_gain);
        self.set_window(ack.bytes, window_gain);
    }

    fn on_loss(&mut self, _now: Time, in_flight: u32) {
        self.save_window();
        let mss = segment(self.mss);
        // With the segments that three duplicate ACKs permit, what is in flight. More than the
        // window can be only what arrived in an earlier recovery, behind a gap.
        let in_flight = in_flight.saturating_sub(3 * mss).min(self.window);
        self.window = in_flight.clamp(self.window_min(), WINDOW_MAX);
        (self.in_recovery, self.is_conserving) = (true, true);
    }

    fn on_recovered(&mut self, _now: Time, _in_flight: u32) {
        self.window = self.window.max(self.prior_window);
        (self.in_recovery, self.is_conserving) = (false, false);
    }

    fn on_timeout(&mut self, _now: Time, _in_flight: u32) {
        self.save_window();
        self.window = self.window_min();
        (self.in_recovery, self.is_conserving) = (false, false);
    }

    fn window(&self) -> u32 {
        self.window
    }

    fn pacing_rate(&self) -> Option<u64> {
        (self.pacing_rate > 0).then_some(self.pacing_rate)
    }

    fn needs_rate(&self) -> bool {
        true
    }

    fn set_mss(&mut self, mss: u16) {
        self.mss = mss;
        self.window = self.window.max(self.window_min());
    }
}
