//! Settings that can be read, set and restored. Findings advise them, and `manylane tune` applies
//! them.

use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use manylane_sys::device::{self, FlowType};
use manylane_sys::netns;
use serde::{Deserialize, Serialize};

use super::ethtool::Ethtool;

/// The setting.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub(crate) enum Target {
    /// A sysctl, such as `net.core.rmem_max`.
    Sysctl { name: String },
    /// A file of a device below `/sys/class/net/DEVICE`.
    DeviceFile { device: String, file: String },
    /// A file of a CPU below `/sys/devices/system/cpu/cpuN`.
    CpuFile { cpu: usize, file: String },
    /// A parameter of a module, which may be built in: a file below
    /// `/sys/module/MODULE/parameters`.
    ModuleParameter { module: String, name: String },
    /// Affinity of an interrupt.
    Interrupt { number: u32 },
    /// Combined queues.
    CombinedQueues { device: String },
    /// Receive queues, of a driver that counts them separately.
    ReceiveQueues { device: String },
    /// Descriptors of each receive ring.
    ReceiveRing { device: String },
    /// A feature of a device, such as `rx-gro`.
    Feature { device: String, name: String },
    /// Fields of the receive hash of UDP over IPv4, bits of `RXH_*`.
    Hash4 { device: String },
    /// The same for IPv6.
    Hash6 { device: String },
}

/// The new value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Change {
    pub(crate) target: Target,
    pub(crate) value: String,
}

impl Change {
    pub(crate) fn new(target: Target, value: impl std::fmt::Display) -> Self {
        Self { target, value: format!("{value}") }
    }

    pub(crate) fn sysctl(name: &str, value: u64) -> Self {
        Self::new(Target::Sysctl { name: name.into() }, value)
    }

    /// The command that makes the change without Manylane.
    pub(crate) fn command(&self) -> String {
        let value = &self.value;
        match &self.target {
            Target::Sysctl { name } => format!("sysctl -w {name}={value}"),
            Target::CombinedQueues { device } => format!("ethtool -L {device} combined {value}"),
            Target::ReceiveQueues { device } => format!("ethtool -L {device} rx {value}"),
            Target::ReceiveRing { device } => format!("ethtool -G {device} rx {value}"),
            Target::Feature { device, name } => {
                let name = if name == "rx-gro" { "gro" } else { name };
                format!("ethtool -K {device} {name} {value}")
            }
            Target::Hash4 { device } => {
                format!("ethtool -N {device} rx-flow-hash udp4 {}", hash_letters(value))
            }
            Target::Hash6 { device } => {
                format!("ethtool -N {device} rx-flow-hash udp6 {}", hash_letters(value))
            }
            _ => {
                let path = self.target.path().unwrap_or_default();
                format!("echo {value} > {}", path.display())
            }
        }
    }
}

impl Target {
    /// True if it applies to the whole machine, not to a network namespace.
    pub(crate) fn is_machine_wide(&self) -> bool {
        match self {
            Self::Sysctl { name } => !name.starts_with("net."),
            Self::CpuFile { .. } | Self::ModuleParameter { .. } | Self::Interrupt { .. } => true,
            _ => false,
        }
    }

    /// A name from a journal must not lead to another file. Also, `/sys` may show devices of
    /// another network namespace under the same names.
    fn check(&self) -> Result<()> {
        let is_name = |name: &str| is_below(name) && !name.contains('/');
        let is_right = match self {
            // Dots become slashes.
            Self::Sysctl { name } => !name.contains('/'),
            Self::DeviceFile { device, file } => is_name(device) && is_below(file),
            Self::CpuFile { file, .. } => is_below(file),
            Self::ModuleParameter { module, name } => is_name(module) && is_name(name),
            _ => true,
        };
        ensure!(is_right, "invalid name of a setting");
        if let Self::DeviceFile { device, .. } = self {
            let index = netns::device_index(device)?;
            let shown = fs::read_to_string(format!("/sys/class/net/{device}/ifindex")).unwrap_or_default();
            ensure!(
                shown.trim() == index.to_string(),
                "/sys shows the devices of another network namespace than that of this process: mount /sys again"
            );
        }
        Ok(())
    }

    fn path(&self) -> Option<PathBuf> {
        Some(match self {
            Self::Sysctl { name } => format!("/proc/sys/{}", name.replace('.', "/")).into(),
            Self::DeviceFile { device, file } => format!("/sys/class/net/{device}/{file}").into(),
            Self::CpuFile { cpu, file } => format!("/sys/devices/system/cpu/cpu{cpu}/{file}").into(),
            Self::ModuleParameter { module, name } => {
                format!("/sys/module/{module}/parameters/{name}").into()
            }
            Self::Interrupt { number } => format!("/proc/irq/{number}/smp_affinity_list").into(),
            _ => return None,
        })
    }

