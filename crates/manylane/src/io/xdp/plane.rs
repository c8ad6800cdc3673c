//! What the XDP side of one socket is made of: its devices, which lane serves which queue, and the addresses that
//! lead to it, kept current.
//!
//! | event | what happens |
//! |---|---|
//! | open | companions bind and are steered to; XSKs open and go into the map of their device; only then the ports |
//! | addresses of the machine change | the ports of a wildcard socket follow |
//! | a lane leaves | its queues lead to the kernel again, a grace period passes, its rings are drained |
//! | a device goes or is down | nothing comes from it; what comes over another one comes through companions |
//! | the socket ends, the process dies | ports and program go: every frame is the kernel's again |

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use manylane_sys::device as sys;
use manylane_sys::xsk::{self, Mode, Queue, QueueOptions};

use super::device::{Attach, Device, Number};
use super::route::{Change, Routes};
use super::{LaneQueue, XdpIo};
use crate::config::{Config, XdpOptions};
use crate::counters::LaneId;
use crate::error::{EBUSY, Error, ErrorKind, Result};

/// Bytes of a frame of the UMEM, and what the kernel keeps free at its start (`XDP_PACKET_HEADROOM`).
const FRAME: u32 = 2048;
const HEADROOM: u32 = 256;
/// How long a queue may stay taken by an owner that has closed it.
const HANDOVER: Duration = Duration::from_secs(1);

/// A queue of a device and the lane that it feeds: see [`Socket::xdp_queues`](crate::Socket::xdp_queues).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct XdpQueue {
    /// Name of the device.
    pub device: String,
    /// Number of the queue.
    pub queue: u32,
    /// The lane.
    pub lane: LaneId,
    /// The device writes into the memory of the lane by itself.
    pub zero_copy: bool,
}

/// The XDP side of a socket.
pub(crate) struct Plane {
    bound: SocketAddr,
    only_v6: bool,
    ecn: bool,
    options: XdpOptions,
    routes: Arc<Routes>,
    /// The devices, with the number that this socket has on each.
    devices: Vec<(Arc<Device>, Number)>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Queues that are served, with a descriptor of their XSK for its statistics.
    served: Vec<Served>,
    /// Ports lead here.
    open: bool,
    /// Of queues that are no longer served.
    closed: Vec<(LaneId, u64)>,
}

struct Served {
    lane: LaneId,
    device: usize,
    queue: u32,
    zero_copy: bool,
    xsk: OwnedFd,
    /// Frames are led here.
    steered: bool,
}

impl Plane {
    /// Finds the devices and attaches the program to them. No frame is taken yet.
    pub(crate) fn open(config: &Config, bound: SocketAddr) -> Result<Arc<Self>> {
        let routes = Routes::start()?;
        let mut plane = Self {
            bound,
            only_v6: config.only_v6,
            ecn: config.ecn,
            options: config.xdp.clone(),
            routes,
            devices: Vec::new(),
            state: Mutex::default(),
        };
        plane.attach()?;
        let plane = Arc::new(plane);
        let follower: Weak<Self> = Arc::downgrade(&plane);
        plane.routes.on_change(Box::new(move |change| {
            if let (Change::Addresses, Some(plane)) = (change, follower.upgrade()) {
                plane.follow_addresses();
            }
        }));
        Ok(plane)
    }

    /// The devices that datagrams for the bound address come in on, as far as anybody can know: those named, else
    /// the one that has the address, else (wildcard, or an address of loopback that is not 127.0.0.1) all.
    fn candidates(&self) -> Result<Vec<u32>> {
        if let Some(names) = &self.options.devices {
            let index = |name: &String| {
                manylane_sys::netns::device_index(name).map_err(|err| {
                    Error::with(ErrorKind::Config, format!("xdp_devices: there is no device {name}"), err)
                })
            };
            return names.iter().map(index).collect();
        }
        let all = self.routes.local_addresses();
        let with_addresses = |wanted: &dyn Fn(IpAddr) -> bool| {
            let mut found: Vec<u32> = all.iter().filter(|(_, ip)| wanted(*ip)).map(|(at, _)| *at).collect();
            found.sort_unstable();
            found.dedup();
            found.retain(|&at| {
                sys::name(at)
                    .and_then(|name| sys::mac(&name).map(|_| name))
                    .is_ok_and(|name| sys::is_up(&name).unwrap_or(false))
            });
            found
        };
        let bound = self.bound.ip().to_canonical();
        let own = with_addresses(&|ip| ip == bound);
        Ok(if own.is_empty() && !bound.is_loopback() { with_addresses(&|_| true) } else { own })
    }

