//! Real servers, as packaged, with and without `manylane run`: under the same load, their replies
//! are the same byte by byte, none lost and none duplicated. If a server's threads or processes
//! share a socket, the report must show that they had lanes.
//!
//! As root, each server runs in a network namespace of its own; otherwise on a free port.

#![allow(clippy::unwrap_used, reason = "also outside the test functions, all here is a test")]

mod bench;
mod c;
mod dns;
mod hostile;
mod kamailio;
mod load;
mod memcached;
mod node;
mod proxy;
mod python;
mod rsyslog;
mod sandbox;
mod script;
mod server;
mod xdp;

use std::path::PathBuf;
use std::process::Command;

use manylane_testbed::skip;

/// True if `program` of the package `package` is installed; otherwise reports the skip.
fn has(test: &str, program: &str, package: &str) -> bool {
    let found = find(program).is_some();
    skip::need(test, found, &format!("there is no {program}: apt-get install {package}"))
}

/// The path of a program, even if only root has it in `PATH`.
fn find(program: &str) -> Option<PathBuf> {
    // The system's own first: a wrapper elsewhere may outlive the program that it starts.
    let places = ["/usr/bin", "/usr/sbin", "/bin", "/sbin", "/usr/local/bin", "/usr/local/sbin"];
    places.iter().map(|sandbox| PathBuf::from(sandbox).join(program)).find(|file| file.is_file())
}

/// A command line of `program`, which is installed.
fn words(program: &str, arguments: &[&str]) -> Vec<String> {
    let file = find(program).unwrap();
    let arguments = arguments.iter().map(|word| (*word).to_owned());
    [file.to_str().unwrap().to_owned()].into_iter().chain(arguments).collect()
}

/// Runs a command, which must succeed, and returns its standard output.
fn run_ok(mut command: Command) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command:?}: {said}{}", String::from_utf8_lossy(&output.stderr));
    said
}
