//! One UDP socket, many lanes.
//!
//! A [`Socket`] binds one address and has one receive queue and one send path per CPU: its lanes,
//! which share nothing with each other. [`Socket::serve`] runs a closure on each batch of
//! datagrams, one pinned thread per lane:
//!
//! ```no_run
//! fn main() -> Result<(), manylane::Error> {
//!     let socket = manylane::Socket::bind("127.0.0.1:7777")?;
//!     socket.serve(|batch, out| {
//!         for datagram in batch {
//!             out.reply(&datagram, datagram.payload());
//!         }
//!     })?;
//!     Ok(())
//! }
//! ```
//!
//! The modules, in the order in which a datagram meets them: `config` (options, checked once),
//! `probe` (what the machine can do), `placement` (which CPU), `steer` (which lane), `lane`,
//! `wait` (what it does while its queue is empty), `io` (the engine, and the batch that it
//! received), the application, `outbox` (what is sent), `counters`. `group` is the state that the
//! lanes of a socket share; `socket` and `serve` connect these modules. Beside the path are
//! [`capture`] (copies of the frames that lanes of engine `xdp` receive and send), `metrics`
//! (counters as text, over HTTP if the program asks for it), [`control`] (counters and filters for
//! other processes, which `peer` verifies) and `filter` (limits and prefixes, which `io::xdp`
//! enforces). The modules have no circular dependencies.

mod bpf_load;
pub mod capture;
mod config;
mod connection;
pub mod control;
mod counters;
mod drop_policy;
mod error;
mod filter;
mod group;
mod io;
mod lane;
mod lane_shared;
mod metrics;
mod metrics_port;
mod outbox;
mod peer;
mod placement;
mod port_owner;
mod probe;
mod serve;
mod service;
#[cfg(test)]
mod skip;
mod socket;
mod steer;
pub mod tcp;
mod text_form;
mod vlan;
mod wait;

pub use config::{Builder, Engine};
pub use counters::{Counters, FilterDrops, LaneCounters, LaneId, NamedCounters};
pub use drop_policy::DropPolicy;
pub use error::{Error, ErrorKind, Result};
pub use filter::{Filter, Limit, Prefix, Rule};
pub use io::batch::{Batch, Datagram, Ecn};
pub use io::{Capabilities, DeviceQueue, FilterHandle, LeasedRing, LeasedRings, Lessor};
pub use lane::{Lane, Received};
pub use metrics::{MetricsPage, write_all_metrics};
pub use metrics_port::{MetricsPort, MetricsServer};
pub use outbox::{Flushed, Outbox};
pub use placement::Placement;
pub use probe::{Probe, probe};
pub use serve::LaneInfo;
pub use socket::{Handle, Socket};
pub use steer::{EffectiveSteering, Steering, SteeringBackend, key_hash};
pub use vlan::Vlan;
pub use wait::{EffectiveWait, WaitPolicy};
