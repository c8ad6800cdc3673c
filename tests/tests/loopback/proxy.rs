//! The TCP proxy with lanes on kernel sockets.

mod loopback_kernel {
    use manylane_tests::proxy_suite::ProxyBed;

    manylane_tests::proxy_suite!(|_| Some(ProxyBed::Loopback));
}
