//! Windows: their bounds, and their growth in slow start.

/// Maximum of a window: what TCP can announce (RFC 7323, section 2.3).
pub const WINDOW_MAX: u32 = 1 << 30;

/// The window of a new connection: ten segments, or fewer of more than 1460 bytes (RFC 6928,
/// section 2).
#[must_use]
pub fn initial_window(mss: u16) -> u32 {
    let mss = segment(mss);
    (10 * mss).min((2 * mss).max(14_600))
}

/// The MSS as a number to calculate with. At least 1, because growth is a multiple of it.
pub(super) fn segment(mss: u16) -> u32 {
    u32::from(mss.max(1))
}

/// Limits how much an ACK adds to the window in slow start (RFC 3465, section 2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Limit {
    /// Two segments: an ACK may stand for two.
    TwoSegments,
    /// One segment, after a timeout: an ACK may then be for segments that arrived before it, which
    /// says nothing about the state of the path now (RFC 3465, section 2.3).
    OneSegment,
}

impl Limit {
    /// Bytes that an ACK of `bytes` adds to the window.
    pub(super) fn apply(self, bytes: u32, mss: u16) -> u32 {
        match self {
            Limit::TwoSegments => bytes.min(2 * segment(mss)),
            Limit::OneSegment => bytes.min(segment(mss)),
        }
    }
}
