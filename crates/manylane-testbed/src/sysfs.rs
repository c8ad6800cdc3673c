//! Settings of a host's devices in sysfs, and the kernel threads that work for them.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use manylane_sys::cpu;

use crate::host::Host;

/// Timeout until the kernel threads have started.
const NAPI_THREAD_TIMEOUT: Duration = Duration::from_secs(5);

impl Host {
    /// Writes `value` to the files that match `pattern` in the folder of its device of link `link`.
    ///
    /// # Errors
    /// If there are none, or the kernel refuses the value.
    pub fn write_sysfs(&self, link: usize, pattern: &str, value: &str) -> Result<()> {
        let device = self.device(link);
        // Each network namespace has its own view of sysfs, so that it is mounted in the mount
        // namespace of a short-lived process.
        let script = format!(
            "mount -t sysfs none /sys && for file in /sys/class/net/{device}/{pattern}; do echo {value} > \"$file\" || exit 1; done"
        );
        let done = self.output("unshare", &["--mount", "sh", "-c", &script]).context("starting unshare")?;
        if !done.status.success() {
            bail!("setting {pattern} of {device}: {}", String::from_utf8_lossy(&done.stderr).trim());
        }
        Ok(())
    }

    /// Makes kernel threads do the receive work of its device of link `link`, on `cpu`. Returns
    /// their ids. No other device of that name may change meanwhile.
    ///
    /// # Errors
    /// If the kernel does not support it: Linux 5.12.
    pub fn enable_threaded_napi(&self, link: usize, cpu: usize) -> Result<Vec<i32>> {
        let before = napi_threads(self.device(link));
        self.write_sysfs(link, "threaded", "1")?;
        let start = Instant::now();
        loop {
            let mut new = napi_threads(self.device(link));
            new.retain(|thread| !before.contains(thread));
            if !new.is_empty() {
                for thread in &new {
                    cpu::pin_thread(*thread, cpu).context("cannot pin a NAPI thread")?;
                }
                return Ok(new);
            }
            ensure!(
                start.elapsed() < NAPI_THREAD_TIMEOUT,
                "the device has no NAPI thread (needs Linux 5.12)"
            );
            thread::sleep(Duration::from_millis(1));
        }
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
