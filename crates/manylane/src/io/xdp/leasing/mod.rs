//! Queues leased to programs that know nothing of them (`manylane run --engine xdp`): this process
//! has the privileges, the programs have the datagrams.
//!
//! | stage | who | when it is full or missing |
//! |---|---|---|
//! | devices | [`Lessor::open`]: the program on each, before anything is started | an error that names what to change |
//! | a program connects ([`clients`]) | anybody may; who is heard says the kernel | the oldest that says nothing goes |
//! | what it sends is read ([`connection`]) | its descriptors by threads of their own, as closing them can block | it waits; at the limit of open files nobody is accepted |
//! | it asks ([`Message::Request`](manylane_sys::lease::Message::Request)) | the kernel says where its socket is bound, and that it is alone there | refused: no device has the address, another process has the queues, or two sockets have |
//! | the queues ([`devices`]) | opened for each process anew (`manylane_sys::xsk::LeasedQueue`); a socket of its own in each for each lease | left out: its frames are the kernel's |
//! | the port ([`lease`]) | in the XDP programs from [`Message::Open`](manylane_sys::lease::Message::Open) to [`Message::Close`](manylane_sys::lease::Message::Close) | refused: the kernel goes on serving it |
//! | next hops ([`peers`]) | asked of the kernel (`route`), entered where the lanes of that lease read them (`manylane_sys::next_hops`) | not entered: lanes send by their kernel socket |
//! | the end of a lease | its last holder closed it, or was killed; its socket is closed; what was said makes no sense | the port goes first, then what is in the rings |
//!
//! All else is done by one thread, which waits for messages, and looks every few milliseconds at
//! what has no message: questions for next hops, and frames that a lane has put into a ring without
//! coming back to tell the kernel. When this process ends, however it ends, its programs are off
//! the devices, and every frame is the kernel's.

mod clients;
mod connection;
mod devices;
mod lease;
mod peers;
mod rings;
#[cfg(test)]
mod tests;

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use manylane_sys::lease::LeaseToken;
use manylane_sys::measure::Epoll;
use manylane_sys::{bound_sockets, sock};

use self::clients::PendingClient;
use self::connection::Closers;
use self::devices::{LeasedDevice, attach};
use self::lease::Lease;
pub use self::rings::{LeasedRing, LeasedRings};
use super::filter::FilterHandle;
use super::route::{Reader, Routes};
use crate::error::{Error, Result};

/// Between two looks while something is sent, and while nothing is.
const BUSY_INTERVAL: Duration = Duration::from_millis(5);
const IDLE_INTERVAL: Duration = Duration::from_millis(50);
/// Nothing was sent for so long: idle.
const IDLE_TIMEOUT: Duration = Duration::from_millis(200);
/// What changes without a word is looked at: a device's address, the addresses of wildcards.
const REFRESH_INTERVAL: Duration = Duration::from_secs(2);
/// Messages that are told of at once.
const EVENTS_MAX: usize = 32;

/// Between two looks whether the sockets of leases are there.
const SOCKET_CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// Of the listener, where ends have theirs.
const LISTENER: u64 = 0;
/// Of requests whose sockets have been received.
const RECEIVED: u64 = 1;

/// Lends the queues of devices.
pub struct Lessor {
    devices: Vec<LeasedDevice>,
    routes: Arc<Routes>,
    reader: Reader,
    /// Addresses may have changed.
    has_changed: Arc<AtomicBool>,
    /// The network namespace that all of this is about.
    namespace: u64,
    lease_token: LeaseToken,
    listener: OwnedFd,
    epoll: Epoll,
    closers: Closers,
    pending: Vec<PendingClient>,
    /// The user beside root that may have queues.
    other_user: Option<u32>,
    leases: Vec<Lease>,
    last_token: u64,
    last_number: u16,
    filter: FilterHandle,
    rings: LeasedRings,
}

impl std::fmt::Debug for Lessor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lessor").field("devices", &self.devices()).finish_non_exhaustive()
    }
}

