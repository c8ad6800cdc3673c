//! One device with the XDP program on it: loaded, attached, its maps filled.
//!
//! A device is opened once per process, however many sockets use it, because the kernel allows one
//! program, and one owner for each queue. The program is attached by a link, which is a descriptor
//! of this process. When the process ends in any way, the kernel detaches the program, and the
//! next frame goes to the kernel's own stack.

mod attach;
mod registry;

use std::collections::HashSet;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aya::maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray, XskMap};
use aya::util::nr_cpus;
use aya::{Ebpf, EbpfLoader};
use manylane_bpf::abi;
use manylane_sys::device as sys;
use manylane_sys::errno::ENXIO;
use manylane_sys::xsk::{OpenError, Queue, QueueOptions, Step, WeakQueue};

pub(crate) use super::checks::AttachMode;
use super::checks::{self, BlockedSources};
use super::ports::{addr_key, is_tcp};
use super::route::LocalState;
use crate::bpf_load::bpf_error;
use crate::error::{Error, ErrorKind, Result};
use crate::io::filter::maps::FilterMaps;
use crate::io::filter::{SharedFilterMaps, SocketIndex};
use crate::vlan::Vlan;

/// A device with the XDP program, until the last socket that uses it is gone.
pub(crate) struct Device {
    pub(crate) index: u32,
    /// Its name when it was opened.
    pub(crate) name: String,
    /// Queues that XSKs can use, at the last refresh.
    queues: AtomicU32,
    /// Send queues that the driver has reserved since the program was attached.
    reserved: u32,
    /// This process had it open earlier: the kernel may still be releasing its queues.
    was_open_before: bool,
    /// It is no longer used: it has left the namespace, or another device decides about its
    /// frames. A device that returns is another [`Device`].
    is_gone: AtomicBool,
    /// Its MAC address at the last refresh, in the lower six bytes.
    mac: AtomicU64,
    /// A veth: frames from the kernel at the other end have partial checksums.
    pub(crate) is_veth: bool,
    /// It completes checksums that TX metadata requests. Not virtio_net: the kernel builds its
    /// skbs without copying, and ignored the metadata on that path (seen on Linux 6.12).
    pub(crate) has_tx_checksum: bool,
    /// XDP saw no VLAN tags when that was last read.
    has_stripped_vlans: AtomicBool,
    /// The last known answer of [`has_strict_rp_filter`](Self::has_strict_rp_filter).
    had_strict_rp_filter: AtomicBool,
    /// The program runs in the driver.
    is_native: bool,
    maps: Mutex<DeviceMaps>,
    /// The filters of its program.
    pub(super) filters: SharedFilterMaps,
    /// For a second socket of this process that joins an open queue, because the kernel allows no
    /// second owner.
    open_queues: Mutex<Vec<Option<WeakQueue>>>,
}

/// The program of a device, and its maps.
struct DeviceMaps {
    /// Owns the program and, with it, the link; none once it is detached.
    program: Option<Ebpf>,
    device: Array<MapData, abi::DeviceWords>,
    /// What it was last set to.
    described: abi::Device,
    xsks: XskMap<MapData>,
    ports: HashMap<MapData, abi::PortKey, u32>,
    locals: HashMap<MapData, abi::AddrKey, u32>,
    vlans: HashMap<MapData, u32, u32>,
    counts: PerCpuArray<MapData, u64>,
    /// Socket numbers in use.
    sockets: [bool; abi::SOCKETS_MAX as usize],
}

impl DeviceMaps {
    /// Describes the device to the program.
    fn describe(&mut self, device: abi::Device) -> std::result::Result<(), MapError> {
        self.device.set(0, device.to_words(), 0)?;
        self.described = device;
        Ok(())
    }

