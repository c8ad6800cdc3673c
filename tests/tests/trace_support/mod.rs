//! A trace of the memory accesses of lanes, each of which answers batches on a thread of its own.
//!
//! The test runs itself again under valgrind (lackey), which lists all memory accesses and system
//! calls. There, lanes run one after the other. Each marks the beginning and the end of a batch by
//! a store to a known address. Valgrind does not see the kernel.

use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::{env, iter, process, thread};

use manylane::Lane;
use manylane_testbed::{skip, topology};

/// Datagrams of a batch.
pub(crate) const BATCH: usize = 8;
/// Batches that each lane receives: one that fills buffers that are kept, and the traced ones.
pub(crate) const BATCHES: usize = 1 + TRACED_BATCHES;
/// The one with the fewest instructions counts. The others may have work that a lane does at most
/// once in some milliseconds, or another thread's, which follows the kernel's routes.
const TRACED_BATCHES: usize = 6;

/// The tool of valgrind that lists memory accesses.
const TOOL: &str = "--tool=lackey";
/// Set in the traced process.
const VARIABLE: &str = "MANYLANE_TRACED";
/// Before the address of the mark, in the output of the traced process.
const ADDRESS: &[u8] = b"address of the mark: ";
/// Size of the first lane's stack, and of the steps to the next ones. The C library keeps 40 MiB of
/// stacks that it does not unmap.
const STACK_MIN: usize = 256 << 10;
const PAGE: usize = 4096;
/// Bytes of a cache line.
const LINE: u64 = 64;

#[repr(align(64))]
struct Mark(AtomicU8);

/// Stores begin and end phases, in turn.
static MARK: Mark = Mark(AtomicU8::new(0));

fn mark() {
    MARK.0.store(1, Ordering::SeqCst);
}

/// What a lane did for one batch.
#[derive(Default)]
pub(crate) struct Phase {
    instructions: u64,
    syscalls: u64,
    read: HashSet<u64>,
    /// Lines, and the instruction that wrote each last.
    written: HashMap<u64, u64>,
}

/// True in the traced process.
pub(crate) fn is_traced() -> bool {
    env::var_os(VARIABLE).is_some()
}

/// Runs `work` in a process of its own, the test `test` under valgrind, and returns what each lane
/// did that [`answer_batches`] got there. None without valgrind.
pub(crate) fn trace(test: &str, work: impl FnOnce()) -> Option<Vec<Phase>> {
    if is_traced() {
        println!("\n{}{}", ADDRESS.escape_ascii(), (&raw const MARK).addr());
        work();
        // Without an orderly end, which takes longer than all else.
        process::exit(0);
    }
    let has_valgrind =
        Command::new("valgrind").args([TOOL, "--version"]).output().is_ok_and(|out| out.status.success());
    if !skip::need(test, has_valgrind, "needs valgrind") {
        return None;
    }
    let mut command = Command::new("valgrind");
    if topology::available().is_ok() {
        // Parsing the kernel's types, which no program of ours needs, would take most of the trace.
        let hide = "mount -t tmpfs none /sys/kernel/btf 2>/dev/null; exec \"$@\"";
        command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", hide, "sh", "valgrind"]);
    }
    // The trace goes through the pipe of the output, because files are slower.
    command.args([
        "--tool=lackey",
        "--trace-mem=yes",
        "--trace-syscalls=yes",
        "--basic-counts=no",
        "--log-fd=1",
    ]);
    command.arg(env::current_exe().unwrap()).args([test, "--exact", "--nocapture", "--test-threads=1"]);
    let command = command.env(VARIABLE, "1").stdin(Stdio::null()).stdout(Stdio::piped());
    let mut traced = command.spawn().unwrap();
    let phases = read_phases(BufReader::with_capacity(1 << 20, traced.stdout.take().unwrap()));
    assert!(traced.wait().unwrap().success(), "the traced process failed");
    Some(phases)
}

