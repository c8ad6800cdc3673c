//! A connection of a lane, for as long as the lane is borrowed.

use std::net::SocketAddr;

use manylane_tcp::time::Time;
use manylane_tcp::{Id, Stack};

/// A connection. All calls do nothing, and return zero, once it is over.
pub struct TcpStream<'a> {
    stack: &'a mut Stack,
    id: Id,
    now: Time,
}

impl<'a> TcpStream<'a> {
    pub(super) fn new(stack: &'a mut Stack, id: Id, now: Time) -> Self {
        Self { stack, id, now }
    }

    /// Its id, in events of the lane.
    #[must_use]
    pub fn id(&self) -> Id {
        self.id
    }

    /// Hands `take` the bytes that were received, as far as they lie in one piece; it says how many
    /// it has used up. Returns that number: zero if there are none. Read until then: no event comes
    /// before.
    pub fn read(&mut self, take: impl FnOnce(&[u8]) -> usize) -> usize {
        self.stack.read(self.id, take)
    }

    /// True if the peer has sent its last byte, and all are read. False if the connection is over:
    /// it may have been cut off.
    #[must_use]
    pub fn is_at_end(&self) -> bool {
        self.stack.is_at_end(self.id)
    }

    /// Takes as many bytes as there is room for, and returns their number. If it is less than were
    /// given, an event comes when there is room again. They are sent by the lane's next
    /// [`wait`](super::TcpLane::wait).
    pub fn write(&mut self, bytes: &[u8]) -> usize {
        self.stack.write(self.id, bytes, self.now)
    }

    /// Writes no more: the peer gets the end of the data behind what was written. Reading goes on.
    pub fn shutdown(&mut self) {
        self.stack.shutdown(self.id, self.now);
    }

    /// Is done with it: what was written is still sent. If the peer has sent bytes that were not
    /// read, or sends some, it gets a reset.
    pub fn close(self) {
        self.stack.close(self.id, self.now);
    }

    /// Is done with it: the peer gets a reset.
    pub fn abort(self) {
        self.stack.abort(self.id);
    }

    /// Our address. None once it is over.
    #[must_use]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.stack.addresses(self.id).map(|(local, _)| local)
    }

    /// The peer's address. None once it is over.
    #[must_use]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.stack.addresses(self.id).map(|(_, peer)| peer)
    }
}
