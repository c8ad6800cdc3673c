//! The devices whose queues are leased.

use std::net::IpAddr;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use manylane_sys::device as sys;
use manylane_sys::lease::QueueParams;
use manylane_sys::unix_socket::PeerProcess;
use manylane_sys::xsk::{LeasedQueue, LessorQueue, QUEUE_MEMBERS_MAX};

use crate::config::LIMIT_SOURCES_DEFAULT;
use crate::error::{EBUSY, Error, ErrorKind, Result};
use crate::io::xdp::SocketIndex;
use crate::io::xdp::checks;
use crate::io::xdp::control::{FRAME_SIZE, HEADROOM};
use crate::io::xdp::device::{AttachMode, Device};
use crate::io::xdp::route::{LocalState, Routes};

pub(super) struct LeasedDevice {
    pub(super) device: Arc<Device>,
    /// It was asked for by name.
    pub(super) is_named: bool,
    /// Those that were opened.
    queues: Vec<Option<QueueLease>>,
}

/// A member of a leased queue: what a program has of it.
pub(super) struct Member {
    pub(super) params: QueueParams,
    pub(super) xsk: OwnedFd,
    pub(super) view: LeasedQueue,
    /// What it had sent when this was looked at last.
    pub(super) sent: u32,
}

impl Member {
    pub(super) fn new(terms: QueueParams, xsk: OwnedFd, view: LeasedQueue) -> Self {
        let sent = view.tx_produced();
        Self { params: terms, xsk, view, sent }
    }
}

/// A queue, all sockets of which are those of one process, and of those that it forked: they share
/// its memory.
struct QueueLease {
    queue: LessorQueue,
    lessee: Arc<PeerProcess>,
    /// Leases that have it.
    leases: usize,
    /// Members that have left, and something in their rings.
    released: Vec<LeasedQueue>,
}

/// Whether a process can be leased a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Availability {
    Available,
    /// Another process has it, or this one has all of it.
    Unavailable,
    /// It is not leased any more, but somebody still has what was, or the kernel has not let go of
    /// it yet.
    Pending,
}

impl LeasedDevice {
    fn new(device: Arc<Device>, is_named: bool) -> Self {
        Self { device, is_named, queues: Vec::new() }
    }

    /// Has a queue ready for one more socket of `process`: with memory that no other process has
    /// ever had.
    pub(super) fn prepare(&mut self, queue: u32, process: &Arc<PeerProcess>) -> Availability {
        let index = queue as usize;
        if self.queues.len() <= index {
            self.queues.resize_with(index + 1, || None);
        }
        match &self.queues[index] {
            Some(leased) if leased.lessee.is_same(process) => {
                return if leased.leases + leased.released.len() < QUEUE_MEMBERS_MAX as usize {
                    Availability::Available
                } else {
                    Availability::Unavailable
                };
            }
            Some(leased) if leased.leases > 0 => return Availability::Unavailable,
            _ => self.queues[index] = None,
        }
        match LessorQueue::open(self.device.index, queue, self.device.is_veth) {
            Ok(open) => {
                let lessee = Arc::clone(process);
                self.queues[index] =
                    Some(QueueLease { queue: open, lessee, leases: 0, released: Vec::new() });
                Availability::Available
            }
            Err(err) if err.source.raw_os_error() == Some(EBUSY) => Availability::Pending,
            Err(err) => {
                log::warn!("{} queue {queue} is not leased: {err}", self.device.name);
                Availability::Unavailable
            }
        }
    }

    /// A socket in a queue that is ready for one, for one more lease.
    pub(super) fn add_member(
        &mut self,
        queue: u32,
        number: SocketIndex,
        lease: u16,
    ) -> Result<Option<Member>> {
        let name = &self.device.name;
        let failed = |err: manylane_sys::xsk::OpenError| {
            Error::system(format!("{name} queue {queue}: {}", err.step), err.source)
        };
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

    /// The memory of a queue that is leased.
    pub(super) fn file(&self, queue: u32) -> Option<BorrowedFd<'_>> {
        self.queues.get(queue as usize)?.as_ref().map(|leased| leased.queue.file())
    }

    /// A member leaves its queue, and nothing is led to it any more.
    pub(super) fn release(&mut self, queue: u32, member: LeasedQueue) {
        if let Some(leased) = self.queues.get_mut(queue as usize).and_then(Option::as_mut) {
            leased.leases = leased.leases.saturating_sub(1);
            leased.released.push(member);
        }
    }

    /// Takes back what members have left, now or the next time. `has_ended` says whether the lease
    /// of a number has. A process that has nothing of a queue any more may come back for it, as
    /// long as it lives: so it maps no memory twice.
    pub(super) fn reclaim(&mut self, has_ended: &impl Fn(u16) -> bool) {
        for place in &mut self.queues {
            let Some(leased) = place else { continue };
            leased.released.retain(|left| !LessorQueue::reclaim(left, has_ended));
            if leased.leases == 0 && !leased.lessee.is_alive() {
                *place = None;
            }
        }
    }

    /// Whether something is still to be taken back of the lease of that number.
    pub(super) fn has_released(&self, lease: u16) -> bool {
        let mut left = self.queues.iter().flatten().flat_map(|leased| &leased.released);
        left.any(|member| member.terms().lease_id == lease)
    }
}

/// The devices, with the program on them: those named, or all that may be used without being named.
/// Of those, `spare` says why one is to be left alone.
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
            FRAME_SIZE - HEADROOM,
            LIMIT_SOURCES_DEFAULT,
            true,
        )?;
        if checks::has_strict_rp_filter(index, &locals) {
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
        // What is down or not Ethernet (loopback, tunnels) is no candidate.
        let Ok(name) = sys::name(index) else { continue };
        if sys::mac(&name).is_err() || !sys::is_up(&name).unwrap_or(false) {
            continue;
        }
        if let Some(why) = exclusion_reason(index, &name, &locals).or_else(|| spare(&name)) {
            log::info!("engine xdp: {name} is left out: {why}");
            left_out.push(format!("{name}: {why}"));
            continue;
        }
        match open(index) {
            Ok(device) => devices.push(device),
            Err(err) => {
                log::info!("engine xdp: left out: {}", err.chain());
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
        [] => "no Ethernet device is up and has an address: there are no queues to lease".into(),
        reasons => {
            format!("no device can be used without being named (--interface): {}", reasons.join("; "))
        }
    };
    Err(Error::new(kind, message))
}

/// Why a device is used only if it is named; none if it is used anyway.
fn exclusion_reason(device: u32, name: &str, locals: &LocalState) -> Option<String> {
    let is_global = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => !ip.is_link_local(),
        IpAddr::V6(_) => !checks::is_link_local(ip),
    };
    if !locals.addresses.iter().any(|(at, ip)| *at == device && is_global(*ip)) {
        return Some("it has link-local addresses only".into());
    }
    if sys::driver(name).is_ok_and(|driver| driver == "veth") {
        return Some("it is an end of a veth pair, whose other end may be a container's".into());
    }
    checks::has_strict_rp_filter(device, locals).then(|| {
        format!(
            "net.ipv4.conf.{name}.rp_filter is 1, and XDP would take datagrams that this keeps from coming in by it"
        )
    })
}
