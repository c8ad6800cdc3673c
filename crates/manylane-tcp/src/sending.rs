//! Sends what is due on a connection with a state machine: segments, ACKs that no data goes with,
//! and what a timer wants.

use manylane_wire::tcp::Flags;

use crate::counters::Counters;
use crate::device::Skip;
use crate::edge::{Edge, Sent};
use crate::endpoint::{Endpoint, Machine, Progress};
use crate::output::Output;
use crate::sender::Sender;
use crate::time::Time;

/// The output has no space: the rest is sent by a later call.
#[derive(Debug)]
pub(crate) struct Full;

/// A connection, and what it needs to send.
pub(crate) struct Sending<'a, O> {
    pub(crate) machine: &'a mut Machine,
    pub(crate) counters: &'a mut Counters,
    pub(crate) edge: &'a mut Edge,
    pub(crate) sender: &'a mut Sender,
    pub(crate) endpoint: &'a mut Endpoint,
    /// When the peer was heard last, or we began to wait for it; when there was something to do.
    pub(crate) heard: &'a mut Time,
    pub(crate) active: &'a mut Time,
    pub(crate) now: Time,
    pub(crate) out: &'a mut O,
}

impl<O: Output> Sending<'_, O> {
    /// Sends all that is due. Returns when something is the next time.
    pub(crate) fn send(&mut self) -> Result<Option<Time>, Full> {
        let progress = self.endpoint.progress();
        if self.probe_at().is_some_and(|at| at <= self.now) {
            self.sender.note_probe(self.edge);
            self.counters.probes += 1;
            self.endpoint.resend_oldest(self.machine, self.edge, self.now);
        }
        // TIME-WAIT is ours: smoltcp would throw away what is not read when its own one ends.
        let mut due = if progress == Progress::TimeWait { None } else { self.deadline() };
        if due.is_none() && progress != Progress::Over {
            // The ACK of the peer's FIN in TIME-WAIT, or one for which the output had no space when
            // a segment was answered: smoltcp takes it for sent.
            self.acknowledge()?;
        }
        if self.time_out()? {
            due = self.deadline();
        }
        loop {
            due = self.send_due(due)?;
            if !self.rewind()? {
                break;
            }
            due = self.deadline();
        }
        let timeout_at = self.sender.timeout_at(self.edge).map(|(at, _)| at);
        self.sender.note_limit(self.edge, self.endpoint.unacknowledged());
        Ok([due, self.probe_at(), timeout_at].into_iter().flatten().min())
    }

    fn deadline(&mut self) -> Option<Time> {
        self.endpoint.deadline(self.machine, self.edge, self.now)
    }

    /// When the oldest segment is to be sent again as a probe, if the state machine can.
    fn probe_at(&self) -> Option<Time> {
        self.endpoint.can_resend().then(|| self.sender.probe_at(self.edge)).flatten()
    }

    /// Sends an ACK without data, if one is due.
    fn acknowledge(&mut self) -> Result<(), Full> {
        if self.edge.acknowledged == self.edge.receive_next {
            return Ok(());
        }
        if !self.edge.control(Flags::ACK, self.edge.send_next, self.now).send(self.out) {
            return Err(Full);
        }
        self.edge.acknowledged = self.edge.receive_next;
        self.counters.segments_out += 1;
        Ok(())
    }

    /// Asks for space before smoltcp is asked: it clears its timers even if it cannot send.
    fn need_space(&mut self) -> Result<(), Full> {
        self.out.space(self.edge.space_needed()).map(|_| ()).ok_or(Full)
    }

    /// Sends segments until none is due, or none may be sent. Returns when the next one is.
    fn send_due(&mut self, mut due: Option<Time>) -> Result<Option<Time>, Full> {
        while due.is_some_and(|at| at <= self.now) {
            let may_send_at = self.sender.may_send_at(self.edge, self.endpoint.unacknowledged(), self.now);
            if may_send_at > self.now && !self.endpoint.has_window_to_tell(self.edge) {
                // The ACK does not wait for the data that it would go with.
                self.acknowledge()?;
                return Ok(Some(may_send_at));
            }
            self.need_space()?;
            let (before, skip) = (self.edge.in_flight(), self.sender.skip());
            let sent = self.endpoint.output(self.machine, self.edge, self.now, self.out, skip);
            match sent {
                Some(sent) if sent.skipped => self.sender.on_skipped(&sent),
                Some(sent) => self.note_sent(&sent, before),
                None => break,
            }
            due = self.deadline();
        }
        Ok(due)
    }

    fn note_sent(&mut self, sent: &Sent, before: u32) {
        self.counters.segments_out += 1;
        self.counters.retransmitted += u64::from(sent.again);
        if before == 0 && self.edge.in_flight() > 0 {
            *self.heard = self.now;
        }
        *self.active = self.now;
        let is_timeout = self.sender.on_sent(self.edge, sent, before, self.now);
        self.counters.timeouts += u64::from(is_timeout);
    }

    /// Sends the oldest segment if the timer has expired that stands in for the state machine's.
    /// True if it has.
    fn time_out(&mut self) -> Result<bool, Full> {
        let expired = self.sender.timeout_at(self.edge).filter(|(at, _)| *at <= self.now);
        let Some((_, rewinds)) = expired else { return Ok(false) };
        self.need_space()?;
        let (before, how) = (self.edge.in_flight(), (Skip::Nothing, rewinds));
        let sent = self.endpoint.rewind(self.machine, self.edge, self.now, self.out, how);
        self.sender.note_rewind(self.now);
        if let Some(sent) = sent {
            self.note_sent(&sent, before);
        }
        Ok(true)
    }

    /// Makes the state machine go through what is in flight once more, if that is due. True if it
    /// was.
    fn rewind(&mut self) -> Result<bool, Full> {
        let can_rewind = self.edge.window > 0 && self.endpoint.can_resend();
        let Some(how) = self.sender.wants_rewind().filter(|_| can_rewind) else { return Ok(false) };
        self.need_space()?;
        let oldest = self.endpoint.rewind(self.machine, self.edge, self.now, self.out, how);
        let is_sent = oldest.is_some_and(|oldest| !oldest.skipped);
        self.counters.segments_out += u64::from(is_sent);
        self.counters.retransmitted += u64::from(is_sent);
        self.sender.on_rewound(self.edge, oldest.as_ref(), self.now);
        Ok(true)
    }
}
