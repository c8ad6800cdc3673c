//! Next hops for replies: device, MAC addresses and MTU, as the kernel decides them.
//!
//! A lane looks up its local address and the peer in a table ([`table`]) that one background
//! thread ([`worker`]) maintains. If there is no entry, the lane queues a query without waiting
//! ([`queries`]). The reply then takes an ordinary socket, which also makes the kernel resolve an
//! unknown neighbour. The thread asks the kernel ([`netlink`]) for a route from the one address to
//! the other, so that the kernel applies rules, weights and metrics. It combines the route with
//! the device and the neighbour from its copy of the kernel's tables ([`kernel_tables`]), which
//! netlink messages ([`rtnetlink`]) keep current.
//!
//! Events of the kernel keep the table current. A neighbour that changes or is removed changes its
//! entries at once. A changed route removes the entries of its peers, a changed device those that
//! use it, a changed address those with it. A device that gets a carrier may be a better way to
//! any peer, and a removed address may remove routes: the entries then stay in force until they
//! were queried again. Any other relevant event empties the table. If events were lost, all tables
//! are read anew. Two changes have no event. First, path MTUs that the kernel learns: entries in
//! use are queried again every [`REFRESH_INTERVAL`]. Second, the kernel probes a stale neighbour
//! only when it sends to it: so one datagram per lane, entry and epoch takes the ordinary socket.
//!
//! Processing that the kernel does after routing is not applied to what a lane sends: netfilter,
//! traffic control, IPsec. Routing rules on ports or marks are not applied either.

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

use manylane_ipc::next_hops::{NextHop, RouteKey};
use manylane_sys::errno::EAFNOSUPPORT;
use manylane_wire::datagram::{AddrPair, Datagram};

use self::queries::{QueryQueue, RecentQueries};
use self::table::{Table, Writer};
use self::worker::{REFRESH_INTERVAL, Worker};
use crate::error::{Error, ErrorKind, Result};

/// Time limit for the end of the thread. It ends at once unless a watcher blocks it.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// A change in the namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The local addresses have changed.
    Addresses,
    /// A device was added, went up or down, gained or lost its carrier (`up`), became or ceased to
    /// be a part of another one, or is gone.
    Link { ifindex: u32, up: bool, gone: bool },
    /// An interval has passed, or a refresh was requested: state without events may have changed.
    Refresh,
}

/// Local state of the namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LocalState {
    /// Addresses that the kernel delivers, with their device: on devices that are up, and not
    /// tentative.
    pub(crate) addresses: Vec<(u32, IpAddr)>,
    /// Broadcast addresses.
    pub(crate) broadcasts: Vec<Ipv4Addr>,
    /// Devices that are part of another one, with that one: a bridge, bond, team or VRF.
    pub(crate) masters: Vec<(u32, u32)>,
    /// VRFs.
    pub(crate) vrfs: Vec<u32>,
    /// Devices that are up, except loopback.
    pub(crate) up: Vec<u32>,
}

/// The id of the XDP program on a device of the calling thread's namespace, if there is one and
/// the kernel reports it.
pub(crate) fn xdp_program_id(ifindex: u32) -> Option<u32> {
    netlink::QuerySocket::open().and_then(|mut questions| questions.xdp_program_id(ifindex)).ok().flatten()
}

type ChangeListener = Box<dyn Fn(&Change) + Send>;

/// The kernel's tables of one network namespace, kept current.
pub(crate) struct Routes {
    shared: Arc<Shared>,
    thread: Thread,
}

/// State shared between the thread, the lanes and the [`Routes`].
struct Shared {
    table: Arc<Table>,
    clock: Clock,
    /// The thread sleeps, or is about to, until it is woken.
    is_asleep: AtomicBool,
    stop: AtomicBool,
    /// The watchers are to be notified of a refresh at once.
    refresh_requested: AtomicBool,
    /// A byte written here wakes the thread, which watches the other end.
    wake: UnixStream,
    woken: UnixStream,
    has_exited: Mutex<bool>,
    exited: Condvar,
    /// Query queues of the lanes. The queue of a closed lane is gone.
    queues: Mutex<Vec<Weak<QueryQueue>>>,
    local_state: Mutex<LocalState>,
    listeners: Mutex<Vec<ChangeListener>>,
}

/// Two counters in one word. The upper half has the epoch (16 bits), by which entries age. The
/// lower half has a stamp that changes whenever queries are worth repeating.
///
/// The lanes read it once per batch, and it is rarely written, so it has its own cache lines.
#[repr(align(128))]
struct Clock(AtomicU64);

fn epoch_of(clock: u64) -> u16 {
    (clock >> 32) as u16
}

fn stamp_of(clock: u64) -> u32 {
    clock as u32
}

impl Routes {
    /// Reads the tables of the calling thread's namespace, and starts the thread that maintains
    /// them. Needs no privilege, then or later.
    pub(crate) fn start() -> Result<Arc<Self>> {
        Self::start_with_interval(REFRESH_INTERVAL)
    }

