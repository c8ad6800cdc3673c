//! Two or more hosts on one machine: network namespaces joined by veth pairs with several queues.
//!
//! Namespaces and devices have no name outside the process, so that nothing needs cleaning up: the
//! kernel removes them when the process ends, whether it returns, panics, or is killed. (A program
//! started inside a host keeps that host alive until it ends, too.)

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{fs, io};

use anyhow::{Context, Result, bail, ensure};
use manylane_sys::netns::NetNs;
use manylane_sys::process;

use crate::host::{Host, explain_missing_ip};
use crate::link::{LinkEnd, device_name, format_mac};
use crate::pci_device;

/// Maximum number of hosts and of links: both are bytes of the addresses.
const HOSTS_AND_LINKS_MAX: usize = 200;

/// Index of the next device. The kernel assigns lower ones to devices that a test adds.
static NEXT_DEVICE_INDEX: AtomicU32 = AtomicU32::new(1000);

/// The layout of a testbed. The default is two hosts joined by one link of four queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Number of hosts.
    pub hosts: usize,
    /// The links, each between two hosts.
    pub links: Vec<(usize, usize)>,
    /// Queues of every device, in each direction.
    pub queues: u32,
    /// MTU of every device.
    pub mtu: u32,
    /// IPv6 addresses in addition to the IPv4 ones.
    pub ipv6: bool,
    /// Hosts have neighbour entries for each other from the start, so that no frame waits for ARP.
    pub neighbours: bool,
    /// Devices to use for the first links, each by the PCI addresses of its two ends, which are
    /// joined already. The other links are veth pairs. Used devices keep their numbers of queues,
    /// and return when the testbed ends.
    pub devices: Vec<[String; 2]>,
}

impl Default for Layout {
    fn default() -> Layout {
        Layout {
            hosts: 2,
            links: vec![(0, 1)],
            queues: 4,
            mtu: 1500,
            ipv6: true,
            neighbours: true,
            devices: Vec::new(),
        }
    }
}

/// Hosts and links, alive until this value is dropped.
#[derive(Debug)]
pub struct Testbed {
    hosts: Vec<Host>,
    links: usize,
}

impl Testbed {
    /// Builds `layout`. Link `n` joins its two hosts by devices called `linkn`, with the addresses
    /// 10.77.n.h and fd77:0:0:n::h, where h is the number of the host plus one.
    ///
    /// # Errors
    /// Fails if the layout makes no sense, privileges or the program `ip` are missing (see
    /// [`available`]), or the kernel has no veth devices.
    pub fn new(layout: &Layout) -> Result<Testbed> {
        validate(layout)?;
        check_privileges()?;
        let mut hosts = Vec::with_capacity(layout.hosts);
        for index in 0..layout.hosts {
            let namespace = NetNs::create().context("creating a network namespace")?;
            let ends = layout.links.iter().zip(0u8..).map(|(&(a, b), link)| {
                (a == index || b == index).then(|| LinkEnd::new(link, index as u8, layout.mtu, layout.ipv6))
            });
            hosts.push(Host::new(index, namespace, ends.collect()));
        }
        for (link, &(a, b)) in layout.links.iter().enumerate() {
            create_link(&hosts[a], &hosts[b], link, layout)
                .with_context(|| format!("creating link {link}"))?;
        }
        let testbed = Testbed { hosts, links: layout.links.len() };
        for host in &testbed.hosts {
            configure(&testbed, host, layout)
                .with_context(|| format!("configuring host {}", host.index()))?;
        }
        for link in 0..layout.links.len() {
            testbed.finish_link(link, layout)?;
        }
        Ok(testbed)
    }

    /// Creates link `link` of `layout` again after its devices were deleted, with their names and
    /// addresses.
    ///
    /// # Errors
    /// The error of `ip`, also if the link exists.
    pub fn recreate_link(&self, link: usize, layout: &Layout) -> Result<()> {
        let (a, b) = layout.links[link];
        create_link(&self.hosts[a], &self.hosts[b], link, layout)
            .with_context(|| format!("creating link {link}"))?;
        self.restore_link(link, layout)
    }

