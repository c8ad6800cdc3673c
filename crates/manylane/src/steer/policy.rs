//! The policies and mechanisms of steering, as values.

use std::fmt;
use std::str::FromStr;

use manylane_bpf::abi;

use crate::error::{Error, ErrorKind, Result};
use crate::text_form::text_form;

/// A lane's index in the socket array; reusable once the lane has closed.
pub(crate) type Slot = u32;

/// The rule that picks the lane of a datagram.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Steering {
    /// By the kernel's hash of both addresses and ports. Datagrams of one flow stay in order.
    #[default]
    Flow,
    /// Strictly round-robin for each datagram.
    RoundRobin,
    /// The lane on the CPU that handled the interrupt.
    Cpu,
    /// A random lane.
    Random,
    /// The lane with the shorter queue of two picked at random.
    LeastLoaded,
    /// By a hash of `len` bytes of the payload from `offset` on. A shorter datagram is steered by
    /// flow.
    Key {
        /// First byte of the key.
        offset: u16,
        /// Bytes of the key, 1 to 64.
        len: u16,
    },
}

impl Steering {
    pub(crate) fn check(self) -> Result<()> {
        match self {
            Self::Key { len, .. } if !(1..=abi::KEY_MAX as u16).contains(&len) => {
                let message = format!("invalid key length {len}: expected 1 to {}", abi::KEY_MAX);
                Err(Error::new(ErrorKind::Config, message))
            }
            _ => Ok(()),
        }
    }

    /// The number of the policy in `abi/manylane_abi.h`.
    pub(super) fn number(self) -> u32 {
        match self {
            Self::Flow => 0,
            Self::RoundRobin => 1,
            Self::Cpu => 2,
            Self::Random => 3,
            Self::LeastLoaded => 4,
            Self::Key { .. } => 5,
        }
    }
}

impl fmt::Display for Steering {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flow => f.write_str("flow"),
            Self::RoundRobin => f.write_str("round-robin"),
            Self::Cpu => f.write_str("cpu"),
            Self::Random => f.write_str("random"),
            Self::LeastLoaded => f.write_str("least-loaded"),
            Self::Key { offset, len } => write!(f, "key {offset}:{len}"),
        }
    }
}

impl FromStr for Steering {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let key = || {
            let (offset, len) = text.strip_prefix("key")?.trim_start_matches([' ', '=']).split_once(':')?;
            Some(Self::Key { offset: offset.parse().ok()?, len: len.parse().ok()? })
        };
        let steering = match text {
            "flow" => Self::Flow,
            "round-robin" => Self::RoundRobin,
            "cpu" => Self::Cpu,
            "random" => Self::Random,
            "least-loaded" => Self::LeastLoaded,
            _ => key().ok_or_else(|| {
                let known = "flow, round-robin, cpu, random, least-loaded or key OFFSET:LENGTH";
                Error::new(ErrorKind::Config, format!("invalid steering {text:?}: expected {known}"))
            })?,
        };
        steering.check().map(|()| steering)
    }
}

/// The mechanism that enforces the steering.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SteeringBackend {
    /// The best mechanism that the process may use.
    #[default]
    Auto,
    /// eBPF (`SK_REUSEPORT`). Needs `CAP_BPF` and Linux 5.12, for atomics that return a value.
    Ebpf,
    /// Classic BPF (Linux 4.5). Unprivileged.
    ClassicBpf,
    /// The kernel's own choice among the sockets of the group.
    Kernel,
}

text_form!(
    "steering backend",
    SteeringBackend: Auto = "auto", Ebpf = "ebpf", ClassicBpf = "classic-bpf", Kernel = "kernel"
);

/// The steering in force.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EffectiveSteering {
    /// The policy in force; differs from the requested one where that is not available.
    pub policy: Steering,
    /// The mechanism in force; never [`SteeringBackend::Auto`].
    pub backend: SteeringBackend,
    /// The reason why the policy differs from the requested one, or why eBPF is not used.
    pub reason: Option<String>,
}

impl fmt::Display for EffectiveSteering {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} by {}", self.policy, self.backend)?;
        self.reason.as_ref().map_or(Ok(()), |why| write!(f, " ({why})"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_what_it_prints() {
        for text in ["flow", "round-robin", "cpu", "random", "least-loaded", "key 0:8", "key 65535:64"] {
            assert_eq!(text.parse::<Steering>().unwrap().to_string(), text);
        }
        assert_eq!("key=2:4".parse::<Steering>().unwrap(), Steering::Key { offset: 2, len: 4 });
        for text in ["", "rr", "key", "key 0", "key 0:0", "key 0:65", "key -1:4"] {
            assert_eq!(text.parse::<Steering>().unwrap_err().kind(), ErrorKind::Config, "{text}");
        }
        for text in ["auto", "ebpf", "classic-bpf", "kernel"] {
            assert_eq!(text.parse::<SteeringBackend>().unwrap().to_string(), text);
        }
    }
}
