//! `manylane bench flood`.

use std::time::Duration;

use anyhow::{Result, bail};
use manylane_bench::Options;
use manylane_bench::experiments::flood::{self, LINKS, Part, Plan};
use manylane_bench::place::FRAME_PAYLOAD_MAX;

use super::common::{Bar, finish, options, or_default};
use super::place::{self, Place};
use crate::args::FloodArgs;
use crate::output::UsageError;

/// Length of a sample of parts `clients` and `program`.
const SAMPLE_DURATION: Duration = Duration::from_millis(1500);
const QUICK_SAMPLE_DURATION: Duration = Duration::from_millis(300);
/// Time with new sources.
const SOURCES_DURATION: Duration = Duration::from_secs(60);
const QUICK_SOURCES_DURATION: Duration = Duration::from_secs(5);

pub(super) fn run(args: &FloodArgs, controller: &mut Bar) -> Result<()> {
    if !args.common.size.is_empty() {
        bail!(UsageError("--size does not apply to bench flood, whose requests have 32 bytes".into()));
    }
    place::check_two_cpus(&args.common, "bench flood")?;
    let place = Place::Testbed { links: LINKS, queues: None }.require()?;
    let scaled =
        |given: Option<Duration>, quick, usual| given.unwrap_or(if args.quick { quick } else { usual });
    let duration = scaled(args.duration, QUICK_SAMPLE_DURATION, SAMPLE_DURATION);
    let plan = Plan {
        parts: or_default(&args.parts, &Part::ALL),
        limit: args.limit,
        sources: scaled(args.sources_duration, QUICK_SOURCES_DURATION, SOURCES_DURATION),
    };
    place.check_sizes(&args.common.size, FRAME_PAYLOAD_MAX)?;
    let mut setup = place.create(&args.common)?;
    let options = Options {
        quick: args.quick,
        sizes: vec![32],
        ..options(&args.common, &[1], Vec::new(), duration, args.rate)
    };
    let document = flood::run(&mut setup, &options, &plan, controller)?;
    finish(&args.common, controller, "flood", &document)
}
