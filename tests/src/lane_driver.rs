//! Lanes driven by hand, by one thread and an epoll instance, which also tests the readiness of
//! lanes.

use std::net::SocketAddr;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::time::{Duration, SystemTime};

use manylane::{Datagram, Ecn, Handle, Lane, LaneId, Outbox, Received, Socket};
use manylane_sys::epoll::Epoll;

use crate::{TEST_TIMEOUT, record_counters};

/// A copy of a received datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of manylane::Datagram")]
pub struct ReceivedDatagram {
    /// The lane that received it.
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
    /// Copies `datagram`, which `lane` received.
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

/// All lanes of a socket, driven by one thread.
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
        let mut driver = Self { lanes: Vec::new(), handle, epoll: Epoll::new(300).unwrap() };
        for lane in socket.into_lanes() {
            driver.add(lane);
        }
        driver
    }

    /// Adds a lane.
    pub fn add(&mut self, lane: Lane) {
        self.lanes.push(lane);
        // A new epoll instance, because the parked socket of a removed lane may be used by a new
        // one, and is then still in the old instance.
        self.epoll = Epoll::new(300).unwrap();
        for lane in &self.lanes {
            self.epoll.add(lane, token(lane)).unwrap();
        }
    }

    /// Opens one more lane and adds it.
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

    /// Receives `count` datagrams, and passes each to `each` with an outbox for replies.
    ///
    /// # Panics
    /// If fewer or more arrive.
    pub fn receive<F>(&mut self, count: usize, mut each: F)
    where
        F: for<'a> FnMut(LaneId, Datagram<'a>, &mut Outbox<'a>),
    {
        let (mut seen, mut in_vain) = (0, 0);
        while seen < count {
            // After the process was stopped, the wait returns nothing, and is repeated.
            let mut wait = || self.epoll.wait(TEST_TIMEOUT).unwrap().collect::<Vec<u64>>();
            let ready = Some(wait()).filter(|ready| !ready.is_empty()).unwrap_or_else(wait);
            assert!(!ready.is_empty(), "{seen} of {count} datagrams came: {:?}", self.handle.counters());
            // A parked socket stays readable, because no lane reads it.
            let is_of_a_lane = |token: &u64| self.lanes.iter().any(|lane| self::token(lane) == *token);
            assert!(ready.iter().any(is_of_a_lane), "ready: {ready:?}, {seen} of {count} datagrams came");
            for lane in self.lanes.iter_mut().filter(|lane| ready.contains(&token(lane))) {
                let id = lane.id();
                let Received { batch, mut out } = lane.recv().unwrap();
                // A queue that moves to another lane may wake the lane that had it.
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

    /// Receives `count` datagrams and returns copies, in the order of each lane.
    pub fn recv_all(&mut self, count: usize) -> Vec<ReceivedDatagram> {
        let mut got = Vec::with_capacity(count);
        self.receive(count, |lane, datagram, _| got.push(ReceivedDatagram::new(lane, &datagram)));
        got
    }

    /// Receives `count` datagrams and sends each back.
    pub fn echo(&mut self, count: usize) {
        self.receive(count, |_, datagram, out| out.reply(&datagram, datagram.payload()));
    }

    /// Receives one datagram and returns its lane.
    pub fn recv_lane_id(&mut self) -> LaneId {
        let mut id = None;
        self.receive(1, |lane, _, _| id = Some(lane));
        id.unwrap()
    }

    /// Receives without waiting, on all lanes, until they are empty. Returns the number of
    /// datagrams.
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

    /// True if no lane has datagrams.
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
    // Ids are not public as numbers.
    lane.as_fd().as_raw_fd() as u64
}
