//! TCP for one lane: packets and a time go in, packets and events come out. No I/O, no clock, no
//! unsafe code, nothing shared between lanes.
//!
//! A [`Stack`] has the connections of one lane. Its caller hands it the packets of a batch, answers
//! its [events](Event) by reads and writes, and lets it send what has come of them:
//!
//! ```
//! use manylane_tcp::time::Time;
//! use manylane_tcp::{Config, Output, Secret, Stack, What};
//!
//! /// Answers all that connections have sent, once a batch was given to the stack.
//! fn serve(stack: &mut Stack, now: Time, out: &mut impl Output) {
//!     while let Some(event) = stack.event() {
//!         if event.what == What::Readable {
//!             let mut request = Vec::new();
//!             let mut take = |bytes: &[u8]| {
//!                 request.extend_from_slice(bytes);
//!                 bytes.len()
//!             };
//!             while stack.read(event.id, &mut take) > 0 {}
//!             stack.write(event.id, &request, now);
//!             if stack.is_at_end(event.id) {
//!                 stack.close(event.id, now);
//!             }
//!         }
//!     }
//!     stack.flush(now, out);
//! }
//!
//! let mut stack = Stack::new(Config::default(), Secret::new([7; 16]), Time(0))?;
//! stack.listen("192.0.2.1:7".parse()?)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The way of a segment
//!
//! | stage | module | when something is full or missing |
//! |---|---|---|
//! | read: lengths, checksums, addresses | `packet` | dropped, counted |
//! | its connection | `table` | none: `time_wait`, then a SYN or a cookie, else a reset |
//! | SYNs | `handshake` | too many: a cookie (`secret`); no place in the table: dropped, counted |
//! | what is acceptable (RFC 5961, 7323) | `edge` | dropped or answered with an ACK, counted |
//! | state machine, buffers | `endpoint` (smoltcp) | no buffers: dropped, counted; it comes again |
//! | losses, windows | `sender`, `selective`, [`congestion`] | the rest waits in the send buffer |
//! | what is due | `established`, `sending`, [`wheel`] | no output space: sent by a later call |
//! | a packet: headers, checksums | `edge` (`translate`), `packet` | - |
//!
//! # Who owns what
//!
//! A connection that is established takes about 440 bytes, its congestion control included. Only
//! while it has something to do does it have an *endpoint*: smoltcp's socket with a receive and a
//! send buffer. Endpoints are allocated once and reused; they are opened at any sequence numbers by
//! a handshake that only smoltcp sees, and the edge translates between its numbers and those on the
//! wire. So connections in the handshake, idle ones and those in TIME-WAIT have no
//! buffers, and there are never more than [`Config::buffers_max`]. Received bytes lie in the
//! receive buffer until the application has read them, written ones in the send buffer until the
//! peer has acknowledged them. Nothing is allocated for a segment.
//!
//! # What it does not have
//!
//! Of SACK, smoltcp sends one block with each ACK, and ignores those of the peer; `sender` uses
//! them. There is no RACK (RFC 8985): a loss is seen by three duplicate ACKs. After a timeout all
//! that is not acknowledged is sent again, as the congestion window allows. The urgent pointer is
//! ignored: such data is delivered as any other. There is no ECN, no TCP Fast Open, and no check of
//! the path for packets that vanish without an ICMP error.

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
mod scoreboard;
mod secret;
mod selective;
mod sender;
mod sending;
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
pub use stack::{Levels, Stack};
