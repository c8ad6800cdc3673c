//! Shared state of the lanes of an XDP socket, behind the interface of all engines.

use std::os::fd::AsFd as _;
use std::sync::Arc;

use manylane_sys::xsk;

use super::XdpControl;
use super::state::AssignedQueue;
use crate::counters::LaneId;
use crate::error::{Error, ErrorKind, Result};
use crate::io::filter::{FilterHandle, SocketIndex};
use crate::io::xdp::device::Device;
use crate::io::{DeviceQueue, EngineShared};

impl EngineShared for XdpControl {
    fn start(&self) -> Result<()> {
        let mut state = self.state();
        let (lanes, queues) = (state.lane_count(), state.queue_count());
        if lanes > queues && !self.options.surplus_lanes {
            let message = format!(
                "{lanes} lanes, but {queues} queues: lower lanes(), or allow lanes that receive through the kernel (xdp_surplus_lanes(true))"
            );
            return Err(Error::new(ErrorKind::Config, message));
        }
        self.assign_queues(&mut state, true)?;
        state.open = true;
        self.bind_addresses(&state)
    }

    fn lane_added(&self) {
        self.state().rebalance();
    }

    fn retire(&self, lane: LaneId) {
        self.state().retire(lane);
    }

    fn shut_down(&self, lane: LaneId) {
        self.state().disable(lane);
    }

    fn lane_drained(&self, lane: LaneId) {
        let mut state = self.state();
        state.remove_lane(lane);
        let is_last = state.lane_count() == 0;
        drop(state);
        if !is_last {
            // Other lanes may serve its queues.
            self.request_refresh();
        }
    }

    fn stop(&self) {
        self.state().open = false;
    }

    fn close(&self) {
        let mut state = self.state();
        state.open = false;
        let devices = std::mem::take(&mut state.devices);
        if state.final_counts.is_none() {
            state.final_counts = Some(device_counts(&devices));
        }
        drop(state);
        for (device, number) in &devices {
            device.unbind(*number);
            self.filter.detach(&device.filters, *number);
            device.unregister(*number);
        }
    }

    fn wakeups_dominate(&self) -> bool {
        true
    }

    fn dropped(&self, lane: LaneId) -> u64 {
        self.state().dropped(lane)
    }

    fn filter(&self) -> Option<&FilterHandle> {
        Some(&self.filter)
    }

    fn frame_counts(&self) -> Vec<(String, &'static str, u64)> {
        let state = self.state();
        state.final_counts.clone().unwrap_or_else(|| device_counts(&state.devices))
    }

    fn device_queues(&self) -> Vec<DeviceQueue> {
        let about = |served: &AssignedQueue| {
            let seen = xsk::statistics(served.xsk.as_fd()).unwrap_or_default();
            DeviceQueue {
                device: served.device.name.clone(),
                queue: served.queue,
                lane: served.lane,
                zero_copy: served.zero_copy,
                ring_full: seen.rx_ring_full,
                dropped: seen.rx_dropped,
                fill_ring_empty: seen.rx_fill_ring_empty_descs,
                invalid_descriptors: seen.rx_invalid_descs + seen.tx_invalid_descs,
            }
        };
        self.state().assigned.iter().map(about).collect()
    }
}

impl Drop for XdpControl {
    fn drop(&mut self) {
        self.close();
    }
}

fn device_counts(devices: &[(Arc<Device>, SocketIndex)]) -> Vec<(String, &'static str, u64)> {
    let counts = manylane_bpf::abi::XDP_COUNTS;
    let of = |device: &Arc<Device>| {
        let name = device.name.clone();
        counts.into_iter().zip(device.counts()).map(move |((outcome, _), n)| (name.clone(), outcome, n))
    };
    devices.iter().flat_map(|(device, _)| of(device)).collect()
}
