//! Benchmarks of Manylane: every receiver side by side in one run, interleaved, with all samples
//! kept. Not a part of the product.
//!
//! | module | holds |
//! |---|---|
//! | [`receivers`] | the baselines, and the lanes behind the same interface |
//! | [`place`] | the place of a benchmark: loopback, or two hosts of a testbed |
//! | [`run`] | options, rounds, progress; [`measure`]: one sample; [`search`]: the sustained rate |
//! | [`experiments`] | the benchmarks |
//! | [`settings`], [`schema`], [`report`] | their documents: settings, rows, pages |
//! | [`stats`] | medians, spread, the test of difference |

pub mod experiments;
mod pinned;
pub mod place;
pub mod receivers;
pub mod report;
pub mod run;
mod sample;
pub mod schema;
pub mod search;
pub mod settings;
pub mod stats;
pub mod work;

pub use pinned::run_pinned;
pub use place::{Load, Setup};
pub use receivers::{RING_SIZE, default_recv_buffer};
pub use run::{Controller, DEFAULT_FLOWS, Options};
pub(crate) use run::{oversubscribed_note, run_rounds, safe_rate};
pub use sample::{check_stop, measure};
pub use search::{Limits, SearchResult, Trial, sustained_rate};
