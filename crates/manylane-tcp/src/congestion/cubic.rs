//! CUBIC: the window follows a cubic function of the time since the last loss (RFC 9438).

use super::controller::{Acked, Controller};
use super::window::{Limit, WINDOW_MAX, initial_window, segment};
use crate::time::Time;

/// Growth in segments per cubed second (RFC 9438, section 5).
const C: f64 = 0.4;
/// Share of the window that remains after a loss (RFC 9438, section 4.6).
const BETA: f64 = 0.7;
/// Growth per window of the Reno-friendly estimate that makes up for a `BETA` above one half (RFC
/// 9438, section 4.3).
const ALPHA: f64 = 3.0 * (1.0 - BETA) / (1.0 + BETA);

/// CUBIC (RFC 9438), with fast convergence and the standard slow start.
#[derive(Clone, Debug)]
pub struct Cubic {
    /// In bytes, as all windows here, with fractions: growth per ACK is often less than a byte.
    window: f64,
    /// The window at the last loss: the plateau of the curve.
    w_max: f64,
    /// The window that NewReno would have.
    w_est: f64,
    /// The window before the last loss or timeout: from here on `w_est` grows as NewReno's does.
    w_before: f64,
    /// Seconds from the start of the epoch to the plateau.
    k: f64,
    /// Start of the congestion avoidance, later by the times in which the application had no data.
    epoch: Option<Time>,
    last_ack: Time,
    /// Slow start ends here.
    threshold: u32,
    /// Smoothed, in microseconds; zero before the first sample.
    rtt: u32,
    mss: u16,
    in_recovery: bool,
    slow_start: Limit,
}

const _: () = assert!(size_of::<Cubic>() <= 96);

impl Cubic {
    /// Creates the controller of a new connection.
    #[must_use]
    pub fn new(mss: u16) -> Cubic {
        Cubic {
            window: f64::from(initial_window(mss)),
            w_max: 0.0,
            w_est: 0.0,
            w_before: 0.0,
            k: 0.0,
            epoch: None,
            last_ack: Time::default(),
            threshold: WINDOW_MAX,
            rtt: 0,
            mss,
            in_recovery: false,
            slow_start: Limit::TwoSegments,
        }
    }

    fn segment(&self) -> f64 {
        f64::from(segment(self.mss))
    }

    /// Begins a congestion avoidance (RFC 9438, section 4.2).
    fn begin_epoch(&mut self, now: Time) -> Time {
        self.epoch = Some(now);
        self.slow_start = Limit::TwoSegments;
        self.w_est = self.window;
        // Without a loss before it, or after a timeout, the plateau is here (section 4.8).
        self.w_max = self.w_max.max(self.window);
        self.k = ((self.w_max - self.window) / (C * self.segment())).cbrt();
        now
    }

    /// Grows the window in congestion avoidance (RFC 9438, sections 4.2 to 4.5).
    fn avoid_congestion(&mut self, now: Time, bytes: u32) {
        let epoch = match self.epoch {
            Some(epoch) => epoch,
            None => self.begin_epoch(now),
        };
        let elapsed = now.since(epoch).as_secs_f64();
        let (segment, k, w_max) = (self.segment(), self.k, self.w_max);
        let curve = |t: f64| C * segment * (t - k).powi(3) + w_max;
        let bytes = f64::from(bytes).min(self.window);
        // No faster than NewReno's one segment per window once the window is what it was.
        let alpha = if self.w_est < self.w_before { ALPHA } else { 1.0 };
        self.w_est += alpha * segment * bytes / self.window;
        if curve(elapsed) < self.w_est {
            self.window = self.window.max(self.w_est);
        } else {
            let target = curve(elapsed + f64::from(self.rtt) / 1e6);
            let target = target.clamp(self.window, 1.5 * self.window);
            self.window += (target - self.window) * bytes / self.window;
        }
        self.window = self.window.min(f64::from(WINDOW_MAX));
    }

    /// Takes the time since the last ACK out of the epoch: without data to send the window does
    /// not grow, and must not leap afterwards (RFC 9438, section 5.8).
    fn pause(&mut self, now: Time) {
        if let Some(epoch) = self.epoch {
            self.epoch = Some(epoch + now.since(self.last_ack));
            self.last_ack = now;
        }
    }

    /// The window after a loss (RFC 9438, section 4.6).
    fn reduced(&self, in_flight: f64) -> u32 {
        ((in_flight * BETA) as u32).clamp(2 * segment(self.mss), WINDOW_MAX)
    }
}

impl Controller for Cubic {
    fn on_sent(&mut self, now: Time, _bytes: u32, in_flight: u32) {
        if in_flight == 0 {
            self.pause(now);
        }
    }

    fn on_ack(&mut self, ack: &Acked) {
        if let Some(rtt) = ack.rtt {
            let rtt = u32::try_from(rtt.as_micros()).unwrap_or(u32::MAX);
            // RFC 6298, section 2.3.
            self.rtt = if self.rtt == 0 { rtt } else { self.rtt - self.rtt / 8 + rtt / 8 };
        }
        if ack.app_limited {
            self.pause(ack.now);
        }
        self.last_ack = ack.now;
        if self.in_recovery || ack.app_limited {
            return;
        }
        if self.window < f64::from(self.threshold) {
            let growth = self.slow_start.apply(ack.bytes, self.mss);
            self.window = (self.window + f64::from(growth)).min(f64::from(WINDOW_MAX));
        } else {
            self.avoid_congestion(ack.now, ack.bytes);
        }
    }

    fn on_loss(&mut self, _now: Time, in_flight: u32) {
        // Fast convergence: a flow that loses before it is back where it was yields to new flows
        // (RFC 9438, section 4.7).
        let yields = self.window < self.w_max;
        self.w_max = if yields { self.window * (1.0 + BETA) / 2.0 } else { self.window };
        self.w_before = self.window;
        // As for NewReno, without the segments that were sent for the first duplicate ACKs.
        self.threshold = self.reduced(f64::from(in_flight).min(self.window));
        self.window = f64::from(self.threshold);
        self.epoch = None;
        self.in_recovery = true;
    }

    fn on_recovered(&mut self, _now: Time, _in_flight: u32) {
        self.in_recovery = false;
    }

    fn on_timeout(&mut self, _now: Time, in_flight: u32) {
        self.threshold = self.reduced(f64::from(in_flight));
        // The plateau is where the next congestion avoidance begins (RFC 9438, section 4.8).
        (self.w_max, self.w_before) = (0.0, self.window);
        self.window = self.segment();
        self.epoch = None;
        self.in_recovery = false;
        self.slow_start = Limit::OneSegment;
    }

    fn on_restart(&mut self, _now: Time) {
        self.window = self.window.min(f64::from(initial_window(self.mss)));
        self.epoch = None;
    }

    fn window(&self) -> u32 {
        self.window as u32
    }

    fn set_mss(&mut self, mss: u16) {
        self.mss = mss;
        self.threshold = self.threshold.max(2 * segment(mss));
        self.window = self.window.max(self.segment());
    }
}
