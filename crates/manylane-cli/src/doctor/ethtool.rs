//! Settings of devices by ethtool netlink (Linux 5.6), and the XDP features of drivers (Linux
//! 6.3).

use std::collections::BTreeSet;
use std::io;

use manylane_sys::device::{self, FlowType};
use manylane_sys::netlink::{AttrReader, Attrs, NLM_F_DUMP};

use super::facts::{Channels, Coalescing, Device, Ring};
use super::netlink::Family;

const FEATURES_GET: u8 = 11;
const FEATURES_SET: u8 = 12;
const RINGS_GET: u8 = 15;
const RINGS_SET: u8 = 16;
const CHANNELS_GET: u8 = 17;
const CHANNELS_SET: u8 = 18;
const COALESCE_GET: u8 = 19;
/// The header, in every message.
const HEADER: u16 = 1;

/// Queries devices of the network namespace of the thread that opened it.
#[derive(Debug)]
pub(crate) struct Ethtool(Family);

impl Ethtool {
    pub(crate) fn open() -> io::Result<Self> {
        Family::open("ethtool").map(Self)
    }

    fn get<T>(
        &mut self,
        command: u8,
        device: &str,
        parse: impl Fn(AttrReader<'_>) -> Option<T>,
    ) -> io::Result<T> {
        let mut found = None;
        self.0.request(command, &device_header(device), 0, |attrs| found = parse(attrs))?;
        found.ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    fn set(&mut self, command: u8, attrs: &Attrs) -> io::Result<()> {
        self.0.request(command, attrs, 0, |_| {})
    }

    pub(crate) fn channels(&mut self, device: &str) -> io::Result<Channels> {
        self.get(CHANNELS_GET, device, |attrs| {
            let number = |kind| attrs.u32(kind).unwrap_or(0);
            Some(Channels { rx_max: number(2), combined_max: number(5), rx: number(6), combined: number(9) })
        })
    }

    pub(crate) fn set_combined(&mut self, device: &str, count: u32) -> io::Result<()> {
        self.set(CHANNELS_SET, &device_header(device).u32(9, count))
    }

    pub(crate) fn set_receive_queues(&mut self, device: &str, count: u32) -> io::Result<()> {
        self.set(CHANNELS_SET, &device_header(device).u32(6, count))
    }

    pub(crate) fn ring(&mut self, device: &str) -> io::Result<Ring> {
        self.get(RINGS_GET, device, |attrs| Some(Ring { rx_max: attrs.u32(2)?, rx: attrs.u32(6)? }))
    }

    pub(crate) fn set_ring(&mut self, device: &str, rx: u32) -> io::Result<()> {
        self.set(RINGS_SET, &device_header(device).u32(6, rx))
    }

    pub(crate) fn coalescing(&mut self, device: &str) -> io::Result<Coalescing> {
        self.get(COALESCE_GET, device, |attrs| {
            Some(Coalescing {
                rx_usecs: attrs.u32(2),
                rx_frames: attrs.u32(3),
                adaptive: attrs.u8(11).map(|on| on != 0),
            })
        })
    }

    /// True if a feature, such as `rx-gro`, is on.
    pub(crate) fn feature(&mut self, device: &str, name: &str) -> io::Result<bool> {
        const ACTIVE: u16 = 4;
        const BITS: u16 = 3;
        const BIT_NAME: u16 = 2;
        self.get(FEATURES_GET, device, |attrs| {
            let bits = attrs.nest(ACTIVE)?.nest(BITS)?;
            // The list of active features has only those that are on.
            Some(bits.all().any(|(_, bit)| AttrReader::new(bit).text(BIT_NAME).as_deref() == Some(name)))
        })
    }

    pub(crate) fn set_feature(&mut self, device: &str, name: &str, on: bool) -> io::Result<()> {
        const WANTED: u16 = 3;
        let bit = Attrs::default().text(2, name);
        let bit = if on { bit.bytes(3, &[]) } else { bit };
        let bits = Attrs::default().nest(1, &bit);
        self.set(FEATURES_SET, &device_header(device).nest(WANTED, &Attrs::default().nest(3, &bits)))
    }

    /// Queries all settings of a device that the doctor judges.
    pub(crate) fn fill(&mut self, device: &mut Device) {
        let name = device.name.clone();
        device.driver = device::driver(&name).ok().filter(|driver| !driver.is_empty());
        device.channels = self.channels(&name).ok();
        device.ring = self.ring(&name).ok();
        device.coalescing = self.coalescing(&name).ok();
        device.gro = self.feature(&name, "rx-gro").ok();
        device.hash_udp4 = device::flow_hash(&name, FlowType::Udp4).ok();
        device.hash_udp6 = device::flow_hash(&name, FlowType::Udp6).ok();
        // An empty table maps nothing.
        device.rss_queues =
            device::indirection_table(&name).ok().filter(|table| !table.is_empty()).map(BTreeSet::from_iter);
        if let Some(channels) = device.channels {
            device.rx_queues = Some((channels.rx + channels.combined).max(1));
        }
    }
}

fn device_header(device: &str) -> Attrs {
    const DEV_NAME: u16 = 2;
    Attrs::default().nest(HEADER, &Attrs::default().text(DEV_NAME, device))
}

/// The driver runs XDP programs.
pub(crate) const XDP_BASIC: u64 = 1;
/// Programs may redirect.
pub(crate) const XDP_REDIRECT: u64 = 2;
/// AF_XDP zero-copy.
pub(crate) const XDP_ZERO_COPY: u64 = 8;

/// XDP features of each device's driver, by index.
pub(crate) fn xdp_features() -> io::Result<Vec<(u32, u64)>> {
    const DEV_GET: u8 = 1;
    let mut found = Vec::new();
    Family::open("netdev")?.request(DEV_GET, &Attrs::default(), NLM_F_DUMP, |attrs| {
        found.extend(attrs.u32(1).zip(attrs.u64(3)));
    })?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_device_has_features() {
        let mut ethtool = Ethtool::open().unwrap();
        assert!(ethtool.feature("lo", "rx-gro").is_ok());
        assert!(!ethtool.feature("lo", "no-such-feature").unwrap());
        assert!(ethtool.ring("lo").is_err() && ethtool.channels("no-such-device").is_err());
    }
}
