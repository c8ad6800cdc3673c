//! The sessions of one lane: a client's connection, and the one to a server.
//!
//! | state | event | then |
//! |---|---|---|
//! | - | accepted | within the limits, and a server is up: connecting; else a reset |
//! | connecting | connected | the PROXY header, if asked for, then what the client has sent: open |
//! | connecting | closed, or the connect timeout | another server, up to three; then a reset |
//! | open | readable, or writable on the other side | bytes are moved |
//! | open | one side is at its end | the other side is shut down: half-closed |
//! | half-closed | the other side is at its end, too | both are closed |
//! | open, half-closed | one side is closed | the other one, too: in order, or by a reset |
//! | any | no bytes for the timeout | both get a reset |

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use manylane::tcp::{Event, Id, Reason, Time, What};
use manylane_tcp::wheel::Wheel;

use crate::balance::Balancer;
use crate::counters::{LaneCounters, add};
use crate::lane::{ProxyLane, Result};
use crate::limits::Refused;
use crate::maglev::Lookup;
use crate::servers::Server;
use crate::settings::{Settings, Shared};
use crate::stats::{Schedule, StackStats};

/// Servers that are tried for a connection.
const TRIES_MAX: usize = 3;

/// A side of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Client,
    Server,
}

/// Why a session has ended, for the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Finished,
    ClientGone,
    ServerGone,
    NoServer,
    Idle,
    CutOff,
}

#[derive(Debug)]
struct Session {
    client: Id,
    client_addr: SocketAddr,
    /// The address that it has connected to.
    local_addr: SocketAddr,
    /// The connection to the server, once it is asked for.
    server: Option<(Id, Arc<Server>)>,
    /// The servers that were tried, the last one among them.
    tried: [Option<SocketAddr>; TRIES_MAX],
    is_connected: bool,
    /// The rest of the header that there was no room for.
    header: Vec<u8>,
    /// The side has sent its last byte, and the other one has been told.
    is_client_done: bool,
    is_server_done: bool,
    /// When bytes were moved last.
    active: Time,
}

/// Which session and which side a connection is of.
#[derive(Clone, Copy, Debug)]
struct Place {
    id: Id,
    session: u32,
    side: Side,
}

/// The proxy of one lane.
pub struct Proxy<L> {
    lane: L,
    shared: Arc<Shared>,
    settings: Arc<Settings>,
    generation: u64,
    counters: Arc<LaneCounters>,
    stack_stats: Arc<StackStats>,
    publishing: Schedule,
    balancer: Balancer,
    sessions: Vec<Option<Session>>,
    free: Vec<u32>,
    /// By the index of connections.
    places: Vec<Option<Place>>,
    deadlines: Wheel,
    open: usize,
    /// When sessions that are still open are cut off.
    ends: Option<Time>,
}

/// A timeout, after which a lane looks whether it is to stop.
const TICK: Duration = Duration::from_millis(100);

impl<L: ProxyLane> Proxy<L> {
    /// The proxy of a lane that listens.
    pub fn new(lane: L, shared: Arc<Shared>, counters: Arc<LaneCounters>) -> Self {
        let now = lane.now();
        let generation = shared.generation();
        let settings = shared.settings();
        let balancer = Balancer::new(settings.options.balance);
        Self {
            stack_stats: Arc::new(StackStats::new(|put| lane.stats(put))),
            publishing: Schedule::new(now),
            lane,
            shared,
            settings,
            generation,
            counters,
            balancer,
            sessions: Vec::new(),
            free: Vec::new(),
            places: Vec::new(),
            deadlines: Wheel::new(now),
            open: 0,
            ends: None,
        }
    }

    /// What its stack counts, for other threads.
    #[must_use]
    pub fn stack_stats(&self) -> Arc<StackStats> {
        Arc::clone(&self.stack_stats)
    }

    /// Serves until the proxy is stopped and the last session has ended, or the drain timeout is
    /// over.
    ///
    /// # Errors
    /// If the lane cannot wait.
    pub fn run(&mut self) -> Result<()> {
        self.stack_stats.set_thread();
        while self.turn()? {}
        self.stack_stats.publish(|put| self.lane.stats(put));
        Ok(())
    }