    /// Sets the Bloom filter of our own addresses.
    fn set_local_filter<'k>(
        &mut self,
        addresses: impl Iterator<Item = &'k abi::AddrKey>,
    ) -> std::result::Result<(), MapError> {
        let mut device = abi::Device { locals: Default::default(), ..self.described };
        addresses.for_each(|key| device.add_local(key));
        if device == self.described { Ok(()) } else { self.describe(device) }
    }

    /// Tells the program whether a port of TCP is bound.
    fn update_takes_tcp(&mut self) -> std::result::Result<(), MapError> {
        let takes_tcp = self.ports.keys().flatten().any(|key| is_tcp(&key));
        let device = abi::Device { takes_tcp, ..self.described };
        if device == self.described { Ok(()) } else { self.describe(device) }
    }

    /// Removes all VLANs of a socket.
    fn remove_vlans(&mut self, socket: SocketIndex) {
        let vlans: Vec<(u32, u32)> = self.vlans.iter().filter_map(std::result::Result::ok).collect();
        for (key, sockets) in vlans.into_iter().filter(|(_, sockets)| sockets & 1 << socket != 0) {
            let left = sockets & !(1 << socket);
            // It exists: neither operation needs memory.
            let _ = if left == 0 { self.vlans.remove(&key) } else { self.vlans.insert(key, left, 0) };
        }
    }
}

/// Minimum number of sources for each possible CPU. Each takes 128 free entries of a map at a time
/// (`LOCAL_FREE_TARGET` in kernel/bpf/bpf_lru_list.c). Before Linux 6.16, which lowers that for
/// small maps, they take entries that are in use from each other.
const SOURCES_PER_CPU_MIN: u32 = 256;

impl Device {
    fn load(index: u32, attach: AttachMode, longest: u32, sources: u32, timeout: Duration) -> Result<Self> {
        let asking = |err| Error::system(format!("querying device {index}"), err);
        let name = sys::name(index).map_err(asking)?;
        let mac = sys::mac(&name).map_err(|err| {
            Error::with(ErrorKind::Unsupported, format!("{name}: XDP lanes need an Ethernet device"), err)
        })?;
        let before = sys::queues(&name).map_err(asking)?;
        let driver = sys::driver(&name).map_err(asking)?;
        checks::check_kind(&name, &driver, attach)?;
        let partial = u8::from(checks::may_be_partial(&driver, attach));
        let cpus = nr_cpus().map_err(|(file, err)| Error::system(format!("reading {file}"), err))?;
        let sources = sources.max(cpus.try_into().unwrap_or(u32::MAX).saturating_mul(SOURCES_PER_CPU_MIN));
        let mut program = EbpfLoader::new()
            .btf(None)
            .override_global("ml_may_be_partial", &partial, true)
            .map_max_entries("ml_wide", sources)
            .map_max_entries("ml_narrow", sources)
            .load(manylane_bpf::XDP)
            .map_err(|err| {
                bpf_error(&name, "cannot create the eBPF maps for XDP (needs CAP_BPF and CAP_NET_ADMIN)", err)
            })?;
        attach::attach_program(&mut program, index, (&name, &driver), attach, timeout)?;
        // virtio_net adds queues for XDP, which receive as any other.
        let now = sys::queues(&name).map_err(asking)?;
        let reserved = now.send.saturating_sub(before.send);
        let queues = checks::usable_queues(now, reserved);
        let mut map = |map: &str| -> Result<Map> {
            let missing = || Error::new(ErrorKind::Unsupported, format!("the eBPF object has no map {map}"));
            program.take_map(map).ok_or_else(missing)
        };
        let wrong = |err| bpf_error(&name, "unexpected type of an eBPF map for XDP", err);
        let about: Array<_, abi::DeviceWords> = Array::try_from(map("ml_device")?).map_err(wrong)?;
        let xsks = XskMap::try_from(map("ml_xsks")?).map_err(wrong)?;
        let ports = HashMap::try_from(map("ml_ports")?).map_err(wrong)?;
        let locals = HashMap::try_from(map("ml_locals")?).map_err(wrong)?;
        let vlans = HashMap::try_from(map("ml_vlans")?).map_err(wrong)?;
        let counts = PerCpuArray::try_from(map("ml_xdp_counts")?).map_err(wrong)?;
        let guards = FilterMaps::new(&name, map, wrong)?;
        let described = abi::Device { mac, longest, ..abi::Device::default() };
        let mut maps = DeviceMaps {
            program: Some(program),
            device: about,
            described,
            xsks,
            ports,
            locals,
            vlans,
            counts,
            sockets: [false; abi::SOCKETS_MAX as usize],
        };
        maps.describe(described).map_err(wrong)?;
        if queues < now.receive {
            log::warn!(
                "engine xdp: {name} has {} receive queues, but only {queues} send queues. The kernel uses the other receive queues ('ethtool -L'; for virtio_net see docs/xdp.md)",
                now.receive
            );
        }
        let device = Self {
            index,
            name,
            queues: AtomicU32::new(queues),
            reserved,
            was_open_before: false,
            is_gone: AtomicBool::new(false),
            mac: AtomicU64::new(mac_to_u64(mac)),
            is_veth: driver == "veth",
            has_tx_checksum: driver != "virtio_net",
            has_stripped_vlans: AtomicBool::new(false),
            had_strict_rp_filter: AtomicBool::new(true),
            is_native: attach == AttachMode::Native,
            maps: Mutex::new(maps),
            filters: Arc::new(Mutex::new(guards)),
            open_queues: Mutex::new(vec![None; abi::QUEUES_MAX as usize]),
        };
        // After an error, the next refresh reads it.
        _ = device.vlan_stripping_warning();
        Ok(device)
    }

