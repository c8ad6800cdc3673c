//! Takes one sample: a receiver under traffic for a time, and its cost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use manylane_measure::machine;
use manylane_measure::{Sent, Until};
use manylane_testbed::reply_count::ReplyCounter;

use crate::place::{Load, Setup};
use crate::receivers::{Kind, ReceiverOptions, RunningReceiver, Snapshot, Work};
use crate::schema::Sample;

/// Timeout until all sent datagrams are delivered or dropped.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(500);
/// Time without progress after which the missing datagrams count as lost.
const IDLE_TIMEOUT: Duration = Duration::from_millis(25);
/// The same after warm-up: later datagrams would count as a part of the sample, and the wait is
/// not measured. It is long enough for a thread to be scheduled on a busy machine.
const WARM_UP_IDLE_TIMEOUT: Duration = Duration::from_millis(250);

/// Ends a benchmark early, on request.
pub fn check_stop(stop: &AtomicBool) -> Result<()> {
    if stop.load(Ordering::Relaxed) {
        bail!("interrupted: no result");
    }
    Ok(())
}

/// Counters of a receiver at one moment. Finished work is counted where it shows: in the receiving
/// threads, or for replies at the host that they return to.
#[derive(Debug, Clone, Copy, Default)]
struct ReceiverCounts {
    /// Datagrams delivered, or requests answered.
    completed: u64,
    receiver: Snapshot,
}

/// A running receiver, and the counter of its replies if it answers.
struct MeasuredReceiver<'a> {
    running: &'a dyn RunningReceiver,
    reply_counter: Option<&'a ReplyCounter>,
}

impl MeasuredReceiver<'_> {
    fn counts(&self) -> Result<ReceiverCounts> {
        receiver_counts(self.reply_counter, self.running.snapshot())
    }
}

fn receiver_counts(replies: Option<&ReplyCounter>, receiver: Snapshot) -> Result<ReceiverCounts> {
    Ok(ReceiverCounts { completed: replies.map_or(Ok(receiver.delivered), ReplyCounter::count)?, receiver })
}

/// Starts a receiver, warms it up, and measures it under `load`.
///
/// Each sample has a receiver of its own, so that there is only one at a time and none inherits
/// the state of an earlier sample.
pub fn measure(
    setup: &mut Setup,
    kind: Kind,
    options: &ReceiverOptions,
    load: &Load,
    round: usize,
) -> Result<Sample> {
    let replies = match options.work {
        Work::Count => None,
        Work::Echo => Some(setup.reply_counter()?),
    };
    let running = setup.start(kind, options)?;
    let watched = MeasuredReceiver { running: running.as_ref(), reply_counter: replies.as_ref() };
    // Page faults, sleeping CPUs and neighbour tables are not measured.
    let warm_up = Load { duration: (load.duration / 5).min(Duration::from_millis(100)), ..*load };
    let cold = watched.counts()?;
    let warmed = setup.send(running.addr(), &warm_up)?;
    wait_drained(&watched, &cold, &warmed, WARM_UP_IDLE_TIMEOUT)?;
    let before = watched.counts()?;
    let clock = CpuBusyTimer::start();
    let (sent, delivered_pps) = thread::scope(|scope| {
        let (to, setup) = (running.addr(), &mut *setup);
        let sender = scope.spawn(move || setup.send(to, load));
        let delivered_pps = steady_rate(&watched, load.duration);
        (sender.join(), delivered_pps)
    });
    let sent = sent.map_err(|_| anyhow!("the sender panicked"))??;
    let busy = clock.stop().1;
    let at_end = watched.counts()?;
    wait_drained(&watched, &before, &sent, IDLE_TIMEOUT)?;
    // Closing is not measured: a queue has megabytes of frames, which its thread frees.
    let rx_cpu = running.snapshot().rx_cpu;
    let receiver = Snapshot { rx_cpu, ..running.stop()? };
    let after = receiver_counts(replies.as_ref(), receiver)?;
    // Idle time counts in ticks. Busy time between the two readings belongs to the datagrams
    // delivered between them.
    let completed = at_end.completed - before.completed;
    let total_cpu_ns = busy.as_nanos() as f64 / completed.max(1) as f64;
    let delivered_pps = delivered_pps?;
    let dropped = at_end.receiver.kernel_dropped - before.receiver.kernel_dropped;
    let queued_at_end = sent.datagrams.saturating_sub(completed + dropped);
    let sample = sample(round, &sent, options.work, &before, &after);
    Ok(Sample { delivered_pps, total_cpu_ns, queued_at_end, ..sample })
}

/// Datagrams per second handled in the middle of the traffic, without its first moments and
/// without the queue that is drained after its end.
fn steady_rate(watched: &MeasuredReceiver<'_>, duration: Duration) -> Result<f64> {
    thread::sleep(duration.mul_f64(0.3));
    let (start, before) = (Instant::now(), watched.counts()?.completed);
    thread::sleep(duration.mul_f64(0.6));
    let done = watched.counts()?.completed - before;
    Ok(done as f64 / start.elapsed().as_secs_f64().max(1e-9))
}

