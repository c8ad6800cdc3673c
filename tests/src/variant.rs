//! The matrix: each engine, with each of its fallbacks forced.

use std::net::{ToSocketAddrs, UdpSocket};

use manylane::{Builder, Engine, SteeringBy, probe};
use manylane_testbed::skip::{self, Forced};

/// One way for datagrams to go that the suite has to pass on.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// The engine.
    pub engine: Engine,
    /// Whether trains are received as one message.
    pub gro: bool,
    /// Whether replies may leave as trains.
    pub gso: bool,
    /// What enforces the steering.
    pub by: SteeringBy,
}

impl Variant {
    /// A builder with the options of this variant; two lanes unless the test says otherwise.
    #[must_use]
    pub fn builder(&self, addr: impl ToSocketAddrs) -> Builder {
        let mut builder = Builder::new(addr).unwrap();
        builder.lanes(2).engine(self.engine).gro(self.gro).gso(self.gso).steering_by(self.by);
        builder
    }

    /// Runs `check` if this machine can do the variant, and says so if not.
    pub fn run(self, test: &str, check: fn(&Variant)) {
        if self.by == SteeringBy::Ebpf && !need_ebpf(test) {
            return;
        }
        check(&self);
    }
}

/// Makes a module of tests out of each function: one test for each [`Variant`], named by what it forces.
///
/// An engine that is added later joins by one line here.
#[macro_export]
macro_rules! on_every_variant {
    ($($(#[$meta:meta])* fn $name:ident($variant:ident) $body:block)*) => {$(
        $(#[$meta])*
        mod $name {
            use super::*;

            fn check($variant: &$crate::Variant) $body

            $crate::on_every_variant!(@engine $name, mmsg, Mmsg);
        }
    )*};
    (@engine $name:ident, $module:ident, $engine:ident) => {
        mod $module {
            $crate::on_every_variant!(@tests $name, $engine,
                ebpf: true, true, Ebpf;
                ebpf_no_gro: false, true, Ebpf;
                ebpf_no_gso: true, false, Ebpf;
                ebpf_no_gro_no_gso: false, false, Ebpf;
                classic: true, true, ClassicBpf;
                classic_no_gro: false, true, ClassicBpf;
                classic_no_gso: true, false, ClassicBpf;
                classic_no_gro_no_gso: false, false, ClassicBpf;
                kernel: true, true, Kernel;
                kernel_no_gro: false, true, Kernel;
                kernel_no_gso: true, false, Kernel;
                kernel_no_gro_no_gso: false, false, Kernel;
            );
        }
    };
    (@tests $name:ident, $engine:ident, $($test:ident: $gro:literal, $gso:literal, $by:ident;)*) => {$(
        #[test]
        fn $test() {
            let engine = manylane::Engine::$engine;
            let by = manylane::SteeringBy::$by;
            let name = concat!(stringify!($name), "::", stringify!($test));
            $crate::Variant { engine, gro: $gro, gso: $gso, by }.run(name, super::check);
        }
    )*};
}

/// Those of `wanted` that `test` can have here; a missing eBPF is told as a skip.
#[must_use]
pub fn backends(test: &str, wanted: &[SteeringBy]) -> Vec<SteeringBy> {
    wanted.iter().copied().filter(|by| *by != SteeringBy::Ebpf || need_ebpf(test)).collect()
}

/// Whether steering by eBPF can be had here; tells the skip of `test` if not.
#[must_use]
pub fn need_ebpf(test: &str) -> bool {
    match probe().ebpf {
        Ok(()) => true,
        Err(err) => skip::need(test, false, &format!("no steering by eBPF: {err}")),
    }
}

/// Whether `[::1]` can be had here; tells the skip of `test` if not.
#[must_use]
pub fn need_ipv6(test: &str) -> bool {
    let bound = UdpSocket::bind("[::1]:0");
    skip::need_unless_forced(test, bound.is_ok(), Forced::Kernel, "no IPv6 on the loopback device")
}
