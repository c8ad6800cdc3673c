//! Assigns queues of devices to lanes: every queue has one lane, and no lane has two more than
//! another.
//!
//! The list of them is the [`State`]. The queues themselves belong to their lanes, and move between
//! them by [`Mailbox`](crate::io::xdp::mailbox::Mailbox).

use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use manylane_sys::errno::EBUSY;
use manylane_sys::xsk::{self, Mode, Queue, QueueOptions};

use super::super::device::Device;
use super::super::lane_queue::{LaneQueue, QueueId};
use super::state::{AssignedQueue, State, xsk_dropped};
use super::{FRAME_SIZE, HEADROOM_BYTES, XdpControl};
use crate::error::{Error, ErrorKind, Result};
use crate::io::filter::SocketIndex;
use crate::port_owner;

/// Size of the longest frame that is received in several buffers, in bytes.
const FRAME_LEN_MAX: u32 = 65_535;

impl XdpControl {
    /// Opens the queues without a lane, and assigns each to the lane with the fewest. If `strict`,
    /// the first error ends it; otherwise the other queues are opened before it is returned.
    pub(in crate::io::xdp) fn assign_queues(&self, state: &mut State, strict: bool) -> Result<()> {
        let mut outcome = Ok(());
        for (device, number) in state.devices.clone() {
            for queue in 0..device.queues() {
                let is_served =
                    |served: &AssignedQueue| served.queue == queue && Arc::ptr_eq(&served.device, &device);
                if state.assigned.iter().any(is_served) {
                    continue;
                }
                match self.open_queue(state, &device, number, queue, strict) {
                    Err(err) if strict => return Err(err),
                    Err(err) => outcome = Err(err),
                    Ok(()) => {}
                }
            }
        }
        outcome
    }

    fn open_queue(
        &self,
        state: &mut State,
        device: &Arc<Device>,
        number: SocketIndex,
        queue: u32,
        strict: bool,
    ) -> Result<()> {
        // Queues with one number often interrupt one CPU, so those of several devices go to
        // different lanes.
        let at = state.devices.iter().position(|(known, _)| Arc::ptr_eq(known, device)).unwrap_or(0);
        let successor = state.least_assigned(at + queue as usize);
        let Some(successor) = successor.map(|entry| (entry.lane, Arc::clone(&entry.mailbox))) else {
            return Ok(());
        };
        let Some(xsk) = self.open_xsk(device, queue, strict)? else {
            // Another socket of this process has the queue; the companion feeds this one.
            if strict {
                log::warn!(
                    "{} queue {queue} belongs to another socket of this process: lanes get its datagrams through the kernel",
                    device.name
                );
            }
            return Ok(());
        };
        let statistics = xsk
            .as_fd()
            .try_clone_to_owned()
            .map_err(|err| Error::system("duplicating a descriptor for XSK statistics", err))?;
        device.redirect(number, queue, xsk.as_fd())?;
        state.last_id += 1;
        let id = QueueId(state.last_id);
        state.assigned.push(AssignedQueue {
            id,
            lane: successor.0,
            device: Arc::clone(device),
            number,
            queue,
            zero_copy: xsk.is_zero_copy(),
            xsk: statistics,
            dropped_before: 0,
            is_redirected: true,
            is_moving: false,
        });
        successor.1.push_queue(LaneQueue::new(id, xsk, Arc::clone(device), queue));
        Ok(())
    }

