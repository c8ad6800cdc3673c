//! The devices of a socket, and which lane has which of their queues. Kept under the lock of the
//! [`XdpControl`](super::XdpControl).

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use manylane_sys::xsk;

use crate::counters::LaneId;
use crate::io::filter::{FilterHandle, SocketIndex};
use crate::io::xdp::device::Device;
use crate::io::xdp::lane_queue::{LaneQueue, QueueId};
use crate::io::xdp::mailbox::{Mailbox, QueueCommand};

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
    pub(super) last_id: u64,
}

/// A queue that is assigned to a lane.
pub(in crate::io::xdp) struct AssignedQueue {
    pub(super) id: QueueId,
    pub(in crate::io::xdp) lane: LaneId,
    pub(in crate::io::xdp) device: Arc<Device>,
    pub(super) number: SocketIndex,
    pub(in crate::io::xdp) queue: u32,
    pub(in crate::io::xdp) zero_copy: bool,
    /// For its statistics.
    pub(in crate::io::xdp) xsk: OwnedFd,
    /// Drops before the current lane had it.
    pub(super) dropped_before: u64,
    /// Frames are redirected to it.
    pub(super) is_redirected: bool,
    /// The lane was told to hand it over, and has not yet.
    pub(super) is_moving: bool,
}

/// A lane that can be assigned queues.
pub(super) struct LaneEntry {
    pub(super) lane: LaneId,
    pub(super) mailbox: Arc<Mailbox>,
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
    pub(super) fn least_assigned(&self, start: usize) -> Option<&LaneEntry> {
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

    /// Hands the queue of a lane over to the lane with the fewest; returns it if there is none.
    pub(super) fn hand_off(&mut self, mut queue: LaneQueue) -> Option<LaneQueue> {
        // A close command may be left behind in the old lane's mailbox.
        queue.is_closing |= queue.device.is_gone();
        let successor = self.least_assigned(0).map(|entry| (entry.lane, Arc::clone(&entry.mailbox)));
        let Some((lane, mailbox)) = successor else { return Some(queue) };
        let is_this = |served: &&mut AssignedQueue| served.id == queue.id && served.is_redirected;
        let Some(served) = self.assigned.iter_mut().find(is_this) else { return Some(queue) };
        let (from, dropped) = (served.lane, xsk_dropped(&served.xsk));
        let while_there = dropped - std::mem::replace(&mut served.dropped_before, dropped);
        (served.lane, served.is_moving) = (lane, false);
        self.add_dropped(from, while_there);
        // Under the lock, so that a lane that is removed has an empty mailbox.
        mailbox.push_queue(queue);
        self.rebalance();
        None
    }

    /// Removes a queue that its lane has drained and closed. True if it was the last of its device.
    pub(super) fn remove_closed(&mut self, queue: QueueId) -> bool {
        let Some(at) = self.assigned.iter().position(|served| served.id == queue) else { return false };
        let device = Arc::as_ptr(&self.assigned[at].device);
        self.remove(at);
        !self.assigned.iter().any(|served| Arc::as_ptr(&served.device) == device)
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

/// Frames that the kernel dropped at an XSK.
fn xsk_dropped(xsk: &OwnedFd) -> u64 {
    // Cannot fail for an open socket.
    xsk::statistics(xsk.as_fd()).map_or(0, |seen| seen.dropped())
}