    fn attach(&mut self) -> Result<()> {
        let attach = if self.options.generic { Attach::Generic } else { Attach::Native };
        let named = self.options.devices.is_some();
        let mut why = None;
        for index in self.candidates()? {
            let opened = Device::open(index, attach, FRAME - HEADROOM)
                .and_then(|device| device.register().map(|number| (device, number)));
            match opened {
                Ok(device) => self.devices.push(device),
                // A device that was asked for by name has to work.
                Err(err) if named => return Err(err),
                Err(err) => {
                    log::info!("engine xdp: left out: {}", err.chain());
                    why = Some(err);
                }
            }
        }
        match why {
            _ if !self.devices.is_empty() => Ok(()),
            Some(err) => Err(err),
            None => Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "no Ethernet device that is up has the address {}: xdp_devices() names one",
                    self.bound.ip()
                ),
            )),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that holds the lock leaves the state in a form that a later holder could not use.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the queues of lane `at` of `lanes`: each queue has one lane, and queues go round the lanes.
    pub(crate) fn serve(&self, lane: LaneId, at: usize, lanes: usize, batch: usize) -> Result<XdpIo> {
        let mut queues = Vec::new();
        let mut turn = 0;
        for (number_of_device, (device, number)) in self.devices.iter().enumerate() {
            for queue in 0..device.queues {
                turn += 1;
                if (turn - 1) % lanes != at {
                    continue;
                }
                if !device.own(queue) {
                    // Another socket of this process has it; ours is fed by the companion.
                    log::warn!(
                        "{} queue {queue} is served by another socket of this process: lane {lane} gets its datagrams through the kernel",
                        device.name
                    );
                    continue;
                }
                let owned = OwnedQueue { device: Arc::clone(device), queue };
                let xsk = self.open_queue(device, queue, batch)?;
                let served = Served {
                    lane,
                    device: number_of_device,
                    queue,
                    zero_copy: xsk.is_zero_copy(),
                    xsk: xsk
                        .as_fd()
                        .try_clone_to_owned()
                        .map_err(|err| Error::system("a descriptor for the statistics of an XSK", err))?,
                    steered: true,
                };
                device.steer(*number, queue, xsk.as_fd())?;
                self.state().served.push(served);
                queues.push(LaneQueue::new(xsk, owned, batch));
            }
        }
        if queues.is_empty() && !self.options.surplus_lanes {
            let queues: u32 = self.devices.iter().map(|(device, _)| device.queues).sum();
            let message = format!(
                "{lanes} lanes, but {queues} queues: lower lanes(), or let lanes without a queue be fed by the kernel (xdp_surplus_lanes(true))"
            );
            return Err(Error::new(ErrorKind::Config, message));
        }
        XdpIo::new(queues, self.routes.reader(), self.bound, self.ecn)
    }

    fn open_queue(&self, device: &Device, queue: u32, batch: usize) -> Result<Queue> {
        let ring = self.options.ring;
        let options = QueueOptions {
            ifindex: device.index,
            queue,
            frames: ring * 2,
            frame_size: FRAME,
            ring,
            tx_ring: ring,
            batch,
            mode: if self.options.copy { Mode::Copy } else { Mode::Auto },
            pieces: false,
        };
        let start = Instant::now();
        loop {
            match Queue::open(&options) {
                Ok(queue) => return Ok(queue),
                // The kernel gives a queue free a while after its last owner has closed it.
                Err(err) if err.source.raw_os_error() == Some(EBUSY) && start.elapsed() < HANDOVER => {
                    thread::sleep(Duration::from_millis(5));
                }
                Err(err) => return Err(explain(device, queue, err)),
            }
        }
    }

    /// From here on frames for the bound address come to the lanes.
    pub(crate) fn start(&self) -> Result<()> {
        self.state().open = true;
        self.lead_addresses()
    }

    fn follow_addresses(&self) {
        if let Err(err) = self.lead_addresses() {
            log::warn!("engine xdp: addresses changed, and XDP could not follow: {}", err.chain());
        }
    }

    fn lead_addresses(&self) -> Result<()> {
        let state = self.state();
        if !state.open {
            return Ok(());
        }
        let all: Vec<IpAddr> = self.routes.local_addresses().into_iter().map(|(_, ip)| ip).collect();
        let bound = self.bound.ip();
        let addresses: Vec<IpAddr> = match bound {
            _ if !bound.is_unspecified() => vec![bound.to_canonical()],
            IpAddr::V4(_) => all.iter().copied().filter(IpAddr::is_ipv4).collect(),
            IpAddr::V6(_) => all.iter().copied().filter(|ip| ip.is_ipv6() || !self.only_v6).collect(),
        };
        // Link-local addresses mean something on their own link only; the kernel knows which.
        let addresses: Vec<IpAddr> = addresses.into_iter().filter(|ip| !is_link_local(*ip)).collect();
        // An address that the machine does not have (any more) is not ours to take.
        let addresses: Vec<IpAddr> = addresses.into_iter().filter(|ip| all.contains(ip)).collect();
        for (device, number) in &self.devices {
            device.bind(*number, self.bound.port(), &addresses, &all)?;
        }
        Ok(())
    }

    /// Leads the queues of a lane to the kernel again. What is on its way to its rings has arrived after a grace
    /// period.
    pub(crate) fn retire(&self, lane: LaneId) {
        let mut state = self.state();
        for served in state.served.iter_mut().filter(|served| served.lane == lane && served.steered) {
            if let Some((device, number)) = self.devices.get(served.device) {
                device.unsteer(*number, served.queue);
            }
            served.steered = false;
        }
    }

    /// Forgets a lane whose queues are drained; its XSKs close with it.
    pub(crate) fn forget(&self, lane: LaneId) {
        self.retire(lane);
        let dropped = self.dropped(lane);
        let mut state = self.state();
        let before = state.served.len();
        state.served.retain(|served| served.lane != lane);
        // Lanes that came later have no queues: those that come and go leave nothing here.
        if state.served.len() < before {
            state.closed.push((lane, dropped));
        }
    }

    /// Frames that the kernel could not put into the rings of a lane.
    pub(crate) fn dropped(&self, lane: LaneId) -> u64 {
        let state = self.state();
        let closed = state.closed.iter().filter(|(of, _)| *of == lane).map(|(_, dropped)| dropped);
        let open = state.served.iter().filter(|served| served.lane == lane).map(|served| {
            // A socket that is open answers.
            xsk::statistics(served.xsk.as_fd()).map_or(0, |seen| seen.dropped())
        });
        closed.sum::<u64>() + open.sum::<u64>()
    }

    /// Frames that the rings of one queue hold.
    pub(crate) fn room(&self) -> usize {
        self.options.ring as usize
    }

    /// What the XDP programs of all devices counted, by name, with the other sockets of these devices.
    pub(crate) fn counts(&self) -> Vec<(String, &'static str, u64)> {
        let names = manylane_bpf::abi::XDP_COUNTS;
        let of = |device: &Arc<Device>| {
            let name = device.name.clone();
            names.into_iter().zip(device.counts()).map(move |(what, count)| (name.clone(), what, count))
        };
        self.devices.iter().flat_map(|(device, _)| of(device)).collect()
    }

    /// The queues and their lanes.
    pub(crate) fn queues(&self) -> Vec<XdpQueue> {
        let state = self.state();
        let about = |served: &Served| {
            let (device, _) = self.devices.get(served.device)?;
            Some(XdpQueue {
                device: device.name.clone(),
                queue: served.queue,
                lane: served.lane,
                zero_copy: served.zero_copy,
            })
        };
        state.served.iter().filter_map(about).collect()
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        for (device, number) in &self.devices {
            device.unregister(*number);
        }
    }
}

/// A queue that this process owns; given back when the value goes, which is after its XSK.
pub(super) struct OwnedQueue {
    pub(super) device: Arc<Device>,
    queue: u32,
}

impl Drop for OwnedQueue {
    fn drop(&mut self) {
        self.device.disown(self.queue);
    }
}

fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if Ipv6Addr::is_unicast_link_local(&ip))
}

/// What is in the way of an XSK, and what to change.
fn explain(device: &Device, queue: u32, err: xsk::OpenError) -> Error {
    let at = format!("{} queue {queue}", device.name);
    match err.source.raw_os_error() {
        Some(EBUSY) => Error::with(
            ErrorKind::InUse,
            format!("{at} is served by the AF_XDP socket of another process (see 'ss --xdp -p')"),
            err.source,
        ),
        _ => Error::system(format!("{at}: {}", err.step), err.source),
    }
}
