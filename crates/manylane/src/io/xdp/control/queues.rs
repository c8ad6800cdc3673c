//! Assigns queues of devices to lanes: every queue has one lane, and no lane has two more than
//! another.
//!
//! The list is kept under the lock of the [`XdpControl`]. The queues themselves belong to their
//! lanes, and move between them by [`Mailbox`].

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use manylane_sys::errno::EBUSY;
use manylane_sys::xsk::{self, Mode, Queue, QueueOptions};

use super::super::device::Device;
use super::super::lane_queue::{LaneQueue, QueueId};
use super::super::mailbox::{Mailbox, QueueCommand};
use super::{FRAME_SIZE, HEADROOM_BYTES, XdpControl, xsk_dropped};
use crate::counters::LaneId;
use crate::error::{Error, ErrorKind, Result};
use crate::io::filter::{FilterHandle, SocketIndex};
use crate::port_owner;

/// Size of the longest frame that is received in several buffers, in bytes.
const FRAME_LEN_MAX: u32 = 65_535;

#[derive(Default)]
pub(in crate::io::xdp) struct State {
    /// The devices, with the socket's number on each.
    pub(in crate::io::xdp) devices: Vec<(Arc<Device>, SocketIndex)>,
    /// Devices that could not be used, and have not changed since.
    pub(in crate::io::xdp) failed: Vec<u32>,
    /// Devices that this process has no permission for; already reported.
    pub(in crate::io::xdp) denied: Vec<u32>,
    /// The last error that was reported.
    pub(in crate::io::xdp) last_error: Option<String>,
    /// Counts of the programs when the socket ended.
    pub(in crate::io::xdp) final_counts: Option<Vec<(String, &'static str, u64)>>,
    /// Ports lead to the socket and it is not ending: changes are followed.
    pub(in crate::io::xdp) open: bool,
    /// Queues that are assigned to lanes.
    pub(in crate::io::xdp) assigned: Vec<AssignedQueue>,
    lanes: Vec<LaneEntry>,
    /// Drops at queues that a lane had before.
    closed_drops: Vec<(LaneId, u64)>,
    last_id: u64,
}

/// A queue that is assigned to a lane.
pub(in crate::io::xdp) struct AssignedQueue {
    id: QueueId,
    pub(in crate::io::xdp) lane: LaneId,
    pub(in crate::io::xdp) device: Arc<Device>,
    number: SocketIndex,
    pub(in crate::io::xdp) queue: u32,
    pub(in crate::io::xdp) zero_copy: bool,
    /// For its statistics.
    pub(in crate::io::xdp) xsk: OwnedFd,
    /// Drops before the current lane had it.
    dropped_before: u64,
    /// Frames are redirected to it.
    is_redirected: bool,
    /// The lane was told to hand it over, and has not yet.
    is_moving: bool,
}

/// A lane that can be assigned queues.
struct LaneEntry {
    lane: LaneId,
    mailbox: Arc<Mailbox>,
}

impl State {
    /// Adds a lane that can be assigned queues.
    pub(in crate::io::xdp) fn add_lane(&mut self, lane: LaneId, mailbox: Arc<Mailbox>) {
        self.lanes.push(LaneEntry { lane, mailbox });
    }

    /// Lanes that can be assigned queues.
    pub(in crate::io::xdp) fn lane_count(&self) -> usize {
        self.lanes.len()
    }

    /// Queues of all devices.
    pub(in crate::io::xdp) fn queue_count(&self) -> usize {
        self.devices.iter().map(|(device, _)| device.queues() as usize).sum()
    }

    fn assigned_count(&self, lane: LaneId) -> usize {
        self.assigned.iter().filter(|served| served.lane == lane).count()
    }

    /// The lane with the fewest queues; if there are several, the first one from `start` on.
    fn least_assigned(&self, start: usize) -> Option<&LaneEntry> {
        let lanes = self.lanes.len().max(1);
        let in_order = self.lanes.iter().cycle().skip(start % lanes).take(self.lanes.len());
        in_order.min_by_key(|entry| self.assigned_count(entry.lane))
    }

    fn mailbox(&self, lane: LaneId) -> Option<&Arc<Mailbox>> {
        self.lanes.iter().find(|entry| entry.lane == lane).map(|entry| &entry.mailbox)
    }

    /// Closes the queues of devices that are not `is_live`.
    pub(in crate::io::xdp) fn remove_gone(
        &mut self,
        is_there: impl Fn(&Device) -> bool,
        filter: &FilterHandle,
    ) {
        let (there, gone): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.devices).into_iter().partition(|(device, _)| is_there(device));
        self.devices = there;
        for (device, number) in gone {
            log::warn!("engine xdp: device {} was removed", device.name);
            filter.detach(&device.filters, number);
            device.unregister(number);
            for served in self.assigned.iter().filter(|served| Arc::ptr_eq(&served.device, &device)) {
                if let Some(mailbox) = self.mailbox(served.lane) {
                    mailbox.push_command(served.id, QueueCommand::Close);
                }
            }
        }
    }

