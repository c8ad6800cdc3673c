//! `bench flap`: losses in the event of a change: a second socket opens or closes on the device,
//! an XDP program is attached or detached, a link goes down and up.
//!
//! Traffic runs to one receiver at a rate that it handles easily, and one event occurs in the
//! middle. Datagrams that entered the link and did not reach the application are lost. Those that
//! the link did not accept, because it was down, are refused and not counted as lost. Rounds
//! without an event show the losses of the machine itself, and the receiver on kernel sockets
//! shows those of the kernel in the same event.

use std::any::Any;
use std::fmt;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use manylane::{Builder, Engine};
use manylane_measure::Sent;
use manylane_measure::named_enum;
use manylane_testbed::Host;

use crate::receivers::xsk::load_redirect;
use crate::receivers::{Kind, ReceiverOptions, RunningReceiver};
use crate::sample::measure_during;
use crate::schema::{BENCH_FLAP, BenchSettings, Document, FlapRow, FlapSample, Sample};
use crate::{Controller, Limits, Load, Options, Setup, oversubscribed_note, run_rounds, safe_rate};

/// The receivers that it compares by default.
pub const RECEIVERS: [Kind; 2] = [Kind::LaneMmsg, Kind::LaneXdp];

/// Time for which a link stays down.
const LINK_DOWN_TIME: Duration = Duration::from_millis(20);
/// Timeout of the first datagram.
const FIRST_DATAGRAM_TIMEOUT: Duration = Duration::from_secs(60);
/// Port of the second socket: no datagrams are sent to it.
const UNUSED_PORT: u16 = 9;
/// The link of the events.
const LINK: usize = 0;

named_enum! {
    /// An event in the middle of the traffic.
    pub enum Event {
        /// None, for comparison.
        Nothing = "nothing",
        /// Lanes of engine `mmsg` open on another port.
        MmsgOpens = "mmsg-opens",
        /// Lanes of engine `mmsg` on another port close.
        MmsgCloses = "mmsg-closes",
        /// A trivial XDP program, which passes everything, is attached to the receiver's device.
        ProgramAttaches = "program-attached",
        /// It is detached.
        ProgramDetaches = "program-detached",
        /// Lanes of engine `xdp` open on another port of the device: its program is attached.
        XdpOpens = "xdp-opens",
        /// Lanes of engine `xdp` on another port close: its program is detached.
        XdpCloses = "xdp-closes",
        /// The receiver's end of the link goes down and up.
        ReceiverLink = "receiver-link",
        /// The sender's end of the link goes down and up.
        SenderLink = "sender-link",
    }
}

impl Event {
    /// True if it is possible with a receiver of this kind. A device has one XDP program. If the
    /// receiver has attached it, no other one can be attached, and a second socket of the process
    /// attaches none.
    pub const fn is_supported(self, kind: Kind) -> bool {
        let brings_program =
            matches!(self, Self::ProgramAttaches | Self::ProgramDetaches | Self::XdpOpens | Self::XdpCloses);
        !(brings_program && kind.needs_device())
    }

    /// The second socket or program of an event, opened before the traffic if the event closes it.
    fn open(self, host: &Host, receiver: &ReceiverOptions) -> Result<Option<Box<dyn Any + Send>>> {
        let lanes = |engine| -> Result<Option<Box<dyn Any + Send>>> {
            let mut builder = Builder::new((host.ip4(LINK), 0))?;
            builder.engine(engine).lanes(receiver.threads).xdp_ring(receiver.ring);
            Ok(Some(Box::new(host.run(|| builder.open())?)))
        };
        match self {
            Self::Nothing | Self::ReceiverLink | Self::SenderLink => Ok(None),
            Self::MmsgOpens | Self::MmsgCloses => lanes(Engine::Mmsg),
            Self::XdpOpens | Self::XdpCloses => lanes(Engine::Xdp),
            Self::ProgramAttaches | Self::ProgramDetaches => {
                let index = host.device_index(LINK)?;
                Ok(Some(Box::new(host.run(|| load_redirect(index, UNUSED_PORT))?)))
            }
        }
    }

    /// True if the event closes something that has to be opened before.
    const fn is_teardown(self) -> bool {
        matches!(self, Self::MmsgCloses | Self::ProgramDetaches | Self::XdpCloses)
    }
}

#[derive(Debug, Clone, Copy)]
struct Config {
    kind: Kind,
    event: Event,
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.kind, self.event)
    }
}

