//! Where a reply leaves: device, MAC addresses and MTU, as the kernel decides them.
//!
//! A lane looks up its local address and the peer in a table ([`table`]) that one background thread
//! ([`worker`]) keeps. What is not there it asks for, without waiting ([`queries`]), and the reply
//! meanwhile takes an ordinary socket, which also makes the kernel look for a neighbour that it
//! does not know. The thread asks the kernel ([`netlink`]) for a route from the one address to the
//! other, so that rules, weights and metrics are the kernel's business, and joins it with the
//! device and the neighbour that it knows of ([`kernel_tables`]) from what the kernel tells
//! ([`rtnetlink`]).
//!
//! The table is kept current by the kernel's events: a neighbour that changes or goes changes its
//! entries at once, a changed route those of its peers, a changed device those that leave by it, a
//! changed address those with that address. A device that begins to carry frames may be a better
//! way for any peer, and an address that goes may take routes along: then the entries stay in force
//! until they were asked for again. Everything else that may matter empties the table. Where events
//! were lost, all is read anew. Two things have no event. What the kernel learns of a path's MTU is
//! seen because entries in use are asked for again every [`REFRESH_INTERVAL`]. And a neighbour that
//! was last heard of long ago (stale) is only looked for again by a kernel that sends to it, so
//! that one datagram per lane, entry and turn then takes the ordinary socket.
//!
//! What the kernel would do to a packet after its route is chosen is not done to what a lane sends:
//! netfilter, traffic control, IPsec. Rules that look at ports or marks are not asked about either.

mod kernel_tables;
mod netlink;
mod queries;
mod rtnetlink;
mod table;
#[cfg(test)]
pub(super) mod tests;
mod worker;

use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, Thread};
use std::time::Duration;

use manylane_wire::datagram::{AddrPair, Datagram};

use self::queries::{QueryQueue, RecentQueries};
use self::table::{RouteKey, Table, Writer};
use self::worker::{REFRESH_INTERVAL, Worker};
use crate::error::{EAFNOSUPPORT, Error, ErrorKind, Result};

/// How long the end of the thread is waited for. It ends at once unless a watcher holds it up.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// How a frame gets to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NextHop {
    /// The device that it leaves by.
    pub(crate) ifindex: u32,
    /// MAC of that device.
    pub(crate) source_mac: [u8; 6],
    /// MAC of the peer or of the gateway to it.
    pub(crate) mac: [u8; 6],
    /// Largest IP packet on the way, as far as the kernel knows.
    pub(crate) mtu: u32,
}

/// What has changed in the namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The local addresses are others.
    Addresses,
    /// A device has come, carries frames or no longer does (`up`), or is gone.
    Link { ifindex: u32, up: bool, gone: bool },
    /// Some time has passed, or somebody has asked: what changes without a word may have changed.
    Refresh,
}

/// What is local to the namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LocalState {
    /// Addresses that the kernel delivers, with their device: of devices that are up, and not
    /// tentative.
    pub(crate) addresses: Vec<(u32, IpAddr)>,
    /// Addresses that are for all of a network.
    pub(crate) broadcasts: Vec<Ipv4Addr>,
    /// Devices that are part of another one, and that one: a bridge, bond, team or VRF.
    pub(crate) masters: Vec<(u32, u32)>,
}

/// The number of the XDP program on a device of the calling thread's namespace, if there is one and
/// the kernel says so.
pub(crate) fn xdp_program_id(ifindex: u32) -> Option<u32> {
    netlink::QuerySocket::open().and_then(|mut questions| questions.xdp_program_id(ifindex)).ok().flatten()
}

type ChangeListener = Box<dyn Fn(&Change) + Send>;

/// The kernel's tables of one network namespace, kept current.
pub(crate) struct Routes {
    shared: Arc<Shared>,
    thread: Thread,
}

/// What the thread shares with the lanes and with whoever has a [`Routes`].
struct Shared {
    table: Arc<Table>,
    clock: Clock,
    /// The thread sleeps, or is about to, until it is woken.
    is_asleep: AtomicBool,
    stop: AtomicBool,
    /// The watchers shall be told of a turn at once.
    refresh_requested: AtomicBool,
    /// A byte in here wakes the thread, which watches the other end.
    wake: UnixStream,
    woken: UnixStream,
    has_exited: Mutex<bool>,
    exited: Condvar,
    /// Questions of the lanes. A lane that is gone has taken its queue along.
    queues: Mutex<Vec<Weak<QueryQueue>>>,
    local_state: Mutex<LocalState>,
    listeners: Mutex<Vec<ChangeListener>>,
}

