//! Measuring tools that the program `manylane` and its benchmarks share.
//!
//! | module | holds |
//! |---|---|
//! | [`sockets`] | the sender on ordinary sockets: [`Traffic`], at a rate |
//! | [`client`] | a client that sends requests by schedule and times the replies |
//! | [`machine`] | the machine that a result was measured on |
//! | [`document`] | the JSON document of a result |
//! | [`named_enum`] | enums whose variants are options of the command line |

pub mod client;
pub mod document;
pub mod machine;
mod names;
mod pacer;
pub mod sockets;
mod traffic;

pub use document::{Document, format_number};
pub use machine::Machine;
pub use traffic::{Sent, Traffic, Until};
