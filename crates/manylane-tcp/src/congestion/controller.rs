//! What a controller is told, and what it answers.

use std::fmt::Debug;
use std::time::Duration;

use super::rate::RateSample;
use crate::time::Time;

/// Makes the controller of a connection with segments of this length.
pub type NewController = fn(mss: u16) -> Box<dyn Controller>;

/// An ACK of data that was not acknowledged before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Acked {
    /// The time of its arrival.
    pub now: Time,
    /// Bytes that it acknowledges for the first time.
    pub bytes: u32,
    /// Time since the segment was sent. `None` if that is not known, as for a segment that was
    /// sent again, without time stamps (RFC 6298, section 3).
    pub rtt: Option<Duration>,
    /// Bytes still unacknowledged.
    pub in_flight: u32,
    /// True if the data ran out, or the peer's window was full, before the congestion window was:
    /// the ACK then does not show that the path has room for a larger one (RFC 7661, section 4.1).
    pub app_limited: bool,
    /// The delivery rate, for controllers that [need it](Controller::needs_rate).
    pub rate: Option<RateSample>,
}

/// The congestion control of one connection.
///
/// For each ACK of new data the edge calls [`on_ack`](Self::on_ack), and then
/// [`on_recovered`](Self::on_recovered) if the ACK covers all data that had been sent when
/// [`on_loss`](Self::on_loss) was called.
///
/// The edge may have [`window`](Self::window) bytes unacknowledged, and one segment more for each
/// duplicate ACK, because each of them says that a segment has left the network. A partial ACK, one
/// of new data in a recovery, takes back what it acknowledges but for one segment, and the ACK that
/// ends the recovery takes back all (RFC 5681, section 3.2, steps 1 and 4; RFC 6582, section 3.2,
/// step 3). Controllers therefore do not count duplicate ACKs.
///
/// In all calls `in_flight` is the number of bytes that were sent and are not acknowledged:
/// FlightSize in RFC 5681. Calls must not allocate and must not panic, whatever their arguments.
pub trait Controller: Debug + Send {
    /// Data is sent, for the first time or again. `in_flight` does not contain it yet: it is zero
    /// if the connection was idle.
    fn on_sent(&mut self, now: Time, bytes: u32, in_flight: u32) {
        let _ = (now, bytes, in_flight);
    }

    /// New data is acknowledged, also in the course of a recovery.
    fn on_ack(&mut self, ack: &Acked);

    /// Three duplicate ACKs have arrived: a segment was lost. Called once for all losses among the
    /// data that is in flight.
    fn on_loss(&mut self, now: Time, in_flight: u32);

    /// All data that was in flight at the last [`on_loss`](Self::on_loss) is acknowledged. Not
    /// called if a timeout came before.
    fn on_recovered(&mut self, now: Time, in_flight: u32) {
        let _ = (now, in_flight);
    }

    /// The retransmission timer has expired. Also ends a recovery.
    fn on_timeout(&mut self, now: Time, in_flight: u32);

    /// Data is about to be sent after silence longer than the retransmission timeout: what the
    /// controller knows about the path may be obsolete (RFC 5681, section 4.1).
    fn on_restart(&mut self, now: Time) {
        let _ = now;
    }

    /// Bytes that may be unacknowledged; at least one segment.
    fn window(&self) -> u32;

    /// Maximum bytes of payload per second. `None`: all that the window permits is sent at once.
    fn pacing_rate(&self) -> Option<u64> {
        None
    }

    /// True if the edge should measure the delivery rate: see [`Acked::rate`]. Asked once.
    fn needs_rate(&self) -> bool {
        false
    }

    /// The maximum segment size has changed.
    fn set_mss(&mut self, mss: u16);
}
