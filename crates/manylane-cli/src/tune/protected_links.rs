//! Links that must stay up, because the default route or an ssh session needs them: no change may
//! take them down, and no XDP program is attached to them unless the device is named.

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;

use anyhow::{Context, Result};

use crate::doctor::change::Target;
use crate::doctor::collect::with_lower_devices;
use crate::doctor::facts::Device;
use crate::doctor::link;
use manylane_sys::udp_table::parse_addr;

/// Devices that stay up, each with the reason.
#[derive(Debug, Default)]
pub(crate) struct ProtectedLinks {
    devices: BTreeMap<String, String>,
}

impl ProtectedLinks {
    /// Reads routes, addresses and sessions.
    pub(crate) fn detect() -> Result<Self> {
        let context = "cannot find out which links must stay up";
        let devices = link::devices().context(context)?;
        let mut guard = Self::default();
        guard.protect(&link::default_routes().context(context)?, &devices, "the default route uses it");
        let addresses = link::addresses().context(context)?;
        for (local, peer) in ssh_sessions() {
            let mut indices: Vec<u32> =
                addresses.iter().filter(|(address, _)| *address == local).map(|(_, index)| *index).collect();
            indices.extend(link::route_to(peer).ok().flatten());
            guard.protect(&indices, &devices, &format!("an ssh session from {peer} uses it"));
        }
        Ok(guard)
    }

    fn protect(&mut self, indices: &[u32], devices: &[Device], why: &str) {
        for index in with_lower_devices(indices, devices) {
            let found = devices.iter().find(|device| device.index == index && !device.loopback);
            if let Some(device) = found {
                self.devices.entry(device.name.clone()).or_insert_with(|| why.into());
            }
        }
    }

    /// The reason why a setting must not be changed, if any.
    pub(super) fn refusal(&self, target: &Target) -> Option<String> {
        let why = self.reason(target.device().filter(|_| target.resets_link())?)?;
        Some(format!("this takes the link down for a moment, and {why}; to do it anyway: --allow-link-reset"))
    }

    /// The reason why a device has to stay up, if any.
    pub(crate) fn reason(&self, device: &str) -> Option<&str> {
        self.devices.get(device).map(String::as_str)
    }
}

/// Local address and peer of each ssh session: that of this process (even if sudo has removed its
/// variable), and all others.
fn ssh_sessions() -> Vec<(IpAddr, IpAddr)> {
    let mut found = Vec::new();
    let mut pid = std::process::id();
    // Up to the first process.
    for _ in 0..64 {
        let environ = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let of_ssh = environ.split(|&byte| byte == 0).find_map(|pair| pair.strip_prefix(b"SSH_CONNECTION="));
        found.extend(of_ssh.and_then(|value| parse_ssh_connection(&String::from_utf8_lossy(value))));
        let stat = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let parent = stat.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok());
        match parent {
            Some(parent) if parent > 0 => pid = parent,
            _ => break,
        }
    }
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let text = fs::read_to_string(table).unwrap_or_default();
        found.extend(text.lines().filter_map(parse_ssh_session));
    }
    found
}

/// `SSH_CONNECTION`: client, its port, server, its port.
fn parse_ssh_connection(value: &str) -> Option<(IpAddr, IpAddr)> {
    let mut words = value.split_whitespace();
    let peer = words.next()?.parse().ok()?;
    let local = words.nth(1)?.parse().ok()?;
    Some((local, peer))
}

/// A line of `/proc/net/tcp` that is a session with the port of ssh here.
fn parse_ssh_session(line: &str) -> Option<(IpAddr, IpAddr)> {
    const ESTABLISHED: &str = "01";
    const SSH_PORT: u16 = 22;
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let (local, peer) = (parse_addr(fields.get(1)?)?, parse_addr(fields.get(2)?)?);
    let is_ssh = *fields.get(3)? == ESTABLISHED && local.port() == SSH_PORT;
    is_ssh.then(|| (local.ip().to_canonical(), peer.ip().to_canonical()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_are_found_in_connection_tables() {
        let (local, peer) = parse_ssh_connection("192.0.2.9 55555 192.0.2.1 22").unwrap();
        assert_eq!((local.to_string(), peer.to_string()), ("192.0.2.1".into(), "192.0.2.9".into()));
        assert!(parse_ssh_connection("").is_none() && parse_ssh_connection("x 1 y 2").is_none());
        let line =
            |port: &str, state: &str| format!("0: 0100007F:{port} 0200007F:D903 {state} 0:0 0:0 0 0 0 1");
        assert!(parse_ssh_session(&line("0016", "01")).is_some());
        assert!(
            parse_ssh_session(&line("0016", "0A")).is_none()
                && parse_ssh_session(&line("0050", "01")).is_none()
        );
        let mapped = "0: 0000000000000000FFFF00000100007F:0016 0000000000000000FFFF00000200007F:1 01 0:0";
        assert!(parse_ssh_session(mapped).unwrap().0.is_ipv4());
    }

    #[test]
    fn lower_devices_of_a_needed_device_are_needed() {
        let device = |name: &str, index, below: &[u32]| Device {
            name: name.into(),
            index,
            below: below.to_vec(),
            ..Device::default()
        };
        let devices = [
            device("bond0", 5, &[2, 3]),
            device("eth0", 2, &[]),
            device("eth1", 3, &[]),
            device("eth2", 4, &[]),
        ];
        let mut guard = ProtectedLinks::default();
        guard.protect(&[5], &devices, "the default route uses it");
        assert!(["bond0", "eth0", "eth1"].iter().all(|name| guard.reason(name).is_some()));
        assert!(guard.reason("eth2").is_none());
    }
}