/// Two counters in one word: above, the turns of the clock (16 bits), by which entries grow old;
/// below, a stamp that moves whenever it makes sense to ask again.
///
/// The lanes read it once per batch, and it is written seldom: it has cache lines of its own.
#[repr(align(128))]
struct Clock(AtomicU64);

fn epoch_of(clock: u64) -> u16 {
    (clock >> 32) as u16
}

fn stamp_of(clock: u64) -> u32 {
    clock as u32
}

impl Routes {
    /// Reads the tables of the calling thread's namespace and starts the thread that keeps them. No
    /// privilege is needed, now or later.
    pub(crate) fn start() -> Result<Arc<Self>> {
        Self::start_with_interval(REFRESH_INTERVAL)
    }

    fn start_with_interval(period: Duration) -> Result<Arc<Self>> {
        let failed = |err: io::Error| {
            let doing = "cannot follow the kernel's routes by netlink";
            match err.raw_os_error() {
                Some(EAFNOSUPPORT) => {
                    let advice = "netlink sockets are not allowed here (RestrictAddressFamilies=)";
                    Error::with(ErrorKind::Permission, format!("{doing}: {advice}"), err)
                }
                _ => Error::system(doing, err),
            }
        };
        let worker = Worker::open(period).map_err(failed)?;
        let shared = Arc::clone(worker.shared());
        let thread = thread::Builder::new()
            .name("manylane-routes".into())
            .spawn(move || worker.run())
            .map_err(|err| Error::system("cannot start the thread that follows routes", err))?;
        Ok(Arc::new(Self { shared, thread: thread.thread().clone() }))
    }

    /// What a lane asks. It keeps the thread alive as well.
    pub(crate) fn reader(self: &Arc<Self>) -> Reader {
        let queue = Arc::new(QueryQueue::new());
        lock(&self.shared.queues).push(Arc::downgrade(&queue));
        let table = Arc::clone(&self.shared.table);
        let (clock, version) = (self.shared.clock.0.load(Ordering::Acquire), table.version());
        Reader {
            table,
            clock,
            version,
            last_reply: None,
            recent: RecentQueries::new(),
            queue,
            routes: Arc::clone(self),
        }
    }

    /// All addresses that the kernel delivers locally, with their device: of devices that are up,
    /// and not tentative.
    pub(crate) fn local_addresses(&self) -> Vec<(u32, IpAddr)> {
        lock(&self.shared.local_state).addresses.clone()
    }

    /// All that is local.
    pub(crate) fn local_state(&self) -> LocalState {
        lock(&self.shared.local_state).clone()
    }

    /// Calls `watcher` on the background thread for each change from now on; what it asks of `self`
    /// is then of after the change. What changed before this call is not told again. It must not
    /// call `on_change`, and must not keep an `Arc` of this `Routes`, which could then never end.
    pub(crate) fn on_change(&self, watcher: ChangeListener) {
        lock(&self.shared.listeners).push(watcher);
    }

    /// Has the watchers told of a [turn](Change::Refresh) soon.
    pub(crate) fn request_refresh(&self) {
        self.shared.refresh_requested.store(true, Ordering::Release);
        self.shared.wake();
    }
}

impl Drop for Routes {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        // A watcher may have had the last reference: the thread cannot wait for itself.
        if thread::current().id() != self.thread.id() {
            let ended = lock(&self.shared.has_exited);
            let waited = self.shared.exited.wait_timeout_while(ended, EXIT_TIMEOUT, |ended| !*ended);
            if waited.is_ok_and(|(_, timeout)| timeout.timed_out()) {
                log::warn!("the thread that follows routes has not ended yet");
            }
        }
    }
}

