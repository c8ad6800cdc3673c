//! Checks options, also for combinations that are not supported.

use std::time::Duration;

use manylane_bpf::abi;

use super::{BATCH_MAX, Builder, Config, DATAGRAM_SIZE_MAX, Gro, check_range};
use crate::error::{Error, ErrorKind, Result};
use crate::steer::{Steering, SteeringBackend};

/// Maximum of `rx_coalesce`: every wait of a lane has a bound.
const RX_COALESCE_MAX: Duration = Duration::from_millis(20);

impl Builder {
    /// The checked form of the options; the engine checks those that concern it.
    pub(crate) fn check(&self) -> Result<Config> {
        let range = check_range;
        let lanes = match self.lanes {
            Some(lanes) => lanes,
            None => std::thread::available_parallelism().map_or(1, usize::from).min(abi::LANES_MAX),
        };
        self.config.steering.check()?;
        if self.config.rx_coalesce.is_some_and(|delay| delay > RX_COALESCE_MAX) {
            return Err(Error::new(
                ErrorKind::Config,
                format!("invalid rx_coalesce: expected at most {RX_COALESCE_MAX:?}"),
            ));
        }
        if self.config.only_v6 && self.config.addr.is_ipv4() {
            return Err(Error::new(
                ErrorKind::Config,
                format!("only_v6 needs an IPv6 address, not {}", self.config.addr),
            ));
        }
        if self.config.reuse_port
            && !matches!(self.config.steering_backend, SteeringBackend::Auto | SteeringBackend::Kernel)
        {
            let message = format!(
                "reuse_port does not support steering_backend {}, because other processes share the group: use auto or kernel",
                self.config.steering_backend
            );
            return Err(Error::new(ErrorKind::Config, message));
        }
        if self.config.reuse_port && self.config.addr.port() == 0 {
            return Err(Error::new(ErrorKind::Config, "reuse_port needs a port other than 0"));
        }
        for (name, bytes) in
            [("recv_buffer", self.config.recv_buffer), ("send_buffer", self.config.send_buffer)]
        {
            bytes.map_or(Ok(0), |bytes| range(name, bytes, i32::MAX as usize / 2))?;
        }
        let mut config = self.config.clone();
        config.lanes = range("lanes", lanes, abi::LANES_MAX)?;
        if config.reuse_port {
            config.steering_backend = SteeringBackend::Kernel;
        }
        range("batch", config.batch, BATCH_MAX)?;
        range("datagram_size", config.datagram_size, DATAGRAM_SIZE_MAX)?;
        config.gro = match (self.gro, config.steering) {
            (Some(true), _) => Gro::On,
            (Some(false), _) | (None, Steering::RoundRobin | Steering::Key { .. }) => Gro::Off,
            (None, _) => Gro::ByTraffic,
        };
        config.wait = config.wait.check()?;
        config.xdp.filter.set_limits(&self.limits)?;
        for (prefix, rule) in &self.rules {
            config.xdp.filter.set_rule(*prefix, Some(*rule))?;
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait::WaitPolicy;

    fn builder() -> Builder {
        Builder::new("127.0.0.1:0").unwrap()
    }

    #[test]
    fn the_default_is_a_lane_per_available_cpu() {
        let cpus = std::thread::available_parallelism().unwrap().get();
        assert_eq!(builder().check().unwrap().lanes, cpus);
    }

    #[test]
    fn invalid_options_are_refused_by_name() {
        let refused = |change: &dyn Fn(&mut Builder)| {
            let mut builder = builder();
            change(&mut builder);
            let err = builder.check().unwrap_err();
            assert_eq!(err.kind(), ErrorKind::Config);
            err.to_string()
        };
        assert_eq!(refused(&|b| _ = b.lanes(0)), "invalid lanes 0: expected 1 to 256");
        assert_eq!(refused(&|b| _ = b.lanes(257)), "invalid lanes 257: expected 1 to 256");
        assert_eq!(refused(&|b| _ = b.batch(1025)), "invalid batch 1025: expected 1 to 1024");
        assert_eq!(refused(&|b| _ = b.datagram_size(0)), "invalid datagram_size 0: expected 1 to 65535");
        assert_eq!(refused(&|b| _ = b.recv_buffer(0)), "invalid recv_buffer 0: expected 1 to 1073741823");
        assert_eq!(
            refused(&|b| _ = b.rx_coalesce(Duration::from_secs(1))),
            "invalid rx_coalesce: expected at most 20ms"
        );
        assert_eq!(
            refused(&|b| _ = b.wait(WaitPolicy::Spin(Duration::from_micros(1_000_001)))),
            "invalid wait spin:1000001: expected at most 1s"
        );
        assert!(refused(&|b| _ = b.only_v6(true)).contains("only_v6"));
        assert!(refused(&|b| _ = b.reuse_port(true)).contains("reuse_port"));
        assert!(refused(&|b| _ = b.steering(Steering::Key { offset: 0, len: 65 })).contains("key"));
    }

    #[test]
    fn gro_gives_way_to_policies_that_want_every_datagram() {
        let gro = |steering| builder().steering(steering).check().unwrap().gro;
        assert_eq!(gro(Steering::Flow), Gro::ByTraffic);
        assert_eq!(gro(Steering::RoundRobin), Gro::Off);
        assert_eq!(gro(Steering::Key { offset: 0, len: 8 }), Gro::Off);
        let requested = |on| builder().steering(Steering::RoundRobin).gro(on).check().unwrap().gro;
        assert_eq!((requested(true), requested(false)), (Gro::On, Gro::Off));
    }

    #[test]
    fn a_spin_of_no_time_is_a_sleep() {
        let config = builder().wait(WaitPolicy::Spin(Duration::ZERO)).check().unwrap();
        assert_eq!(config.wait, WaitPolicy::Sleep);
    }

    #[test]
    fn unparsable_addresses_are_address_errors() {
        assert_eq!(Builder::new("nonsense").unwrap_err().kind(), ErrorKind::Address);
    }
}
