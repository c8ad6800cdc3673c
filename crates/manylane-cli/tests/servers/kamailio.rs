//! Kamailio: the children are forked after the socket is bound, and each blocks in a receive on it.

use crate::load::Load;
use crate::sandbox::Sandbox;
use crate::server::{Report, Server};
use crate::words;

const CONFIGURATION: &str = include_str!("programs/kamailio.cfg");

/// An OPTIONS request from `source`, to which the answer is sent.
fn options(n: usize) -> Vec<u8> {
    format!(
        "OPTIONS sip:test@127.0.0.1 SIP/2.0\r\nVia: SIP/2.0/UDP 127.0.0.1;rport;branch=z9hG4bK{n}\r\n\
         From: <sip:a@127.0.0.1>;tag=t{n}\r\nTo: <sip:b@127.0.0.1>\r\nCall-ID: call{n}\r\nCSeq: {n} OPTIONS\r\n\
         Max-Forwards: 70\r\nContent-Length: 0\r\n\r\n"
    )
    .into_bytes()
}

/// An answer without the parts that differ in every run: our port, and the tag that the server
/// makes at its start.
fn normalize(answer: &[u8]) -> String {
    let text = String::from_utf8(answer.to_vec()).unwrap();
    let lines = text.lines().map(|line| {
        let cut = if line.starts_with("Via:") { ";rport=" } else { "\0" };
        let cut = if line.starts_with("To:") { ";tag=" } else { cut };
        line.split(cut).next().unwrap_or_default()
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn serve(sandbox: &Sandbox, with: Option<&[&str]>) -> (Vec<String>, Option<Report>, std::net::SocketAddr) {
    let addr = sandbox.free_addr();
    let (port, ip) = (addr.port().to_string(), addr.ip().to_string());
    let named = [("THREADS", "4"), ("ADDRESS", ip.as_str()), ("PORT", port.as_str())];
    let configuration = sandbox.filled("kamailio.cfg", CONFIGURATION, &named);
    let (pid, run) = (sandbox.path("kamailio.pid"), sandbox.folder().to_str().unwrap().to_owned());
    let arguments =
        ["-f", &configuration, "-DD", "-E", "-P", &pid, "-Y", &run, "-w", &run, "-m", "32", "-M", "4"];
    let mut server = Server::start(sandbox, &words("kamailio", &arguments), with);
    server.answer(sandbox, addr, &options(999_999));
    let mut requests = 1;
    server.wait_lanes(4, |_| {
        requests += Load::WARM_UP.request_all(sandbox, addr, |n| options(n + 500_000)).len() as u64;
    });
    let load = Load { flows: 32, each: 100 };
    let mut replies: Vec<String> =
        load.request_all(sandbox, addr, options).iter().map(|answer| normalize(answer)).collect();
    replies.sort();
    // Before its end, too: a process that gets no CPU time loses its lane.
    server.wait_lanes(4, |_| {
        requests += Load::WARM_UP.request_all(sandbox, addr, |n| options(n + 500_000)).len() as u64;
    });
    let (status, report) = server.end();
    assert!(status.success(), "{status}");
    if let Some(report) = &report {
        assert_eq!(report.delivered(addr), load.count() + requests, "{report:?}");
    }
    (replies, report, addr)
}

#[test]
fn loopback_kamailio() {
    if !crate::has("loopback_kamailio", "kamailio", "kamailio") {
        return;
    }
    let sandbox = Sandbox::new("kamailio");
    let (without, _, _) = serve(&sandbox, None);
    let (with, report, addr) = serve(&sandbox, Some(&[]));
    assert!(without[0].starts_with("SIP/2.0 200 OK"), "{}", without[0]);
    assert!(without == with, "replies differ: {} / {}", without[0], with[0]);
    let report = report.unwrap();
    assert_eq!(report.lanes(addr), 4, "{report:?}");
}
