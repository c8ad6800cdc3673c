//! Contention of the kernel's locks by this process: the lock, the caller, the number of waits and
//! their time. Measured by BPF on the tracepoints `lock:contention_begin` and
//! `lock:contention_end` (Linux 5.19). The *hold* time of locks is not available in stock kernels
//! (see [`super::lockstat`]).

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use aya::maps::{MapData, PerCpuArray, PerCpuHashMap, StackTraceMap};
use aya::programs::RawTracePoint;
use aya::util::kernel_symbols;
use aya::{Ebpf, EbpfLoader};

use crate::lockstat;

/// `struct ml_place` of bpf/locks.bpf.c, in words: the lock, then stack and flags.
type CallSite = [u64; 2];
/// `struct ml_waits`: count, total nanoseconds, maximum.
type WaitStats = [u64; 3];

/// Waits for one lock from one place of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Contention {
    /// The lock, by the data that it guards if known, else by its kind.
    pub lock: String,
    /// The function that waited for it.
    pub caller: String,
    /// Number of waits.
    pub count: u64,
    /// Nanoseconds of all waits.
    pub ns: u64,
    /// Nanoseconds of the longest one.
    pub longest_ns: u64,
}

/// The observed waits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Contentions {
    /// By lock and caller, the longest total time first.
    pub waits: Vec<Contention>,
    /// Waits for which the map had no room, not included above.
    pub missed: u64,
}

impl Contentions {
    /// All waits.
    pub(crate) fn count(&self) -> u64 {
        self.waits.iter().map(|wait| wait.count).sum()
    }

    /// Waits for locks of sockets and pipes, and of their wait queues.
    pub(crate) fn socket_waits(&self) -> u64 {
        [RECV_QUEUE_LOCK, SOCKET_LOCK, WAIT_QUEUE_LOCK, PIPE_LOCK]
            .iter()
            .map(|lock| self.totals_for(lock).0)
            .sum()
    }

    /// Waits for one lock: count and time.
    pub(crate) fn totals_for(&self, lock: &str) -> (u64, u64) {
        let own = self.waits.iter().filter(|wait| wait.lock == lock);
        own.fold((0, 0), |(count, ns), wait| (count + wait.count, ns + wait.ns))
    }
}

/// The receive queue of a UDP socket.
pub(crate) const RECV_QUEUE_LOCK: &str = "receive queue";
/// The lock of a socket as a whole.
pub(crate) const SOCKET_LOCK: &str = "socket";
/// The wait queue of a socket's readers.
pub(crate) const WAIT_QUEUE_LOCK: &str = "wait queue of readers";
/// A pipe.
pub(crate) const PIPE_LOCK: &str = "pipe";

/// Observes all threads of this process until it is dropped.
pub(crate) struct LockMonitor {
    ebpf: Ebpf,
    symbols: BTreeMap<u64, String>,
}

impl LockMonitor {
    /// Starts to observe.
    ///
    /// # Errors
    /// Without root, and before Linux 5.19.
    pub(crate) fn start() -> Result<Self> {
        let mut ebpf = EbpfLoader::new()
            .override_global("ml_process", &std::process::id(), true)
            .load(manylane_bpf::LOCKS)
            .context("loading the programs that trace locks")?;
        for (name, tracepoint) in [("ml_begin", "contention_begin"), ("ml_end", "contention_end")] {
            let program: &mut RawTracePoint =
                ebpf.program_mut(name).with_context(|| format!("no program {name}"))?.try_into()?;
            program
                .load()
                .context("loading a program for a tracepoint (needs root, or CAP_BPF and CAP_PERFMON)")?;
            let attached = program.attach(tracepoint);
            attached.with_context(|| format!("tracepoint lock:{tracepoint} (needs Linux 5.19)"))?;
        }
        let symbols = kernel_symbols().context("reading /proc/kallsyms")?;
        Ok(Self { ebpf, symbols })
    }

    /// The waits since the start.
    pub(crate) fn read(&self) -> Result<Contentions> {
        let map = |name: &str| self.ebpf.map(name).with_context(|| format!("no map {name}"));
        let waited: PerCpuHashMap<&MapData, CallSite, WaitStats> = map("ml_waited")?.try_into()?;
        let stacks: StackTraceMap<&MapData> = map("ml_stacks")?.try_into()?;
        let missed: PerCpuArray<&MapData, u64> = map("ml_missed")?.try_into()?;
        let mut raw = Vec::new();
        for entry in &waited {
            let ([lock, words], waits) = entry.context("reading the traced locks")?;
            let (stack, flags) = split_u64(words);
            if flags & LCB_F_MUTEX != 0 && lockstat::is_supported() {
                // There, each acquisition of a mutex is reported as a wait.
                continue;
            }
            let names: Vec<&str> = match stacks.get(&stack, 0) {
                Ok(trace) => trace.frames().iter().filter_map(|frame| self.symbol_name(frame.ip)).collect(),
                Err(_) => Vec::new(),
            };
            let sum = waits.iter().fold([0; 3], |sum: WaitStats, [count, ns, longest]| {
                [sum[0] + count, sum[1] + ns, sum[2].max(*longest)]
            });
            raw.push(RawContention {
                lock,
                flags,
                caller: find_caller(&names).into(),
                known_lock: known_lock(&names),
                stats: sum,
            });
        }
        Ok(Contentions { waits: aggregate(&raw), missed: missed.get(&0, 0)?.iter().sum() })
    }

