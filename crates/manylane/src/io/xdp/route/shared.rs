//! State that the thread, the lanes and [`Routes`](super::Routes) share.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use super::changes::{Change, LocalState};
use super::prefixes::Prefixes;
use super::queries::QueryQueue;
use super::table::{Table, Writer};

pub(super) type ChangeListener = Box<dyn Fn(&Change) + Send>;

/// State shared between the thread, the lanes and the [`Routes`](super::Routes).
pub(super) struct Shared {
    pub(super) table: Arc<Table>,
    pub(super) clock: Clock,
    /// The thread sleeps, or is about to, until it is woken.
    pub(super) is_asleep: AtomicBool,
    pub(super) stop: AtomicBool,
    /// The watchers are to be notified of a refresh at once.
    pub(super) refresh_requested: AtomicBool,
    /// A byte written here wakes the thread, which watches the other end.
    wake: UnixStream,
    pub(super) woken: UnixStream,
    pub(super) has_exited: Mutex<bool>,
    pub(super) exited: Condvar,
    /// Lanes use prefixes: they are to be published.
    pub(super) uses_prefixes: AtomicBool,
    pub(super) prefixes: Mutex<Arc<Prefixes>>,
    /// Incremented after each change of them.
    pub(super) prefixes_version: AtomicU64,
    /// Query queues of the lanes. The queue of a closed lane is gone.
    pub(super) queues: Mutex<Vec<Weak<QueryQueue>>>,
    pub(super) local_state: Mutex<LocalState>,
    pub(super) listeners: Mutex<Vec<ChangeListener>>,
}

/// Two counters in one word. The upper half has the epoch (16 bits), by which entries age. The
/// lower half has a stamp that changes whenever queries are worth repeating.
///
/// The lanes read it once per batch, and it is rarely written, so it has its own cache lines.
#[repr(align(128))]
pub(super) struct Clock(pub(super) AtomicU64);

pub(super) fn epoch_of(clock: u64) -> u16 {
    (clock >> 32) as u16
}

pub(super) fn stamp_of(clock: u64) -> u32 {
    clock as u32
}

impl Shared {
    pub(super) fn new(table: &Writer, locals: LocalState) -> io::Result<Self> {
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
            uses_prefixes: AtomicBool::new(false),
            prefixes: Mutex::default(),
            prefixes_version: AtomicU64::new(0),
            queues: Mutex::default(),
            local_state: Mutex::new(locals),
            listeners: Mutex::default(),
        })
    }

    /// Wakes the thread. If the write fails, the pipe is full of wake-ups already.
    pub(super) fn wake(&self) {
        let _ = (&self.wake).write(&[0]);
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
