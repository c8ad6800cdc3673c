//! Faults of sends: messages that are refused, lost, changed or late.

use std::io;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use manylane_sys::addr::{SockAddr, Source};
use manylane_sys::mmsg::{SendBatch, SendRing};

use super::state::{Fate, Faults};
use crate::io::{Transport, lock};

/// Sends by the engine's transport, with faults.
pub(crate) struct FaultTransport<'a> {
    pub(super) transport: Transport<'a>,
    pub(super) faults: &'a Mutex<Faults>,
    /// Holds one message at a time, on its way to the engine.
    pub(super) send: &'a mut SendRing,
}

/// A message to send, as a copy.
struct MessageCopy {
    peer: SockAddr,
    source: Option<Source>,
    payload: Vec<u8>,
    segment_size: usize,
    datagrams: u64,
}

impl FaultTransport<'_> {
    /// As [`SendBatch::send`].
    pub(in crate::io) fn send(&mut self, queue: &mut SendBatch<'_>, from: usize) -> io::Result<usize> {
        let (mut at, mut late, mut failure) = (from, Vec::new(), None);
        while at < queue.messages() && failure.is_none() {
            let (peer, source, payload) = queue.copy_message(at);
            let segment_size = queue.segment_size(at).into();
            let (datagrams, _) = queue.message_counts(at);
            let message = MessageCopy { peer, source, payload, segment_size, datagrams };
            match self.offer(message, at == from, &mut late) {
                Ok(()) => at += 1,
                Err(err) => failure = Some(err),
            }
        }
        self.forward_late(late);
        if at > from {
            queue.set_stuck(false);
            return Ok(at - from);
        }
        failure.map_or(Ok(0), Err)
    }

    /// As [`SendBatch::send_split`].
    pub(in crate::io) fn send_split(
        &mut self,
        queue: &mut SendBatch<'_>,
        index: usize,
        skip: u64,
    ) -> (u64, u64, Option<io::Error>) {
        let (peer, source, payload) = queue.copy_message(index);
        let segment_size = queue.segment_size(index).into();
        let (mut sent, mut bytes, mut late, mut failure) = (0, 0, Vec::new(), None);
        for part in payload.chunks(segment_size).skip(skip as usize) {
            let payload = part.to_vec();
            let message = MessageCopy { peer, source, payload, segment_size, datagrams: 1 };
            if let Err(err) = self.offer(message, true, &mut late) {
                failure = Some(err);
                break;
            }
            (sent, bytes) = (sent + 1, bytes + part.len() as u64);
            queue.set_stuck(false);
        }
        self.forward_late(late);
        (sent, bytes, failure)
    }

    /// Refuses a message, or accepts it and sends it, unless it is lost or `late`.
    fn offer(
        &mut self,
        mut message: MessageCopy,
        is_first: bool,
        late: &mut Vec<MessageCopy>,
    ) -> io::Result<()> {
        let fate = {
            let mut faults = lock(self.faults);
            faults.refuse(message.datagrams, is_first)?;
            let Faults { random, tx, .. } = &mut *faults;
            let MessageCopy { payload, segment_size, datagrams, .. } = &mut message;
            let last_len = payload.len() - (*datagrams as usize - 1) * *segment_size;
            tx.apply(random, payload, (*datagrams, last_len))
        };
        match fate {
            Fate::Lost => {}
            Fate::Late => late.push(message),
            Fate::InTime => self.forward(&message)?,
        }
        Ok(())
    }

    /// Sends a message by the engine's transport.
    fn forward(&mut self, message: &MessageCopy) -> io::Result<()> {
        let MessageCopy { peer, source, payload, segment_size, datagrams } = message;
        let mut queue = self.send.batch();
        if payload.is_empty() {
            queue.push(peer, *source, payload);
        }
        for datagram in payload.chunks((*segment_size).max(1)) {
            queue.push(peer, *source, datagram);
        }
        assert_eq!((queue.messages(), queue.message_counts(0).0), (1, *datagrams));
        self.transport.send(&mut queue, 0).map(drop)
    }

    /// Sends the late messages. They were accepted before, so one that fails now counts as lost.
    fn forward_late(&mut self, late: Vec<MessageCopy>) {
        for message in late {
            if self.forward(&message).is_err() {
                lock(self.faults).tx.lost += message.datagrams;
            }
        }
    }

    pub(in crate::io) fn wait_writable(&self, timeout: Duration) -> bool {
        if lock(self.faults).send_room > 0 {
            return self.transport.wait_writable(timeout);
        }
        let waited = lock(self.faults).drain(timeout);
        self.transport.sleep(waited);
        lock(self.faults).send_room > 0
    }

    pub(in crate::io) fn sleep(&self, time: Duration) {
        self.transport.sleep(time);
    }

    pub(in crate::io) fn now(&self) -> Instant {
        self.transport.now()
    }
}