    /// Waits once, and does what is to be done. False when it has ended.
    fn turn(&mut self) -> Result<bool> {
        let now = self.lane.now();
        let timeout = self.deadlines.next().map_or(TICK, |next| next.since(now).min(TICK));
        self.lane.wait(timeout)?;
        let generation = self.shared.generation();
        if generation != self.generation {
            self.generation = generation;
            self.settings = self.shared.settings();
            self.balancer = Balancer::new(self.settings.options.balance);
        }
        while let Some(event) = self.lane.event() {
            self.handle(event);
        }
        let now = self.lane.now();
        self.publishing.publish(now, &self.stack_stats, |put| self.lane.stats(put));
        while let Some(session) = self.deadlines.pop(now) {
            self.expire(session, now);
        }
        if self.ends.is_none() && self.shared.is_stopping() {
            self.lane.stop_listening();
            self.ends = Some(now + self.settings.options.drain_timeout);
        }
        let Some(ends) = self.ends else { return Ok(true) };
        if now >= ends {
            for session in 0..self.sessions.len() {
                self.end(session as u32, End::CutOff, true);
            }
        }
        // What was written to connections that are closed is still on its way.
        if self.open > 0 || self.lane.connections() > 0 && now < ends {
            return Ok(true);
        }
        // Resets are still to be sent.
        self.lane.wait(Duration::ZERO)?;
        Ok(false)
    }

    fn handle(&mut self, event: Event) {
        if event.what == What::Accepted {
            return self.accept(event.id);
        }
        let place = self.places.get(event.id.index()).copied().flatten().filter(|place| place.id == event.id);
        let Some(Place { session, side, .. }) = place else { return };
        match event.what {
            What::Accepted => {}
            What::Connected => self.connected(session),
            What::Readable => self.pump(session, side),
            What::Writable => {
                self.pump(session, if side == Side::Client { Side::Server } else { Side::Client });
            }
            What::Closed(reason) => self.closed(session, side, reason),
        }
    }

    fn accept(&mut self, client: Id) {
        add(&self.counters.accepted, 1);
        let Some((local_addr, client_addr)) = self.lane.addresses(client) else {
            return add(&self.counters.client_gone, 1);
        };
        if let Err(refused) = self.shared.limits().admit(client_addr.ip()) {
            self.lane.abort(client);
            return match refused {
                Refused::Limit => add(&self.counters.over_limit, 1),
                Refused::SourceLimit => add(&self.counters.over_source_limit, 1),
            };
        }
        let session = Session {
            client,
            client_addr,
            local_addr,
            server: None,
            tried: [None; TRIES_MAX],
            is_connected: false,
            header: Vec::new(),
            is_client_done: false,
            is_server_done: false,
            active: self.lane.now(),
        };
        let at = match self.free.pop() {
            Some(at) => at,
            None => {
                self.sessions.push(None);
                (self.sessions.len() - 1) as u32
            }
        };
        self.sessions[at as usize] = Some(session);
        self.open += 1;
        add(&self.counters.open, 1);
        self.set_place(client, at, Side::Client);
        self.connect(at);
    }

    /// Connects to a server that was not tried yet.
    fn connect(&mut self, at: u32) {
        let settings = Arc::clone(&self.settings);
        loop {
            let Some(session) = self.sessions.get_mut(at as usize).and_then(Option::as_mut) else { return };
            let client = Lookup::Client(session.client_addr);
            let tried: Vec<SocketAddr> = session.tried.iter().copied().flatten().collect();
            let chosen = session.tried.get_mut(tried.len()).and_then(|place| {
                let chosen = self.balancer.choose(&settings.servers, client, &tried)?;
                let server = settings.servers.all().get(chosen)?;
                *place = Some(server.address);
                Some(server)
            });
            let Some(server) = chosen else { return self.end(at, End::NoServer, true) };
            match self.lane.connect(server.address) {
                Ok(id) => {
                    server.add_connection();
                    session.server = Some((id, Arc::clone(server)));
                    self.set_place(id, at, Side::Server);
                    return self.deadlines.set(at, self.lane.now() + settings.options.connect_timeout);
                }
                Err(err) => {
                    add(&self.counters.connect_failed, 1);
                    log::debug!("cannot connect to {}: {err}", server.address);
                }
            }
        }
    }

    /// The connection to the server failed, or takes too long.
    fn connect_failed(&mut self, at: u32) {
        add(&self.counters.connect_failed, 1);
        self.remove_server(at, false);
        self.connect(at);
    }

    fn connected(&mut self, at: u32) {
        let now = self.lane.now();
        let Some(session) = self.sessions.get_mut(at as usize).and_then(Option::as_mut) else { return };
        add(&self.counters.connected, 1);
        session.is_connected = true;
        session.active = now;
        if let Some(header) = self.settings.options.header {
            session.header = header.encode(session.client_addr, session.local_addr);
        }
        self.deadlines.set(at, now + self.settings.options.idle_timeout);
        self.pump(at, Side::Client);
    }

