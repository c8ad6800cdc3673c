//! One round of one experiment, and the set-ups for it: loopback and testbeds, created when a
//! part first needs them and kept for later parts.

use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, anyhow};
use manylane_bench::experiments::proxy::trial::ProxyHosts;
use manylane_bench::{Controller, Setup};

use crate::congestion_hosts::CongestionHosts;
use crate::row::Row;
use crate::settings::Scale;

/// The work of a part.
type PartFn = Box<dyn Fn(&mut Setups, &AtomicBool) -> Result<Vec<Row>>>;

/// One round of one experiment.
pub struct Part {
    /// Its name in the state file: unique among the parts of a run.
    pub id: String,
    pub(super) run: PartFn,
}

impl Part {
    pub(super) fn new(
        id: String,
        work: impl Fn(&mut Setups, &AtomicBool) -> Result<Vec<Row>> + 'static,
    ) -> Self {
        Self { id, run: Box::new(work) }
    }
}

/// Runs a benchmark as a part: it may be stopped, and the bar shows parts.
pub(super) struct SilentController<'a>(pub(super) &'a AtomicBool);

impl Controller for SilentController<'_> {
    fn progress(&mut self, _done: f64, _what: &str) {}

    fn stop(&self) -> &AtomicBool {
        self.0
    }
}

/// The set-ups, and the scale of the run.
pub(crate) struct Setups {
    /// The scale of the run.
    pub scale: Scale,
    loopback: Option<Setup>,
    /// Or the reason why there is none.
    testbed: Option<Result<Setup, String>>,
    two_links: Option<Result<Setup, String>>,
    /// By the lanes of a proxy, from one on.
    proxy_hosts: [Option<Result<ProxyHosts, String>>; PROXY_LANES_MAX],
    congestion_hosts: Option<Result<CongestionHosts, String>>,
}

/// Lanes of a proxy at most.
const PROXY_LANES_MAX: usize = 2;

impl Setups {
    /// No set-up yet.
    pub(crate) fn new(scale: Scale) -> Self {
        Self {
            scale,
            loopback: None,
            testbed: None,
            two_links: None,
            proxy_hosts: [None, None],
            congestion_hosts: None,
        }
    }

    /// Loopback.
    pub(crate) fn loopback(&mut self) -> &mut Setup {
        self.loopback.get_or_insert_with(|| Setup::loopback(None))
    }

    /// Two hosts.
    ///
    /// # Errors
    /// The reason why there are none, the same each time.
    pub(crate) fn testbed(&mut self) -> Result<&mut Setup> {
        get_or_create(&mut self.testbed, || Setup::testbed(None, 1))
    }

    /// Two hosts with two links, each with addresses of its own.
    pub(crate) fn two_links(&mut self) -> Result<&mut Setup> {
        get_or_create(&mut self.two_links, || Setup::testbed(None, 2))
    }

    /// A client, a link and servers with each congestion control.
    pub(crate) fn congestion_hosts(&mut self) -> Result<&mut CongestionHosts> {
        get_or_create(&mut self.congestion_hosts, CongestionHosts::new)
    }

    /// Three hosts, with a proxy of one or two lanes in the middle.
    pub(crate) fn proxy_hosts(&mut self, lanes: usize) -> Result<&mut ProxyHosts> {
        let place = self.proxy_hosts.get_mut(lanes.wrapping_sub(1));
        let place = place.with_context(|| format!("no hosts for {lanes} lanes"))?;
        get_or_create(place, || {
            let program = std::env::current_exe().context("cannot find this program")?;
            ProxyHosts::new(lanes, program)
        })
    }
}

fn get_or_create<T>(
    place: &mut Option<Result<T, String>>,
    create: impl FnOnce() -> Result<T>,
) -> Result<&mut T> {
    let made = place.get_or_insert_with(|| create().map_err(|err| format!("{err:#}")));
    made.as_mut().map_err(|why| anyhow!("{why}"))
}
