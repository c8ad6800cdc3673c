//! The background thread: reads the kernel's events, answers the lanes' queries, maintains the
//! table.

use std::io::{self, Read};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use manylane_ipc::next_hops::RouteKey;
use manylane_sys::epoll::Epoll;
use manylane_sys::errno::{EBADMSG, ENOBUFS};

use super::changes::Change;
use super::fib::Fib;
use super::kernel_tables::{Effects, KernelTables};
use super::netlink::{EventSocket, QUERIES_MAX, QuerySocket, RouteQuery};
use super::prefixes::Prefixes;
use super::queries::QueryQueue;
use super::shared::{Shared, epoch_of, lock, stamp_of};
use super::table::Writer;

/// Interval after which entries in use are queried again.
pub(super) const REFRESH_INTERVAL: Duration = Duration::from_secs(4);

/// Queries per round, and the interval between rounds. Together they limit the cost of a flood of
/// new peers: 16,000 queries a second, at some microseconds each. A query that finds its queue
/// full is repeated by a later datagram, if there is one.
pub(super) const QUERIES_PER_ROUND: usize = QUERIES_MAX;
pub(super) const ROUND_INTERVAL: Duration = Duration::from_millis(1);

/// Datagrams of events that are read before anything else is done.
const EVENT_DATAGRAMS_MAX: usize = 256;
/// Minimum interval between two reloads, however many events are lost.
const RELOAD_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum number of attempts at a dump that changes meanwhile; after that, events correct it.
const DUMP_ATTEMPTS_MAX: usize = 3;

const WOKEN: u64 = 0;
const EVENT: u64 = 1;

pub(super) struct Worker {
    shared: Arc<Shared>,
    table: Writer,
    kernel: KernelTables,
    /// The routing tables, once lanes use prefixes and while they are known.
    fib: Option<Fib>,
    /// Earliest time at which they are read again; none: once they have changed.
    load_fib_at: Option<Instant>,
    events: EventSocket,
    query_socket: QuerySocket,
    epoll: Epoll,
    /// Queries in the order in which they were made.
    queries: Vec<(RouteKey, RouteQuery)>,
    /// The queue that the next round starts with, for fairness.
    first_queue: usize,
    /// There were queries in this epoch.
    is_busy: bool,
    refresh_interval: Duration,
    /// Start of the next epoch, unless there are no queries.
    next_epoch: Instant,
    next_round: Instant,
    /// Time of the next refresh of the watchers; also without queries.
    next_refresh: Instant,
    /// Events were lost: the earliest time of the reload.
    reload_at: Option<Instant>,
    /// Time of the last reload.
    last_reload: Instant,
    /// The same, of the routing tables.
    last_fib: Instant,
    /// Dropped last, after the sockets.
    #[expect(dead_code, reason = "kept for its drop")]
    exit_guard: ExitGuard,
}

/// Signals that the thread has ended, in whichever way.
struct ExitGuard(Arc<Shared>);

impl Drop for ExitGuard {
    fn drop(&mut self) {
        // No more wake-ups are needed.
        self.0.is_asleep.store(false, Ordering::Relaxed);
        *lock(&self.0.has_exited) = true;
        self.0.exited.notify_all();
    }
}

