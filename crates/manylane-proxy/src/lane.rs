//! What a proxy needs of a lane, and lanes with a stack of their own.

use std::net::SocketAddr;
use std::time::Duration;

use manylane::tcp::{Event, Id, TcpLane, Time};

use crate::stats::Stat;

/// The result of a call of a lane.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A thread's share of the connections, by one stack or another. The calls and events are those of
/// [`TcpLane`].
pub trait ProxyLane {
    /// Sends and receives; sleeps for at most `timeout`.
    ///
    /// # Errors
    /// If the system refuses to wait.
    fn wait(&mut self, timeout: Duration) -> Result<()>;
    /// The next event.
    fn event(&mut self) -> Option<Event>;
    /// Connects to a server. An event tells what has come of it.
    ///
    /// # Errors
    /// If there is no route, or no port or descriptor is left.
    fn connect(&mut self, server: SocketAddr) -> Result<Id>;
    /// Moves received bytes to another connection, as many as that has room for.
    fn forward(&mut self, from: Id, to: Id) -> usize;
    /// Writes, and returns how many bytes there was room for.
    fn write(&mut self, id: Id, bytes: &[u8]) -> usize;
    /// True if the peer has sent its last byte, and all were moved. False if the connection is
    /// over: it may have been cut off.
    fn is_at_end(&mut self, id: Id) -> bool;
    /// Writes no more.
    fn shutdown(&mut self, id: Id);
    /// Is done with a connection: what was written is still sent.
    fn close(&mut self, id: Id);
    /// Is done with a connection: the peer gets a reset.
    fn abort(&mut self, id: Id);
    /// Our address and the peer's.
    fn addresses(&mut self, id: Id) -> Option<(SocketAddr, SocketAddr)>;
    /// Accepts no more connections.
    fn stop_listening(&mut self);
    /// Connections that there are, also those that are closed and still have bytes to send.
    fn connections(&self) -> usize;
    /// The time of the last wait.
    fn now(&self) -> Time;
    /// Hands over what is counted under the lane: always the same names in the same order. On every
    /// stack, `memory_used_bytes` and `memory_max_bytes` are those of payload that is buffered.
    fn stats(&self, put: &mut dyn FnMut(Stat));
}

impl ProxyLane for TcpLane {
    fn wait(&mut self, timeout: Duration) -> Result<()> {
        Ok(TcpLane::wait(self, timeout)?)
    }

    fn event(&mut self) -> Option<Event> {
        TcpLane::event(self)
    }

    fn connect(&mut self, server: SocketAddr) -> Result<Id> {
        Ok(TcpLane::connect(self, server)?)
    }

    fn forward(&mut self, from: Id, to: Id) -> usize {
        TcpLane::forward(self, from, to)
    }

    fn write(&mut self, id: Id, bytes: &[u8]) -> usize {
        self.stream(id).write(bytes)
    }

    fn is_at_end(&mut self, id: Id) -> bool {
        self.stream(id).is_at_end()
    }

    fn shutdown(&mut self, id: Id) {
        self.stream(id).shutdown();
    }

    fn close(&mut self, id: Id) {
        self.stream(id).close();
    }

    fn abort(&mut self, id: Id) {
        self.stream(id).abort();
    }

    fn addresses(&mut self, id: Id) -> Option<(SocketAddr, SocketAddr)> {
        let stream = self.stream(id);
        stream.local_addr().zip(stream.peer_addr())
    }

    fn stop_listening(&mut self) {
        TcpLane::stop_listening(self);
    }

    fn connections(&self) -> usize {
        let levels = self.levels();
        levels.connections.saturating_sub(levels.backlog)
    }

    fn now(&self) -> Time {
        TcpLane::now(self)
    }

    fn stats(&self, put: &mut dyn FnMut(Stat)) {
        let counters = self.counters();
        counters.stack.iter().for_each(|(name, value)| put(Stat::count(name, value)));
        for (name, value) in [
            ("malformed", counters.malformed),
            ("sent_by_kernel", counters.sent_by_kernel),
            ("unsent", counters.unsent),
            ("unresolved", counters.unresolved),
            ("handed_over", counters.handed_over),
            ("handover_full", counters.handover_full),
            ("icmp_errors", counters.icmp_errors),
            ("xsk_dropped", counters.xsk_dropped),
        ] {
            put(Stat::count(name, value));
        }
        let levels = self.levels();
        for (name, value) in [
            ("connections", levels.connections),
            ("backlog", levels.backlog),
            ("time_wait", levels.time_wait),
            ("buffers_used", levels.buffers_used),
            ("buffers", levels.buffers),
            ("memory_used_bytes", levels.buffers_used * levels.buffers_len),
            ("memory_max_bytes", levels.buffers_max.saturating_mul(levels.buffers_len)),
        ] {
            put(Stat::level(name, value));
        }
    }
}
