//! Facts about this machine, as plain values. Rules judge these and nothing else; `--json` prints
//! them.
//!
//! `None` and empty lists mean that a value could not be read; [`Facts::gaps`] has the reason.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use serde::Serialize;

/// All facts.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Facts {
    /// Release of the kernel.
    pub(crate) kernel: String,
    /// Seconds since boot, when the machine's counters started.
    pub(crate) uptime: Option<f64>,
    /// Seconds during which losses were counted, if not since boot.
    pub(crate) watched: Option<f64>,
    /// Kernel features that this process can use.
    pub(crate) features: Vec<Feature>,
    /// Privileges of this process.
    pub(crate) privileges: Privileges,
    /// Settings by name, as far as they can be read.
    pub(crate) sysctls: BTreeMap<String, u64>,
    /// CPUs.
    pub(crate) cpu: Cpu,
    /// Process id of `irqbalance`, if it runs and processes can be seen.
    pub(crate) irqbalance: Option<u32>,
    /// Network devices of this network namespace.
    pub(crate) devices: Vec<Device>,
    /// Losses in the kernel, before a socket's queue and there.
    pub(crate) losses: Losses,
    /// UDP sockets of this network namespace: the requested ones, or all with losses.
    pub(crate) sockets: Vec<Socket>,
    /// The processes that have one of [`Facts::sockets`] open.
    pub(crate) programs: Vec<Program>,
    /// Lanes of running programs, as far as these have a control socket that this user may use.
    pub(crate) lanes: Vec<Lane>,
    /// True if the user named a process or a port.
    pub(crate) asked: bool,
    /// Facts that could not be read, by name: `sysfs`, `softnet`, `processes`, … with the reason.
    pub(crate) gaps: BTreeMap<String, String>,
}

/// A kernel feature that was probed.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Feature {
    /// The name, as in KERNELS.md.
    pub(crate) name: String,
    /// The reason why it cannot be used; `None` if it can.
    pub(crate) missing: Option<String>,
}

/// Privileges of this process.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Privileges {
    /// Effective user.
    pub(crate) uid: Option<u32>,
    /// Effective capabilities, one bit each, as in `/proc/self/status`.
    pub(crate) capabilities: Option<u64>,
    /// `RLIMIT_MEMLOCK` in bytes; `u64::MAX` for none.
    pub(crate) memlock: Option<u64>,
}

impl Privileges {
    pub(crate) const NET_ADMIN: u32 = 12;
    pub(crate) const NET_RAW: u32 = 13;
    pub(crate) const IPC_LOCK: u32 = 14;
    pub(crate) const SYS_ADMIN: u32 = 21;
    pub(crate) const BPF: u32 = 39;

    /// True if it has the capability; none if that is not known.
    pub(crate) fn has(&self, capability: u32) -> Option<bool> {
        self.capabilities.map(|bits| bits >> capability & 1 == 1)
    }
}

/// CPUs.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Cpu {
    /// Those that are online.
    pub(crate) online: Vec<usize>,
    /// Those that are isolated from the scheduler (`isolcpus`).
    pub(crate) isolated: Vec<usize>,
    /// Groups of CPUs that share a core (SMT).
    pub(crate) siblings: Vec<Vec<usize>>,
    /// Frequency governor of each, if any.
    pub(crate) governors: BTreeMap<usize, String>,
    /// The cpuidle governor, such as `menu`, or `haltpoll` in virtual machines.
    pub(crate) idle_governor: Option<String>,
    /// Maximum time in nanoseconds that an idle CPU of a virtual machine polls before it
    /// halts, if the kernel has `haltpoll` (Linux 5.4).
    pub(crate) halt_poll_ns: Option<u64>,
    /// Idle states of each, if the kernel has several and supports a limit of their exit latency.
    pub(crate) idle: BTreeMap<usize, Idle>,
    /// NUMA node of each, if known.
    pub(crate) nodes: BTreeMap<usize, u32>,
}

/// The idle states of a CPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Idle {
    /// Exit latency of each state in microseconds, by the kernel's table, without disabled states.
    pub(crate) latencies: Vec<u64>,
    /// Limit of the exit latency in microseconds (`pm_qos_resume_latency_us`): `0` for no limit,
    /// `n/a` for no latency at all.
    pub(crate) limit: String,
}

impl Idle {
    /// The longest exit latency that is allowed now.
    pub(crate) fn exit_latency_max(&self) -> u64 {
        let limit = match self.limit.as_str() {
            "n/a" => 0,
            limit => limit.parse().ok().filter(|limit| *limit > 0).unwrap_or(u64::MAX),
        };
        self.latencies.iter().copied().filter(|latency| *latency <= limit).max().unwrap_or(0)
    }

