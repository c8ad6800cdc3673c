//! Traffic: the datagrams, the duration, and the result. [`sockets`](crate::sockets) sends it
//! anywhere, without privileges; the XDP generator of the testbed sends it at a fraction of the
//! cost.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The traffic to send.
#[derive(Clone, Debug, PartialEq)]
pub struct Traffic {
    /// The target.
    pub target: SocketAddr,
    /// Bytes of payload of each datagram; not used when `payload` is given.
    pub size: usize,
    /// Flows, that is source ports, among which the datagrams are divided evenly.
    pub flows: u16,
    /// Datagrams per second; as fast as possible if `None`.
    pub pps: Option<f64>,
    /// The payload; letters of the alphabet if `None`.
    pub payload: Option<Vec<u8>>,
    /// Send GSO messages, which the kernel segments into datagrams. Only for
    /// [`sockets`](crate::sockets).
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

/// End of the sending.
#[derive(Clone, Debug)]
pub enum Until {
    /// After this number of datagrams.
    Count(u64),
    /// After this time.
    Duration(Duration),
    /// Once the flag is set.
    Stop(Arc<AtomicBool>),
    /// After this number of datagrams, or when the flag is set.
    CountOrStop(u64, Arc<AtomicBool>),
}

impl Until {
    /// Number of datagrams that may still be sent, after `sent` datagrams and `elapsed` time.
    #[must_use]
    pub fn remaining(&self, sent: u64, elapsed: Duration) -> u64 {
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

/// The result of sending.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sent {
    /// Datagrams accepted by the socket or the device. Exact.
    pub datagrams: u64,
    /// Datagrams rejected by the socket or the device.
    pub rejected: u64,
    /// From the first datagram to the last.
    pub elapsed: Duration,
    /// The largest delay of a burst behind its schedule. If it is more than some milliseconds on
    /// an idle machine, the sender cannot keep the rate.
    pub late: Duration,
}

impl Sent {
    /// Accepted datagrams per second.
    #[must_use]
    pub fn pps(&self) -> f64 {
        if self.elapsed.is_zero() { 0.0 } else { self.datagrams as f64 / self.elapsed.as_secs_f64() }
    }
}
