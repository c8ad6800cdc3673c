//! The UDP proxy with lanes of engine `xdp`.

mod netns_xdp {
    use manylane_testbed::Layout;
    use manylane_tests::udp_proxy_suite::UdpBed;

    use crate::xdp_support::testbed;

    manylane_tests::udp_proxy_suite!(|name: &str| {
        let layout = Layout { queues: 2, ..Layout::default() };
        testbed(&format!("xdp_udp_proxy::netns_xdp::{name}"), &layout).map(UdpBed::Netns)
    });
}
