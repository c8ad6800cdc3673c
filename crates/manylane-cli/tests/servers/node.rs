//! Servers in Node.js: `dgram` in one process, and in a cluster, whose first process opens the
//! socket and passes it to the others.

use std::process::ExitStatus;

use crate::script::{self, ScriptRun};

const ONE: &str = include_str!("programs/dgram_server.js");

const CLUSTER: &str = r#"
const cluster = require("cluster");
if (cluster.isPrimary) {
  for (let i = 0; i < 3; i++) cluster.fork();
  process.on("SIGTERM", () => { for (const worker of Object.values(cluster.workers)) worker.kill("SIGKILL"); process.exit(0); });
} else {
"#;

fn compare(test: &str, program: &str) -> ScriptRun {
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
