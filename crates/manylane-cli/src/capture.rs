//! `manylane capture`: writes the frames that lanes of another process receive and send past the
//! kernel's stack to a capture file.

use std::fmt::Write as _;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow};
use manylane::capture::{self, Capture, Direction, Target, Targets};

use crate::args::{CaptureArgs, CaptureTarget};
use crate::output::{self, UsageError};
use crate::pcapng::{Packet, Statistics, Writer};
use crate::signals;

/// Interval at which the rings are polled: the lanes do not notify the reader.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Number of frames after which signals and limits are checked.
const POLL_BUDGET: u64 = 4096;

const WRITE_ERROR: &str = "cannot write the capture";
/// Of each interface.
const INTERFACE_DESCRIPTION: &str = "frames that lanes of Manylane (engine xdp) receive and send";

/// Captures until a signal arrives or a limit is reached.
pub(crate) fn run(args: &CaptureArgs) -> Result<()> {
    let stop = signals::stop_flag()?;
    let to_terminal = args.write.is_none() && io::stdout().is_terminal();
    if to_terminal {
        return Err(UsageError("standard output is a terminal: name a file (-w FILE), or use a pipe, as in 'manylane capture | tcpdump -n -r -'".into()).into());
    }
    let points = find(args.target.as_ref())?;
    let about = describe(&points);
    let out = output::create(args.write.as_deref().unwrap_or("-").as_ref())?;
    let capture = Capture::start(points, args.snaplen, args.buffer).context("cannot capture")?;
    output::eprint_line(&format!("capturing {about}"));
    let mut recorder = Recorder::new(capture, out, args.snaplen)?;
    let outcome = recorder.record(&stop, args);
    if recorder.capture.is_finished() {
        output::eprint_line("the process has closed its socket or the connection");
    }
    // Complete the file, whatever ended the capture.
    let finished = recorder.finish();
    outcome.and(finished)
}

/// The sockets to capture.
fn find(target: Option<&CaptureTarget>) -> Result<Vec<Target>> {
    let of = match target {
        Some(CaptureTarget::Pid(pid)) => Some(*pid),
        _ => None,
    };
    let Targets { targets: mut points, refused, .. } = capture::find_targets(of)?;
    if let Some(CaptureTarget::Address(address)) = target {
        points.retain(|point| point.address() == *address);
    }
    let first = points.first().map(Target::pid);
    if points.iter().any(|point| Some(point.pid()) != first) {
        let mut text =
            String::from("several processes can be captured: give a PID, or the address of a socket");
        for point in &points {
            // Writing to a string does not fail.
            _ = write!(text, "\n  {}", describe(std::slice::from_ref(point)));
        }
        return Err(UsageError(text).into());
    }
    if !points.is_empty() {
        return Ok(points);
    }
    let what = match target {
        Some(CaptureTarget::Pid(pid)) => format!("process {pid} has no socket that can be captured"),
        Some(CaptureTarget::Address(address)) => format!("no socket at {address} can be captured"),
        None => "no process has a socket that can be captured".into(),
    };
    match refused.as_slice() {
        [] => Err(anyhow!("{what}: a capture needs a socket with engine xdp in this network namespace")),
        all => {
            let all: Vec<String> = all.iter().map(|(pid, why)| format!("process {pid}: {why}")).collect();
            Err(anyhow!("{what}: {}", all.join("; ")))
        }
    }
}

/// The process, and which of its sockets.
fn describe(points: &[Target]) -> String {
    let mut text = points.first().map_or_else(String::new, |point| format!("process {}", point.pid()));
    for point in points {
        let devices: Vec<&str> = point.devices().collect();
        let lanes = point.lanes().len();
        _ = write!(text, ", {}: {lanes} lanes, devices {}", point.address(), devices.join(" "));
        if let Some(pid) = point.captured_by() {
            _ = write!(text, " (captured by process {pid})");
        }
    }
    text
}

fn now() -> u64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX)
}

/// A capture that is written to a file.
struct Recorder {
    capture: Capture,
    writer: Writer<BufWriter<Box<dyn Write>>>,
    start: u64,
    /// Frames that were written, by interface: received and sent.
    written: Vec<(u64, u64)>,
    comment: String,
}

