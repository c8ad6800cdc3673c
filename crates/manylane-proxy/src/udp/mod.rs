//! A proxy of datagrams: sessions between clients and servers, over lanes of UDP.
//!
//! | stage | module | when something is full or missing |
//! |---|---|---|
//! | a batch of a lane is received | `proxy` | the rest of its queue waits for the next pass |
//! | its session | `key`: its addresses, or bytes of the payload | too short: dropped, counted |
//! | a new session: limits, a server, a socket | `sessions` | dropped, counted with the reason |
//! | sent to the server by the session's socket | `server_socket` | no room: dropped, counted |
//! | refused by the server | `sessions` | the session ends; the next datagram begins another one |
//! | answers are read, a bounded number | `sessions` | the rest waits for the next pass |
//! | answers are sent by the lane, in batches | `proxy` | lost, counted; the lane has the reasons |
//! | no datagrams for long | `sessions`, by a timer wheel | the session ends |
//!
//! A session has a connected socket of its own, so that its server's answers are told apart by
//! their port, and the kernel reports what the server refuses. One epoll instance has the sockets
//! of all sessions of a thread and the descriptors of its lanes. Threads share what changes by
//! session, as in the [crate] for TCP; nothing that is shared is written for a datagram.

mod counters;
mod key;
mod proxy;
mod server_socket;
mod sessions;

pub use counters::{UdpCounters, UdpLaneCounters};
pub use key::PayloadKey;
pub use proxy::UdpProxy;
