//! `manylane send`: the load generator, with or without replies.

mod duration;
mod lanes;
mod row;
#[cfg(feature = "bench")]
mod testbed;

use std::net::{SocketAddr, ToSocketAddrs};

use anyhow::{Context, Result, bail, ensure};
use manylane_measure::client::{self, Expect, Plan, RequestCounts};
use manylane_measure::{Document, Traffic, Until, sockets};
use serde::Serialize;

use self::duration::{DEFAULT_DURATION, send_duration, send_for};
use self::lanes::Lanes;
use self::row::{Quantiles, Row};
use crate::args::SendArgs;
use crate::output::{self, UsageError};
use crate::parse::Rate;
use crate::progress::Progress;
use crate::signals;

/// Name of the document.
const SCHEMA: &str = "manylane.send.v1";

/// Sends, and prints the result.
pub(crate) fn run(args: &SendArgs) -> Result<()> {
    let settings = Settings::new(args);
    let document = Document::new(SCHEMA, settings, vec![send(args)?]);
    let row = &document.rows[0];
    if args.json { output::print_json(&document) } else { output::print(&row.text()) }?;
    ensure!(
        !row.is_port_closed(),
        "no socket listens on {} (ECONNREFUSED), and no reply arrived: start the server, or check ADDR",
        args.addr.as_deref().unwrap_or_default()
    );
    Ok(())
}

fn send(args: &SendArgs) -> Result<Row> {
    #[cfg(feature = "bench")]
    if args.testbed {
        return testbed::send(args);
    }
    let to = resolve(args.addr.as_deref().unwrap_or_default())?;
    match args.expect {
        Expect::Nothing if args.engine.is_some() => {
            bail!(UsageError(
                "--engine and --expect none exclude each other: lanes send requests only".into()
            ))
        }
        Expect::Nothing => generate(args, to),
        _ => send_requests(args, to),
    }
}

fn resolve(addr: &str) -> Result<SocketAddr> {
    let mut found =
        addr.to_socket_addrs().with_context(|| format!("cannot resolve {addr}: expected HOST:PORT"))?;
    found.next().with_context(|| format!("{addr} resolves to no address: expected HOST:PORT"))
}

/// Sends requests by schedule, and checks the replies.
fn send_requests(args: &SendArgs, to: SocketAddr) -> Result<Row> {
    if args.gso {
        bail!(UsageError(
            "--gso and --expect exclude each other: replies to one GSO message cannot be timed".into()
        ));
    }
    let Rate::Pps(rate) = args.rate else {
        bail!(UsageError("--expect needs a number for --rate: requests are sent on schedule".into()));
    };
    let stop = signals::stop_flag()?;
    let plan = Plan {
        to,
        from: None,
        rate,
        count: args.count,
        duration: send_duration(args),
        size: args.size,
        flows: usize::from(args.flows),
        payload: args.payload.clone(),
        expect: args.expect.clone(),
        timeout: args.timeout,
        busy_poll: args.busy_poll,
    };
    let total = args.count.map_or_else(
        || rate * send_duration(args).unwrap_or(DEFAULT_DURATION).as_secs_f64(),
        |count| count as f64,
    );
    let mut bar = Progress::bar();
    let progress = |tally: &RequestCounts| {
        bar.show(tally.asked as f64 / total, &format!("{} asked, {} answered", tally.asked, tally.answered));
    };
    let outcome = match args.engine {
        Some(engine) => {
            let mut lanes = Lanes::open(&plan, engine, &args.interface)?;
            client::run_over(&mut lanes, &plan, &stop, progress)
        }
        None => client::run(&plan, &stop, progress),
    }?;
    drop(bar);
    let tally = outcome.counts;
    Ok(Row {
        sent: tally.asked,
        rejected: outcome.unsent,
        seconds: outcome.send_duration.as_secs_f64(),
        offered_pps: tally.asked as f64 / outcome.send_duration.as_secs_f64().max(1e-9),
        replies: Some(tally),
        refused: outcome.refused,
        loss: Some((tally.asked - tally.answered) as f64 / tally.asked.max(1) as f64),
        latency_ns: Some(Quantiles::from_histogram(&outcome.latency)),
        behind_ns: Some(Quantiles::from_histogram(&outcome.send_lag)),
        delivered: None,
    })
}

/// Sends datagrams with the sender on sockets, without replies.
fn generate(args: &SendArgs, to: SocketAddr) -> Result<Row> {
    let traffic = Traffic {
        pps: args.rate.pps(),
        flows: args.flows,
        gso: args.gso,
        payload: args.payload.as_ref().map(|payload| payload.bytes().to_vec()),
        ..Traffic::new(to, args.size)
    };
    let sent = match (args.count, send_duration(args)) {
        (Some(count), _) => sockets::send(&traffic, Until::CountOrStop(count, signals::stop_flag()?))?,
        (None, time) => send_for(time.unwrap_or(DEFAULT_DURATION), |until| sockets::send(&traffic, until))?,
    };
    Ok(Row::from_sent(&sent))
}

/// The settings of the run.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Settings {
    command: String,
    to: Option<String>,
    sender: &'static str,
    engine: Option<String>,
    rate_pps: Option<f64>,
    count: Option<u64>,
    duration_seconds: Option<f64>,
    size: usize,
    flows: u16,
    expect: String,
    timeout_seconds: f64,
    busy_poll: bool,
}

impl Settings {
    fn new(args: &SendArgs) -> Self {
        Self {
            command: output::command_line(),
            to: args.addr.clone(),
            sender: match (&args.expect, args.gso) {
                #[cfg(feature = "bench")]
                _ if args.testbed => "XDP live frames in a testbed",
                (Expect::Nothing, false) => "sockets (sendmmsg)",
                (Expect::Nothing, true) => "sockets (sendmmsg, UDP GSO)",
                _ if args.engine.is_some() => "lanes, open loop",
                _ => "sockets, open loop",
            },
            engine: args.engine.map(|engine| engine.to_string()),
            rate_pps: args.rate.pps(),
            count: args.count,
            duration_seconds: send_duration(args).map(|time| time.as_secs_f64()),
            size: args.payload.as_ref().map_or(args.size, |payload| payload.bytes().len()),
            flows: args.flows,
            expect: args.expect.to_string(),
            timeout_seconds: args.timeout.as_secs_f64(),
            busy_poll: args.busy_poll,
        }
    }
}