    /// The device that the setting belongs to.
    pub(crate) fn device(&self) -> Option<&str> {
        match self {
            Self::DeviceFile { device, .. }
            | Self::CombinedQueues { device }
            | Self::ReceiveQueues { device }
            | Self::ReceiveRing { device }
            | Self::Feature { device, .. }
            | Self::Hash4 { device }
            | Self::Hash6 { device } => Some(device),
            _ => None,
        }
    }

    /// True if drivers take the link down and up for it.
    pub(crate) fn resets_link(&self) -> bool {
        match self {
            Self::CombinedQueues { .. } | Self::ReceiveQueues { .. } | Self::ReceiveRing { .. } => true,
            // The kernel's own stack does this without the driver.
            Self::Feature { name, .. } => name != "rx-gro",
            _ => false,
        }
    }

    /// The current value, in the form in which it can be written back.
    pub(crate) fn read(&self) -> Result<String> {
        let of = || format!("cannot read {self}");
        self.check().with_context(of)?;
        if let Some(path) = self.path() {
            return Ok(fs::read_to_string(path).with_context(of)?.trim().to_owned());
        }
        Ok(match self {
            Self::CombinedQueues { device } => {
                Ethtool::open()?.channels(device).with_context(of)?.combined.to_string()
            }
            Self::ReceiveQueues { device } => {
                Ethtool::open()?.channels(device).with_context(of)?.rx.to_string()
            }
            Self::ReceiveRing { device } => Ethtool::open()?.ring(device).with_context(of)?.rx.to_string(),
            Self::Feature { device, name } => {
                let is_on = Ethtool::open()?.feature(device, name).with_context(of)?;
                String::from(if is_on { "on" } else { "off" })
            }
            Self::Hash4 { device } => device::flow_hash(device, FlowType::Udp4).with_context(of)?.to_string(),
            Self::Hash6 { device } => device::flow_hash(device, FlowType::Udp6).with_context(of)?.to_string(),
            _ => bail!("{self} has no file"),
        })
    }

    /// Writes the value.
    pub(crate) fn write(&self, value: &str) -> Result<()> {
        let done = self.try_write(value);
        done.with_context(|| format!("cannot set {self} to {value}"))
    }

    fn try_write(&self, value: &str) -> Result<()> {
        self.check()?;
        if let Some(path) = self.path() {
            // The file is not created, and is written in one call, because the kernel takes each
            // write as a value.
            let mut file = fs::OpenOptions::new().write(true).open(path)?;
            return Ok(io::Write::write_all(&mut file, value.as_bytes())?);
        }
        let number =
            || value.parse::<u32>().with_context(|| format!("invalid value {value}: expected a number"));
        match self {
            Self::CombinedQueues { device } => Ethtool::open()?.set_combined(device, number()?)?,
            Self::ReceiveQueues { device } => Ethtool::open()?.set_receive_queues(device, number()?)?,
            Self::ReceiveRing { device } => Ethtool::open()?.set_ring(device, number()?)?,
            Self::Feature { device, name } => {
                ensure!(
                    ["on", "off"].contains(&value),
                    "invalid value {value} of a feature: expected on or off"
                );
                Ethtool::open()?.set_feature(device, name, value == "on")?;
            }
            Self::Hash4 { device } => device::set_flow_hash(device, FlowType::Udp4, value.parse()?)?,
            Self::Hash6 { device } => device::set_flow_hash(device, FlowType::Udp6, value.parse()?)?,
            _ => bail!("{self} has no file"),
        }
        Ok(())
    }

    /// True if two values mean the same. Masks and lists of CPUs have several text forms.
    pub(crate) fn is_same(&self, one: &str, other: &str) -> bool {
        use super::collect::files::parse_cpu_mask;
        use manylane_sys::cpu::parse_list;
        match self {
            Self::DeviceFile { file, .. } if file.ends_with("_cpus") => {
                parse_cpu_mask(one) == parse_cpu_mask(other)
            }
            Self::Interrupt { .. } => parse_list(one) == parse_list(other),
            _ => one.split_whitespace().eq(other.split_whitespace()),
        }
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Sysctl { name } => f.write_str(name),
            Self::DeviceFile { device, file } => write!(f, "{file} of {device}"),
            Self::CpuFile { cpu, file } => write!(f, "{file} of CPU {cpu}"),
            Self::ModuleParameter { module, name } => write!(f, "{name} of the module {module}"),
            Self::Interrupt { number } => write!(f, "the CPUs of interrupt {number}"),
            Self::CombinedQueues { device } => write!(f, "the queues of {device}"),
            Self::ReceiveQueues { device } => write!(f, "the receive queues of {device}"),
            Self::ReceiveRing { device } => write!(f, "the receive rings of {device}"),
            Self::Feature { device, name } => write!(f, "{name} of {device}"),
            Self::Hash4 { device } => write!(f, "the receive hash of {device} for UDP over IPv4"),
            Self::Hash6 { device } => write!(f, "the receive hash of {device} for UDP over IPv6"),
        }
    }
}

