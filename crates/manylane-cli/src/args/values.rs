//! Option values that only the command line uses.

use std::net::SocketAddr;
use std::ops::RangeBounds;

use clap::ValueEnum;
use clap::builder::RangedU64ValueParser;

/// What to capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CaptureTarget {
    /// All sockets of a process.
    Pid(u32),
    /// One socket.
    Address(SocketAddr),
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    /// On.
    On,
    /// Off.
    Off,
}

impl Switch {
    pub(crate) fn is_on(self) -> bool {
        self == Self::On
    }
}

/// Parses a whole number within `range`.
pub(super) fn within(range: impl RangeBounds<u64>) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(range)
}

pub(super) fn capture_target(text: &str) -> Result<CaptureTarget, String> {
    let pid = text.parse().map(CaptureTarget::Pid);
    pid.or_else(|_| text.parse().map(CaptureTarget::Address)).map_err(|_| {
        "give the number of a process, or the address of a socket such as 192.0.2.1:53 or [::]:53".into()
    })
}
