//! Steering: the rule that picks the lane of a datagram, and the mechanism that enforces it.
//!
//! A socket has one table. Its entries name lanes by slot; the policy selects the entry of a
//! datagram ([`table`] computes the layout). Three mechanisms can enforce it, in order of
//! preference:
//!
//! 1. [`ebpf`]: every policy. Lanes are selected through a socket array, so slots do not depend on
//!    the kernel's numbering;
//! 2. [`classic`]: `flow`, `cpu`, `random` and `key`, compiled anew for each table, unprivileged;
//!    `round-robin` and `least-loaded` become `random`;
//! 3. the kernel's own choice: its hash over the group. Lanes then cannot be taken out of
//!    steering.
//!
//! [`Steer`] keeps the order of events under the socket's control lock. A new lane is bound and
//! has its buffers before it is steered to. The queue of a lane that is removed is drained only
//! after the lane is out of the table and a grace period has passed.

mod classic;
mod ebpf;
mod table;

use std::fmt;
use std::os::fd::BorrowedFd;
use std::str::FromStr;
use std::sync::Arc;

use manylane_bpf::abi;
use manylane_sys::map::SharedWords;

use crate::error::{Error, ErrorKind, Result};
use crate::text_form::text_form;
use classic::ClassicSteer;
use ebpf::EbpfSteer;
use table::Layout;