    fn open_xsk(&self, device: &Device, queue: u32, strict: bool) -> Result<Option<Queue>> {
        let ring = self.options.ring;
        let options = QueueOptions {
            ifindex: device.index,
            queue,
            // For each socket, one ring of frames to receive into and one for everything else.
            frames: ring * 2 * self.options.sockets,
            frame_size: FRAME_SIZE,
            ring,
            tx_ring: ring,
            batch: self.batch,
            mode: Mode::Auto,
            multi_buffer: device.has_jumbo_frames(FRAME_SIZE - HEADROOM_BYTES),
        };
        let start = Instant::now();
        let mut timeout = port_owner::HANDOVER_TIMEOUT;
        loop {
            if start.elapsed() > timeout && is_being_released(device, queue) {
                timeout = port_owner::RELEASE_TIMEOUT;
            }
            match device.open_queue(&options, !self.options.generic) {
                Ok(None) => return Ok(None),
                Ok(Some(mut xsk)) => {
                    if xsk.has_multi_buffer() {
                        device.set_frame_len_max(FRAME_LEN_MAX);
                    }
                    let micros =
                        self.busy_poll.map_or(0, |time| u32::try_from(time.as_micros()).unwrap_or(u32::MAX));
                    if micros > 0
                        && let Err(err) = xsk.busy_poll(micros, self.batch as u32)
                    {
                        log::warn!("{} queue {queue} cannot busy-poll: {err}", device.name);
                    }
                    return Ok(Some(xsk));
                }
                // The kernel releases a queue some time after its last owner has closed it.
                Err(err)
                    if strict && err.source.raw_os_error() == Some(EBUSY) && start.elapsed() < timeout =>
                {
                    thread::sleep(Duration::from_millis(5));
                }
                Err(err) => return Err(explain(device, queue, err)),
            }
        }
    }

    /// Hands the queue of a lane over to the lane with the fewest; returns it if there is none.
    pub(in crate::io::xdp) fn hand_off(&self, mut queue: LaneQueue) -> Option<LaneQueue> {
        let mut state = self.state();
        // A close command may be left behind in the old lane's mailbox.
        queue.is_closing |= queue.device.is_gone();
        let Some(successor) = state.least_assigned(0).map(|entry| (entry.lane, Arc::clone(&entry.mailbox)))
        else {
            return Some(queue);
        };
        let Some(at) = state.assigned.iter().position(|served| served.id == queue.id && served.is_redirected)
        else {
            return Some(queue);
        };
        let served = &mut state.assigned[at];
        let (from, dropped) = (served.lane, xsk_dropped(&served.xsk));
        let while_there = dropped - std::mem::replace(&mut served.dropped_before, dropped);
        (served.lane, served.is_moving) = (successor.0, false);
        state.add_dropped(from, while_there);
        // Under the lock, so that a lane that is removed has an empty mailbox.
        successor.1.push_queue(queue);
        state.rebalance();
        None
    }

    /// Called when a lane has drained and closed a queue whose device is gone.
    pub(in crate::io::xdp) fn queue_closed(&self, queue: QueueId) {
        let mut state = self.state();
        let Some(at) = state.assigned.iter().position(|served| served.id == queue) else { return };
        let device = Arc::as_ptr(&state.assigned[at].device);
        state.remove(at);
        let is_last = !state.assigned.iter().any(|served| Arc::as_ptr(&served.device) == device);
        drop(state);
        if is_last {
            // Its program is detached: if the device is back already, it can be opened.
            self.request_refresh();
        }
    }
}

/// True if no process has the queue open, as far as the kernel tells, or if this process had.
fn is_being_released(device: &Device, queue: u32) -> bool {
    device.has_opened(queue) || xsk::owners(device.index, queue).is_ok_and(|owners| owners.is_empty())
}

/// The error of opening an XSK, with what to change.
fn explain(device: &Device, queue: u32, err: xsk::OpenError) -> Error {
    let at = format!("{} queue {queue}", device.name);
    match err.source.raw_os_error() {
        Some(EBUSY) => {
            // The owners are not always visible; an error here must not hide the original one.
            let owners = xsk::owners(device.index, queue);
            let message = match owners {
                Ok(owners) if owners.is_empty() => {
                    format!("{at}: the kernel has not released its last AF_XDP socket yet: try again")
                }
                Ok(owners) => format!(
                    "{at} belongs to an AF_XDP socket {} (see 'ss --xdp -p')",
                    port_owner::describe_process(&owners)
                ),
                Err(_) if device.has_opened(queue) => format!(
                    "{at}: the kernel has not released the AF_XDP socket that this process had, or another process has one now (see 'ss --xdp -p'): try again"
                ),
                Err(_) => format!("{at} belongs to an AF_XDP socket of another process (see 'ss --xdp -p')"),
            };
            Error::with(ErrorKind::InUse, message, err.source)
        }
        _ => Error::system(format!("{at}: {}", err.step), err.source),
    }
}
