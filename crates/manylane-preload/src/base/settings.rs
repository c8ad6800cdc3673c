//! The settings in the environment, read once in the constructor. An invalid value costs one line
//! on standard error and counts as unset. `MANYLANE_PORTS` is different, because unset means all
//! ports: if it is invalid, no socket gets lanes.
//!
//! | variable | value | default |
//! |---|---|---|
//! | `MANYLANE_ENGINE` | `auto`, `mmsg`, `xdp` | `auto`, which is `mmsg` |
//! | `MANYLANE_LEASE_SOCKET` | name and secret of the socket of the launcher that leases queues, for `xdp` | none |
//! | `MANYLANE_STEERING` | `flow`, `cpu`, `random`; `round-robin` and `least-loaded` mean `random` here | `flow` |
//! | `MANYLANE_LANES` | most lanes of a socket, 1 (its own only) to 64 | four for each CPU |
//! | `MANYLANE_PORTS` | at most 32 ports and ranges: `53,5000-5010` | all |
//! | `MANYLANE_RX_USECS` | microseconds that a thread with a lane delays before it sleeps, where that pays; 0 for never; at most 20000 | as the load requires, 0 to 500 |
//! | `MANYLANE_REPORT` | path of the report, which the launcher makes: its last part is the descriptor that is inherited | no report |

use std::path::PathBuf;
use std::time::Duration;

use libc::{c_int, timespec};
use manylane_ipc::RX_USECS_MAX;
use manylane_ipc::lease::{LeaseToken, TOKEN_ENV_VAR};
use manylane_ipc::ports::{PORTS_ENV_VAR, PortRanges};

use crate::base::steer::Policy;

pub(crate) use manylane_ipc::LANES_MAX;

/// The longest time that a thread waits without polling other lanes, in milliseconds.
pub(crate) const WAIT_SLICE_MS: c_int = 20;
/// [`WAIT_SLICE_MS`], for ppoll(2).
pub(crate) const WAIT_SLICE: timespec = timespec { tv_sec: 0, tv_nsec: WAIT_SLICE_MS as i64 * 1_000_000 };
/// A delay is at most a slice.
const _: () = assert!(RX_USECS_MAX <= WAIT_SLICE_MS as u64 * 1000);

/// The settings, checked.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) steering: Policy,
    /// CPUs of the process when it started, by affinity and quota.
    pub(crate) cpus: usize,
    /// Max lanes of a socket, including lane 0.
    pub(crate) lanes: usize,
    /// Ports whose sockets may have lanes; none: all.
    ports: Option<PortRanges>,
    /// The delay before a sleep; none: by the load.
    pub(crate) rx_coalesce: Option<Duration>,
    pub(crate) report: Option<PathBuf>,
    /// CPU quota of the control group, in CPUs, rounded up; none: no less than the affinity
    /// mask has.
    pub(crate) quota: Option<u32>,
    /// The lessor of queues; only with engine `xdp`.
    pub(crate) lessor: Option<LeaseToken>,
}

