//! Option values that only the command line uses.

use std::net::SocketAddr;
use std::ops::RangeBounds;
use std::time::Duration;

use clap::ValueEnum;
use clap::builder::RangedU64ValueParser;
use manylane_ipc::RX_USECS_MAX;

use crate::parse;

/// Range of intervals in which events are counted.
const INTERVAL_RANGE: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(10)..=Duration::from_secs(1_000_000);

/// Range of a lane's buffer in a captured process.
const CAPTURE_BUFFER_RANGE: std::ops::RangeInclusive<usize> = 64 << 10..=64 << 20;

/// Target of a capture.
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

/// Parses microseconds of a delay before a receive.
pub(super) fn rx_usecs() -> RangedU64ValueParser<u64> {
    RangedU64ValueParser::new().range(..=RX_USECS_MAX)
}

pub(super) fn capture_target(text: &str) -> Result<CaptureTarget, String> {
    let pid = text.parse().map(CaptureTarget::Pid);
    pid.or_else(|_| text.parse().map(CaptureTarget::Address))
        .map_err(|_| "expected a PID, or the address of a socket such as 192.0.2.1:53 or [::]:53".into())
}

/// Parses the size of a lane's buffer in a captured process.
pub(super) fn capture_buffer(text: &str) -> Result<usize, String> {
    let bytes = parse::bytes(text)?;
    if CAPTURE_BUFFER_RANGE.contains(&bytes) { Ok(bytes) } else { Err("expected 64K to 64M".into()) }
}

/// Parses an interval in which events are counted.
pub(super) fn interval(text: &str) -> Result<Duration, String> {
    let time = parse::duration(text)?;
    if INTERVAL_RANGE.contains(&time) {
        Ok(time)
    } else {
        Err("expected a time from 10ms to 1000000s".into())
    }
}

/// As [`interval`], or 0.
pub(super) fn interval_or_zero(text: &str) -> Result<Duration, String> {
    if parse::duration_or_zero(text)?.is_zero() { Ok(Duration::ZERO) } else { interval(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_have_a_minimum() {
        assert_eq!(interval("10ms"), Ok(Duration::from_millis(10)));
        assert_eq!(interval_or_zero("0s"), Ok(Duration::ZERO));
        assert_eq!(interval_or_zero("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["1us", "9ms", "1000001"] {
            assert!(interval(bad).unwrap_err().contains("10ms") && interval_or_zero(bad).is_err(), "{bad}");
        }
        assert!(interval("0").is_err());
    }
}
