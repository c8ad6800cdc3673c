//! `manylane bench`: runs a benchmark, shows its table, writes its report.

mod common;
mod flood;
mod place;
mod proxy;

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use manylane::WaitPolicy;
use manylane_bench::Options;
use manylane_bench::experiments;
use manylane_bench::experiments::batch::{Plan, RecvMethod};
use manylane_bench::experiments::flap::Event;
use manylane_bench::experiments::replies::SendMethod;
use manylane_bench::experiments::rtt::{self, Contender, generator::SEQ_LEN};
use manylane_bench::place::FRAME_PAYLOAD_MAX;
use manylane_bench::receivers::{Kind, Work};
use manylane_bench::work::SyntheticWork;

use self::common::{finish, options, or_default};
use self::place::{ONE_LINK, Place};
use crate::args::{BatchArgs, BenchCommand, ChurnArgs, FlapArgs, GsoArgs, RepliesArgs, RttArgs, RxArgs};
use crate::output::UsageError;

pub(crate) use self::common::{Bar, write};

/// Length of a sample of `bench rx`.
const SAMPLE_DURATION: Duration = Duration::from_secs(1);
/// The same in a quick run, which has 40 seconds for twenty receivers, five rounds and the
/// searches.
const QUICK_SAMPLE_DURATION: Duration = Duration::from_millis(100);

/// The same of `bench rtt`.
const RTT_SAMPLE_DURATION: Duration = Duration::from_millis(500);
const QUICK_RTT_DURATION: Duration = Duration::from_millis(50);

/// Runs a benchmark.
pub(crate) fn run(bench: &BenchCommand) -> Result<()> {
    let compares_batches = matches!(bench, BenchCommand::Batch(_) | BenchCommand::Replies(_));
    place::check(bench.common(), compares_batches)?;
    let mut controller = Bar::new()?;
    match bench {
        BenchCommand::Rx(args) => rx(args, Work::Count, &mut controller),
        BenchCommand::Echo(args) => rx(args, Work::Echo, &mut controller),
        BenchCommand::Batch(args) => batch(args, &mut controller),
        BenchCommand::Replies(args) => replies(args, &mut controller),
        BenchCommand::Gso(args) => gso(args, &mut controller),
        BenchCommand::Churn(args) => churn(args, &mut controller),
        BenchCommand::Rtt(args) => rtt(args, &mut controller),
        BenchCommand::Flap(args) => flap(args, &mut controller),
        BenchCommand::Flood(args) => flood::run(args, &mut controller),
        BenchCommand::Proxy(args) => proxy::run(args, &mut controller),
    }
}

/// Maximum numbers of messages of a call that `bench batch` and `bench replies` compare.
const RECV_BATCHES: [usize; 5] = [1, 16, 64, 256, 1024];
const SEND_BATCHES: [usize; 4] = [1, 16, 64, 256];

/// Maximum number of queues of a testbed device.
const QUEUES_MAX: u32 = 64;

fn rx(args: &RxArgs, work: Work, controller: &mut Bar) -> Result<()> {
    let duration = args.duration.unwrap_or(if args.quick { QUICK_SAMPLE_DURATION } else { SAMPLE_DURATION });
    let threads_max = args.threads.iter().max().and_then(|max| u32::try_from(*max).ok());
    let queues = args.queues.or(threads_max).unwrap_or(1).min(QUEUES_MAX);
    let must = args.place.testbed || args.links > 1 || args.queues.is_some();
    let testbed = Place::Testbed { links: args.links, queues: Some(queues) };
    let place = Place::select(&args.place, testbed, must)?;
    // A quick run has no time for all receivers.
    let mut usual = place.available(&Kind::ALL);
    usual.retain(|kind| !args.quick || !(kind.needs_device() || kind.needs_uring()));
    let receivers = or_default(&args.receivers, &usual);
    place.check_receivers(&receivers)?;
    place.check_sizes(&args.common.size, FRAME_PAYLOAD_MAX)?;
    let mut setup = place.create(&args.common)?;
    setup.set_count_hook(args.count_hook);
    let options = Options {
        quick: args.quick,
        work,
        synthetic_work: SyntheticWork::calibrate(args.work),
        ..options(&args.common, &args.threads, receivers, duration, args.rate)
    };
    let document = experiments::rx::run(&mut setup, &options, controller)?;
    let name = match work {
        Work::Count => "rx",
        Work::Echo => "echo",
    };
    finish(&args.common, controller, name, &document)
}

/// Default payloads in bytes: those of the paper's table for `bench batch`, and those for `bench
/// replies`.
const BATCH_SIZES: [usize; 4] = [64, 256, 1024, 8192];
const REPLY_SIZES: [usize; 4] = [64, 1024, 8192, 60_000];
/// Payload in bytes that fits a frame of each receiver of `bench batch`.
const BATCH_FRAME_PAYLOAD_MAX: usize = 1024;

