//! Settings of a stack.

use std::time::Duration;

use crate::congestion::{Algorithm, NewController};
use crate::error::{Error, Result};

/// Least MTU: what every host takes (RFC 1122, section 3.3.2).
const MTU_MIN: u16 = 576;
/// Connections at most, far below what their numbers can count.
const CONNECTIONS_MAX: usize = 1 << 24;

/// Settings of a [`Stack`](crate::Stack): of one lane, so the limits count for each lane.
#[derive(Clone, Debug)]
pub struct Config {
    /// Connections at most, those in the handshake included. A SYN above it is dropped.
    pub connections_max: usize,
    /// Connections that are not established yet, and for which something is stored, at most. The
    /// ones above it get SYN cookies.
    pub backlog: usize,
    /// Connections that have buffers at most: those with data to send or to be read, or that had
    /// some a moment ago. A segment that needs buffers when a third of them is used is dropped, and
    /// comes again: the others are for what the application writes, so that a proxy can send what
    /// it has received, and the answers to that. One that forwards between connections needs three.
    pub buffers_max: usize,
    /// Bytes that a connection holds until the application reads them: the window.
    pub receive_buffer: usize,
    /// Bytes that a connection holds until the peer has acknowledged them.
    pub send_buffer: usize,
    /// How long a connection without anything to do keeps its buffers.
    pub buffers_kept: Duration,
    /// Congestion control of connections for which no other one is chosen.
    pub controller: NewController,
    /// Largest packet of the device, with its IP header.
    pub mtu: u16,
    /// How long data, SYN or FIN are retransmitted before the connection is given up (user
    /// timeout).
    pub user_timeout: Duration,
    /// Time without a segment after which the peer is asked whether it is still there, or never.
    pub keep_alive: Option<Duration>,
    /// How many times it is asked, a tenth of that time apart, before the connection is given up.
    pub keep_alive_probes: u8,
    /// How long a connection lives after the application has closed it, with the peer's end open.
    pub orphan_timeout: Duration,
    /// TIME-WAIT. Linux has 60 seconds, too.
    pub time_wait: Duration,
    /// Connections in TIME-WAIT at most. Above it, the oldest one ends early.
    pub time_wait_max: usize,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            connections_max: 65_536,
            backlog: 1024,
            buffers_max: 8192,
            receive_buffer: 64 << 10,
            send_buffer: 64 << 10,
            buffers_kept: Duration::from_millis(200),
            controller: Algorithm::default().new_controller(),
            mtu: 1500,
            user_timeout: Duration::from_secs(60),
            keep_alive: Some(Duration::from_secs(7200)),
            keep_alive_probes: 9,
            orphan_timeout: Duration::from_secs(60),
            time_wait: Duration::from_secs(60),
            time_wait_max: 65_536,
        }
    }
}

impl Config {
    /// Checks what would not work.
    pub(crate) fn check(&self) -> Result<()> {
        let buffers = 1..=1 << 30;
        if !buffers.contains(&self.receive_buffer) || !buffers.contains(&self.send_buffer) {
            return Err(Error::Config("receive_buffer and send_buffer: expected 1 byte to 1 GiB"));
        }
        if self.mtu < MTU_MIN {
            return Err(Error::Config("mtu: expected 576 or more"));
        }
        if self.connections_max > CONNECTIONS_MAX || self.time_wait_max > CONNECTIONS_MAX {
            return Err(Error::Config("connections_max and time_wait_max: expected 2^24 at most"));
        }
        Ok(())
    }
}
