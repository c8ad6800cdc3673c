//! Devices of the machine that become ends of links, instead of veth devices.
//!
//! A device is moved into the namespace of its host. When the namespace ends, the kernel moves it
//! back, but not at once, and under another name if its own is taken. So it is found by its address
//! on the bus, and waited for.

use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{Result, bail};
use manylane_sys::process;

use crate::host::{Host, explain_missing_ip};

/// Far longer than the kernel takes to end a namespace.
const RETURN_TIMEOUT: Duration = Duration::from_secs(60);

/// Moves the device at PCI address `address` from the namespace of the calling thread to `host`, as
/// its end of link `link`.
///
/// # Errors
/// If there is no such device, also after some seconds, or `ip` fails.
pub(crate) fn take(address: &str, host: &Host, link: usize) -> Result<()> {
    let name = wait_for_name(address)?;
    let end = host.end(link);
    // Up, it could be neither renamed nor given an address.
    let lines = format!(
        "link set dev {name} down\nlink set dev {name} netns {} name {}\n",
        host.namespace().path(),
        end.device
    );
    let moved =
        process::run_isolated(None, "ip", &["-batch", "-"], lines.as_bytes()).map_err(explain_missing_ip)?;
    if !moved.status.success() {
        bail!("ip: {}\nwhile running:\n{lines}", String::from_utf8_lossy(&moved.stderr).trim());
    }
    let mac = crate::link::format_mac(&end.mac);
    host.ip_batch(&format!("link set dev {} address {mac} mtu {}\n", end.device, end.mtu))
}

/// The name of the device, once it is in the namespace of this process.
fn wait_for_name(address: &str) -> Result<String> {
    let start = Instant::now();
    loop {
        if let Some(name) = name(address) {
            return Ok(name);
        }
        if start.elapsed() > RETURN_TIMEOUT {
            bail!("no network device at the PCI address {address} (see /sys/class/net/*/device)");
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// The folder `net` is in that of the PCI device, or of its virtio device.
fn name(address: &str) -> Option<String> {
    let pci = Path::new("/sys/bus/pci/devices").join(address);
    let below = fs::read_dir(&pci).ok()?.flatten().map(|entry| entry.path());
    [pci].into_iter().chain(below).find_map(|folder| {
        let device = fs::read_dir(folder.join("net")).ok()?.flatten().next()?;
        device.file_name().into_string().ok()
    })
}
