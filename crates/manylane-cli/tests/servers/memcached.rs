//! memcached: all threads wait for one UDP socket, each on an epoll instance of its own.

use crate::load::Load;
use crate::sandbox::Sandbox;
use crate::server::{PREFETCH, Report, Server};
use crate::words;

const KEYS: usize = 100;

/// A request with the header of memcached's UDP protocol.
fn frame(id: usize, text: &str) -> Vec<u8> {
    let id = (id as u16).to_be_bytes();
    [&[id[0], id[1], 0, 0, 0, 1, 0, 0], text.as_bytes()].concat()
}

fn serve(sandbox: &Sandbox, with: Option<&[&str]>) -> (Vec<Vec<u8>>, Option<Report>) {
    let addr = sandbox.free_addr();
    let port = addr.port().to_string();
    let options = ["-U", &port, "-p", &port, "-l", "127.0.0.1", "-t", "4", "-u", "root", "-m", "64"];
    let mut server = Server::start(sandbox, &words("memcached", &options), with);
    for key in 0..KEYS {
        let value = format!("value-{}", key * key);
        let set = frame(key, &format!("set k{key} 7 0 {}\r\n{value}\r\n", value.len()));
        assert_eq!(server.answer(sandbox, addr, &set), frame(key, "STORED\r\n"));
    }
    let mut requests = KEYS;
    server.wait_lanes(4, |_| {
        requests += Load::WARM_UP.request_all(sandbox, addr, |n| frame(n, "version\r\n")).len();
    });
    let load = Load::DEFAULT;
    let replies = load.request_all(sandbox, addr, |n| match n % 10 {
        0 => frame(n, "version\r\n"),
        1 => frame(n, &format!("set n{n} 0 0 4\r\n{n:04}\r\n")),
        2 => frame(n, "get nothing\r\n"),
        _ => frame(n, &format!("get k{}\r\n", n % KEYS)),
    });
    // Before its end: a thread that waits for others to end counts as stopped, and so does one that
    // gets no CPU time. It then has no lane until it has received twice.
    server.wait_lanes(4, |_| {
        requests += Load::WARM_UP.request_all(sandbox, addr, |n| frame(n, "version\r\n")).len();
    });
    let (status, report) = server.end();
    assert!(status.success(), "{status}");
    let received = load.count() as usize + requests;
    if let Some(report) = &report {
        assert_eq!(report.delivered(addr), received as u64, "{report:?}");
    }
    (replies, report)
}

/// Takes 5 s: the server is started five times, and gets requests until it has its lanes.
#[test]
fn loopback_memcached() {
    if !crate::has("loopback_memcached", "memcached", "memcached") {
        return;
    }
    let sandbox = Sandbox::new("memcached");
    let (without, _) = serve(&sandbox, None);
    // With and without delays before sleeps, and with and without prefetches.
    for options in [&[][..], &["--rx-usecs", "0"], &[PREFETCH], &[PREFETCH, "--rx-usecs", "0"]] {
        let (with, report) = serve(&sandbox, Some(options));
        assert!(without == with, "replies differ: {options:?}");
        assert_eq!(report.unwrap().reasons(), [""; 0], "{options:?}");
    }
}