impl Lessor {
    /// Attaches the XDP program to the devices named, or to all that are up, have an address that
    /// is not link-local, and take one; of those, veth devices are left out, those on which
    /// `rp_filter` keeps senders from posing as others, and those that `spare` gives a reason for.
    /// No frame is taken yet.
    ///
    /// # Errors
    /// If a device that was named cannot be used, or none can:
    /// [`ErrorKind::Permission`](crate::ErrorKind::Permission) without the privileges.
    pub fn open(names: Option<&[String]>, spare: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let routes = Routes::start()?;
        let devices = attach(&routes, names, &spare)?;
        let failed = |err| Error::system("what programs are leased queues by", err);
        let ticket = LeaseToken::new().map_err(failed)?;
        let listener = ticket.listen().map_err(failed)?;
        let probe = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(failed)?;
        let namespace = sock::socket_info(probe.as_fd())
            .map_err(|err| Error::system("asking for a network namespace (Linux 5.14)", err))?
            .namespace;
        bound_sockets::find_by_port(1)
            .map_err(|err| Error::system("asking for UDP sockets (CONFIG_INET_UDP_DIAG)", err))?;
        let watch = Epoll::new(EVENTS_MAX).map_err(failed)?;
        watch.add(&listener, LISTENER).map_err(failed)?;
        let has_changed = Arc::new(AtomicBool::new(false));
        let tell = Arc::clone(&has_changed);
        routes.on_change(Box::new(move |_| tell.store(true, Ordering::Release)));
        let reader = routes.reader();
        Ok(Self {
            devices,
            routes,
            reader,
            has_changed,
            namespace,
            lease_token: ticket,
            listener,
            closers: Closers::start(&watch, RECEIVED).map_err(failed)?,
            epoll: watch,
            pending: Vec::new(),
            other_user: None,
            leases: Vec::new(),
            last_token: RECEIVED,
            last_number: 0,
            filter: FilterHandle::default(),
            rings: LeasedRings::default(),
        })
    }

    /// By what programs ask: for the environment of those that are started, in
    /// [`TOKEN_ENV_VAR`](manylane_sys::lease::TOKEN_ENV_VAR). Who reads it, and is of a user who
    /// may, gets queues.
    #[must_use]
    pub fn lease_token(&self) -> String {
        self.lease_token.to_string()
    }

    /// Names of the devices in use.
    #[must_use]
    pub fn devices(&self) -> Vec<&str> {
        self.devices.iter().map(|leased| leased.device.name.as_str()).collect()
    }

    /// By what limits and prefixes are set, of all sockets that have queues or will; before it
    /// [runs](Self::run), and while it does.
    #[must_use]
    pub fn filter(&self) -> FilterHandle {
        self.filter.clone()
    }

    /// By what the rings are looked at while it [runs](Self::run).
    #[must_use]
    pub fn rings(&self) -> LeasedRings {
        self.rings.clone()
    }

    /// Lends until `stop` is set, or nothing can be waited for any more.
    ///
    /// # Errors
    /// What waiting reports. The queues go with this value.
    pub fn run(mut self, stop: &AtomicBool) -> io::Result<()> {
        let mut sent = Instant::now();
        let (mut next_check, mut last_check) = (sent, sent);
        while !stop.load(Ordering::Acquire) {
            let tick = if sent.elapsed() < IDLE_TIMEOUT { BUSY_INTERVAL } else { IDLE_INTERVAL };
            let mut ready: Vec<u64> = self.epoll.wait(tick)?.collect();
            // What is given back is there for who asks.
            ready.sort_unstable();
            // One thing of each, so that nobody keeps the others waiting.
            for token in ready {
                if token == LISTENER {
                    self.accept_clients();
                } else if token == RECEIVED {
                    self.take_received();
                } else if let Some(at) = self.find_pending(token) {
                    self.handle_pending(at);
                } else if let Some(at) = self.leases.iter().position(|lease| lease.client.token == token) {
                    self.handle_request(at);
                }
            }
            self.grant_pending();
            if self.kick_unsent() {
                sent = Instant::now();
            }
            self.sample_rings();
            self.reader.refresh();
            for lease in &mut self.leases {
                lease.next_hops.update(&mut self.reader);
            }
            self.reclaim();
            if last_check.elapsed() >= SOCKET_CHECK_INTERVAL {
                last_check = Instant::now();
                self.check_sockets();
            }
            let changed = self.has_changed.swap(false, Ordering::AcqRel);
            if changed || next_check.elapsed() >= REFRESH_INTERVAL {
                next_check = Instant::now();
                self.resync();
            }
        }
        Ok(())
    }

    /// Tells the kernel of frames that nobody has told it of; whether something was sent since the
    /// last time.
    fn kick_unsent(&mut self) -> bool {
        let mut any = false;
        for member in self.leases.iter_mut().flat_map(|lease| &mut lease.members) {
            let sent = member.view.tx_produced();
            any |= std::mem::replace(&mut member.sent, sent) != sent;
            if member.view.has_unsent() {
                member.view.kick();
            }
        }
        any
    }

    /// What has changed on the machine changes here, too.
    fn resync(&mut self) {
        for leased in &self.devices {
            _ = leased.device.refresh();
        }
        self.rebind_all();
    }
}
