//! A host of a testbed: a network namespace with devices.

use std::ffi::OsStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::process::{Command, Output};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{fs, io, panic};

use anyhow::{Context, Result, bail, ensure};
use manylane_sys::netns::{self, NetNs};
use manylane_sys::process;

use crate::link::{DeviceCounters, LinkEnd, device_counters};

/// Timeout until a device or an address can be used. One kernel worker reports all carrier changes
/// on the machine, once a second and under the lock for all devices. While other processes create
/// and remove namespaces, five seconds are not enough.
const LINK_UP_TIMEOUT: Duration = Duration::from_secs(60);

/// A host of a [`Testbed`](crate::topology::Testbed). A clone is the same host; the namespace lives
/// as long as one of them, a thread inside, or a process or socket started there.
#[derive(Clone, Debug)]
pub struct Host {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    index: usize,
    namespace: NetNs,
    /// By index of the link; `None` if the link does not end at this host.
    ends: Vec<Option<LinkEnd>>,
}

impl Host {
    pub(crate) fn new(index: usize, namespace: NetNs, ends: Vec<Option<LinkEnd>>) -> Host {
        Host { inner: Arc::new(Inner { index, namespace, ends }) }
    }

    /// Index of the host in its testbed.
    #[must_use]
    pub fn index(&self) -> usize {
        self.inner.index
    }

    /// The namespace.
    #[must_use]
    pub fn namespace(&self) -> &NetNs {
        &self.inner.namespace
    }

