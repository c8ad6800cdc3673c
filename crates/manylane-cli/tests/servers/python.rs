//! Servers in Python: one thread receives; others, or none, answer. With one receiver, lanes bring
//! no gain, and must do no harm.

use crate::script::{self, ScriptRun};

const THREADING: &str = include_str!("programs/threading_server.py");
const ASYNCIO: &str = include_str!("programs/asyncio_server.py");

const FORKING: &str = r#"
import os, signal, socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", int(sys.argv[1])))
children = []
for _ in range(4):
    pid = os.fork()
    if pid == 0:
        while True:
            data, peer = server.recvfrom(2048)
            server.sendto(data[::-1] + b"!", peer)
    children.append(pid)
def end(*_):
    for pid in children:
        os.kill(pid, signal.SIGTERM)
signal.signal(signal.SIGTERM, end)
for pid in children:
    os.waitpid(pid, 0)
"#;

fn compare(test: &str, program: &str) {
    let ScriptRun { addr, report, answered, .. } = script::compare(test, "python3", program);
    assert_eq!(report.delivered(addr), answered, "{report:?}");
    // Several receivers have lanes.
    let lanes = report.lanes(addr);
    assert_eq!(lanes, if test.ends_with("forking") { 4 } else { lanes.min(1) }, "{report:?}");
}

#[test]
fn loopback_python_threading() {
    if crate::has("loopback_python_threading", "python3", "python3") {
        compare("python-threading", THREADING);
    }
}

#[test]
fn loopback_python_asyncio() {
    if crate::has("loopback_python_asyncio", "python3", "python3") {
        compare("python-asyncio", ASYNCIO);
    }
}

#[test]
fn loopback_python_forking() {
    if crate::has("loopback_python_forking", "python3", "python3") {
        compare("python-forking", FORKING);
    }
}
