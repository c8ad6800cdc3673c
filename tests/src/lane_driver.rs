//! Lanes driven by hand, all by one thread, through an epoll: readiness of lanes is tested by the
//! way.

use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use manylane::{Datagram, Ecn, Handle, Lane, LaneId, Outbox, Received, Socket};
use manylane_sys::measure::Epoll;

use crate::{TEST_TIMEOUT, record_counters};

/// A datagram as it was received, kept.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of manylane::Datagram")]
pub struct ReceivedDatagram {
    /// Which lane it came in on.
    pub lane: LaneId,
    pub payload: Vec<u8>,
    pub full_len: usize,
    pub truncated: bool,
    pub peer: SocketAddr,
    pub local: SocketAddr,
    pub ecn: Option<Ecn>,
    pub timestamp: Option<SystemTime>,
}

impl ReceivedDatagram {
    /// Keeps `datagram`, which `lane` received.
    #[must_use]
    pub fn new(lane: LaneId, datagram: &Datagram<'_>) -> Self {
        Self {
            lane,
            payload: datagram.payload().to_vec(),
            full_len: datagram.full_len(),
            truncated: datagram.is_truncated(),
            peer: datagram.peer(),
            local: datagram.local(),
            ecn: datagram.ecn(),
            timestamp: datagram.timestamp(),
        }
    }
}

/// All lanes of a socket in the hands of one thread.
pub struct LaneDriver {
    /// The lanes, in the order in which they were opened.
    pub lanes: Vec<Lane>,
    /// Control over the socket.
    pub handle: Handle,
    epoll: Epoll,
}

impl LaneDriver {
    /// Takes the lanes of `socket`.
    #[must_use]
    pub fn new(socket: Socket) -> Self {
        let handle = socket.handle();
        let mut hands = Self { lanes: Vec::new(), handle, epoll: Epoll::new(300).unwrap() };
        for lane in socket.into_lanes() {
            hands.add(lane);
        }
        hands
    }

    /// Takes one more lane.
    pub fn add(&mut self, lane: Lane) {
        self.lanes.push(lane);
        // A new epoll, since under classic BPF the socket of a lane that left may come back as that
        // of a new one, and is then still in the old epoll.
        self.epoll = Epoll::new(300).unwrap();
        for lane in &self.lanes {
            self.epoll.add(lane, token(lane)).unwrap();
        }
    }

    /// Opens one more lane and takes it.
    pub fn open(&mut self) -> LaneId {
        let lane = self.handle.open_lane().unwrap();
        let id = lane.id();
        self.add(lane);
        id
    }

    /// The address of the socket.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.lanes[0].local_addr()
    }

    /// Receives until `count` datagrams have come, and gives each to `each` with the means to
    /// answer.
    ///
    /// # Panics
    /// If they do not come, or more do.
    pub fn receive<F>(&mut self, count: usize, mut each: F)
    where
        F: for<'a> FnMut(LaneId, Datagram<'a>, &mut Outbox<'a>),
    {
        let (mut seen, mut in_vain) = (0, 0);
        while seen < count {
            // A process that was stopped for a while comes back from its wait with nothing, and
            // waits again.
            let mut wait = || self.epoll.wait(TEST_TIMEOUT).unwrap().collect::<Vec<u64>>();
            let ready = Some(wait()).filter(|ready| !ready.is_empty()).unwrap_or_else(wait);
            assert!(!ready.is_empty(), "{seen} of {count} datagrams came: {:?}", self.handle.counters());
            for lane in self.lanes.iter_mut().filter(|lane| ready.contains(&token(lane))) {
                let id = lane.id();
                let Received { batch, mut out } = lane.recv().unwrap();
                // A queue that changes hands may have woken the lane that had it.
                in_vain += usize::from(batch.is_empty());
                assert!(in_vain <= 8, "a lane that is readable has something");
                for datagram in batch {
                    seen += 1;
                    each(id, datagram, &mut out);
                }
            }
        }
        assert_eq!(seen, count, "datagrams");
    }

    /// Receives `count` datagrams and keeps them, in order of each lane.
    pub fn recv_all(&mut self, count: usize) -> Vec<ReceivedDatagram> {
        let mut got = Vec::with_capacity(count);
        self.receive(count, |lane, datagram, _| got.push(ReceivedDatagram::new(lane, &datagram)));
        got
    }

    /// Receives `count` datagrams and sends each back.
    pub fn echo(&mut self, count: usize) {
        self.receive(count, |_, datagram, out| out.reply(&datagram, datagram.payload()));
    }

    /// Receives one datagram and tells the lane that it came in on.
    pub fn recv_lane_id(&mut self) -> LaneId {
        let mut id = None;
        self.receive(1, |lane, _, _| id = Some(lane));
        id.unwrap()
    }

    /// Takes what is there without waiting, on all lanes, until there is nothing; tells how much it
    /// was.
    pub fn drain(&mut self) -> usize {
        let mut all = 0;
        loop {
            let some: usize = self.lanes.iter_mut().map(|lane| lane.recv().unwrap().batch.len()).sum();
            if some == 0 {
                return all;
            }
            all += some;
        }
    }

    /// Whether nothing is left on any lane.
    #[must_use]
    pub fn is_idle(&mut self) -> bool {
        self.epoll.wait(Duration::ZERO).unwrap().next().is_none() && self.drain() == 0
    }
}

impl Drop for LaneDriver {
    fn drop(&mut self) {
        record_counters(&self.handle.counters().total());
    }
}

fn token(lane: &Lane) -> u64 {
    // Ids are not public as numbers, but print as such.
    lane.id().to_string().parse().unwrap()
}
