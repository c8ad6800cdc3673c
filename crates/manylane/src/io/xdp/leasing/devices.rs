//! The devices whose queues are leased.

use std::net::IpAddr;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use manylane_sys::device as sys;
use manylane_sys::errno::EBUSY;
use manylane_sys::unix_socket::PeerProcess;
use manylane_sys::xsk::{LeasedQueue, LessorQueue, OpenError, QUEUE_MEMBERS_MAX, QueueParams};

use crate::config::LIMIT_SOURCES_DEFAULT;
use crate::error::{Error, ErrorKind, Result};
use crate::io::filter::SocketIndex;
use crate::io::xdp::checks;
use crate::io::xdp::control::{FRAME_SIZE, HEADROOM_BYTES};
use crate::io::xdp::device::{AttachMode, Device};
use crate::io::xdp::route::{LocalState, Routes};

pub(super) struct LeasedDevice {
    pub(super) device: Arc<Device>,
    /// The user named it.
    pub(super) is_named: bool,
    /// The queues, by number, that are open.
    queues: Vec<Option<QueueLease>>,
}

/// A program's member of a leased queue.
pub(super) struct Member {
    pub(super) params: QueueParams,
    pub(super) xsk: OwnedFd,
    pub(super) view: LeasedQueue,
    /// Frames it had sent at the last check.
    pub(super) sent: u32,
}

impl Member {
    pub(super) fn new(terms: QueueParams, xsk: OwnedFd, view: LeasedQueue) -> Self {
        let sent = view.tx_produced();
        Self { params: terms, xsk, view, sent }
    }
}

/// A queue leased to one process and its forks: all its sockets share its memory.
struct QueueLease {
    queue: LessorQueue,
    /// None yet for a queue that was opened in advance.
    lessee: Option<Arc<PeerProcess>>,
    /// Leases that include it.
    leases: usize,
    /// Members that have left, with frames in their rings.
    released: Vec<LeasedQueue>,
}

/// Availability of a queue for a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Availability {
    Available,
    /// Another process has it, or this one has all of its members.
    Unavailable,
    /// No longer leased, but a process still has parts of it, or the kernel has not released it
    /// yet.
    Pending,
}

impl LeasedDevice {
    fn new(device: Arc<Device>, is_named: bool) -> Self {
        Self { device, is_named, queues: Vec::new() }
    }

    /// Opens a queue before any process requests it. Most of its time is that of the memory, which
    /// the kernel zeroes and pins. If it fails, [`prepare`](Self::prepare) tries again.
    pub(super) fn open_in_advance(&mut self, queue: u32) {
        _ = self.open(queue, None);
    }

    /// Prepares a queue for one more socket of `process`, with memory that no other process ever
    /// had.
    pub(super) fn prepare(&mut self, queue: u32, process: &Arc<PeerProcess>) -> Availability {
        if let Some(leased) = self.queues.get_mut(queue as usize).and_then(Option::as_mut) {
            let lessee = leased.lessee.get_or_insert_with(|| Arc::clone(process));
            if lessee.is_same(process) {
                return if leased.leases + leased.released.len() < QUEUE_MEMBERS_MAX as usize {
                    Availability::Available
                } else {
                    Availability::Unavailable
                };
            }
            if leased.leases > 0 {
                return Availability::Unavailable;
            }
        }
        match self.open(queue, Some(Arc::clone(process))) {
            Ok(()) => Availability::Available,
            Err(err) if err.source.raw_os_error() == Some(EBUSY) => Availability::Pending,
            Err(err) => {
                log::warn!("cannot lease {} queue {queue}: {err}", self.device.name);
                Availability::Unavailable
            }
        }
    }

    /// Opens a queue, after closing it if it was open.
    fn open(&mut self, queue: u32, lessee: Option<Arc<PeerProcess>>) -> std::result::Result<(), OpenError> {
        let index = queue as usize;
        if self.queues.len() <= index {
            self.queues.resize_with(index + 1, || None);
        }
        self.queues[index] = None;
        let open = LessorQueue::open(self.device.index, queue, self.device.is_veth)?;
        self.queues[index] = Some(QueueLease { queue: open, lessee, leases: 0, released: Vec::new() });
        Ok(())
    }

    /// Adds a socket to a prepared queue, for one more lease.
    pub(super) fn add_member(
        &mut self,
        queue: u32,
        number: SocketIndex,
        lease: u16,
    ) -> Result<Option<Member>> {
        let name = &self.device.name;
        let failed =
            |err: OpenError| Error::system(format!("{name} queue {queue}: {}", err.step), err.source);
        let Some(leased) = self.queues.get_mut(queue as usize).and_then(Option::as_mut) else {
            return Ok(None);
        };
        let (terms, xsk) = leased.queue.lease(lease).map_err(failed)?;
        let mapped = |err| Error::system(format!("{name} queue {queue}: mapping its rings"), err);
        let copy = xsk.try_clone().map_err(mapped)?;
        let view = LeasedQueue::open(terms, copy, leased.queue.file()).map_err(mapped)?;
        self.device.redirect(number, queue, xsk.as_fd())?;
        leased.leases += 1;
        Ok(Some(Member::new(terms, xsk, view)))
    }

