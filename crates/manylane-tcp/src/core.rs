//! What a stack consists of, and what its parts use of each other.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;

use manylane_wire::tcp::HEADER_LEN;

use crate::config::Config;
use crate::congestion::NewController;
use crate::connection::{Need, Open, Phase};
use crate::counters::Counters;
use crate::endpoint::{Endpoint, Machine, UNKNOWN_ROUND_TRIP};
use crate::event::{Event, Id, Reason, What};
use crate::flow::Flow;
use crate::output::Output;
use crate::packet::{Control, ip_header_len};
use crate::secret::Secret;
use crate::table::Table;
use crate::time::Time;
use crate::time_wait::TimeWait;
use crate::wheel::Wheel;

/// The parts of a stack.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) config: Config,
    pub(crate) secret: Secret,
    pub(crate) counters: Counters,
    /// Highest number of a link that a packet came over.
    pub(crate) link_max: u16,
    pub(crate) table: Table,
    pub(crate) time_wait: TimeWait,
    /// Deadlines of connections, by their places.
    pub(crate) wheel: Wheel,
    pub(crate) machine: Machine,
    /// Addresses that connections are accepted to, and their congestion control.
    pub(crate) listeners: Vec<(SocketAddr, NewController)>,
    events: VecDeque<Event>,
    /// How many of them are of connections that the application has given up.
    forgotten: HashMap<Id, u32>,
    /// Places of connections that have something to send, or to look after.
    pub(crate) ready: Vec<u32>,
    /// Connections of peers whose handshake is not complete.
    pub(crate) backlog: usize,
    /// Until when cookies are accepted: they were given out.
    pub(crate) cookies_until: Option<Time>,
    /// Endpoints that no connection has, and how many there are in all. In boxes, so that a
    /// connection without one is small.
    #[expect(clippy::vec_box, reason = "they move between here and the connections")]
    pool: Vec<Box<Endpoint>>,
    endpoints: usize,
    /// Places of connections whose application waits for buffers, by need; some may have ended.
    waiting: [VecDeque<u32>; Need::ALL.len()],
}

impl Core {
    pub(crate) fn new(config: Config, secret: Secret, now: Time) -> Core {
        Core {
            table: Table::new(config.connections_max),
            time_wait: TimeWait::new(config.time_wait, config.time_wait_max),
            wheel: Wheel::new(now),
            machine: Machine::new(secret.seed()),
            listeners: Vec::new(),
            events: VecDeque::new(),
            forgotten: HashMap::new(),
            ready: Vec::new(),
            backlog: 0,
            cookies_until: None,
            pool: Vec::new(),
            endpoints: 0,
            waiting: Default::default(),
            counters: Counters::default(),
            link_max: 0,
            secret,
            config,
        }
    }

    /// Sends a segment without payload.
    pub(crate) fn send(&mut self, control: &Control, out: &mut impl Output) -> bool {
        let is_sent = control.send(out);
        *(if is_sent { &mut self.counters.segments_out } else { &mut self.counters.output_full }) += 1;
        is_sent
    }

    /// Tells the application what has happened to a connection, if it has not given it up.
    pub(crate) fn tell(&mut self, index: u32, what: What) {
        if matches!(self.table.phase(index), Some(Phase::Open(open)) if open.is_given_up()) {
            return;
        }
        if let Some(id) = self.table.id(index) {
            self.events.push_back(Event { id, what });
            if let Some(events) = self.table.events_mut(id) {
                *events += 1;
            }
        }
    }

    /// Takes the next event.
    pub(crate) fn event(&mut self) -> Option<Event> {
        while let Some(event) = self.events.pop_front() {
            if let Some(events) = self.table.events_mut(event.id) {
                *events -= 1;
                return Some(event);
            }
            // The connection has ended, or the application has given it up.
            let Entry::Occupied(mut left) = self.forgotten.entry(event.id) else { return Some(event) };
            *left.get_mut() -= 1;
            if *left.get() == 0 {
                left.remove();
            }
        }
        None
    }

    /// Makes the id of a connection invalid: the application has given it up. Its events are
    /// dropped when it is their turn: a search would cost more the more events there are.
    pub(crate) fn forget(&mut self, index: u32) {
        let Some(id) = self.table.id(index) else { return };
        let events = self.table.renew(index);
        if events > 0 {
            self.forgotten.insert(id, events);
        }
    }

    /// Notes that a connection has something to send, or to look after.
    pub(crate) fn mark_ready(&mut self, index: u32) {
        match self.table.phase_mut(index) {
            Some(Phase::Open(open)) if open.is_ready => return,
            Some(Phase::Open(open)) => open.is_ready = true,
            Some(Phase::Handshake(_)) => {}
            None => return,
        }
        self.ready.push(index);
    }

