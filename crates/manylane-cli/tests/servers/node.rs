//! Servers in Node.js: `dgram` in one process, and in a cluster, whose first process opens the socket and passes it to
//! the others.

use crate::load::Load;
use crate::place::Place;
use crate::server::{Report, Server};
use crate::words;

const ONE: &str = r#"
const server = require("dgram").createSocket("udp4");
server.on("message", (data, peer) => server.send(Buffer.concat([Buffer.from(data).reverse(), Buffer.from("!")]), peer.port, peer.address));
server.bind(Number(process.argv[2]), "127.0.0.1");
process.on("SIGTERM", () => process.exit(0));
"#;

const CLUSTER: &str = r#"
const cluster = require("cluster");
if (cluster.isPrimary) {
  for (let i = 0; i < 3; i++) cluster.fork();
  process.on("SIGTERM", () => { for (const worker of Object.values(cluster.workers)) worker.kill("SIGKILL"); process.exit(0); });
} else {
"#;

fn compare(test: &str, program: &str) -> Report {
    let place = Place::new(test);
    let program = place.file("server.js", program);
    let load = Load { flows: 32, each: 60 };
    let request = |n: usize| format!("request {n}").into_bytes();
    let answer = |n: usize| request(n).into_iter().rev().chain(*b"!").collect::<Vec<u8>>();
    let mut expected: Vec<_> = (0..load.count() as usize).map(answer).collect();
    expected.sort();
    let mut found = None;
    for with in [None, Some(&[][..])] {
        let addr = place.free();
        let arguments = [program.as_str(), &addr.port().to_string()];
        let mut server = Server::start(&place, &words("node", &arguments), with);
        assert_eq!(server.answer(&place, addr, &request(7)), answer(7));
        assert!(load.ask(&place, addr, request) == expected, "answers differ");
        let (status, report) = server.end();
        assert!(status.success(), "{status}");
        found = report.or(found);
    }
    found.unwrap()
}

#[test]
fn loopback_node() {
    if crate::has("loopback_node", "node", "nodejs") {
        compare("node", ONE);
    }
}

#[test]
fn loopback_node_cluster() {
    if crate::has("loopback_node_cluster", "node", "nodejs") {
        let report = compare("node-cluster", &format!("{CLUSTER}{ONE}}}\n"));
        assert!(report.reasons().contains(&"passed"), "{report:?}");
    }
}
