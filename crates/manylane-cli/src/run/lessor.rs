//! Engine `xdp` for `manylane run`: this process opens the devices, and leases their queues to the
//! program.
//!
//! The program may run as an ordinary user. Its library finds the lessor by an environment
//! variable. A thread of this process answers its requests. However this process ends, all frames
//! then go to the kernel again.

use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::thread;

use anyhow::{Context, Result};
use manylane::{Engine, Filter, FilterHandle, LeasedRings, Lessor};
use manylane_ipc::lease;
use manylane_sys::device::driver;

use crate::args::RunArgs;
use crate::tune::protected_links::ProtectedLinks;
use crate::{logger, output};

/// The open devices.
pub(super) struct OpenDevices(Lessor);

/// True if the program gets queues.
pub(super) fn is_requested(args: &RunArgs) -> bool {
    args.common.engine == Some(Engine::Xdp)
}

/// Opens the devices with this filter, and sets the environment variable of the program.
///
/// # Errors
/// The obstacle, and what to change.
pub(super) fn open(args: &RunArgs, filter: Filter, command: &mut Command) -> Result<OpenDevices> {
    let names = Some(&args.common.interface[..]).filter(|names| !names.is_empty());
    // A device that is named is used in any case.
    let links = if names.is_none() { ProtectedLinks::detect()? } else { ProtectedLinks::default() };
    let lessor = Lessor::open(names, |device| skip_reason(&links, device)).context("engine xdp")?;
    lessor.filter().change(|wanted| {
        *wanted = filter;
        Ok(())
    })?;
    command.env(lease::TOKEN_ENV_VAR, lessor.lease_token());
    output::eprint_line(&format!(
        "manylane: engine xdp: the program can send any frame through {}, past the firewall, as with CAP_NET_RAW (docs/run.md)",
        lessor.devices().join(", ")
    ));
    Ok(OpenDevices(lessor))
}

/// The reason to skip a device: most NIC drivers take the link down for a moment when a program is
/// attached.
fn skip_reason(links: &ProtectedLinks, device: &str) -> Option<String> {
    /// Drivers that keep the link up.
    const LINKLESS_DRIVERS: [&str; 6] = ["virtio_net", "ena", "gve", "hv_netvsc", "mana", "vmxnet3"];
    let why = links.reason(device)?;
    let is_virtual = driver(device).is_ok_and(|driver| LINKLESS_DRIVERS.contains(&driver.as_str()));
    (!is_virtual).then(|| format!("attaching an XDP program may take the link down for a moment, and {why}"))
}

impl OpenDevices {
    /// The filter of the program's sockets.
    pub(super) fn filter(&self) -> FilterHandle {
        self.0.filter()
    }

    /// The fill of the leased rings.
    pub(super) fn rings(&self) -> LeasedRings {
        self.0.rings()
    }

    /// Leases queues from now on; the program has been started.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(super) fn start(self) -> Result<()> {
        let Self(lessor) = self;
        let run = move || {
            static NEVER_STOP: AtomicBool = AtomicBool::new(false);
            if let Err(err) = lessor.run(&NEVER_STOP) {
                output::eprint_line(&format!("manylane: engine xdp: queues are no longer leased: {err}"));
            }
        };
        // The program may stop the terminal, and the lessor logs.
        let no_thread = "engine xdp: cannot start a thread (raise ulimit -u)";
        logger::print_on_thread().context(no_thread)?;
        thread::Builder::new().name("manylane-lessor".into()).spawn(run).context(no_thread)?;
        Ok(())
    }
}