    fn symbol_name(&self, address: u64) -> Option<&str> {
        self.symbols.range(..=address).next_back().map(|(_, name)| name.as_str())
    }
}

/// One entry of the map, with its names.
struct RawContention {
    lock: u64,
    flags: u32,
    caller: String,
    known_lock: Option<&'static str>,
    stats: WaitStats,
}

/// The two 32-bit words of a 64-bit one, as they lie in memory.
fn split_u64(word: u64) -> (u32, u32) {
    let bytes = word.to_ne_bytes();
    let half = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    (half(0), half(4))
}

/// The function that waited for the lock: the first that belongs neither to tracing nor to
/// locking.
fn find_caller<'a>(names: &[&'a str]) -> &'a str {
    const LOCK_FN_PREFIXES: [&str; 17] = [
        "bpf_",
        "__bpf_",
        "__traceiter_",
        "trace_",
        "__raw_spin",
        "_raw_",
        "do_raw_",
        "native_queued_",
        "queued_",
        "__pv_queued_",
        "pv_",
        "mutex_",
        "__mutex_",
        "rwsem_",
        "down_",
        "__lock_sock",
        "lock_sock",
    ];
    let is_caller = |name: &&&str| !LOCK_FN_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    names.iter().find(is_caller).copied().unwrap_or("unknown")
}

/// The data that the lock guards, by the function that waits for it. The kernel has no names of
/// locks. These are the functions of UDP and of pipes with their locks (Linux 5.19 to 6.18).
fn known_lock(names: &[&str]) -> Option<&'static str> {
    const KNOWN_LOCKS: [(&str, &str); 26] = [
        ("__schedule", "run queue of a CPU"),
        ("__task_rq_lock", "run queue of a CPU"),
        ("raw_spin_rq_lock_nested", "run queue of a CPU"),
        ("sched_tick", "run queue of a CPU"),
        ("try_to_wake_up", "task that is woken"),
        ("vm_mmap_pgoff", "memory map"),
        ("__vm_munmap", "memory map"),
        ("lock_mm_and_find_vma", "memory map"),
        ("do_mprotect_pkey", "memory map"),
        ("__udp_enqueue_schedule_skb", RECV_QUEUE_LOCK),
        ("__skb_recv_udp", RECV_QUEUE_LOCK),
        ("__skb_try_recv_from_queue", RECV_QUEUE_LOCK),
        ("udp_rmem_release", RECV_QUEUE_LOCK),
        ("udp_skb_destructor", RECV_QUEUE_LOCK),
        ("first_packet_length", RECV_QUEUE_LOCK),
        ("lock_sock_nested", SOCKET_LOCK),
        ("release_sock", SOCKET_LOCK),
        ("prepare_to_wait", WAIT_QUEUE_LOCK),
        ("prepare_to_wait_exclusive", WAIT_QUEUE_LOCK),
        ("finish_wait", WAIT_QUEUE_LOCK),
        ("__wake_up_sync_key", WAIT_QUEUE_LOCK),
        ("__wake_up", WAIT_QUEUE_LOCK),
        ("pipe_read", PIPE_LOCK),
        ("pipe_write", PIPE_LOCK),
        ("anon_pipe_read", PIPE_LOCK),
        ("anon_pipe_write", PIPE_LOCK),
    ];
    let caller = find_caller(names);
    // The function that waits for the lock of the whole socket belongs to locking.
    let near = names.iter().take_while(|name| **name != caller).chain(std::iter::once(&caller));
    near.filter_map(|name| KNOWN_LOCKS.iter().find(|(known, _)| known == name)).map(|(_, lock)| *lock).next()
}