impl Worker {
    /// Opens the sockets in the namespace of the calling thread and reads its tables. Epochs last
    /// `period`.
    pub(super) fn open(period: Duration) -> io::Result<Self> {
        // Subscribe first, so that changes during the dump are seen as events after it.
        let events = EventSocket::subscribe()?;
        let mut questions = QuerySocket::open()?;
        let mut table = Writer::new();
        let kernel = load(&mut questions, &mut table)?;
        let shared = Arc::new(Shared::new(&table, kernel.local_state())?);
        let watch = Epoll::new(2)?;
        watch.add(&shared.woken, WOKEN)?;
        watch.add(&events, EVENT)?;
        let now = Instant::now();
        Ok(Self {
            shared: Arc::clone(&shared),
            table,
            kernel,
            fib: None,
            load_fib_at: Some(now),
            events,
            query_socket: questions,
            epoll: watch,
            queries: Vec::with_capacity(QUERIES_PER_ROUND),
            first_queue: 0,
            is_busy: false,
            refresh_interval: period,
            next_epoch: now,
            next_round: now,
            next_refresh: now + period,
            reload_at: None,
            last_reload: now,
            last_fib: now,
            exit_guard: ExitGuard(shared),
        })
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Runs until the last [`Routes`](super::Routes) is gone.
    pub(super) fn run(mut self) {
        while !self.shared.stop.load(Ordering::Acquire) {
            if let Err(err) = self.step() {
                log::error!(
                    "engine xdp: lost track of routes, replies use kernel sockets from now on: {err}"
                );
                break;
            }
        }
    }

    fn step(&mut self) -> io::Result<()> {
        let more = self.read_events()?;
        let now = Instant::now();
        // Only after all events were read: until then the kernel does not report further losses.
        if !more && self.reload_at.is_some_and(|at| at <= now) {
            self.reload();
        }
        if !more && self.reload_at.is_none() && self.is_fib_due(now) {
            self.load_fib(now);
        }
        if now >= self.next_epoch && (self.is_busy || self.table.len() > 0) {
            self.advance_epoch(now);
        }
        if now >= self.next_refresh || self.shared.refresh_requested.swap(false, Ordering::Acquire) {
            self.next_refresh = now + self.refresh_interval;
            lock(&self.shared.listeners).iter().for_each(|watcher| watcher(&Change::Refresh));
        }
        // Queries cannot be answered without valid tables.
        if self.reload_at.is_none() && now >= self.next_round && self.answer_queries() {
            self.next_round = now + ROUND_INTERVAL;
        }
        let timeout = self.timeout(more);
        self.sleep(timeout)
    }

    /// Applies events; true if there may be more.
    fn read_events(&mut self) -> io::Result<bool> {
        let mut effects = Effects::default();
        let (kernel, table) = (&mut self.kernel, &mut self.table);
        // Until the reload, events only change tables that are wrong.
        let lost = self.reload_at.is_some();
        let heard = self.events.read(EVENT_DATAGRAMS_MAX, |fact| {
            if !lost {
                kernel.apply(fact, table, &mut effects);
            }
        });
        let more = match heard {
            Ok(more) => more,
            Err(err) if matches!(err.raw_os_error(), Some(ENOBUFS | EBADMSG)) => {
                effects.flush = true;
                self.reload_at.get_or_insert(self.last_reload + RELOAD_INTERVAL);
                true
            }
            Err(err) => return Err(err),
        };
        self.publish(&effects);
        Ok(more)
    }

    /// Reads all tables anew.
    fn reload(&mut self) {
        log::debug!("netlink messages were lost: reading the kernel's tables again");
        let mut effects = Effects::default();
        let loaded = load(&mut self.query_socket, &mut self.table);
        self.last_reload = Instant::now();
        match loaded {
            Ok(kernel) => {
                self.kernel.replace(kernel, &mut effects);
                self.reload_at = None;
            }
            Err(err) => {
                log::warn!("cannot read the kernel's tables, trying again: {err}");
                self.reload_at = Some(self.last_reload + RELOAD_INTERVAL);
            }
        }
        self.publish(&effects);
    }

    /// True if the routing tables are to be read.
    fn is_fib_due(&self, now: Instant) -> bool {
        self.load_fib_at.is_some_and(|at| at <= now) && self.shared.uses_prefixes.load(Ordering::Acquire)
    }

    /// Reads the routing tables, if they are short.
    fn load_fib(&mut self, now: Instant) {
        let loaded = Fib::load();
        // It changed meanwhile: again, and not for the event alone, which may have come before.
        self.load_fib_at = matches!(loaded, Ok(None)).then_some(now + RELOAD_INTERVAL);
        self.fib = loaded.unwrap_or_else(|err| {
            log::debug!("cannot read the routing tables: each peer is asked for: {err}");
            None
        });
        self.last_fib = now;
        self.publish_prefixes();
    }

    /// Tells the lanes what prefixes say now.
    fn publish_prefixes(&self) {
        let prefixes = self.fib.as_ref().map(|fib| Prefixes::new(fib, &self.kernel)).unwrap_or_default();
        let mut published = lock(&self.shared.prefixes);
        if **published != prefixes {
            *published = Arc::new(prefixes);
            // Release: a lane that sees the number finds these.
            self.shared.prefixes_version.fetch_add(1, Ordering::Release);
        }
    }

    /// Applies the effects of updates.
    fn publish(&mut self, effects: &Effects) {
        if effects.routes_changed {
            self.load_fib_at.get_or_insert(self.last_fib + RELOAD_INTERVAL);
        }
        if self.fib.is_some() && (effects.routes_changed || effects.neighbours_changed) {
            // What is not known is not published: lanes ask for each peer meanwhile.
            self.fib = self.fib.take().filter(|_| !effects.routes_changed);
            self.publish_prefixes();
        }
        if effects.flush {
            self.table.clear();
        }
        if effects.flush || effects.revalidate || effects.requery {
            let clock = self.shared.clock.0.load(Ordering::Relaxed);
            // An entry of a past epoch stays valid until its next query is answered.
            let epoch = epoch_of(clock).wrapping_add(u16::from(effects.revalidate));
            self.set_clock(epoch, stamp_of(clock).wrapping_add(1));
        }
        if effects.changes.is_empty() {
            return;
        }
        *lock(&self.shared.local_state) = self.kernel.local_state();
        let watchers = lock(&self.shared.listeners);
        for change in &effects.changes {
            watchers.iter().for_each(|watcher| watcher(change));
        }
    }

    fn advance_epoch(&mut self, now: Instant) {
        let clock = self.shared.clock.0.load(Ordering::Relaxed);
        let epoch = epoch_of(clock).wrapping_add(1);
        self.table.expire(epoch);
        self.kernel.clear_awaited();
        self.set_clock(epoch, stamp_of(clock).wrapping_add(1));
        self.is_busy = false;
        self.next_epoch = now + self.refresh_interval;
    }

    fn set_clock(&self, epoch: u16, stamp: u32) {
        self.shared.clock.0.store(u64::from(epoch) << 32 | u64::from(stamp.max(1)), Ordering::Release);
    }

    /// Answers a round of queries; false if there were none.
    fn answer_queries(&mut self) -> bool {
        let epoch = epoch_of(self.shared.clock.0.load(Ordering::Relaxed));
        self.queries.clear();
        let queues = self.queues();
        // One from each queue in turn, so that a flood in one lane does not delay the others.
        self.first_queue = self.first_queue.wrapping_add(1);
        let (mut taken, mut empty) = (0, 0);
        let in_order = queues.iter().cycle().skip(self.first_queue % queues.len().max(1));
        for queue in in_order {
            let Some(pair) = queue.pop() else {
                empty += 1;
                if empty == queues.len() {
                    break;
                }
                continue;
            };
            (taken, empty) = (taken + 1, 0);
            // Another lane may have queried the same pair.
            let known = self.shared.table.find(&pair, self.shared.table.hash(&pair));
            if known.is_none_or(|found| found.epoch != epoch) {
                self.queries.extend(self.kernel.query(&pair).map(|question| (pair, question)));
            }
            if taken == QUERIES_PER_ROUND {
                break;
            }
        }
        let any = taken > 0;
        if any && !self.is_busy {
            // Epochs did not advance while there were no queries.
            self.is_busy = true;
            self.next_epoch = self.next_epoch.max(Instant::now() + self.refresh_interval);
        }
        self.query_kernel(epoch);
        any
    }

    fn query_kernel(&mut self, epoch: u16) {
        let (kernel, table, asked) = (&mut self.kernel, &mut self.table, &self.queries);
        let mut answered = [false; QUERIES_PER_ROUND];
        let outcome = self.query_socket.routes(asked.iter().map(|(_, question)| question), |index, route| {
            let Some((pair, question)) = asked.get(index) else { return };
            if let Some((hop, found)) = kernel.resolve(question.peer, &route, epoch) {
                table.insert(pair, hop, &found);
                answered[index] = true;
            }
        });
        // The pair is no longer reachable this way: an older result must not outlive this one.
        for ((pair, _), _) in asked.iter().zip(answered).filter(|(_, answered)| !answered) {
            table.remove_pair(pair);
        }
        if let Err(err) = outcome {
            // Queried again in the next epoch.
            log::debug!("the kernel does not answer route queries: {err}");
        }
    }

    /// The query queues of the open lanes.
    fn queues(&self) -> Vec<Arc<QueryQueue>> {
        let mut queues = lock(&self.shared.queues);
        queues.retain(|queue| queue.strong_count() > 0);
        queues.iter().filter_map(Weak::upgrade).collect()
    }

    /// Time until there is work to do; None: until an event.
    fn timeout(&self, more: bool) -> Option<Duration> {
        if more {
            return Some(Duration::ZERO);
        }
        let now = Instant::now();
        let epoch = (self.is_busy || self.table.len() > 0).then_some(self.next_epoch);
        let round = (now < self.next_round).then_some(self.next_round);
        let fib = self.load_fib_at.filter(|_| self.shared.uses_prefixes.load(Ordering::Acquire));
        let next =
            [epoch, round, self.reload_at, fib, Some(self.next_refresh)].into_iter().flatten().min()?;
        Some(next.saturating_duration_since(now))
    }

    fn sleep(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        // Between rounds, queries wait for the next one, so lanes need not wake this thread.
        let pausing = self.reload_at.is_some() || Instant::now() < self.next_round;
        let mut timeout = timeout.unwrap_or(Duration::MAX);
        if !pausing {
            self.shared.is_asleep.store(true, Ordering::Relaxed);
            // See `Reader::query`, which does the same in the opposite order.
            fence(Ordering::SeqCst);
            if self.queues().iter().any(|queue| !queue.is_empty()) {
                timeout = Duration::ZERO;
            }
        }
        let woken = self.epoll.wait(timeout.min(Duration::from_secs(3600)))?.any(|token| token == WOKEN);
        self.shared.is_asleep.store(false, Ordering::Relaxed);
        if woken {
            // One read consumes nearly all pending wake-ups.
            let _ = (&self.shared.woken).read(&mut [0; 64]);
        }
        Ok(())
    }
}

/// Loads the tables. `table` is needed only for the signature: no neighbour is in use yet.
fn load(questions: &mut QuerySocket, table: &mut Writer) -> io::Result<KernelTables> {
    let mut tries = 0;
    loop {
        let (mut kernel, mut effects) = (KernelTables::default(), Effects::default());
        let whole = questions.dump(|fact| kernel.apply(fact, table, &mut effects))?;
        tries += 1;
        if whole || tries == DUMP_ATTEMPTS_MAX {
            return Ok(kernel);
        }
    }
}