/// True if the path stays below the folder that it starts from.
fn is_below(path: &str) -> bool {
    !path.is_empty() && Path::new(path).components().all(|part| matches!(part, Component::Normal(_)))
}

/// Fields of a hash in the form of `ethtool -N`.
fn hash_letters(fields: &str) -> String {
    let fields: u64 = fields.parse().unwrap_or(0);
    let all = [(2, 'v'), (3, 't'), (4, 's'), (5, 'd'), (6, 'f'), (7, 'n')];
    all.iter().filter(|(bit, _)| fields >> bit & 1 == 1).map(|(_, letter)| letter).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_commands_match_standard_tools() {
        let device = || "eth0".to_owned();
        for (target, value, command) in [
            (Target::Sysctl { name: "net.core.rmem_max".into() }, "5", "sysctl -w net.core.rmem_max=5"),
            (Target::CombinedQueues { device: device() }, "4", "ethtool -L eth0 combined 4"),
            (Target::Hash4 { device: device() }, "240", "ethtool -N eth0 rx-flow-hash udp4 sdfn"),
            (Target::Feature { device: device(), name: "rx-gro".into() }, "on", "ethtool -K eth0 gro on"),
            (
                Target::ModuleParameter { module: "haltpoll".into(), name: "guest_halt_poll_ns".into() },
                "200000",
                "echo 200000 > /sys/module/haltpoll/parameters/guest_halt_poll_ns",
            ),
            (Target::Interrupt { number: 7 }, "0-1", "echo 0-1 > /proc/irq/7/smp_affinity_list"),
            (
                Target::DeviceFile { device: device(), file: "queues/rx-0/rps_cpus".into() },
                "3",
                "echo 3 > /sys/class/net/eth0/queues/rx-0/rps_cpus",
            ),
        ] {
            assert_eq!(Change::new(target, value).command(), command);
        }
    }

    #[test]
    fn cpu_masks_compare_independent_of_format() {
        let mask = Target::DeviceFile { device: "x".into(), file: "queues/rx-0/rps_cpus".into() };
        assert!(mask.is_same("00000000,00000003", "3") && !mask.is_same("1", "3"));
        assert!(Target::Interrupt { number: 1 }.is_same("0-1", "0,1"));
        let sysctl = Target::Sysctl { name: "net.ipv4.udp_mem".into() };
        assert!(sysctl.is_same("1\t2\t3", "1 2 3") && !sysctl.is_same("1", "10"));
    }

    #[test]
    fn names_cannot_escape_the_directory() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "before").unwrap();
        let up = format!("../../../../../..{}", file.display());
        for target in [
            Target::DeviceFile { device: "lo".into(), file: up.clone() },
            Target::DeviceFile { device: "lo".into(), file: file.display().to_string() },
            Target::CpuFile { cpu: 0, file: up.clone() },
            Target::ModuleParameter { module: "..".into(), name: up.clone() },
            Target::ModuleParameter { module: "kernel".into(), name: up },
        ] {
            let (read, written) = (target.read(), target.write("after"));
            assert!(read.is_err() && written.is_err(), "{target:?} is {read:?}");
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "before");
        for (path, below) in
            [("a", true), ("queues/rx-0/rps_cpus", true), ("", false), ("a/../b", false), ("/a", false)]
        {
            assert_eq!(is_below(path), below, "{path}");
        }
    }

    #[test]
    fn missing_programs_are_named_in_the_error() {
        let sysctl = Target::Sysctl { name: "net.no.such".into() };
        assert!(format!("{:#}", sysctl.read().unwrap_err()).contains("net.no.such"));
        assert!(format!("{:#}", sysctl.write("1").unwrap_err()).contains("net.no.such"));
        let queues = Target::CombinedQueues { device: "nosuchdevice".into() };
        assert!(queues.read().is_err() && queues.write("x").is_err());
    }
}
