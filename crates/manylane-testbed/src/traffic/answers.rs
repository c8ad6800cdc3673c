//! Answers to generated requests, counted where the requests came from, and dropped there at once: neither a queue
//! that overflows nor a client that is late makes an answer look lost, and the server hears of no closed port.
//!
//! Between hosts an XDP program counts and drops; over loopback the sender's sockets refuse everything, which the
//! kernel counts.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, anyhow};
use aya::maps::{MapData, PerCpuArray};
use aya::programs::{Xdp, XdpMode};
use aya::{Ebpf, EbpfLoader};

use super::portable::Flows;
use crate::host::Host;

/// Counts answers as long as a clone of it lives.
#[derive(Clone)]
pub struct Answers {
    by: By,
}

#[derive(Clone)]
enum By {
    Devices(Arc<Devices>),
    Flows(Kept),
}

/// What a sender on loopback keeps.
pub(crate) type Kept = Arc<Mutex<KeptFlows>>;

/// The flows of the last target, and what came back to those before.
#[derive(Default)]
pub(crate) struct KeptFlows {
    flows: Option<Arc<Flows>>,
    before: u64,
}

impl KeptFlows {
    pub(crate) fn flows(&self) -> Option<Arc<Flows>> {
        self.flows.clone()
    }

    /// Counts the answers to `flows` from here on.
    pub(crate) fn replace(&mut self, flows: Arc<Flows>) -> Result<()> {
        flows.refuse_answers()?;
        self.before = self.count()?;
        self.flows = Some(flows);
        Ok(())
    }

    fn count(&self) -> Result<u64> {
        Ok(self.before + self.flows.as_ref().map_or(Ok(0), |flows| flows.answers())?)
    }
}

/// A program on the devices of a host.
struct Devices {
    counts: PerCpuArray<MapData, u64>,
    /// Holds the program, and with it its links.
    _program: Ebpf,
}

impl Answers {
    /// Counts and drops what comes from `port` to `host` over `links`.
    ///
    /// # Errors
    /// When eBPF cannot be loaded, or one of the devices has an XDP program already.
    pub fn over(host: &Host, links: &[usize], port: u16) -> Result<Self> {
        let object = manylane_bpf::object("answers").map_err(|why| anyhow!(why))?;
        let mut ebpf = EbpfLoader::new()
            .btf(None)
            .override_global("ml_port", &port, true)
            .load(object)
            .context("loading the counter of answers")?;
        let counts = ebpf.take_map("ml_answers").context("no map ml_answers")?;
        let program: &mut Xdp =
            ebpf.program_mut("ml_count_answers").context("no program ml_count_answers")?.try_into()?;
        program.load().context("loading the counter of answers (needs CAP_BPF and CAP_NET_ADMIN)")?;
        host.run(|| {
            for &link in links {
                let device = host.device(link);
                let index = manylane_sys::netns::device_index(device)?;
                program
                    .attach_to_if_index(index, XdpMode::Driver)
                    .with_context(|| format!("attaching the counter of answers to {device}"))?;
            }
            anyhow::Ok(())
        })?;
        let devices = Devices { counts: counts.try_into()?, _program: ebpf };
        Ok(Self { by: By::Devices(Arc::new(devices)) })
    }

    /// Counts what comes back to the flows that are in `kept` when it is asked.
    pub(crate) fn of_flows(kept: Kept) -> Self {
        Self { by: By::Flows(kept) }
    }

    /// Answers so far.
    ///
    /// # Errors
    /// When the kernel does not say.
    pub fn count(&self) -> Result<u64> {
        match &self.by {
            By::Devices(devices) => {
                let counts = devices.counts.get(&0, 0).context("reading the count of answers")?;
                Ok(counts.iter().sum())
            }
            By::Flows(kept) => kept.lock().unwrap_or_else(PoisonError::into_inner).count(),
        }
    }
}
