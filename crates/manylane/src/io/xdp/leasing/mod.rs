//! Leases queues to programs that do not use the library themselves (`manylane run --engine xdp`):
//! this process has the privileges, the programs receive and send.
//!
//! | stage | how | when it is full or missing |
//! |---|---|---|
//! | devices | [`Lessor::open`] attaches the program to each, before a program is started | an error that names what to change |
//! | a program connects ([`clients`]) | any process may; the kernel identifies it | the oldest client without a request is dropped |
//! | its request is read ([`connection`]) | separate threads receive its descriptors, because closing them can block | the request waits; while clients use a quarter of the open files, none is accepted |
//! | the request is checked ([`Message::Request`](manylane_ipc::lease::Message::Request)) | the kernel reports where its socket is bound, and that it is alone there | refused: no device has the address, another process has the queues, or two sockets are bound |
//! | queues ([`devices`]) | opened anew for each process (`manylane_sys::xsk::LeasedQueue`), for the first one in advance, with a socket for each lease | the queue is left out: its frames go to the kernel |
//! | the port ([`lifecycle`]) | in the XDP programs from [`Message::Open`](manylane_ipc::lease::Message::Open) to [`Message::Close`](manylane_ipc::lease::Message::Close) | refused: the kernel goes on serving it |
//! | a device is removed, becomes part of another one, or gets parts | the XDP program is detached, and lanes send by their kernel sockets | the device is not used again before the next start |
//! | next hops ([`peers`]) | queried from the kernel (`route`), entered in the table of the lease's lanes (`manylane_ipc::next_hops`) | not entered: lanes send by their kernel socket |
//! | the end of a lease | its last holder closed it or was killed, its socket was closed, or it sent an invalid message | the port is removed first, then the rings are reclaimed |
//!
//! One thread does everything else. It waits for messages, and polls every few milliseconds for
//! what has no message: requests for next hops, and frames that a lane put into a ring without
//! notifying the kernel. When this process ends in any way, its programs are detached, and every
//! frame goes to the kernel.

mod clients;
mod connection;
mod devices;
mod lease;
mod lifecycle;
mod peers;
mod rings;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use self::clients::{Clients, LISTENER, RECEIVED};
use self::devices::{LeasedDevice, Member, attach};
use self::lease::Lease;
use self::lifecycle::LeaseTable;
pub use self::rings::{LeasedRing, LeasedRings};
use super::route::Routes;
use crate::error::{Error, Result};
use crate::io::filter::FilterHandle;

/// Poll intervals while frames are sent, and while none are.
const BUSY_INTERVAL: Duration = Duration::from_millis(5);
const IDLE_INTERVAL: Duration = Duration::from_millis(50);
/// Time without a sent frame until the lessor is idle.
const IDLE_TIMEOUT: Duration = Duration::from_millis(200);
/// Interval of checks for changes without an event: a device's MAC address, the addresses of
/// wildcards.
const REFRESH_INTERVAL: Duration = Duration::from_secs(2);
/// Interval of checks that the sockets of leases still exist.
const SOCKET_CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// Leases queues of devices to programs.
pub struct Lessor {
    table: LeaseTable,
    clients: Clients,
    /// Addresses may have changed.
    has_changed: Arc<AtomicBool>,
    rings: LeasedRings,
}

impl std::fmt::Debug for Lessor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lessor").field("devices", &self.devices()).finish_non_exhaustive()
    }
}

impl Lessor {
    /// Attaches the XDP program to the named devices, or to all devices that are up, have an
    /// address that is not link-local, and support it. The latter excludes veth and tap devices,
    /// devices on which `rp_filter` prevents spoofed sources, and devices for which `spare`
    /// returns a reason. No frames are taken yet.
    ///
    /// # Errors
    /// If a named device cannot be used, or none can.
    /// [`ErrorKind::Permission`](crate::ErrorKind::Permission) without the privileges.
    pub fn open(names: Option<&[String]>, spare: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let routes = Routes::start()?;
        let devices = attach(&routes, names, &spare)?;
        let clients =
            Clients::listen().map_err(|err| Error::system("creating the socket for leases", err))?;
        let has_changed = Arc::new(AtomicBool::new(false));
        let tell = Arc::clone(&has_changed);
        routes.on_change(Box::new(move |_| tell.store(true, Ordering::Release)));
        let table = LeaseTable::new(devices, routes)?;
        Ok(Self { table, clients, has_changed, rings: LeasedRings::default() })
    }

    /// The token for the environment of started programs, in
    /// [`TOKEN_ENV_VAR`](manylane_ipc::lease::TOKEN_ENV_VAR). A process that has it, and runs as a
    /// permitted user, gets queues.
    #[must_use]
    pub fn lease_token(&self) -> String {
        self.clients.lease_token.to_string()
    }