    /// The warning that XDP sees no VLAN tags, if it sees none now. Logged when that begins.
    fn vlan_stripping_warning(&self) -> io::Result<Option<String>> {
        let name = sys::name(self.index)?;
        let strips = sys::strips_vlan_tags(&name)?;
        let warning = checks::vlan_stripping_warning(&name, self.is_veth, strips);
        let had_any = self.has_stripped_vlans.swap(warning.is_some(), Ordering::Relaxed);
        warning.iter().filter(|_| !had_any).for_each(|what| log::warn!("engine xdp: {what}"));
        Ok(warning)
    }

    /// Opens a queue, or joins the sockets of this process that have it open. None if that is not
    /// possible: with generic XDP they would race for frames in the kernel (before Linux 6.15).
    pub(crate) fn open_queue(
        &self,
        options: &QueueOptions,
        may_join: bool,
    ) -> std::result::Result<Option<Queue>, OpenError> {
        let mut shares = self.open_queues.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(share) = shares.get_mut(options.queue as usize) else { return Ok(None) };
        if let Some(share) = share.as_ref().filter(|share| share.is_open()) {
            if !may_join {
                return Ok(None);
            }
            match Queue::join(share, options) {
                // Its last socket has just closed it.
                Err(err) if err.step == Step::Join => {}
                joined => return joined.map(Some),
            }
        }
        let queue = Queue::open(options)?;
        *share = Some(queue.downgrade());
        Ok(Some(queue))
    }

    /// True if frames may be longer than `frame` bytes, by the current MTU.
    pub(crate) fn has_jumbo_frames(&self, frame: u32) -> bool {
        /// Ethernet with two tags.
        const ETH_HEADER_MAX: u32 = 22;
        // Generic XDP receives frames in one buffer or not at all.
        self.is_native && sys::mtu(&self.name).is_ok_and(|mtu| mtu + ETH_HEADER_MAX > frame)
    }

    /// Sets the longest frame that its XSKs accept.
    pub(crate) fn set_frame_len_max(&self, longest: u32) {
        let mut maps = self.maps();
        let described = abi::Device { longest, ..maps.described };
        // Fails only without memory; the kernel then gets longer frames.
        _ = maps.describe(described);
    }

    /// Its MAC address at the last refresh.
    pub(crate) fn mac(&self) -> [u8; 6] {
        let [.., a, b, c, d, e, f] = self.mac.load(Ordering::Relaxed).to_be_bytes();
        [a, b, c, d, e, f]
    }

    /// Queues that XSKs can use, at the last refresh.
    pub(crate) fn queues(&self) -> u32 {
        self.queues.load(Ordering::Relaxed)
    }

    /// Checks that it may still be used, given the current local state.
    pub(crate) fn check(&self, locals: &LocalState) -> Result<()> {
        let attach = if self.is_native { AttachMode::Native } else { AttachMode::Generic };
        checks::check_device(self.index, attach, locals)
    }

    /// True if the kernel checks IPv4 sources on it by a strict reverse path filter
    /// ([`checks::read_strict_rp_filter`]). While that cannot be read, the last answer holds; true
    /// before the first one.
    pub(super) fn has_strict_rp_filter(&self, locals: &LocalState) -> bool {
        if let Some(strict) = checks::read_strict_rp_filter(self.index, locals) {
            self.had_strict_rp_filter.store(strict, Ordering::Relaxed);
        }
        self.had_strict_rp_filter.load(Ordering::Relaxed)
    }

    /// Records that it is no longer used.
    pub(crate) fn set_gone(&self) {
        self.is_gone.store(true, Ordering::Relaxed);
    }

