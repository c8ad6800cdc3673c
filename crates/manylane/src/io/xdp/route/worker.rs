//! The background thread: listens to the kernel, answers the lanes, keeps the table.

use std::io::{self, Read};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use manylane_sys::measure::Epoll;

use super::kernel_tables::{Effects, KernelTables};
use super::netlink::{EventSocket, QUERIES_MAX, QuerySocket, RouteQuery};
use super::queries::QueryQueue;
use super::table::{RouteKey, Writer};
use super::{Change, Shared, epoch_of, lock, stamp_of};
use crate::error::ENOBUFS;

/// How often entries that are in use are asked for again.
pub(super) const REFRESH_INTERVAL: Duration = Duration::from_secs(4);

/// Questions that are answered in one go, and the pause after it. Together they bound what a flood
/// of new peers costs: 16,000 questions a second, some microseconds each. What finds its queue full
/// is asked for by a later datagram, if there is one.
pub(super) const QUERIES_PER_ROUND: usize = QUERIES_MAX;
pub(super) const ROUND_INTERVAL: Duration = Duration::from_millis(1);

/// Datagrams of events between two looks at anything else.
const EVENT_DATAGRAMS_MAX: usize = 256;
/// Two readings of everything are at least so far apart, however many events are lost.
const RELOAD_INTERVAL: Duration = Duration::from_millis(200);
/// A dump that something changed under is done again at most so often; then events put it right.
const DUMP_ATTEMPTS_MAX: usize = 3;

const WOKEN: u64 = 0;
const EVENT: u64 = 1;

pub(super) struct Worker {
    shared: Arc<Shared>,
    table: Writer,
    kernel: KernelTables,
    events: EventSocket,
    query_socket: QuerySocket,
    epoll: Epoll,
    /// What was asked, in the order of asking.
    queries: Vec<(RouteKey, RouteQuery)>,
    /// The queue that comes first when the next round begins, so that none is left out.
    first_queue: usize,
    /// Something was asked since the clock turned.
    is_busy: bool,
    refresh_interval: Duration,
    /// When the clock turns next, unless nobody asks.
    next_epoch: Instant,
    next_round: Instant,
    /// When the watchers are told of a turn next: also if nobody asks.
    next_refresh: Instant,
    /// Events were lost: everything is to be read anew, at this time at the earliest.
    reload_at: Option<Instant>,
    /// When all was read last.
    last_reload: Instant,
    /// Dropped last, after the sockets.
    #[expect(dead_code, reason = "kept for its drop")]
    exit_guard: ExitGuard,
}

/// Tells whoever waits for it that the thread is at its end, however it got there.
struct ExitGuard(Arc<Shared>);

impl Drop for ExitGuard {
    fn drop(&mut self) {
        // Nobody is to wake us any more.
        self.0.is_asleep.store(false, Ordering::Relaxed);
        *lock(&self.0.has_exited) = true;
        self.0.exited.notify_all();
    }
}