/// Sums entries. If one caller of a lock determines its name, the name applies to all its callers.
fn aggregate(raw: &[RawContention]) -> Vec<Contention> {
    let mut names: BTreeMap<u64, &str> = BTreeMap::new();
    for entry in raw {
        if let Some(name) = entry.known_lock {
            names.entry(entry.lock).or_insert(name);
        }
    }
    let mut sums: BTreeMap<(&str, &str), WaitStats> = BTreeMap::new();
    for entry in raw {
        let lock = names.get(&entry.lock).copied().unwrap_or(lock_kind(entry.flags));
        let sum = sums.entry((lock, &entry.caller)).or_default();
        *sum = [sum[0] + entry.stats[0], sum[1] + entry.stats[1], sum[2].max(entry.stats[2])];
    }
    let mut waits: Vec<Contention> = sums
        .into_iter()
        .map(|((lock, caller), [count, ns, longest_ns])| Contention {
            lock: lock.into(),
            caller: caller.into(),
            count,
            ns,
            longest_ns,
        })
        .collect();
    waits.sort_by(|a, b| b.ns.cmp(&a.ns).then_with(|| a.caller.cmp(&b.caller)));
    waits
}

/// Flag of the tracepoint: the lock is a mutex.
const LCB_F_MUTEX: u32 = 32;

/// The kind of the lock, by the flags of the tracepoint (`LCB_F_*`).
fn lock_kind(flags: u32) -> &'static str {
    const LCB_F_SPIN: u32 = 1;
    const LCB_F_READ: u32 = 2;
    const LCB_F_WRITE: u32 = 4;
    match flags {
        _ if flags & LCB_F_MUTEX != 0 => "other mutex",
        _ if flags & (LCB_F_READ | LCB_F_WRITE) != 0 && flags & LCB_F_SPIN != 0 => "other rwlock",
        _ if flags & (LCB_F_READ | LCB_F_WRITE) != 0 => "other semaphore",
        _ if flags & LCB_F_SPIN != 0 => "other spinlock",
        _ => "other lock",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(lock: u64, flags: u32, stack: &[&str], sum: WaitStats) -> RawContention {
        RawContention {
            lock,
            flags,
            caller: find_caller(stack).into(),
            known_lock: known_lock(stack),
            stats: sum,
        }
    }

    const ENQUEUE_STACK: [&str; 5] = [
        "__traceiter_contention_begin",
        "native_queued_spin_lock_slowpath",
        "_raw_spin_lock",
        "__udp_enqueue_schedule_skb",
        "udp_queue_rcv_one_skb",
    ];

    #[test]
    fn a_lock_is_named_by_one_of_its_callers() {
        let entries = [
            raw(1, 1, &ENQUEUE_STACK, [3, 300, 200]),
            raw(
                1,
                1,
                &["native_queued_spin_lock_slowpath", "_raw_spin_lock_bh", "udp_new_function"],
                [1, 50, 50],
            ),
            raw(2, 1, &ENQUEUE_STACK, [2, 40, 30]),
            raw(3, 32, &["__mutex_lock.constprop.0", "pipe_something"], [1, 7, 7]),
        ];
        let waits = aggregate(&entries);
        let told: Vec<_> =
            waits.iter().map(|w| (&*w.lock, &*w.caller, w.count, w.ns, w.longest_ns)).collect();
        let expected = [
            (RECV_QUEUE_LOCK, "__udp_enqueue_schedule_skb", 5, 340, 200),
            (RECV_QUEUE_LOCK, "udp_new_function", 1, 50, 50),
            ("other mutex", "pipe_something", 1, 7, 7),
        ];
        assert_eq!(told, expected);
        let seen = Contentions { waits, missed: 0 };
        assert_eq!((seen.count(), seen.totals_for(RECV_QUEUE_LOCK)), (7, (6, 390)));
    }

    #[test]
    fn the_socket_lock_is_recognized_by_its_waiters() {
        let stack =
            ["native_queued_spin_lock_slowpath", "_raw_spin_lock_bh", "lock_sock_nested", "udp_sendmsg"];
        assert_eq!((find_caller(&stack), known_lock(&stack)), ("udp_sendmsg", Some(SOCKET_LOCK)));
        assert_eq!((find_caller(&[]), known_lock(&[])), ("unknown", None));
        // With CONFIG_LOCK_STAT, a spinlock has one function more.
        let stack = [
            "queued_spin_lock_slowpath",
            "do_raw_spin_lock",
            "_raw_spin_lock_bh",
            "lock_sock_nested",
            "udp_sendmsg",
        ];
        assert_eq!((find_caller(&stack), known_lock(&stack)), ("udp_sendmsg", Some(SOCKET_LOCK)));
    }

    #[test]
    fn word_halves_follow_memory_order() {
        let bytes = [1_u32.to_ne_bytes(), 2_u32.to_ne_bytes()].concat();
        let word = u64::from_ne_bytes(bytes.try_into().unwrap());
        assert_eq!(split_u64(word), (1, 2));
    }
}
