//! TCP for one lane: packets and a time go in, packets and events come out. No I/O, no clock.

mod config;
pub mod congestion;
mod connection;
mod core;
mod counters;
mod device;
mod edge;
mod endpoint;
mod error;
mod established;
mod event;
mod flow;
mod handshake;
mod inner;
mod output;
mod packet;
mod secret;
mod sender;
mod sequence;
mod stack;
mod table;
pub mod time;
mod time_wait;
pub mod wheel;

pub use config::Config;
pub use counters::Counters;
pub use error::{Error, Result};
pub use event::{Event, Id, NetworkError, Reason, What};
pub use output::Output;
pub use secret::Secret;
pub use sender::NewController;
pub use stack::{Levels, Stack};
