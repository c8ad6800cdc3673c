//! A program that runs with privileges of another user takes nothing from its environment.

use std::path::Path;
use std::process::Command;

use manylane_testbed::skip;

use crate::support::{build, can_run_without, library, run_preloaded_with_fd, run_until_lanes};

/// Starts a copy of PROGRAM as an ordinary user, with file mode MODE and a library that the system
/// loads into every program. For this mount namespace alone, /etc has only what that takes.
const SCRIPT: &str = "
    library=$1 program=$2 mode=$3
    unset LD_PRELOAD
    mount -t tmpfs -o mode=755,suid none /mnt
    cp /etc/ld.so.cache $library /mnt
    cp $program /mnt/program
    chmod $mode /mnt/program
    mount --bind /mnt /etc
    echo /etc/libmanylane_preload.so > /etc/ld.so.preload
    export MANYLANE_LANES=8
    exec setpriv --reuid 65534 --regid 65534 --clear-groups /etc/program
";

#[test]
fn netns_a_set_user_id_program_ignores_the_library() {
    let name = "netns_a_set_user_id_program_ignores_the_library";
    let why = "the programs that start it have no runtime";
    if !skip::need_root(name) || !can_run_without(&["address", "thread"], name, why) {
        return;
    }
    let starts = ["-m", "setpriv", "--reuid", "65534", "--clear-groups", "true"];
    let can_start = Command::new("unshare").args(starts).status().is_ok_and(|status| status.success());
    // A process that may not gain privileges starts no program in this mode.
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let has_mode = status.contains("NoNewPrivs:\t0");
    if !skip::need(name, can_start, "no mount namespace, or no setpriv: apt-get install util-linux")
        || !skip::need(name, has_mode, "set-user-ID bits do not count here (no_new_privs)")
    {
        return;
    }
    let (library, program) = (library(), build("secure_execution"));
    let start = |mode| {
        let paths = [&library, &program].map(|path| path.to_str().unwrap());
        let args = ["-m", "sh", "-ec", SCRIPT, "sh", paths[0], paths[1], mode];
        run_preloaded_with_fd(Path::new("unshare"), &args)
    };
    // The same without the bit has lanes, so that this test can fail.
    let without = run_until_lanes(2, || start("755"));
    let seen = "secure 0, library 1, report 1, hidden descriptors 1\n";
    assert_eq!((without.output.as_str(), without.lanes()), (seen, 2));
    let with = start("4755");
    let seen = "secure 1, library 1, report 0, hidden descriptors 0\n";
    assert_eq!((with.output.as_str(), with.receiver_count()), (seen, 0));
}
