//! Settings and counts of the faults of one lane.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use manylane_sys::errno::EAGAIN;

/// The faults of one lane: none, until a test sets some.
pub(crate) struct Faults {
    pub(super) random: Random,
    pub(crate) rx: Direction,
    pub(crate) tx: Direction,
    /// Errors of the next receives, as `errno`.
    pub(crate) recv_errors: VecDeque<i32>,
    /// Errors of the next messages, as `errno`.
    pub(crate) send_errors: VecDeque<i32>,
    /// The error of every message that needs GSO.
    pub(crate) gso_error: Option<i32>,
    /// Messages that the send queue has room for.
    pub(crate) send_room: usize,
    /// Room that waits make in a full send queue: after the time of the first entry there is room
    /// for its number of messages, and the entry is removed.
    pub(crate) send_drains: VecDeque<(Duration, usize)>,
    /// Number of refused sends. A datagram can be refused several times.
    pub(crate) refused: u64,
}

/// Faults of one direction: the chance of each, in 1000, and the number of datagrams with it. A
/// datagram is at most one of lost, shortened and corrupted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Direction {
    pub(crate) loss: u64,
    /// Bytes are cut off the end; at least one is left.
    pub(crate) shortening: u64,
    /// One bit is flipped.
    pub(crate) corruption: u64,
    /// The datagram is moved behind all others of the batch.
    pub(crate) reordering: u64,
    pub(crate) lost: u64,
    pub(crate) shortened: u64,
    pub(crate) corrupted: u64,
    pub(crate) reordered: u64,
}

/// The fate of a message.
pub(super) enum Fate {
    Lost,
    Late,
    InTime,
}

/// Random numbers (xorshift).
pub(super) struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        // xorshift maps zero to zero.
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % limit as u64) as usize
    }

    fn happens(&mut self, chance: u64) -> bool {
        (self.below(1000) as u64) < chance
    }
}

impl Direction {
    /// Decides the fate of a message of `datagrams` datagrams, the last one of `last_len` bytes,
    /// and changes its bytes.
    pub(super) fn apply(
        &mut self,
        random: &mut Random,
        payload: &mut Vec<u8>,
        (datagrams, last_len): (u64, usize),
    ) -> Fate {
        if random.happens(self.loss) {
            self.lost += datagrams;
            return Fate::Lost;
        }
        if last_len > 1 && random.happens(self.shortening) {
            payload.truncate(payload.len() - 1 - random.below(last_len - 1));
            self.shortened += 1;
        } else if !payload.is_empty() && random.happens(self.corruption) {
            let at = random.below(payload.len());
            payload[at] ^= 1 << random.below(8);
            self.corrupted += 1;
        }
        if random.happens(self.reordering) {
            self.reordered += datagrams;
            return Fate::Late;
        }
        Fate::InTime
    }
}

impl Faults {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            random: Random::new(seed),
            rx: Direction::default(),
            tx: Direction::default(),
            recv_errors: VecDeque::new(),
            send_errors: VecDeque::new(),
            gso_error: None,
            send_room: usize::MAX,
            send_drains: VecDeque::new(),
            refused: 0,
        }
    }

    /// Decides whether to refuse a message of `datagrams` datagrams. As with `sendmmsg`, only a
    /// call that begins with the message returns its error, and so uses it up.
    pub(super) fn refuse(&mut self, datagrams: u64, is_first: bool) -> io::Result<()> {
        let queued = self.send_errors.front().copied();
        let no_room = if self.send_room == 0 { Some(EAGAIN) } else { None };
        let refused = if datagrams > 1 { self.gso_error } else { None };
        let Some(code) = refused.or(queued).or(no_room) else {
            self.send_room -= 1;
            return Ok(());
        };
        if is_first {
            self.refused += 1;
            if refused.is_none() {
                self.send_errors.pop_front();
            }
        }
        Err(io::Error::from_raw_os_error(code))
    }

    /// Makes the room that a wait of at most `timeout` gives; returns the duration of the wait.
    pub(super) fn drain(&mut self, timeout: Duration) -> Duration {
        match self.send_drains.front_mut() {
            Some((time, room)) if *time <= timeout => {
                let waited = *time;
                self.send_room = *room;
                self.send_drains.pop_front();
                waited
            }
            Some((time, _)) => {
                *time -= timeout;
                timeout
            }
            None => timeout,
        }
    }
}
