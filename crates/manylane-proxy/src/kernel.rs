//! Lanes on sockets of the kernel: where XDP cannot be had, and to compare. A listening socket for
//! each lane (`SO_REUSEPORT`), and one epoll instance.
//!
//! Bytes that are moved go through one buffer of the lane. What the other socket does not take is
//! kept with it, at most one such buffer for each connection, and nothing more is read meanwhile.

use std::collections::VecDeque;
use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr};
use std::time::{Duration, Instant};

use manylane::tcp::{Event, Id, Reason, Time, What};
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use crate::lane::{ProxyLane, Result};

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

/// A connection.
#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    is_connecting: bool,
    /// The peer has sent its last byte.
    is_at_end: bool,
    /// The end was told: the next reads go up to it.
    is_read_closed: bool,
    /// A read found nothing more.
    is_drained: bool,
    /// Bytes that the socket did not take.
    pending: Vec<u8>,
    /// To be shut down, or closed, once they are written.
    shuts_down: bool,
    closes: bool,
}

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
    start: Instant,
    now: Time,
    /// There may be connections to accept: at this listener.
    accepts: Vec<bool>,
    paused_until: Option<Time>,
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
            start: Instant::now(),
            now: Time(0),
            paused_until: None,
        })
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
        slot.connection = Some(Connection {
            stream,
            is_connecting,
            is_at_end: false,
            is_read_closed: false,
            is_drained: false,
            pending: Vec::new(),
            shuts_down: false,
            closes: false,
        });
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
            match flush(connection) {
                Ok(true) if connection.closes => return self.remove(index),
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

/// Writes what is pending. True if nothing is left.
fn flush(connection: &mut Connection) -> io::Result<bool> {
    while !connection.pending.is_empty() {
        match connection.stream.write(&connection.pending) {
            Ok(written) => {
                connection.pending.drain(..written);
            }
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
            Err(err) => return Err(err),
        }
    }
    if std::mem::take(&mut connection.shuts_down) {
        connection.stream.shutdown(Shutdown::Write)?;
    }
    Ok(true)
}

fn reason_of(err: &io::Error) -> Reason {
    match err.kind() {
        io::ErrorKind::ConnectionRefused => Reason::Refused,
        io::ErrorKind::TimedOut => Reason::TimedOut,
        io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => Reason::Unreachable,
        _ => Reason::Reset,
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
        Ok(TcpStream::connect(server).and_then(|stream| self.add(stream, true))?)
    }

    fn forward(&mut self, from: Id, to: Id) -> usize {
        let mut moved = 0;
        loop {
            if self.connection(to).is_none_or(|to| !to.pending.is_empty() || to.shuts_down) {
                return moved;
            }
            let mut buffer = std::mem::take(&mut self.buffer);
            let read = match self.connection(from) {
                Some(from) if !from.is_drained && !from.is_at_end => from.stream.read(&mut buffer),
                _ => Err(io::ErrorKind::WouldBlock.into()),
            };
            let mut failed = None;
            let mut is_over = false;
            match read {
                Ok(0) => {
                    is_over = true;
                    self.connection(from).into_iter().for_each(|from| from.is_at_end = true);
                }
                Ok(read) => {
                    moved += read;
                    // A short read has emptied the socket, and what comes later is told (epoll(7)).
                    if read < buffer.len()
                        && let Some(from) = self.connection(from).filter(|from| !from.is_read_closed)
                    {
                        is_over = true;
                        from.is_drained = true;
                    }
                    if let Some(to_connection) = self.connection(to) {
                        let written = write(&mut to_connection.stream, &buffer[..read]);
                        match written {
                            Ok(written) => to_connection.pending.extend_from_slice(&buffer[written..read]),
                            Err(err) => failed = Some((to, err)),
                        }
                    }
                }
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => is_over = true,
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                Err(err) => failed = Some((from, err)),
            }
            self.buffer = buffer;
            if let Some((id, err)) = failed {
                self.fail(id, reason_of(&err));
                return moved;
            }
            if is_over {
                return moved;
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
        if let Err(err) = flush(connection) {
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

    fn now(&self) -> Time {
        self.now
    }
}

/// Writes what the socket takes.
fn write(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < bytes.len() {
        match stream.write(&bytes[done..]) {
            Ok(written) => done += written,
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => break,
            Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
            Err(err) => return Err(err),
        }
    }
    Ok(done)
}
