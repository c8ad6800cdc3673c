//! Reads a trace of memory accesses and system calls (valgrind's tool lackey) of a program that
//! marks phases by stores to a known address. Valgrind does not see the kernel, and runs one thread
//! at a time, which the trace does not name: a program that wants the accesses of one thread lets
//! the others sleep.

#![expect(clippy::unwrap_used, reason = "a test fails by it")]

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

/// The tool of valgrind that lists memory accesses.
const TOOL: &str = "--tool=lackey";
/// The program prints a line of this and the decimal address of the mark, a byte, before the first
/// phase. Stores to the mark begin and end phases, in turn.
pub const MARK_PREFIX: &str = "address of the mark: ";
/// Bytes of a cache line.
const LINE: u64 = 64;

/// What happened between two marks.
#[derive(Default)]
pub struct Phase {
    /// Number of executed instructions.
    pub instructions: u64,
    /// Number of system calls.
    pub syscalls: u64,
    /// Lines that were read.
    pub read: HashSet<u64>,
    /// Lines that were written, and the address of the instruction that did so last.
    pub written: HashMap<u64, u64>,
}

/// True if this machine can trace.
pub fn can_trace() -> bool {
    Command::new("valgrind").args([TOOL, "--version"]).output().is_ok_and(|out| out.status.success())
}

/// Runs `command` (valgrind, or a program that starts it with the arguments that it gets), with
/// the options for a trace and `args` added, and reads its phases.
///
/// # Panics
/// If the program fails, or the trace ends within a phase.
pub fn run(mut command: Command, args: &[&str]) -> Vec<Phase> {
    // The trace goes through the pipe of the output, because files are slower.
    command.args([TOOL, "--trace-mem=yes", "--trace-syscalls=yes", "--basic-counts=no", "--log-fd=1"]);
    let mut traced = command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let phases = read_phases(BufReader::with_capacity(1 << 20, traced.stdout.take().unwrap()));
    assert!(traced.wait().unwrap().success(), "the traced process failed");
    phases
}

fn read_phases(mut trace: impl BufRead) -> Vec<Phase> {
    let (mut phases, mut is_inside) = (Vec::<Phase>::new(), false);
    let (mut mark, mut instruction, mut line) = (None, 0, Vec::new());
    loop {
        line.clear();
        if trace.read_until(b'\n', &mut line).unwrap() == 0 {
            break;
        }
        if mark.is_none() {
            let address = line.strip_prefix(MARK_PREFIX.as_bytes());
            let address = address.map(|text| str::from_utf8(text).unwrap().trim());
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
    assert!(!is_inside, "the trace ends within a phase");
    phases
}

/// True for a line such as `SYSCALL[1,1](0) sys_read ( 0, 0x1, 1 ) --> [async] ...`. The result of
/// one that may block has a line of its own: `SYSCALL[1,1](0) ... [async] --> Success(0x1)`.
fn is_syscall(line: &[u8]) -> bool {
    line.starts_with(b"SYSCALL[") && !line.windows(4).any(|part| part == b") ..")
}

/// Of each `count` phases in a row, the one with the fewest instructions: the others may have work
/// that is done at most once in some milliseconds, or another thread's.
///
/// # Panics
/// If the number of phases is no multiple of `count`.
pub fn shortest_of_each(count: usize, phases: Vec<Phase>) -> Vec<Phase> {
    assert!(phases.len().is_multiple_of(count), "{} phases", phases.len());
    let mut phases = phases.into_iter();
    std::iter::from_fn(|| phases.by_ref().take(count).min_by_key(|phase| phase.instructions)).collect()
}

/// Lines that one phase writes and another one touches, and the last instruction of each writer.
pub fn shared_lines(phases: &[Phase]) -> HashMap<u64, Vec<u64>> {
    let mut touched: HashMap<u64, usize> = HashMap::new();
    let mut shared: HashMap<u64, Vec<u64>> = HashMap::new();
    for phase in phases {
        assert!(phase.written.len() > 10 && phase.read.len() > 10, "a phase was not traced");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_have_their_accesses_calls_and_shared_lines() {
        let text = "any output\naddress of the mark: 4096\n S 0a0,8\n S 1000,1\nI  400,3\n L 0c0,8\n S 0fc,8\n\
                    SYSCALL[1,1](0) sys_read ( 0, 0x1, 1 ) --> [async] ... \n\
                    SYSCALL[1,1](0) ... [async] --> Success(0x1) \n M 1000,1\nI  500,1\n S 2000,1\n S 1000,1\n\
                    I  600,1\n L 13f,1\n S 1000,1\n";
        let phases = read_phases(text.as_bytes());
        let [one, two] = &phases[..] else { panic!("{} phases", phases.len()) };
        assert_eq!((one.instructions, one.syscalls), (1, 1));
        assert_eq!(
            (&one.read, &one.written),
            (&HashSet::from([3]), &HashMap::from([(3, 0x400), (4, 0x400)]))
        );
        assert_eq!((two.instructions, two.syscalls, &two.read), (1, 0, &HashSet::from([4])));
        assert_eq!(shortest_of_each(2, phases).len(), 1);
    }
}
