//! Waiting: what a lane does while its queue is empty.
//!
//! A lane that sleeps costs nothing and wakes late: after an interrupt, the scheduler, and often a
//! CPU that has to leave an idle state. A lane that polls receives at once and costs a CPU.
//! The policies:
//!
//! | policy | in the program | in the kernel |
//! |---|---|---|
//! | `sleep` | one call that sleeps | - |
//! | `busy-poll` | one call that sleeps | polls the device in that call for a while, instead of waiting for its interrupt |
//! | `spin` | polls for a while, then one call that sleeps | - |
//! | `adaptive` | as the [`governor`] decides: sleeps, or sleeps until shortly before the next batch is due and then polls | - |
//!
//! # One wait
//!
//! `Waiter::recv` (`lane/waiter.rs`) is the one place where a lane waits, whatever its engine:
//!
//! ```text
//!  recv: a batch? ──yes──► return it (no clock is read)
//!         │ no: read the clock
//!         ▼
//!  WaitGovernor::plan(now) ─► precise sleep ─► poll, poll, … ─► sleep for the rest of the timeout
//!         ▲                        │                 │                │
//!         └── record_arrival, record_wake_latency, record_timeout ◄───┘
//! ```
//!
//! `sleep` and `busy-poll` go straight to the sleep. So does `adaptive` until a batch has arrived.
//!
//! `io/mod.rs` has what each step is with each engine. Whether a policy is available is decided
//! once, when the socket opens (`socket/open.rs`); [`EffectiveWait`] says which policy is in force,
//! and why. A stop wakes a lane that sleeps. A lane that polls checks for a stop every few polls.
//! Sleeps and empty polls are counted.

pub(crate) mod governor;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};

/// Longest time without sleep, so that a lane notices a stop.
pub(crate) const SPIN_TIME_MAX: Duration = Duration::from_secs(1);

/// Default time that the kernel busy polls.
pub(crate) const BUSY_POLL_DEFAULT: Duration = Duration::from_micros(100);

/// Policy of a lane while its queue is empty, in [`Socket::serve`](crate::Socket::serve) and
/// [`Lane::recv_timeout`](crate::Lane::recv_timeout).
///
/// As text: `sleep`, `busy-poll` (100 µs), `busy-poll:MICROSECONDS`, `spin:MICROSECONDS`,
/// `adaptive`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitPolicy {
    /// Sleeps at once. Lowest cost, highest latency.
    #[default]
    Sleep,
    /// Sleeps, but the kernel first polls the device for this time, in the lane's own call
    /// (`SO_BUSY_POLL`, Linux 3.11, with `SO_PREFER_BUSY_POLL` and `SO_BUSY_POLL_BUDGET`, Linux
    /// 5.11). Engine `uring` uses `IORING_REGISTER_NAPI`, Linux 6.9. Engine `xdp` also uses
    /// `EPIOCSPARAMS`, Linux 6.9: a device with `irq-suspend-timeout` set (Linux 6.13) then
    /// suspends its interrupts while the lane keeps polling. Needs `CAP_NET_ADMIN` (not for
    /// `uring`), and a device with NAPI, which loopback has not. Where it is not available, the
    /// lane spins for the same time.
    BusyPoll(Duration),
    /// Polls for this time without a delay, then sleeps. Costs up to a CPU per lane.
    Spin(Duration),
    /// Spins only while the last gaps between batches show that it pays: the next batch is due
    /// sooner than a sleep would cost, or its time can be predicted that well. Otherwise sleeps.
    /// An idle lane never spins. Lanes that share a CPU sleep. Sets the timer slack of the
    /// waiting thread to 1 µs, and its time slice to the minimum (Linux 6.12), so that it preempts
    /// other threads on its CPU when it wakes up.
    Adaptive,
}

impl WaitPolicy {
    /// Time that a lane polls in each wait.
    pub(crate) fn spin_time(self) -> Duration {
        if let Self::Spin(time) = self { time } else { Duration::ZERO }
    }

    /// Time that the kernel busy polls.
    pub(crate) fn busy_poll_time(self) -> Option<Duration> {
        if let Self::BusyPoll(time) = self { Some(time) } else { None }
    }

    pub(crate) fn check(self) -> Result<Self> {
        match self {
            Self::BusyPoll(time) | Self::Spin(time) if time > SPIN_TIME_MAX => Err(Error::new(
                ErrorKind::Config,
                format!("invalid wait {self}: expected at most {SPIN_TIME_MAX:?}"),
            )),
            Self::BusyPoll(Duration::ZERO) | Self::Spin(Duration::ZERO) => Ok(Self::Sleep),
            _ => Ok(self),
        }
    }
}

impl fmt::Display for WaitPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sleep => f.pad("sleep"),
            Self::BusyPoll(BUSY_POLL_DEFAULT) => f.pad("busy-poll"),
            Self::BusyPoll(time) => f.pad(&format!("busy-poll:{}", time.as_micros())),
            Self::Spin(time) => f.pad(&format!("spin:{}", time.as_micros())),
            Self::Adaptive => f.pad("adaptive"),
        }
    }
}

impl FromStr for WaitPolicy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            let message = format!(
                "invalid wait {text:?}: expected sleep, busy-poll[:MICROSECONDS], spin:MICROSECONDS or adaptive"
            );
            Error::new(ErrorKind::Config, message)
        };
        let (name, micros) = match text.split_once(':') {
            Some((name, micros)) => {
                (name, Some(micros.parse().map(Duration::from_micros).map_err(|_| wrong())?))
            }
            None => (text, None),
        };
        let policy = match (name, micros) {
            ("sleep", None) => Self::Sleep,
            ("busy-poll", time) => Self::BusyPoll(time.unwrap_or(BUSY_POLL_DEFAULT)),
            ("spin", Some(time)) => Self::Spin(time),
            ("adaptive", None) => Self::Adaptive,
            _ => return Err(wrong()),
        };
        match policy {
            Self::BusyPoll(Duration::ZERO) | Self::Spin(Duration::ZERO) => Err(wrong()),
            _ => policy.check(),
        }
    }
}

/// The wait policy in force, and why it is not the requested one, if it differs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EffectiveWait {
    /// The policy in force.
    pub policy: WaitPolicy,
    /// The reason why it is not the requested policy.
    pub reason: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_read_back() {
        let micros = Duration::from_micros;
        for (text, policy) in [
            ("sleep", WaitPolicy::Sleep),
            ("busy-poll", WaitPolicy::BusyPoll(BUSY_POLL_DEFAULT)),
            ("busy-poll:20", WaitPolicy::BusyPoll(micros(20))),
            ("spin:1000000", WaitPolicy::Spin(SPIN_TIME_MAX)),
            ("adaptive", WaitPolicy::Adaptive),
        ] {
            assert_eq!(text.parse::<WaitPolicy>().unwrap(), policy);
            assert_eq!(policy.to_string(), text);
        }
        for bad in [
            "",
            "spin",
            "spin:",
            "spin:0",
            "spin:5ms",
            "spin:-1",
            "sleep:5",
            "adaptive:1",
            "busy-poll:0",
            "nap",
        ] {
            assert!(
                bad.parse::<WaitPolicy>().unwrap_err().to_string().contains("spin:MICROSECONDS"),
                "{bad}"
            );
        }
        assert!(
            "spin:1000001".parse::<WaitPolicy>().unwrap_err().to_string().ends_with("expected at most 1s")
        );
        assert_eq!(WaitPolicy::Spin(Duration::ZERO).check().unwrap(), WaitPolicy::Sleep);
    }
}
