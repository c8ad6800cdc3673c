//! The time that a run takes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use manylane_measure::{Sent, Until};

use crate::args::SendArgs;
use crate::signals;

/// Default duration.
pub(super) const DEFAULT_DURATION: Duration = Duration::from_secs(10);

/// The given duration, or the default; none if a count is given.
pub(super) fn send_duration(args: &SendArgs) -> Option<Duration> {
    args.duration.or_else(|| args.count.is_none().then_some(DEFAULT_DURATION))
}

/// Sends for a time, or until a signal.
pub(super) fn send_for(time: Duration, send: impl FnOnce(Until) -> Result<Sent>) -> Result<Sent> {
    let signal = signals::stop_flag()?;
    let stop = Arc::new(AtomicBool::new(false));
    let start = Instant::now();
    thread::scope(|scope| {
        let told = stop.clone();
        scope.spawn(move || {
            while start.elapsed() < time && !signal.load(Ordering::Relaxed) && !told.load(Ordering::Relaxed) {
                thread::sleep(time.saturating_sub(start.elapsed()).min(Duration::from_millis(20)));
            }
            told.store(true, Ordering::Relaxed);
        });
        let sent = send(Until::Stop(stop.clone()));
        // Even if the sender failed, the other thread must end.
        stop.store(true, Ordering::Relaxed);
        sent
    })
}