    fn start_with_interval(period: Duration) -> Result<Arc<Self>> {
        let failed = |err: io::Error| {
            let doing = "cannot follow the kernel's routes by netlink";
            match err.raw_os_error() {
                Some(EAFNOSUPPORT) => {
                    let advice = "netlink sockets are not permitted (systemd: RestrictAddressFamilies=)";
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
            .map_err(|err| Error::system("starting the thread that follows routes", err))?;
        Ok(Arc::new(Self { shared, thread: thread.thread().clone() }))
    }

    /// A lane's reader. It keeps the thread alive as well.
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

    /// All addresses that the kernel delivers locally, with their device: on devices that are up,
    /// and not tentative.
    pub(crate) fn local_addresses(&self) -> Vec<(u32, IpAddr)> {
        lock(&self.shared.local_state).addresses.clone()
    }

    /// The local state.
    pub(crate) fn local_state(&self) -> LocalState {
        lock(&self.shared.local_state).clone()
    }

    /// Calls `watcher` on the background thread for each later change. Queries of `self` in the
    /// call return the state after the change. `watcher` must not call `on_change`. It must not
    /// own an `Arc` of this `Routes` either, because the thread could then never end.
    pub(crate) fn on_change(&self, watcher: ChangeListener) {
        lock(&self.shared.listeners).push(watcher);
    }

    /// Makes the thread notify the watchers of a [refresh](Change::Refresh) soon.
    pub(crate) fn request_refresh(&self) {
        self.shared.refresh_requested.store(true, Ordering::Release);
        self.shared.wake();
    }
}

impl Drop for Routes {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        // A watcher may have dropped the last reference: the thread cannot wait for itself.
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
            // Not 0, the stamp of slots that were never used.
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

    /// Wakes the thread. If the write fails, the pipe is full of wake-ups already.
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
    /// The clock when the batch began.
    clock: u64,
    /// The version of the table when the batch began.
    version: u64,
    /// The addresses and the next hop of the last reply; valid while neither of the two above
    /// changes.
    last_reply: Option<(AddrPair, NextHop)>,
    recent: RecentQueries,
    queue: Arc<QueryQueue>,
    routes: Arc<Routes>,
}

impl Reader {
    /// Must be called once per batch.
    #[inline]
    pub(crate) fn refresh(&mut self) {
        // Acquire: a query after the stamp has changed sees the changes that caused it.
        let clock = self.routes.shared.clock.0.load(Ordering::Acquire);
        let version = self.table.version();
        if (clock, version) != (self.clock, self.version) {
            (self.clock, self.version, self.last_reply) = (clock, version, None);
        }
    }

    /// The next hop from a local address to a peer, if known. If not, it is queried, and this
    /// reply takes an ordinary socket. Does not wait or allocate.
    #[inline]
    pub(crate) fn next_hop(&mut self, local: IpAddr, peer: IpAddr) -> Option<NextHop> {
        self.find(local, peer).map(|(next, _)| next)
    }

    /// As [`next_hop`](Self::next_hop), for a pair that was found before. If it is gone, it is
    /// queried at once: queries of another reader may have replaced it in the full table.
    pub(crate) fn next_hop_again(&mut self, local: IpAddr, peer: IpAddr) -> Option<NextHop> {
        let pair = RouteKey::new(local, peer)?;
        let hash = self.table.hash(&pair);
        if self.table.find(&pair, hash).is_none() {
            self.recent.forget(hash);
        }
        self.next_hop(local, peer)
    }

    /// As [`next_hop`](Self::next_hop), for the reply to a request. The result is cached for the
    /// next replies.
    #[inline]
    pub(crate) fn reply_next_hop(&mut self, request: &Datagram) -> Option<NextHop> {
        if let Some(next) = self.cached_next_hop(request) {
            return Some(*next);
        }
        let (next, is_current) = self.find(request.destination().ip(), request.source().ip())?;
        self.last_reply = is_current.then_some((*request.addr_pair(), next));
        Some(next)
    }

    /// The next hop of the last reply, if this request has the same addresses and nothing has
    /// changed.
    #[inline]
    pub(crate) fn cached_next_hop(&self, request: &Datagram) -> Option<&NextHop> {
        self.last_reply.as_ref().filter(|(ends, _)| ends == request.addr_pair()).map(|(_, next)| next)
    }

    /// As [`next_hop`](Self::next_hop), with a flag that the entry is of the current epoch.
    #[inline]
    fn find(&mut self, local: IpAddr, peer: IpAddr) -> Option<(NextHop, bool)> {
        let pair = RouteKey::new(local, peer)?;
        let hash = self.table.hash(&pair);
        match self.table.find(&pair, hash) {
            // Of this epoch, or of one that this lane has not seen yet.
            Some(found) if epoch_of(self.clock).wrapping_sub(found.epoch) as i16 <= 0 => {
                Some((found.next, true))
            }
            Some(found) => {
                // Still valid, but to be queried again. If the neighbour is stale, the datagram
                // that queries takes the ordinary socket, so that the kernel probes the neighbour.
                let asked = self.query(&pair, hash);
                (!(asked && found.stale)).then_some((found.next, false))
            }
            None => {
                self.query(&pair, hash);
                None
            }
        }
    }

    /// Queries a pair, unless this lane has done so since the stamp changed. True if it was
    /// queried by this call.
    #[cold]
    fn query(&mut self, pair: &RouteKey, hash: u64) -> bool {
        let asked = self.recent.query_once(hash, stamp_of(self.clock), || self.queue.push(pair));
        if asked {
            let shared = &self.routes.shared;
            // Either the thread sees the query in its last check before it sleeps, or this thread
            // sees that it sleeps. Both write, pass a sequentially consistent fence, and then read
            // what the other wrote (`Worker::sleep`).
            fence(Ordering::SeqCst);
            if shared.is_asleep.load(Ordering::Relaxed) && shared.is_asleep.swap(false, Ordering::Relaxed) {
                shared.wake();
            }
        }
        asked
    }
}
