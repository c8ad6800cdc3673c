//! Connections in TIME-WAIT: at most 64 bytes each, in the order in which they end.
//!
//! The last ACK of a connection that we have closed first may be lost, and old segments of it may
//! still be on their way. So its numbers are remembered for a while.

use std::collections::VecDeque;
use std::time::Duration;

use hashbrown::HashTable;
use manylane_wire::tcp::{Flags, Options};

use crate::edge::timestamp;
use crate::flow::Flow;
use crate::packet::{Control, Segment};
use crate::secret::Secret;
use crate::sequence::is_before;
use crate::time::Time;

/// Least time between two FINs of a peer with which the time begins again. Each of them takes a
/// place in the queue, and a peer that sends many must not take those of others.
const RENEWAL_MS: u32 = 1000;

/// What is remembered.
#[derive(Clone, Copy, Debug)]
struct Record {
    flow: Flow,
    send_next: u32,
    receive_next: u32,
    /// The peer's last time stamp, if it sends them.
    recent: u32,
    has_timestamps: bool,
    /// False for one that was taken out, and is still in the queue.
    is_waiting: bool,
    /// Milliseconds, modulo 2^32.
    until: u32,
}

// The issue of memory in floods: with its place in the table, a record has 64 bytes at most.
const _: () = assert!(size_of::<Record>() <= 56);

/// What is to be done with a segment of a connection in TIME-WAIT.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Answer {
    Nothing,
    /// The ACK was lost.
    Acknowledge(Control),
    /// A new connection begins (RFC 6191), whose numbers have to be after this one.
    Reopen {
        after: u32,
    },
}

/// The connections in TIME-WAIT of a lane.
#[derive(Debug)]
pub(crate) struct TimeWait {
    queue: VecDeque<Record>,
    /// Position of the first record of the queue, modulo 2^32.
    first: u32,
    /// Positions by flow.
    index: HashTable<u32>,
    duration: Duration,
    max: usize,
}

impl TimeWait {
    pub(crate) fn new(duration: Duration, max: usize) -> TimeWait {
        TimeWait { queue: VecDeque::new(), first: 0, index: HashTable::new(), duration, max }
    }

    /// Number of connections.
    pub(crate) fn len(&self) -> usize {
        self.index.len()
    }

    /// Adds a connection that has ended with these numbers.
    pub(crate) fn add(
        &mut self,
        secret: &Secret,
        flow: Flow,
        (send_next, receive_next): (u32, u32),
        recent: Option<u32>,
        now: Time,
    ) {
        if self.max == 0 {
            return;
        }
        self.make_room(secret);
        let record = Record {
            flow,
            send_next,
            receive_next,
            recent: recent.unwrap_or(0),
            has_timestamps: recent.is_some(),
            is_waiting: true,
            until: timestamp(now + self.duration),
        };
        self.push(secret, record);
    }

    /// Takes out the oldest ones, so that there is a place in the queue.
    fn make_room(&mut self, secret: &Secret) {
        while self.queue.len() >= self.max {
            self.pop(secret);
        }
    }

    fn push(&mut self, secret: &Secret, record: Record) {
        let at = self.first.wrapping_add(position(self.queue.len()));
        let (queue, first) = (&mut self.queue, self.first);
        queue.push_back(record);
        self.index.insert_unique(secret.hash(&record.flow), at, |at| {
            let place = at.wrapping_sub(first) as usize;
            queue.get(place).map_or(0, |record| secret.hash(&record.flow))
        });
    }

    /// Takes out the oldest one.
    fn pop(&mut self, secret: &Secret) {
        let Some(record) = self.queue.pop_front() else { return };
        let at = self.first;
        self.first = self.first.wrapping_add(1);
        if record.is_waiting
            && let Ok(entry) = self.index.find_entry(secret.hash(&record.flow), |other| *other == at)
        {
            entry.remove();
        }
    }

    /// Takes out those whose time is over.
    pub(crate) fn expire(&mut self, secret: &Secret, now: Time) {
        let now = timestamp(now);
        while self.queue.front().is_some_and(|record| !record.is_waiting || !is_before(now, record.until)) {
            self.pop(secret);
        }
    }

    /// When the oldest one ends.
    pub(crate) fn next(&self, now: Time) -> Option<Time> {
        let left = self.queue.front()?.until.wrapping_sub(timestamp(now)).cast_signed();
        Some(now + Duration::from_millis(u64::try_from(left).unwrap_or(0)))
    }

    /// True if a connection of this flow is here.
    pub(crate) fn has(&self, secret: &Secret, flow: &Flow) -> bool {
        let is_it = |at: &u32| {
            let place = at.wrapping_sub(self.first) as usize;
            self.queue.get(place).is_some_and(|record| record.flow == *flow)
        };
        self.index.find(secret.hash(flow), is_it).is_some()
    }

    /// Takes a segment, if its connection is here.
    pub(crate) fn input(&mut self, secret: &Secret, segment: &Segment, now: Time) -> Option<Answer> {
        if self.index.is_empty() {
            return None;
        }
        let (hash, first, queue) = (secret.hash(&segment.flow), self.first, &mut self.queue);
        let entry = self
            .index
            .find_entry(hash, |at| {
                let place = at.wrapping_sub(first) as usize;
                queue.get(place).is_some_and(|record| record.flow == segment.flow)
            })
            .ok()?;
        let record = queue.get_mut(entry.get().wrapping_sub(first) as usize)?;
        // A reset must not end it early (RFC 1337).
        if segment.has(Flags::RST) {
            return Some(Answer::Nothing);
        }
        if segment.has(Flags::SYN) && !segment.has(Flags::ACK) {
            let is_newer = match segment.options.timestamps {
                Some((value, _)) if record.has_timestamps => is_before(record.recent, value),
                _ => is_before(record.receive_next, segment.sequence),
            };
            if is_newer {
                record.is_waiting = false;
                let after = record.send_next;
                entry.remove();
                return Some(Answer::Reopen { after });
            }
        }
        let is_plain = segment.payload == 0 && !segment.has(Flags::FIN) && !segment.has(Flags::SYN);
        if is_plain && segment.sequence == record.receive_next {
            return Some(Answer::Nothing);
        }
        let control = Control {
            flow: record.flow,
            sequence: record.send_next,
            acknowledgment: record.receive_next,
            flags: Flags::ACK,
            window: 0,
            options: Options {
                timestamps: record.has_timestamps.then_some((timestamp(now), record.recent)),
                ..Options::default()
            },
        };
        let until = timestamp(now + self.duration);
        let is_later = until.wrapping_sub(record.until) >= RENEWAL_MS;
        if segment.has(Flags::FIN) && segment.end() == record.receive_next && is_later {
            // The time begins again (RFC 9293, section 3.10.7.8): at the end of the queue.
            let again = Record { until, ..*record };
            record.is_waiting = false;
            entry.remove();
            self.make_room(secret);
            self.push(secret, again);
        }
        Some(Answer::Acknowledge(control))
    }
}

/// A place in the queue, whose length is bounded far below 2^32.
fn position(place: usize) -> u32 {
    u32::try_from(place).unwrap_or(u32::MAX)
}
