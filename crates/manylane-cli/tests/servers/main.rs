//! Real servers, as their packages have them, without `manylane run` and with it: the same requests
//! under load, the same replies byte by byte, none lost and none twice. Where a server's threads or
//! processes share a socket, the report has to say that they had lanes.
//!
//! Each server is in a network namespace of its own, for root; otherwise on a port that is free.

#![allow(clippy::unwrap_used, reason = "also outside the test functions, all here is a test")]

mod bench;
mod c;
mod dns;
mod hostile;
mod kamailio;
mod load;
mod memcached;
mod node;
mod python;
mod rsyslog;
mod sandbox;
mod script;
mod server;
mod xdp;

use std::path::PathBuf;
use std::process::Command;

use manylane_testbed::skip;

/// Whether the server `program` of the package `package` is installed; says so if not.
fn has(test: &str, program: &str, package: &str) -> bool {
    let found = find(program).is_some();
    skip::need(test, found, &format!("there is no {program}: apt-get install {package}"))
}

/// The file of a program, also of one that only root has in its path.
fn find(program: &str) -> Option<PathBuf> {
    // The system's own first: a wrapper of somebody's has another life than its package's program.
    let places = ["/usr/bin", "/usr/sbin", "/bin", "/sbin", "/usr/local/bin", "/usr/local/sbin"];
    places.iter().map(|sandbox| PathBuf::from(sandbox).join(program)).find(|file| file.is_file())
}

/// A command line of `program`, which is there.
fn words(program: &str, arguments: &[&str]) -> Vec<String> {
    let file = find(program).unwrap();
    let arguments = arguments.iter().map(|word| (*word).to_owned());
    [file.to_str().unwrap().to_owned()].into_iter().chain(arguments).collect()
}

/// What a command says when it has succeeded.
fn run_ok(mut command: Command) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command:?}: {said}{}", String::from_utf8_lossy(&output.stderr));
    said
}
