//! CPU layout: the CPUs of the server, the generator and the device's work.
//!
//! A virtual device has no interrupt: packets are received in a softirq on the sending CPU.
//! Receive packet steering (RPS) passes them on to a chosen CPU, by an interrupt to that
//! one. A kernel thread (threaded NAPI) can do the device's work instead of softirqs.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use manylane_measure::named_enum;
use manylane_sys::cpu;
use manylane_testbed::Host;

use crate::Setup;

/// Timeout until the kernel threads have started.
const NAPI_THREAD_TIMEOUT: Duration = Duration::from_secs(5);
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
            Self::NapiServer => enable_threaded_napi(host, server)?,
            _ => enable_threaded_napi(host, generator)?,
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
            write_sysfs(&self.host, "threaded", "0")
        };
    }
}

/// Passes on packets of all queues to the CPUs of `mask`.
fn set_rps(host: &Host, mask: u64) -> Result<()> {
    write_sysfs(host, "queues/rx-*/rps_cpus", &format!("{mask:x}"))
}

/// Makes kernel threads do the work of the device, on `cpu`.
fn enable_threaded_napi(host: &Host, cpu: usize) -> Result<()> {
    let before = napi_threads(host.device(LINK));
    write_sysfs(host, "threaded", "1")?;
    let start = Instant::now();
    loop {
        let new: Vec<i32> =
            napi_threads(host.device(LINK)).into_iter().filter(|thread| !before.contains(thread)).collect();
        if !new.is_empty() {
            let pin = |&thread: &i32| cpu::pin_thread(thread, cpu).context("cannot pin a NAPI thread");
            return new.iter().try_for_each(pin);
        }
        ensure!(start.elapsed() < NAPI_THREAD_TIMEOUT, "the device has no NAPI thread (needs Linux 5.12)");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Kernel threads that work for a device of this name. Their namespace is not known.
fn napi_threads(device: &str) -> Vec<i32> {
    let name = format!("napi/{device}-");
    let processes = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    let is_one =
        |pid: &i32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.starts_with(&name));
    processes.filter_map(|process| process.file_name().to_str()?.parse().ok()).filter(is_one).collect()
}

/// Writes to a file of the device in sysfs. Each network namespace has its own view of sysfs, so
/// that it is mounted in the mount namespace of a short-lived process.
fn write_sysfs(host: &Host, file: &str, value: &str) -> Result<()> {
    let device = host.device(LINK);
    let script = format!(
        "mount -t sysfs none /sys && for file in /sys/class/net/{device}/{file}; do echo {value} > \"$file\" || exit 1; done"
    );
    let done = host.output("unshare", &["--mount", "sh", "-c", &script]).context("starting unshare")?;
    if !done.status.success() {
        bail!("setting {file} of {device}: {}", String::from_utf8_lossy(&done.stderr).trim());
    }
    Ok(())
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