    /// Detaches the program: every frame goes to the kernel. Frames in the rings of its queues stay
    /// there.
    pub(crate) fn detach(&self) {
        self.set_gone();
        self.maps().program = None;
    }

    /// True if this process has had the queue open: the kernel may still be releasing it.
    pub(crate) fn has_opened(&self, queue: u32) -> bool {
        let shares = self.open_queues.lock().unwrap_or_else(PoisonError::into_inner);
        self.was_open_before || shares.get(queue as usize).is_some_and(Option::is_some)
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Relaxed)
    }

    /// Reads what changes without an event: the number of its queues, its MAC address, whether VLAN
    /// tags are stripped. False if it is gone.
    pub(crate) fn refresh(&self) -> bool {
        // Other errors, such as a lack of descriptors, are transient.
        if self.try_refresh().is_err_and(|err| err.raw_os_error() == Some(ENXIO)) {
            self.set_gone();
        }
        !self.is_gone()
    }

    fn try_refresh(&self) -> io::Result<()> {
        let name = sys::name(self.index)?;
        self.queues.store(checks::usable_queues(sys::queues(&name)?, self.reserved), Ordering::Relaxed);
        let mac = sys::mac(&name)?;
        // After an error, the next refresh reads it.
        _ = self.vlan_stripping_warning();
        let mut maps = self.maps();
        if maps.described.mac != mac {
            self.mac.store(mac_to_u64(mac), Ordering::Relaxed);
            let described = abi::Device { mac, ..maps.described };
            // Fails only without memory. Until it works, frames go to the kernel.
            _ = maps.describe(described);
        }
        Ok(())
    }

    fn maps(&self) -> MutexGuard<'_, DeviceMaps> {
        // Every critical section leaves valid state, so a poisoned lock can be used.
        self.maps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers one more socket on this device, for untagged frames and those with these tags;
    /// returns its number.
    pub(crate) fn register(&self, vlans: &[Vlan]) -> Result<SocketIndex> {
        if !vlans.is_empty() {
            let asking = |err| Error::system(format!("{}: reading its VLAN offload", self.name), err);
            if let Some(what) = self.vlan_stripping_warning().map_err(asking)? {
                return Err(Error::new(ErrorKind::Config, format!("xdp_vlan: {what}")));
            }
        }
        let mut maps = self.maps();
        let free = maps.sockets.iter().position(|used| !used).ok_or_else(|| {
            let message = format!("{}: at most {} sockets can share a device", self.name, abi::SOCKETS_MAX);
            Error::new(ErrorKind::Limit, message)
        })?;
        for vlan in vlans {
            let sockets = maps.vlans.get(&vlan.key(), 0).unwrap_or(0) | 1 << free;
            if let Err(err) = maps.vlans.insert(vlan.key(), sockets, 0) {
                // The next socket with this number must not inherit the tags.
                maps.remove_vlans(free as SocketIndex);
                return Err(bpf_error(&self.name, "cannot write a VLAN to the eBPF map", err));
            }
        }
        maps.sockets[free] = true;
        Ok(free as SocketIndex)
    }

    /// Removes all addresses that lead to a socket.
    pub(crate) fn unbind(&self, socket: SocketIndex) {
        let mut maps = self.maps();
        let stale: Vec<abi::PortKey> = maps
            .ports
            .iter()
            .filter_map(|entry| entry.ok().filter(|(_, to)| *to == socket).map(|(key, _)| key))
            .collect();
        for key in stale {
            // It exists: nothing else removes it.
            let _ = maps.ports.remove(&key);
        }
        // If it fails, segments are looked up in vain.
        let _ = maps.update_takes_tcp();
    }

    /// Unregisters a socket: frees its number, and removes everything that leads to it.
    pub(crate) fn unregister(&self, socket: SocketIndex) {
        self.unbind(socket);
        let mut maps = self.maps();
        maps.remove_vlans(socket);
        if let Some(used) = maps.sockets.get_mut(socket as usize) {
            *used = false;
        }
    }

    /// Redirects frames of `queue` to `xsk`, as soon as their port is bound to `socket`.
    pub(crate) fn redirect(&self, socket: SocketIndex, queue: u32, xsk: BorrowedFd<'_>) -> Result<()> {
        let set = self.maps().xsks.set(socket * abi::QUEUES_MAX + queue, xsk.as_raw_fd(), 0);
        set.map_err(|err| bpf_error(&self.name, "cannot write an XSK to the eBPF map", err))
    }

    /// Stops redirecting frames of `queue`; they go to the kernel.
    pub(crate) fn clear_redirect(&self, socket: SocketIndex, queue: u32) {
        // Fails only if there is no redirection, which is the desired state.
        let _ = self.maps().xsks.unset(socket * abi::QUEUES_MAX + queue);
    }

    /// Makes exactly `ports` lead to `socket`, and excludes packets with a source in `blocked`.
    /// After an error some addresses are missing. No stale one is left, because the steps that can
    /// fail are last.
    pub(super) fn bind(
        &self,
        socket: SocketIndex,
        ports: &HashSet<abi::PortKey>,
        blocked: &BlockedSources,
    ) -> Result<()> {
        let mut maps = self.maps();
        let wrong = |err| bpf_error(&self.name, "cannot write a socket's addresses to the eBPF map", err);
        let keys = |ips: &[IpAddr]| ips.iter().map(|&ip| addr_key(ip)).collect::<HashSet<abi::AddrKey>>();
        let (locals, down) = (keys(&blocked.addresses), keys(&blocked.down_addresses));
        let led: Vec<(abi::PortKey, SocketIndex)> =
            maps.ports.iter().filter_map(std::result::Result::ok).collect();
        if let Some((key, _)) = led.iter().find(|(key, to)| *to != socket && ports.contains(key)) {
            let port = u16::from_be_bytes([key[16], key[17]]);
            let message = format!("{}: another socket of this process has port {port}", self.name);
            return Err(Error::new(ErrorKind::InUse, message));
        }
        for (key, _) in led.iter().filter(|(key, to)| *to == socket && !ports.contains(key)) {
            // It exists: nothing else removes it.
            let _ = maps.ports.remove(key);
        }
        let there: HashSet<abi::AddrKey> = maps.locals.keys().filter_map(std::result::Result::ok).collect();
        // Has what is added first, and what is removed until the end.
        maps.set_local_filter(there.iter().chain(&locals).chain(&down)).map_err(wrong)?;
        for key in there.iter().filter(|key| !locals.contains(*key) && !down.contains(*key)) {
            // As above.
            let _ = maps.locals.remove(key);
        }
        let mut down_there = there.iter().filter(|key| down.contains(*key) && !locals.contains(*key));
        for key in locals.difference(&there) {
            while let Err(err) = maps.locals.insert(key, 0, 0) {
                // Makes room: addresses of devices that are down come last.
                let _ = maps.locals.remove(down_there.next().ok_or_else(|| wrong(err))?);
            }
        }
        for key in ports {
            maps.ports.insert(key, socket, 0).map_err(wrong)?;
        }
        // Stops where there is no more room.
        let mut more = down.iter().filter(|key| !locals.contains(*key) && !there.contains(*key));
        let _ = more.try_for_each(|key| maps.locals.insert(key, 0, 0));
        maps.set_local_filter(locals.iter().chain(&down)).map_err(wrong)?;
        maps.update_takes_tcp().map_err(wrong)
    }

    /// Number of addresses that lead to a socket.
    #[cfg(test)]
    pub(crate) fn bound_count(&self, socket: SocketIndex) -> usize {
        self.maps().ports.iter().filter(|entry| entry.as_ref().unwrap().1 == socket).count()
    }

    /// Number of VLANs that lead to a socket.
    #[cfg(test)]
    pub(crate) fn vlan_count(&self, socket: SocketIndex) -> usize {
        self.maps().vlans.iter().filter(|entry| entry.as_ref().unwrap().1 & 1 << socket != 0).count()
    }

    /// Counts of the program, in the order of [`abi::XDP_COUNTS`].
    pub(crate) fn counts(&self) -> [u64; abi::XDP_COUNTS.len()] {
        let maps = self.maps();
        std::array::from_fn(|index| {
            // Every index exists in a map of this size, so a read fails only without memory.
            maps.counts.get(&(index as u32), 0).map_or(0, |cpus| cpus.iter().sum())
        })
    }
}

fn mac_to_u64([a, b, c, d, e, f]: [u8; 6]) -> u64 {
    u64::from_be_bytes([0, 0, a, b, c, d, e, f])
}
