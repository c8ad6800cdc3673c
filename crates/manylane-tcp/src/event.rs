//! What a stack tells the application.

/// A connection. It is never that of another one, also when its place is taken again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Id {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl Id {
    /// A number below that of the most connections there were at a time, which no other connection
    /// has now: for tables.
    #[must_use]
    pub fn index(self) -> usize {
        self.index as usize
    }

    /// An id of another kind of connections than those of a stack, with the number of its place and
    /// how many connections had that.
    #[must_use]
    pub fn new(index: u32, generation: u32) -> Id {
        Id { index, generation }
    }
}

/// What happened to a connection since the last event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The connection.
    pub id: Id,
    /// What happened.
    pub what: What,
}

/// What happened to a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A peer has connected to a port that is listened on.
    Accepted,
    /// The peer has accepted our connection.
    Connected,
    /// There may be bytes to read, or the peer's end of its data. Comes once until the application
    /// has read all there is.
    Readable,
    /// A write that took less than it was given may take more now.
    Writable,
    /// The connection is over. Its id is no longer valid.
    Closed(Reason),
}

/// Why a connection is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Both sides have closed it.
    Finished,
    /// The peer has reset it.
    Reset,
    /// The peer has refused it: a reset in place of an answer to our SYN.
    Refused,
    /// The peer has not answered for the user timeout, or to any probe.
    TimedOut,
    /// The network has said that the peer cannot be reached (ICMP), before it was connected.
    Unreachable,
}

/// What a router, or the peer's host, says of a packet that we have sent (ICMP).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkError {
    /// It is longer than the next link allows.
    TooBig {
        /// Longest packet of that link, with its IP header.
        mtu: u16,
    },
    /// Host, protocol or port cannot be reached.
    Unreachable,
}
