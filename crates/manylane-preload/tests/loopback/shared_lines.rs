//! Threads that receive and answer on their own lanes write no cache line that another one uses.

use std::os::fd::AsFd;
use std::process::Command;
use std::sync::atomic::Ordering;

use manylane_ipc::report::ReportFile;
use manylane_test_support::trace::{self, Phase};
use manylane_testbed::skip;

use crate::support::{build, can_run_without, library};

/// Marked batches of each thread in `shared_lines.c`. The shortest one counts: in others, a thread
/// looks after the other lanes.
const BATCHES: usize = 24;
const THREADS: usize = 2;
/// A thread that is held up for long loses its lane.
const RUNS_MAX: usize = 5;

#[test]
fn loopback_receiving_threads_share_no_written_line() {
    let test = "loopback_receiving_threads_share_no_written_line";
    if !skip::need(test, trace::can_trace(), "needs valgrind")
        || !can_run_without(&["address", "thread"], test, "valgrind does not run sanitizers")
    {
        return;
    }
    for case in ["nowait", "wait"] {
        let phases = (0..RUNS_MAX).find_map(|_| trace_own_lanes(case)).expect("all keep their lanes");
        let shared = trace::shared_lines(&phases);
        assert!(shared.is_empty(), "{case}: {shared:x?}");
    }
}

/// A batch of each thread. None if one of them may have received all from another lane than its
/// own. Some datagrams come from others before the threads have lanes.
fn trace_own_lanes(case: &str) -> Option<Vec<Phase>> {
    let (report, fd) = ReportFile::create().unwrap();
    let mut command = Command::new("valgrind");
    command.env("LD_PRELOAD", library()).env("MANYLANE_REPORT", ReportFile::path(fd.as_fd()));
    let phases = trace::run(command, &[build("shared_lines").to_str().unwrap(), case]);
    let phases = trace::shortest_of_each(BATCHES, phases);
    assert_eq!(phases.len(), THREADS, "{case}");
    let receivers = &report.report().receivers;
    let of_other_lanes: u64 =
        receivers.iter().map(|slot| slot.delivered_from_other_lanes.load(Ordering::Relaxed)).sum();
    (of_other_lanes < BATCHES as u64).then_some(phases)
}