    /// Runs `work` on a new thread inside the host and waits for it. Threads and processes that
    /// `work` starts are inside, too, and so are its sockets, wherever they are used later.
    ///
    /// # Panics
    /// Panics if `work` does.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let worker = scope.spawn(|| {
                self.enter();
                work()
            });
            worker.join().unwrap_or_else(|panic| panic::resume_unwind(panic))
        })
    }

    /// Starts a thread called `name` inside the host.
    ///
    /// # Errors
    /// Fails if no thread can be started.
    pub fn spawn<T: Send + 'static>(
        &self,
        name: &str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<JoinHandle<T>> {
        let host = self.clone();
        thread::Builder::new().name(name.into()).spawn(move || {
            host.enter();
            work()
        })
    }

    /// A command that will run inside the host. As every child, it has copies of this process's
    /// descriptors until it calls exec. To run a program to its end, [`output`](Self::output) is
    /// better.
    ///
    /// # Errors
    /// Fails if the process is out of descriptors.
    pub fn command(&self, program: impl AsRef<OsStr>) -> io::Result<Command> {
        let mut command = Command::new(program);
        self.inner.namespace.enter_in_child(&mut command)?;
        Ok(command)
    }

    /// Runs a program to its end inside the host, by a process that never has descriptors of this
    /// one, so that sockets that other threads close meanwhile are really closed.
    ///
    /// # Errors
    /// Fails if it cannot be started.
    pub fn output(&self, program: &str, args: &[&str]) -> io::Result<Output> {
        process::run_isolated(Some(self.namespace()), program, args, b"")
    }

    /// The IPv4 address of this end of a link.
    ///
    /// # Panics
    /// As all functions with a link: when it does not end at this host.
    #[must_use]
    pub fn ip4(&self, link: usize) -> Ipv4Addr {
        self.end(link).ip4
    }

    /// The IPv6 address of this end of a link.
    ///
    /// # Panics
    /// Also when the testbed was made without IPv6.
    #[must_use]
    #[allow(clippy::expect_used, reason = "documented: a mistake in the test that calls it")]
    pub fn ip6(&self, link: usize) -> Ipv6Addr {
        self.end(link).ip6.expect("a testbed with IPv6")
    }

    /// The address of this end of a link in one family or the other.
    #[must_use]
    pub fn ip(&self, link: usize, ipv6: bool) -> IpAddr {
        if ipv6 { self.ip6(link).into() } else { self.ip4(link).into() }
    }

    /// Name of the device at this end of a link.
    #[must_use]
    pub fn device(&self, link: usize) -> &str {
        &self.end(link).device
    }

    /// Hardware address of this end of a link.
    #[must_use]
    pub fn mac(&self, link: usize) -> [u8; 6] {
        self.end(link).mac
    }

    /// Largest IP packet of this end of a link.
    #[must_use]
    pub fn mtu(&self, link: usize) -> u32 {
        self.end(link).mtu
    }

    /// Index of the device in this host.
    ///
    /// # Errors
    /// Fails if the device is gone.
    pub fn device_index(&self, link: usize) -> Result<u32> {
        let device = self.device(link);
        self.run(|| netns::device_index(device)).with_context(|| format!("finding device {device}"))
    }

    /// Reads the kernel's counters of this end of a link.
    ///
    /// # Errors
    /// Fails if the device is gone.
    pub fn device_counters(&self, link: usize) -> Result<DeviceCounters> {
        self.run(|| device_counters(self.device(link)))
    }

    /// Adds an address to this end of a link, which is up. The address can be used when this
    /// returns.
    ///
    /// # Errors
    /// The error of `ip`; an IPv6 address that [cannot be used](Self::wait_for_addrs).
    pub fn add_address(&self, link: usize, address: IpAddr) -> Result<()> {
        let device = self.device(link);
        self.ip_batch(&match address {
            IpAddr::V4(ip) => format!("address add {ip}/24 dev {device}\n"),
            IpAddr::V6(ip) => format!("address add {ip}/64 dev {device} nodad\n"),
        })?;
        self.wait_for_addrs(link)
    }

    /// Sets this end of a link up or down; while it is down, the other end has no carrier. Returns
    /// when it is done. A link carries frames if both ends are up.
    ///
    /// The kernel removes IPv6 addresses and neighbours of a device that goes down. The addresses
    /// of the layout are added again here; neighbours are resolved as usual.
    ///
    /// # Errors
    /// Fails with the message of `ip`.
    pub fn set_link(&self, link: usize, up: bool) -> Result<()> {
        let end = self.end(link);
        let device = &end.device;
        if !up {
            return self.ip_batch(&format!("link set dev {device} down\n"));
        }
        let mut lines = format!("link set dev {device} up\n");
        if let Some(ip6) = end.ip6 {
            lines += &format!("address replace {ip6}/64 dev {device} nodad\n");
        }
        self.ip_batch(&lines)
    }

    /// Waits until this end of a link carries frames, and its IPv6 addresses can be used
    /// ([`wait_for_addrs`](Self::wait_for_addrs)): a neighbour solicitation for a tentative
    /// address is not answered, and the next one is sent a second later.
    ///
    /// # Errors
    /// Fails if it does not within a few seconds: the other end is down.
    pub fn wait_for_carrier(&self, link: usize) -> Result<()> {
        let device = self.device(link);
        self.run(|| {
            let start = Instant::now();
            while !netns::is_device_running(device)
                .with_context(|| format!("reading the state of {device}"))?
            {
                ensure!(start.elapsed() < LINK_UP_TIMEOUT, "{device} has no carrier: is the other end up?");
                thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        })?;
        self.wait_for_addrs(link)
    }

    /// Waits until all IPv6 addresses of this end of a link can be used. The kernel completes new
    /// addresses later, even those without duplicate address detection, and accepts no datagrams
    /// for them until then.
    ///
    /// # Errors
    /// Fails if an address cannot be used after some seconds, because the link has no carrier.
    pub fn wait_for_addrs(&self, link: usize) -> Result<()> {
        let device = self.device(link);
        self.run(|| {
            let start = Instant::now();
            loop {
                // The file does not exist without IPv6.
                let table =
                    |name| fs::read_to_string(format!("/proc/thread-self/net/{name}")).unwrap_or_default();
                if are_addrs_usable(&table("if_inet6"), &table("ipv6_route"), device) {
                    return Ok(());
                }
                ensure!(start.elapsed() < LINK_UP_TIMEOUT, "an IPv6 address of {device} stays tentative");
                thread::sleep(Duration::from_millis(1));
            }
        })
    }

    /// Switches generic receive offload of this end of a link. Layouts have it on, because a veth
    /// device runs NAPI and accepts frames sent by XDP only then.
    ///
    /// # Errors
    /// Fails with the kernel's error.
    pub fn set_gro(&self, link: usize, on: bool) -> Result<()> {
        let device = self.device(link);
        self.run(|| netns::set_device_gro(device, on)).with_context(|| format!("switching GRO of {device}"))
    }

    /// Switches checksum offload of this end of a link, which layouts have on. Without it, frames
    /// are sent as over a wire: one by one, with their checksums.
    ///
    /// # Errors
    /// Fails with the kernel's error.
    pub fn set_checksums(&self, link: usize, on: bool) -> Result<()> {
        let device = self.device(link);
        self.run(|| netns::set_device_checksums(device, on))
            .with_context(|| format!("switching checksums of {device}"))
    }

    /// Switches segmentation by the device (TSO) and in front of it (GSO) of this end of a link,
    /// which layouts have on. Without it, TCP hands over frames one by one, as long as those of a
    /// wire. If a veth drops the last frame of a longer segment, Linux's TCP takes none of it for
    /// sent, and ignores all ACKs of what did arrive (seen with Linux 5.10).
    ///
    /// # Errors
    /// Fails with the kernel's error.
    pub fn set_segmentation(&self, link: usize, on: bool) -> Result<()> {
        let device = self.device(link);
        self.run(|| netns::set_device_segmentation(device, on))
            .with_context(|| format!("switching segmentation of {device}"))
    }

    /// Sets a sysctl of the network namespace, such as `net.ipv4.udp_rmem_min`.
    ///
    /// # Errors
    /// Fails if it does not exist in a namespace, or refuses the value.
    pub fn set_sysctl(&self, name: &str, value: &str) -> Result<()> {
        let path = format!("/proc/sys/{}", name.replace('.', "/"));
        self.run(|| fs::write(&path, value)).with_context(|| format!("setting the sysctl {name} to {value}"))
    }

    /// Runs lines of `ip -batch` inside the host.
    ///
    /// # Errors
    /// Fails with the message of `ip`, with the lines.
    pub fn ip_batch(&self, lines: &str) -> Result<()> {
        let namespace = Some(self.namespace());
        let done = process::run_isolated(namespace, "ip", &["-batch", "-"], lines.as_bytes());
        let done = done.map_err(explain_missing_ip)?;
        if !done.status.success() {
            bail!("ip: {}\nwhile running:\n{lines}", String::from_utf8_lossy(&done.stderr).trim());
        }
        Ok(())
    }

    /// Lets the device hold back so many frames while the ring of its peer is full (Linux 6.16).
    /// Without it a virtual device drops them: it has no queue of its own.
    ///
    /// # Errors
    /// Fails with the message of `tc`.
    pub fn set_transmit_queue(&self, link: usize, frames: u32) -> Result<()> {
        let line = format!("qdisc replace dev {} root pfifo limit {frames}", self.device(link));
        let done = process::run_isolated(Some(self.namespace()), "tc", &["-batch", "-"], line.as_bytes());
        let done = done.map_err(explain_missing_ip)?;
        if !done.status.success() {
            bail!("tc: {}\nwhile running:\n{line}", String::from_utf8_lossy(&done.stderr).trim());
        }
        Ok(())
    }

    pub(crate) fn end(&self, link: usize) -> &LinkEnd {
        match self.inner.ends.get(link) {
            Some(Some(end)) => end,
            _ => panic!("link {link} does not end at host {}", self.index()),
        }
    }

    #[allow(clippy::expect_used, reason = "making the namespace needed the same privilege")]
    pub(crate) fn enter(&self) {
        self.inner.namespace.enter().expect("a namespace of our own can be entered");
    }
}

