//! Three hosts in a row: clients, the proxy, servers. The proxy has a CPU of its own.
//!
//! A virtual device has no interrupt: a frame is received in a softirq on the CPU that sent it. So
//! the work of one host would be done on another one's CPU. Kernel threads (threaded NAPI) receive
//! instead: for the proxy's devices on its CPU, for the others' on the CPU of clients and servers.
//! And they do so in batches: as network cards delay interrupts, frames wait for up to 50 µs.
//! Without that, each frame may wake such a thread in the middle of the proxy's work. What does not
//! fit into the ring of a peer waits, where a virtual device without a queue drops it.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result};
use manylane_sys::cpu;
use manylane_testbed::{Host, Layout, Testbed};

/// The links of the clients and of the servers.
pub(super) const CLIENT_LINK: usize = 0;
pub(super) const SERVER_LINK: usize = 1;

/// How long devices delay their receive work, in nanoseconds.
const MODERATION_NS: &str = "50000";
/// Frames that wait for a device, as with network cards (`txqueuelen`).
const TRANSMIT_QUEUE: u32 = 1000;

/// The hosts, and their CPUs.
pub(super) struct Bed {
    testbed: Testbed,
    /// Kernel threads that receive for the proxy's devices.
    napi: Vec<i32>,
    /// CPU of the proxy.
    pub(super) proxy_cpu: usize,
    /// CPU of clients and servers.
    pub(super) peers_cpu: usize,
}

impl Bed {
    /// Hosts on these two CPUs.
    pub(super) fn new(proxy_cpu: usize, peers_cpu: usize) -> Result<Bed> {
        Bed::with_queues(&[proxy_cpu], peers_cpu)
    }

    /// Hosts whose devices have a queue for each CPU of the proxy. `proxy_cpu` is the first one.
    pub(super) fn with_queues(proxy_cpus: &[usize], peers_cpu: usize) -> Result<Bed> {
        let proxy_cpu = *proxy_cpus.first().context("the proxy needs a CPU")?;
        let (links, queues) = (vec![(0, 1), (1, 2)], u32::try_from(proxy_cpus.len())?);
        let layout = Layout { hosts: 3, links, queues, ipv6: false, ..Layout::default() };
        let testbed = Testbed::new(&layout).context("cannot create a testbed")?;
        let mut bed = Bed { testbed, napi: Vec::new(), proxy_cpu, peers_cpu };
        for host in [bed.clients(), bed.proxy(), bed.servers()] {
            // Tens of thousands of connections, as an operator would set it.
            host.set_sysctl("net.ipv4.ip_local_port_range", "1024 65535")?;
            host.set_sysctl("net.ipv4.tcp_tw_reuse", "1")?;
            host.set_sysctl("net.core.somaxconn", "65535")?;
            host.set_sysctl("net.ipv4.tcp_max_syn_backlog", "65535")?;
        }
        bed.clients().enable_threaded_napi(CLIENT_LINK, peers_cpu)?;
        for link in [CLIENT_LINK, SERVER_LINK] {
            let threads = bed.proxy().enable_threaded_napi(link, proxy_cpu)?;
            for (thread, on) in threads.iter().zip(proxy_cpus.iter().cycle()) {
                cpu::pin_thread(*thread, *on).context("cannot pin a NAPI thread")?;
            }
            bed.napi.extend(threads);
        }
        bed.servers().enable_threaded_napi(SERVER_LINK, peers_cpu)?;
        for (host, link) in bed.ends() {
            host.write_sysfs(link, "napi_defer_hard_irqs", "1")?;
            host.set_transmit_queue(link, TRANSMIT_QUEUE)?;
            host.write_sysfs(link, "gro_flush_timeout", MODERATION_NS)?;
        }
        Ok(bed)
    }

    pub(super) fn clients(&self) -> &Host {
        self.testbed.host(0)
    }

    pub(super) fn proxy(&self) -> &Host {
        self.testbed.host(1)
    }

    pub(super) fn servers(&self) -> &Host {
        self.testbed.host(2)
    }

    /// The address at which clients find the proxy.
    pub(super) fn proxy_addr(&self, port: u16) -> SocketAddr {
        SocketAddr::new(IpAddr::V4(self.proxy().ip4(CLIENT_LINK)), port)
    }

    /// CPU time that a process and the kernel threads of the proxy's devices have used.
    pub(super) fn proxy_cpu_time(&self, process: u32) -> Duration {
        let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
        self.cpu_time(threads.filter_map(|thread| thread.file_name().to_str()?.parse().ok()))
    }

    /// CPU time that these threads and the kernel threads of the proxy's devices have used.
    pub(super) fn cpu_time(&self, threads: impl IntoIterator<Item = i32>) -> Duration {
        threads.into_iter().chain(self.napi.iter().copied()).map(thread_cpu_time).sum()
    }

    /// Switches segmentation by the devices, and with it segments longer than a frame, for all
    /// hosts.
    pub(super) fn set_segmentation(&self, on: bool) -> Result<()> {
        self.ends().into_iter().try_for_each(|(host, link)| host.set_segmentation(link, on))
    }

    /// Switches checksums and segmentation by the devices, for all hosts.
    pub(super) fn set_offloads(&self, on: bool) -> Result<()> {
        // Segmentation needs checksums, so that it comes second.
        self.ends().into_iter().try_for_each(|(host, link)| host.set_checksums(link, on))?;
        self.set_segmentation(on)
    }

    fn ends(&self) -> [(&Host, usize); 4] {
        [
            (self.clients(), CLIENT_LINK),
            (self.proxy(), CLIENT_LINK),
            (self.proxy(), SERVER_LINK),
            (self.servers(), SERVER_LINK),
        ]
    }
}

/// CPU time of a thread, zero if it has ended.
fn thread_cpu_time(thread: i32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{thread}/schedstat")).unwrap_or_default();
    let nanos = stat.split_whitespace().next().and_then(|nanos| nanos.parse().ok());
    Duration::from_nanos(nanos.unwrap_or(0))
}
