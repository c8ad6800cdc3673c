//! Counts replies to generated requests at the sending host, and drops them at once. So neither a
//! full queue nor a slow client makes a reply look lost, and the server gets no ICMP error for a
//! closed port.
//!
//! Between hosts a program on the sender's device counts and drops ([`CountHook`]); over loopback
//! the sender's sockets refuse everything, which the kernel counts.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use aya::maps::{MapData, PerCpuArray};
use aya::programs::{SchedClassifier, TcAttachType, Xdp, XdpMode, tc};
use aya::{Ebpf, EbpfLoader};
use manylane_measure::named_enum;
use manylane_measure::sockets::Flows;

use crate::host::Host;

named_enum! {
    /// Hook that counts and drops replies between hosts. A virtual link delivers a reply in the
    /// context of the sending thread, which pays for all work up to there.
    #[derive(Default)]
    pub enum CountHook {
        /// At the start of the other host's stack (tc, Linux 6.6 or a `clsact` qdisc): the device
        /// passes on the sender's own buffer.
        #[default]
        Stack = "stack",
        /// In the other host's driver (XDP): the device first copies each reply into a page of its
        /// own.
        Driver = "driver",
    }
}

/// Counts replies as long as a clone of it lives.
#[derive(Clone)]
pub struct ReplyCounter {
    backend: Backend,
}

#[derive(Clone)]
enum Backend {
    Devices(Arc<DeviceCounter>),
    Flows(SharedFlows),
}

/// State of a sender on loopback.
pub type SharedFlows = Arc<Mutex<ReplyFlows>>;

/// The flows of the last target, and the count of replies to earlier ones.
#[derive(Debug, Default)]
pub struct ReplyFlows {
    flows: Option<Arc<Flows>>,
    prior_count: u64,
}

impl ReplyFlows {
    /// The flows of the last target.
    #[must_use]
    pub fn flows(&self) -> Option<Arc<Flows>> {
        self.flows.clone()
    }

    /// Counts the replies to `flows` from here on.
    ///
    /// # Errors
    /// Fails if the kernel refuses a filter or the count.
    pub fn replace(&mut self, flows: Arc<Flows>) -> Result<()> {
        flows.drop_replies()?;
        self.prior_count = self.count()?;
        self.flows = Some(flows);
        Ok(())
    }

    fn count(&self) -> Result<u64> {
        Ok(self.prior_count + self.flows.as_ref().map_or(Ok(0), |flows| flows.reply_count())?)
    }
}

/// A program on the devices of a host.
struct DeviceCounter {
    counts: PerCpuArray<MapData, u64>,
    /// Keeps the program loaded, and with it its links.
    _program: Ebpf,
}

impl ReplyCounter {
    /// Counts and drops datagrams from `port` to `host` over `links`, at the place that `counter`
    /// says.
    ///
    /// # Errors
    /// Fails if eBPF cannot be loaded, or, in the driver, one of the devices has an XDP program
    /// already.
    pub fn attach(host: &Host, links: &[usize], port: u16, counter: CountHook) -> Result<Self> {
        let mut ebpf = EbpfLoader::new()
            .btf(None)
            .override_global("ml_port", &port, true)
            .load(manylane_bpf::REPLIES)
            .context("loading the reply counter")?;
        let counts = ebpf.take_map("ml_replies").context("no map ml_replies")?;
        let devices: Vec<&str> = links.iter().map(|&link| host.device(link)).collect();
        host.run(|| match counter {
            CountHook::Driver => attach_xdp(&mut ebpf, &devices),
            CountHook::Stack => attach_tc(&mut ebpf, &devices),
        })?;
        let devices = DeviceCounter { counts: counts.try_into()?, _program: ebpf };
        Ok(Self { backend: Backend::Devices(Arc::new(devices)) })
    }

    /// Counts the replies to the flows that are in `kept` at the time of the query.
    #[must_use]
    pub fn from_flows(kept: SharedFlows) -> Self {
        Self { backend: Backend::Flows(kept) }
    }

    /// Number of replies so far.
    ///
    /// # Errors
    /// Fails if the counters cannot be read.
    pub fn count(&self) -> Result<u64> {
        match &self.backend {
            Backend::Devices(devices) => {
                let counts = devices.counts.get(&0, 0).context("reading the reply counter")?;
                Ok(counts.iter().sum())
            }
            Backend::Flows(kept) => kept.lock().unwrap_or_else(PoisonError::into_inner).count(),
        }
    }
}

const LOAD_CONTEXT: &str = "loading the reply counter (needs CAP_BPF and CAP_NET_ADMIN)";

/// In the namespace of the devices.
fn attach_xdp(ebpf: &mut Ebpf, devices: &[&str]) -> Result<()> {
    let program: &mut Xdp =
        ebpf.program_mut("ml_count_replies").context("no program ml_count_replies")?.try_into()?;
    program.load().context(LOAD_CONTEXT)?;
    for device in devices {
        let index = manylane_sys::netns::device_index(device)?;
        program
            .attach_to_if_index(index, XdpMode::Driver)
            .with_context(|| format!("attaching the reply counter to {device}"))?;
    }
    Ok(())
}

/// As above.
fn attach_tc(ebpf: &mut Ebpf, devices: &[&str]) -> Result<()> {
    let program: &mut SchedClassifier =
        ebpf.program_mut("ml_count_in_stack").context("no program ml_count_in_stack")?.try_into()?;
    program.load().context(LOAD_CONTEXT)?;
    for device in devices {
        // Before Linux 6.6 a program needs a qdisc, which may exist already.
        let _ = tc::qdisc_add_clsact(device);
        program
            .attach(device, TcAttachType::Ingress)
            .with_context(|| format!("attaching the reply counter to {device}"))?;
    }
    Ok(())
}
