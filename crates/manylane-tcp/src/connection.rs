//! A connection: from its first SYN until nothing is left of it.

use std::time::Duration;

use crate::congestion::NewController;
use crate::edge::{Edge, Terms};
use crate::endpoint::{Endpoint, Progress};
use crate::flow::Flow;
use crate::sender::Sender;
use crate::time::Time;

/// How far a connection is.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "nearly all are open, and a box would cost each segment a cache miss"
)]
pub(crate) enum Phase {
    /// SYNs are exchanged.
    Handshake(Handshake),
    /// Both sides know each other's numbers.
    Open(Open),
}

/// A connection whose SYNs are exchanged: it is small, and there may be many in a flood.
#[derive(Clone, Debug)]
pub(crate) struct Handshake {
    pub(crate) flow: Flow,
    /// Our SYN's number.
    pub(crate) first: u32,
    /// The peer's SYN, if it has come.
    pub(crate) peer: Option<PeerSyn>,
    /// We have asked for it.
    pub(crate) is_active: bool,
    pub(crate) controller: NewController,
    /// How often our SYN was sent, and when the first and the last time.
    pub(crate) tries: u8,
    pub(crate) begun: Time,
    pub(crate) sent: Time,
    /// When a segment that is not acceptable was answered last.
    pub(crate) challenged: Option<Time>,
}

/// What the peer's SYN says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeerSyn {
    pub(crate) sequence: u32,
    pub(crate) window: u16,
    pub(crate) mss: u16,
    pub(crate) shift: Option<u8>,
    pub(crate) sack: bool,
    pub(crate) timestamp: Option<u32>,
}

/// What a connection needs buffers for. Bytes that were received hold their buffers until the
/// application has written elsewhere what it reads, and what it forwards to a server may bring an
/// answer that has to be forwarded back. So each has buffers that those before it cannot take:
/// otherwise all of them could wait for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// To receive.
    Input,
    /// To send what the application has, or another connection has received.
    Output,
    /// To send what a connection has received that got its own to send; and to finish.
    Answer,
}

impl Need {
    /// All, with the last one first.
    pub(crate) const ALL: [Need; 3] = [Need::Answer, Need::Output, Need::Input];

    /// That of a connection to which another one with this need forwards.
    pub(crate) fn forwarded(self) -> Need {
        if self == Need::Input { Need::Output } else { Need::Answer }
    }

    /// How many of `max` buffers may be in use for it to get some.
    pub(crate) fn share(self, max: usize) -> usize {
        (max * (self as usize + 1)).div_ceil(3)
    }
}

/// A connection that is established.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) edge: Edge,
    /// State machine and buffers, if there is anything to do.
    pub(crate) endpoint: Option<Box<Endpoint>>,
    pub(crate) sender: Sender,
    /// When the peer was heard last, or we began to wait for it.
    pub(crate) heard: Time,
    /// When it had something to do the last time.
    pub(crate) active: Time,
    /// Probes that the peer has not answered.
    pub(crate) probes: u8,
    /// It is among those whose segments are to be sent.
    pub(crate) is_ready: bool,
    /// The application knows that there is something to read.
    pub(crate) told_readable: bool,
    /// A write has found no room.
    pub(crate) wants_to_write: bool,
    /// The application writes no more, and there were no buffers for FIN.
    pub(crate) is_finishing: bool,
    /// For what it got its buffers, or waits for some.
    pub(crate) need: Need,
    /// It is in the queue for buffers.
    pub(crate) waits_for_buffers: bool,
    /// The application has given it up, at this time.
    pub(crate) orphaned: Option<Time>,
    /// The application has aborted it: a reset is to be sent.
    pub(crate) is_aborted: bool,
}

impl Open {
    pub(crate) fn new(
        flow: Flow,
        terms: &Terms,
        controller: NewController,
        round_trip: Option<Duration>,
        now: Time,
    ) -> Open {
        let edge = Edge::new(flow, terms);
        Open {
            sender: Sender::new(controller, &edge, round_trip, now),
            edge,
            endpoint: None,
            heard: now,
            active: now,
            probes: 0,
            is_ready: false,
            told_readable: false,
            wants_to_write: false,
            is_finishing: false,
            need: Need::Input,
            waits_for_buffers: false,
            orphaned: None,
            is_aborted: false,
        }
    }

    /// True if the application has closed or aborted it: its id is no longer valid.
    pub(crate) fn is_given_up(&self) -> bool {
        self.orphaned.is_some() || self.is_aborted
    }

    /// True if both sides have finished, and the application has not read all.
    pub(crate) fn is_in_time_wait(&self) -> bool {
        self.endpoint.as_ref().is_some_and(|endpoint| endpoint.progress() == Progress::TimeWait)
    }
}

impl Phase {
    pub(crate) fn flow(&self) -> &Flow {
        match self {
            Phase::Handshake(handshake) => &handshake.flow,
            Phase::Open(open) => &open.edge.flow,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_need_has_buffers_that_the_ones_before_it_cannot_take() {
        let shares = |max| [Need::Input, Need::Output, Need::Answer].map(|need| need.share(max));
        assert_eq!([1, 2, 3, 4, 6].map(shares), [[1, 1, 1], [1, 2, 2], [1, 2, 3], [2, 3, 4], [2, 4, 6]]);
        assert_eq!(Need::Input.forwarded(), Need::Output);
        assert_eq!(Need::Output.forwarded().forwarded(), Need::Answer);
    }
}
