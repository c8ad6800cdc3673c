//! A proxy on lanes. For TCP, it accepts connections, makes one to a server for each, and moves
//! bytes between the two. For UDP, see [`udp`].
//!
//! | stage | module | when something is full or missing |
//! |---|---|---|
//! | a connection is accepted | [`lane`]: a stack of its own, or `kernel` | as that lane says |
//! | it is within the limits | `limits` | refused by a reset, counted |
//! | a server for it | `balance`, over those that are up ([`servers`]) | none: a reset, counted |
//! | a connection to the server | `sessions` | fails: another server, up to three; then a reset |
//! | bytes in both directions | the lane's `forward` | no room: they stay where they are |
//! | the end of one direction | `sessions` | the other one goes on, for a limited time |
//! | no bytes for long | `sessions`, by a timer wheel | both sides get a reset |
//!
//! A lane belongs to one thread, and shares with others only what changes by connection: how many
//! a server and a source have, and which servers are up. Nothing of that is touched for a segment.
//! A session has no buffer of its own: bytes go from the receive buffer of one connection to the
//! send buffer of the other one. If that is full, the window of their sender closes.

mod balance;
mod counters;
mod header;
mod kernel;
mod kernel_connection;
pub mod lane;
mod limits;
mod maglev;
pub mod servers;
mod sessions;
mod settings;
mod stats;
pub mod udp;

pub use balance::Balance;
pub use counters::{Counters, LaneCounters};
pub use header::ProxyHeader;
pub use kernel::KernelLane;
pub use sessions::Proxy;
pub use settings::{Options, Settings, Shared};
pub use stats::{StackStats, Stat};