    /// Ends a connection. The application is told why, if it has not given it up.
    pub(crate) fn end(&mut self, index: u32, reason: Reason) {
        let is_told = match self.table.phase(index) {
            Some(Phase::Open(open)) => !open.is_given_up(),
            Some(Phase::Handshake(handshake)) => handshake.is_active,
            None => return,
        };
        if is_told {
            self.tell(index, What::Closed(reason));
        }
        self.remove(index);
    }

    /// Removes a connection, and the application is told nothing.
    pub(crate) fn remove(&mut self, index: u32) {
        self.wheel.cancel(index);
        match self.table.remove(&self.secret, index) {
            Some(Phase::Open(open)) => {
                match open.endpoint {
                    Some(endpoint) => self.give_back(endpoint),
                    // It may have been its turn to get buffers.
                    None if !self.pool.is_empty() => self.wake_waiting(),
                    None => {}
                }
            }
            Some(Phase::Handshake(handshake)) if !handshake.is_active => self.backlog -= 1,
            _ => {}
        }
    }

    /// Gives a connection a state machine and buffers, if it has none. False if none are left for
    /// this need.
    pub(crate) fn wake(&mut self, index: u32, need: Need, now: Time) -> bool {
        let may_take = self.may_take(need);
        let Some(Phase::Open(open)) = self.table.phase_mut(index) else { return false };
        if open.endpoint.is_some() {
            return true;
        }
        if need != Need::Input || may_take {
            open.need = need;
        }
        if !may_take {
            return false;
        }
        let mut endpoint = match self.pool.pop() {
            Some(endpoint) => endpoint,
            None => {
                self.endpoints += 1;
                Box::new(Endpoint::new(self.config.receive_buffer, self.config.send_buffer))
            }
        };
        let round_trip = open.sender.round_trip().unwrap_or(UNKNOWN_ROUND_TRIP);
        if !endpoint.open(&mut self.machine, &mut open.edge, now, round_trip) {
            self.pool.push(endpoint);
            return false;
        }
        open.endpoint = Some(endpoint);
        self.counters.buffers_taken += 1;
        true
    }

    /// Takes the state machine and the buffers of a connection that has nothing to do.
    pub(crate) fn rest(&mut self, index: u32) {
        if let Some(Phase::Open(Open { endpoint, .. })) = self.table.phase_mut(index)
            && let Some(endpoint) = endpoint.take()
        {
            self.give_back(endpoint);
        }
    }

    /// True if there are buffers for this need.
    pub(crate) fn may_take(&self, need: Need) -> bool {
        self.endpoints - self.pool.len() < need.share(self.config.buffers_max)
    }

    /// Takes an endpoint, and lets the first one in the queue try.
    fn give_back(&mut self, endpoint: Box<Endpoint>) {
        self.pool.push(endpoint);
        self.wake_waiting();
    }

    /// Lets the first one in the queue for buffers try.
    fn wake_waiting(&mut self) {
        for need in Need::ALL {
            if !self.may_take(need) {
                // Those before it have less.
                return;
            }
            while let Some(index) = self.waiting[need as usize].pop_front() {
                if let Some(Phase::Open(open)) = self.table.phase_mut(index)
                    && std::mem::take(&mut open.waits_for_buffers)
                    && open.endpoint.is_none()
                {
                    return self.mark_ready(index);
                }
            }
        }
    }

    /// Puts a connection into the queue for buffers: it is made ready once there are some.
    pub(crate) fn wait_for_buffers(&mut self, index: u32) {
        if let Some(Phase::Open(open)) = self.table.phase_mut(index)
            && !std::mem::replace(&mut open.waits_for_buffers, true)
        {
            self.waiting[open.need as usize].push_back(index);
        }
    }

    /// Largest payload of a segment without options that we take and send.
    pub(crate) fn own_mss(&self, flow: &Flow) -> u16 {
        let headers = ip_header_len(flow) + HEADER_LEN;
        self.config.mtu.saturating_sub(u16::try_from(headers).unwrap_or(u16::MAX))
    }

    /// Shift of our windows: the least that lets one say the size of the buffer.
    pub(crate) fn own_shift(&self) -> u8 {
        let bits = usize::BITS - self.config.receive_buffer.leading_zeros();
        u8::try_from(bits.saturating_sub(16)).unwrap_or(0)
    }

    /// The window of a SYN, which is not shifted.
    pub(crate) fn first_window(&self) -> u16 {
        u16::try_from(self.config.receive_buffer).unwrap_or(u16::MAX)
    }

    /// The congestion control of connections to this address, if they are accepted.
    pub(crate) fn listener(&self, local: SocketAddr) -> Option<NewController> {
        let accepts = |listener: &SocketAddr| {
            listener.port() == local.port()
                && listener.is_ipv4() == local.is_ipv4()
                && (listener.ip().is_unspecified() || listener.ip() == local.ip())
        };
        self.listeners.iter().find(|(listener, _)| accepts(listener)).map(|(_, controller)| *controller)
    }

    /// Buffers that are used now, and that there are.
    pub(crate) fn buffers(&self) -> (usize, usize) {
        (self.endpoints - self.pool.len(), self.endpoints)
    }
}
