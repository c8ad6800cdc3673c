//! One lease: requested, granted, opened and closed, ended.
//!
//! Nothing that a program sends is trusted except its request. The kernel reports where its socket
//! is bound, and whether it is the only one there: when a lease begins, before a port is
//! redirected to it, and a few times a second after that ([`LeaseTable::check_sockets`]).

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use manylane_ipc::lease::{self, Message};
use manylane_sys::bound_sockets::BoundSockets;
use manylane_sys::errno::{ENODEV, ENOSPC, EPROTO};
use manylane_sys::{barrier, netns};

use super::connection::{Client, RequestedSocket};
use super::devices::{Availability, LeasedDevice, Member};
use super::lease::{Lease, Stage, verify_binding};
use super::peers::LeaseNextHops;
use crate::error::{Error, Result};
use crate::io::filter::{FilterHandle, SocketIndex};
use crate::io::xdp::checks;
use crate::io::xdp::ports::Ports;
use crate::io::xdp::route::Routes;

/// A lease ends if the state of its socket has been unknown for this long.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);

/// Queues that can be leased to a socket.
pub(super) struct Offer {
    addr: SocketAddr,
    cookie: u64,
    only_v6: bool,
    /// Indices of devices, and numbers of prepared queues.
    queues: Vec<(usize, u32)>,
    next_hops: LeaseNextHops,
}

/// All leases, and the devices whose queues they are.
pub(super) struct LeaseTable {
    pub(super) devices: Vec<LeasedDevice>,
    pub(super) routes: Arc<Routes>,
    sockets: BoundSockets,
    /// The network namespace of the devices.
    namespace: u64,
    pub(super) leases: Vec<Lease>,
    last_number: u16,
    pub(super) filter: FilterHandle,
}

impl LeaseTable {
    /// A table without leases. Fails if the kernel cannot say where a socket is bound.
    pub(super) fn new(devices: Vec<LeasedDevice>, routes: Arc<Routes>) -> Result<Self> {
        let namespace = netns::cookie().map_err(|err| {
            Error::system("reading the cookie of the network namespace (needs Linux 5.14)", err)
        })?;
        let mut sockets = BoundSockets::default();
        sockets
            .find_by_port(1)
            .map_err(|err| Error::system("listing UDP sockets (needs CONFIG_INET_UDP_DIAG)", err))?;
        let (leases, filter) = (Vec::new(), FilterHandle::default());
        Ok(Self { devices, routes, sockets, namespace, leases, last_number: 0, filter })
    }

    /// Opens the queues that a socket bound to a wildcard address would get. A program requests
    /// queues under traffic, when its second datagram has come; what arrives until it has them
    /// waits in the receive buffer of its socket.
    pub(super) fn open_in_advance(&mut self) {
        let mut left = lease::QUEUES_MAX;
        for leased in &mut self.devices {
            for queue in (0..leased.device.queues()).take(left) {
                leased.open_in_advance(queue);
                left -= 1;
            }
        }
    }