/// True if all addresses of `device` in `/proc/net/if_inet6` can be used: they are not tentative,
/// and `/proc/net/ipv6_route` has the route that makes them local, which is added a moment later.
fn are_addrs_usable(addrs: &str, routes: &str, device: &str) -> bool {
    const TENTATIVE: u32 = 0x40;
    const LOCAL: u32 = 1 << 31;
    let flags_of = |text: &str| u32::from_str_radix(text, 16).unwrap_or(0);
    let is_local = |addr: &str| {
        routes.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).any(|row| match row[..] {
            // Destination and its length, source and its length, next hop, metric, use, flags.
            [to, "80", _, _, _, _, _, _, flags, of] => {
                to == addr && of == device && flags_of(flags) & LOCAL != 0
            }
            _ => false,
        })
    };
    addrs.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).all(|row| match row[..] {
        // Address, number of the device, length of the prefix, scope, flags, device.
        [addr, _, _, _, flags, of] if of == device => flags_of(flags) & TENTATIVE == 0 && is_local(addr),
        _ => true,
    })
}

pub(crate) fn explain_missing_ip(err: io::Error) -> anyhow::Error {
    if err.kind() == io::ErrorKind::NotFound {
        return anyhow::anyhow!("cannot find the program ip: apt-get install iproute2");
    }
    anyhow::Error::new(err).context("starting ip")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_usable_once_they_are_local() {
        let addrs = "fd770000000000000000000000000001 02 40 00 80    link0\n\
                     fd770000000000010000000000000001 03 40 00 c0    link1\n\
                     fd770000000000020000000000000001 04 40 00 80    link2\n";
        let route = |to, len, flags, device| {
            let none = "0".repeat(32);
            format!("{to} {len} {none} 00 {none} 00000000 00000002 00000000 {flags} {device}\n")
        };
        let routes = [
            route("fd770000000000000000000000000001", "80", "80200001", "link0"),
            route("fd770000000000010000000000000001", "80", "80200001", "link1"),
            route("fd770000000000020000000000000001", "80", "00000001", "link2"),
            route("fd770000000000020000000000000000", "40", "80000001", "link2"),
        ];
        let usable = ["link0", "link1", "link2", "link10"]
            .map(|device| are_addrs_usable(addrs, &routes.concat(), device));
        assert_eq!(usable, [true, false, false, true]);
    }
}
