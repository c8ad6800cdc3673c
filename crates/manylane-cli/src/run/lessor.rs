//! Engine `xdp` for programs that are run: this process opens the devices, and leases the program
//! their queues.
//!
//! The program, which may be an ordinary user's, has in its environment how its library asks. A
//! thread of this process answers. When this process ends, however it ends, the kernel has all
//! frames again.

use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::thread;

use anyhow::{Context, Result};
use manylane::{Engine, FilterHandle, LeasedRings, Lessor, Rule};
use manylane_sys::device::driver;
use manylane_sys::lease;

use crate::args::RunArgs;
use crate::output;
use crate::tune::protected_links::ProtectedLinks;

/// Devices that are open.
pub(super) struct OpenDevices(Lessor);

/// Whether the program is to have queues.
pub(super) fn is_requested(args: &RunArgs) -> bool {
    args.engine == Some(Engine::Xdp)
}

/// Opens the devices, and tells the program by its environment.
///
/// # Errors
/// What is in the way, and what to change.
pub(super) fn open(args: &RunArgs, command: &mut Command) -> Result<OpenDevices> {
    let names = args.interface.as_deref();
    // Who names a device has decided.
    let links = if names.is_none() { ProtectedLinks::detect()? } else { ProtectedLinks::default() };
    let lessor = Lessor::open(names, |device| skip_reason(&links, device)).context("engine xdp")?;
    let filter = &args.filter;
    lessor.filter().change(|wanted| {
        wanted.set_limits(&filter.limit)?;
        for (prefixes, rule) in [(&filter.allow, Rule::Allow), (&filter.deny, Rule::Deny)] {
            prefixes.iter().try_for_each(|prefix| wanted.set_rule(*prefix, Some(rule)))?;
        }
        Ok(())
    })?;
    command.env(lease::TOKEN_ENV_VAR, lessor.lease_token());
    output::eprint_line(&format!(
        "manylane: engine xdp: the program may send any frame by {}, past the firewall, as with CAP_NET_RAW (docs/run.md)",
        lessor.devices().join(", ")
    ));
    Ok(OpenDevices(lessor))
}

/// Why a device is not to be touched: most drivers of network cards take the link down for a moment
/// when a program comes.
fn skip_reason(links: &ProtectedLinks, device: &str) -> Option<String> {
    /// Drivers that have no link to take down.
    const LINKLESS_DRIVERS: [&str; 6] = ["virtio_net", "ena", "gve", "hv_netvsc", "mana", "vmxnet3"];
    let why = links.reason(device)?;
    let is_virtual = driver(device).is_ok_and(|driver| LINKLESS_DRIVERS.contains(&driver.as_str()));
    (!is_virtual).then(|| format!("an XDP program may take the link down for a moment, and {why}"))
}

impl OpenDevices {
    /// What the program is not to be bothered with.
    pub(super) fn filter(&self) -> FilterHandle {
        self.0.filter()
    }

    /// How full the rings are that are leased.
    pub(super) fn rings(&self) -> LeasedRings {
        self.0.rings()
    }

    /// Lends from now on; the program has been started.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(super) fn start(self) -> Result<()> {
        let Self(lessor) = self;
        let run = move || {
            static NEVER_STOP: AtomicBool = AtomicBool::new(false);
            if let Err(err) = lessor.run(&NEVER_STOP) {
                output::eprint_line(&format!("manylane: no queues are leased any more: {err}"));
            }
        };
        thread::Builder::new().name("manylane-lessor".into()).spawn(run).context("engine xdp")?;
        Ok(())
    }
}