    /// Tells lanes to hand queues over, so that in the end none has two more than another.
    pub(in crate::io::xdp) fn rebalance(&mut self) {
        let stay =
            |lane| self.assigned.iter().filter(|served| served.lane == lane && !served.is_moving).count();
        let mut counts: Vec<usize> = self.lanes.iter().map(|entry| stay(entry.lane)).collect();
        // Queues that are moving will go to the lanes with the fewest.
        for _ in self.assigned.iter().filter(|served| served.is_moving) {
            if let Some(least) = counts.iter_mut().min() {
                *least += 1;
            }
        }
        loop {
            let by_count = |at: &usize| counts.get(*at).copied();
            let rich = (0..counts.len()).max_by_key(by_count);
            let Some((rich, poor)) = rich.zip((0..counts.len()).min_by_key(by_count)) else { return };
            if counts[rich] < counts[poor] + 2 {
                return;
            }
            let LaneEntry { lane, mailbox } = &self.lanes[rich];
            let spare = self.assigned.iter_mut().find(|served| served.lane == *lane && !served.is_moving);
            // All of its queues may be ones that are still moving to it.
            let Some(served) = spare else { return };
            served.is_moving = true;
            mailbox.push_command(served.id, QueueCommand::HandOff);
            counts[rich] -= 1;
            counts[poor] += 1;
        }
    }

    /// Assigns a lane no more queues, and tells it to hand its queues over.
    pub(in crate::io::xdp) fn retire(&mut self, lane: LaneId) {
        let Some(at) = self.lanes.iter().position(|entry| entry.lane == lane) else { return };
        let entry = self.lanes.remove(at);
        for served in self.assigned.iter_mut().filter(|served| served.lane == lane && !served.is_moving) {
            served.is_moving = true;
            entry.mailbox.push_command(served.id, QueueCommand::HandOff);
        }
    }

    /// Stops redirecting frames to the queues of a lane.
    pub(in crate::io::xdp) fn disable(&mut self, lane: LaneId) {
        self.lanes.retain(|entry| entry.lane != lane);
        for served in self.assigned.iter_mut().filter(|served| served.lane == lane && served.is_redirected) {
            served.device.clear_redirect(served.number, served.queue);
            served.is_redirected = false;
        }
    }

    /// Removes a lane whose queues are drained.
    pub(in crate::io::xdp) fn remove_lane(&mut self, lane: LaneId) {
        self.disable(lane);
        while let Some(at) = self.assigned.iter().position(|served| served.lane == lane) {
            self.remove(at);
        }
    }

    /// Removes a queue that is closed, or is about to be.
    fn remove(&mut self, at: usize) {
        let served = self.assigned.remove(at);
        self.add_dropped(served.lane, xsk_dropped(&served.xsk) - served.dropped_before);
    }

    fn add_dropped(&mut self, lane: LaneId, dropped: u64) {
        match self.closed_drops.iter_mut().find(|(of, _)| *of == lane) {
            Some((_, sum)) => *sum += dropped,
            None if dropped > 0 => self.closed_drops.push((lane, dropped)),
            None => {}
        }
    }

    /// Drops at the queues of a lane while it had them.
    pub(in crate::io::xdp) fn dropped(&self, lane: LaneId) -> u64 {
        let closed = self.closed_drops.iter().find(|(of, _)| *of == lane).map_or(0, |(_, dropped)| *dropped);
        let open = self.assigned.iter().filter(|served| served.lane == lane);
        closed + open.map(|served| xsk_dropped(&served.xsk) - served.dropped_before).sum::<u64>()
    }
}

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
            let holder = owners.as_ref().ok().and_then(|owners| port_owner::find_process(owners));
            let message = match (holder, owners) {
                (Some(holder), _) => format!("{at} belongs to an AF_XDP socket of {holder}"),
                (None, Ok(owners)) if owners.is_empty() => {
                    format!("{at}: the kernel has not released its last AF_XDP socket yet: try again")
                }
                (None, Err(_)) if device.has_opened(queue) => format!(
                    "{at}: the kernel has not released the AF_XDP socket that this process had, or another process has one now (see 'ss --xdp -p'): try again"
                ),
                _ => format!("{at} belongs to an AF_XDP socket of another process (see 'ss --xdp -p')"),
            };
            Error::with(ErrorKind::InUse, message, err.source)
        }
        _ => Error::system(format!("{at}: {}", err.step), err.source),
    }
}
