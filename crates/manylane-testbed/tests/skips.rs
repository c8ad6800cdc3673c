//! Messages of tests that cannot run: each case in a process of its own, for its environment.
//!
//! No part of `netns`, whose tests need root: most of these run, and have to pass, without.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failed test is what they make")]

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

use manylane_testbed::skip::{self, Forced};
use manylane_testbed::topology;

/// Runs one of the helpers below with these variables and no others that matter.
fn child(helper: &str, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", helper, "--test-threads=1"]);
    command.env_remove("CI").env_remove("MANYLANE_SKIPS").envs(variables.iter().copied());
    command
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
#[ignore = "a helper of this file"]
fn helper_lacks_a_package() {
    assert!(!skip::need("some_test", false, "no such package: apt-get install it"));
}

#[test]
#[ignore = "a helper of this file"]
fn helper_lacks_cpus() {
    assert!(!skip::need_unless_forced("other_test", false, Forced::Cpus, "needs 64 CPUs"));
}

#[test]
#[ignore = "a helper of this file"]
fn helper_builds_a_testbed() {
    let _ = skip::need_root("root_test");
}

#[test]
fn a_skip_is_printed_and_listed() {
    let list = tempfile::NamedTempFile::new().unwrap();
    let path = list.path().to_str().unwrap();
    for helper in ["helper_lacks_a_package", "helper_lacks_cpus"] {
        let done = child(helper, &[("MANYLANE_SKIPS", path)]).output().unwrap();
        assert!(done.status.success());
        assert!(stderr(&done).contains("SKIP "), "{}", stderr(&done));
    }
    let listed = std::fs::read_to_string(path).unwrap();
    let lines: Vec<&str> = listed.lines().collect();
    assert_eq!(
        lines,
        [
            "SKIP some_test: no such package: apt-get install it",
            "SKIP other_test: needs 64 CPUs (forced by too few CPUs)"
        ]
    );
}

#[test]
fn ci_allows_only_skips_that_the_machine_forces() {
    let ci = [("CI", "true")];
    assert!(!child("helper_lacks_a_package", &ci).output().unwrap().status.success());
    assert!(child("helper_lacks_cpus", &ci).output().unwrap().status.success());
}

#[test]
fn missing_iproute2_is_reported_with_a_remedy() {
    if topology::available().is_err() {
        return; // Then the next test says why.
    }
    let done = child("helper_builds_a_testbed", &[("PATH", "/nonexistent")]).output().unwrap();
    assert!(stderr(&done).contains("apt-get install iproute2"), "{}", stderr(&done));
}

#[test]
fn netns_missing_privileges_are_named() {
    if !skip::need_root("netns_missing_privileges_are_named") {
        return;
    }
    // The build folder may be closed to others: a copy is not. Another process writes it: a program
    // is busy (ETXTBSY) while a child that another test has just forked has its file open.
    let folder = tempfile::TempDir::new().unwrap();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o755)).unwrap();
    let copy = folder.path().join("helper");
    assert!(Command::new("cp").arg(std::env::current_exe().unwrap()).arg(&copy).status().unwrap().success());
    let mut command = Command::new(&copy);
    command.args(["--ignored", "--exact", "helper_builds_a_testbed"]).current_dir("/");
    command.env_remove("CI").env_remove("MANYLANE_SKIPS");
    let told = stderr(&command.uid(65_534).gid(65_534).output().unwrap());
    assert!(told.contains("CAP_SYS_ADMIN and CAP_NET_ADMIN") && told.contains("run as root"), "{told}");
}
