//! The sessions of one thread, each with a socket to its server.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use manylane::Outbox;
use manylane::tcp::Time;
use manylane_sys::epoll::Epoll;
use manylane_tcp::wheel::Wheel;

use super::counters::UdpLaneCounters;
use super::key::{Route, SessionKey};
use super::server_socket::{Sent, connect, send};
use crate::balance::Balancer;
use crate::counters::add;
use crate::limits::Refused;
use crate::servers::Server;
use crate::settings::{Settings, Shared};

/// Servers that are tried for a datagram.
const TRIES_MAX: usize = 3;
/// Answers that are read of a session before others have their turn.
const READS_MAX: usize = 32;
/// More than any datagram has.
const BUFFER_LEN: usize = 65_536;

/// Why a session has ended, for the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Finished,
    Idle,
    Refused,
    CutOff,
}

/// One of the counters of a lane.
type Counter = fn(&UdpLaneCounters) -> &AtomicU64;

/// Why there is no session for a datagram.
enum NotOpened {
    Dropped(Counter),
    /// No descriptor, port or route for a socket to this server.
    NoSocket(SocketAddr),
}

#[derive(Debug)]
struct Session {
    key: SessionKey,
    /// Of the last datagram of the client.
    route: Route,
    /// The source that it is counted for.
    source: IpAddr,
    server: Arc<Server>,
    socket: UdpSocket,
    /// Answers that are due.
    pending: u32,
    /// When the last datagram passed.
    active: Time,
}

/// The sessions of one thread.
pub(super) struct Sessions {
    shared: Arc<Shared>,
    settings: Arc<Settings>,
    generation: u64,
    counters: Arc<UdpLaneCounters>,
    balancer: Balancer,
    slots: Vec<Option<Session>>,
    free: Vec<u32>,
    by_key: HashMap<SessionKey, u32>,
    deadlines: Wheel,
    buffer: Box<[u8]>,
    /// When a datagram passed last.
    active: Time,
    is_stopping: bool,
}