    /// Names of the devices in use.
    #[must_use]
    pub fn devices(&self) -> Vec<&str> {
        let in_use = self.table.devices.iter().filter(|leased| !leased.device.is_gone());
        in_use.map(|leased| leased.device.name.as_str()).collect()
    }

    /// The filter of all sockets that have queues or will have; usable before and during
    /// [`run`](Self::run).
    #[must_use]
    pub fn filter(&self) -> FilterHandle {
        self.table.filter.clone()
    }

    /// The fill levels of the rings, updated during [`run`](Self::run).
    #[must_use]
    pub fn rings(&self) -> LeasedRings {
        self.rings.clone()
    }

    /// Leases queues until `stop` is set, or waiting fails. The queues are closed when it returns.
    ///
    /// # Errors
    /// The error of the wait.
    pub fn run(mut self, stop: &AtomicBool) -> io::Result<()> {
        self.table.open_in_advance();
        let mut sent = Instant::now();
        let (mut last_sample, mut next_check, mut last_check) = (sent, sent, sent);
        while !stop.load(Ordering::Acquire) {
            let tick = if sent.elapsed() < IDLE_TIMEOUT { BUSY_INTERVAL } else { IDLE_INTERVAL };
            let mut ready: Vec<u64> = self.clients.epoll.wait(tick)?.collect();
            // Oldest tokens first, so that queues that are returned are available to new requests.
            ready.sort_unstable();
            // One event per client, so that no client delays the others.
            for token in ready {
                if token == LISTENER {
                    self.clients.accept(self.table.leases.len());
                } else if token == RECEIVED {
                    self.clients.take_received();
                } else if let Some(at) = self.clients.find_pending(token) {
                    self.clients.handle_pending(at);
                } else if let Some(at) = self.table.find(token) {
                    self.table.handle_request(at);
                }
            }
            self.clients.grant_pending(&mut self.table);
            if self.kick_unsent() {
                sent = Instant::now();
            }
            if last_sample.elapsed() >= IDLE_INTERVAL {
                last_sample = Instant::now();
                self.sample_rings();
            }
            let LeaseTable { leases, devices, .. } = &mut self.table;
            let is_gone =
                |index| devices.iter().any(|leased| leased.device.index == index && leased.device.is_gone());
            for lease in leases {
                lease.next_hops.update(is_gone);
            }
            self.table.reclaim();
            if last_check.elapsed() >= SOCKET_CHECK_INTERVAL {
                last_check = Instant::now();
                self.table.check_sockets();
            }
            let changed = self.has_changed.swap(false, Ordering::AcqRel);
            if changed || next_check.elapsed() >= REFRESH_INTERVAL {
                next_check = Instant::now();
                self.resync();
            }
        }
        Ok(())
    }

    /// Notifies the kernel of frames that a lane has not; true if frames were sent since the last
    /// call.
    fn kick_unsent(&mut self) -> bool {
        let mut any = false;
        for member in self.table.leases.iter_mut().flat_map(|lease| &mut lease.members) {
            let sent = member.view.tx_produced();
            any |= std::mem::replace(&mut member.sent, sent) != sent;
            if member.view.has_unsent() {
                member.view.kick();
            }
        }
        any
    }

    /// Records the fill levels of the rings for [`LeasedRings`].
    fn sample_rings(&self) {
        let ring = |lease: &Lease, member: &Member| {
            let leased =
                self.table.devices.iter().find(|leased| leased.device.index == member.params.ifindex)?;
            Some(LeasedRing {
                socket: lease.addr,
                device: leased.device.name.clone(),
                queue: member.params.queue,
                waiting: member.view.rx_pending(),
                entries: member.params.ring_size,
                dropped: member.view.statistics().map_or(0, |seen| seen.rx_ring_full + seen.rx_dropped),
            })
        };
        let of = |lease| move |member| ring(lease, member);
        let leases = self.table.leases.iter();
        self.rings.replace(leases.flat_map(|lease| lease.members.iter().filter_map(of(lease))));
    }

    /// Applies changes of the machine's devices and addresses. A device that may no longer be used
    /// is detached until the next start; programs drain its queues.
    fn resync(&mut self) {
        let locals = self.table.routes.local_state();
        for LeasedDevice { device, .. } in &self.table.devices {
            if device.is_gone() {
                continue;
            }
            let why = match device.check(&locals) {
                Err(err) => err.to_string(),
                Ok(()) if !device.refresh() => "it was removed".into(),
                Ok(()) => continue,
            };
            log::warn!("engine xdp: detached from {} until the next start: {why}", device.name);
            device.detach();
        }
        self.table.rebind_all();
    }
}
