//! Tools that test and measure Manylane: hosts on one machine, traffic, baseline receivers,
//! statistics and reports. Not a part of the product.

mod baseline;
pub mod bench;
pub mod client;
pub mod host;
pub mod lab;
pub mod link;
pub mod machine;
pub mod receiver;
pub mod report;
pub mod schema;
pub mod skip;
pub mod stats;
pub mod synthetic_work;
pub mod testbed;
pub mod traffic;

pub use host::Host;
pub use testbed::{Layout, Testbed};
