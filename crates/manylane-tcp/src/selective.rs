//! What is sent again if the peer tells what it has received behind a loss (SACK): only what is
//! missing, in the spirit of RFC 6675.
//!
//! The state machine sends the oldest segment again, or all of them. So it is made to go through
//! all that is in flight once more (a rewind), and what has arrived is skipped on its way out. What
//! is missing below the last byte that has arrived counts as lost, and leaves room in the window.
//! What is behind it does not yet: there, the state machine is held up until more is known.

use std::time::Duration;

use crate::edge::Edge;
use crate::scoreboard::Scoreboard;
use crate::sequence::{is_before, later};
use crate::time::Time;

/// Segments behind a loss that have to arrive to show it, as of duplicate ACKs.
const PROOF_SEGMENTS: u32 = 3;
/// Least time between two rewinds: each is work for all segments in flight, which a peer could
/// cause by a few ACKs.
const REWIND_INTERVAL: Duration = Duration::from_millis(10);

/// A connection's state while the peer lacks something, or its timer is off.
#[derive(Debug, Default)]
pub(crate) struct Selective {
    /// What the peer has behind what it acknowledges.
    pub(crate) scoreboard: Scoreboard,
    /// The state machine is to be rewound.
    pub(crate) wants_rewind: bool,
    /// It was, and segments are sent again or skipped.
    pub(crate) is_active: bool,
    /// What has not arrived below this number is lost, but for what was sent again.
    lost_to: u32,
    /// The end of what was in flight when it was rewound.
    resent_behind: u32,
    /// How often it was rewound since something was acknowledged: its own timer is off then.
    pub(crate) rewinds: u16,
    /// When it was the last time.
    pub(crate) rewound_at: Time,
}

impl Selective {
    /// True if nothing is left to remember.
    pub(crate) fn is_over(&self) -> bool {
        self.scoreboard.is_empty() && !self.wants_rewind && !self.is_active && self.rewinds == 0
    }

    /// Segments are sent as usual again.
    pub(crate) fn end(&mut self) {
        self.wants_rewind = false;
        self.is_active = false;
    }

    /// The timer of the state machine is off.
    pub(crate) fn note_rewind(&mut self, now: Time) {
        self.rewinds = self.rewinds.saturating_add(1);
        self.rewound_at = now;
        self.wants_rewind = false;
    }

    /// It was rewound, and has sent or skipped what is in front of `next`.
    pub(crate) fn begin(&mut self, edge: &Edge, next: u32) {
        self.is_active = true;
        self.lost_to = self.scoreboard.end().unwrap_or(next);
        self.resent_behind = edge.send_next;
    }

    /// True if the segment at `next`, which was sent before, may be sent again, or is skipped.
    pub(crate) fn may_pass(&self, edge: &Edge, next: u32, mss: u32, window: u32) -> bool {
        let is_whole = edge.send_next.wrapping_sub(next) >= mss;
        let is_skipped = is_whole && self.scoreboard.covers(next, next.wrapping_add(mss));
        let fits = || self.in_network(edge, next).saturating_add(mss) <= window;
        is_skipped || is_before(next, self.lost_to) && fits()
    }

    /// Bytes in the network (RFC 6675, section 4: `pipe`): what was sent again, up to `next`, and
    /// has not arrived, and what is behind the last byte that is lost.
    fn in_network(&self, edge: &Edge, next: u32) -> u32 {
        let again = next.wrapping_sub(edge.unacknowledged).saturating_sub(self.scoreboard.count_below(next));
        let behind = edge.send_next.wrapping_sub(later(self.lost_to, next)).cast_signed();
        again.saturating_add(u32::try_from(behind).unwrap_or(0))
    }

    /// Looks at what has arrived while segments are sent again. `next`: the one that is due.
    pub(crate) fn note_arrivals(
        &mut self,
        edge: &Edge,
        next: u32,
        mss: u32,
        round_trip: Duration,
        now: Time,
    ) {
        let Some(end) = self.scoreboard.end().filter(|end| is_before(self.lost_to, *end)) else {
            if !is_before(edge.unacknowledged, next) {
                // All that was sent again has arrived, and what was sent before it has not.
                self.lost_to = edge.send_next;
            }
            return;
        };
        self.lost_to = end;
        // New data goes behind all that is sent again. If that has arrived, and something in front
        // of it has not, what was sent again is lost, too.
        let proof = self.resent_behind.wrapping_add(PROOF_SEGMENTS * mss);
        let is_missing = is_before(edge.unacknowledged, self.resent_behind) && !is_before(end, proof);
        self.wants_rewind |= is_missing && now >= self.rewound_at + round_trip.max(REWIND_INTERVAL);
    }
}
