//! CPU layout: the CPUs of the server, the generator and the device's work.
//!
//! A virtual device has no interrupt: packets are received in a softirq on the sending CPU.
//! Receive packet steering (RPS) passes them on to a chosen CPU, by an interrupt to that
//! one. A kernel thread (threaded NAPI) can do the device's work instead of softirqs.

use anyhow::{Context, Result, ensure};
use manylane_measure::named_enum;
use manylane_testbed::Host;

use crate::Setup;

/// The link of the requests.
const LINK: usize = 0;

named_enum! {
    /// A layout by name.
    pub enum CpuLayout {
        /// Server and generator have a CPU each. The device's work is done on the
        /// generator's.
        SeparateCpus = "apart",
        /// Server and generator share a CPU.
        SharedCpu = "together",
        /// As apart, and packets from the server's device are passed on to the server's CPU
        /// (RPS).
        RpsServer = "rps-server",
        /// As apart, and a kernel thread on the server's CPU does the work of its device.
        NapiServer = "napi-server",
        /// The same on the generator's CPU.
        NapiGenerator = "napi-generator",
    }
}

impl CpuLayout {
    /// True if it needs a device.
    #[must_use]
    pub const fn needs_device(self) -> bool {
        matches!(self, Self::RpsServer | Self::NapiServer | Self::NapiGenerator)
    }

    /// The CPUs of server and generator.
    #[must_use]
    pub fn cpus(self, setup: &Setup) -> Cpus {
        let server = setup.receiver_cpus().first().copied();
        let generator = if self == Self::SharedCpu { server } else { setup.sender_cpu().or(server) };
        Cpus { server, generator }
    }

    /// Moves the work of the server's device to its place, until the returned value is dropped.
    ///
    /// # Errors
    /// Without a device, with one CPU, or if the kernel refuses.
    pub fn apply(self, setup: &Setup) -> Result<Option<CpuLayoutGuard>> {
        if !self.needs_device() {
            return Ok(None);
        }
        let (_, host) = setup.hosts().with_context(|| format!("{self} needs a device: a testbed (root)"))?;
        let Cpus { server, generator } = self.cpus(setup);
        let (server, generator) = (server.context("no CPU")?, generator.context("no CPU")?);
        ensure!(server != generator, "{self} needs two CPUs");
        let held = CpuLayoutGuard { host: host.clone(), layout: self };
        match self {
            Self::RpsServer => set_rps(host, 1 << server)?,
            Self::NapiServer => drop(host.enable_threaded_napi(LINK, server)?),
            _ => drop(host.enable_threaded_napi(LINK, generator)?),
        }
        Ok(Some(held))
    }
}

/// CPUs of the two sides; none if they are not pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpus {
    /// The server's thread.
    pub server: Option<usize>,
    /// The generator's thread.
    pub generator: Option<usize>,
}

/// The device's work is moved until this is dropped.
#[derive(Debug)]
pub struct CpuLayoutGuard {
    host: Host,
    layout: CpuLayout,
}

impl Drop for CpuLayoutGuard {
    fn drop(&mut self) {
        // Errors are ignored, because the testbed is dropped soon, too.
        let _ = if self.layout == CpuLayout::RpsServer {
            set_rps(&self.host, 0)
        } else {
            self.host.write_sysfs(LINK, "threaded", "0")
        };
    }
}

/// Passes on packets of all queues to the CPUs of `mask`.
fn set_rps(host: &Host, mask: u64) -> Result<()> {
    host.write_sysfs(LINK, "queues/rx-*/rps_cpus", &format!("{mask:x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_assign_the_cpus() {
        let setup = Setup::loopback(None);
        let (apart, together) = (CpuLayout::SeparateCpus.cpus(&setup), CpuLayout::SharedCpu.cpus(&setup));
        assert_eq!((apart.server, together.server), (together.generator, apart.server));
        assert_eq!(apart.generator == apart.server, setup.sender_cpu().is_none());
        assert!(CpuLayout::RpsServer.apply(&setup).unwrap_err().to_string().contains("testbed"));
    }
}
