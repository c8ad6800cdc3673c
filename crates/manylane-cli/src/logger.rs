//! Prints the library's log on standard error: warnings always, other levels with `--verbose`.
//!
//! Standard error can block for as long as its reader likes: a terminal that the program has
//! stopped, a full pipe. `manylane run` has a thread that no reader may block, so it lets another
//! thread print ([`print_on_thread`]).

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use log::{LevelFilter, Log, Metadata, Record};

use crate::output;

/// Maximum number of lines that wait to be printed.
const QUEUE_LEN_MAX: usize = 256;
/// Time that [`Log::flush`] waits for them.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(500);
const FLUSH_INTERVAL: Duration = Duration::from_millis(1);

struct Logger {
    /// Lines are printed at once until it is there.
    queue: OnceLock<Queue>,
}

static LOGGER: Logger = Logger { queue: OnceLock::new() };

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        // Messages of other crates are not for users.
        if self.enabled(record.metadata()) && record.target().starts_with("manylane") {
            let line = format!("{}: {}", record.level().as_str().to_lowercase(), record.args());
            match self.queue.get() {
                Some(queue) => queue.push(line),
                None => output::eprint_line(&line),
            }
        }
    }

    fn flush(&self) {
        if let Some(queue) = self.queue.get() {
            queue.flush();
        }
    }
}

/// Installs the logger, once.
pub(crate) fn install(verbose: bool) {
    if log::set_logger(&LOGGER).is_ok() {
        log::set_max_level(if verbose { LevelFilter::Debug } else { LevelFilter::Warn });
    }
}

/// Prints on a thread of its own from now on, so that logging does not block. The thread inherits
/// the signal mask of the caller.
///
/// # Errors
/// If no thread can be started.
pub(crate) fn print_on_thread() -> io::Result<()> {
    // Called once; the thread of a second queue would end at once.
    _ = LOGGER.queue.set(Queue::start(output::eprint_line)?);
    Ok(())
}

/// Lines for a thread that prints them.
struct Queue {
    lines: SyncSender<String>,
    /// Lines that are queued or being printed.
    unprinted: Arc<AtomicUsize>,
    /// Lines that found no room since the last that did.
    dropped: AtomicUsize,
}

impl Queue {
    fn start(print: impl Fn(&str) + Send + 'static) -> io::Result<Self> {
        let (lines, queued) = mpsc::sync_channel::<String>(QUEUE_LEN_MAX);
        let unprinted = Arc::new(AtomicUsize::new(0));
        let left = Arc::clone(&unprinted);
        let run = move || {
            for line in queued {
                print(&line);
                left.fetch_sub(1, Ordering::Release);
            }
        };
        thread::Builder::new().name("manylane-log".into()).spawn(run)?;
        Ok(Self { lines, unprinted, dropped: AtomicUsize::new(0) })
    }

    /// Queues a line, with the number of lines dropped before it. Does not block: without room the
    /// line is dropped.
    fn push(&self, line: String) {
        let dropped = self.dropped.swap(0, Ordering::Relaxed);
        let text = if dropped == 0 { line } else { format!("{}\n{line}", notice(dropped)) };
        if !self.try_send(text) {
            self.dropped.fetch_add(dropped + 1, Ordering::Relaxed);
        }
    }

    fn try_send(&self, text: String) -> bool {
        self.unprinted.fetch_add(1, Ordering::Relaxed);
        let is_queued = self.lines.try_send(text).is_ok();
        if !is_queued {
            self.unprinted.fetch_sub(1, Ordering::Relaxed);
        }
        is_queued
    }

    /// Waits until all lines are printed, for at most [`FLUSH_TIMEOUT`].
    fn flush(&self) {
        let until = Instant::now() + FLUSH_TIMEOUT;
        self.wait_printed(until);
        let dropped = self.dropped.swap(0, Ordering::Relaxed);
        if dropped > 0 && self.try_send(notice(dropped)) {
            self.wait_printed(until);
        }
    }

    fn wait_printed(&self, until: Instant) {
        while self.unprinted.load(Ordering::Acquire) > 0 && Instant::now() < until {
            thread::sleep(FLUSH_INTERVAL);
        }
    }
}

fn notice(dropped: usize) -> String {
    format!("warning: {dropped} lines dropped while standard error was blocked")
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::Receiver;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);

    /// A queue whose lines go to the receiver. Its thread blocks after each line until the sender
    /// is dropped.
    fn blocked_queue() -> (Queue, mpsc::Sender<()>, Receiver<String>) {
        let (unblock, blocked) = mpsc::channel();
        let (printed, lines) = mpsc::channel();
        let print = move |line: &str| {
            _ = printed.send(line.to_owned());
            _ = blocked.recv();
        };
        (Queue::start(print).unwrap(), unblock, lines)
    }

    #[test]
    fn a_blocked_reader_does_not_block_logging_threads() {
        let (queue, unblock, lines) = blocked_queue();
        queue.push("first".into());
        assert_eq!(lines.recv_timeout(TIMEOUT).unwrap(), "first");
        (0..QUEUE_LEN_MAX + 10).for_each(|number| queue.push(number.to_string()));
        drop(unblock);
        queue.wait_printed(Instant::now() + TIMEOUT);
        queue.push("last".into());
        drop(queue);
        let mut expected: Vec<String> = (0..QUEUE_LEN_MAX).map(|number| number.to_string()).collect();
        expected.push(format!("{}\nlast", notice(10)));
        assert_eq!(lines.iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_flush_waits_for_lines_and_has_a_bound() {
        let (queue, unblock, lines) = blocked_queue();
        let start = Instant::now();
        queue.push("one".into());
        queue.flush();
        assert!(start.elapsed() >= FLUSH_TIMEOUT);
        assert_eq!(lines.recv_timeout(TIMEOUT).unwrap(), "one");
        drop(unblock);
        queue.wait_printed(Instant::now() + TIMEOUT);
        queue.dropped.store(7, Ordering::Relaxed);
        queue.flush();
        assert_eq!(lines.recv_timeout(TIMEOUT).unwrap(), notice(7));
    }
}
