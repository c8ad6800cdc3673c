//! A long or lossy link between two hosts: a host in the middle takes the frames of both, and
//! passes them on later, at a rate, or not at all. It is a thread of this process, because kernels
//! of test machines may lack `netem`. Good for some ten thousand frames per second.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use manylane_sys::packet::PacketSocket;
use manylane_wire::ethernet::{HEADER_LEN, Mac};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::host::Host;

/// The EtherType of IPv4.
const IPV4: [u8; 2] = [8, 0];
/// Ethernet, IP and TCP headers are shorter, with all their options: a longer frame has data.
const HEADERS_MAX: usize = HEADER_LEN + 80;
/// How often the thread looks whether it should end.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// What the link does to the frames of one direction.
#[derive(Clone, Copy, Debug, Default)]
pub struct Conditions {
    /// Each frame arrives so much later.
    pub delay: Duration,
    /// The rate, and the bytes that may wait for it; a frame that does not fit is dropped. None:
    /// all at once.
    pub bottleneck: Option<Bottleneck>,
    /// So many of 10,000 frames with data begin a loss.
    pub losses: u64,
    /// Frames with data that each loss takes, at least one.
    pub lost_in_a_row: u64,
}

/// A rate, with a queue in front.
#[derive(Clone, Copy, Debug)]
pub struct Bottleneck {
    /// Bits per second.
    pub rate: u64,
    /// Bytes.
    pub queue: usize,
}

/// Frames of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectionCounts {
    /// Passed on, or on their way.
    pub passed: u64,
    /// Dropped by chance.
    pub lost: u64,
    /// Dropped because the queue was full.
    pub overflowed: u64,
}

/// A thread that relays, until it is dropped.
#[derive(Debug)]
pub struct Relay {
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<io::Result<[DirectionCounts; 2]>>>,
}

impl Relay {
    /// Relays the IPv4 frames that two hosts address to `middle`, each a neighbour of it by a link,
    /// from the first host to the second under the first `conditions`, and back under the second.
    /// Losses are drawn by `seed`. The hosts have to know their routes, and must not segment or
    /// join frames by their devices (`Host::set_checksums`, `Host::set_gro`).
    ///
    /// # Errors
    /// Without CAP_NET_RAW; of the system.
    pub fn start(
        middle: &Host,
        hosts: [(&Host, usize); 2],
        conditions: [Conditions; 2],
        seed: u64,
    ) -> Result<Relay> {
        let ends = hosts.map(|(host, link)| End::new(middle, host, link));
        let [first, second] = ends;
        let ends = [first?, second?];
        let directions = conditions.map(|conditions| Direction::new(conditions, seed));
        let end = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&end);
        let thread = middle.spawn("relay", move || relay(&ends, directions, &seen))?;
        Ok(Relay { end, thread: Some(thread) })
    }

    /// Ends it, once the frames on their way have arrived. Returns the counts of both directions.
    ///
    /// # Errors
    /// Those that have ended it before: of the devices.
    pub fn end(mut self) -> Result<[DirectionCounts; 2]> {
        self.end.store(true, Relaxed);
        let thread = self.thread.take().context("a relay ends once")?;
        thread.join().map_err(|_| anyhow!("a relay has panicked"))?.context("a relay failed")
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.end.store(true, Relaxed);
        // Its errors are those of a link that nobody uses any more.
        _ = self.thread.take().map(JoinHandle::join);
    }
}

fn relay(
    ends: &[End; 2],
    mut directions: [Direction; 2],
    end: &AtomicBool,
) -> io::Result<[DirectionCounts; 2]> {
    loop {
        let ending = end.load(Relaxed);
        if ending && directions.iter().all(|direction| direction.waiting.is_empty()) {
            return Ok(directions.map(|direction| direction.counts));
        }
        for (at, direction) in directions.iter_mut().enumerate() {
            if !ending {
                ends[at].receive(|frame| direction.add(frame, Instant::now()))?;
            }
            while let Some(frame) = direction.due(Instant::now()) {
                ends[1 - at].send(frame)?;
            }
        }
        let next = directions.iter().filter_map(Direction::next).min();
        let wait = next.map_or(POLL_INTERVAL, |next| next.saturating_duration_since(Instant::now()));
        let time = Timespec { tv_sec: 0, tv_nsec: wait.min(POLL_INTERVAL).subsec_nanos().into() };
        let mut fds = ends.each_ref().map(|end| PollFd::new(&end.socket, PollFlags::IN));
        // Frames that are not taken any more would end each wait.
        poll(if ending { &mut [] } else { &mut fds }, Some(&time))?;
    }
}

/// Draws by chance, the same for the same seed.
#[derive(Clone, Copy, Debug)]
pub struct Chance(u64);

impl Chance {
    /// With this seed.
    #[must_use]
    pub const fn new(seed: u64) -> Chance {
        Chance(seed)
    }

    /// True for `share` of `all` calls.
    pub fn is_drawn(&mut self, share: u64, all: u64) -> bool {
        // A linear congruential generator (Knuth, MMIX).
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % all < share
    }
}

