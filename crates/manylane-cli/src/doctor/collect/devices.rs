//! Facts about devices from files: RPS, RFS, XPS, threaded NAPI, NUMA node, interrupts.
//!
//! `/sys` shows the devices of the network namespace in which it was mounted. That may be another
//! namespace, whose devices have the same names and indices. So `/sys` is used only if it agrees
//! with netlink about all devices.

use std::collections::BTreeSet;

use super::super::facts::{Device, Facts, Irq};
use super::files::FileTree;

const SYSFS_NET: &str = "sys/class/net";

pub(crate) fn collect(files: &FileTree, facts: &mut Facts) {
    let interrupts = files.text("proc/interrupts");
    if interrupts.is_none() {
        facts.note_gap("interrupts", "/proc/interrupts cannot be read");
    }
    if !is_own_namespace(files, &facts.devices) {
        facts.note_gap(
            "sysfs",
            "/sys/class/net shows another network namespace than that of this process: use 'ip netns exec', or mount /sys again",
        );
        return;
    }
    for device in &mut facts.devices {
        read_sysfs(files, device);
        device.irqs = irqs(files, &device.name, interrupts.as_deref().unwrap_or_default());
    }
}

/// True if `/sys` shows exactly the devices of our namespace.
fn is_own_namespace(files: &FileTree, devices: &[Device]) -> bool {
    let same = |device: &Device| {
        let file = |name: &str| files.text(&format!("{SYSFS_NET}/{}/{name}", device.name));
        file("ifindex") == Some(device.index.to_string()) && file("address") == device.mac
    };
    // bonding_masters and others are files.
    let is_device = |name: &String| files.path(&format!("{SYSFS_NET}/{name}/ifindex")).exists();
    let shown = files.names(SYSFS_NET).iter().filter(|name| is_device(name)).count();
    !devices.is_empty() && devices.iter().all(same) && shown == devices.len()
}

fn read_sysfs(files: &FileTree, device: &mut Device) {
    let base = format!("{SYSFS_NET}/{}", device.name);
    let queues = files.names(&format!("{base}/queues"));
    let of = |kind: &str, file: &str| {
        let named = queues.iter().filter(|name| name.starts_with(kind));
        named.map(|name| format!("{base}/queues/{name}/{file}")).collect::<Vec<_>>()
    };
    device.rps = read_all(&of("rx-", "rps_cpus"), |path| files.cpu_mask(path));
    device.rfs = read_all(&of("rx-", "rps_flow_cnt"), |path| files.number(path));
    device.xps = read_all(&of("tx-", "xps_cpus"), |path| files.cpu_mask(path));
    device.threaded = files.number(&format!("{base}/threaded")).map(|on| on != 0);
    // -1 means none.
    device.numa = files.text(&format!("{base}/device/numa_node")).and_then(|node| node.parse().ok());
}

/// Reads one value per queue. None if there are no queues, or if a value is missing.
fn read_all<T>(paths: &[String], read: impl Fn(&str) -> Option<T>) -> Option<Vec<T>> {
    (!paths.is_empty()).then(|| paths.iter().map(|path| read(path)).collect()).flatten()
}

/// Interrupts of the receive queues: the device's own (MSI), and those named after it.
fn irqs(files: &FileTree, device: &str, interrupts: &str) -> Vec<Irq> {
    let base = format!("{SYSFS_NET}/{device}/device");
    let own: BTreeSet<u32> =
        files.names(&format!("{base}/msi_irqs")).iter().filter_map(|name| name.parse().ok()).collect();
    // For a virtio device, the name in the table is that of the parent device.
    let below = files.link_name(&base).filter(|name| name.starts_with("virtio"));
    let mut found = Vec::new();
    for line in interrupts.lines() {
        let Some((number, rest)) = line.split_once(':') else { continue };
        let Ok(number) = number.trim().parse::<u32>() else { continue };
        let Some(name) = rest.split_whitespace().last() else { continue };
        let is_named = [Some(device), below.as_deref()].into_iter().flatten().any(|prefix| {
            let rest = name.strip_prefix(prefix);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['-', ':', '.', '_']))
        });
        if (is_named || own.contains(&number)) && is_rx_irq(name) {
            let list = |file: &str| files.cpu_list(&format!("proc/irq/{number}/{file}")).unwrap_or_default();
            found.push(Irq {
                number,
                name: name.into(),
                allowed: list("smp_affinity_list"),
                effective: list("effective_affinity_list"),
            });
        }
    }
    // If some interrupts are named after queues, those named after the device alone are for its
    // link or its management.
    let is_queue = |irq: &Irq| {
        let name = irq.name.to_ascii_lowercase();
        ["rx", "input", "comp"].iter().any(|word| name.contains(word))
    };
    if found.iter().any(is_queue) {
        found.retain(is_queue);
    }
    found
}

/// True if an interrupt of this name may serve a receive queue, and not only sending or management.
fn is_rx_irq(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let for_both = name.contains("txrx") || name.contains("rxtx");
    let other = ["output", "config", "-tx", "async", "mgmt", "misc", "event", "ctrl", "lsc"];
    for_both || !other.iter().any(|word| name.contains(word))
}
