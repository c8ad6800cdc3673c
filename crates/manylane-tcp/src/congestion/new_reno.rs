//! NewReno: one segment more per round trip, half the window per loss (RFC 5681, RFC 6582).

use super::controller::{Acked, Controller};
use super::window::{Limit, WINDOW_MAX, initial_window, segment};
use crate::time::Time;

/// NewReno (RFC 5681, RFC 6582), which counts acknowledged bytes instead of ACKs (RFC 3465).
#[derive(Clone, Debug)]
pub struct NewReno {
    window: u32,
    /// Slow start ends here.
    threshold: u32,
    /// Bytes acknowledged since the window last grew in congestion avoidance.
    acknowledged: u32,
    mss: u16,
    in_recovery: bool,
    slow_start: Limit,
}

const _: () = assert!(size_of::<NewReno>() <= 32);

impl NewReno {
    /// Creates the controller of a new connection.
    #[must_use]
    pub fn new(mss: u16) -> NewReno {
        NewReno {
            window: initial_window(mss),
            threshold: WINDOW_MAX,
            acknowledged: 0,
            mss,
            in_recovery: false,
            slow_start: Limit::TwoSegments,
        }
    }

    /// Half of `in_flight` (RFC 5681, equation 4).
    fn reduced(&self, in_flight: u32) -> u32 {
        (in_flight / 2).clamp(2 * segment(self.mss), WINDOW_MAX)
    }
}

impl Controller for NewReno {
    fn on_ack(&mut self, ack: &Acked) {
        if self.in_recovery || ack.app_limited {
            return;
        }
        if self.window < self.threshold {
            let growth = self.slow_start.apply(ack.bytes, self.mss);
            self.window = self.window.saturating_add(growth).min(WINDOW_MAX);
            return;
        }
        self.slow_start = Limit::TwoSegments;
        self.acknowledged = self.acknowledged.saturating_add(ack.bytes);
        if self.acknowledged >= self.window {
            // At most one segment per ACK: the rest of an ACK of several windows does not count.
            self.acknowledged = (self.acknowledged - self.window).min(self.window);
            self.window = self.window.saturating_add(segment(self.mss)).min(WINDOW_MAX);
        }
    }

    fn on_loss(&mut self, _now: Time, in_flight: u32) {
        // Beyond the window are only the segments that were sent for the first two duplicate
        // ACKs, which do not count (RFC 5681, section 3.2, step 2).
        self.threshold = self.reduced(in_flight.min(self.window));
        self.window = self.threshold;
        self.acknowledged = 0;
        self.in_recovery = true;
    }

    fn on_recovered(&mut self, _now: Time, in_flight: u32) {
        // The first choice of RFC 6582, section 3.2, step 3: no burst if little is in flight.
        let mss = segment(self.mss);
        self.window = self.threshold.min(in_flight.max(mss).saturating_add(mss));
        self.in_recovery = false;
    }

    fn on_timeout(&mut self, _now: Time, in_flight: u32) {
        self.threshold = self.reduced(in_flight);
        self.window = segment(self.mss);
        self.acknowledged = 0;
        self.in_recovery = false;
        self.slow_start = Limit::OneSegment;
    }

    fn on_restart(&mut self, _now: Time) {
        self.window = self.window.min(initial_window(self.mss));
        self.acknowledged = 0;
    }

    fn window(&self) -> u32 {
        self.window
    }

    fn set_mss(&mut self, mss: u16) {
        self.mss = mss;
        self.threshold = self.threshold.max(2 * segment(mss));
        self.window = self.window.max(segment(mss));
    }
}
