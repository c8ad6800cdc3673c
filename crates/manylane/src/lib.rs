//! One UDP socket, many lanes.
//!
//! A [`Socket`] binds one address and has one receive queue and one send path per core: its lanes, which share
//! nothing with each other. [`Socket::serve`] runs a closure on each batch of datagrams, one pinned thread per
//! lane:
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
//! The modules, in the order in which a datagram meets them: `config` (options, checked once), `probe` and `race` (what the
//! machine can do, and does best), `placement` (which core), `steer` (which lane), `lane`, `wait` (what it does
//! while there is nothing), `io` (the engine), `batch` (what was
//! received), the application, `outbox` (what is sent), `counters`. `socket` and `serve` hold them together. Beside the
//! path are [`capture`] (seeing what lanes of the engine `xdp` receive and send), `metrics` (counters as text, and served by
//! HTTP when asked for), [`door`]
//! (other processes that ask for them) and `guard` (limits and prefixes, which `io::xdp` enforces).

mod batch;
pub mod capture;
mod config;
mod counters;
pub mod door;
mod error;
mod guard;
mod holder;
mod io;
mod lane;
mod metrics;
mod metrics_port;
mod outbox;
mod overload;
mod placement;
mod probe;
mod race;
mod serve;
mod sizes;
mod socket;
mod steal;
mod steer;
mod verify;
mod vlan;
mod wait;

pub use batch::{Batch, Datagram, Ecn};
pub use config::{Builder, Engine};
pub use counters::{Counters, LaneCounters, LaneId};
pub use error::{Error, ErrorKind, Result};
pub use guard::{Guard, Limit, Prefix, Rule};
pub use io::Capabilities;
pub use io::xdp::lending::{Lender, LentRing, LentRings};
pub use io::xdp::{Gate, Refused, XdpQueue};
pub use lane::{Lane, Received};
pub use metrics::write_all_metrics;
pub use metrics_port::{MetricsPort, MetricsServer};
pub use outbox::{Flushed, Outbox};
pub use overload::Overload;
pub use placement::Placement;
pub use probe::{Probe, probe};
pub use race::{EngineChoice, choose_engine};
pub use serve::LaneInfo;
pub use socket::{Handle, Socket};
pub use steer::{Steering, SteeringBy, SteeringInForce, key_hash};
pub use vlan::Vlan;
pub use wait::{WaitInForce, WaitPolicy};
