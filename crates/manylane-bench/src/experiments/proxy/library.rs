//! A proxy of the library, on threads of this process: options that `manylane proxy` decides by
//! itself can be changed here.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use manylane::tcp::{StackConfig, TcpBuilder};
use manylane_measure::machine;
use manylane_proxy::lane::ProxyLane;
use manylane_proxy::{KernelLane, LaneCounters, Options, Proxy, Shared};
use manylane_sys::cpu;

use super::bed::{Bed, CLIENT_LINK, SERVER_LINK};

/// Longest time without bytes: longer than any measurement.
const IDLE_TIMEOUT: Duration = Duration::from_secs(3600);

/// What is under the lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneStack {
    /// Sockets of the kernel.
    Kernel,
    /// A stack for each lane, over AF_XDP.
    Xdp {
        /// Frames that a lane receives or sends at a time, at most; none: as by default.
        batch: Option<usize>,
        /// Bytes of each connection's receive buffer and send buffer; none: as by default.
        buffer: Option<usize>,
        /// A busy lane delays for larger batches, as by default.
        delays: bool,
    },
}

/// Options of a proxy inside of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LibraryProxy {
    /// What is under the lanes.
    pub stack: LaneStack,
    /// Each lane is pinned to a CPU of the proxy. Otherwise the scheduler picks among all CPUs that
    /// this process may use.
    pub is_pinned: bool,
    /// Checksums and segmentation by the devices of all hosts.
    pub offloads: bool,
}

/// Lanes that serve, until they are dropped.
pub(super) struct RunningLanes {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    ids: Vec<i32>,
}

impl RunningLanes {
    /// Ids of the threads.
    pub(super) fn ids(&self) -> &[i32] {
        &self.ids
    }

    fn add(&mut self, bed: &Bed, cpus: Vec<usize>, lane: impl ProxyLane + Send + 'static) -> Result<()> {
        let (started, id) = std::sync::mpsc::channel();
        let shared = Arc::clone(&self.shared);
        let serve = move || {
            // The receiver is gone only if the thread was not started.
            _ = started.send(cpu::set_affinity(&cpus).map(|()| cpu::thread_id()));
            // Clients of a lane that fails see that connections break, and report it.
            _ = Proxy::new(lane, shared, Arc::new(LaneCounters::default())).run();
        };
        self.threads.push(bed.proxy().spawn("proxy-lane", serve).context("cannot start a lane")?);
        let id = id.recv().context("a lane has ended")?;
        self.ids.push(id.context("cannot set the CPUs of a lane")?);
        Ok(())
    }
}

impl LibraryProxy {
    /// Starts a lane for each of `cpus`.
    pub(super) fn start(
        &self,
        bed: &Bed,
        cpus: &[usize],
        listen: SocketAddr,
        server: SocketAddr,
    ) -> Result<RunningLanes> {
        // The XDP program changes what devices can be told, so that this comes first.
        bed.set_offloads(self.offloads)?;
        let options =
            Options { drain_timeout: Duration::ZERO, idle_timeout: IDLE_TIMEOUT, ..Options::default() };
        let shared = Shared::new(options, &[server]);
        let mut running = RunningLanes { shared, threads: Vec::new(), ids: Vec::new() };
        let cpus_of = |cpu: usize| if self.is_pinned { vec![cpu] } else { machine::allowed_cpus() };
        match self.stack {
            LaneStack::Kernel => {
                for &cpu in cpus {
                    let lane = bed.proxy().run(|| KernelLane::open(&[listen])).context("cannot listen")?;
                    running.add(bed, cpus_of(cpu), lane)?;
                }
            }
            LaneStack::Xdp { batch, buffer, delays } => {
                let mut builder = TcpBuilder::new();
                builder.listen(listen)?.source_ports(2048..=65_535).lanes(cpus.len());
                let stack = StackConfig::default();
                builder.stack(StackConfig {
                    receive_buffer: buffer.unwrap_or(stack.receive_buffer),
                    send_buffer: buffer.unwrap_or(stack.send_buffer),
                    ..stack
                });
                if !delays {
                    builder.rx_coalesce(Duration::ZERO);
                }
                let devices = [CLIENT_LINK, SERVER_LINK].map(|link| bed.proxy().device(link).to_owned());
                builder.xdp(|xdp| {
                    xdp.xdp_devices(devices);
                    batch.map(|batch| xdp.batch(batch));
                });
                let lanes = bed.proxy().run(|| builder.open())?;
                for (lane, &cpu) in lanes.into_iter().zip(cpus) {
                    running.add(bed, cpus_of(cpu), lane)?;
                }
            }
        }
        Ok(running)
    }
}

impl Drop for RunningLanes {
    fn drop(&mut self) {
        self.shared.stop();
        for thread in self.threads.drain(..) {
            // A lane that has panicked has ended.
            _ = thread.join();
        }
    }
}
