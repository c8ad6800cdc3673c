//! The UDP proxy with lanes on kernel sockets.

mod loopback_mmsg {
    use manylane::Engine;
    use manylane_tests::udp_proxy_suite::{self, UdpBed};

    manylane_tests::udp_proxy_suite!(|_| Some(UdpBed::Loopback(Engine::Mmsg)));

    #[test]
    fn truncated_datagrams_are_dropped() {
        udp_proxy_suite::truncated_datagrams_are_dropped(&UdpBed::Loopback(Engine::Mmsg));
    }
}

mod loopback_uring {
    use manylane::Engine;
    use manylane_tests::need_uring;
    use manylane_tests::udp_proxy_suite::UdpBed;

    manylane_tests::udp_proxy_suite!(|name: &str| {
        let test = format!("udp_proxy::loopback_uring::{name}");
        need_uring(&test).then_some(UdpBed::Loopback(Engine::Uring))
    });
}
