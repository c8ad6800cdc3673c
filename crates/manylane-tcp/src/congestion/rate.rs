//! Delivery rate: bytes that arrive per second while a segment is in flight
//! (draft-cheng-iccrg-delivery-rate-estimation-00).

use std::time::Duration;

use crate::time::Time;

/// The delivery rate, measured between two ACKs about a round trip apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateSample {
    /// Bytes acknowledged in `interval`.
    pub delivered: u32,
    /// The longer of the times in which these bytes were sent and in which they were acknowledged:
    /// ACKs that were held up and arrive together do not raise the rate.
    pub interval: Duration,
    /// True if the sender had less to send than the window permitted: the path may be faster.
    pub app_limited: bool,
    /// True for the first sample of a round trip: all that was in flight at the previous first
    /// one is acknowledged.
    pub round_start: bool,
}

impl RateSample {
    /// Bytes per second.
    #[must_use]
    pub fn rate(&self) -> u64 {
        let micros = self.interval.as_micros().max(1);
        u64::try_from(u128::from(self.delivered) * 1_000_000 / micros).unwrap_or(u64::MAX)
    }
}

/// Segments remembered at a time.
const MARKS: usize = 8;

/// State of the connection when a segment was sent. Times are the low 32 bits of a [`Time`], which
/// suffice for 71 minutes: what is in flight is never that old.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    end: u32,
    sent: u32,
    first_sent: u32,
    delivered: u32,
    delivered_at: u32,
    app_limited: bool,
}

/// Measures the delivery rate of a connection.
///
/// The draft keeps the state of every segment in flight. This keeps that of about six, evenly
/// spread over the bytes in flight, so that memory is bounded; each ACK that reaches one of them
/// yields a sample. Between two of these ACKs nothing changes: bytes and times of a sample belong
/// to the same two moments.
///
/// The state of a connection with nothing in flight need not be kept: [`RateSampler::new`]
/// replaces it.
#[derive(Clone, Debug)]
pub struct RateSampler {
    marks: [Mark; MARKS],
    first: u8,
    count: u8,
    app_limited: bool,
    mss: u16,
    /// All before this number is acknowledged, and all before `sent_to` was sent.
    acked_to: u32,
    sent_to: u32,
    /// Bytes delivered, a counter that wraps around.
    delivered: u32,
    /// Those of them that are not acknowledged, because an earlier segment is missing.
    out_of_order: u32,
    /// `delivered`, the time, and when the segment was sent, at the last ACK that reached a mark.
    marked: u32,
    marked_at: u32,
    first_sent: u32,
    /// The round trip ends with a mark that was set after this was delivered.
    round_end: u32,
    /// `delivered` once the data arrives that was in flight when the sender last ran out of data.
    app_limited_to: u32,
}

const _: () = assert!(size_of::<RateSampler>() <= 256);

impl RateSampler {
    /// Creates the sampler of a connection with nothing in flight, whose next byte has the number
    /// `sequence`.
    #[must_use]
    pub fn new(sequence: u32, mss: u16) -> RateSampler {
        RateSampler {
            marks: [Mark::default(); MARKS],
            first: 0,
            count: 0,
            app_limited: false,
            mss,
            acked_to: sequence,
            sent_to: sequence,
            delivered: 0,
            out_of_order: 0,
            marked: 0,
            marked_at: 0,
            first_sent: 0,
            round_end: 0,
            app_limited_to: 0,
        }
    }

    /// New data up to `end` is sent, when `in_flight` bytes were unacknowledged. Data that is sent
    /// again may be reported and is ignored, except behind the last mark, where it counts as new.
    pub fn on_sent(&mut self, now: Time, end: u32, in_flight: u32) {
        let now = low(now);
        if in_flight == 0 {
            // The time without data is not part of any sample.
            (self.marked, self.marked_at, self.first_sent) = (self.delivered, now, now);
            (self.count, self.out_of_order) = (0, 0);
        }
        if is_after(end, self.sent_to) {
            self.sent_to = end;
        }
        let count = usize::from(self.count);
        let spacing = (in_flight / (MARKS as u32 - 2)).max(1);
        let is_due = count
            .checked_sub(1)
            .is_none_or(|last| is_after(end, self.mark(last).end.wrapping_add(spacing - 1)));
        if count == MARKS || !is_due {
            return;
        }
        self.marks[(usize::from(self.first) + count) % MARKS] = Mark {
            end,
            sent: now,
            first_sent: self.first_sent,
            delivered: self.marked,
            delivered_at: self.marked_at,
            app_limited: self.app_limited,
        };
        self.count += 1;
    }

    /// The sender has no more data although the window permits more: samples of what is sent until
    /// the bytes in flight are acknowledged do not show what the path can carry.
    pub fn on_app_limited(&mut self, in_flight: u32) {
        self.app_limited = true;
        let missing = in_flight.saturating_sub(self.out_of_order);
        self.app_limited_to = self.delivered.wrapping_add(missing);
    }

    /// `bytes` have arrived although an earlier segment is missing: those that are new in the SACK
    /// blocks, or a segment for each duplicate ACK. Without this, an ACK that fills a gap would
    /// seem to deliver at once what arrived over several round trips.
    pub fn on_out_of_order(&mut self, bytes: u32) {
        let missing = self.sent_to.wrapping_sub(self.acked_to).saturating_sub(self.out_of_order);
        let bytes = bytes.min(missing);
        self.delivered = self.delivered.wrapping_add(bytes);
        self.out_of_order += bytes;
    }

    /// All before `acked_to` is acknowledged. Returns a sample if the ACK reaches a mark.
    pub fn on_ack(&mut self, now: Time, acked_to: u32) -> Option<RateSample> {
        if !is_after(acked_to, self.acked_to) {
            return None;
        }
        let bytes = acked_to.wrapping_sub(self.acked_to);
        // At least the first segment has just arrived: the others waited for it.
        let known = bytes.saturating_sub(u32::from(self.mss)).min(self.out_of_order);
        self.acked_to = acked_to;
        self.delivered = self.delivered.wrapping_add(bytes - known);
        self.out_of_order = (self.out_of_order - known).min(self.sent_to.wrapping_sub(acked_to));
        if self.app_limited && is_after(self.delivered, self.app_limited_to) {
            self.app_limited = false;
        }
        let mut reached = None;
        while self.count > 0 && !is_after(self.mark(0).end, acked_to) {
            reached = Some(self.mark(0));
            self.first = (self.first + 1) % MARKS as u8;
            self.count -= 1;
        }
        let mark = reached?;
        let now = low(now);
        (self.marked, self.marked_at, self.first_sent) = (self.delivered, now, mark.sent);
        let round_start = !is_after(self.round_end, mark.delivered);
        if round_start {
            self.round_end = self.delivered;
        }
        let send_time = mark.sent.wrapping_sub(mark.first_sent);
        let ack_time = now.wrapping_sub(mark.delivered_at);
        Some(RateSample {
            delivered: self.delivered.wrapping_sub(mark.delivered),
            interval: Duration::from_micros(u64::from(send_time.max(ack_time))),
            app_limited: mark.app_limited,
            round_start,
        })
    }

    fn mark(&self, index: usize) -> Mark {
        self.marks[(usize::from(self.first) + index) % MARKS]
    }
}

/// True if `a` is after `b` in the sequence space.
fn is_after(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) > 0
}

fn low(time: Time) -> u32 {
    time.0 as u32
}
