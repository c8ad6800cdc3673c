//! The devices whose queues are lent.

use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use manylane_sys::device as sys;
use manylane_sys::xsk::{Borrowed, LentQueue, MEMBERS};

use super::loan::Member;
use crate::config::SOURCES;
use crate::error::{Error, ErrorKind, Result};
use crate::io::xdp::checks;
use crate::io::xdp::device::{Attach, Device, Number};
use crate::io::xdp::plane::{FRAME, HEADROOM};
use crate::io::xdp::route::{Locals, Routes};

pub(super) struct LentDevice {
    pub(super) device: Arc<Device>,
    /// Those that were opened, with the number of loans that have each.
    pub(super) queues: Vec<Option<(LentQueue, u32)>>,
}

impl LentDevice {
    /// A socket in a queue, for one more loan; none if it has as many as it can have.
    pub(super) fn member(&mut self, queue: u32, number: Number, loan: u16) -> Result<Option<Member>> {
        let index = queue as usize;
        if self.queues.len() <= index {
            self.queues.resize_with(index + 1, || None);
        }
        let name = &self.device.name;
        let failed = |err: manylane_sys::xsk::OpenError| {
            Error::system(format!("{name} queue {queue}: {}", err.step), err.source)
        };
        if self.queues[index].is_none() {
            let open = LentQueue::open(self.device.index, queue, self.device.is_virtual_pair);
            self.queues[index] = Some((open.map_err(failed)?, 0));
        }
        let Some((lent, members)) = self.queues[index].as_mut().filter(|(_, members)| *members < MEMBERS)
        else {
            return Ok(None);
        };
        let (terms, xsk) = lent.lend(loan).map_err(failed)?;
        let mapped = |err| Error::system(format!("{name} queue {queue}: mapping its rings"), err);
        let copy = xsk.try_clone().map_err(mapped)?;
        let view = Borrowed::open(terms, copy, lent.file()).map_err(mapped)?;
        self.device.steer(number, queue, xsk.as_fd())?;
        *members += 1;
        let sent = view.progress();
        Ok(Some(Member { terms, xsk, view, sent }))
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
        Ok(LentDevice { device, queues: Vec::new() })
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
