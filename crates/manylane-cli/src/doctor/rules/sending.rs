//! Costs of sending.

use super::super::change::{Change, Target};
use super::super::collect::files::format_cpu_mask;
use super::super::facts::Facts;
use super::super::finding::Severity;
use super::rule::{FindingSink, Rule, rx_devices, usable_cpus};

pub(super) const RULES: &[Rule] = &[Rule {
    id: "xps-off",
    cost: 14,
    meaning: "The device has several send queues, but no CPU has one of its own (XPS): a hash of the flow selects the queue, and CPUs contend for its lock.",
    remedy: "`/sys/class/net/DEVICE/queues/tx-N/xps_cpus`: separate CPUs for each queue.",
    check: xps_off,
}];

fn xps_off(facts: &Facts, found: &mut FindingSink<'_>) {
    let cpus = usable_cpus(facts);
    if cpus.len() < 2 {
        return;
    }
    // Virtual devices have no send lock, or select queues by themselves.
    for device in rx_devices(facts).filter(|device| device.kind.is_none()) {
        let Some(xps) = &device.xps else {
            // Without several send queues, the kernel has no such file.
            if let Some(why) = facts.gaps.get("sysfs") {
                found.unknown(format!("cannot see which send queue of {} each CPU uses: {why}", device.name));
            }
            continue;
        };
        if xps.len() < 2 || xps.iter().any(|cpus| !cpus.is_empty()) {
            continue;
        }
        let finding = found
            .add(
                Severity::Note,
                format!("{} has {} send queues, and XPS is off", device.name, xps.len()),
                "Two lanes may send through one queue at the same time, and then contend for its lock.",
            )
            .subject(&device.name);
        for queue in 0..xps.len() {
            // Queues are assigned to CPUs in turn, also if there are more queues than
            // CPUs.
            let own = |at: &usize| at % xps.len() == queue || queue % cpus.len() == *at;
            let of_queue: Vec<usize> = (0..cpus.len()).filter(own).map(|at| cpus[at]).collect();
            let file = format!("queues/tx-{queue}/xps_cpus");
            finding.set(Change::new(
                Target::DeviceFile { device: device.name.clone(), file },
                format_cpu_mask(&of_queue),
            ));
        }
    }
}
