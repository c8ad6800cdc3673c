//! The functional suite between network namespaces joined by veth pairs; for root.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail as tests do")]

#[path = "../faults_support/mod.rs"]
mod faults_support;
mod netns_support;
mod tcp_support;
mod xdp_support;
mod xdp_tcp_support;

mod capture;
mod churn;
mod links;
mod losses;
mod tcp;
mod traffic;
mod xdp_attach;
mod xdp_basic;
mod xdp_devices;
mod xdp_faults;
mod xdp_foreign_traffic;
mod xdp_frames;
mod xdp_lanes;
mod xdp_limits;
mod xdp_options;
mod xdp_owners;
mod xdp_privileges;
mod xdp_proxy;
mod xdp_proxy_faults;
mod xdp_replies;
mod xdp_rx_hints;
mod xdp_sharing;
mod xdp_tcp;
mod xdp_tcp_faults;
mod xdp_udp_proxy;
mod xdp_unsent;
