//! One cell of figures 2 and 4: the time in which a number of threads reads a number of units of
//! ten bytes.

use std::io::{PipeReader, Read, Write};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use manylane::Steering;
use manylane_bench::receivers::{Kind, ReceiverOptions, RunningReceiver};
use manylane_bench::{self as bench, Setup};
use manylane_measure::sockets::Flows;
use manylane_measure::{Traffic, Until};
use manylane_sys::cpu;
use manylane_testbed::generator::LiveSender;

use crate::part::Setups;
use crate::row::Row;

/// Bytes of a unit.
pub(super) const UNIT_SIZE: usize = 10;
/// Number of units that are sent between two checks of the number in flight.
const CHUNK_UNITS: u64 = 512;
/// Receive buffer memory of a datagram of ten bytes, with a margin of two.
const SKB_TRUESIZE_MAX: u64 = 2048;
/// Maximum number of units in flight, if the receive buffers can hold them.
const WINDOW_MAX: u64 = 16_384;
/// Frames are sent by one call, because a call costs more than all else. So the sender cannot be
/// throttled by the readers. It keeps a rate, and a ring holds the frames of 8 ms.
const FRAMES_PPS: f64 = 500_000.0;
const FRAMES_RING_SIZE: u32 = 4096;
/// Time without progress after which readers count as stopped. Readers of an emulated machine need
/// seconds for a batch while they contend for a lock.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Time without progress, after all frames are sent, after which missing ones count as lost. It is
/// not included in the result.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval at which progress is checked.
const POLL_INTERVAL: Duration = Duration::from_micros(20);

/// A kind of reader.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Reader {
    /// A pipe, shared by all threads.
    Pipe,
    /// A receiver, its steering, and the number of flows.
    Udp(Kind, Steering, u16),
}

impl Reader {
    /// The line of the table.
    pub(crate) fn name(self) -> String {
        match self {
            Self::Pipe => "FIFO".into(),
            Self::Udp(kind, Steering::RoundRobin, _) => format!("{kind}, round robin"),
            Self::Udp(kind, ..) => kind.to_string(),
        }
    }

    fn needs_device(self) -> bool {
        matches!(self, Self::Udp(kind, ..) if kind.needs_device())
    }
}

/// The result.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct ReadSample {
    pub(super) elapsed: Duration,
    pub(super) cpu: Duration,
    pub(super) sent: u64,
    pub(crate) delivered: u64,
    pub(super) dropped: u64,
}

/// One sample, as rows. A receiver that is not available is a row with the reason.
pub(super) fn rows(
    places: &mut Setups,
    reader: Reader,
    threads: usize,
    (seconds, cpu): (&str, Option<&str>),
    stop: &AtomicBool,
) -> Vec<Row> {
    let (name, column) = (reader.name(), threads.to_string());
    let got = read_units(places, reader, threads, stop, &mut |_| Ok(()));
    let got = got.as_ref();
    let time = Row::measured(seconds, &name, &column, "s", got.map(|got| got.elapsed.as_secs_f64()));
    let counts = got.map(|got| [("sent", got.sent), ("delivered", got.delivered), ("dropped", got.dropped)]);
    let each = got.map(|got| got.cpu.as_nanos() as f64 / got.delivered.max(1) as f64);
    let each = cpu.map(|table| Row::measured(table, &name, &column, "ns", each));
    [time.with_counts(counts.as_ref().map_or(&[], |counts| counts))].into_iter().chain(each).collect()
}

/// Moments between reading and the work before and after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// The readers have started, and no units are sent yet.
    Started,
    /// All units are read, and the readers still exist.
    Finished,
}

/// The callback for these moments.
pub(super) type PhaseHook<'a> = &'a mut (dyn FnMut(Phase) -> Result<()> + Send);

/// Makes `threads` threads read all units of the run's scale.
pub(super) fn read_units(
    places: &mut Setups,
    reader: Reader,
    threads: usize,
    stop: &AtomicBool,
    around: PhaseHook<'_>,
) -> Result<ReadSample> {
    let units = places.scale.units;
    let Reader::Udp(kind, steering, flows) = reader else { return read_pipe(units, threads, around) };
    let setup = if reader.needs_device() { places.testbed()? } else { places.loopback() };
    let options = ReceiverOptions {
        cpus: Vec::new(),
        ring: FRAMES_RING_SIZE,
        steering,
        ..setup.receiver(threads, UNIT_SIZE)
    };
    let running = setup.start(kind, &options)?;
    let mut sender = Sender::open(setup, running.addr(), flows, options.recv_buffer)?;
    around(Phase::Started)?;
    let start = Instant::now();
    let sent = sender.send(running.as_ref(), units, stop)?;
    let done = wait_drained(running.as_ref(), sent, sender.idle_timeout(), stop)?;
    let elapsed = done.saturating_duration_since(start);
    let cpu = running.snapshot().rx_cpu;
    around(Phase::Finished)?;
    let end = running.stop()?;
    Ok(ReadSample { elapsed, cpu, sent, delivered: end.delivered, dropped: end.kernel_dropped })
}

/// The sender, which sends so that no unit is lost.
enum Sender {
    /// Sockets, over loopback, at most a number of units ahead of the readers.
    Sockets(Flows, u64),
    /// Frames, into the device of the other host, at a fixed rate.
    Frames(Box<LiveSender>),
}