fn batch(args: &BatchArgs, controller: &mut Bar) -> Result<()> {
    // Loopback accepts datagrams of every size, and has no frames.
    let place = if args.place.testbed { ONE_LINK.require()? } else { Place::Loopback };
    let methods = or_default(&args.receivers, &place.available(&RecvMethod::ALL));
    place.check_receivers(&methods)?;
    let all = if place.has_device() { &BATCH_SIZES[..3] } else { &BATCH_SIZES };
    let sizes = or_default(&args.common.size, all);
    place.check_sizes(&sizes, BATCH_FRAME_PAYLOAD_MAX)?;
    let mut setup = place.create(&args.common)?;
    let options = Options { sizes, ..options(&args.common, &[1], Vec::new(), Duration::ZERO, None) };
    let plan =
        Plan { methods, messages: or_default(&args.common.batch, &RECV_BATCHES), fills: args.iterations };
    let document = experiments::batch::run(&mut setup, &options, &plan, controller)?;
    finish(&args.common, controller, "batch", &document)
}

fn replies(args: &RepliesArgs, controller: &mut Bar) -> Result<()> {
    let setup = Place::Loopback.create(&args.common)?;
    let options = Options {
        sizes: or_default(&args.common.size, &REPLY_SIZES),
        ..options(&args.common, &[1], Vec::new(), Duration::ZERO, None)
    };
    let senders = or_default(&args.senders, &SendMethod::ALL);
    let batches = or_default(&args.common.batch, &SEND_BATCHES);
    let document = experiments::replies::run(&setup, &options, &senders, &batches, controller)?;
    finish(&args.common, controller, "replies", &document)
}

fn gso(args: &GsoArgs, controller: &mut Bar) -> Result<()> {
    let receivers = or_default(&args.receivers, &experiments::rx::GSO_RECEIVERS);
    Place::Loopback.check_receivers(&receivers)?;
    let mut setup = Place::Loopback.create(&args.common)?;
    let options = Options {
        flows: args.common.flows.unwrap_or(1),
        gso: true,
        ..options(&args.common, &args.threads, receivers, args.duration, args.rate.pps())
    };
    let document = experiments::rx::run(&mut setup, &options, controller)?;
    finish(&args.common, controller, "gso", &document)
}

fn churn(args: &ChurnArgs, controller: &mut Bar) -> Result<()> {
    let place = Place::select(&args.place, ONE_LINK, args.place.testbed)?;
    place.check_sizes(&args.common.size, FRAME_PAYLOAD_MAX)?;
    let mut setup = place.create(&args.common)?;
    let options = options(&args.common, &args.lanes, vec![Kind::LaneMmsg], args.duration, args.rate);
    let document = experiments::churn::run(&mut setup, &options, args.change_interval, controller)?;
    finish(&args.common, controller, "churn", &document)
}

fn flap(args: &FlapArgs, controller: &mut Bar) -> Result<()> {
    let place = ONE_LINK.require()?;
    let receivers = or_default(&args.receivers, &experiments::flap::RECEIVERS);
    place.check_receivers(&receivers)?;
    place.check_sizes(&args.common.size, FRAME_PAYLOAD_MAX)?;
    let mut setup = place.create(&args.common)?;
    let options = options(&args.common, &args.threads, receivers, args.duration, args.rate);
    let events = or_default(&args.events, &Event::ALL);
    let document = experiments::flap::run(&mut setup, &options, &events, controller)?;
    finish(&args.common, controller, "flap", &document)
}

fn rtt(args: &RttArgs, controller: &mut Bar) -> Result<()> {
    if let Some(size) = args.common.size.iter().find(|size| **size < SEQ_LEN) {
        bail!(UsageError(format!(
            "--size {size} is too small: a request carries its number, in {SEQ_LEN} bytes"
        )));
    }
    let duration = args.duration.unwrap_or(if args.quick { QUICK_RTT_DURATION } else { RTT_SAMPLE_DURATION });
    let place = Place::select(&args.place, ONE_LINK, args.place.testbed)?;
    for layout in args.cpu_layouts.iter().filter(|layout| layout.needs_device()) {
        ensure!(place.has_device(), "--cpu-layouts {layout} needs a testbed (root, without --loopback)");
        place::check_two_cpus(&args.common, format!("--cpu-layouts {layout}"))?;
    }
    // A quick run has no time for all contenders.
    let mut usual = place.available(&Contender::defaults());
    usual.retain(|Contender { kind, wait }| {
        !args.quick || !(matches!(wait, WaitPolicy::BusyPoll(_)) || kind.needs_device() || kind.needs_uring())
    });
    let contenders = or_default(&args.contenders, &usual);
    place.check_receivers(&contenders)?;
    let quick_rates = if args.quick { &[5e3, 20e3][..] } else { &[] };
    let plan = rtt::Plan {
        contenders,
        cpu_layouts: args.cpu_layouts.clone(),
        rates: or_default(&args.rate, quick_rates),
        arrivals: args.arrivals,
    };
    let mut setup = place.create(&args.common)?;
    let options = Options { quick: args.quick, ..options(&args.common, &[1], Vec::new(), duration, None) };
    let document = rtt::run(&mut setup, &options, &plan, controller)?;
    finish(&args.common, controller, "rtt", &document)
}
