//! TCP in user space: lanes of engine `xdp` with a stack each ([`manylane_tcp`]).
//!
//! [`TcpBuilder`] opens lanes that accept connections to the addresses that are listened on, and
//! make connections from ports of their own. A [`TcpLane`] belongs to one thread, which waits for
//! its events and answers them by reads and writes of a [`TcpStream`]:
//!
//! ```no_run
//! use std::time::Duration;
//! use manylane::tcp::{TcpBuilder, What};
//!
//! # fn main() -> Result<(), manylane::Error> {
//! for mut lane in TcpBuilder::new().listen("192.0.2.1:7")?.open()? {
//!     std::thread::spawn(move || -> Result<(), manylane::Error> {
//!         loop {
//!             lane.wait(Duration::from_secs(1))?;
//!             while let Some(event) = lane.event() {
//!                 let mut stream = lane.stream(event.id);
//!                 if event.what == What::Readable {
//!                     let mut echo = Vec::new();
//!                     let mut take = |bytes: &[u8]| {
//!                         echo.extend_from_slice(bytes);
//!                         bytes.len()
//!                     };
//!                     while stream.read(&mut take) > 0 {}
//!                     stream.write(&echo);
//!                     if stream.is_at_end() {
//!                         stream.close();
//!                     }
//!                 }
//!             }
//!         }
//!     });
//! }
//! # Ok(()) }
//! ```
//!
//! # What is whose
//!
//! | what | owner | when it is full or missing |
//! |---|---|---|
//! | frames to these addresses and ports | the lane of their queue | ring full: dropped, counted |
//! | addresses that are listened on | a kernel socket that lets nothing in | in use: an error |
//! | source ports | the lane, in blocks (`source_ports`) | all in use to one peer: an error |
//! | a packet of another lane's connection | handed over (`handover`) | box full: dropped, counted |
//! | a packet whose next hop is not known | the kernel, which finds it | refused: counted |
//! | ICMP errors | each lane reads all, and takes its own | above 32 KiB: dropped |
//!
//! The kernel socket keeps other programs from the address, and the kernel from resetting what the
//! XDP program passes to it. All queues of a device must have a lane: the kernel would get the
//! packets of the others. What is lost is sent again by its sender.
//!
//! The machine itself cannot connect to its lanes: such packets are on no device. When the process
//! ends in any way, the next packet of a connection reaches the kernel, which resets it.

mod coalescing;
mod group;
mod handover;
mod lane;
mod lanes;
mod source_ports;
mod stream;

pub use manylane_tcp::congestion;
pub use manylane_tcp::time::Time;
pub use manylane_tcp::{Config as StackConfig, Event, Id, Levels, Reason, What};

pub use lane::{TcpCounters, TcpLane};
pub use lanes::TcpBuilder;
pub use stream::TcpStream;
