//! System calls of Manylane behind safe types.
//!
//! All `unsafe` code of the project is in this crate, except that of the preload library. Memory
//! that the kernel reads or writes becomes a checked view once, at the edge; only slices,
//! addresses and numbers leave the crate. It makes no decisions, except in [`rx_coalesce`], which
//! two libraries share: policy, counters and fallbacks are theirs.
//!
//! | module | holds |
//! |---|---|
//! | [`mmsg`] | rings of message headers for `recvmmsg(2)` and `sendmmsg(2)`, built once |
//! | [`addr`] | socket addresses as the kernel writes them |
//! | [`control`] | control messages: ancillary data of a datagram, source address of a reply |
//! | [`sock`] | opening, binding and options of UDP sockets |
//! | [`cbpf`] | classic BPF programs for sockets |
//! | [`cpu`] | affinity, pinning, CPU time of a thread |
//! | [`device`] | network devices: name, hardware address, queues, driver |
//! | [`errno`] | error numbers, for crates that tell them apart |
//! | [`fd`] | duplicates of descriptors |
//! | [`flock`] | locks on files |
//! | [`epoll`] | readiness of many sockets |
//! | [`measure`] | CPU time of other threads |
//! | [`map`] | mappings, and words shared with eBPF programs or other processes |
//! | [`numa`] | NUMA nodes of memory |
//! | [`netns`] | network namespaces and their devices |
//! | [`rx_coalesce`] | whether and how long a lane delays for a larger batch |
//! | [`tick`] | sleeping to a common beat, milliseconds without a system call, timer slack |
//! | [`packet`] | sending whole frames, for tests and benches |
//! | [`process`] | running in place of a child: its signals, its end |
//! | [`signal`] | interrupting a thread in a system call |
//! | [`recvfrom`] | one datagram per call |
//! | [`send_burst`] | sending one datagram many times, as a generator |
//! | [`barrier`] | waiting for packets that are being steered |
//! | [`bound_sockets`] | the UDP sockets that are bound to a port |
//! | [`udp_table`] | the kernel's tables of bound UDP sockets |
//! | [`uring`] | io_uring: multishot receives into registered buffers |
//! | [`xsk`] | queues of a device in user space: AF_XDP sockets, their rings and frames |
//! | [`shared`] | memory that processes share |
//! | [`unix_socket`] | local sockets that carry messages and descriptors |
//! | `test_support` | for tests only, with the feature of this name: forbidding system calls, detaching eBPF programs |

pub mod addr;
pub mod barrier;
pub mod bound_sockets;
pub mod busy_poll;
pub mod cbpf;
pub mod control;
pub mod cpu;
pub mod device;
mod diag;
pub mod epoll;
pub mod errno;
pub mod fd;
pub mod flock;
pub mod map;
pub mod measure;
pub mod mmsg;
pub mod netns;
pub mod numa;
pub mod packet;
pub mod process;
pub mod recvfrom;
pub mod rx_coalesce;
pub mod send_burst;
pub mod shared;
pub mod signal;
pub mod sock;
#[cfg(any(test, feature = "test-support"))]
pub mod test_support;
pub mod tick;
pub mod udp_table;
pub mod unix_socket;
pub mod uring;
pub mod xsk;

/// The result of a system call that returns -1 and sets `errno` on failure.
pub(crate) fn check(ret: libc::c_int) -> std::io::Result<libc::c_int> {
    if ret < 0 { Err(std::io::Error::last_os_error()) } else { Ok(ret) }
}

/// Reports that a test cannot run here, bypassing the harness, and in the list of skips.
#[cfg(test)]
pub(crate) fn skip(name: &str, why: &dyn std::fmt::Display) {
    use std::io::Write as _;
    let line = format!("SKIP {name}: {why}\n");
    // A skip that cannot be reported is not worth a failure.
    let _ = std::io::stderr().write_all(line.as_bytes());
    if let Some(path) = std::env::var_os("MANYLANE_SKIPS") {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        let _ = file.and_then(|mut file| file.write_all(line.as_bytes()));
    }
}
