//! The devices whose queues are lent.

use std::net::IpAddr;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;

use manylane_sys::device as sys;
use manylane_sys::local::Process;
use manylane_sys::xsk::{Borrowed, LentQueue, MEMBERS};

use super::loan::Member;
use crate::config::SOURCES;
use crate::error::{EBUSY, Error, ErrorKind, Result};
use crate::io::xdp::checks;
use crate::io::xdp::device::{Attach, Device, Number};
use crate::io::xdp::plane::{FRAME, HEADROOM};
use crate::io::xdp::route::{Locals, Routes};

pub(super) struct LentDevice {
    pub(super) device: Arc<Device>,
    /// Those that were opened.
    queues: Vec<Option<Lent>>,
}

/// A queue, all sockets of which are those of one process, and of those that it forked: they share
/// its memory.
struct Lent {
    queue: LentQueue,
    borrower: Arc<Process>,
    /// Loans that have it.
    members: usize,
    /// Members that have left, and something in their rings.
    left: Vec<Borrowed>,
}

/// Whether a process can be lent a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ready {
    Yes,
    /// Another process has it, or this one has all of it.
    No,
    /// It is not lent any more, but somebody still has what was, or the kernel has not let go of
    /// it yet.
    NotYet,
}

impl LentDevice {
    fn new(device: Arc<Device>) -> Self {
        Self { device, queues: Vec::new() }
    }

    /// Has a queue ready for one more socket of `process`: with memory that no other process has
    /// ever had.
    pub(super) fn prepare(&mut self, queue: u32, process: &Arc<Process>) -> Ready {
        let index = queue as usize;
        if self.queues.len() <= index {
            self.queues.resize_with(index + 1, || None);
        }
        match &self.queues[index] {
            Some(lent) if lent.borrower.is(process) => {
                return if lent.members + lent.left.len() < MEMBERS as usize {
                    Ready::Yes
                } else {
                    Ready::No
                };
            }
            Some(lent) if lent.members > 0 => return Ready::No,
            _ => self.queues[index] = None,
        }
        match LentQueue::open(self.device.index, queue, self.device.is_virtual_pair) {
            Ok(open) => {
                let borrower = Arc::clone(process);
                self.queues[index] = Some(Lent { queue: open, borrower, members: 0, left: Vec::new() });
                Ready::Yes
            }
            Err(err) if err.source.raw_os_error() == Some(EBUSY) => Ready::NotYet,
            Err(err) => {
                log::warn!("{} queue {queue} is not lent: {err}", self.device.name);
                Ready::No
            }
        }
    }

    /// A socket in a queue that is ready for one, for one more loan.
    pub(super) fn member(&mut self, queue: u32, number: Number, loan: u16) -> Result<Option<Member>> {
        let name = &self.device.name;
        let failed = |err: manylane_sys::xsk::OpenError| {
            Error::system(format!("{name} queue {queue}: {}", err.step), err.source)
        };
        let Some(lent) = self.queues.get_mut(queue as usize).and_then(Option::as_mut) else {
            return Ok(None);
        };
        let (terms, xsk) = lent.queue.lend(loan).map_err(failed)?;
        let mapped = |err| Error::system(format!("{name} queue {queue}: mapping its rings"), err);
        let copy = xsk.try_clone().map_err(mapped)?;
        let view = Borrowed::open(terms, copy, lent.queue.file()).map_err(mapped)?;
        self.device.steer(number, queue, xsk.as_fd())?;
        lent.members += 1;
        Ok(Some(Member::new(terms, xsk, view)))
    }

    /// The memory of a queue that is lent.
    pub(super) fn file(&self, queue: u32) -> Option<BorrowedFd<'_>> {
        self.queues.get(queue as usize)?.as_ref().map(|lent| lent.queue.file())
    }

    /// A member leaves its queue, and nothing is led to it any more.
    pub(super) fn leave(&mut self, queue: u32, member: Borrowed) {
        if let Some(lent) = self.queues.get_mut(queue as usize).and_then(Option::as_mut) {
            lent.members = lent.members.saturating_sub(1);
            lent.left.push(member);
        }
    }

    /// Takes back what members have left, now or the next time. `has_ended` says whether the loan
    /// of a number has. A process that has nothing of a queue any more may come back for it, as
    /// long as it lives: so it maps no memory twice.
    pub(super) fn take_back(&mut self, has_ended: &impl Fn(u16) -> bool) {
        for place in &mut self.queues {
            let Some(lent) = place else { continue };
            lent.left.retain(|left| !LentQueue::take_back(left, has_ended));
            if lent.members == 0 && !lent.borrower.lives() {
                *place = None;
            }
        }
    }

    /// Whether something is still to be taken back of the loan of that number.
    pub(super) fn has_left(&self, loan: u16) -> bool {
        let mut left = self.queues.iter().flatten().flat_map(|lent| &lent.left);
        left.any(|member| member.terms().loan == loan)
    }
}

/// The devices, with the program on them: those named, or all that may be used without being named. Of those, `spare` says
/// why one is to be left alone.
pub(super) fn attach(
    routes: &Routes,
    names: Option<&[String]>,
    spare: &dyn Fn(&str) -> Option<String>,
) -> Result<Vec<LentDevice>> {
    let locals = routes.locals();
    let open = |index| {
        let device = Device::open(index, Attach::Native, &locals, FRAME - HEADROOM, SOURCES, true)?;
        Ok(LentDevice::new(device))
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
        if let Some(why) = needs_name(index, &name, &locals).or_else(|| spare(&name)) {
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
        [] => "no Ethernet device is up and has an address: there are no queues to lend".into(),
        reasons => {
            format!("no device can be used without being named (--interfaces): {}", reasons.join("; "))
        }
    };
    Err(Error::new(kind, message))
}

/// Why a device is used only if it is named; none if it is used anyway.
fn needs_name(device: u32, name: &str, locals: &Locals) -> Option<String> {
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
    checks::filters_by_source(device, name, locals).then(|| {
        format!(
            "net.ipv4.conf.{name}.rp_filter is 1, and XDP would take datagrams that this keeps from coming in by it"
        )
    })
}
