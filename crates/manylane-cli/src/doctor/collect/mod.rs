//! Gathers the [`Facts`] about this machine: from `/proc` and `/sys`, by netlink, and by probing.
//!
//! | module | collects |
//! |---|---|
//! | [`files`] | (reads files below a root, which in tests is a folder) |
//! | [`counters`] | losses in the kernel |
//! | [`system`] | settings, CPUs, privileges |
//! | [`devices`] | facts about devices from files; netlink is read before |
//! | [`sockets`] | UDP sockets, the processes that have them and the threads that wait on them |
//! | [`lanes`] | lanes of running programs, and their wait policies |

pub(crate) mod counters;
pub(crate) mod devices;
pub(crate) mod files;
#[cfg(test)]
#[path = "tests.rs"]
mod from_folders;
mod lanes;
mod sockets;
pub(crate) mod system;

use super::ethtool::{self, Ethtool};
use super::facts::{Device, Facts, Feature};
use super::link;
use files::FileTree;

pub(crate) use sockets::Scope;

/// All facts about this machine and the network namespace of this process.
pub(crate) fn collect_all(asked: Scope) -> Facts {
    let files = FileTree::live();
    let mut facts = Facts { features: features(), ..Facts::default() };
    let links = links(&mut facts);
    collect_files(&files, links, &mut facts);
    sockets::collect(&files, asked, &mut facts);
    lanes::collect(&files, &mut facts);
    collect_buffers(&mut facts);
    facts
}

/// The facts from files, for known devices.
pub(crate) fn collect_files(files: &FileTree, links: Vec<Device>, facts: &mut Facts) {
    system::collect(files, facts);
    counters::collect(files, facts);
    facts.devices = links;
    devices::collect(files, facts);
}

/// The devices, by netlink.
fn links(facts: &mut Facts) -> Vec<Device> {
    let mut devices = match link::devices() {
        Ok(devices) => devices,
        Err(err) => {
            facts.note_gap("devices", format!("the kernel does not list devices: {err}"));
            return Vec::new();
        }
    };
    match Ethtool::open() {
        Ok(mut ethtool) => devices.iter_mut().for_each(|device| ethtool.fill(device)),
        Err(err) => facts.note_gap(
            "ethtool",
            format!("this kernel has no ethtool netlink interface (needs Linux 5.6 and CONFIG_ETHTOOL_NETLINK): {err}"),
        ),
    }
    match ethtool::xdp_features() {
        Ok(found) => {
            for device in &mut devices {
                let of = found.iter().find(|(index, _)| *index == device.index);
                device.xdp_features = of.map(|(_, features)| *features);
            }
        }
        Err(err) => facts.note_gap(
            "xdp-features",
            format!("this kernel does not report XDP features of drivers (needs Linux 6.3): {err}"),
        ),
    }
    match link::default_routes() {
        Ok(routes) => {
            for index in with_lower_devices(&routes, &devices) {
                devices
                    .iter_mut()
                    .filter(|device| device.index == index)
                    .for_each(|d| d.default_route = true);
            }
        }
        Err(err) => facts.note_gap("routes", format!("the kernel does not list routes: {err}")),
    }
    devices
}

/// These devices, and all of their lower devices.
pub(crate) fn with_lower_devices(indices: &[u32], devices: &[Device]) -> Vec<u32> {
    let mut all = indices.to_vec();
    let mut at = 0;
    while let Some(&index) = all.get(at) {
        at += 1;
        for below in devices.iter().filter(|device| device.index == index).flat_map(|device| &device.below) {
            if !all.contains(below) {
                all.push(*below);
            }
        }
    }
    all
}

fn collect_buffers(facts: &mut Facts) {
    match link::receive_buffers() {
        Ok(found) => {
            for socket in &mut facts.sockets {
                socket.buffer = found.get(&socket.inode).copied();
            }
        }
        Err(err) => facts.note_gap(
            "buffers",
            format!(
                "this kernel does not report the sizes of socket buffers (needs CONFIG_INET_UDP_DIAG): {err}"
            ),
        ),
    }
}

/// The results of the library's probe.
fn features() -> Vec<Feature> {
    let probe = manylane::probe();
    let feature = |name: &str, tried: &Result<(), manylane::Error>| Feature {
        name: name.into(),
        missing: tried.as_ref().err().map(error_chain),
    };
    vec![
        feature("ebpf-steering", &probe.ebpf),
        feature("classic-bpf-steering", &probe.classic_bpf),
        feature("udp-gro", &probe.gro),
        feature("udp-gso", &probe.gso),
        feature("io-uring", &probe.uring),
        feature("ipv6", &probe.ipv6),
        feature("grace-period", &probe.grace_period),
        feature("socket-drops", &probe.socket_drops),
    ]
}

/// An error with its causes.
fn error_chain(err: &manylane::Error) -> String {
    anyhow::Chain::new(err).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lower_device_losses_are_included() {
        let device = |index, below: &[u32]| Device { index, below: below.to_vec(), ..Device::default() };
        // A VLAN on a bond of two; a bridge that names itself.
        let devices = [device(1, &[2]), device(2, &[3, 4]), device(3, &[]), device(4, &[]), device(5, &[5])];
        assert_eq!(with_lower_devices(&[1], &devices), [1, 2, 3, 4]);
        assert_eq!(with_lower_devices(&[3, 5], &devices), [3, 5]);
        assert!(with_lower_devices(&[], &devices).is_empty());
    }

    #[test]
    fn everything_is_collected_here() {
        let facts = collect_all(Scope::default());
        assert!(facts.features.len() >= 8 && facts.devices.iter().any(|device| device.name == "lo"));
        assert!(!facts.cpu.online.is_empty() && !facts.losses.softnet.is_empty());
        assert!(facts.losses.udp4.is_some() && !facts.sysctls.is_empty());
        assert!(serde_json::to_string(&facts).is_ok());
    }
}
