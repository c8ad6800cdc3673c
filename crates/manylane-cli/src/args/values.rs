//! Option values that only the command line uses.

use std::net::SocketAddr;

use clap::ValueEnum;

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

#[cfg(feature = "bench")]
pub(super) fn messages(text: &str) -> Result<usize, String> {
    positive(text).and_then(|count| if count <= 1024 { Ok(count) } else { Err("at most 1024".into()) })
}

pub(super) fn positive(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|number| *number >= 1).ok_or("give a whole number above 0".into())
}

pub(super) fn capture_target(text: &str) -> Result<CaptureTarget, String> {
    let pid = text.parse().map(CaptureTarget::Pid);
    pid.or_else(|_| text.parse().map(CaptureTarget::Address)).map_err(|_| {
        "give the number of a process, or the address of a socket such as 192.0.2.1:53 or [::]:53".into()
    })
}

pub(super) fn snaplen(text: &str) -> Result<usize, String> {
    const SNAPLEN_MAX: usize = manylane::capture::SNAPLEN_MAX;
    text.parse()
        .ok()
        .filter(|len| (1..=SNAPLEN_MAX).contains(len))
        .ok_or(format!("give a number from 1 to {SNAPLEN_MAX}"))
}

#[cfg(feature = "bench")]
pub(super) fn interfaces(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|number| (1..=16).contains(number)).ok_or("give a number from 1 to 16".into())
}

pub(super) fn payload_size(text: &str) -> Result<usize, String> {
    const PAYLOAD_SIZE_MAX: usize = manylane_measure::client::MAX_PAYLOAD;
    text.parse()
        .ok()
        .filter(|size| *size <= PAYLOAD_SIZE_MAX)
        .ok_or(format!("give a size from 0 to {PAYLOAD_SIZE_MAX}"))
}

pub(super) fn seconds(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|value: &f64| (0.0..=1e6).contains(value)).ok_or("give seconds, or 0".into())
}

pub(super) fn interval(text: &str) -> Result<f64, String> {
    let seconds: Option<f64> = text.parse().ok();
    seconds.filter(|value| (0.01..=1e6).contains(value)).ok_or("give seconds, 0.01 at least".into())
}