    /// Restores what the devices of link `link` of `layout` lose when they are moved to another
    /// host and back: addresses, neighbours, and the link state.
    ///
    /// # Errors
    /// Fails with the message of `ip`.
    pub fn restore_link(&self, link: usize, layout: &Layout) -> Result<()> {
        let (a, b) = layout.links[link];
        for (host, peer) in [(a, b), (b, a)] {
            let peer = layout.neighbours.then(|| self.hosts[peer].end(link));
            self.hosts[host].ip_batch(&self.hosts[host].end(link).ip_batch_config(peer))?;
        }
        self.finish_link(link, layout)
    }

    fn finish_link(&self, link: usize, layout: &Layout) -> Result<()> {
        let (a, b) = layout.links[link];
        for host in [&self.hosts[a], &self.hosts[b]] {
            // Without GRO, a veth device accepts no frames from XDP. Only after it is up: it
            // notifies its peer when GRO is switched, and only then does the peer accept them
            // (Linux 6.18).
            host.set_gro(link, true)?;
        }
        // Traffic to addresses that cannot be used yet would be lost, and each that becomes usable
        // is a change that sockets follow.
        self.hosts[a].wait_for_carrier(link)?;
        self.hosts[b].wait_for_carrier(link)
    }

    /// Host `index`.
    ///
    /// # Panics
    /// Panics if there are fewer.
    #[must_use]
    pub fn host(&self, index: usize) -> &Host {
        &self.hosts[index]
    }

    /// Number of links.
    #[must_use]
    pub fn links(&self) -> usize {
        self.links
    }
}

/// Checks that this process can build a testbed.
///
/// # Errors
/// Names what is missing, and how to provide it.
pub fn available() -> Result<()> {
    check_privileges()?;
    let ip = process::run_isolated(None, "ip", &["-V"], b"");
    ensure!(
        ip.map_err(explain_missing_ip)?.status.success(),
        "cannot run the program ip: apt-get install iproute2"
    );
    match NetNs::create() {
        Ok(_) => Ok(()),
        Err(err) if err.kind() == io::ErrorKind::PermissionDenied => {
            bail!("network namespaces are not permitted (in a container, use --privileged)")
        }
        Err(err) => Err(err).context("creating a network namespace"),
    }
}

fn check_privileges() -> Result<()> {
    const CAP_NET_ADMIN: u32 = 12;
    const CAP_SYS_ADMIN: u32 = 21;
    let status = fs::read_to_string("/proc/thread-self/status").context("reading the capabilities")?;
    let held = effective_capabilities(&status).context("no capabilities in /proc/thread-self/status")?;
    let missing: Vec<&str> = [(CAP_SYS_ADMIN, "CAP_SYS_ADMIN"), (CAP_NET_ADMIN, "CAP_NET_ADMIN")]
        .into_iter()
        .filter(|(bit, _)| held & (1 << bit) == 0)
        .map(|(_, name)| name)
        .collect();
    ensure!(missing.is_empty(), "a testbed needs {}: run as root (sudo)", missing.join(" and "));
    Ok(())
}

fn effective_capabilities(status: &str) -> Option<u64> {
    let text = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(text.trim(), 16).ok()
}

fn validate(layout: &Layout) -> Result<()> {
    ensure!(
        (1..=HOSTS_AND_LINKS_MAX).contains(&layout.hosts),
        "a testbed has 1 to {HOSTS_AND_LINKS_MAX} hosts, not {}",
        layout.hosts
    );
    ensure!(
        layout.links.len() <= HOSTS_AND_LINKS_MAX,
        "a testbed has at most {HOSTS_AND_LINKS_MAX} links, not {}",
        layout.links.len()
    );
    ensure!((1..=64).contains(&layout.queues), "a device has 1 to 64 queues, not {}", layout.queues);
    ensure!(
        (1280..=65_535).contains(&layout.mtu),
        "an MTU is 1280 (the least for IPv6) to 65535, not {}",
        layout.mtu
    );
    for &(a, b) in &layout.links {
        ensure!(a != b && a < layout.hosts && b < layout.hosts, "invalid link between hosts {a} and {b}");
    }
    Ok(())
}

