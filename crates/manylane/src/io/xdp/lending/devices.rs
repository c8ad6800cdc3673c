//! The devices whose queues are lent.

use std::os::fd::AsFd as _;
use std::sync::Arc;

use manylane_sys::device as sys;
use manylane_sys::xsk::{Borrowed, LentQueue, MEMBERS};

use super::loan::Member;
use crate::config::SOURCES;
use crate::error::{Error, ErrorKind, Result};
use crate::io::xdp::device::{Attach, Device, Number};
use crate::io::xdp::plane::{FRAME, HEADROOM};
use crate::io::xdp::route::Routes;

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

/// The devices, with the program on them.
pub(super) fn attach(routes: &Routes, names: Option<&[String]>) -> Result<Vec<LentDevice>> {
    let longest = FRAME - HEADROOM;
    let open = |index| Device::open(index, Attach::Native, longest, SOURCES, true);
    let mut devices = Vec::new();
    if let Some(names) = names {
        for name in names {
            let index = manylane_sys::netns::device_index(name)
                .map_err(|err| Error::with(ErrorKind::Config, format!("there is no device {name}"), err))?;
            devices.push(LentDevice { device: open(index)?, queues: Vec::new() });
        }
        return Ok(devices);
    }
    let mut all: Vec<u32> = routes.local_addresses().into_iter().map(|(index, _)| index).collect();
    all.sort_unstable();
    all.dedup();
    let mut why = None;
    for index in all {
        let is_up = sys::name(index)
            .and_then(|name| sys::mac(&name).map(|_| name))
            .and_then(|name| sys::is_up(&name))
            .unwrap_or(false);
        // Loopback has no address of Ethernet's that means anything.
        let is_loopback = sys::name(index).is_ok_and(|name| name == "lo");
        if !is_up || is_loopback {
            continue;
        }
        match open(index) {
            Ok(device) => devices.push(LentDevice { device, queues: Vec::new() }),
            Err(err) => {
                log::info!("engine xdp: left out: {}", err.chain());
                why = Some(err);
            }
        }
    }
    if devices.is_empty() {
        let message = "no Ethernet device is up and has an address: engine xdp has no queues to lend";
        return Err(why.unwrap_or_else(|| Error::new(ErrorKind::Unsupported, message)));
    }
    Ok(devices)
}
