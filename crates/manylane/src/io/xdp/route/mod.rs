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
//! Short packets of a TCP stack also go by prefixes ([`prefixes`]): a flood of SYNs comes from more
//! peers than there are entries.
//!
//! Processing that the kernel does after routing is not applied to what a lane sends: netfilter,
//! traffic control, IPsec. Routing rules on ports or marks are not applied either.

mod changes;
mod fib;
mod kernel_tables;
mod netlink;
mod prefixes;
mod queries;
mod rtnetlink;
mod shared;
mod table;
#[cfg(test)]
pub(super) mod tests;
mod worker;

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::thread::{self, Thread};
use std::time::Duration;

use manylane_ipc::next_hops::{NextHop, RouteKey};
use manylane_sys::errno::EAFNOSUPPORT;
use manylane_wire::datagram::{AddrPair, Datagram};

pub(crate) use self::changes::{Change, LocalState};
use self::prefixes::{ByPrefix, Prefixes, SHORT_LEN_MAX};
use self::queries::{QueryQueue, RecentQueries};
use self::shared::{ChangeListener, Shared, epoch_of, lock, stamp_of};
use self::table::{Entry, Table};
use self::worker::{REFRESH_INTERVAL, Worker};
use crate::error::{Error, ErrorKind, Result};

/// Time limit for the end of the thread. It ends at once unless a watcher blocks it.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// The id of the XDP program on a device of the calling thread's namespace, if there is one and
/// the kernel reports it.
pub(crate) fn xdp_program_id(ifindex: u32) -> Option<u32> {
    netlink::QuerySocket::open().and_then(|mut questions| questions.xdp_program_id(ifindex)).ok().flatten()
}

/// The kernel's tables of one network namespace, kept current.
pub(crate) struct Routes {
    shared: Arc<Shared>,
    thread: Thread,
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
            prefixes: Arc::default(),
            prefixes_version: 0,
            are_prefixes_current: false,
            probed: Vec::new(),
            routes: Arc::clone(self),
        }
    }

    /// Keeps the prefixes current that short packets go by ([`Reader::packet_next_hop`]).
    pub(crate) fn use_prefixes(&self) {
        if !self.shared.uses_prefixes.swap(true, Ordering::AcqRel) {
            self.shared.wake();
        }
    }

    /// All addresses of devices that are up, with their device; not those that are tentative.
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
    prefixes: Arc<Prefixes>,
    prefixes_version: u64,
    /// They were compared with the published ones since the batch began.
    are_prefixes_current: bool,
    /// For each of their neighbours: a packet to it was left to the kernel, which then probes it.
    probed: Vec<bool>,
    routes: Arc<Routes>,
}

/// Why a packet has no next hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoNextHop {
    /// Its route is not known yet, or a stale neighbour is to be probed.
    Unknown,
    /// It goes to a neighbour that the kernel would have to resolve first.
    Unresolved,
}

impl Reader {
    /// Must be called once per batch.
    #[inline]
    pub(crate) fn refresh(&mut self) {
        // Acquire: a query after the stamp has changed sees the changes that caused it.
        let clock = self.routes.shared.clock.0.load(Ordering::Acquire);
        let version = self.table.version();
        self.are_prefixes_current = false;
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

    /// As [`next_hop`](Self::next_hop), for a packet of a TCP stack: a short one to a peer that is
    /// not in the table goes by its prefix, and queries nothing.
    #[inline]
    pub(crate) fn packet_next_hop(
        &mut self,
        local: IpAddr,
        peer: IpAddr,
        length: usize,
    ) -> std::result::Result<NextHop, NoNextHop> {
        let pair = RouteKey::new(local, peer).ok_or(NoNextHop::Unknown)?;
        let hash = self.table.hash(&pair);
        let found = self.table.find(&pair, hash);
        if found.is_none() && length <= SHORT_LEN_MAX {
            match self.next_hop_by_prefix(peer) {
                Err(NoNextHop::Unknown) => {}
                result => return result?.ok_or(NoNextHop::Unknown),
            }
        }
        self.judge(&pair, hash, found).map(|(next, _)| next).ok_or(NoNextHop::Unknown)
    }

    /// None if the neighbour is stale, and this packet is to make the kernel probe it.
    #[cold]
    fn next_hop_by_prefix(&mut self, peer: IpAddr) -> std::result::Result<Option<NextHop>, NoNextHop> {
        if !std::mem::replace(&mut self.are_prefixes_current, true) {
            let shared = &self.routes.shared;
            let version = shared.prefixes_version.load(Ordering::Acquire);
            if version != self.prefixes_version {
                self.prefixes_version = version;
                self.prefixes = Arc::clone(&lock(&shared.prefixes));
                self.probed.clear();
                self.probed.resize(self.prefixes.neighbours(), false);
            }
        }
        match self.prefixes.find(peer) {
            ByPrefix::Resolved(at, found) => {
                let is_probe = found.stale
                    && self.probed.get_mut(at).is_some_and(|probed| !std::mem::replace(probed, true));
                Ok((!is_probe).then_some(found.next))
            }
            ByPrefix::Unresolved => Err(NoNextHop::Unresolved),
            ByPrefix::Unknown => Err(NoNextHop::Unknown),
        }
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
        let found = self.table.find(&pair, hash);
        self.judge(&pair, hash, found)
    }

    /// The same, for what was found.
    #[inline]
    fn judge(&mut self, pair: &RouteKey, hash: u64, found: Option<Entry>) -> Option<(NextHop, bool)> {
        match found {
            // Of this epoch, or of one that this lane has not seen yet.
            Some(found) if epoch_of(self.clock).wrapping_sub(found.epoch) as i16 <= 0 => {
                Some((found.next, true))
            }
            Some(found) => {
                // Still valid, but to be queried again. If the neighbour is stale, the datagram
                // that queries takes the ordinary socket, so that the kernel probes the neighbour.
                let asked = self.query(pair, hash);
                (!(asked && found.stale)).then_some((found.next, false))
            }
            None => {
                self.query(pair, hash);
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
