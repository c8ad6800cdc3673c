//! Serving: a pinned thread per lane that runs the application's closure on each batch.

#[cfg(test)]
mod tests;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Sender};
use std::thread::{self, Scope};
use std::time::Duration;

use manylane_sys::cpu;

use crate::counters::{Counters, LaneId};
use crate::error::{Error, ErrorKind, Result};
use crate::group::Shared;
use crate::io::RecvSummary;
use crate::io::batch::Batch;
use crate::lane::{Lane, Received};
use crate::outbox::Outbox;
use crate::socket::{Event, Socket};

/// Longest sleep of an idle lane: the time within which it notices that it has to leave.
const IDLE_TIMEOUT: Duration = Duration::from_millis(20);
/// Failed receives in a row after which a lane ends.
const ERRORS_MAX: u32 = 1000;

/// Describes a lane to the function that makes its closure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LaneInfo {
    /// The lane.
    pub id: LaneId,
    /// The CPU that its thread is pinned to; none without pinning.
    pub cpu: Option<usize>,
}

impl Socket {
    /// Runs `handler` on every batch of every lane, with one pinned thread and one clone of the
    /// handler per lane, until [`Handle::stop`](crate::Handle::stop). Replies are sent when the
    /// closure returns.
    ///
    /// After a stop, lanes still handle what is queued. Then the counters are returned.
    ///
    /// # Errors
    /// [`ErrorKind::Panicked`] if a closure panicked: the other lanes are stopped, and the error
    /// carries the panic's message. Otherwise the error that ended a lane.
    pub fn serve<F>(self, handler: F) -> Result<Counters>
    where
        F: for<'a> FnMut(Batch<'a>, &mut Outbox<'a>) + Clone + Send,
    {
        self.serve_with(|_| handler.clone())
    }

    /// Like [`serve`](Self::serve), with a closure made for each lane, including lanes added
    /// later.
    ///
    /// # Errors
    /// As for [`serve`](Self::serve).
    pub fn serve_with<M, F>(self, mut make: M) -> Result<Counters>
    where
        M: FnMut(LaneInfo) -> F,
        F: for<'a> FnMut(Batch<'a>, &mut Outbox<'a>) + Send,
    {
        let Self { shared, server, lanes } = self;
        let (events, inbox) = mpsc::channel();
        server.set(Some(events.clone()));
        let mut outcome = Ok(());
        thread::scope(|scope| {
            let mut running = 0;
            let mut run = |lane: Box<Lane>| {
                let info = LaneInfo { id: lane.id(), cpu: lane.cpu() };
                // Lanes that run already have to be stopped, or this scope would wait for them for
                // ever.
                let handler = catch_unwind(AssertUnwindSafe(|| make(info)));
                let handler = handler.map_err(|panic| panic_error(info.id, panic.as_ref()))?;
                spawn(scope, lane, handler, events.clone())
            };
            let mut pending = lanes.into_iter();
            loop {
                let event = match pending.next() {
                    Some(lane) => Event::Run(Box::new(lane)),
                    None if running == 0 => break,
                    // Cannot fail: the sender in this scope outlives the loop.
                    None => inbox.recv().unwrap_or(Event::Ended(Ok(()))),
                };
                let ended = match event {
                    Event::Run(lane) => match run(lane) {
                        Ok(()) => {
                            running += 1;
                            continue;
                        }
                        Err(err) => Err(err),
                    },
                    Event::Ended(ended) => {
                        running -= 1;
                        ended
                    }
                };
                if let Err(err) = ended {
                    shared.stop();
                    // The first error is the cause; later ones follow from it.
                    if outcome.is_ok() {
                        outcome = Err(err);
                    }
                }
            }
        });
        server.set(None);
        // Lanes that were added while the socket was stopping never ran: they close here.
        drop(inbox);
        outcome.map(|()| shared.counters())
    }
}

