//! The background thread: listens to the kernel, answers the lanes, keeps the table.

use std::io::{self, Read};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use manylane_sys::measure::Watch;

use super::asks::Queue;
use super::kernel::{Effects, Kernel};
use super::netlink::{Events, QUESTIONS, Question, Questions};
use super::table::{Pair, Writer};
use super::{Change, Shared, epoch_of, lock, stamp_of};
use crate::error::ENOBUFS;

/// How often entries that are in use are asked for again.
pub(super) const TURN: Duration = Duration::from_secs(4);

/// Questions that are answered in one go, and the pause after it. Together they bound what a flood of new peers
/// costs: 16,000 questions a second, some microseconds each. What finds its queue full is asked for by a later
/// datagram, if there is one.
pub(super) const ROUND: usize = QUESTIONS;
pub(super) const PAUSE: Duration = Duration::from_millis(1);

/// Datagrams of events between two looks at anything else.
const EVENTS: usize = 256;
/// Two readings of everything are at least so far apart, however many events are lost.
const RELOAD: Duration = Duration::from_millis(200);
/// A dump that something changed under is done again at most so often; then events put it right.
const DUMPS: usize = 3;

const WOKEN: u64 = 0;
const EVENT: u64 = 1;

pub(super) struct Worker {
    shared: Arc<Shared>,
    table: Writer,
    kernel: Kernel,
    events: Events,
    questions: Questions,
    watch: Watch,
    /// What was asked, in the order of asking.
    asked: Vec<(Pair, Question)>,
    /// The queue that comes first when the next round begins, so that none is left out.
    first: usize,
    /// Something was asked since the clock turned.
    busy: bool,
    period: Duration,
    /// When the clock turns next, unless nobody asks.
    turn: Instant,
    next_round: Instant,
    /// When the watchers are told of a turn next: also if nobody asks.
    look: Instant,
    /// Events were lost: everything is to be read anew, at this time at the earliest.
    reload: Option<Instant>,
    /// When all was read last.
    loaded: Instant,
    /// Dropped last, after the sockets.
    #[expect(dead_code, reason = "kept for its drop")]
    farewell: Farewell,
}

/// Tells whoever waits for it that the thread is at its end, however it got there.
struct Farewell(Arc<Shared>);

impl Drop for Farewell {
    fn drop(&mut self) {
        // Nobody is to wake us any more.
        self.0.asleep.store(false, Ordering::Relaxed);
        *lock(&self.0.ended) = true;
        self.0.end.notify_all();
    }
}

