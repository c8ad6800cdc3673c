//! Servers in Node.js: `dgram` in one process, and in a cluster, whose first process opens the socket and passes it to
//! the others.

use std::process::ExitStatus;

use crate::script::{self, Ran};

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

fn compare(test: &str, program: &str) -> Ran {
    let ran = script::compare(test, "node", program);
    assert!(ran.ended.iter().all(ExitStatus::success), "{:?}", ran.ended);
    ran
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
        let report = compare("node-cluster", &format!("{CLUSTER}{ONE}}}\n")).report;
        assert!(report.reasons().contains(&"passed"), "{report:?}");
    }
}