    /// The memory of a leased queue.
    pub(super) fn file(&self, queue: u32) -> Option<BorrowedFd<'_>> {
        self.queues.get(queue as usize)?.as_ref().map(|leased| leased.queue.file())
    }

    /// Records that a member has left its queue. No more frames are redirected to it.
    pub(super) fn release(&mut self, queue: u32, member: LeasedQueue) {
        if let Some(leased) = self.queues.get_mut(queue as usize).and_then(Option::as_mut) {
            leased.leases = leased.leases.saturating_sub(1);
            leased.released.push(member);
        }
    }

    /// Reclaims what members have left behind, now or at a later call. `has_ended` tells whether
    /// the lease with a number has ended. A queue stays with its process as long as that lives,
    /// even without leases, so that a process maps no memory twice.
    pub(super) fn reclaim(&mut self, has_ended: &impl Fn(u16) -> bool) {
        for place in &mut self.queues {
            let Some(leased) = place else { continue };
            leased.released.retain(|left| !LessorQueue::reclaim(left, has_ended));
            let has_exited = leased.lessee.as_ref().is_some_and(|lessee| !lessee.is_alive());
            if leased.leases == 0 && has_exited {
                *place = None;
            }
        }
    }

    /// True if the lease with this number left something that is not reclaimed yet.
    pub(super) fn has_released(&self, lease: u16) -> bool {
        let mut left = self.queues.iter().flatten().flat_map(|leased| &leased.released);
        left.any(|member| member.terms().lease_id == lease)
    }
}

/// Attaches the program to the named devices, or to all that may be used without being named. Of
/// the latter, `spare` returns the reason for each that is to be left out.
pub(super) fn attach(
    routes: &Routes,
    names: Option<&[String]>,
    spare: &dyn Fn(&str) -> Option<String>,
) -> Result<Vec<LeasedDevice>> {
    let locals = routes.local_state();
    let open = |index| {
        let device = Device::open(
            index,
            AttachMode::Native,
            &locals,
            FRAME_SIZE - HEADROOM_BYTES,
            LIMIT_SOURCES_DEFAULT,
            true,
        )?;
        if device.has_strict_rp_filter(&locals) {
            checks::warn_of_rp_filter(&device.name, names.is_some());
        }
        Ok(LeasedDevice::new(device, names.is_some()))
    };
    if let Some(names) = names {
        let find = |name: &String| {
            manylane_sys::netns::device_index(name)
                .map_err(|err| Error::with(ErrorKind::Config, format!("there is no device {name}"), err))
        };
        return names.iter().map(|name| find(name).and_then(open)).collect();
    }
    let mut all: Vec<u32> = locals.addresses.iter().map(|(index, _)| *index).collect();
    all.dedup();
    let (mut devices, mut left_out, mut last) = (Vec::new(), Vec::new(), None);
    for index in all {
        // A device that is down or not Ethernet (loopback, tunnels) is no candidate.
        let Ok(name) = sys::name(index) else { continue };
        if sys::mac(&name).is_err() || !sys::is_up(&name).unwrap_or(false) {
            continue;
        }
        if let Some(why) = exclusion_reason(index, &name, &locals).or_else(|| spare(&name)) {
            log::info!("engine xdp: {name} skipped: {why}");
            left_out.push(format!("{name}: {why}"));
            continue;
        }
        match open(index) {
            Ok(device) => devices.push(device),
            Err(err) => {
                log::info!("engine xdp: device skipped: {}", err.chain());
                left_out.push(err.chain());
                last = Some(err.kind());
            }
        }
    }
    if !devices.is_empty() {
        return Ok(devices);
    }
    let kind = last.unwrap_or(ErrorKind::Unsupported);
    let message = match &left_out[..] {
        [] => "no queues to lease: no Ethernet device is up and has an address".into(),
        reasons => {
            format!("no device can be used unless it is named (--interface): {}", reasons.join("; "))
        }
    };
    Err(Error::new(kind, message))
}

/// The reason why a device is used only if it is named; none if it may be used anyway.
fn exclusion_reason(device: u32, name: &str, locals: &LocalState) -> Option<String> {
    let is_global = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => !ip.is_link_local(),
        IpAddr::V6(_) => !checks::is_link_local(ip),
    };
    if !locals.addresses.iter().any(|(at, ip)| *at == device && is_global(*ip)) {
        return Some("it only has link-local addresses".into());
    }
    match sys::driver(name).as_deref() {
        Ok("veth") => {
            return Some("it is an end of a veth pair, whose other end may be a container's".into());
        }
        Ok("tun") => {
            return Some("it is a tap device, whose other end may be a virtual machine's".into());
        }
        _ => {}
    }
    let state = match checks::read_strict_rp_filter(device, locals) {
        Some(false) => return None,
        Some(true) => "is 1",
        None => "cannot be read and may be 1",
    };
    Some(format!(
        "net.ipv4.conf.{name}.rp_filter {state}, and XDP would accept datagrams that this check drops"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_tells_an_unreadable_rp_filter_from_a_strict_one() {
        const MISSING: u32 = i32::MAX as u32;
        let addresses = vec![(MISSING, "192.0.2.1".parse().unwrap())];
        let locals = LocalState { addresses, up: vec![MISSING, 1], ..LocalState::default() };
        let why = exclusion_reason(MISSING, "missing0", &locals).unwrap();
        assert!(why.starts_with("net.ipv4.conf.missing0.rp_filter cannot be read"), "{why}");
        let alone = LocalState { up: vec![MISSING], ..locals };
        assert_eq!(exclusion_reason(MISSING, "missing0", &alone), None);
    }
}
