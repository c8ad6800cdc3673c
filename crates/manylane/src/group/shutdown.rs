//! Removal of lanes, and the end of the socket: out of steering, a grace period, drained, closed
//! or parked.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use manylane_sys::{barrier, sock};

use super::Shared;
use crate::counters::LaneId;
use crate::error::{Error, ErrorKind, Result};
use crate::lane_shared::{DRAINING, LaneShared, RETIRING, SHUT_DOWN};

/// Time limit of a removal: how long it waits for the lane's thread to finish its current batch.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

impl Shared {
    /// True if lanes can be taken out of steering.
    pub(crate) fn can_retire(&self) -> bool {
        self.control().steer.needs_parking()
    }

    /// Takes a lane out of steering. When this returns, no more datagrams arrive in its queue.
    pub(crate) fn retire(&self, lane: &LaneShared) -> Result<()> {
        {
            let mut control = self.control();
            if !lane.is_open() {
                let under_way = lane.state.load(Ordering::Relaxed) == RETIRING;
                drop(control);
                // Another thread has taken it out. Wait for a grace period too: datagrams steered
                // before are then queued.
                if under_way {
                    barrier::synchronize();
                }
                return Ok(());
            }
            let Some(other) =
                control.lanes.iter().find(|other| other.id != lane.id && other.is_open()).cloned()
            else {
                let message = "cannot remove the last lane of a socket: stop the socket";
                return Err(Error::new(ErrorKind::LastLane, message));
            };
            control.steer.retire(lane.slot, other.fd.as_fd())?;
            control.close_parked_if_selected();
            self.engine.retire(lane.id);
            lane.state.store(RETIRING, Ordering::Relaxed);
        }
        barrier::synchronize();
        // Set only after the grace period: a thread that sees the state drains the queue and ends,
        // which must not happen before the last datagram has arrived. It may have noticed a stop
        // meanwhile and shut down receiving; `fetch_max` keeps that state.
        _ = lane.state.fetch_max(DRAINING, Ordering::Relaxed);
        Ok(())
    }

    /// Called when a lane is about to close. Ensures that no more datagrams arrive in its queue.
    /// Returns true if its socket can serve another lane.
    pub(crate) fn detach(&self, lane: &LaneShared) -> bool {
        let retired = !self.is_stopping() && self.retire(lane).is_ok();
        if !retired {
            self.shut_down(lane);
        }
        retired && lane.state.load(Ordering::Relaxed) != SHUT_DOWN
    }

    /// Refuses new datagrams at the queue of a lane whose socket ends.
    pub(crate) fn shut_down(&self, lane: &LaneShared) {
        if lane.state.swap(SHUT_DOWN, Ordering::Relaxed) == SHUT_DOWN {
            return;
        }
        self.engine.shut_down(lane.id);
        // If the filter fails, datagrams that arrive from here to the close are lost uncounted.
        if sock::drop_all_incoming(lane.fd.as_fd()).is_ok() {
            barrier::synchronize();
        }
    }

    /// Called when a lane has been drained. Keeps its counters, and its socket if the group must
    /// not be renumbered.
    pub(crate) fn finish_close(&self, lane: &Arc<LaneShared>, reusable: bool) {
        let mut control = self.control();
        let counters = self.counters_of(&control, lane);
        control.closed += counters;
        control.lanes.retain(|other| other.id != lane.id);
        let is_last = control.lanes.is_empty();
        if is_last {
            // Last lane: the parked sockets must not keep the port.
            control.parked.clear();
            control.steer.close();
        } else if reusable && control.steer.needs_parking() {
            control.parked.push((lane.slot, Arc::clone(&lane.fd), lane.offloads));
        }
        drop(control);
        if is_last {
            self.engine.close();
        }
        self.lane_closed.notify_all();
    }

    /// Tells every lane to end: lanes handle what is queued, and `serve` returns.
    pub(crate) fn stop(&self) {
        let control = self.control();
        self.stopping.store(true, Ordering::Relaxed);
        self.engine.stop();
        for lane in &control.lanes {
            // A lane that has shut down receiving has noticed already.
            _ = lane.state.fetch_max(DRAINING, Ordering::Release);
            sock::wake(lane.fd.as_fd());
        }
    }

    pub(crate) fn remove_lane(&self, id: LaneId) -> Result<()> {
        let unknown = || Error::new(ErrorKind::State, format!("the socket has no open lane {id}"));
        let lane =
            self.lanes().into_iter().find(|lane| lane.id == id && lane.is_open()).ok_or_else(unknown)?;
        self.retire(&lane)?;
        let fd = Arc::downgrade(&lane.fd);
        drop(lane);
        // The lane's thread notices within the sleep time of an idle lane. Waking it as a stop
        // does would wake the socket for good, and the next lane may use it.
        let mut control = self.control();
        let parks = control.steer.needs_parking();
        let deadline = Instant::now() + DRAIN_TIMEOUT;
        // A socket that is not parked closes when the last reference to the lane is dropped, a
        // moment after the lane has left the list.
        while control.lanes.iter().any(|lane| lane.id == id) || (!parks && fd.strong_count() > 0) {
            if Instant::now() > deadline {
                let message =
                    format!("lane {id} gets no new datagrams, but its closure has not returned yet");
                return Err(Error::new(ErrorKind::State, message));
            }
            let waited = self.lane_closed.wait_timeout(control, Duration::from_millis(10));
            control = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }
}
