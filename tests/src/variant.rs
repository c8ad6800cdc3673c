//! The matrix: each engine, with each of its fallbacks forced.
//!
//! Engine `mmsg` runs the full product of steering, GRO and GSO. Rows that only cover each pair
//! would be fewer, but a failure would not tell which switch it depends on, and a fault that needs
//! all three would go unseen. The other engines contain an `mmsg` lane, and run a few rows.

use std::net::{ToSocketAddrs, UdpSocket};

use manylane::{Builder, Engine, LaneCounters, SteeringBackend, probe};
use manylane_testbed::skip::{self, Forced};

use crate::test_env::{self, TestEnv};

const EBPF_STEERING_SINCE: (u32, u32) = (5, 12);

/// One path of datagrams on which the suite has to pass.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// The names of the test and the variant, for messages.
    pub test: &'static str,
    /// The engine.
    pub engine: Engine,
    /// True for XDP behind the driver (generic).
    pub generic: bool,
    /// Number of queues of the server's device; 0 over loopback.
    pub queues: u32,
    /// True with GRO.
    pub gro: bool,
    /// True with GSO of replies.
    pub gso: bool,
    /// The mechanism that enforces the steering.
    pub by: SteeringBackend,
    /// Wait policy of the lanes, as text.
    pub wait: &'static str,
}

impl Variant {
    /// A builder with the options of this variant, and two lanes by default. In a testbed, a
    /// loopback address is mapped to one of the server's device.
    #[must_use]
    pub fn builder(&self, addr: impl ToSocketAddrs) -> Builder {
        let addr = addr.to_socket_addrs().unwrap().next().unwrap();
        let mut builder = Builder::new(test_env::map_addr(addr)).unwrap();
        builder.lanes(2).engine(self.engine).gro(self.gro).gso(self.gso).steering_backend(self.by);
        builder.wait(self.wait.parse().unwrap());
        if self.queues > 0 {
            // The fragments of a large datagram need several times its size.
            builder.recv_buffer(4 << 20);
        }
        if self.is_xdp() {
            builder.xdp_generic(self.generic);
        }
        builder
    }

    /// True if datagrams arrive from queues of a device.
    #[must_use]
    pub fn is_xdp(&self) -> bool {
        self.engine == Engine::Xdp
    }

    /// True if GSO messages of clients arrive as GRO messages: virtual devices pass them on whole
    /// since Linux 5.11.
    #[must_use]
    pub fn gets_gro_messages(&self) -> bool {
        self.gro && !self.is_xdp() && skip::passes_whole_gso()
    }

    /// The number of messages that eBPF must have steered, if it counts: those of kernel sockets.
    #[must_use]
    pub fn steered(&self, total: &LaneCounters) -> Option<u64> {
        (self.by == SteeringBackend::Ebpf).then_some(total.messages - total.delivered_by_bypass)
    }

    /// Runs `check` if this machine supports the variant, or else reports a skip.
    pub fn run(mut self, check: fn(&Variant)) {
        if self.is_xdp() && !skip::is_kernel(EBPF_STEERING_SINCE) {
            // The companions are steered by classic BPF there.
            self.by = SteeringBackend::Auto;
        }
        if self.engine == Engine::Uring && !need_uring(self.test) {
            return;
        }
        if self.is_xdp() {
            let by_xdp = self.run_in_testbed(check);
            assert_ne!(by_xdp, Some(0), "nothing came past the kernel's stack");
        } else if self.queues > 0 {
            self.run_in_testbed(check);
        } else if self.by != SteeringBackend::Ebpf || need_ebpf(self.test) {
            check(&self);
        }
    }

    /// As [`run`](Self::run), for a test without datagrams by XDP: one that only sends, or fails.
    pub fn run_without_traffic(self, check: fn(&Variant)) {
        if self.is_xdp() { _ = self.run_in_testbed(check) } else { self.run(check) }
    }