impl Recorder {
    fn new(capture: Capture, out: Box<dyn Write>, snaplen: usize) -> Result<Self> {
        let writer =
            Writer::new(BufWriter::with_capacity(1 << 16, out), snaplen as u32).context(WRITE_ERROR)?;
        let mut recorder =
            Self { capture, writer, start: now(), written: Vec::new(), comment: String::new() };
        recorder.write_new_interfaces()?;
        recorder.writer.flush().context(WRITE_ERROR)?;
        Ok(recorder)
    }

    /// Announces new interfaces in the file.
    fn write_new_interfaces(&mut self) -> Result<()> {
        for device in &self.capture.devices()[self.written.len()..] {
            self.writer.write_interface(&device.name, INTERFACE_DESCRIPTION).context(WRITE_ERROR)?;
            self.written.push((0, 0));
        }
        Ok(())
    }

    fn total(&self) -> (u64, u64) {
        self.written.iter().fold((0, 0), |(received, sent), of| (received + of.0, sent + of.1))
    }

    /// Writes frames until something ends it.
    fn record(&mut self, stop: &AtomicBool, args: &CaptureArgs) -> Result<()> {
        let mut left = args.count.unwrap_or(u64::MAX);
        let until = args.duration.and_then(|duration| Instant::now().checked_add(duration));
        loop {
            // Check first, and then write all frames from before the check. A process that goes on
            // writing cannot prolong that.
            let is_last = stop.load(Ordering::Relaxed)
                || until.is_some_and(|until| Instant::now() >= until)
                || self.capture.is_finished();
            if is_last {
                self.capture.stop();
            }
            let took = self.write_frames(left.min(if is_last { u64::MAX } else { POLL_BUDGET }))?;
            left -= took;
            if left == 0 || is_last {
                return Ok(());
            }
            if took > 0 {
                // Flush, so that the reader of a pipe sees the frames.
                self.writer.flush().context(WRITE_ERROR)?;
            }
            self.capture.wait(if took < POLL_BUDGET { POLL_INTERVAL } else { Duration::ZERO })?;
        }
    }

    /// Writes the frames that are in the rings, at most `frames_max`, and returns their number.
    fn write_frames(&mut self, frames_max: u64) -> Result<u64> {
        let mut took = 0;
        while took < frames_max {
            let Some(frame) = self.capture.next_frame() else { break };
            if frame.device == self.written.len() {
                self.writer.write_interface(frame.device_name, INTERFACE_DESCRIPTION).context(WRITE_ERROR)?;
                self.written.push((0, 0));
            }
            self.comment.clear();
            // Writing to a string does not fail.
            _ = write!(self.comment, "lane {}", frame.lane);
            let is_sent = frame.direction == Direction::Out;
            let packet = Packet {
                interface: frame.device as u32,
                time: frame.time,
                is_sent,
                queue: frame.queue,
                comment: &self.comment,
                len: frame.len as u32,
                bytes: frame.bytes,
            };
            self.writer.write_packet(&packet).context(WRITE_ERROR)?;
            if let Some((received, sent)) = self.written.get_mut(frame.device) {
                *if is_sent { sent } else { received } += 1;
            }
            took += 1;
        }
        Ok(took)
    }

    /// Completes the file, and prints a summary.
    fn finish(&mut self) -> Result<()> {
        let (end, dropped) = (now(), self.capture.dropped());
        self.write_new_interfaces()?;
        // This text is from another process.
        let missed = dropped.iter().flat_map(|(received, sent)| [received, sent]);
        let missed = missed.fold(0, |sum: u64, one| sum.saturating_add(*one));
        let (received, sent) = self.total();
        output::eprint_line(&format!(
            "{} frames captured: {received} received, {sent} sent",
            received + sent
        ));
        if missed > 0 {
            output::eprint_line(&format!(
                "{missed} frames not captured because the buffer was full: raise --buffer, or lower --snaplen"
            ));
        }
        for ((at, (received, sent)), dropped) in (0..).zip(&self.written).zip(&dropped) {
            let (captured, dropped) = (received + sent, dropped.0.saturating_add(dropped.1));
            let known = Statistics { start: self.start, end, captured, dropped };
            self.writer.write_statistics(at, &known).context(WRITE_ERROR)?;
        }
        self.writer.flush().context(WRITE_ERROR)
    }
}
