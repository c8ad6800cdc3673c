//! Lanes that leave, and the end of the socket: out of steering, a grace period, drained, closed or
//! parked.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use manylane_sys::{barrier, sock};

use super::Shared;
use crate::counters::LaneId;
use crate::error::{Error, ErrorKind, Result};
use crate::lane_shared::{DRAINING, LaneShared, RETIRING, SHUT_DOWN};

/// How long the removal of a lane waits for its thread to finish the batch that it works on.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

impl Shared {
    /// Whether lanes can be taken out of steering.
    pub(crate) fn can_retire(&self) -> bool {
        self.control().steer.needs_parking()
    }

    /// Takes a lane out of steering; when this returns nothing more arrives in its queue.
    pub(crate) fn retire(&self, lane: &LaneShared) -> Result<()> {
        {
            let mut control = self.control();
            if !lane.is_open() {
                let under_way = lane.state.load(Ordering::Relaxed) == RETIRING;
                drop(control);
                // Somebody else has taken it out, and waits as this does: what was steered before
                // is queued then.
                if under_way {
                    barrier::synchronize();
                }
                return Ok(());
            }
            let Some(other) =
                control.lanes.iter().find(|other| other.id != lane.id && other.is_open()).cloned()
            else {
                let message = "the last lane of a socket cannot leave: stop the socket";
                return Err(Error::new(ErrorKind::LastLane, message));
            };
            control.steer.retire(lane.slot, other.fd.as_fd())?;
            if let Some(plane) = self.xdp.as_ref() {
                plane.retire(lane.id);
            }
            lane.state.store(RETIRING, Ordering::Relaxed);
        }
        barrier::synchronize();
        // Only now: a thread that sees it drains the queue and ends, which must not be before the
        // last datagram has arrived. It may have noticed a stop meanwhile, and have stopped
        // receiving.
        _ = lane.state.fetch_max(DRAINING, Ordering::Relaxed);
        Ok(())
    }

    /// A lane is about to close: makes sure that nothing more arrives in its queue. Returns whether
    /// its socket can serve another lane.
    pub(crate) fn detach(&self, lane: &LaneShared) -> bool {
        let retired = !self.is_stopping() && self.retire(lane).is_ok();
        if !retired {
            self.shut_down(lane);
        }
        retired && lane.state.load(Ordering::Relaxed) != SHUT_DOWN
    }

    /// Lets nothing more into the queue of a lane of a socket that ends.
    pub(crate) fn shut_down(&self, lane: &LaneShared) {
        if lane.state.swap(SHUT_DOWN, Ordering::Relaxed) == SHUT_DOWN {
            return;
        }
        if let Some(plane) = self.xdp.as_ref() {
            plane.disable_lane(lane.id);
        }
        // Without the filter, what arrives between here and the close is lost uncounted: nothing
        // worse.
        if sock::drop_all_incoming(lane.fd.as_fd()).is_ok() {
            barrier::synchronize();
        }
    }

    /// A lane has been drained: keeps its counters, and its socket where the group must not be
    /// renumbered. With the last one, the sockets (inodes) that rings of other threads may have
    /// although they are closed; `has_left` is whether such a ring has used this one's.
    pub(crate) fn finish_close(&self, lane: &Arc<LaneShared>, reusable: bool, has_left: bool) -> Vec<u64> {
        let mut control = self.control();
        if has_left && let Ok(inode) = sock::inode(lane.fd.as_fd()) {
            control.orphaned.push(inode);
        }
        let mut left = Vec::new();
        let counters = self.counters_of(&control, lane);
        control.closed += counters;
        control.lanes.retain(|other| other.id != lane.id);
        let is_last = control.lanes.is_empty();
        if is_last {
            // The socket is gone: what was parked must not keep the port.
            control.parked.clear();
            control.steer.close();
            left = std::mem::take(&mut control.orphaned);
        } else if reusable && control.steer.needs_parking() {
            control.parked.push((lane.slot, Arc::clone(&lane.fd)));
        }
        drop(control);
        if let Some(plane) = self.xdp.as_ref().filter(|_| is_last) {
            plane.close();
        }
        self.lane_closed.notify_all();
        left
    }

    /// Tells every lane to end: they handle what is queued, and `serve` returns.
    pub(crate) fn stop(&self) {
        let control = self.control();
        self.stopping.store(true, Ordering::Relaxed);
        if let Some(plane) = self.xdp.as_ref() {
            plane.stop_updates();
        }
        for lane in &control.lanes {
            // One that has stopped receiving has noticed already.
            _ = lane.state.fetch_max(DRAINING, Ordering::Release);
            sock::wake(lane.fd.as_fd());
        }
    }

    /// The queues of a lane are drained, and it closes.
    pub(crate) fn remove_queues(&self, lane: LaneId) {
        if let Some(plane) = self.xdp.as_ref() {
            plane.remove_lane(lane);
        }
    }

    pub(crate) fn remove_lane(&self, id: LaneId) -> Result<()> {
        let unknown = || Error::new(ErrorKind::State, format!("the socket has no open lane {id}"));
        let lane =
            self.lanes().into_iter().find(|lane| lane.id == id && lane.is_open()).ok_or_else(unknown)?;
        self.retire(&lane)?;
        let fd = Arc::downgrade(&lane.fd);
        drop(lane);
        // The lane's thread notices within the time that an idle lane sleeps. Waking it (as a stop
        // does) would keep the socket awake for good, and the next lane may be given it.
        let mut control = self.control();
        let parks = control.steer.needs_parking();
        let deadline = Instant::now() + DRAIN_TIMEOUT;
        // A socket that is not parked is closed when the last that looks at the lane lets go of it,
        // a moment after the lane has left the list.
        while control.lanes.iter().any(|lane| lane.id == id) || (!parks && fd.strong_count() > 0) {
            if Instant::now() > deadline {
                let message = format!("lane {id} is out of steering, but its closure has not returned yet");
                return Err(Error::new(ErrorKind::State, message));
            }
            let waited = self.lane_closed.wait_timeout(control, Duration::from_millis(10));
            control = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }
}
