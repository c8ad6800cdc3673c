//! Two lanes share no cache line that one of them writes, and a datagram costs the same number of
//! instructions with any number of lanes and peers.
//!
//! The test runs itself again under valgrind (lackey), which lists all memory accesses. There, two
//! lanes on threads of their own receive a batch and answer it, one after the other. Each marks
//! the beginning and the end by a store to a known address. Valgrind does not see the kernel.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::{env, thread};

use manylane::{Builder, Engine, Lane, Steering, SteeringBackend};
use manylane_testbed::skip;
use manylane_tests::{Client, need_uring, send_and_wait};

const TEST: &str = "loopback_lanes_share_no_written_line";
/// The file to which the traced process writes the address of the marks.
const VARIABLE: &str = "MANYLANE_TRACED";
/// Number of engines to trace.
const COUNT_VARIABLE: &str = "MANYLANE_TRACED_ENGINES";

const BATCH: usize = 16;
/// Datagrams for each lane on average: enough for two full batches on each.
const DATAGRAMS: usize = 4 * BATCH;
/// Lanes and peers. Few, because a trace takes long.
const SIZES: [(usize, usize); 2] = [(2, 8), (4, 64)];
const ENGINES: [Engine; 2] = [Engine::Mmsg, Engine::Uring];
/// Bytes by which stacks differ.
const STACK_STEP: usize = 128 << 10;
/// Bytes of a cache line.
const LINE: u64 = 64;

/// Stores to `MARKS[n]` begin and end phase n.
#[repr(align(64))]
struct Mark(AtomicU8);
const MARKS_MAX: usize = 2 * SIZES.len() * ENGINES.len();
static MARKS: [Mark; MARKS_MAX] = [const { Mark(AtomicU8::new(0)) }; MARKS_MAX];

/// What a phase did.
#[derive(Default)]
struct Phase {
    instructions: u64,
    read: HashSet<u64>,
    /// Lines, and the instruction that wrote each last.
    written: HashMap<u64, u64>,
}

#[test]
fn loopback_lanes_share_no_written_line() {
    if let Some(marks) = env::var_os(VARIABLE) {
        trace_all(Path::new(&marks));
        // Without an orderly end, which takes longer than all else.
        std::process::exit(0);
    }
    let has_valgrind =
        Command::new("valgrind").arg("--version").output().is_ok_and(|out| out.status.success());
    if !skip::need(TEST, has_valgrind, "needs valgrind") {
        return;
    }
    let folder = env::temp_dir().join(format!("manylane-shared-lines-{}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    let engines = if need_uring(TEST) { &ENGINES[..] } else { &ENGINES[..1] };
    let (marks, trace) = (folder.join("marks"), folder.join("trace"));
    let mut command = Command::new("valgrind");
    command.args(["--tool=lackey", "--trace-mem=yes", "--basic-counts=no"]);
    command.arg(format!("--log-file={}", trace.display())).arg(env::current_exe().unwrap());
    command.args([TEST, "--exact", "--nocapture", "--test-threads=1"]).env(VARIABLE, &marks);
    command.env(COUNT_VARIABLE, engines.len().to_string());
    let output = command.stdin(Stdio::null()).output().unwrap();
    let phases = output.status.success().then(|| {
        let first = fs::read_to_string(&marks).unwrap().parse().unwrap();
        read_phases(&trace, first)
    });
    fs::remove_dir_all(&folder).unwrap();
    let phases = phases.unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(&output.stdout)));
    check(engines, &phases);
}

fn check(engines: &[Engine], phases: &[Phase]) {
    for (engine, phases) in engines.iter().zip(phases.chunks(2 * SIZES.len())) {
        for ((lanes, peers), pair) in SIZES.into_iter().zip(phases.chunks(2)) {
            for (one, other) in [(&pair[0], &pair[1]), (&pair[1], &pair[0])] {
                assert!(one.written.len() > 10 && one.read.len() > BATCH, "traced");
                let is_shared = |line: &u64| other.read.contains(line) || other.written.contains_key(line);
                let shared: Vec<_> = one.written.iter().filter(|(line, _)| is_shared(line)).collect();
                assert!(shared.is_empty(), "{engine}, {lanes} lanes, {peers} peers: {shared:x?}");
            }
        }
        let costs: Vec<_> = phases.iter().map(|phase| phase.instructions / BATCH as u64).collect();
        println!("{engine}: {costs:?} instructions per datagram with {SIZES:?} lanes and peers");
        let (min, max) = (costs.iter().min().unwrap(), costs.iter().max().unwrap());
        assert!(max * 100 <= min * 101, "{engine}: {costs:?}");
    }
}