impl Worker {
    /// Opens the sockets in the namespace of the calling thread and reads its tables. The clock turns every `period`.
    pub(super) fn open(period: Duration) -> io::Result<Self> {
        // Events first: what changes during the dump comes after it.
        let events = Events::subscribe()?;
        let mut questions = Questions::open()?;
        let mut table = Writer::new();
        let kernel = load(&mut questions, &mut table)?;
        let shared = Arc::new(Shared::new(&table, kernel.locals())?);
        let watch = Watch::new(2)?;
        watch.add(&shared.woken, WOKEN)?;
        watch.add(&events, EVENT)?;
        let now = Instant::now();
        Ok(Self {
            shared: Arc::clone(&shared),
            table,
            kernel,
            events,
            questions,
            watch,
            asked: Vec::with_capacity(ROUND),
            first: 0,
            busy: false,
            period,
            turn: now,
            next_round: now,
            look: now + period,
            reload: None,
            loaded: now,
            farewell: Farewell(shared),
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
        let more = self.hear()?;
        let now = Instant::now();
        // Not before all events are taken: only then does the kernel tell again if it loses some.
        if !more && self.reload.is_some_and(|at| at <= now) {
            self.reload();
        }
        if now >= self.turn && (self.busy || self.table.len() > 0) {
            self.turn_clock(now);
        }
        if now >= self.look || self.shared.nudged.swap(false, Ordering::Acquire) {
            self.look = now + self.period;
            lock(&self.shared.watchers).iter().for_each(|watcher| watcher(&Change::Turn));
        }
        // Without a picture of the tables nothing can be answered.
        if self.reload.is_none() && now >= self.next_round && self.answer() {
            self.next_round = now + PAUSE;
        }
        let timeout = self.timeout(more);
        self.sleep(timeout)
    }

    /// Takes note of what the kernel has told; true if it may have told more.
    fn hear(&mut self) -> io::Result<bool> {
        let mut effects = Effects::default();
        let (kernel, table) = (&mut self.kernel, &mut self.table);
        // Until everything is read anew, events only add to a picture that is wrong.
        let lost = self.reload.is_some();
        let heard = self.events.read(EVENTS, |fact| {
            if !lost {
                kernel.learn(fact, table, &mut effects);
            }
        });
        let more = match heard {
            Ok(more) => more,
            Err(err) if err.raw_os_error() == Some(ENOBUFS) => {
                effects.forget = true;
                self.reload.get_or_insert(self.loaded + RELOAD);
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
        let loaded = load(&mut self.questions, &mut self.table);
        self.loaded = Instant::now();
        match loaded {
            Ok(kernel) => {
                self.kernel.replace(kernel, &mut effects);
                self.reload = None;
            }
            Err(err) => {
                log::warn!("reading the kernel's tables failed, and is tried again: {err}");
                self.reload = Some(self.loaded + RELOAD);
            }
        }
        self.publish(&effects);
    }

    /// Carries out what came of facts.
    fn publish(&mut self, effects: &Effects) {
        if effects.forget {
            self.table.clear();
        }
        if effects.forget || effects.doubt || effects.ask_again {
            let clock = self.shared.clock.0.load(Ordering::Relaxed);
            // An entry of an epoch that is over is good until the answer to the next question is there.
            let epoch = epoch_of(clock).wrapping_add(u16::from(effects.doubt));
            self.set_clock(epoch, stamp_of(clock).wrapping_add(1));
        }
        if effects.changes.is_empty() {
            return;
        }
        *lock(&self.shared.locals) = self.kernel.locals();
        let watchers = lock(&self.shared.watchers);
        for change in &effects.changes {
            watchers.iter().for_each(|watcher| watcher(change));
        }
    }

    fn turn_clock(&mut self, now: Instant) {
        let clock = self.shared.clock.0.load(Ordering::Relaxed);
        let epoch = epoch_of(clock).wrapping_add(1);
        self.table.expire(epoch);
        self.kernel.forget_awaited();
        self.set_clock(epoch, stamp_of(clock).wrapping_add(1));
        self.busy = false;
        self.turn = now + self.period;
    }

    fn set_clock(&self, epoch: u16, stamp: u32) {
        self.shared.clock.0.store(u64::from(epoch) << 32 | u64::from(stamp.max(1)), Ordering::Release);
    }

    /// Answers a round of questions; false if there were none.
    fn answer(&mut self) -> bool {
        let epoch = epoch_of(self.shared.clock.0.load(Ordering::Relaxed));
        self.asked.clear();
        let queues = self.queues();
        // One from each in turn: a lane in a flood does not keep the others from theirs.
        self.first = self.first.wrapping_add(1);
        let (mut taken, mut empty) = (0, 0);
        let in_turn = queues.iter().cycle().skip(self.first % queues.len().max(1));
        for queue in in_turn {
            let Some(pair) = queue.take() else {
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
                self.asked.extend(self.kernel.question(&pair).map(|question| (pair, question)));
            }
            if taken == ROUND {
                break;
            }
        }
        let any = taken > 0;
        if any && !self.busy {
            // The clock stood still while nobody asked.
            self.busy = true;
            self.turn = self.turn.max(Instant::now() + self.period);
        }
        self.ask_kernel(epoch);
        any
    }

    fn ask_kernel(&mut self, epoch: u16) {
        let (kernel, table, asked) = (&mut self.kernel, &mut self.table, &self.asked);
        let mut answered = [false; ROUND];
        let outcome = self.questions.routes(asked.iter().map(|(_, question)| question), |index, route| {
            let Some((pair, question)) = asked.get(index) else { return };
            if let Some((hop, found)) = kernel.resolve(question.peer, &route, epoch) {
                table.put(pair, hop, &found);
                answered[index] = true;
            }
        });
        // What was known and cannot be reached so any more: an earlier answer must not outlive this one.
        for ((pair, _), _) in asked.iter().zip(answered).filter(|(_, answered)| !answered) {
            table.forget(pair);
        }
        if let Err(err) = outcome {
            // Asked again when the clock turns.
            log::debug!("the kernel does not answer questions for routes: {err}");
        }
    }

    /// The queues of the lanes there are.
    fn queues(&self) -> Vec<Arc<Queue>> {
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
        let turn = (self.busy || self.table.len() > 0).then_some(self.turn);
        let round = (now < self.next_round).then_some(self.next_round);
        let next = [turn, round, self.reload, Some(self.look)].into_iter().flatten().min()?;
        Some(next.saturating_duration_since(now))
    }

    fn sleep(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        // In the pause after a round, questions wait for its end: nobody has to wake us for them.
        let pausing = self.reload.is_some() || Instant::now() < self.next_round;
        let mut timeout = timeout.unwrap_or(Duration::MAX);
        if !pausing {
            self.shared.asleep.store(true, Ordering::Relaxed);
            // See `Reader::ask`, which does the same the other way round.
            fence(Ordering::SeqCst);
            if self.queues().iter().any(|queue| !queue.is_empty()) {
                timeout = Duration::ZERO;
            }
        }
        let woken = self.watch.wait(timeout.min(Duration::from_secs(3600)))?.any(|token| token == WOKEN);
        self.shared.asleep.store(false, Ordering::Relaxed);
        if woken {
            // One read takes all the wake-ups there are, or nearly.
            let _ = (&self.shared.woken).read(&mut [0; 64]);
        }
        Ok(())
    }
}

/// A picture of the tables. The table of next hops is only there for form's sake: no neighbour is used yet.
fn load(questions: &mut Questions, table: &mut Writer) -> io::Result<Kernel> {
    let mut tries = 0;
    loop {
        let (mut kernel, mut effects) = (Kernel::default(), Effects::default());
        let whole = questions.dump(|fact| kernel.learn(fact, table, &mut effects))?;
        tries += 1;
        if whole || tries == DUMPS {
            return Ok(kernel);
        }
    }
}
