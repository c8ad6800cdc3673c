//! Names of the tables and of their columns.

pub(super) const FIGURE_2: &str = "figure 2";
pub(super) const FIGURE_2_CPU: &str = "figure 2, CPU time";
pub(super) const FIGURE_4: &str = "figure 4";
pub(super) const TABLE_1: &str = "table I";
pub(super) const TABLE_2: &str = "table II";
pub(super) const TABLE_3: &str = "table III";
pub(super) const CALLERS: &str = "callers";

/// Columns of Tables I to III. The paper heads its times with ms; they are the microseconds that
/// the kernel prints: 2,001,099 ms of holding would be half an hour for a run of seconds.
pub(super) const HOLD_TIME: &str = "held, µs";
pub(super) const ACQUISITIONS: &str = "acquisitions";
pub(super) const HOLD_TIME_MEAN: &str = "mean hold, µs";
pub(super) const WAIT_TIME: &str = "waited, µs";
pub(super) const CONTENTIONS: &str = "contentions";
pub(super) const WAIT_TIME_MEAN: &str = "mean wait, µs";
