//! Traffic: what is sent, for how long, and what came of it. Two senders:
//!
//! - [`portable`]: ordinary sockets, anywhere, without privileges;
//! - [`live`]: frames made by an XDP program, several times cheaper; needs a testbed.
//!
//! And [`replies`], which counts what comes back.

pub mod live;
pub mod pacer;
pub mod portable;
pub mod replies;

use std::borrow::Cow;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What to send.
#[derive(Clone, Debug, PartialEq)]
pub struct Traffic {
    /// Where to.
    pub target: SocketAddr,
    /// Bytes of payload of each datagram; not used when `payload` is given.
    pub size: usize,
    /// Flows, that is source ports, among which the datagrams are divided evenly.
    pub flows: u16,
    /// Datagrams per second; as fast as possible if `None`.
    pub pps: Option<f64>,
    /// The payload; letters of the alphabet if `None`.
    pub payload: Option<Vec<u8>>,
    /// Let the kernel cut trains into datagrams (UDP GSO). Only for [`portable`].
    pub gso: bool,
}

impl Traffic {
    /// One flow of datagrams of `size` bytes, as fast as possible.
    #[must_use]
    pub fn new(target: SocketAddr, size: usize) -> Traffic {
        Traffic { target, size, flows: 1, pps: None, payload: None, gso: false }
    }

    /// The payload of each datagram.
    #[must_use]
    pub fn datagram(&self) -> Cow<'_, [u8]> {
        match &self.payload {
            Some(payload) => Cow::Borrowed(payload),
            None => (0..self.size).map(|index| b'a' + (index % 26) as u8).collect(),
        }
    }
}

/// How long to send.
#[derive(Clone, Debug)]
pub enum Until {
    /// So many datagrams.
    Count(u64),
    /// For this time.
    Duration(Duration),
    /// Until somebody sets it.
    Stop(Arc<AtomicBool>),
    /// So many datagrams, unless somebody sets it before.
    CountOrStop(u64, Arc<AtomicBool>),
}

impl Until {
    /// Datagrams that may still be sent, when `sent` were, after `elapsed`.
    pub(crate) fn remaining(&self, sent: u64, elapsed: Duration) -> u64 {
        let more = match self {
            Until::Count(count) => return count.saturating_sub(sent),
            Until::CountOrStop(count, stop) if !stop.load(Ordering::Relaxed) => {
                return count.saturating_sub(sent);
            }
            Until::CountOrStop(..) => false,
            Until::Duration(duration) => elapsed < *duration,
            Until::Stop(stop) => !stop.load(Ordering::Relaxed),
        };
        if more { u64::MAX } else { 0 }
    }
}

/// What was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Sent {
    /// Datagrams that left: taken by the socket, or by the device. Exact.
    pub datagrams: u64,
    /// Datagrams that were made and did not leave: refused by the socket or the device.
    pub rejected: u64,
    /// From the first datagram to the last.
    pub elapsed: Duration,
    /// The most that a burst was behind its schedule. More than some milliseconds on an idle
    /// machine: the sender cannot keep the rate.
    pub late: Duration,
    /// CPU time of the sending thread. For [`live`], that is about the time of the run at any rate,
    /// and includes what the other end of the link does to receive: a veth device runs both ends on
    /// one CPU.
    pub cpu: Duration,
}

impl Sent {
    /// Datagrams per second that left.
    #[must_use]
    pub fn pps(&self) -> f64 {
        if self.elapsed.is_zero() { 0.0 } else { self.datagrams as f64 / self.elapsed.as_secs_f64() }
    }
}