/// Waits until all datagrams sent since `before` are handled or dropped, or there is no progress
/// for `idle_timeout`.
fn wait_drained(
    watched: &MeasuredReceiver<'_>,
    before: &ReceiverCounts,
    sent: &Sent,
    idle_timeout: Duration,
) -> Result<()> {
    let start = Instant::now();
    let mut last = (watched.counts()?.completed, Instant::now());
    while start.elapsed() < DRAIN_TIMEOUT && last.1.elapsed() < idle_timeout {
        let now = watched.counts()?;
        let dropped = now.receiver.kernel_dropped - before.receiver.kernel_dropped;
        // A receiver that answers counts a batch after it has answered it.
        let delivered = now.receiver.delivered - before.receiver.delivered;
        let done = delivered.min(now.completed - before.completed);
        if done + dropped >= sent.datagrams {
            return Ok(());
        }
        if now.completed != last.0 {
            last = (now.completed, Instant::now());
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// The sample that follows from the counts, with the machine's rates left at 0.
fn sample(round: usize, sent: &Sent, work: Work, before: &ReceiverCounts, after: &ReceiverCounts) -> Sample {
    let delivered = after.completed - before.completed;
    let (first, last) = (&before.receiver, &after.receiver);
    let cpu = [last.rx_cpu.saturating_sub(first.rx_cpu), Duration::ZERO];
    let dropped = last.kernel_dropped - first.kernel_dropped;
    Sample {
        offered_pps: sent.pps(),
        received: (work == Work::Echo).then_some(last.delivered - first.delivered),
        ..Sample::from_totals(round, sent.datagrams, delivered, sent.elapsed, cpu, dropped)
    }
}

/// Sends to a receiver while `meanwhile` runs, which is told when the sender has ended early. Then
/// stops the receiver, once no more datagrams arrive.
pub(crate) fn measure_during<T>(
    setup: &mut Setup,
    running: Box<dyn RunningReceiver>,
    load: &Load,
    round: usize,
    meanwhile: impl FnOnce(&dyn RunningReceiver, &dyn Fn() -> bool) -> Result<T>,
) -> Result<(Sent, Sample, T)> {
    let stop = Arc::new(AtomicBool::new(false));
    let (to, clock) = (running.addr(), CpuBusyTimer::start());
    let (sent, seen) = thread::scope(|scope| {
        let until = Until::Stop(Arc::clone(&stop));
        let sending = scope.spawn(|| setup.send_until(to, load, until));
        let seen = meanwhile(running.as_ref(), &|| sending.is_finished());
        stop.store(true, Ordering::Relaxed);
        (sending.join(), seen)
    });
    let sent = sent.map_err(|_| anyhow!("the sender panicked"))??;
    let seen = seen?;
    let (elapsed, busy) = clock.stop();
    let watched = MeasuredReceiver { running: running.as_ref(), reply_counter: None };
    wait_drained(&watched, &ReceiverCounts::default(), &sent, IDLE_TIMEOUT)?;
    let end = running.stop()?;
    let cpu = [end.rx_cpu, busy];
    let sample = Sample::from_totals(round, sent.datagrams, end.delivered, elapsed, cpu, end.kernel_dropped);
    Ok((sent, Sample { offered_pps: sent.pps(), ..sample }, seen))
}

/// Total busy time of the machine's CPUs.
pub(crate) struct CpuBusyTimer {
    start: Instant,
    idle_ns: u64,
    cpus: u32,
}

impl CpuBusyTimer {
    pub(crate) fn start() -> Self {
        let cpus = u32::try_from(machine::online_cpus().len()).unwrap_or(1);
        Self { start: Instant::now(), idle_ns: machine::idle_ns(), cpus }
    }

    /// The elapsed time, and the busy time of all CPUs in it.
    pub(crate) fn stop(&self) -> (Duration, Duration) {
        let idle = machine::idle_ns().saturating_sub(self.idle_ns);
        let elapsed = self.start.elapsed();
        (elapsed, (elapsed * self.cpus).saturating_sub(Duration::from_nanos(idle)))
    }
}

#[cfg(test)]
mod tests {
    use manylane_test_support::wait_for;

    use super::*;

    fn test_counts(done: u64, delivered: u64, kernel_dropped: u64, micros: u64) -> ReceiverCounts {
        let rx_cpu = Duration::from_micros(micros);
        ReceiverCounts { completed: done, receiver: Snapshot { delivered, kernel_dropped, rx_cpu } }
    }

    #[test]
    fn a_sample_adds_up() {
        let sent = Sent { datagrams: 1000, elapsed: Duration::from_millis(100), ..Sent::default() };
        let (before, after) = (test_counts(100, 100, 5, 10), test_counts(1000, 1000, 105, 460));
        let got = sample(3, &sent, Work::Count, &before, &after);
        assert_eq!((got.round, got.sent, got.delivered, got.kernel_dropped), (3, 1000, 900, 100));
        assert_eq!((got.offered_pps, got.rx_cpu_ns, got.received), (10_000.0, 500.0, None));
        assert!((got.loss - 0.1).abs() < 1e-12);
    }

    #[test]
    fn rtt_counts_only_answered_requests() {
        let sent = Sent { datagrams: 1000, elapsed: Duration::from_millis(100), ..Sent::default() };
        let got = sample(0, &sent, Work::Echo, &test_counts(7, 0, 0, 0), &test_counts(807, 990, 10, 400));
        assert_eq!((got.delivered, got.received, got.kernel_dropped), (800, Some(990), 10));
        assert_eq!(got.rx_cpu_ns, 500.0);
        assert!((got.loss - 0.2).abs() < 1e-12);
    }

    #[test]
    fn a_busy_thread_shows_as_busy_time() {
        let spin = || {
            let clock = CpuBusyTimer::start();
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(200) {
                std::hint::spin_loop();
            }
            clock.stop()
        };
        // Again, as long as other threads had the CPU meanwhile.
        let (elapsed, busy) =
            wait_for("150 ms of a CPU", spin, |(_, busy)| *busy >= Duration::from_millis(150));
        assert!(elapsed >= Duration::from_millis(200), "{elapsed:?}, {busy:?}");
    }
}