pub(crate) use ebpf::try_load as try_load_ebpf;
pub use table::key_hash;

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
            Self::Key { len, .. } if !(1..=abi::MAX_KEY as u16).contains(&len) => {
                let message = format!("invalid key length {len}: expected 1 to {}", abi::MAX_KEY);
                Err(Error::new(ErrorKind::Config, message))
            }
            _ => Ok(()),
        }
    }

    /// The number of the policy in `abi/manylane_abi.h`.
    fn number(self) -> u32 {
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

enum Backend {
    Ebpf(Box<EbpfSteer>),
    Classic(ClassicSteer),
    Kernel,
}

/// The steering of one socket: the table, and the mechanism.
pub(crate) struct Steer {
    backend: Backend,
    layout: Layout,
    effective: EffectiveSteering,
}

impl Steer {
    /// Selects the mechanism for `policy`. Loads eBPF here, so that privileges may be dropped
    /// afterwards. `shared` is true if other sockets may be in the group.
    pub(crate) fn new(policy: Steering, by: SteeringBackend, shared: bool) -> Result<Self> {
        let (backend, why) = match by {
            SteeringBackend::Ebpf => (Backend::Ebpf(Box::new(EbpfSteer::load(policy)?)), None),
            SteeringBackend::ClassicBpf => {
                (Backend::Classic(ClassicSteer::new(policy)), Some("requested".into()))
            }
            SteeringBackend::Kernel if shared => {
                (Backend::Kernel, Some("reuse_port: other processes share the group".into()))
            }
            SteeringBackend::Kernel => (Backend::Kernel, Some("requested".into())),
            SteeringBackend::Auto => match EbpfSteer::load(policy) {
                Ok(ebpf) => (Backend::Ebpf(Box::new(ebpf)), None),
                Err(err) => {
                    (Backend::Classic(ClassicSteer::new(policy)), Some(format!("no eBPF: {}", err.chain())))
                }
            },
        };
        let (in_force, by) = match &backend {
            Backend::Ebpf(_) => (policy, SteeringBackend::Ebpf),
            Backend::Classic(classic) => (classic.policy(), SteeringBackend::ClassicBpf),
            // The kernel's choice is always a hash of the flow.
            Backend::Kernel => (Steering::Flow, SteeringBackend::Kernel),
        };
        let in_force = EffectiveSteering { policy: in_force, backend: by, reason: why };
        Ok(Self { backend, layout: Layout::new(in_force.policy), effective: in_force })
    }

    pub(crate) fn effective(&self) -> EffectiveSteering {
        self.effective.clone()
    }

    /// True if a socket of the group must not be closed while others stay open. The kernel removes
    /// a closing socket from its group before it removes it from the port table (udp_lib_unhash in
    /// net/ipv4/udp.c). A datagram that finds it in between bypasses steering, is queued on it,
    /// and is lost. Classic BPF also needs the kernel's numbering of the group to stay. With the
    /// kernel's own choice the socket has to close, because a parked one would be selected.
    pub(crate) fn needs_parking(&self) -> bool {
        !matches!(self.backend, Backend::Kernel)
    }

    /// True if steering uses the kernel's index of sockets in the group, which a foreign socket
    /// would shift.
    pub(crate) fn is_index_based(&self) -> bool {
        matches!(self.backend, Backend::Classic(_))
    }

    /// Starts steering to the lane in `slot`, which is bound and ready. Its thread runs on `cpu`.
    pub(crate) fn admit(&mut self, slot: Slot, fd: BorrowedFd<'_>, cpu: Option<usize>) -> Result<()> {
        if let Backend::Ebpf(ebpf) = &mut self.backend {
            ebpf.insert_socket(slot, fd)?;
        }
        self.layout.admit(slot, cpu);
        self.apply(fd)
    }

    /// Stops steering to the lane in `slot`. After a grace period, no more datagrams arrive in its
    /// queue. The exception is the kernel's own choice, which may always select it.
    pub(crate) fn retire(&mut self, slot: Slot, fd: BorrowedFd<'_>) -> Result<()> {
        self.layout.retire(slot);
        self.apply(fd)
    }

    /// Installs the table. `fd` is any socket of the group.
    fn apply(&mut self, fd: BorrowedFd<'_>) -> Result<()> {
        if self.layout.is_empty() {
            return Ok(());
        }
        let refused = match &mut self.backend {
            Backend::Kernel => None,
            Backend::Ebpf(ebpf) => {
                ebpf.write_table(&self.layout)?;
                ebpf.attach(fd, self.layout.lanes())?;
                None
            }
            Backend::Classic(classic) => classic.attach(fd, &self.layout).err(),
        };
        // The kernel or a seccomp filter refuses classic BPF: report it, and fall back to the
        // kernel's choice.
        if let Some(err) = refused {
            log::warn!("steering falls back to the kernel's hash: no classic BPF: {err}");
            self.effective = EffectiveSteering {
                policy: Steering::Flow,
                backend: SteeringBackend::Kernel,
                reason: Some(format!("no classic BPF: {err}")),
            };
            self.backend = Backend::Kernel;
        }
        Ok(())
    }

    /// The last lane is gone: drops the reference to its socket.
    pub(crate) fn close(&mut self) {
        if let Backend::Ebpf(ebpf) = &mut self.backend {
            ebpf.close();
        }
    }

    /// The words in which a lane publishes its load to eBPF, if the policy uses them.
    pub(crate) fn load_words(&self) -> Option<Arc<SharedWords>> {
        match &self.backend {
            Backend::Ebpf(ebpf) => ebpf.load_words(),
            _ => None,
        }
    }

    /// Messages steered to `slot` so far, including those for earlier lanes in it.
    pub(crate) fn steered(&self, slot: Slot) -> Option<u64> {
        match &self.backend {
            Backend::Ebpf(ebpf) => ebpf.steered(slot),
            _ => None,
        }
    }

    /// Datagrams too short for the key, and messages left to the kernel's choice.
    pub(crate) fn fallbacks(&self) -> (u64, u64) {
        match &self.backend {
            Backend::Ebpf(ebpf) => ebpf.fallbacks(),
            _ => (0, 0),
        }
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

    #[test]
    fn without_ebpf_the_shared_counter_policies_become_random() {
        for policy in [Steering::RoundRobin, Steering::LeastLoaded] {
            let steer = Steer::new(policy, SteeringBackend::ClassicBpf, false).unwrap();
            assert_eq!(steer.effective().policy, Steering::Random);
        }
    }
}
