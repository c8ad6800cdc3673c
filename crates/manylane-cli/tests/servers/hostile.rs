//! Hostile programs with leased queues (`hostile*.c`): what each of them gets, and that the
//! launcher still leases queues to the next program.

use std::fs;
use std::net::IpAddr;

use crate::server::Server;
use crate::xdp::{OPTIONS, XdpSetup};

/// Runs the hostile program `what` under a launcher, and after it, or beside it, a server that must
/// be served as if it were alone. Returns the output of the hostile program.
fn run_hostile(test: &str, what: &str, beside: bool) -> Option<String> {
    let setup = XdpSetup::with_queues(test, 2)?;
    Some(run_in(&setup, what, setup.addr.ip(), beside, OPTIONS))
}

/// As [`run_hostile`], in an existing setup, with the address of the hostile program.
fn run_in(setup: &XdpSetup, what: &str, ip: IpAddr, beside: bool, options: &[&str]) -> String {
    let files =
        ["hostile.c", "hostile_lease.c", "hostile_requests.c", "hostile_memory.c", "hostile_closes.c"];
    let program = setup.sandbox.compile("hostile", &files);
    let (output_path, server) = (setup.sandbox.path("output"), setup.server("block", 1).join(" "));
    let next = if beside { "&" } else { ";" };
    let script = format!(
        "env -u LD_PRELOAD {program} {what} {ip} {} >{output_path} 2>&1 {next} exec {server}",
        setup.client_namespace()
    );
    let script = ["/bin/sh", "-c", &script].map(str::to_owned);
    let mut server = Server::start(&setup.sandbox, &script, Some(options));
    setup.warm_up(&mut server);
    let more = setup.request_until_xdp_replies(&mut server);
    assert!(more > 0);
    setup.request_all();
    let (status, report) = server.end();
    assert!(status.success(), "{status}");
    assert_eq!(report.unwrap().reasons(), [""; 0]);
    fs::read_to_string(output_path).unwrap()
}

fn expect(test: &str, what: &str, lines: &[&str]) {
    if let Some(output_path) = run_hostile(test, what, false) {
        assert_eq!(output_path.lines().collect::<Vec<_>>(), lines);
    }
}

#[test]
fn netns_xdp_hostile_silence_and_invalid_requests() {
    let lines = [
        "a byte: closed",
        "too much: closed",
        "a wrong secret: closed",
        "no socket: refused 71",
        "two sockets: refused 71",
        "an order: closed",
        "a pipe: refused 88",
        "TCP: refused 19",
        "not bound: refused 19",
    ];
    expect("netns_xdp_hostile_silence_and_invalid_requests", "invalid", &lines);
}

#[test]
fn netns_xdp_hostile_requests_out_of_order_and_unread_replies() {
    let lines = [
        "twice open: leased 2",
        "open: done",
        "open: closed",
        "never open: leased 2",
        "close: closed",
        "as it should be: leased 2",
        "open: done",
        "close: done",
        "close: closed",
        "deaf: leased 2",
        "ended",
    ];
    expect("netns_xdp_hostile_requests_out_of_order_and_unread_replies", "commands", &lines);
}

#[test]
fn netns_xdp_hostile_a_port_after_its_socket_is_closed() {
    let lines =
        ["before: leased 2", "open: done", "frames: yes", "the next socket: yes", "the lease: closed"];
    expect("netns_xdp_hostile_a_port_after_its_socket_is_closed", "closed", &lines);
}

#[test]
fn netns_xdp_hostile_sockets_with_partial_port_traffic() {
    let lines = [
        "bound to a device: refused 19",
        "connected: refused 19",
        "less than it seems: refused 19",
        "alone: leased 2",
        "open: done",
        "bound to a device later: closed",
        "beside another user: refused 19",
    ];
    expect("netns_xdp_hostile_sockets_with_partial_port_traffic", "partial", &lines);
}

#[test]
fn netns_xdp_hostile_mappings_kept_after_the_lease() {
    let lines = [
        "the first: leased 2",
        "open: done",
        "frames: yes",
        "another process: refused 28",
        "the first: yes",
        "another process: refused 28",
        "another process: leased 2",
        "open: done",
        "frames: yes",
        "seen by the first: no",
        "left by the first: no",
        "the same next hops: no",
    ];
    expect("netns_xdp_hostile_mappings_kept_after_the_lease", "kept", &lines);
}

#[test]
fn netns_xdp_hostile_corrupt_rings() {
    let lines = ["the first: leased 2", "open: done", "shorter: no"];
    expect("netns_xdp_hostile_corrupt_rings", "corrupt", &lines);
}

#[test]
fn netns_xdp_hostile_rings_that_never_become_empty() {
    let lines = [
        "the first: leased 2",
        "open: done",
        "the second: leased 2",
        "open: done",
        "frames: yes",
        "the next socket: yes",
        "the second: closed",
    ];
    expect("netns_xdp_hostile_rings_that_never_become_empty", "producers", &lines);
}

#[test]
fn netns_xdp_hostile_a_port_after_the_program_was_stopped() {
    let lines =
        ["before: leased 2", "open: done", "frames: yes", "the next socket: yes", "the lease: closed"];
    expect("netns_xdp_hostile_a_port_after_the_program_was_stopped", "stopped", &lines);
}

#[test]
fn netns_xdp_hostile_several_unprivileged_users() {
    let lines = [
        "user 65534: leased 2",
        "user 65533: refused 13",
        "user 0: leased 2",
        "user 65534: leased 2",
        "user 0: leased 2",
    ];
    expect("netns_xdp_hostile_several_unprivileged_users", "users", &lines);
}

#[test]
fn netns_xdp_hostile_descriptors_that_are_slow_to_close() {
    let lines = [
        "user 65534: leased 2",
        "before: leased 2",
        "open: done",
        "close: done",
        "user 65534: leased 2",
        "user 0: leased 2",
    ];
    expect("netns_xdp_hostile_descriptors_that_are_slow_to_close", "slow", &lines);
}

#[test]
fn netns_xdp_hostile_endless_requests() {
    _ = run_hostile("netns_xdp_hostile_endless_requests", "flood", true);
}

#[test]
fn netns_xdp_hostile_a_port_while_strangers_fill_the_launcher() {
    let lines = [
        "before: leased 2",
        "open: done",
        "frames: yes",
        "connected until nobody accepts: yes",
        "half of the descriptors are free: yes",
        "the next socket: yes",
        "the lease: closed",
    ];
    expect("netns_xdp_hostile_a_port_while_strangers_fill_the_launcher", "full", &lines);
}

/// Two programs have one device each. One of them requests the next hops of ever more peers, all of
/// which have one.
#[test]
fn netns_xdp_hostile_endless_next_hop_queries() {
    let Some(setup) = XdpSetup::with_links("netns_xdp_hostile_endless_next_hop_queries", 2, 2) else {
        return;
    };
    let (here, there) = (setup.testbed.host(1), setup.testbed.host(0));
    here.ip_batch(&format!("route add 198.18.0.0/15 via {} dev link1\n", there.ip4(1))).unwrap();
    let options = ["--engine", "xdp", "--interface", "link0,link1"];
    let output = run_in(&setup, "queries", here.ip4(1).into(), true, &options);
    assert_eq!(output, "one device: leased 2\n");
}