impl Sessions {
    pub(super) fn new(shared: Arc<Shared>, counters: Arc<UdpLaneCounters>) -> Self {
        let generation = shared.generation();
        let settings = shared.settings();
        let balancer = Balancer::new(settings.options.balance);
        Self {
            shared,
            settings,
            generation,
            counters,
            balancer,
            slots: Vec::new(),
            free: Vec::new(),
            by_key: HashMap::new(),
            deadlines: Wheel::new(Time(0)),
            buffer: vec![0; BUFFER_LEN].into(),
            active: Time(0),
            is_stopping: false,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// When a datagram passed last.
    pub(super) fn active(&self) -> Time {
        self.active
    }

    /// The time of the next [`expire`](Self::expire).
    pub(super) fn next_deadline(&self) -> Option<Time> {
        self.deadlines.next()
    }

    /// Follows changes of the settings.
    pub(super) fn refresh(&mut self) -> &Settings {
        let generation = self.shared.generation();
        if generation != self.generation {
            self.generation = generation;
            self.settings = self.shared.settings();
            self.balancer = Balancer::new(self.settings.options.balance);
        }
        &self.settings
    }

    /// Opens no more sessions.
    pub(super) fn stop(&mut self) {
        self.is_stopping = true;
    }

    /// Sends a client's datagram to the server of its session, which may be a new one.
    pub(super) fn forward(
        &mut self,
        epoll: &Epoll,
        key: SessionKey,
        route: Route,
        payload: &[u8],
        now: Time,
    ) {
        let mut tried = Tried::default();
        let mut failed: Counter = |counters| &counters.no_server;
        while tried.len < TRIES_MAX {
            let at = match self.by_key.get(&key) {
                Some(at) => *at,
                None => match self.open(epoll, key, route, &tried, now) {
                    Ok(at) => at,
                    Err(NotOpened::Dropped(reason)) => return add(reason(&self.counters), 1),
                    Err(NotOpened::NoSocket(server)) => {
                        tried.add(server);
                        failed = |counters| &counters.no_socket;
                        continue;
                    }
                },
            };
            let Some(session) = self.slots.get_mut(at as usize).and_then(Option::as_mut) else { break };
            let counter = match send(&session.socket, payload) {
                Sent::Done => {
                    session.route = route;
                    session.active = now;
                    let answers = self.settings.options.answers.map_or(0, u32::from);
                    session.pending = session.pending.saturating_add(answers);
                    self.active = now;
                    add(&self.counters.bytes_to_servers, payload.len() as u64);
                    &self.counters.forwarded
                }
                Sent::BufferFull => &self.counters.buffer_full,
                Sent::Failed => &self.counters.send_failed,
                Sent::Refused => {
                    tried.add(session.server.address);
                    self.end_refused(at);
                    continue;
                }
            };
            return add(counter, 1);
        }
        add(failed(&self.counters), 1);
    }

    /// Opens a session, with a server that was not tried if there is one.
    fn open(
        &mut self,
        epoll: &Epoll,
        key: SessionKey,
        route: Route,
        tried: &Tried,
        now: Time,
    ) -> Result<u32, NotOpened> {
        if self.is_stopping {
            return Err(NotOpened::Dropped(|counters| &counters.stopping));
        }
        let source = route.client.ip().to_canonical();
        self.shared.limits().admit(source).map_err(|refused| match refused {
            Refused::Limit => NotOpened::Dropped(|counters| &counters.over_limit),
            Refused::SourceLimit => NotOpened::Dropped(|counters| &counters.over_source_limit),
        })?;
        let servers = &self.settings.servers;
        // One that has refused an earlier datagram may take this one, if there is no other.
        let chosen = self
            .balancer
            .choose(servers, key.lookup(), tried.addresses())
            .or_else(|| self.balancer.choose(servers, key.lookup(), &[]));
        let Some(server) = chosen.and_then(|chosen| servers.all().get(chosen)) else {
            self.shared.limits().release(source);
            return Err(NotOpened::Dropped(|counters| &counters.no_server));
        };
        let server = Arc::clone(server);
        let at = self.free.pop().unwrap_or(self.slots.len() as u32);
        let connected = connect(server.address);
        let watched = connected.and_then(|socket| epoll.add(&socket, at.into()).map(|()| socket));
        let socket = match watched {
            Ok(socket) => socket,
            Err(err) => {
                log::debug!("no socket to {}: {err}", server.address);
                if (at as usize) < self.slots.len() {
                    self.free.push(at);
                }
                self.shared.limits().release(source);
                return Err(NotOpened::NoSocket(server.address));
            }
        };
        server.add_connection();
        let session = Session { key, route, source, server, socket, pending: 0, active: now };
        match self.slots.get_mut(at as usize) {
            Some(slot) => *slot = Some(session),
            None => self.slots.push(Some(session)),
        }
        self.by_key.insert(key, at);
        self.deadlines.set(at, now + self.settings.options.idle_timeout);
        add(&self.counters.sessions, 1);
        self.count_open();
        Ok(at)
    }

    /// Reads the answers of a session whose client is at this lane, and queues them for it. Returns
    /// how many.
    pub(super) fn read_answers(&mut self, at: u32, lane: usize, out: &mut Outbox<'_>, now: Time) -> u64 {
        let mut answers = 0;
        let Some(session) = self.slots.get_mut(at as usize).and_then(Option::as_mut) else { return 0 };
        if session.route.lane != lane {
            return 0;
        }
        for _ in 0..READS_MAX {
            match session.socket.recv(&mut self.buffer) {
                Ok(len) => {
                    let Some(payload) = self.buffer.get(..len) else { break };
                    match session.route.local {
                        Some(local) => out.send_from(local, session.route.client, payload),
                        None => out.send_to(session.route.client, payload),
                    }
                    if answers == 0 {
                        self.settings.servers.record_answer(&session.server);
                    }
                    answers += 1;
                    (session.active, self.active) = (now, now);
                    add(&self.counters.answers, 1);
                    add(&self.counters.bytes_to_clients, len as u64);
                    if session.pending == 1 {
                        self.end(at, End::Finished);
                        break;
                    }
                    session.pending = session.pending.saturating_sub(1);
                }
                Err(err) if err.kind() == ErrorKind::ConnectionRefused => {
                    self.end_refused(at);
                    break;
                }
                Err(err) if err.kind() == ErrorKind::WouldBlock => break,
                // Another report of an earlier datagram, such as that it was too long for the path.
                Err(_) => {}
            }
        }
        answers
    }

    /// Ends sessions without datagrams for the idle timeout.
    pub(super) fn expire(&mut self, now: Time) {
        let idle_timeout = self.settings.options.idle_timeout;
        while let Some(at) = self.deadlines.pop(now) {
            let Some(session) = self.slots.get(at as usize).and_then(Option::as_ref) else { continue };
            let deadline = session.active + idle_timeout;
            if deadline > now {
                self.deadlines.set(at, deadline);
            } else {
                self.end(at, End::Idle);
            }
        }
    }

    /// Ends all sessions: those without datagrams since `quiet_since` are idle, others are cut off.
    pub(super) fn end_all(&mut self, quiet_since: Time) {
        for at in 0..self.slots.len() {
            let Some(session) = self.slots.get(at).and_then(Option::as_ref) else { continue };
            let end = if session.active <= quiet_since { End::Idle } else { End::CutOff };
            self.end(at as u32, end);
        }
    }

    /// The server has refused a datagram. Its session ends, so that the client's next datagram
    /// gets another server as soon as this one is out.
    fn end_refused(&mut self, at: u32) {
        if let Some(session) = self.slots.get(at as usize).and_then(Option::as_ref)
            && self.settings.options.takes_out_refusing
        {
            self.settings.servers.record_refusal(&session.server);
        }
        self.end(at, End::Refused);
    }

    /// Ends a session. Closing its socket takes it out of the epoll instance.
    fn end(&mut self, at: u32, end: End) {
        let Some(session) = self.slots.get_mut(at as usize).and_then(Option::take) else { return };
        self.by_key.remove(&session.key);
        self.deadlines.cancel(at);
        self.free.push(at);
        session.server.remove_connection();
        self.shared.limits().release(session.source);
        let counters = &self.counters;
        let counter = match end {
            End::Finished => &counters.finished,
            End::Idle => &counters.idle,
            End::Refused => &counters.refused,
            End::CutOff => &counters.cut_off,
        };
        add(counter, 1);
        self.count_open();
    }

    fn count_open(&self) {
        self.counters.open.store(self.by_key.len() as u64, Ordering::Relaxed);
    }
}

/// The servers that were tried for one datagram.
#[derive(Debug)]
struct Tried {
    addresses: [SocketAddr; TRIES_MAX],
    len: usize,
}

impl Default for Tried {
    fn default() -> Tried {
        Tried { addresses: [SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0); TRIES_MAX], len: 0 }
    }
}

impl Tried {
    fn add(&mut self, address: SocketAddr) {
        if let Some(place) = self.addresses.get_mut(self.len) {
            *place = address;
            self.len += 1;
        }
    }

    fn addresses(&self) -> &[SocketAddr] {
        self.addresses.get(..self.len).unwrap_or_default()
    }
}