    /// Moves what one side has sent to the other one.
    fn pump(&mut self, at: u32, from: Side) {
        let Some(session) = self.sessions.get_mut(at as usize).and_then(Option::as_mut) else { return };
        let Some((server, _)) = session.server.as_ref().filter(|_| session.is_connected) else { return };
        let (source, target, counter) = match from {
            Side::Client => (session.client, *server, &self.counters.bytes_to_servers),
            Side::Server => (*server, session.client, &self.counters.bytes_to_clients),
        };
        if from == Side::Client && !session.header.is_empty() {
            let written = self.lane.write(target, &session.header);
            session.header.drain(..written);
            if !session.header.is_empty() {
                return;
            }
        }
        let moved = self.lane.forward(source, target);
        if moved > 0 {
            session.active = self.lane.now();
            add(counter, moved as u64);
        }
        let is_done = match from {
            Side::Client => &mut session.is_client_done,
            Side::Server => &mut session.is_server_done,
        };
        if *is_done || !self.lane.is_at_end(source) {
            return;
        }
        *is_done = true;
        let are_both_done = session.is_client_done && session.is_server_done;
        if are_both_done {
            return self.end(at, End::Finished, false);
        }
        self.lane.shutdown(target);
        self.deadlines.set(at, self.lane.now() + self.settings.options.half_closed_timeout);
    }

    /// One side is over.
    fn closed(&mut self, at: u32, side: Side, reason: Reason) {
        let Some(session) = self.sessions.get(at as usize).and_then(Option::as_ref) else { return };
        match (side, reason) {
            (Side::Server, _) if !session.is_connected => self.connect_failed(at),
            // Both directions of it have ended in order: so do those of the other side.
            (_, Reason::Finished) => self.end(at, End::Finished, false),
            (Side::Client, _) => self.end(at, End::ClientGone, true),
            (Side::Server, _) => self.end(at, End::ServerGone, true),
        }
    }

    /// The deadline of a session.
    fn expire(&mut self, at: u32, now: Time) {
        let Some(session) = self.sessions.get(at as usize).and_then(Option::as_ref) else { return };
        if !session.is_connected {
            return self.connect_failed(at);
        }
        let is_half_closed = session.is_client_done || session.is_server_done;
        let options = &self.settings.options;
        let timeout = if is_half_closed { options.half_closed_timeout } else { options.idle_timeout };
        let deadline = session.active + timeout;
        if deadline > now {
            self.deadlines.set(at, deadline);
        } else {
            self.end(at, End::Idle, true);
        }
    }

    /// Ends a session, by resets or in order.
    fn end(&mut self, at: u32, end: End, by_reset: bool) {
        if self.sessions.get(at as usize).is_none_or(Option::is_none) {
            return;
        }
        self.remove_server(at, !by_reset);
        let Some(session) = self.sessions.get_mut(at as usize).and_then(Option::take) else { return };
        self.deadlines.cancel(at);
        self.free.push(at);
        self.open -= 1;
        self.remove_place(session.client);
        if by_reset {
            self.lane.abort(session.client);
        } else {
            self.lane.close(session.client);
        }
        self.shared.limits().release(session.client_addr.ip());
        let counters = &self.counters;
        counters.open.store(self.open as u64, Ordering::Relaxed);
        let counter: &AtomicU64 = match end {
            End::Finished => &counters.finished,
            End::ClientGone => &counters.client_gone,
            End::ServerGone => &counters.server_gone,
            End::NoServer => &counters.no_server,
            End::Idle => &counters.idle,
            End::CutOff => &counters.cut_off,
        };
        add(counter, 1);
    }

    /// Is done with the connection to the server, if there is one.
    fn remove_server(&mut self, at: u32, in_order: bool) {
        let Some(session) = self.sessions.get_mut(at as usize).and_then(Option::as_mut) else { return };
        let is_connected = session.is_connected;
        let Some((id, server)) = session.server.take() else { return };
        server.remove_connection();
        self.remove_place(id);
        if in_order && is_connected {
            self.lane.close(id);
        } else {
            self.lane.abort(id);
        }
    }

    fn set_place(&mut self, id: Id, session: u32, side: Side) {
        if self.places.len() <= id.index() {
            self.places.resize(id.index() + 1, None);
        }
        self.places[id.index()] = Some(Place { id, session, side });
    }

    fn remove_place(&mut self, id: Id) {
        if let Some(place) = self.places.get_mut(id.index())
            && place.is_some_and(|place| place.id == id)
        {
            *place = None;
        }
    }
}
