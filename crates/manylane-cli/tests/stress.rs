//! A short run of the stress program, which checks the result of each call, alone and under
//! `manylane run`. `make stress` runs it for longer.
//!
//! A test program of its own, so that no server's test runs beside it: it keeps binding ports that
//! the kernel selects, and without root, when all use one loopback device, it could get one that
//! such a test has found free for its server.

#![allow(clippy::unwrap_used, reason = "also outside the test functions, all here is a test")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use manylane_test_support::kill_on_parent_exit;
use serde_json::Value;

/// Long enough for every kind of call, and for some pauses of the senders.
const SECONDS: &str = "5";

fn build() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stress");
    let program = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("stress");
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"]).arg(&program);
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        if entry.path().extension().is_some_and(|extension| extension == "c") {
            cc.arg(entry.path());
        }
    }
    let output = cc.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// Runs the stress program, and returns its standard output.
fn run(mut command: Command) -> String {
    kill_on_parent_exit(&mut command);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    assert!(said.contains("stress: seed "), "{said}");
    String::from_utf8(output.stdout).unwrap()
}

/// Takes 6 s: the program runs for [`SECONDS`], with the library and without it at once.
#[test]
fn loopback_random_calls_match_the_kernel() {
    let stress = build();
    let mut alone = Command::new(&stress);
    alone.arg(SECONDS);
    let report = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stress.json");
    let mut with = Command::new(env!("CARGO_BIN_EXE_manylane"));
    with.args(["run", "--quiet", "--json-file"]).arg(&report).arg("--").arg(&stress).arg(SECONDS);
    // Both at the same time: each uses a third of a CPU.
    let both = thread::scope(|scope| {
        [alone, with].map(|command| scope.spawn(|| run(command))).map(|running| running.join().unwrap())
    });
    for said in both {
        assert!(said.contains("nothing lost, nothing twice, nothing leaked"), "{said}");
    }
    let report: Value = serde_json::from_str(&fs::read_to_string(report).unwrap()).unwrap();
    // Without lanes, the run would prove nothing about them.
    assert!(report["lanes"].as_u64() > Some(1), "{report}");
}
