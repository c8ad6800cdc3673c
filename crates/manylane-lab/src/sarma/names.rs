//! Names of the tables, and of a column.

pub(super) const TABLE_1: &str = "table 1";
pub(super) const TABLE_2: &str = "table 2";
pub(super) const TABLE_3: &str = "table 3";
pub(super) const TABLE_3_WRITES: &str = "table 3, writes";
pub(super) const FIGURE_7: &str = "figure 7";
pub(super) const FIGURE_8: &str = "figure 8";
pub(super) const FLOOD: &str = "flood";
pub(super) const FIGURE_9: &str = "figure 9";

/// The only column of Table 1.
pub(super) const COST: &str = "ns";
