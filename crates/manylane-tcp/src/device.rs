//! What smoltcp takes for a network device: one packet goes in, one comes out.

use manylane_wire::tcp::{HEADER_LEN, OPTIONS_LEN_MAX, TcpHeader};
use smoltcp::phy::{ChecksumCapabilities, Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::time::Instant;

use crate::edge::{Edge, Sent};
use crate::inner::{INNER_IP_LEN, write_inner_ip};
use crate::output::Output;
use crate::scoreboard::Scoreboard;
use crate::sequence::is_before;
use crate::time::Time;

fn capabilities(mss: u16) -> DeviceCapabilities {
    let mut capabilities = DeviceCapabilities::default();
    capabilities.medium = Medium::Ip;
    capabilities.max_transmission_unit = usize::from(mss) + INNER_IP_LEN + HEADER_LEN;
    // The stack has verified them, and writes its own.
    capabilities.checksum = ChecksumCapabilities::ignored();
    capabilities
}

/// Segments that smoltcp sends and that do not leave.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Skip<'a> {
    /// None.
    Nothing,
    /// All.
    Everything,
    /// Those that the peer has, and those below a number, if there is one: they were sent again.
    Known(&'a Scoreboard, Option<u32>),
}

impl Skip<'_> {
    fn takes(self, sequence: u32, end: u32) -> bool {
        match self {
            Skip::Nothing => false,
            Skip::Everything => true,
            Skip::Known(scoreboard, resent_to) => {
                resent_to.is_some_and(|to| is_before(sequence, to)) || scoreboard.covers(sequence, end)
            }
        }
    }
}

/// The device of a connection: what smoltcp sends becomes a packet of ours in the output.
pub(crate) struct Wire<'a, O> {
    received: Option<&'a [u8]>,
    edge: &'a mut Edge,
    out: &'a mut O,
    now: Time,
    skip: Skip<'a>,
    sent: Option<Sent>,
}

impl<'a, O: Output> Wire<'a, O> {
    pub(crate) fn new(
        received: Option<&'a [u8]>,
        edge: &'a mut Edge,
        out: &'a mut O,
        now: Time,
        skip: Skip<'a>,
    ) -> Wire<'a, O> {
        Wire { received, edge, out, now, skip, sent: None }
    }

    /// What was sent, if anything was.
    pub(crate) fn sent(&self) -> Option<Sent> {
        self.sent
    }
}

/// A received packet.
pub(crate) struct Received<'a>(&'a [u8]);

impl RxToken for Received<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, read: F) -> R {
        read(self.0)
    }
}

/// Space for a packet to send.
pub(crate) struct Space<'a, 'b, O>(&'b mut Wire<'a, O>);

impl<O: Output> TxToken for Space<'_, '_, O> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, write: F) -> R {
        let wire = self.0;
        let (start, needed) = (wire.edge.inner_start(), wire.edge.space_needed());
        let space = wire.out.space(needed).filter(|space| space.len() >= start + length);
        let Some(space) = space else {
            // Only the answer to a segment comes here without having asked for space. It is lost.
            return write(&mut vec![0; length]);
        };
        let result = write(&mut space[start..start + length]);
        if !matches!(wire.skip, Skip::Nothing)
            && let Some((sequence, end)) = wire.edge.numbers(space, length)
            && sequence != end
            && wire.skip.takes(sequence, end)
        {
            wire.sent = Some(Sent { sequence, end, again: true, skipped: true });
            return result;
        }
        if let Some((length, sent)) = wire.edge.translate(space, length, wire.now) {
            wire.out.send(length, wire.edge.flow.link());
            wire.sent = Some(sent);
        }
        result
    }
}

impl<'d, O: Output> Device for Wire<'d, O> {
    type RxToken<'a>
        = Received<'d>
    where
        Self: 'a;
    type TxToken<'a>
        = Space<'d, 'a, O>
    where
        Self: 'a;

    fn receive(&mut self, _: Instant) -> Option<(Received<'d>, Space<'d, '_, O>)> {
        let packet = self.received.take()?;
        Some((Received(packet), Space(self)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Space<'d, '_, O>> {
        let needed = self.edge.space_needed();
        self.out.space(needed)?;
        Some(Space(self))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        capabilities(self.edge.mss)
    }
}

/// Length of the packets of a handshake.
const REHEARSAL_LEN: usize = INNER_IP_LEN + HEADER_LEN + OPTIONS_LEN_MAX;

/// The device of a handshake that only smoltcp sees.
pub(crate) struct Rehearsal {
    received: ([u8; REHEARSAL_LEN], usize),
    sent: ([u8; REHEARSAL_LEN], usize),
    mss: u16,
}

impl Rehearsal {
    /// One for an interface that sends segments of this length at most.
    pub(crate) fn of_mss(mss: u16) -> Rehearsal {
        Rehearsal { received: ([0; REHEARSAL_LEN], 0), sent: ([0; REHEARSAL_LEN], 0), mss }
    }

    /// Puts a segment where smoltcp finds it.
    pub(crate) fn receive(&mut self, header: &TcpHeader) {
        let (bytes, length) = &mut self.received;
        *length = header.write(&mut bytes[INNER_IP_LEN..], &[]).map_or(0, |header| INNER_IP_LEN + header);
        write_inner_ip(&mut bytes[..*length]);
    }

    /// The segment that smoltcp has sent last.
    pub(crate) fn sent(&self) -> Option<&[u8]> {
        self.sent.0[..self.sent.1].get(INNER_IP_LEN..)
    }
}

/// Space for an answer.
pub(crate) struct Answer<'a>(&'a mut ([u8; REHEARSAL_LEN], usize));

impl TxToken for Answer<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, write: F) -> R {
        let (bytes, sent) = self.0;
        match bytes.get_mut(..length) {
            Some(bytes) => {
                *sent = length;
                write(bytes)
            }
            None => write(&mut vec![0; length]),
        }
    }
}

impl Device for Rehearsal {
    type RxToken<'a> = Received<'a>;
    type TxToken<'a> = Answer<'a>;

    fn receive(&mut self, _: Instant) -> Option<(Received<'_>, Answer<'_>)> {
        let (bytes, length) = &mut self.received;
        let length = std::mem::take(length);
        (length > 0).then(|| (Received(&bytes[..length]), Answer(&mut self.sent)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Answer<'_>> {
        Some(Answer(&mut self.sent))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        capabilities(self.mss)
    }
}
