//! The TCP proxy with lanes of TCP.

mod netns_xdp {
    use manylane_testbed::Layout;
    use manylane_tests::proxy_suite::ProxyBed;

    use crate::xdp_tcp_support::tcp_testbed;

    manylane_tests::proxy_suite!(|name: &str| {
        let layout = Layout { queues: 1, ..Layout::default() };
        tcp_testbed(&format!("xdp_proxy::netns_xdp::{name}"), &layout).map(ProxyBed::Netns)
    });
}

mod netns_xdp_two_lanes {
    use manylane_testbed::Layout;
    use manylane_tests::proxy_suite::ProxyBed;

    use crate::xdp_tcp_support::tcp_testbed;

    manylane_tests::proxy_suite!(|name: &str| {
        let layout = Layout { queues: 2, ..Layout::default() };
        tcp_testbed(&format!("xdp_proxy::netns_xdp_two_lanes::{name}"), &layout).map(ProxyBed::Netns)
    });
}