impl Worker {
    /// Opens the sockets in the namespace of the calling thread and reads its tables. The clock
    /// turns every `period`.
    pub(super) fn open(period: Duration) -> io::Result<Self> {
        // Events first: what changes during the dump comes after it.
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
                log::error!("routes are no longer followed, replies take the ordinary sockets: {err}");
                break;
            }
        }
    }

    fn step(&mut self) -> io::Result<()> {
        let more = self.read_events()?;
        let now = Instant::now();
        // Not before all events are taken: only then does the kernel tell again if it loses some.
        if !more && self.reload_at.is_some_and(|at| at <= now) {
            self.reload();
        }
        if now >= self.next_epoch && (self.is_busy || self.table.len() > 0) {
            self.advance_epoch(now);
        }
        if now >= self.next_refresh || self.shared.refresh_requested.swap(false, Ordering::Acquire) {
            self.next_refresh = now + self.refresh_interval;
            lock(&self.shared.listeners).iter().for_each(|watcher| watcher(&Change::Refresh));
        }
        // Without a picture of the tables nothing can be answered.
        if self.reload_at.is_none() && now >= self.next_round && self.answer_queries() {
            self.next_round = now + ROUND_INTERVAL;
        }
        let timeout = self.timeout(more);
        self.sleep(timeout)
    }

    /// Takes note of what the kernel has told; true if it may have told more.
    fn read_events(&mut self) -> io::Result<bool> {
        let mut effects = Effects::default();
        let (kernel, table) = (&mut self.kernel, &mut self.table);
        // Until everything is read anew, events only add to a picture that is wrong.
        let lost = self.reload_at.is_some();
        let heard = self.events.read(EVENT_DATAGRAMS_MAX, |fact| {
            if !lost {
                kernel.apply(fact, table, &mut effects);
            }
        });
        let more = match heard {
            Ok(more) => more,
            Err(err) if err.raw_os_error() == Some(ENOBUFS) => {
                effects.flush = true;
                self.reload_at.get_or_insert(self.last_reload + RELOAD_INTERVAL);
                true
            }
            Err(err) => return Err(err),
        };
        self.publish(&effects);
        Ok(more)
    }

    /// Reads everything anew.
    fn reload(&mut self) {
        log::debug!("the kernel had more to tell than there was room for: reading its tables anew");
        let mut effects = Effects::default();
        let loaded = load(&mut self.query_socket, &mut self.table);
        self.last_reload = Instant::now();
        match loaded {
            Ok(kernel) => {
                self.kernel.replace(kernel, &mut effects);
                self.reload_at = None;
            }
            Err(err) => {
                log::warn!("reading the kernel's tables failed, and is tried again: {err}");
                self.reload_at = Some(self.last_reload + RELOAD_INTERVAL);
            }
        }
        self.publish(&effects);
    }

    /// Carries out what came of facts.
    fn publish(&mut self, effects: &Effects) {
        if effects.flush {
            self.table.clear();
        }
        if effects.flush || effects.revalidate || effects.requery {
            let clock = self.shared.clock.0.load(Ordering::Relaxed);
            // An entry of an epoch that is over is good until the answer to the next question is
            // there.
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

    /// Answers a round of questions; false if there were none.
    fn answer_queries(&mut self) -> bool {
        let epoch = epoch_of(self.shared.clock.0.load(Ordering::Relaxed));
        self.queries.clear();
        let queues = self.queues();
        // One from each in turn: a lane in a flood does not keep the others from theirs.
        self.first_queue = self.first_queue.wrapping_add(1);
        let (mut taken, mut empty) = (0, 0);
        let in_turn = queues.iter().cycle().skip(self.first_queue % queues.len().max(1));
        for queue in in_turn {
            let Some(pair) = queue.pop() else {
                empty += 1;
                if empty == queues.len() {
                    break;
                }
                continue;
            };
            (taken, empty) = (taken + 1, 0);
            // Another lane may have asked the same.
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
            // The clock stood still while nobody asked.
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
        // What was known and cannot be reached so any more: an earlier answer must not outlive this
        // one.
        for ((pair, _), _) in asked.iter().zip(answered).filter(|(_, answered)| !answered) {
            table.remove_pair(pair);
        }
        if let Err(err) = outcome {
            // Asked again when the clock turns.
            log::debug!("the kernel does not answer questions for routes: {err}");
        }
    }

    /// The queues of the lanes there are.
    fn queues(&self) -> Vec<Arc<QueryQueue>> {
        let mut queues = lock(&self.shared.queues);
        queues.retain(|queue| queue.strong_count() > 0);
        queues.iter().filter_map(Weak::upgrade).collect()
    }

    /// How long there is nothing to do; None: until something comes.
    fn timeout(&self, more: bool) -> Option<Duration> {
        if more {
            return Some(Duration::ZERO);
        }
        let now = Instant::now();
        let turn = (self.is_busy || self.table.len() > 0).then_some(self.next_epoch);
        let round = (now < self.next_round).then_some(self.next_round);
        let next = [turn, round, self.reload_at, Some(self.next_refresh)].into_iter().flatten().min()?;
        Some(next.saturating_duration_since(now))
    }

    fn sleep(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        // In the pause after a round, questions wait for its end: nobody has to wake us for them.
        let pausing = self.reload_at.is_some() || Instant::now() < self.next_round;
        let mut timeout = timeout.unwrap_or(Duration::MAX);
        if !pausing {
            self.shared.is_asleep.store(true, Ordering::Relaxed);
            // See `Reader::ask`, which does the same the other way round.
            fence(Ordering::SeqCst);
            if self.queues().iter().any(|queue| !queue.is_empty()) {
                timeout = Duration::ZERO;
            }
        }
        let woken = self.epoll.wait(timeout.min(Duration::from_secs(3600)))?.any(|token| token == WOKEN);
        self.shared.is_asleep.store(false, Ordering::Relaxed);
        if woken {
            // One read takes all the wake-ups there are, or nearly.
            let _ = (&self.shared.woken).read(&mut [0; 64]);
        }
        Ok(())
    }
}

/// A picture of the tables. The table of next hops is only there for form's sake: no neighbour is
/// used yet.
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
