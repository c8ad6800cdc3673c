//! Control of the XDP side of one socket: keeps its devices and the addresses that lead to it
//! current, and assigns their queues to lanes: every queue has one lane, and no lane has two more
//! than another. `state.rs` has the list of them. The queues themselves belong to their lanes, and
//! move between them by [`Mailbox`].
//!
//! | event | what happens |
//! |---|---|
//! | open | companions bind and are steered to; XSKs open and are entered in the map of their device; the ports come last |
//! | addresses of the machine change | the ports of a wildcard socket follow |
//! | a lane is added | it gets queues from the lanes with the most |
//! | a lane is removed | it hands its queues, with all their content, over to the others |
//! | a device is down | no frames arrive from it until it is up; datagrams over another device arrive at companions |
//! | a device is removed, becomes part of another one, or gets parts | its queues are drained and closed |
//! | a device is added (again), or has more queues | it is opened, and its queues are assigned to lanes |
//! | the socket ends, the process dies | ports and program are removed: every frame goes to the kernel again |
//!
//! The thread that follows the kernel's tables compares the actual with the desired state, at each
//! change and every few seconds. The reason for the interval: there is no event when the number of
//! queues or a device's address changes, or when another process releases a queue.

mod engine;
mod open_queue;
mod state;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use manylane_sys::device as sys;
use manylane_sys::xsk::{Mode, QueueOptions};
use manylane_wire::ethernet;

use self::open_queue::open_queue;
use self::state::{AssignedQueue, State};
use super::checks;
use super::device::{AttachMode, Device};
use super::lane_queue::{LaneQueue, QueueId};
use super::mailbox::Mailbox;
use super::ports::Ports;
use super::route::{Change, Reader, Routes};
use crate::capture::listener::CaptureListener;
use crate::capture::tap::Tap;
use crate::config::{Config, XdpOptions};
use crate::counters::LaneId;
use crate::error::{Error, ErrorKind, Result};
use crate::io::filter::{FilterHandle, SocketIndex};

/// Frames that a queue takes from its RX ring at once, also for lanes with smaller batches. Less
/// with a small ring, because they are missing to receive into meanwhile.
const FRAMES_PER_PASS: u32 = 64;

/// Size of a frame of the UMEM, and the kernel's headroom at its start (`XDP_PACKET_HEADROOM`), in
/// bytes.
pub(super) const FRAME_SIZE: u32 = 2048;
pub(super) const HEADROOM_BYTES: u32 = 256;

/// The devices over which the bound address can be reached; decided when the socket opens.
#[derive(Clone, Debug, PartialEq, Eq)]
enum DeviceSelection {
    /// Those that the user named.
    Named(Vec<String>),
    /// Those that have the address.
    WithAddr(IpAddr),
    /// All that have an address.
    All,
}

/// The XDP side of a socket.
pub(crate) struct XdpControl {
    ports: Ports,
    /// The address of a UDP socket.
    pub(super) bound_addr: SocketAddr,
    /// Datagrams carry ECN.
    pub(super) ecn: bool,
    /// Maximum packets of a batch.
    pub(super) batch: usize,
    /// Time that waits of lanes poll the device.
    pub(super) busy_poll: Option<Duration>,
    pub(super) options: XdpOptions,
    routes: Arc<Routes>,
    device_selection: DeviceSelection,
    /// The capture socket for what lanes receive and send.
    capture: Option<CaptureListener>,
    /// The filter of the socket.
    pub(crate) filter: FilterHandle,
    state: Mutex<State>,
}

