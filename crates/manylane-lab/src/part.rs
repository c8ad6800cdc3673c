//! One round of one experiment.

use std::sync::atomic::AtomicBool;

use anyhow::Result;
use manylane_bench::Controller;

use crate::row::Row;
use crate::setups::Setups;

/// The work of a part.
type PartFn = Box<dyn Fn(&mut Setups, &AtomicBool) -> Result<Vec<Row>>>;

/// One round of one experiment.
pub struct Part {
    /// Its name in the state file: unique among the parts of a run.
    pub id: String,
    pub(super) run: PartFn,
}

impl Part {
    pub(super) fn new(
        id: String,
        work: impl Fn(&mut Setups, &AtomicBool) -> Result<Vec<Row>> + 'static,
    ) -> Self {
        Self { id, run: Box::new(work) }
    }
}

/// Runs a benchmark as a part: it may be stopped, and the bar shows parts.
pub(super) struct SilentController<'a>(pub(super) &'a AtomicBool);

impl Controller for SilentController<'_> {
    fn progress(&mut self, _done: f64, _what: &str) {}

    fn stop(&self) -> &AtomicBool {
        self.0
    }
}