/// Reads the accesses between the marks, the first of which is at `first`.
fn read_phases(trace: &Path, first: u64) -> Vec<Phase> {
    let mut phases: Vec<Phase> = (0..MARKS_MAX).map(|_| Phase::default()).collect();
    let (mut current, mut instruction) = (None, 0);
    for line in BufReader::new(File::open(trace).unwrap()).split(b'\n') {
        let line = String::from_utf8(line.unwrap()).unwrap();
        // "I  addr,size", " L addr,size": load, " S": store, " M": both.
        let Some((kind, access)) = line.split_at_checked(3) else { continue };
        let Some((address, size)) = access.split_once(',') else { continue };
        let (Ok(address), Ok(size)) = (u64::from_str_radix(address, 16), size.parse::<u64>()) else {
            continue;
        };
        let mark = address.wrapping_sub(first) / LINE;
        if mark < MARKS_MAX as u64 {
            if kind != " L " {
                current = if current.is_none() { Some(mark as usize) } else { None };
            }
            continue;
        }
        let Some(phase) = current.map(|current| &mut phases[current]) else { continue };
        for line in address / LINE..=(address + size - 1) / LINE {
            match kind {
                "I  " => {
                    instruction = address;
                    phase.instructions += u64::from(line == address / LINE);
                }
                " L " => _ = phase.read.insert(line),
                " S " | " M " => _ = phase.written.insert(line, instruction),
                _ => {}
            }
        }
    }
    assert_eq!(current, None);
    phases
}

/// The traced process.
fn trace_all(file: &Path) {
    fs::write(file, (&raw const MARKS).addr().to_string()).unwrap();
    let count = env::var(COUNT_VARIABLE).unwrap().parse().unwrap();
    for (index, engine) in ENGINES.into_iter().take(count).enumerate() {
        for (size, (lanes, peers)) in SIZES.into_iter().enumerate() {
            trace(engine, lanes, peers, &MARKS[2 * (index * SIZES.len() + size)..][..2]);
        }
    }
}

/// Lets each of `lanes` lanes receive and answer two batches. Marks the second one of two lanes.
fn trace(engine: Engine, lanes: usize, peers: usize, marks: &'static [Mark]) {
    let mut builder = Builder::new("127.0.0.1:0").unwrap();
    builder.engine(engine).lanes(lanes).batch(BATCH).datagram_size(2048).gso(false);
    // Loading eBPF would take most of the trace.
    builder.steering(Steering::Random).steering_backend(SteeringBackend::ClassicBpf);
    let socket = builder.open().unwrap();
    let clients: Vec<_> = (0..peers).map(|_| Client::to(socket.local_addr())).collect();
    send_and_wait(|| {
        (0..DATAGRAMS * lanes).for_each(|number| clients[number % peers].send(b"some request"));
    });
    // Only one thread runs during a phase, because the trace does not tell threads apart. Each gets
    // a larger stack than those before it, and so never one that another has left.
    for (number, lane) in socket.into_lanes().into_iter().enumerate() {
        let builder = thread::Builder::new().stack_size((16 + number) * STACK_STEP);
        let thread = builder.spawn(move || answer_batches(lane, marks.get(number))).unwrap();
        // The lane stays open.
        std::mem::forget(thread.join().unwrap());
    }
}

fn answer_batches(mut lane: Lane, mark: Option<&Mark>) -> Lane {
    let unmarked = Mark(AtomicU8::new(0));
    for mark in [&unmarked, mark.unwrap_or(&unmarked)] {
        mark.0.store(1, Ordering::SeqCst);
        let received = lane.recv().unwrap();
        let (batch, mut out) = (received.batch, received.out);
        let count = batch.len();
        for datagram in batch {
            out.reply_borrowed(&datagram, datagram.payload());
        }
        drop(out);
        mark.0.store(2, Ordering::SeqCst);
        assert_eq!(count, BATCH);
    }
    lane
}