impl XdpControl {
    /// Finds the devices and attaches the program to them. It takes no frames yet.
    pub(crate) fn open(config: &Config, ports: Ports) -> Result<Arc<Self>> {
        let routes = Routes::start()?;
        let mut plane = Self {
            bound_addr: ports.udp().unwrap_or((Ipv4Addr::UNSPECIFIED, 0).into()),
            ports,
            ecn: config.ecn,
            batch: config.batch,
            busy_poll: config.wait.busy_poll_time(),
            options: config.xdp.clone(),
            routes,
            device_selection: DeviceSelection::All,
            capture: None,
            filter: FilterHandle::new(config.xdp.filter.clone()),
            state: Mutex::default(),
        };
        plane.device_selection = plane.select_devices();
        let why = plane.attach(&mut plane.state(), true)?;
        if plane.state().devices.is_empty() {
            return Err(why.unwrap_or_else(|| {
                let ip = plane.ports.address();
                let message = format!(
                    "no Ethernet device that is up has the address {ip}: name one with xdp_devices()"
                );
                Error::new(ErrorKind::Unsupported, message)
            }));
        }
        plane.capture = plane.open_capture();
        let plane = Arc::new(plane);
        let follower: Weak<Self> = Arc::downgrade(&plane);
        plane.routes.on_change(Box::new(move |change| {
            if let Some(plane) = follower.upgrade() {
                plane.handle_change(*change);
            }
        }));
        Ok(plane)
    }

    fn select_devices(&self) -> DeviceSelection {
        let bound = self.ports.address().to_canonical();
        match &self.options.devices {
            Some(names) => DeviceSelection::Named(names.clone()),
            // An address that is on no device may be reached over any of them.
            None if self.ethernet_devices(|ip| ip == bound).is_empty() && !bound.is_loopback() => {
                DeviceSelection::All
            }
            None => DeviceSelection::WithAddr(bound),
        }
    }

    fn has_named_devices(&self) -> bool {
        matches!(self.device_selection, DeviceSelection::Named(_))
    }

    /// Ethernet devices that are up and have an address for which `wanted` is true.
    fn ethernet_devices(&self, wanted: impl Fn(IpAddr) -> bool) -> Vec<u32> {
        let all = self.routes.local_addresses();
        let mut found: Vec<u32> = all.iter().filter(|(_, ip)| wanted(*ip)).map(|(at, _)| *at).collect();
        found.sort_unstable();
        found.dedup();
        found.retain(|&at| {
            let name = sys::name(at).and_then(|name| sys::mac(&name).map(|_| name));
            name.is_ok_and(|name| sys::is_up(&name).unwrap_or(false))
        });
        found
    }

    /// The devices on which datagrams for the bound address may arrive.
    fn candidates(&self, strict: bool) -> Result<Vec<u32>> {
        match &self.device_selection {
            DeviceSelection::Named(names) => {
                let mut found = Vec::new();
                for name in names {
                    match manylane_sys::netns::device_index(name) {
                        Ok(index) => found.push(index),
                        Err(err) if strict => {
                            let message = format!("xdp_devices: there is no device {name}");
                            return Err(Error::with(ErrorKind::Config, message, err));
                        }
                        // The device may return.
                        Err(_) => {}
                    }
                }
                Ok(found)
            }
            DeviceSelection::WithAddr(bound) => Ok(self.ethernet_devices(|ip| ip == *bound)),
            DeviceSelection::All => Ok(self.ethernet_devices(|_| true)),
        }
    }

    /// Attaches to the devices that are missing; returns the last error that was not fatal. If
    /// `strict`, a device that was named by the user has to work.
    fn attach(&self, state: &mut State, strict: bool) -> Result<Option<Error>> {
        let attach = if self.options.generic { AttachMode::Generic } else { AttachMode::Native };
        let locals = self.routes.local_state();
        let mut why = None;
        for index in self.candidates(strict)? {
            let is_known = state.devices.iter().any(|(device, _)| device.index == index);
            if is_known || state.failed.contains(&index) {
                continue;
            }
            // If not strict, does not wait for an earlier program: to release a returned device,
            // running lanes need the lock held here.
            let opened = Device::open(
                index,
                attach,
                &locals,
                FRAME_SIZE - HEADROOM_BYTES,
                self.options.sources,
                strict,
            )
            .and_then(|device| self.register(device));
            match opened {
                Ok(device) => {
                    if device.0.has_strict_rp_filter(&locals) {
                        checks::warn_of_rp_filter(&device.0.name, self.has_named_devices());
                    }
                    state.devices.push(device);
                }
                Err(err) if strict && self.has_named_devices() => return Err(err),
                // Another program is attached. Its removal causes no event, so this is retried at
                // the next refresh.
                Err(err) if !strict && err.kind() == ErrorKind::InUse => {
                    log::debug!("engine xdp: device skipped for now: {}", err.chain());
                    why = Some(err);
                }
                // The process has dropped the privilege since the socket was opened: report it
                // once and do not retry.
                Err(err) if !strict && err.kind() == ErrorKind::Permission => {
                    if !state.denied.contains(&index) {
                        state.denied.push(index);
                        log::warn!(
                            "engine xdp: no permission to use a device, so that its datagrams arrive through the kernel's stack: {}",
                            err.chain()
                        );
                    }
                    state.failed.push(index);
                    why = Some(err);
                }
                Err(err) => {
                    log::info!("engine xdp: device skipped: {}", err.chain());
                    state.failed.push(index);
                    why = Some(err);
                }
            }
        }
        Ok(why)
    }

