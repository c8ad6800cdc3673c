//! Limits of settings that `manylane run` checks and passes on to the preload library.

/// Maximum number of lanes of a socket: one bit each in a word.
pub const LANES_MAX: usize = 64;
/// The longest delay before a receive, in microseconds.
pub const RX_USECS_MAX: u64 = 20_000;
