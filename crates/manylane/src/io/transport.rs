//! Replies that the kernel's socket sends from a queue.

use std::io;
use std::os::fd::BorrowedFd;
#[cfg(test)]
use std::sync::Mutex;
use std::time::{Duration, Instant};

use manylane_sys::mmsg::SendBatch;
use manylane_sys::sock;

#[cfg(test)]
use super::faults::FaultTransport;
#[cfg(test)]
use super::{lock, sim::Network};

/// Queue of replies that do not bypass the kernel's stack.
pub(crate) struct Replies<'a> {
    /// Replies for `transport`.
    pub(crate) queue: SendBatch<'a>,
    pub(crate) transport: Transport<'a>,
}

/// Sender of the messages of a queue.
pub(crate) enum Transport<'a> {
    /// The kernel's socket.
    Socket(BorrowedFd<'a>),
    #[cfg(test)]
    Sim(&'a Mutex<Network>),
    #[cfg(test)]
    Faulty(Box<FaultTransport<'a>>),
}

impl Transport<'_> {
    /// Sends the queued messages from `from` on: see [`SendBatch::send`].
    pub(crate) fn send(&mut self, queue: &mut SendBatch<'_>, from: usize) -> io::Result<usize> {
        match self {
            Self::Socket(fd) => queue.send(*fd, from),
            #[cfg(test)]
            Self::Sim(network) => Ok(lock(network).transmit(queue, from)),
            #[cfg(test)]
            Self::Faulty(faulty) => faulty.send(queue, from),
        }
    }

    /// Sends message `index` datagram by datagram: see [`SendBatch::send_split`].
    pub(crate) fn send_split(
        &mut self,
        queue: &mut SendBatch<'_>,
        index: usize,
        skip: u64,
    ) -> (u64, u64, Option<io::Error>) {
        match self {
            Self::Socket(fd) => queue.send_split(*fd, index, skip),
            // It refuses no message, so none has to be split.
            #[cfg(test)]
            Self::Sim(_) => (0, 0, None),
            #[cfg(test)]
            Self::Faulty(faulty) => faulty.send_split(queue, index, skip),
        }
    }

    /// Waits for room in the send buffer, for at most `timeout`; false if there is none.
    pub(crate) fn wait_writable(&self, timeout: Duration) -> bool {
        match self {
            Self::Socket(fd) => sock::wait_writable(*fd, timeout),
            #[cfg(test)]
            Self::Sim(_) => true,
            #[cfg(test)]
            Self::Faulty(faulty) => faulty.wait_writable(timeout),
        }
    }

    /// Sleeps for `time` by the clock of the engine.
    #[cfg(test)]
    pub(crate) fn sleep(&self, time: Duration) {
        match self {
            Self::Socket(_) => std::thread::sleep(time),
            Self::Sim(network) => lock(network).advance(time),
            Self::Faulty(faulty) => faulty.sleep(time),
        }
    }

    /// The time, by the clock of the engine.
    pub(crate) fn now(&self) -> Instant {
        match self {
            Self::Socket(_) => Instant::now(),
            #[cfg(test)]
            Self::Sim(network) => lock(network).clock(),
            #[cfg(test)]
            Self::Faulty(faulty) => faulty.now(),
        }
    }
}