impl Shared {
    fn new(table: &Writer, locals: LocalState) -> io::Result<Self> {
        let (wake, woken) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        Ok(Self {
            table: Arc::clone(table.table()),
            // Not 0, at which nothing was asked yet.
            clock: Clock(AtomicU64::new(1)),
            is_asleep: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            refresh_requested: AtomicBool::new(false),
            wake,
            woken,
            has_exited: Mutex::new(false),
            exited: Condvar::new(),
            queues: Mutex::default(),
            local_state: Mutex::new(locals),
            listeners: Mutex::default(),
        })
    }

    /// Wakes the thread. It does not matter if this fails: it is then full of wake-ups.
    fn wake(&self) {
        let _ = (&self.wake).write(&[0]);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A lane's view of the table.
pub(crate) struct Reader {
    table: Arc<Table>,
    /// As it was when the batch began.
    clock: u64,
    /// That of the table, when the batch began.
    version: u64,
    /// Between which addresses the last request was that is answered, and how: as long as neither
    /// of these two changes.
    last_reply: Option<(AddrPair, NextHop)>,
    recent: RecentQueries,
    queue: Arc<QueryQueue>,
    routes: Arc<Routes>,
}

impl Reader {
    /// To be called once per batch.
    #[inline]
    pub(crate) fn refresh(&mut self) {
        // Acquire: what is asked after the stamp moved is asked of what it moved for.
        let clock = self.routes.shared.clock.0.load(Ordering::Acquire);
        let version = self.table.version();
        if (clock, version) != (self.clock, self.version) {
            (self.clock, self.version, self.last_reply) = (clock, version, None);
        }
    }

    /// How to get from a local address to a peer, if that is known; if not, it is asked for, and
    /// this reply takes an ordinary socket. Does not wait, and does not allocate.
    #[inline]
    pub(crate) fn next_hop(&mut self, local: IpAddr, peer: IpAddr) -> Option<NextHop> {
        self.find(local, peer).map(|(next, _)| next)
    }

    /// As [`next_hop`](Self::next_hop), for the reply to a request; kept for those that follow.
    #[inline]
    pub(crate) fn reply_next_hop(&mut self, request: &Datagram) -> Option<NextHop> {
        if let Some(next) = self.cached_next_hop(request) {
            return Some(*next);
        }
        let (next, is_current) = self.find(request.destination().ip(), request.source().ip())?;
        self.last_reply = is_current.then_some((*request.addr_pair(), next));
        Some(next)
    }

    /// The way back of the request before, if this one is between the same addresses and nothing
    /// has changed since.
    #[inline]
    pub(crate) fn cached_next_hop(&self, request: &Datagram) -> Option<&NextHop> {
        self.last_reply.as_ref().filter(|(ends, _)| ends == request.addr_pair()).map(|(_, next)| next)
    }

    /// See [`next_hop`](Self::next_hop); and whether there is nothing to be asked for.
    #[inline]
    fn find(&mut self, local: IpAddr, peer: IpAddr) -> Option<(NextHop, bool)> {
        let pair = RouteKey::new(local, peer)?;
        let hash = self.table.hash(&pair);
        match self.table.find(&pair, hash) {
            // Of this turn, or of one that this lane has not seen yet.
            Some(found) if epoch_of(self.clock).wrapping_sub(found.epoch) as i16 <= 0 => {
                Some((found.next, true))
            }
            Some(found) => {
                // Still good, but to be asked for again. The datagram that does so makes the kernel
                // look after a neighbour of which it has not heard for a while.
                let asked = self.query(&pair, hash);
                (!(asked && found.stale)).then_some((found.next, false))
            }
            None => {
                self.query(&pair, hash);
                None
            }
        }
    }

    /// Asks for a pair, unless this lane has done so since the stamp moved. True if it was asked
    /// now.
    #[cold]
    fn query(&mut self, pair: &RouteKey, hash: u64) -> bool {
        let asked = self.recent.query_once(hash, stamp_of(self.clock), || self.queue.push(pair));
        if asked {
            let shared = &self.routes.shared;
            // Either the thread sees the question when it looks for the last time before it sleeps,
            // or this sees that it sleeps: both write, pass a fence of one total order, and then
            // read what the other wrote (`Worker::sleep`).
            fence(Ordering::SeqCst);
            if shared.is_asleep.load(Ordering::Relaxed) && shared.is_asleep.swap(false, Ordering::Relaxed) {
                shared.wake();
            }
        }
        asked
    }
}
