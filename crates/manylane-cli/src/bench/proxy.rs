//! `manylane bench proxy`.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use manylane_bench::experiments::proxy::{self, Contender, Load, Manylane, Plan};
use manylane_bench::{Options, Setup};

use super::common::{Bar, finish, options, or_default};
use super::place::{self, Place};
use crate::args::ProxyBenchArgs;
use crate::output::{self, UsageError};

const SAMPLE_DURATION: Duration = Duration::from_secs(2);
const QUICK_SAMPLE_DURATION: Duration = Duration::from_millis(200);

pub(super) fn run(args: &ProxyBenchArgs, controller: &mut Bar) -> Result<()> {
    if !args.common.size.is_empty() {
        bail!(UsageError("--size does not apply to bench proxy, whose requests have 128 bytes".into()));
    }
    place::check_two_cpus(&args.common, "bench proxy")?;
    Place::Testbed { links: 2, queues: None }.require()?;
    output::create_folder(&args.common.out)?;
    let installed: Vec<Contender> = Contender::ALL.into_iter().filter(|one| one.is_installed()).collect();
    let plan = Plan {
        contenders: or_default(&args.contenders, &installed),
        loads: or_default(&args.loads, &Load::ALL),
        rate: args.rate,
        manylane: Manylane {
            path: std::env::current_exe().context("cannot find this program")?,
            rx_coalesce: args.common.rx_usecs.map(Duration::from_micros),
        },
    };
    let usual = if args.quick { QUICK_SAMPLE_DURATION } else { SAMPLE_DURATION };
    let setup = Setup::loopback(args.common.receiver_cpus.clone());
    let options = Options {
        quick: args.quick,
        ..options(&args.common, &[1], Vec::new(), args.duration.unwrap_or(usual), args.rate)
    };
    let document = proxy::run(&setup, &options, &plan, controller)?;
    finish(&args.common, controller, "proxy", &document)
}
