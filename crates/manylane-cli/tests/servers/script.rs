//! Servers that are a few lines in a language with a runtime of its own. Each reply is the request
//! in reverse order, and a mark.

use std::net::SocketAddr;
use std::process::ExitStatus;

use crate::load::Load;
use crate::sandbox::Sandbox;
use crate::server::{Report, Server};
use crate::words;

/// Results of a script.
pub(crate) struct ScriptRun {
    /// Report of the run under `manylane run`.
    pub(crate) addr: SocketAddr,
    /// Results alone, and under `manylane run`.
    pub(crate) ended: Vec<ExitStatus>,
    pub(crate) report: Report,
    /// Number of answered requests.
    pub(crate) answered: u64,
}

/// Runs `script` with `interpreter`, alone and under `manylane run`, and compares the replies. The
/// script gets the port as its argument.
pub(crate) fn compare(test: &str, interpreter: &str, script: &str) -> ScriptRun {
    let sandbox = Sandbox::new(test);
    let file = sandbox.file("server", script);
    let load = Load { flows: 32, each: 60 };
    let request = |n: usize| format!("request {n}").into_bytes();
    let answer = |n: usize| request(n).into_iter().rev().chain(*b"!").collect::<Vec<u8>>();
    let mut expected: Vec<_> = (0..load.count() as usize).map(answer).collect();
    expected.sort();
    let (mut ran, mut ended, mut answered) = (None, Vec::new(), 0);
    for with in [None, Some(&[][..])] {
        let addr = sandbox.free_addr();
        let arguments = [file.as_str(), &addr.port().to_string()];
        let mut server = Server::start(&sandbox, &words(interpreter, &arguments), with);
        assert_eq!(server.answer(&sandbox, addr, &request(7)), answer(7));
        answered = 1;
        let lanes = if test.ends_with("forking") { 4 } else { 0 };
        server.wait_lanes(lanes, |_| {
            answered += Load::WARM_UP.request_all(&sandbox, addr, request).len() as u64;
        });
        assert!(load.request_all(&sandbox, addr, request) == expected, "replies differ");
        // Before its end, too: a thread that gets no CPU time loses its lane.
        server.wait_lanes(lanes, |_| {
            answered += Load::WARM_UP.request_all(&sandbox, addr, request).len() as u64;
        });
        let (status, report) = server.end();
        ended.push(status);
        ran = report.map(|report| (addr, report));
    }
    let (addr, report) = ran.unwrap();
    ScriptRun { addr, ended, report, answered: load.count() + answered }
}
