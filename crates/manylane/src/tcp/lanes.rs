//! Opens the lanes of a group.

use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use manylane_bpf::abi;
use manylane_sys::raw_ip::IcmpErrors;
use manylane_sys::{random, sock};
use manylane_tcp::congestion::NewController;
use manylane_tcp::{Config as StackConfig, Secret, Stack};

use super::group::{Group, lane_id};
use super::handover::Handover;
use super::lane::{Icmp, TcpLane};
use super::source_ports::SourcePorts;
use crate::config::{Builder, Config, Engine};
use crate::error::{Error, ErrorKind, Result};
use crate::io::packets::PacketQueues;
use crate::io::{self, EngineShared as _, Ports, XdpControl};

/// Pairs of buffers of a lane at least: what one that forwards between connections needs.
const BUFFERS_MIN: usize = 3;
/// Entries of each ring by default, twice as many as for UDP: the sender of a segment for which a
/// ring had no room sends it again no sooner than after 200 ms.
const RING: u32 = 4096;

/// Options of TCP lanes; [`open`](Self::open) checks them together.
#[derive(Clone, Debug)]
pub struct TcpBuilder {
    /// The options of engine `xdp`.
    base: Builder,
    /// With their congestion control, if it is not that of `stack`.
    listeners: Vec<(SocketAddr, Option<NewController>)>,
    source_ports: Option<RangeInclusive<u16>>,
    lanes: Option<usize>,
    stack: StackConfig,
    buffer_memory: Option<usize>,
}

impl TcpBuilder {
    /// Lanes that do not listen or connect yet.
    #[must_use]
    pub fn new() -> Self {
        let mut base = Builder::at((Ipv4Addr::UNSPECIFIED, 0).into());
        base.xdp_ring(RING);
        Self {
            base,
            listeners: Vec::new(),
            source_ports: None,
            lanes: None,
            stack: StackConfig::default(),
            buffer_memory: None,
        }
    }

    /// Accepts connections to an address; port 0 lets the kernel pick one. A wildcard stands for
    /// all addresses of its family. Can be called several times.
    ///
    /// # Errors
    /// [`ErrorKind::Address`] if the address does not parse or resolve.
    pub fn listen(&mut self, addr: impl ToSocketAddrs) -> Result<&mut Self> {
        self.listeners.push((Builder::resolve(addr)?, None));
        Ok(self)
    }

    /// The same, with a congestion control of its own.
    ///
    /// # Errors
    /// As those of [`listen`](Self::listen).
    pub fn listen_with(&mut self, addr: impl ToSocketAddrs, controller: NewController) -> Result<&mut Self> {
        self.listeners.push((Builder::resolve(addr)?, Some(controller)));
        Ok(self)
    }

    /// Ports that connections to others come from, in whole blocks of 256, at least one for each
    /// lane. To one peer's port a lane can have as many connections as it has ports. The kernel
    /// hands none of them out to programs. Default: none, and [`TcpLane::connect`] fails. 61184 to
    /// 65535 are free on most machines.
    pub fn source_ports(&mut self, ports: RangeInclusive<u16>) -> &mut Self {
        self.source_ports = Some(ports);
        self
    }

    /// Number of lanes, at most one for each queue. Default: one for each CPU that the process may
    /// use, but not more than queues.
    pub fn lanes(&mut self, lanes: usize) -> &mut Self {
        self.lanes = Some(lanes);
        self
    }

    /// Settings of each lane's stack: buffers, time-outs, limits, congestion control. The `mtu`
    /// is lowered to that of the devices.
    pub fn stack(&mut self, config: StackConfig) -> &mut Self {
        self.stack = config;
        self
    }

    /// Bytes of the connections' buffers, of all lanes together; each lane has an equal share. It
    /// takes the place of the `buffers_max` of [`stack`](Self::stack). At least three pairs of
    /// buffers for each lane.
    pub fn buffer_memory(&mut self, bytes: usize) -> &mut Self {
        self.buffer_memory = Some(bytes);
        self
    }

    /// Delay before a [`wait`](TcpLane::wait) that finds nothing sleeps, so that one wake-up serves
    /// a larger batch. Applies only while the batches after a delay show that it saves wake-ups.
    /// Zero turns it off. Default: up to 100 µs, by the load of the CPUs that the lane may run on,
    /// as that of UDP lanes in [`serve`](crate::Socket::serve): see [`Builder::rx_coalesce`].
    pub fn rx_coalesce(&mut self, delay: Duration) -> &mut Self {
        self.base.rx_coalesce(delay);
        self
    }

    /// Options of engine `xdp`: devices, generic mode, rings, limits and prefixes. Those of UDP
    /// sockets have no effect. Default of [`xdp_ring`](Builder::xdp_ring): 4096.
    pub fn xdp(&mut self, change: impl FnOnce(&mut Builder)) -> &mut Self {
        change(&mut self.base);
        self
    }

