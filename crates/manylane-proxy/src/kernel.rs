//! Lanes on sockets of the kernel: where XDP cannot be had, and to compare. A listening socket for
//! each lane (`SO_REUSEPORT`), and one epoll instance.
//!
//! Bytes that are moved go through one buffer of the lane. What the other socket does not take is
//! kept with it, at most one such buffer for each connection, and nothing more is read meanwhile.
//! If all that is kept could exceed the lane's limit, bytes are peeked at, and only those leave the
//! kernel that the other socket has taken. Connections whose peers read go on.

use std::collections::VecDeque;
use std::io::{self, Read as _};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use manylane::tcp::congestion::Algorithm;
use manylane::tcp::{Event, Id, Reason, Time, What};
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use crate::kernel_connection::{Connection, reason_of, write};
use crate::lane::{ProxyLane, Result};
use crate::stats::Stat;

/// Bytes that are moved at a time.
const BUFFER_LEN: usize = 64 << 10;
/// Events of a wait.
const EVENTS_MAX: usize = 1024;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 4096;
/// Connections that are accepted at a time, before others have their turn.
const ACCEPT_BATCH: usize = 64;
/// How long a lane that is out of descriptors waits until it accepts again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What epoll tells of a descriptor.
#[derive(Clone, Copy, Debug)]
struct Noticed {
    token: usize,
    is_readable: bool,
    is_read_closed: bool,
    is_writable: bool,
}

/// A place for a connection. Its generation counts how many had it.
#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    connection: Option<Connection>,
}

/// A lane on sockets of the kernel.
pub struct KernelLane {
    poll: Poll,
    ready: Events,
    listeners: Vec<TcpListener>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    events: VecDeque<Event>,
    /// Of the current wait.
    noticed: Vec<Noticed>,
    buffer: Box<[u8]>,
    /// Memory of what sockets did not take, of all connections.
    pending_len: usize,
    pending_max: usize,
    /// Times that bytes were left in a socket because of that limit.
    memory_full: u64,
    start: Instant,
    now: Time,
    /// There may be connections to accept: at this listener.
    accepts: Vec<bool>,
    paused_until: Option<Time>,
    /// Congestion control of connections to servers, if it is not the system's.
    server_congestion: Option<Algorithm>,
}

/// Tokens of listeners begin here, above those of connections.
const LISTENERS: usize = 1 << 32;

impl KernelLane {
    /// A lane that listens at these addresses, as others of this process may.
    ///
    /// # Errors
    /// Those of the system: an address that is in use, or not of this machine.
    pub fn open(addresses: &[SocketAddr]) -> io::Result<Self> {
        let poll = Poll::new()?;
        let mut listeners = Vec::new();
        for (at, address) in addresses.iter().enumerate() {
            let socket = Socket::new(Domain::for_address(*address), Type::STREAM, Some(Protocol::TCP))?;
            if address.is_ipv6() {
                socket.set_only_v6(true)?;
            }
            socket.set_reuse_address(true)?;
            socket.set_reuse_port(true)?;
            socket.set_nonblocking(true)?;
            socket.bind(&(*address).into())?;
            socket.listen(BACKLOG)?;
            let mut listener = TcpListener::from_std(socket.into());
            poll.registry().register(&mut listener, Token(LISTENERS + at), Interest::READABLE)?;
            listeners.push(listener);
        }
        Ok(Self {
            poll,
            ready: Events::with_capacity(EVENTS_MAX),
            accepts: vec![false; listeners.len()],
            listeners,
            slots: Vec::new(),
            free: Vec::new(),
            events: VecDeque::new(),
            noticed: Vec::with_capacity(EVENTS_MAX),
            buffer: vec![0; BUFFER_LEN].into(),
            pending_len: 0,
            pending_max: usize::MAX,
            memory_full: 0,
            start: Instant::now(),
            now: Time(0),
            paused_until: None,
            server_congestion: None,
        })
    }

    /// Limits the memory of bytes that sockets do not take. The buffer through which all bytes go
    /// is not among it.
    pub fn limit_memory(&mut self, bytes: usize) {
        self.pending_max = bytes;
    }