impl Settings {
    /// Reads the environment, and calls `complain` with a line for each invalid variable.
    pub(crate) fn read(
        var: impl Fn(&str) -> Option<String>,
        cpus: usize,
        mut complain: impl FnMut(&str),
    ) -> Self {
        let mut settings = Self {
            steering: Policy::Flow,
            cpus,
            lanes: (4 * cpus).clamp(2, LANES_MAX),
            ports: None,
            rx_coalesce: None,
            report: var("MANYLANE_REPORT").filter(|path| !path.is_empty()).map(PathBuf::from),
            quota: None,
            lessor: None,
        };
        let mut take = |name: &str, expected: &str, set: &mut dyn FnMut(&str) -> Option<()>| {
            if let Some(value) = var(name).filter(|value| !value.is_empty())
                && set(&value).is_none()
            {
                complain(&format!("ignoring {name}={value}: expected {expected}"));
            }
        };
        let mut lessor = var(TOKEN_ENV_VAR).and_then(|text| LeaseToken::parse(&text));
        take("MANYLANE_ENGINE", "auto or mmsg (xdp needs 'manylane run')", &mut |text| match text {
            "auto" | "mmsg" => Some(()),
            "xdp" => {
                settings.lessor = Some(lessor.take()?);
                Some(())
            }
            _ => None,
        });
        let steerings = "flow, round-robin, cpu, random, least-loaded";
        take("MANYLANE_STEERING", steerings, &mut |text| {
            settings.steering = Policy::parse(text)?;
            Some(())
        });
        take("MANYLANE_LANES", "1 to 64", &mut |text| {
            settings.lanes = text.parse().ok().filter(|lanes| (1..=LANES_MAX).contains(lanes))?;
            Some(())
        });
        take("MANYLANE_RX_USECS", "microseconds from 0 to 20000", &mut |text| {
            let delay = text.parse().ok().filter(|delay| *delay <= RX_USECS_MAX)?;
            settings.rx_coalesce = Some(Duration::from_micros(delay));
            Some(())
        });
        // Last, because it overrides `MANYLANE_LANES`.
        if let Some(value) = var(PORTS_ENV_VAR).filter(|value| !value.is_empty()) {
            match value.parse() {
                Ok(ports) => settings.ports = Some(ports),
                Err(error) => {
                    complain(&format!("no socket gets lanes: invalid {PORTS_ENV_VAR}={value}: {error}"));
                    settings.lanes = 1;
                }
            }
        }
        settings
    }

    /// True if sockets that are bound to `port` may have lanes.
    pub(crate) fn allows_port(&self, port: u16) -> bool {
        self.lanes > 1 && self.ports.as_ref().is_none_or(|ports| ports.contains(port))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(vars: &[(&str, &str)]) -> (Settings, Vec<String>) {
        let var = |name: &str| vars.iter().find(|(at, _)| *at == name).map(|(_, value)| (*value).to_owned());
        let mut wrong = Vec::new();
        let settings = Settings::read(var, 2, |line| wrong.push(line.to_owned()));
        (settings, wrong)
    }

    #[test]
    fn ports_default_to_all_and_can_be_listed() {
        assert!(read(&[]).0.allows_port(1) && read(&[]).0.allows_port(65535));
        let (some, wrong) = read(&[("MANYLANE_PORTS", "53,5000-5010")]);
        assert!(wrong.is_empty());
        for (port, allowed) in [(52, false), (53, true), (5000, true), (5010, true), (5011, false)] {
            assert_eq!(some.allows_port(port), allowed, "{port}");
        }
        assert!(!read(&[("MANYLANE_LANES", "1")]).0.allows_port(53));
    }

    #[test]
    fn invalid_ports_do_not_mean_all_ports() {
        let too_many = (1..=33).map(|port| port.to_string()).collect::<Vec<_>>().join(",");
        for ports in ["9-1", "0", "53;54", " ", "\u{fffd}", &too_many] {
            let (settings, wrong) = read(&[("MANYLANE_PORTS", ports), ("MANYLANE_LANES", "8")]);
            assert_eq!(settings.lanes, 1, "{ports}");
            assert!([1, 9, 53, 65535].iter().all(|port| !settings.allows_port(*port)), "{ports}");
            assert_eq!(wrong.len(), 1, "{ports}");
            assert!(wrong[0].starts_with("no socket gets lanes: invalid MANYLANE_PORTS="), "{}", wrong[0]);
        }
        assert!(read(&[("MANYLANE_PORTS", "")]).0.allows_port(53));
    }

    #[test]
    fn invalid_settings_are_reported_and_ignored() {
        let vars = [
            ("MANYLANE_LANES", "65"),
            ("MANYLANE_STEERING", "rr"),
            ("MANYLANE_ENGINE", "dpdk"),
            ("MANYLANE_RX_USECS", "20001"),
        ];
        let (settings, wrong) = read(&vars);
        assert_eq!(wrong.len(), vars.len());
        assert!(wrong.iter().all(|line| line.starts_with("ignoring MANYLANE_")), "{wrong:?}");
        assert!(settings.lanes == 8 && settings.rx_coalesce.is_none());
        assert_eq!(read(&[("MANYLANE_RX_USECS", "0")]).0.rx_coalesce, Some(Duration::ZERO));
    }
}
