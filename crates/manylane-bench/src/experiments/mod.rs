//! The benchmarks.
//!
//! | module | measures |
//! |---|---|
//! | [`rx`] | cost of receiving (or of receiving and answering), the sustained rate, and the goodput at twice that rate; cost when the sender uses GSO |
//! | [`batch`] | cost of receiving a queued datagram, by its size and by messages per call |
//! | [`replies`] | cost of sending a datagram, by `sendmmsg` and by io_uring |
//! | [`churn`] | losses while lanes are added and removed |
//! | [`rtt`] | round-trip times and cost of each wait policy |
//! | [`flap`] | losses when a program, a second socket or a link changes |
//! | [`proxy`] | cost and latency of TCP proxies |
//! | [`flood`] | effects of a flood on clients and programs, with limits and without |

pub mod batch;
pub mod churn;
pub mod flap;
pub mod flood;
pub mod proxy;
pub mod replies;
pub mod rtt;
pub mod rx;