    /// True if the CPU polls instead of idling.
    pub(crate) fn is_polling(&self) -> bool {
        self.limit == "n/a"
    }
}

/// A lane that a thread serves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Lane {
    pub(crate) pid: u32,
    pub(crate) thread: u64,
    pub(crate) socket: String,
    pub(crate) lane: String,
    /// Its wait policy (`manylane::WaitPolicy`); none for programs under `manylane run`, which
    /// have their own way to wait.
    pub(crate) wait: Option<String>,
    /// CPUs that the thread may run on.
    pub(crate) cpus: Vec<usize>,
}

/// A network device.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) index: u32,
    /// Hardware address, in the form of `/sys/class/net/DEVICE/address`.
    pub(crate) mac: Option<String>,
    pub(crate) up: bool,
    pub(crate) loopback: bool,
    /// Kind of a virtual device, such as `veth` or `bridge`.
    pub(crate) kind: Option<String>,
    /// Driver, by ethtool.
    pub(crate) driver: Option<String>,
    /// Receive queues in use.
    pub(crate) rx_queues: Option<u32>,
    /// Current and maximum number of queues, by ethtool.
    pub(crate) channels: Option<Channels>,
    /// Descriptors of each receive ring.
    pub(crate) ring: Option<Ring>,
    /// Interrupt coalescing.
    pub(crate) coalescing: Option<Coalescing>,
    /// True if GRO is on (`rx-gro`).
    pub(crate) gro: Option<bool>,
    /// XDP features of the driver, bits of `NETDEV_XDP_ACT_*` (Linux 6.3).
    pub(crate) xdp_features: Option<u64>,
    /// Mode of an attached XDP program: `driver`, `generic`, `hardware`, `several`.
    pub(crate) xdp_attached: Option<String>,
    /// Fields of the receive hash for UDP over IPv4, bits of `RXH_*`.
    pub(crate) hash_udp4: Option<u64>,
    /// The same for IPv6.
    pub(crate) hash_udp6: Option<u64>,
    /// Receive queues that the device's table maps hashes to (RSS).
    pub(crate) rss_queues: Option<BTreeSet<u32>>,
    /// CPUs that each receive queue spreads to (RPS).
    pub(crate) rps: Option<Vec<Vec<usize>>>,
    /// Entries of the flow table of each receive queue (RFS).
    pub(crate) rfs: Option<Vec<u64>>,
    /// CPUs of each send queue (XPS).
    pub(crate) xps: Option<Vec<Vec<usize>>>,
    /// True with threaded NAPI (Linux 5.12).
    pub(crate) threaded: Option<bool>,
    /// NUMA node, if it has one.
    pub(crate) numa: Option<u32>,
    /// Interrupts of its receive queues.
    pub(crate) irqs: Vec<Irq>,
    /// Counters of the device.
    pub(crate) counters: DeviceCounters,
    /// True if a default route of this namespace uses it, or a device above it.
    pub(crate) default_route: bool,
    /// Indices of the lower devices of a bond, bridge or VLAN.
    pub(crate) below: Vec<u32>,
}

/// `ETHTOOL_MSG_CHANNELS_GET`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Channels {
    pub(crate) rx: u32,
    pub(crate) rx_max: u32,
    pub(crate) combined: u32,
    pub(crate) combined_max: u32,
}

/// `ETHTOOL_MSG_RINGS_GET`, of the receive rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Ring {
    pub(crate) rx: u32,
    pub(crate) rx_max: u32,
}

/// `ETHTOOL_MSG_COALESCE_GET`, of the receive side; `None` if the driver does not report it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Coalescing {
    /// Maximum delay of an interrupt in microseconds.
    pub(crate) rx_usecs: Option<u32>,
    /// Maximum number of frames that it waits for.
    pub(crate) rx_frames: Option<u32>,
    /// True if the driver adapts both to the load.
    pub(crate) adaptive: Option<bool>,
}

/// An interrupt.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Irq {
    pub(crate) number: u32,
    pub(crate) name: String,
    /// Affinity: CPUs that may get it.
    pub(crate) allowed: Vec<usize>,
    /// Effective affinity: CPUs that get it.
    pub(crate) effective: Vec<usize>,
}

/// The receive counters of `struct rtnl_link_stats64`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct DeviceCounters {
    pub(crate) rx_packets: u64,
    pub(crate) rx_errors: u64,
    pub(crate) rx_dropped: u64,
    pub(crate) rx_over: u64,
    pub(crate) rx_crc: u64,
    pub(crate) rx_fifo: u64,
    pub(crate) rx_missed: u64,
}

impl DeviceCounters {
    /// Frames for which the device had no room. Some drivers count a frame under several names.
    pub(crate) fn rx_overruns(&self) -> u64 {
        self.rx_missed.max(self.rx_fifo).max(self.rx_over)
    }
}

