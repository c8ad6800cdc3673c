//! Congestion control: how many bytes a connection may have unacknowledged, and at which rate it
//! sends them.
//!
//! Controllers stand outside the state machine of TCP. The edge reports what it sees in segments:
//! see [`Controller`] for the order of calls. [`Algorithm`] names the ones of this crate; a
//! controller of your own implements the trait. This one keeps the window fixed:
//!
//! ```
//! use manylane_tcp::congestion::{Acked, Controller};
//! use manylane_tcp::time::Time;
//!
//! /// At most `segments` segments, for a link whose capacity is reserved.
//! #[derive(Debug)]
//! struct Fixed {
//!     segments: u32,
//!     mss: u16,
//! }
//!
//! impl Controller for Fixed {
//!     fn on_ack(&mut self, _: &Acked) {}
//!     fn on_loss(&mut self, _: Time, _in_flight: u32) {}
//!     fn on_timeout(&mut self, _: Time, _in_flight: u32) {}
//!     fn window(&self) -> u32 {
//!         self.segments * u32::from(self.mss)
//!     }
//!     fn set_mss(&mut self, mss: u16) {
//!         self.mss = mss;
//!     }
//! }
//!
//! let controller: Box<dyn Controller> = Box::new(Fixed { segments: 20, mss: 1448 });
//! assert_eq!(controller.window(), 28_960);
//! assert_eq!(controller.pacing_rate(), None);
//! ```

mod algorithm;
mod bandwidth;
mod bbr;
mod controller;
mod cubic;
mod new_reno;
mod rate;
mod window;

pub use algorithm::{Algorithm, UnknownAlgorithm};
pub use bbr::Bbr;
pub use controller::{Acked, Controller, NewController};
pub use cubic::Cubic;
pub use new_reno::NewReno;
pub use rate::{RateSample, RateSampler};
pub use window::{WINDOW_MAX, initial_window};