/// One direction of the link.
struct Direction {
    conditions: Conditions,
    chance: Chance,
    left_to_lose: u64,
    /// When the bottleneck has sent what it has.
    idle_at: Instant,
    /// With the time of their arrival.
    waiting: VecDeque<(Instant, Vec<u8>)>,
    counts: DirectionCounts,
}

impl Direction {
    fn new(conditions: Conditions, seed: u64) -> Direction {
        let (idle_at, waiting) = (Instant::now(), VecDeque::new());
        let counts = DirectionCounts::default();
        Direction { conditions, chance: Chance::new(seed), left_to_lose: 0, idle_at, waiting, counts }
    }

    fn add(&mut self, frame: Vec<u8>, now: Instant) {
        if frame.len() > HEADERS_MAX && self.is_lost() {
            self.counts.lost += 1;
            return;
        }
        let mut sent = now;
        if let Some(Bottleneck { rate, queue }) = self.conditions.bottleneck {
            let bytes = |time: Duration| time.as_secs_f64() * rate as f64 / 8.0;
            if bytes(self.idle_at.saturating_duration_since(now)) + frame.len() as f64 > queue as f64 {
                self.counts.overflowed += 1;
                return;
            }
            let time = Duration::from_secs_f64(frame.len() as f64 * 8.0 / rate as f64);
            sent = self.idle_at.max(now) + time;
            self.idle_at = sent;
        }
        self.counts.passed += 1;
        self.waiting.push_back((sent + self.conditions.delay, frame));
    }

    /// Draws whether a frame with data is lost.
    fn is_lost(&mut self) -> bool {
        if self.left_to_lose == 0 && self.chance.is_drawn(self.conditions.losses, 10_000) {
            self.left_to_lose = self.conditions.lost_in_a_row.max(1);
        }
        let is_lost = self.left_to_lose > 0;
        self.left_to_lose = self.left_to_lose.saturating_sub(1);
        is_lost
    }

    fn due(&mut self, now: Instant) -> Option<Vec<u8>> {
        let is_due = self.waiting.front().is_some_and(|(at, _)| *at <= now);
        if is_due { self.waiting.pop_front().map(|(_, frame)| frame) } else { None }
    }

    fn next(&self) -> Option<Instant> {
        self.waiting.front().map(|(at, _)| *at)
    }
}

/// The middle host's end of a link.
#[derive(Debug)]
struct End {
    socket: PacketSocket,
    own: Mac,
    peer: Mac,
}

impl End {
    /// The two hosts number their ends of the link alike.
    fn new(middle: &Host, peer: &Host, link: usize) -> Result<End> {
        let ifindex = middle.device_index(link)?;
        let socket = middle.run(|| PacketSocket::listen(ifindex)).context("cannot open a packet socket")?;
        Ok(End { socket, own: Mac(middle.mac(link)), peer: Mac(peer.mac(link)) })
    }

    /// Takes the frames that have come from the peer, but not those that this end has sent.
    fn receive(&self, mut take: impl FnMut(Vec<u8>)) -> io::Result<()> {
        while poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&Timespec::default()))? > 0 {
            let frame = self.socket.receive()?;
            if frame.len() > HEADER_LEN && frame[6..12] == self.peer.0 && frame[12..14] == IPV4 {
                take(frame);
            }
        }
        Ok(())
    }

    fn send(&self, mut frame: Vec<u8>) -> io::Result<()> {
        frame[..6].copy_from_slice(&self.peer.0);
        frame[6..12].copy_from_slice(&self.own.0);
        self.socket.send(&frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAME: usize = 1000;

    fn add(direction: &mut Direction, count: usize, now: Instant) {
        (0..count).for_each(|_| direction.add(vec![0; FRAME], now));
    }

    #[test]
    fn a_bottleneck_has_a_rate_and_a_queue() {
        let (delay, now) = (Duration::from_millis(5), Instant::now());
        // A frame in a millisecond.
        let bottleneck = Some(Bottleneck { rate: 8_000_000, queue: 3 * FRAME });
        let mut direction = Direction::new(Conditions { delay, bottleneck, ..Conditions::default() }, 1);
        direction.idle_at = now;
        add(&mut direction, 5, now);
        assert_eq!(direction.counts, DirectionCounts { passed: 3, lost: 0, overflowed: 2 });
        let arrivals: Vec<_> = direction.waiting.iter().map(|(at, _)| *at - now).collect();
        assert_eq!(arrivals, [6, 7, 8].map(Duration::from_millis));
        assert_eq!(direction.due(now + Duration::from_micros(5999)), None);
        assert!(direction.due(now + Duration::from_millis(6)).is_some());
    }

    #[test]
    fn losses_take_their_share_of_frames_with_data_in_rows() {
        let now = Instant::now();
        let mut direction =
            Direction::new(Conditions { losses: 100, lost_in_a_row: 4, ..Conditions::default() }, 3);
        (0..1000).for_each(|_| direction.add(vec![0; HEADERS_MAX], now));
        assert_eq!(direction.counts.lost, 0);
        add(&mut direction, 100_000, now);
        assert!((3400..=4200).contains(&direction.counts.lost), "{:?}", direction.counts);
        assert_eq!(direction.counts.lost % 4, 0);
        assert_eq!(direction.counts.passed + direction.counts.lost, 101_000);
    }
}