    /// Attaches the program to the devices, and opens the lanes. Each may be moved to a thread of
    /// its own, and should be at once: its connections wait until then.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for options out of range, [`ErrorKind::InUse`] if an address or a
    /// queue is in use, [`ErrorKind::Permission`] without CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF,
    /// [`ErrorKind::Unsupported`] without a device for XDP; those of the system.
    pub fn open(&mut self) -> Result<Vec<TcpLane>> {
        if self.listeners.is_empty() && self.source_ports.is_none() {
            return Err(Error::new(ErrorKind::Config, "TCP lanes need listen() or source_ports()"));
        }
        let config = Config { engine: Engine::Xdp, ..self.base.check()? };
        io::check(&config)?;
        let sources = self.source_ports.as_ref().map(SourcePorts::reserve).transpose()?.unwrap_or_default();
        let mut listeners = Vec::new();
        let mut held = Vec::new();
        for (listener, controller) in &self.listeners {
            let failed = |err| Error::system(format!("cannot listen at {listener}"), err);
            let fd = sock::hold_tcp_address(listener).map_err(failed)?;
            let local = sock::local_addr(fd.as_fd()).map_err(failed)?;
            listeners.push((local, controller.unwrap_or(self.stack.controller)));
            held.push(fd);
        }
        let addrs = listeners.iter().map(|(local, _)| *local).collect();
        let ports = Ports::Tcp { listeners: addrs, source_blocks: sources.blocks.clone() };
        let control = XdpControl::open(&config, ports)?;
        let lanes = self.lane_count(&control, &sources)?;
        let (start, blocks) = (Instant::now(), sources.blocks.clone());
        let stack = StackConfig {
            mtu: self.stack.mtu.min(control.packet_len_max()),
            buffers_max: self.buffers_max(lanes)?,
            ..self.stack.clone()
        };
        let secret = Secret::new(random_bytes()?);
        let group = Arc::new(Group {
            control: Arc::clone(&control),
            start,
            controller: stack.controller,
            rx_coalesce: config.rx_coalesce,
            listeners,
            held,
            sources,
        });
        let handovers = Handover::group(lanes, &blocks)?;
        let lanes: Result<Vec<TcpLane>> = handovers
            .into_iter()
            .map(|handover| open_lane(&group, &stack, secret, handover, lanes))
            .collect();
        let lanes = lanes?;
        control.start()?;
        control.check_all_queues_served()?;
        Ok(lanes)
    }

    /// Pairs of buffers of a lane at most.
    fn buffers_max(&self, lanes: usize) -> Result<usize> {
        let Some(bytes) = self.buffer_memory else { return Ok(self.stack.buffers_max) };
        // The stack checks the sizes later.
        let pair = self.stack.receive_buffer.saturating_add(self.stack.send_buffer).max(1);
        let pairs = bytes / lanes.max(1) / pair;
        if pairs < BUFFERS_MIN {
            let least = pair.saturating_mul(BUFFERS_MIN).saturating_mul(lanes);
            let message = format!(
                "invalid buffer memory {bytes}: expected {least} bytes or more, {BUFFERS_MIN} pairs of buffers for each of {lanes} lanes"
            );
            return Err(Error::new(ErrorKind::Config, message));
        }
        Ok(pairs)
    }

    /// The number of lanes, which each need a queue, and a block of source ports if there are any.
    fn lane_count(&self, control: &XdpControl, sources: &SourcePorts) -> Result<usize> {
        let queues = control.queue_count();
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let lanes = self.lanes.unwrap_or(cpus.min(queues)).max(1);
        let max = queues.min(abi::LANES_MAX);
        if !(1..=max).contains(&lanes) || self.lanes == Some(0) {
            let message =
                format!("invalid lanes {lanes}: expected 1 to {max}, one for each queue of a device");
            return Err(Error::new(ErrorKind::Config, message));
        }
        let blocks = sources.blocks.len();
        if self.source_ports.is_some() && blocks < lanes {
            let message = format!(
                "source_ports: {blocks} blocks of {} ports for {lanes} lanes: expected one for each",
                abi::PORT_BLOCK
            );
            return Err(Error::new(ErrorKind::Config, message));
        }
        Ok(lanes)
    }
}

impl Default for TcpBuilder {
    fn default() -> Self {
        Self::new()
    }
}

fn random_bytes<const N: usize>() -> Result<[u8; N]> {
    random::bytes().map_err(|err| Error::system("reading random bytes", err))
}

fn open_lane(
    group: &Arc<Group>,
    config: &StackConfig,
    secret: Secret,
    handover: Handover,
    lanes: usize,
) -> Result<TcpLane> {
    let mut stack = Stack::new(config.clone(), secret, group.now())
        .map_err(|err| Error::new(ErrorKind::Config, err.to_string()))?;
    for (local, controller) in &group.listeners {
        stack
            .listen_with(*local, *controller)
            .map_err(|err| Error::new(ErrorKind::Config, err.to_string()))?;
    }
    let failed = |err| Error::system("cannot open a raw ICMP socket (needs CAP_NET_RAW)", err);
    let icmp = Icmp { v4: IcmpErrors::ipv4().map_err(failed)?, v6: IcmpErrors::ipv6().map_err(failed)? };
    let mut others = vec![handover.event().as_fd(), icmp.v4.as_fd()];
    others.extend(icmp.v6.as_ref().map(AsFd::as_fd));
    let packets = PacketQueues::new(Arc::clone(&group.control), (lane_id(handover.own()), lanes), &others)?;
    let blocks = group.sources.of_lane(handover.own(), lanes);
    let next_port = usize::from(u16::from_ne_bytes(random_bytes()?));
    Ok(TcpLane::new(Arc::clone(group), packets, stack, handover, icmp, (blocks, next_port)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_share_the_memory_for_buffers() {
        let mut builder = TcpBuilder::new();
        assert_eq!(builder.buffers_max(2).unwrap(), StackConfig::default().buffers_max);
        builder.buffer_memory(1 << 20);
        assert_eq!((builder.buffers_max(1).unwrap(), builder.buffers_max(2).unwrap()), (8, 4));
        let err = builder.buffers_max(5).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Config);
        assert!(err.to_string().contains("expected 1966080 bytes or more"), "{err}");
    }
}