/// Reads the accesses between the marks, and selects a batch of each lane.
fn read_phases(mut trace: impl BufRead) -> Vec<Phase> {
    let (mut phases, mut is_inside) = (Vec::<Phase>::new(), false);
    let (mut mark, mut instruction, mut line) = (None, 0, Vec::new());
    loop {
        line.clear();
        if trace.read_until(b'\n', &mut line).unwrap() == 0 {
            break;
        }
        if mark.is_none() {
            let address = line.strip_prefix(ADDRESS).map(|text| str::from_utf8(text).unwrap().trim());
            mark = address.map(|address| address.parse::<u64>().unwrap() / LINE);
            continue;
        }
        if is_inside && is_syscall(&line) {
            phases.last_mut().unwrap().syscalls += 1;
            continue;
        }
        // "I  addr,size", " L addr,size": load, " S": store, " M": both.
        let Some((kind @ (b"I  " | b" L " | b" S " | b" M "), access)) = line.split_at_checked(3) else {
            continue;
        };
        if !is_inside && !matches!(kind, b" S " | b" M ") {
            continue;
        }
        let access = str::from_utf8(access).ok().and_then(|access| access.trim_end().split_once(','));
        let Some((address, size)) = access else { continue };
        let address = u64::from_str_radix(address, 16).unwrap();
        let last = (address + size.parse::<u64>().unwrap() - 1) / LINE;
        if mark == Some(address / LINE) {
            if kind != b" L " {
                is_inside = !is_inside;
            }
            if is_inside && kind != b" L " {
                phases.push(Phase::default());
            }
            continue;
        }
        let Some(phase) = phases.last_mut().filter(|_| is_inside) else { continue };
        if kind == b"I  " {
            instruction = address;
            phase.instructions += 1;
            continue;
        }
        for line in address / LINE..=last {
            match kind {
                b" L " => _ = phase.read.insert(line),
                _ => _ = phase.written.insert(line, instruction),
            }
        }
    }
    assert!(!is_inside && phases.len().is_multiple_of(TRACED_BATCHES));
    let mut phases = phases.into_iter();
    let batches =
        iter::from_fn(|| phases.by_ref().take(TRACED_BATCHES).min_by_key(|phase| phase.instructions));
    batches.collect()
}

/// True for a line such as `SYSCALL[1,1](0) sys_read ( 0, 0x1, 1 ) --> [async] ...`. The result of
/// one that may block has a line of its own: `SYSCALL[1,1](0) ... [async] --> Success(0x1)`.
fn is_syscall(line: &[u8]) -> bool {
    line.starts_with(b"SYSCALL[") && !line.windows(4).any(|part| part == b") ..")
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

/// Lines that one phase writes and another one touches, and the last instruction of each writer.
fn shared_lines(phases: &[Phase]) -> HashMap<u64, Vec<u64>> {
    let mut touched: HashMap<u64, usize> = HashMap::new();
    let mut shared: HashMap<u64, Vec<u64>> = HashMap::new();
    for phase in phases {
        assert!(phase.written.len() > 10 && phase.read.len() > BATCH, "a lane was not traced");
        let written_only = phase.written.keys().filter(|line| !phase.read.contains(line));
        phase.read.iter().chain(written_only).for_each(|line| *touched.entry(*line).or_default() += 1);
    }
    for (line, instruction) in phases.iter().flat_map(|phase| &phase.written) {
        if touched[line] > 1 {
            shared.entry(*line).or_default().push(*instruction);
        }
    }
    shared
}

/// Lets each lane receive and answer [`BATCHES`] batches of [`BATCH`] datagrams. Marks all but the
/// first one, which all lanes receive before the next one of any: it may make another thread look
/// up the next hop again.
pub(crate) fn answer_batches(mut lanes: Vec<Lane>) {
    lanes.iter_mut().for_each(|lane| answer(lane, || ()));
    for (number, mut lane) in lanes.into_iter().enumerate() {
        // No other lane's thread runs, because the trace does not tell threads apart. Each has a
        // larger stack than those before it, and so never one that another has left.
        let thread = thread::Builder::new().stack_size(STACK_MIN + number * PAGE).spawn(move || {
            (0..TRACED_BATCHES).for_each(|_| answer(&mut lane, mark));
            lane
        });
        // The lane stays open.
        std::mem::forget(thread.unwrap().join().unwrap());
    }
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
