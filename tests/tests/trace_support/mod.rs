//! A trace of the memory accesses of lanes, each of which answers batches on a thread of its own.
//!
//! The test runs itself again under valgrind (lackey), which lists all memory accesses and system
//! calls. There, lanes run one after the other. Each marks the beginning and the end of a batch by
//! a store to a known address. Valgrind does not see the kernel.

use std::fmt::Display;
use std::process::Command;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;
use std::{env, process, thread};

use manylane::Lane;
use manylane_test_support::trace::{self, MARK_PREFIX, Phase, shared_lines};
use manylane_testbed::{skip, topology};

/// Datagrams of a batch.
pub(crate) const BATCH: usize = 8;
/// Batches that each lane receives: one that fills buffers that are kept, and the traced ones.
pub(crate) const BATCHES: usize = 1 + TRACED_BATCHES;
/// The one with the fewest instructions counts. The others may have work that a lane does at most
/// once in some milliseconds, or another thread's, which follows the kernel's routes.
const TRACED_BATCHES: usize = 6;

/// Pause before each traced batch, in which other threads run: valgrind runs one at a time. The
/// first batch may have asked one for the next hop, and replies cost more until there is an answer.
const PAUSE: Duration = Duration::from_millis(20);

/// Set in the traced process.
const VARIABLE: &str = "MANYLANE_TRACED";
/// Size of the first lane's stack, and of the steps to the next ones. The C library keeps 40 MiB of
/// stacks that it does not unmap.
const STACK_MIN: usize = 256 << 10;
const PAGE: usize = 4096;

#[repr(align(64))]
struct Mark(AtomicU8);

/// Stores begin and end phases, in turn.
static MARK: Mark = Mark(AtomicU8::new(0));

fn mark() {
    MARK.0.store(1, Ordering::SeqCst);
}

/// True in the traced process.
pub(crate) fn is_traced() -> bool {
    env::var_os(VARIABLE).is_some()
}

/// Runs `work` in a process of its own, the test `test` under valgrind, and returns what each lane
/// did that [`answer_batches`] got there. None without valgrind.
pub(crate) fn trace_lanes(test: &str, work: impl FnOnce()) -> Option<Vec<Phase>> {
    if is_traced() {
        println!("\n{MARK_PREFIX}{}", (&raw const MARK).addr());
        work();
        // Without an orderly end, which takes longer than all else.
        process::exit(0);
    }
    if !skip::need(test, trace::can_trace(), "needs valgrind") {
        return None;
    }
    let mut command = Command::new("valgrind");
    if topology::available().is_ok() {
        // Parsing the kernel's types, which no program of ours needs, would take most of the trace.
        let hide = "mount -t tmpfs none /sys/kernel/btf 2>/dev/null; exec \"$@\"";
        command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", hide, "sh", "valgrind"]);
    }
    command.env(VARIABLE, "1");
    let exe = env::current_exe().unwrap();
    let args = [exe.to_str().unwrap(), test, "--exact", "--nocapture", "--test-threads=1"];
    Some(trace::shortest_of_each(TRACED_BATCHES, trace::run(command, &args)))
}

/// Checks the phases of the lanes of one socket after the other, which are called `what`. `sizes`
/// are the numbers of lanes.
pub(crate) fn check(what: impl Display, sizes: &[usize], mut phases: &[Phase]) {
    let mut costs = Vec::new();
    assert_eq!(phases.len(), sizes.iter().sum::<usize>(), "{what}: phases");
    for lanes in sizes {
        let (ours, others) = phases.split_at(*lanes);
        phases = others;
        let shared = shared_lines(ours);
        assert!(shared.is_empty(), "{what}, {lanes} lanes: {shared:x?}");
        costs.extend(ours.iter().map(|phase| (phase.instructions, phase.syscalls)));
        let Phase { instructions, syscalls, .. } = &ours[0];
        let cost = instructions / BATCH as u64;
        println!("{what}, {lanes} lanes: {cost} instructions per datagram, {syscalls} system calls");
    }
    let (min, max) = (costs.iter().min().unwrap(), costs.iter().max().unwrap());
    let is_flat = max.0 * 100 <= min.0 * 101 && costs.iter().all(|cost| cost.1 == min.1);
    assert!(is_flat, "{what}: instructions and system calls of each batch: {costs:?}");
}

/// Lets one of several lanes receive and answer [`BATCHES`] batches of [`BATCH`] datagrams. Marks
/// all but the first one, which may make another thread look up the next hop again.
pub(crate) fn answer_batches(number: usize, mut lane: Lane) {
    answer(&mut lane, || ());
    // No other lane's thread runs, because the trace does not tell threads apart. Each has a
    // larger stack than those before it, and so never one that another has left.
    let thread = thread::Builder::new().stack_size(STACK_MIN + number * PAGE).spawn(move || {
        (0..TRACED_BATCHES).for_each(|_| {
            thread::sleep(PAUSE);
            answer(&mut lane, mark);
        });
        lane
    });
    // The lane stays open.
    std::mem::forget(thread.unwrap().join().unwrap());
}

fn answer(lane: &mut Lane, mark: fn()) {
    mark();
    let received = lane.recv().unwrap();
    let (batch, mut out) = (received.batch, received.out);
    let count = batch.len();
    for datagram in batch {
        out.reply_borrowed(&datagram, datagram.payload());
    }
    drop(out);
    mark();
    assert_eq!(count, BATCH);
}
