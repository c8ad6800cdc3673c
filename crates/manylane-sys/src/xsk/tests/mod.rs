//! Tests of queues: on a mock kernel, and on the real one.

mod conservation;
mod mock;
mod queue;
#[cfg(not(miri))]
mod real;
#[cfg(not(miri))]
mod real_support;
#[cfg(not(miri))]
mod real_veth;
mod sharing;
