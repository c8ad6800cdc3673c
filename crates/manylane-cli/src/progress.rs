//! Progress: a bar on a terminal, otherwise a line from time to time.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output;

/// Min interval between lines if standard error is not a terminal, but a log.
const LINE_INTERVAL: Duration = Duration::from_secs(5);
/// Steps of the bar.
const STEPS: u64 = 1000;

/// A progress bar on standard error.
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    last_line: Option<Instant>,
}

impl Progress {
    /// A bar from 0 to 1.
    pub(crate) fn bar() -> Self {
        Self::with_template("{bar:32} {percent:>3} %  {elapsed}  {wide_msg}")
    }

    /// A line that is updated in place, for work without a known end.
    pub(crate) fn live() -> Self {
        Self::with_template("{wide_msg}")
    }

    fn with_template(template: &str) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(STEPS), ProgressDrawTarget::stderr_with_hz(10));
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style.progress_chars("━╸ "));
            }
            bar
        });
        Self { bar, last_line: None }
    }

    /// Shows the fraction `done` and the current step `what`.
    pub(crate) fn show(&mut self, done: f64, what: &str) {
        if let Some(bar) = &self.bar {
            bar.set_position((done.clamp(0.0, 1.0) * STEPS as f64) as u64);
            bar.set_message(what.to_owned());
        } else if self.last_line.is_none_or(|last| last.elapsed() >= LINE_INTERVAL) {
            self.last_line = Some(Instant::now());
            output::eprint_line(&format!("{:3.0} %  {what}", done * 100.0));
        }
    }

    /// Prints a line of statistics: in place on a terminal, otherwise as a new line.
    pub(crate) fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(text.to_owned()),
            None => output::eprint_line(text),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