/// Counters of the kernel.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Losses {
    /// `Udp:` in `/proc/net/snmp`.
    pub(crate) udp4: Option<Udp>,
    /// `Udp6…` in `/proc/net/snmp6`.
    pub(crate) udp6: Option<Udp>,
    /// `/proc/net/softnet_stat`, a row for each CPU; machine-wide.
    pub(crate) softnet: Vec<Softnet>,
}

/// Counters of UDP, of this network namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Udp {
    pub(crate) in_datagrams: u64,
    pub(crate) in_errors: u64,
    pub(crate) receive_buffer: u64,
    pub(crate) checksum: u64,
    pub(crate) memory: u64,
}

/// Counters of a CPU's receive work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Softnet {
    pub(crate) cpu: usize,
    pub(crate) processed: u64,
    pub(crate) dropped: u64,
    pub(crate) squeezed: u64,
}

/// A UDP socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Socket {
    pub(crate) local: SocketAddr,
    /// Its peer, if it is connected.
    pub(crate) peer: Option<SocketAddr>,
    pub(crate) inode: u64,
    pub(crate) drops: u64,
    /// Bytes in the receive queue.
    pub(crate) queued: u64,
    /// Size of the receive buffer as the kernel counts, if known (`sock_diag`).
    pub(crate) buffer: Option<u64>,
}

/// A process that has one of the sockets.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Program {
    pub(crate) pid: u32,
    pub(crate) name: String,
    pub(crate) threads: u32,
    /// Inodes of the wanted sockets that it has open.
    pub(crate) sockets: Vec<u64>,
    /// Number of threads that currently wait on a socket, in a receive call or by epoll, by inode.
    pub(crate) waiting: BTreeMap<u64, u32>,
    /// True if the preload library is loaded in it.
    pub(crate) on_lanes: bool,
    /// The reason why `manylane run` could not give it lanes; `None` if it could.
    pub(crate) beyond: Option<String>,
}

impl Facts {
    /// Records why the facts called `name` could not be read.
    pub(crate) fn note_gap(&mut self, name: &str, why: impl Into<String>) {
        self.gaps.insert(name.into(), why.into());
    }

    /// The period of the losses, in words.
    pub(crate) fn describe_period(&self) -> String {
        match (self.watched, self.uptime) {
            (Some(seconds), _) => format!("in the last {seconds:.1} seconds"),
            (None, Some(uptime)) => format!("since boot, {} ago", duration(uptime)),
            (None, None) => "since boot".into(),
        }
    }

    /// Subtracts earlier counters, which leaves the losses between the two.
    pub(crate) fn delta_since(mut self, before: &Facts, seconds: f64) -> Facts {
        macro_rules! subtract {
            ($now:expr, $before:expr, $($field:ident)+) => {
                $($now.$field = $now.$field.saturating_sub($before.$field);)+
            };
        }
        let now = &mut self.losses;
        for (now, before) in [(&mut now.udp4, before.losses.udp4), (&mut now.udp6, before.losses.udp6)] {
            if let (Some(now), Some(before)) = (now.as_mut(), before) {
                subtract!(now, before, in_datagrams in_errors receive_buffer checksum memory);
            }
        }
        for row in &mut now.softnet {
            if let Some(before) = before.losses.softnet.iter().find(|before| before.cpu == row.cpu) {
                subtract!(row, before, processed dropped squeezed);
            }
        }
        for device in &mut self.devices {
            if let Some(before) = before.devices.iter().find(|before| before.index == device.index) {
                let (now, before) = (&mut device.counters, &before.counters);
                subtract!(now, before, rx_packets rx_errors rx_dropped rx_over rx_crc rx_fifo rx_missed);
            }
        }
        for socket in &mut self.sockets {
            if let Some(before) = before.sockets.iter().find(|before| before.inode == socket.inode) {
                subtract!(socket, before, drops);
            }
        }
        self.watched = Some(seconds);
        self
    }

    /// A setting.
    pub(crate) fn sysctl(&self, name: &str) -> Option<u64> {
        self.sysctls.get(name).copied()
    }

    /// The processes that have a socket open.
    pub(crate) fn owners(&self, inode: u64) -> impl Iterator<Item = &Program> {
        self.programs.iter().filter(move |program| program.sockets.contains(&inode))
    }
}

/// Seconds in words.
fn duration(seconds: f64) -> String {
    match seconds as u64 {
        0..120 => format!("{seconds:.0} seconds"),
        120..7200 => format!("{:.0} minutes", seconds / 60.0),
        7200..172_800 => format!("{:.0} hours", seconds / 3600.0),
        _ => format!("{:.0} days", seconds / 86400.0),
    }
}