/// Runs the benchmark. The setup must be a testbed.
pub fn run(
    setup: &mut Setup,
    options: &Options,
    events: &[Event],
    controller: &mut dyn Controller,
) -> Result<Document<BenchSettings, FlapRow>> {
    ensure!(setup.hosts().is_some(), "bench flap takes links down, and needs a testbed (root)");
    let limits = Limits { precision: 0.1, ..options.limits() };
    let mut settings = options.settings(setup, &limits);
    settings.notes.extend(oversubscribed_note(setup));
    let mut rows = Vec::new();
    for &size in &options.sizes {
        for &threads in &options.threads {
            let pps = safe_rate(setup, options, &options.receivers, (threads, size), &limits, controller)?;
            let beside = |&kind: &Kind| events.iter().map(move |&event| Config { kind, event });
            let configs: Vec<Config> = options.receivers.iter().flat_map(beside).collect();
            let is_supported = |config: &Config| config.event.is_supported(config.kind);
            let configs: Vec<Config> = configs.into_iter().filter(is_supported).collect();
            let load =
                Load { pps: Some(pps), duration: options.duration, size, flows: options.flows, gso: false };
            let samples = run_rounds(options.rounds, &configs, controller, |config, round, _| {
                let receiver = options.receiver_options(setup, config.kind, threads, size);
                flap(setup, config, &receiver, &load, round)
            })?;
            rows.extend(configs.iter().zip(samples).map(|(Config { kind, event }, samples)| {
                let lanes = kind.lanes(threads);
                FlapRow::from_samples(event.name(), kind.name(), threads, lanes, size, samples)
            }));
        }
    }
    controller.progress(1.0, "done");
    Ok(Document::new(BENCH_FLAP, settings, rows))
}

/// One event of one receiver.
fn flap(
    setup: &mut Setup,
    &Config { kind, event }: &Config,
    receiver: &ReceiverOptions,
    load: &Load,
    round: usize,
) -> Result<FlapSample> {
    let (sender, host) = setup.hosts().map(|(a, b)| (a.clone(), b.clone())).context("no testbed")?;
    let running = setup.start(kind, receiver)?;
    let mut beside = if event.is_teardown() { event.open(&host, receiver)? } else { None };
    let (sent, sample, took) = measure_during(setup, running, load, round, |running, sender_ended| {
        wait_for_traffic(running, sender_ended)?;
        thread::sleep(load.duration / 2);
        let start = Instant::now();
        match event {
            Event::Nothing => {}
            Event::ReceiverLink => bounce_link(&host, &sender)?,
            Event::SenderLink => bounce_link(&sender, &host)?,
            _ if event.is_teardown() => beside = None,
            _ => beside = event.open(&host, receiver)?,
        }
        let took = start.elapsed();
        thread::sleep(load.duration / 2);
        Ok(took)
    })?;
    drop(beside);
    Ok(FlapSample {
        refused: sent.rejected,
        lost: sent.datagrams.saturating_sub(sample.delivered),
        event_micros: u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
        sample: Sample { offered_pps: offered_rate(&sent), ..sample },
    })
}

/// Datagrams generated per second, including those that the link did not accept.
fn offered_rate(sent: &Sent) -> f64 {
    (sent.datagrams + sent.rejected) as f64 / sent.elapsed.as_secs_f64().max(1e-9)
}

fn wait_for_traffic(running: &dyn RunningReceiver, sender_ended: &dyn Fn() -> bool) -> Result<()> {
    let start = Instant::now();
    while running.snapshot().delivered == 0 {
        ensure!(!sender_ended(), "the sender ended before a datagram arrived");
        ensure!(start.elapsed() < FIRST_DATAGRAM_TIMEOUT, "nothing arrives");
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Sets the end of the link at `host` down and up again, and waits until both ends carry frames.
fn bounce_link(host: &Host, other: &Host) -> Result<()> {
    host.set_link(LINK, false)?;
    thread::sleep(LINK_DOWN_TIME);
    host.set_link(LINK, true)?;
    host.wait_for_carrier(LINK)?;
    other.wait_for_carrier(LINK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receivers_with_a_program_allow_no_other() {
        assert!(Event::ALL.iter().all(|event| event.is_supported(Kind::LaneMmsg)));
        assert!(
            !Event::XdpOpens.is_supported(Kind::LaneXdp) && Event::ReceiverLink.is_supported(Kind::LaneXdp)
        );
    }
}