    /// Registers the socket on a device and installs its filter there.
    fn register(&self, device: Arc<Device>) -> Result<(Arc<Device>, SocketIndex)> {
        let number = device.register(&self.options.vlans)?;
        if let Err(err) = self.filter.attach(&device.filters, number) {
            device.unregister(number);
            return Err(err);
        }
        Ok((device, number))
    }

    /// Opens the capture socket, unless captures are off. A failure only disables captures.
    fn open_capture(&self) -> Option<CaptureListener> {
        let bound = self.ports.udp().filter(|_| self.options.capture)?;
        let about = |(device, _): &(Arc<Device>, SocketIndex)| (device.index, device.name.clone());
        let open = CaptureListener::open(bound, self.state().devices.iter().map(about).collect());
        open.map_err(|err| log::warn!("'manylane capture' cannot capture {bound}: {err}")).ok()
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        // Every critical section leaves valid state, so a poisoned lock can be used.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of queues of all devices.
    pub(crate) fn queue_count(&self) -> usize {
        self.state().queue_count()
    }

    /// Length of the longest IP packet that all devices and the frames of queues allow.
    pub(crate) fn packet_len_max(&self) -> u16 {
        let of_frames = FRAME_SIZE - HEADROOM_BYTES - ethernet::HEADER_LEN as u32;
        let state = self.state();
        let mtus = state.devices.iter().filter_map(|(device, _)| sys::mtu(&device.name).ok());
        mtus.fold(of_frames, u32::min).try_into().unwrap_or(u16::MAX)
    }

    /// An error that names a receive queue without a lane, if there is one: the kernel would get
    /// its packets.
    pub(crate) fn check_all_queues_served(&self) -> Result<()> {
        let state = self.state();
        for (device, _) in &state.devices {
            let asking = |err| Error::system(format!("querying {}", device.name), err);
            let queues = sys::queues(&device.name).map_err(asking)?.receive;
            let is_served = |queue| {
                let is_it =
                    |served: &&AssignedQueue| served.queue == queue && Arc::ptr_eq(&served.device, device);
                state.assigned.iter().any(|served| is_it(&served))
            };
            if let Some(queue) = (0..queues).find(|queue| !is_served(*queue)) {
                let message = format!(
                    "{} queue {queue} has no lane, because another socket of this process has it, or because the device has fewer queues to send by: TCP needs all queues ('ethtool -L')",
                    device.name
                );
                return Err(Error::new(ErrorKind::Unsupported, message));
            }
        }
        Ok(())
    }

    /// Adds a lane that can be assigned queues.
    pub(super) fn add_lane(&self, lane: LaneId, mailbox: Arc<Mailbox>) {
        self.state().add_lane(lane, mailbox);
    }

    /// The next hop reader of a lane.
    pub(super) fn route_reader(&self) -> Reader {
        self.routes.reader()
    }

    /// Lanes send packets of a stack.
    pub(super) fn use_prefixes(&self) {
        self.routes.use_prefixes();
    }

    /// The capture tap of a lane.
    pub(super) fn tap(&self, lane: LaneId) -> Tap {
        self.capture.as_ref().map_or_else(Tap::default, |point| point.tap(lane))
    }

    /// Handles an actual or possible change.
    fn handle_change(&self, change: Change) {
        let mut state = self.state();
        if !state.open {
            return;
        }
        if let Change::Link { ifindex, gone, .. } = change {
            // A device that failed before may work after the change.
            state.failed.retain(|index| *index != ifindex);
            // Another device may have its index by now.
            let left = state.devices.iter().find(|(device, _)| gone && device.index == ifindex);
            left.inspect(|(device, _)| device.set_gone());
            state.denied.retain(|index| !gone || *index != ifindex);
        }
        let locals = self.routes.local_state();
        for (device, _) in &state.devices {
            if let Err(err) = device.check(&locals) {
                log::warn!("engine xdp: a device is no longer used: {err}");
                device.set_gone();
            }
        }
        state.remove_gone(Device::refresh, &self.filter);
        let attached = self.attach(&mut state, false).and_then(|_| self.assign_queues(&mut state, false));
        state.rebalance();
        // Also after an error, because it does not depend on the queues.
        let followed = self.bind_addresses(&state).and(attached);
        // Retried at the next refresh, but reported once.
        let complaint = followed.err().map(|err| err.chain());
        if let Some(what) = complaint.as_ref().filter(|what| state.last_error.as_ref() != Some(what)) {
            log::warn!(
                "engine xdp: cannot follow a change of the machine's network, so that datagrams arrive through the kernel's stack: {what}"
            );
        }
        state.last_error = complaint;
    }

    /// Opens the queues without a lane, and assigns each to the lane with the fewest. If `strict`,
    /// the first error ends it; otherwise the other queues are opened before it is returned.
    fn assign_queues(&self, state: &mut State, strict: bool) -> Result<()> {
        let mut outcome = Ok(());
        for (device, number) in state.devices.clone() {
            for queue in 0..device.queues() {
                let is_served =
                    |served: &AssignedQueue| served.queue == queue && Arc::ptr_eq(&served.device, &device);
                if state.assigned.iter().any(is_served) {
                    continue;
                }
                match self.assign_queue(state, &device, number, queue, strict) {
                    Err(err) if strict => return Err(err),
                    Err(err) => outcome = Err(err),
                    Ok(()) => {}
                }
            }
        }
        outcome
    }

    fn assign_queue(
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
        let options = self.queue_options(device, queue);
        let may_join = !self.options.generic;
        let Some(xsk) = open_queue(device, &options, may_join, self.busy_poll, strict)? else {
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

    fn queue_options(&self, device: &Device, queue: u32) -> QueueOptions {
        let ring = self.options.ring;
        QueueOptions {
            ifindex: device.index,
            queue,
            // For each socket, one ring of frames to receive into and one for everything else.
            frames: ring * 2 * self.options.sockets,
            frame_size: FRAME_SIZE,
            ring,
            tx_ring: ring,
            // What a pass over the rings costs is shared by as many receives as take these frames.
            batch: self.batch.max(FRAMES_PER_PASS.min(ring / 8) as usize),
            mode: Mode::Auto,
            multi_buffer: device.has_jumbo_frames(FRAME_SIZE - HEADROOM_BYTES),
        }
    }

    /// Hands the queue of a lane over to the lane with the fewest; returns it if there is none.
    pub(super) fn hand_off(&self, queue: LaneQueue) -> Option<LaneQueue> {
        self.state().hand_off(queue)
    }

    /// Called when a lane has drained and closed a queue whose device is gone.
    pub(super) fn queue_closed(&self, queue: QueueId) {
        if self.state().remove_closed(queue) {
            // Its program is detached: if the device is back already, it can be opened.
            self.request_refresh();
        }
    }

    /// Requests a refresh in the background.
    fn request_refresh(&self) {
        self.routes.request_refresh();
    }

    /// Binds the addresses on all devices, also after an error of one: no device may redirect
    /// addresses that were removed. Returns the first error.
    fn bind_addresses(&self, state: &State) -> Result<()> {
        let locals = self.routes.local_state();
        let not_from = checks::blocked_sources(&locals);
        let mut first = Ok(());
        for (device, number) in &state.devices {
            let leaves_ip4 = !self.has_named_devices() && device.has_strict_rp_filter(&locals);
            let ports = self.ports.keys(device.index, leaves_ip4, &locals);
            first = first.and(device.bind(*number, &ports, &not_from));
        }
        first
    }
}