/// Creates the pair of devices, each directly in its host.
///
/// No two devices of a process have the same index. If the two ends had the same one, the kernel
/// would take neither for a link to another device, and report their carrier up to a second late.
/// And a new namespace may have the inode number of an earlier one: a device with the same index,
/// too, would be taken for one that this process has used before.
fn create_link(a: &Host, b: &Host, link: usize, layout: &Layout) -> Result<()> {
    if let Some([of_a, of_b]) = layout.devices.get(link) {
        pci_device::take(of_a, a, link)?;
        return pci_device::take(of_b, b, link);
    }
    let Layout { queues, mtu, .. } = layout;
    let name = device_name(link as u8);
    let options = format!("mtu {mtu} numtxqueues {queues} numrxqueues {queues}");
    let index = NEXT_DEVICE_INDEX.fetch_add(2, Ordering::Relaxed);
    a.ip_batch(&format!(
        "link add name {name} index {index} address {} {options} \
         type veth peer name {name} index {} address {} {options} netns {}\n",
        format_mac(&a.end(link).mac),
        index + 1,
        format_mac(&b.end(link).mac),
        b.namespace().path(),
    ))
}

fn configure(testbed: &Testbed, host: &Host, layout: &Layout) -> Result<()> {
    if !layout.ipv6 {
        // Without this the kernel sends some multicast reports. It may have no IPv6 at all.
        let _ = host.set_sysctl("net.ipv6.conf.all.disable_ipv6", "1");
    }
    let mut lines = String::from("link set dev lo up\n");
    for (link, &(a, b)) in layout.links.iter().enumerate() {
        if a != host.index() && b != host.index() {
            continue;
        }
        let peer = testbed.host(if a == host.index() { b } else { a }).end(link);
        lines += &host.end(link).ip_batch_config(layout.neighbours.then_some(peer));
    }
    host.ip_batch(&lines)
}

/// Inodes of the network namespaces of all processes and threads of this machine, to show that
/// none is left over.
///
/// # Errors
/// Fails if /proc cannot be read.
pub fn namespaces_in_use() -> Result<BTreeSet<u64>> {
    let mut found = BTreeSet::new();
    for process in fs::read_dir("/proc").context("reading /proc")?.filter_map(Result::ok) {
        // Processes may end meanwhile, and those of other users may not be readable.
        let Ok(tasks) = fs::read_dir(process.path().join("task")) else { continue };
        for task in tasks.filter_map(Result::ok) {
            let link = fs::read_link(task.path().join("ns/net")).unwrap_or_default();
            let text = link.to_string_lossy();
            let number = text.strip_prefix("net:[").and_then(|rest| rest.strip_suffix(']'));
            found.extend(number.and_then(|number| number.parse::<u64>().ok()));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_layouts_are_refused() {
        let good = Layout::default();
        assert!(validate(&good).is_ok());
        for bad in [
            Layout { hosts: 0, ..good.clone() },
            Layout { hosts: 1, ..good.clone() },
            Layout { links: vec![(0, 0)], ..good.clone() },
            Layout { links: vec![(0, 2)], ..good.clone() },
            Layout { queues: 0, ..good.clone() },
            Layout { mtu: 100, ..good.clone() },
        ] {
            assert!(validate(&bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn capabilities_are_read_from_the_status() {
        assert_eq!(effective_capabilities("Name:\tx\nCapEff:\t000001ffffffffff\n"), Some(0x1ff_ffff_ffff));
        assert_eq!(effective_capabilities("Name:\tx\n"), None);
    }
}
