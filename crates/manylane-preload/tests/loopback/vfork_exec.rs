//! A program that is started by vfork gets the socket. The child that starts it has the library's
//! memory, and a table of descriptors of its own.

use crate::support::{build, for_each_at_once, run_native, run_preloaded};

#[test]
fn loopback_exec_in_a_child_of_vfork_makes_the_socket_plain() {
    let program = build("vfork_exec");
    for_each_at_once(&["keep", "close", "copies", "move", "cloexec", "spawn"], |what| {
        assert_eq!(run_native(&program, &[what]).output, "status: 0, missing: 0\n", "{what}");
        let with = run_preloaded(&program, &[what], &[("MANYLANE_LANES", "8")]);
        assert_eq!(with.output, "status: 0, missing: 0\n", "{what}, {:?}", with.reasons());
        assert_eq!(with.reasons(), ["exec"], "{what}");
    });
}

#[test]
fn loopback_a_vfork_child_keeps_the_identity_of_its_parent() {
    let with = run_preloaded(&build("vfork_exec"), &["fresh"], &[("MANYLANE_LANES", "8")]);
    let (tid, rest) = with.output.split_once('\n').unwrap();
    assert_eq!(rest, "status: 0, missing: 0\n", "{:?}", with.reasons());
    let tids = with.tids();
    assert!(tids.contains(&tid.parse().unwrap()), "{tid} is none of {tids:?}");
}

/// The thread that finishes the fallback moves no entries of other threads' instances.
#[test]
fn loopback_a_fallback_in_a_child_of_vfork_reaches_epolls() {
    let program = build("vfork_epoll");
    for_each_at_once(&["seccomp", "nested"], |what| {
        let expected = "before: 0, after: 2\n";
        assert_eq!(run_native(&program, &[what]).output, expected, "{what}");
        let with = run_preloaded(&program, &[what], &[("MANYLANE_LANES", "8")]);
        assert_eq!(with.output, expected, "{what}, {:?}", with.reasons());
        assert_eq!(with.reasons(), ["exec"], "{what}");
    });
}