/// Spawns the thread of a lane.
fn spawn<'scope, F>(
    scope: &'scope Scope<'scope, '_>,
    mut lane: Box<Lane>,
    mut handler: F,
    events: Sender<Event>,
) -> Result<()>
where
    F: for<'a> FnMut(Batch<'a>, &mut Outbox<'a>) + Send + 'scope,
{
    let shared: Arc<Shared> = lane.shared();
    let name = format!("lane-{}", lane.id());
    let body = move || {
        let id = lane.id();
        // Unwind safe: the closure is dropped after a panic, and its state is not used again.
        let ended = catch_unwind(AssertUnwindSafe(|| run(&mut lane, &mut handler, &shared)));
        let ended = ended.unwrap_or_else(|panic| Err(panic_error(id, panic.as_ref())));
        drop(lane);
        // The loop of `serve` receives for as long as a lane runs.
        let _ = events.send(Event::Ended(ended));
    };
    let spawned = thread::Builder::new().name(name).spawn_scoped(scope, body);
    spawned.map(|_| ()).map_err(|err| {
        let message = "starting a thread for a lane: raise the limit of threads (ulimit -u, TasksMax=)";
        Error::with(ErrorKind::Limit, message, err)
    })
}

fn panic_error(id: LaneId, panic: &(dyn Any + Send)) -> Error {
    let said = panic.downcast_ref::<&str>().copied();
    let said = said.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
    Error::new(ErrorKind::Panicked, format!("the closure of lane {id} panicked: {said}"))
}

/// The one loop of a lane: wait and receive, handle, send the replies, delay.
fn run<F>(lane: &mut Lane, handler: &mut F, shared: &Shared) -> Result<()>
where
    F: for<'a> FnMut(Batch<'a>, &mut Outbox<'a>),
{
    if let Err(err) = lane.pin() {
        log::warn!("lane {} runs unpinned: {err}", lane.id());
    }
    lane.lane_shared().tid.store(cpu::thread_id(), Ordering::Relaxed);
    lane.start_coalescing();
    // A lane that polls sleeps afterwards.
    let idle = shared.config.wait.spin_time() + IDLE_TIMEOUT;
    let mut errors = 0;
    while !lane.is_draining() {
        let summary = lane.recv_serving(idle);
        if let Some(messages) = handle(lane, summary, handler, &mut errors)? {
            lane.delay_after(messages);
        }
    }
    drain(lane, handler, &mut errors)
}

/// Handles what is queued on a lane that is being removed.
///
/// No more datagrams may arrive: the lane is out of steering, or has shut down its receive side. It
/// shuts down if the socket is stopped only now, or if more arrives than was queued: where the
/// kernel selects the lane, it goes on to select this one.
fn drain<F>(lane: &mut Lane, handler: &mut F, errors: &mut u32) -> Result<()>
where
    F: for<'a> FnMut(Batch<'a>, &mut Outbox<'a>),
{
    let mut queued = lane.queued();
    loop {
        lane.maybe_shut_down(queued == 0);
        let summary = lane.recv_batch();
        match handle(lane, summary, handler, errors)? {
            Some(0) => return Ok(()),
            Some(messages) => queued = queued.saturating_sub(messages),
            None => {}
        }
    }
}

/// Calls `handler` with the batch that was received, and sends the replies. Returns its messages;
/// none if the receive failed. That is counted in `errors`: only a socket that keeps failing ends
/// the lane.
#[inline(always)]
fn handle<F>(
    lane: &mut Lane,
    summary: Result<RecvSummary>,
    handler: &mut F,
    errors: &mut u32,
) -> Result<Option<usize>>
where
    F: for<'a> FnMut(Batch<'a>, &mut Outbox<'a>),
{
    let summary = match summary {
        Ok(summary) => summary,
        Err(err) if *errors == ERRORS_MAX => return Err(err),
        Err(_) => {
            *errors += 1;
            return Ok(None);
        }
    };
    *errors = 0;
    if summary.messages > 0 {
        let Received { batch, mut out } = lane.received(summary);
        handler(batch, &mut out);
    }
    Ok(Some(summary.messages))
}
