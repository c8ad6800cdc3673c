//! Names of the tables.

pub(super) const TABLE_1: &str = "table 1";
pub(super) const TABLE_2: &str = "table 2";
pub(super) const GAP_1: &str = "table 1, gap";
pub(super) const GAP_2: &str = "table 2, gap";
pub(super) const CORES: &str = "cores";