    /// Finds queues that can be leased to a socket. For a client that `waits`, the error
    /// `WouldBlock` means that more will be available in a moment.
    pub(super) fn offer(
        &mut self,
        client: &Client,
        socket: RequestedSocket,
        waits: bool,
    ) -> io::Result<Offer> {
        let refused = io::Error::from_raw_os_error;
        let RequestedSocket { info: about, addr } = socket;
        if !about.is_udp || about.namespace != self.namespace {
            return Err(refused(ENODEV));
        }
        if let Err(why) = verify_binding(about.cookie, addr.ip(), &self.sockets.find_by_port(addr.port())?) {
            log::warn!("no queues for {addr}: {why}");
            return Err(refused(ENODEV));
        }
        let all = self.routes.local_addresses();
        let wanted = addr.ip().to_canonical();
        let (mut is_reached, mut is_late) = (false, false);
        let mut queues = Vec::new();
        let in_use = |(_, leased): &(usize, &mut LeasedDevice)| !leased.device.is_gone();
        for (place, leased) in self.devices.iter_mut().enumerate().filter(in_use) {
            // Any device can receive for a wildcard address; for a specific one, only the devices
            // that have it.
            let index = leased.device.index;
            if !wanted.is_unspecified() && !all.iter().any(|(at, ip)| (*at, *ip) == (index, wanted)) {
                continue;
            }
            is_reached = true;
            for queue in 0..leased.device.queues() {
                if queues.len() == lease::QUEUES_MAX {
                    break;
                }
                match leased.prepare(queue, &client.process) {
                    Availability::Available => queues.push((place, queue)),
                    Availability::Unavailable => {}
                    Availability::Pending => is_late = true,
                }
            }
        }
        if is_late && waits {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        if queues.is_empty() {
            return Err(refused(if is_reached { ENOSPC } else { ENODEV }));
        }
        Ok(Offer {
            addr,
            cookie: about.cookie,
            only_v6: about.only_v6,
            queues,
            next_hops: LeaseNextHops::new(self.routes.reader())?,
        })
    }

    /// Starts a lease with an offer, and sends it.
    pub(super) fn start(&mut self, client: Client, offer: Offer) {
        let Offer { addr, cookie, only_v6, queues, next_hops: hops } = offer;
        let (numbers, members) = (Vec::new(), Vec::new());
        let mut lease = Lease {
            number: self.alloc_number(),
            client,
            addr,
            cookie,
            only_v6,
            verified: Instant::now(),
            stage: Stage::Leased,
            socket_indexes: numbers,
            members,
            next_hops: hops,
        };
        for of_device in queues.chunk_by(|one, other| one.0 == other.0) {
            self.add_queues(&mut lease, of_device);
        }
        let given = if lease.members.is_empty() {
            lease.client.refuse(ENOSPC);
            false
        } else {
            self.send_lease(&lease).is_ok()
        };
        if !given {
            self.end(lease);
        } else {
            log::debug!("leased {} queues to {addr}", lease.members.len());
            self.leases.push(lease);
        }
    }

    /// Adds queues of one device to a lease.
    fn add_queues(&mut self, lease: &mut Lease, queues: &[(usize, u32)]) {
        let Some(leased) = queues.first().and_then(|(place, _)| self.devices.get_mut(*place)) else { return };
        let Ok(number) = leased.device.register(&[]) else { return };
        if let Err(err) = self.filter.attach(&leased.device.filters, number) {
            log::warn!("cannot lease queues of {}: {}", leased.device.name, err.chain());
            return leased.device.unregister(number);
        }
        let before = lease.members.len();
        for (_, queue) in queues {
            match leased.add_member(*queue, number, lease.number) {
                Ok(member) => lease.members.extend(member),
                Err(why) => log::warn!("cannot lease {} queue {queue}: {}", leased.device.name, why.chain()),
            }
        }
        if lease.members.len() == before {
            self.filter.detach(&leased.device.filters, number);
            leased.device.unregister(number);
        } else {
            lease.socket_indexes.push((leased.device.index, number));
        }
    }

    /// Sends the lease's descriptors to the program.
    fn send_lease(&self, lease: &Lease) -> io::Result<()> {
        let end = lease.client.connection.as_fd();
        Message::Granted(lease.members.len() as u32).send(end, &[lease.next_hops.file()])?;
        for Member { params: terms, xsk, .. } in &lease.members {
            let leased = self.devices.iter().find(|leased| leased.device.index == terms.ifindex);
            let file = leased.and_then(|leased| leased.file(terms.queue)).ok_or(io::ErrorKind::NotFound)?;
            Message::Queue(*terms).send(end, &[xsk.as_fd(), file])?;
        }
        Ok(())
    }

    /// The index of the lease whose client has this token.
    pub(super) fn find(&self, token: u64) -> Option<usize> {
        self.leases.iter().position(|lease| lease.client.token == token)
    }

    /// Handles a message of a lease's client, or its disconnect. A message that is invalid in the
    /// lease's stage ends the lease.
    pub(super) fn handle_request(&mut self, at: usize) {
        let lease = &self.leases[at];
        let request = match Message::receive_without_fds(lease.client.connection.as_fd()) {
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => return,
            request => request.ok().flatten(),
        };
        let answer = match (lease.stage, request) {
            (Stage::Leased, Some(Message::Open)) if self.is_awaiting_reply(at) => self.open_lease(at),
            (Stage::Open, Some(Message::Close)) => {
                self.close_lease(at);
                Message::Closed
            }
            _ => return self.end_at(at),
        };
        // A client that does not receive the answer loses its lease.
        if answer.send(self.leases[at].client.connection.as_fd(), &[]).is_err() {
            self.end_at(at);
        }
    }

    /// True if the client has sent nothing since its command, and has not closed the connection.
    /// Otherwise it has given up, and would not receive the frames of queues that are opened now.
    fn is_awaiting_reply(&self, at: usize) -> bool {
        let next = Message::peek(self.leases[at].client.connection.as_fd());
        next.is_err_and(|err| err.kind() == io::ErrorKind::WouldBlock)
    }

    fn open_lease(&mut self, at: usize) -> Message {
        let lease = &mut self.leases[at];
        let stands = self
            .sockets
            .find_by_port(lease.addr.port())
            .map_or(Err("the kernel does not list its sockets"), |all| {
                verify_binding(lease.cookie, lease.addr.ip(), &all)
            });
        lease.stage = Stage::Open;
        let led = match stands {
            Ok(()) => self.bind_addresses(&self.leases[at]).map_err(|err| err.chain().to_string()),
            Err(why) => Err(why.to_owned()),
        };
        let Err(why) = led else { return Message::Opened };
        log::warn!("{} gets no datagrams from its queues: {why}", self.leases[at].addr);
        self.close_lease(at);
        Message::Refused(EPROTO)
    }

    /// Stops redirecting frames to a lease, for good.
    fn close_lease(&mut self, at: usize) {
        self.leases[at].stage = Stage::Closed;
        for (leased, number) in self.attached_devices(&self.leases[at]) {
            leased.device.unbind(number);
        }
        // Frames between the program on the device and a ring arrive there before the answer is
        // sent.
        barrier::synchronize();
    }

    /// The devices of a lease, with its socket numbers.
    fn attached_devices(&self, lease: &Lease) -> impl Iterator<Item = (&LeasedDevice, SocketIndex)> {
        lease.socket_indexes.iter().filter_map(|(index, number)| {
            let leased = self.devices.iter().find(|leased| leased.device.index == *index)?;
            Some((leased, *number))
        })
    }

    /// Binds the addresses of an open lease to it. After an error, some are bound. The other
    /// devices are still visited: no device may redirect addresses that were removed.
    fn bind_addresses(&self, lease: &Lease) -> Result<()> {
        let locals = self.routes.local_state();
        let not_from = checks::blocked_sources(&locals);
        let mut first = Ok(());
        for (leased, number) in self.attached_devices(lease) {
            let index = leased.device.index;
            let leaves_ip4 = !leased.is_named && leased.device.has_strict_rp_filter(&locals);
            let ports = Ports::Udp { bound: lease.addr, only_v6: lease.only_v6 };
            let keys = ports.keys(index, leaves_ip4, &locals);
            first = first.and(leased.device.bind(number, &keys, &not_from));
        }
        first
    }

    /// Applies changes of the machine's addresses to open leases.
    pub(super) fn rebind_all(&self) {
        for lease in self.leases.iter().filter(|lease| lease.stage == Stage::Open) {
            if let Err(err) = self.bind_addresses(lease) {
                log::warn!("engine xdp: cannot follow a change of the machine's network: {}", err.chain());
            }
        }
    }

    /// Ends the leases of sockets that were closed or rebound, or whose state has been unknown for
    /// too long.
    pub(super) fn check_sockets(&mut self) {
        for at in (0..self.leases.len()).rev() {
            let Lease { addr, cookie, verified, .. } = &mut self.leases[at];
            let stands = match self.sockets.find_by_port(addr.port()) {
                Ok(all) => verify_binding(*cookie, addr.ip(), &all),
                Err(_) if verified.elapsed() < CHECK_TIMEOUT => continue,
                // The socket may have been closed, and the port may belong to another program now.
                Err(_) => Err("the kernel does not list its sockets"),
            };
            match stands {
                Ok(()) => *verified = Instant::now(),
                Err(why) => {
                    log::debug!("{addr} lost its queues: {why}");
                    self.end_at(at);
                }
            }
        }
    }

    fn end_at(&mut self, at: usize) {
        let lease = self.leases.swap_remove(at);
        self.end(lease);
    }

    /// Ends a lease: unbinds the port first, then releases the queues with their content.
    fn end(&mut self, lease: Lease) {
        for (leased, number) in self.attached_devices(&lease) {
            leased.device.unbind(number);
            for member in lease.members.iter().filter(|member| member.params.ifindex == leased.device.index) {
                leased.device.clear_redirect(number, member.params.queue);
            }
            self.filter.detach(&leased.device.filters, number);
            leased.device.unregister(number);
        }
        barrier::synchronize();
        for Member { params: terms, view, .. } in lease.members {
            if let Some(leased) = self.devices.iter_mut().find(|leased| leased.device.index == terms.ifindex)
            {
                leased.release(terms.queue, view);
            }
        }
        self.reclaim();
    }

    /// Reclaims what ended leases left in rings.
    pub(super) fn reclaim(&mut self) {
        let Self { devices, leases, .. } = self;
        let has_ended = |number| leases.iter().all(|lease| lease.number != number);
        devices.iter_mut().for_each(|leased| leased.reclaim(&has_ended));
    }

    /// A number that no lease has, and none with something left to reclaim.
    fn alloc_number(&mut self) -> u16 {
        loop {
            self.last_number = self.last_number.checked_add(1).unwrap_or(1);
            let number = self.last_number;
            if self.leases.iter().all(|lease| lease.number != number)
                && !self.devices.iter().any(|leased| leased.has_released(number))
            {
                return number;
            }
        }
    }
}
