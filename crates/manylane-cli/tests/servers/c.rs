//! Servers in C that share a socket between threads or children, with each way of waiting: blocking
//! receives, poll, select and epoll.

use crate::load::Load;
use crate::sandbox::Sandbox;
use crate::server::{Report, Server};

pub(crate) fn build(sandbox: &Sandbox) -> String {
    sandbox.compile("server", &["server.c"])
}

/// Sends load to four receivers of kind `how`; returns the report, and the number of lanes that
/// they had.
fn compare(how: &str, wanted: usize, options: &[&str]) -> (Report, usize) {
    let sandbox = Sandbox::new(&format!("c-{how}"));
    let program = build(&sandbox);
    let load = Load::DEFAULT;
    let request = |n: usize| format!("request {n}").into_bytes();
    let mut expected: Vec<_> =
        (0..load.count() as usize).map(|n| format!("request {n}!").into_bytes()).collect();
    expected.sort();
    let mut found = None;
    for with in [None, Some(options)] {
        let addr = sandbox.free_addr();
        let words = [&program[..], &addr.port().to_string(), how, "4"].map(str::to_owned);
        let mut server = Server::start(&sandbox, &words, with);
        assert_eq!(server.answer(&sandbox, addr, b"first"), b"first!");
        let mut requests = 1;
        server.wait_lanes(wanted, |_| {
            requests += Load::WARM_UP.request_all(&sandbox, addr, request).len() as u64;
        });
        assert!(load.request_all(&sandbox, addr, request) == expected, "replies differ");
        // Before its end, too: a thread that gets no CPU time loses its lane.
        server.wait_lanes(wanted, |_| {
            requests += Load::WARM_UP.request_all(&sandbox, addr, request).len() as u64;
        });
        let (status, report) = server.end();
        assert!(status.success(), "{status}");
        if let Some(report) = report {
            assert_eq!(report.delivered(addr), load.count() + requests, "{report:?}");
            let lanes = report.lanes(addr);
            found = Some((report, lanes));
        }
    }
    found.unwrap()
}

fn check_all_lanes(how: &str) {
    let (report, lanes) = compare(how, 4, &[]);
    assert_eq!(lanes, 4, "{report:?}");
}

#[test]
fn loopback_c_threads_that_block() {
    check_all_lanes("block");
}

#[test]
fn loopback_c_threads_that_poll() {
    check_all_lanes("poll");
}

#[test]
fn loopback_c_threads_that_select() {
    check_all_lanes("select");
}

#[test]
fn loopback_c_threads_with_an_epoll_instance_each() {
    check_all_lanes("epoll");
}

#[test]
fn loopback_c_children_that_block() {
    check_all_lanes("fork");
}

#[test]
fn loopback_c_fewer_lanes_than_threads() {
    let (report, lanes) = compare("block-two", 2, &["--lanes", "2"]);
    assert_eq!(lanes, 2, "{report:?}");
}

#[test]
fn loopback_c_unlisted_ports() {
    let sandbox = Sandbox::new("c-ports");
    let program = build(&sandbox);
    let addr = sandbox.free_addr();
    let words = [&program[..], &addr.port().to_string(), "block", "2"].map(str::to_owned);
    let other = if addr.port() == 9 { "10" } else { "9" };
    let mut server = Server::start(&sandbox, &words, Some(&["--ports", other]));
    assert_eq!(server.answer(&sandbox, addr, b"first"), b"first!");
    let (_, report) = server.end();
    let report = report.unwrap();
    assert_eq!((report.lanes(addr), &report.0["sockets"]), (0, &0.into()), "{report:?}");
}