    fn run_in_testbed(self, check: fn(&Variant)) -> Option<u64> {
        let possible =
            skip::need_root(self.test) && (self.by != SteeringBackend::Ebpf || need_ebpf(self.test));
        possible.then(|| {
            // Behind the driver, a GSO message of a sender on this machine is not segmented, and
            // is left to the kernel.
            TestEnv::run(self.queues, self.generic, || check(&self))
        })
    }
}

/// Generates tests from each function: one for each [`Variant`], named by what it forces, in
/// modules named by tier and engine.
///
/// With `(variant, 1 queue)` the device of engine `xdp` has one queue, so that datagrams that
/// arrive together are one batch of one lane, as over a socket. With `(variant, no traffic)` no
/// datagram needs to arrive by XDP. A new engine needs one module here.
#[macro_export]
macro_rules! on_every_variant {
    ($($(#[$meta:meta])* fn $name:ident($variant:ident $(, $queues:literal queue)? $(, no $how:ident)?) $body:block)*) => {
        mod every_variant {
            use super::*;

            $($(#[$meta])* pub(super) fn $name($variant: &$crate::Variant) $body)*
        }

        mod loopback_mmsg {$(
            mod $name {
                $crate::on_every_variant!(@tests $name, Mmsg, ("loopback_mmsg", run, 0, false),
                    ebpf: true, true, Ebpf, "sleep";
                    ebpf_no_gro: false, true, Ebpf, "sleep";
                    ebpf_no_gso: true, false, Ebpf, "sleep";
                    ebpf_no_gro_no_gso: false, false, Ebpf, "spin:200";
                    classic: true, true, ClassicBpf, "sleep";
                    classic_no_gro: false, true, ClassicBpf, "adaptive";
                    classic_no_gso: true, false, ClassicBpf, "busy-poll";
                    classic_no_gro_no_gso: false, false, ClassicBpf, "sleep";
                    kernel: true, true, Kernel, "adaptive";
                    kernel_no_gro: false, true, Kernel, "spin:200";
                    kernel_no_gso: true, false, Kernel, "sleep";
                    kernel_no_gro_no_gso: false, false, Kernel, "busy-poll";
                );
            }
        )*}

        // Steering and sending are those of the engine above.
        mod loopback_uring {$(
            mod $name {
                $crate::on_every_variant!(@tests $name, Uring, ("loopback_uring", run, 0, false),
                    ebpf: true, true, Ebpf, "sleep";
                    ebpf_no_gro: false, true, Ebpf, "busy-poll";
                    classic_no_gro_no_gso: false, false, ClassicBpf, "spin:200";
                    kernel: true, true, Kernel, "adaptive";
                );
            }
        )*}

        // Between two hosts, over a device with one queue, so that datagrams that arrive together
        // are one batch, as over loopback.
        mod netns_uring {$(
            mod $name {
                $crate::on_every_variant!(@tests $name, Uring, ("netns_uring", run, 1, false),
                    ebpf: true, true, Ebpf, "sleep";
                );
            }
        )*}

        // Steering, GRO and GSO are those of the companions, which the engine above has tested.
        mod netns_xdp {$(
            mod $name {
                $crate::on_every_variant!(@run $name, $($queues)? $(no $how)?,
                    native: true, true, Ebpf, false, "sleep";
                    native_no_gro_no_gso: false, false, Kernel, false, "adaptive";
                    generic: true, true, Ebpf, true, "sleep";
                );
            }
        )*}
    };
    (@run $name:ident, , $($test:ident: $gro:literal, $gso:literal, $by:ident, $generic:literal, $wait:literal;)*) => {$(
        $crate::on_every_variant!(@tests $name, Xdp, ("netns_xdp", run, 4, $generic), $test: $gro, $gso, $by, $wait;);
    )*};
    (@run $name:ident, no traffic, $($test:ident: $gro:literal, $gso:literal, $by:ident, $generic:literal, $wait:literal;)*) => {$(
        $crate::on_every_variant!(
            @tests $name, Xdp, ("netns_xdp", run_without_traffic, 4, $generic), $test: $gro, $gso, $by, $wait;
        );
    )*};
    (@run $name:ident, $queues:literal, $($test:ident: $gro:literal, $gso:literal, $by:ident, $generic:literal, $wait:literal;)*) => {$(
        $crate::on_every_variant!(@tests $name, Xdp, ("netns_xdp", run, $queues, $generic), $test: $gro, $gso, $by, $wait;);
    )*};
    (@tests $name:ident, $engine:ident, ($module:literal, $run:ident, $queues:literal, $generic:literal),
        $($test:ident: $gro:literal, $gso:literal, $by:ident, $wait:literal;)*) => {$(
        #[test]
        fn $test() {
            let variant = $crate::Variant {
                test: concat!($module, "::", stringify!($name), "::", stringify!($test)),
                engine: manylane::Engine::$engine,
                generic: $generic,
                queues: $queues,
                gro: $gro,
                gso: $gso,
                by: manylane::SteeringBackend::$by,
                wait: $wait,
            };
            variant.$run(super::super::every_variant::$name);
        }
    )*};
}

/// Generates one test for each engine from each function, which gets a [`Variant`] with the
/// defaults of that engine.
#[macro_export]
macro_rules! on_every_engine {
    ($($(#[$meta:meta])* fn $name:ident($variant:ident $(, $queues:literal queue)?) $body:block)*) => {
        mod every_engine {
            use super::*;

            $($(#[$meta])* pub(super) fn $name($variant: &$crate::Variant) $body)*
        }

        mod loopback_by_mmsg {$(
            #[test]
            fn $name() {
                let test = concat!("loopback_by_mmsg::", stringify!($name));
                $crate::Variant::new(test, manylane::Engine::Mmsg, 0).run(super::every_engine::$name);
            }
        )*}

        mod loopback_by_uring {$(
            #[test]
            fn $name() {
                let test = concat!("loopback_by_uring::", stringify!($name));
                $crate::Variant::new(test, manylane::Engine::Uring, 0).run(super::every_engine::$name);
            }
        )*}

        mod netns_by_xdp {$(
            #[test]
            fn $name() {
                let test = concat!("netns_by_xdp::", stringify!($name));
                let queues = *[4_u32 $(, $queues)?].last().unwrap();
                $crate::Variant::new(test, manylane::Engine::Xdp, queues).run(super::every_engine::$name);
            }
        )*}
    };
}

impl Variant {
    /// An engine with its defaults.
    #[must_use]
    pub fn new(test: &'static str, engine: Engine, queues: u32) -> Self {
        Self {
            test,
            engine,
            generic: false,
            queues,
            gro: true,
            gso: true,
            by: SteeringBackend::Auto,
            wait: "sleep",
        }
    }
}

/// Those of `wanted` that are available to `test` here. A missing eBPF is reported as a skip.
#[must_use]
pub fn backends(test: &str, wanted: &[SteeringBackend]) -> Vec<SteeringBackend> {
    wanted.iter().copied().filter(|by| *by != SteeringBackend::Ebpf || need_ebpf(test)).collect()
}

/// True if steering by eBPF is available here. Reports the skip of `test` if not.
#[must_use]
pub fn need_ebpf(test: &str) -> bool {
    skip::need_kernel(test, EBPF_STEERING_SINCE, "steering by eBPF")
        && match probe().ebpf {
            Ok(()) => true,
            Err(err) => skip::need(test, false, &format!("no steering by eBPF: {err}")),
        }
}

/// True if io_uring is available here. Reports the skip of `test` if not.
#[must_use]
pub fn need_uring(test: &str) -> bool {
    skip::need_uring(test, probe().uring)
}

/// True if `[::1]` is available here. Reports the skip of `test` if not.
#[must_use]
pub fn need_ipv6(test: &str) -> bool {
    let bound = UdpSocket::bind("[::1]:0");
    skip::need_unless_forced(test, bound.is_ok(), Forced::Kernel, "no IPv6 on the loopback device")
}