impl Sender {
    /// All preparations before the first unit.
    fn open(setup: &Setup, to: SocketAddr, flows: u16, recv_buffer: usize) -> Result<Self> {
        let traffic = Traffic { flows, ..Traffic::new(to, UNIT_SIZE) };
        let Some((from, host)) = setup.hosts() else {
            let window = (recv_buffer as u64 / SKB_TRUESIZE_MAX).clamp(CHUNK_UNITS / 8, WINDOW_MAX);
            return Ok(Self::Sockets(Flows::open(&traffic)?, window));
        };
        let traffic = Traffic { pps: Some(FRAMES_PPS), ..traffic };
        let mut sender = LiveSender::new(from, host, 0, &traffic)?;
        if let Some(cpu) = setup.sender_cpu() {
            sender.pin(cpu);
        }
        Ok(Self::Frames(Box::new(sender)))
    }

    /// Time without progress after which units count as lost. Only frames can be lost.
    fn idle_timeout(&self) -> Duration {
        match self {
            Self::Sockets(..) => STALL_TIMEOUT,
            Self::Frames(_) => IDLE_TIMEOUT,
        }
    }

    /// Sends all units.
    fn send(&mut self, running: &dyn RunningReceiver, units: u64, stop: &AtomicBool) -> Result<u64> {
        let (flows, window) = match self {
            Self::Sockets(flows, window) => (flows, *window),
            Self::Frames(sender) => {
                bench::check_stop(stop)?;
                return Ok(sender.send(Until::Count(units))?.datagrams);
            }
        };
        let mut sent = 0;
        while sent < units {
            let chunk = CHUNK_UNITS.min(window).min(units - sent);
            bench::check_stop(stop)?;
            let before = Instant::now();
            while sent + chunk > total_consumed(running) + window {
                bench::check_stop(stop)?;
                ensure!(
                    before.elapsed() < STALL_TIMEOUT,
                    "readers stopped reading after {} units",
                    total_consumed(running)
                );
                thread::sleep(POLL_INTERVAL);
            }
            let got = flows.send(None, &Until::Count(chunk))?;
            ensure!(got.rejected == 0, "the sender's socket refused {} units", got.rejected);
            sent += got.datagrams;
        }
        Ok(sent)
    }
}

fn total_consumed(running: &dyn RunningReceiver) -> u64 {
    let seen = running.snapshot();
    seen.delivered + seen.kernel_dropped
}

/// Time when the last unit was received, or when no more arrived.
fn wait_drained(
    running: &dyn RunningReceiver,
    sent: u64,
    idle_timeout: Duration,
    stop: &AtomicBool,
) -> Result<Instant> {
    let mut last = (total_consumed(running), Instant::now());
    loop {
        let (now, seen) = (Instant::now(), total_consumed(running));
        if seen >= sent {
            return Ok(now);
        }
        if seen != last.0 {
            last = (seen, now);
        }
        bench::check_stop(stop)?;
        if last.1.elapsed() > idle_timeout {
            return Ok(last.1);
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// A pipe: written by one thread, read by all, a system call for each unit.
fn read_pipe(units: u64, threads: usize, around: PhaseHook<'_>) -> Result<ReadSample> {
    let (reader, mut writer) = std::io::pipe().context("cannot create a pipe")?;
    let go = AtomicBool::new(false);
    thread::scope(|scope| {
        let readers: Vec<_> = (0..threads).map(|_| scope.spawn(|| drain(&reader, &go))).collect();
        let begun = around(Phase::Started);
        go.store(true, Ordering::Release);
        begun?;
        let start = Instant::now();
        let unit = [b'u'; UNIT_SIZE];
        for _ in 0..units {
            writer.write_all(&unit).context("cannot write to the pipe")?;
        }
        drop(writer);
        let mut sum = ReadSample { sent: units, ..ReadSample::default() };
        for reader in readers {
            let (bytes, cpu) = reader.join().map_err(|_| anyhow!("a reader panicked"))??;
            sum.delivered += bytes / UNIT_SIZE as u64;
            sum.cpu += cpu;
        }
        sum.elapsed = start.elapsed();
        around(Phase::Finished)?;
        ensure!(sum.delivered == units, "{} of {units} units were read from the pipe", sum.delivered);
        Ok(sum)
    })
}

fn drain(pipe: &PipeReader, go: &AtomicBool) -> Result<(u64, Duration)> {
    while !go.load(Ordering::Acquire) {
        thread::yield_now();
    }
    let (before, mut bytes) = (cpu::thread_cpu_time(), 0);
    let mut unit = [0; UNIT_SIZE];
    loop {
        match (&mut &*pipe).read(&mut unit).context("cannot read the pipe")? {
            0 => return Ok((bytes, cpu::thread_cpu_time().saturating_sub(before))),
            got => bytes += got as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Scale;

    #[test]
    fn loopback_every_unit_is_read_once() {
        let mut places = Setups::new(Scale { units: 3000, ..Scale::quick() });
        let stop = AtomicBool::new(false);
        let shared = Reader::Udp(Kind::SocketRecvfrom, Steering::Flow, 8);
        let lanes = Reader::Udp(Kind::LaneMmsg, Steering::RoundRobin, 1);
        for reader in [Reader::Pipe, shared, lanes] {
            for threads in [1, 3] {
                let got = read_units(&mut places, reader, threads, &stop, &mut |_| Ok(())).unwrap();
                let what = format!("{reader:?}, {threads}: {got:?}");
                assert_eq!((got.sent, got.delivered, got.dropped), (3000, 3000, 0), "{what}");
                assert!(got.elapsed > Duration::ZERO && got.cpu > Duration::ZERO, "{what}");
            }
        }
    }

    #[test]
    fn a_stop_interrupts_the_units() {
        let mut places = Setups::new(Scale { units: 1 << 40, ..Scale::quick() });
        let reader = Reader::Udp(Kind::SocketRecvfrom, Steering::Flow, 1);
        let stop = AtomicBool::new(true);
        let err = read_units(&mut places, reader, 1, &stop, &mut |_| Ok(())).unwrap_err();
        assert!(err.to_string().contains("interrupted"), "{err:#}");
    }
}