    /// Sets the congestion control of connections that come, those of clients and those to servers.
    /// None: the system's (`net.ipv4.tcp_congestion_control`).
    ///
    /// # Errors
    /// `ENOENT` if the kernel does not have it, `EPERM` if it is not for all
    /// (`net.ipv4.tcp_allowed_congestion_control`).
    pub fn set_congestion(
        &mut self,
        clients: Option<Algorithm>,
        servers: Option<Algorithm>,
    ) -> io::Result<()> {
        if let Some(clients) = clients {
            // What is accepted inherits it.
            self.listeners.iter().try_for_each(|listener| set_congestion(listener, clients))?;
        }
        if let Some(servers) = servers {
            // So that it fails here, and not for each connection.
            set_congestion(&Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?, servers)?;
        }
        self.server_congestion = servers;
        Ok(())
    }

    /// The addresses that it listens at.
    #[must_use]
    pub fn listeners(&self) -> Vec<SocketAddr> {
        self.listeners.iter().filter_map(|listener| listener.local_addr().ok()).collect()
    }

    fn add(&mut self, mut stream: TcpStream, is_connecting: bool) -> io::Result<Id> {
        // Fails only for a connection that is over.
        _ = stream.set_nodelay(true);
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                self.slots.push(Slot::default());
                (self.slots.len() - 1) as u32
            }
        };
        let interest = Interest::READABLE | Interest::WRITABLE;
        if let Err(err) = self.poll.registry().register(&mut stream, Token(index as usize), interest) {
            self.free.push(index);
            return Err(err);
        }
        let slot = &mut self.slots[index as usize];
        slot.connection = Some(Connection::new(stream, is_connecting));
        Ok(Id::new(index, slot.generation))
    }

    fn id(&self, index: usize) -> Option<Id> {
        let slot = self.slots.get(index).filter(|slot| slot.connection.is_some())?;
        Some(Id::new(index as u32, slot.generation))
    }

    fn connection(&mut self, id: Id) -> Option<&mut Connection> {
        if self.id(id.index()) != Some(id) {
            return None;
        }
        let connection = self.slots[id.index()].connection.as_mut()?;
        (!connection.closes).then_some(connection)
    }

    /// Closes the descriptor.
    fn remove(&mut self, index: usize) {
        let Some(slot) = self.slots.get_mut(index) else { return };
        let Some(mut connection) = slot.connection.take() else { return };
        slot.generation = slot.generation.wrapping_add(1);
        self.pending_len -= connection.pending.capacity();
        // Closing it does the same.
        _ = self.poll.registry().deregister(&mut connection.stream);
        self.free.push(index as u32);
    }

    fn fail(&mut self, id: Id, reason: Reason) {
        let is_closing = self.connection(id).is_none();
        self.remove(id.index());
        if !is_closing {
            self.events.push_back(Event { id, what: What::Closed(reason) });
        }
    }

    /// Writes what is pending for a connection. True if nothing is left.
    fn flush(&mut self, index: usize) -> io::Result<bool> {
        let Some(connection) = self.slots.get_mut(index).and_then(|slot| slot.connection.as_mut()) else {
            return Ok(true);
        };
        let before = connection.pending.capacity();
        let flushed = connection.flush();
        self.pending_len -= before - connection.pending.capacity();
        flushed
    }

    /// Moves bytes once. Returns their number, and true if there is no more to be moved for now.
    /// An error says which connection has failed.
    fn forward_once(
        &mut self,
        from: Id,
        to: Id,
        buffer: &mut [u8],
    ) -> std::result::Result<(usize, bool), (Id, io::Error)> {
        let may_keep = self.pending_max.saturating_sub(self.pending_len) >= buffer.len();
        let Some(source) = self.connection(from).filter(|from| !from.is_drained && !from.is_at_end) else {
            return Ok((0, true));
        };
        let read = if may_keep { source.stream.read(buffer) } else { source.stream.peek(buffer) };
        let read = match read {
            Ok(0) => {
                source.is_at_end = true;
                return Ok((0, true));
            }
            Ok(read) => read,
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => return Ok((0, true)),
            Err(err) if err.kind() == io::ErrorKind::Interrupted => return Ok((0, false)),
            Err(err) => return Err((from, err)),
        };
        // A short read has emptied the socket, and what comes later is told (epoll(7)).
        let is_drained = read < buffer.len() && !source.is_read_closed;
        let Some(target) = self.connection(to) else { return Ok((0, true)) };
        let written = write(&mut target.stream, &buffer[..read]).map_err(|err| (to, err))?;
        let is_whole = written == read;
        if may_keep {
            target.pending = buffer[written..read].to_vec();
            self.pending_len += target.pending.capacity();
        } else if !is_whole {
            self.memory_full += 1;
        }
        if let Some(source) = self.connection(from) {
            source.is_drained = is_drained && (may_keep || is_whole);
            if !may_keep {
                source.discard(&mut buffer[..written]).map_err(|err| (from, err))?;
            }
        }
        Ok(if may_keep { (read, is_drained) } else { (written, is_drained || !is_whole) })
    }

    /// Takes the connections that wait.
    fn accept(&mut self, at: usize) {
        for _ in 0..ACCEPT_BATCH {
            match self.listeners[at].accept() {
                Ok((stream, _)) => {
                    // Without memory for it, the kernel closes it.
                    if let Ok(id) = self.add(stream, false) {
                        self.events.push_back(Event { id, what: What::Accepted });
                    }
                }
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => {
                    self.accepts[at] = false;
                    return;
                }
                // The connection is over already.
                Err(err) if err.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(err) => {
                    log::warn!("cannot accept connections for a moment: {err} (ulimit -n)");
                    self.paused_until = Some(self.now + ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }

    /// A connection is ready.
    fn notice(&mut self, noticed: &Noticed) {
        let Noticed { token: index, is_readable, is_read_closed, is_writable } = *noticed;
        let Some(id) = self.id(index) else { return };
        let Some(connection) = self.slots[index].connection.as_mut() else { return };
        if connection.is_connecting {
            if !is_writable {
                return;
            }
            match connection.stream.take_error() {
                Ok(None) if connection.stream.peer_addr().is_ok() => {
                    connection.is_connecting = false;
                    self.events.push_back(Event { id, what: What::Connected });
                }
                Ok(None) => return,
                Ok(Some(err)) | Err(err) => return self.fail(id, reason_of(&err)),
            }
        }
        let Some(connection) = self.slots[index].connection.as_mut() else { return };
        if is_writable && (!connection.pending.is_empty() || connection.shuts_down || connection.closes) {
            let closes = connection.closes;
            match self.flush(index) {
                Ok(true) if closes => return self.remove(index),
                Ok(_) => {}
                Err(err) => return self.fail(id, reason_of(&err)),
            }
        }
        let Some(connection) = self.connection(id) else { return };
        let may_write = is_writable && connection.pending.is_empty();
        if is_readable {
            connection.is_drained = false;
            connection.is_read_closed |= is_read_closed;
            self.events.push_back(Event { id, what: What::Readable });
        }
        if may_write {
            self.events.push_back(Event { id, what: What::Writable });
        }
    }
}

impl ProxyLane for KernelLane {
    fn wait(&mut self, timeout: Duration) -> Result<()> {
        let has_more = self.paused_until.is_none() && self.accepts.contains(&true);
        let timeout = if has_more || !self.events.is_empty() { Duration::ZERO } else { timeout };
        match self.poll.poll(&mut self.ready, Some(timeout)) {
            Err(err) if err.kind() != io::ErrorKind::Interrupted => {
                return Err(err.into());
            }
            _ => {}
        }
        self.now = Time(self.start.elapsed().as_micros() as u64);
        let mut noticed = std::mem::take(&mut self.noticed);
        noticed.extend(self.ready.iter().map(|event| Noticed {
            token: event.token().0,
            is_readable: event.is_readable() || event.is_error(),
            is_read_closed: event.is_read_closed() || event.is_error(),
            is_writable: event.is_writable(),
        }));
        for noticed in noticed.drain(..) {
            let Some(listener) = noticed.token.checked_sub(LISTENERS) else {
                self.notice(&noticed);
                continue;
            };
            if let Some(accepts) = self.accepts.get_mut(listener) {
                *accepts = true;
            }
        }
        self.noticed = noticed;
        if self.paused_until.is_some_and(|until| until <= self.now) {
            self.paused_until = None;
        }
        for listener in 0..self.listeners.len() {
            if self.accepts[listener] && self.paused_until.is_none() {
                self.accept(listener);
            }
        }
        Ok(())
    }

    fn event(&mut self) -> Option<Event> {
        loop {
            let event = self.events.pop_front()?;
            // Not of connections that were closed since.
            if matches!(event.what, What::Closed(_)) || self.connection(event.id).is_some() {
                return Some(event);
            }
        }
    }

    fn connect(&mut self, server: SocketAddr) -> Result<Id> {
        let stream = TcpStream::connect(server)?;
        if let Some(algorithm) = self.server_congestion {
            set_congestion(&stream, algorithm)?;
        }
        Ok(self.add(stream, true)?)
    }

    fn forward(&mut self, from: Id, to: Id) -> usize {
        let mut moved = 0;
        loop {
            if self.connection(to).is_none_or(|to| !to.pending.is_empty() || to.shuts_down) {
                return moved;
            }
            let mut buffer = std::mem::take(&mut self.buffer);
            let step = self.forward_once(from, to, &mut buffer);
            self.buffer = buffer;
            match step {
                Ok((bytes, is_over)) => {
                    moved += bytes;
                    if is_over {
                        return moved;
                    }
                }
                Err((id, err)) => {
                    self.fail(id, reason_of(&err));
                    return moved;
                }
            }
        }
    }

    fn write(&mut self, id: Id, bytes: &[u8]) -> usize {
        let Some(connection) = self.connection(id).filter(|connection| connection.pending.is_empty()) else {
            return 0;
        };
        match write(&mut connection.stream, bytes) {
            Ok(written) => written,
            Err(err) => {
                self.fail(id, reason_of(&err));
                0
            }
        }
    }

    fn is_at_end(&mut self, id: Id) -> bool {
        self.connection(id).is_some_and(|connection| connection.is_at_end)
    }

    fn shutdown(&mut self, id: Id) {
        let Some(connection) = self.connection(id) else { return };
        connection.shuts_down = true;
        if let Err(err) = self.flush(id.index()) {
            self.fail(id, reason_of(&err));
        }
    }

    fn close(&mut self, id: Id) {
        let Some(connection) = self.connection(id) else { return };
        if connection.pending.is_empty() {
            self.remove(id.index());
        } else {
            connection.closes = true;
        }
    }

    fn abort(&mut self, id: Id) {
        let Some(connection) = self.connection(id) else { return };
        // Fails only for a connection that is over.
        _ = SockRef::from(&connection.stream).set_linger(Some(Duration::ZERO));
        self.remove(id.index());
    }

    fn addresses(&mut self, id: Id) -> Option<(SocketAddr, SocketAddr)> {
        let stream = &self.connection(id)?.stream;
        stream.local_addr().ok().zip(stream.peer_addr().ok())
    }

    fn stop_listening(&mut self) {
        self.listeners.clear();
        self.accepts.clear();
    }

    fn connections(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    fn now(&self) -> Time {
        self.now
    }

    fn stats(&self, put: &mut dyn FnMut(Stat)) {
        put(Stat::count("memory_full", self.memory_full));
        put(Stat::level("connections", self.slots.len() - self.free.len()));
        put(Stat::level("memory_used_bytes", self.pending_len));
        put(Stat::level("memory_max_bytes", self.pending_max));
    }
}

fn set_congestion(socket: &impl AsFd, algorithm: Algorithm) -> io::Result<()> {
    SockRef::from(socket).set_tcp_congestion(algorithm.kernel_name().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn congestion_control_is_set_for_listeners_and_checked_for_servers() {
        let mut lane = KernelLane::open(&[([127, 0, 0, 1], 0).into()]).unwrap();
        // Every kernel has this one, and allows it to everyone.
        lane.set_congestion(Some(Algorithm::NewReno), Some(Algorithm::NewReno)).unwrap();
        let set = SockRef::from(&lane.listeners[0]).tcp_congestion().unwrap();
        assert_eq!(set.split(|byte| *byte == 0).next(), Some(&b"reno"[..]));
        let peer = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let id = lane.connect(peer.local_addr().unwrap()).unwrap();
        let set = SockRef::from(&lane.connection(id).unwrap().stream).tcp_congestion().unwrap();
        assert_eq!(set.split(|byte| *byte == 0).next(), Some(&b"reno"[..]));
    }
}
