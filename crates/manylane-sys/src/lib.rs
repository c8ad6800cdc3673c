//! System calls of Manylane behind safe types.
//!
//! All `unsafe` code of the project is in this crate, except that of the preload library and of
//! helpers for tests (`manylane-test-support`). Memory that the kernel reads or writes becomes a
//! checked view once, at the edge; only slices, addresses and numbers leave the crate. It makes no
//! decisions: policy, counters and fallbacks are those of its users. Decisions that two libraries
//! share are in `manylane-policy`.
//!
//! | module | holds |
//! |---|---|
//! | [`mmsg`] | rings of message headers for `recvmmsg(2)` and `sendmmsg(2)`, built once |
//! | [`addr`] | socket addresses as the kernel writes them |
//! | [`control`] | control messages: ancillary data of a datagram, source address of a reply |
//! | [`sock`] | opening, binding and options of UDP sockets |
//! | [`cbpf`] | classic BPF programs for sockets |
//! | [`cpu`] | affinity, pinning, CPU time and id of a thread |
//! | [`device`] | network devices: name, hardware address, queues, driver |
//! | [`errno`] | error numbers, for crates that tell them apart |
//! | [`fd`] | duplicates of descriptors, files in an open folder, locks on files |
//! | [`epoll`] | readiness of many sockets |
//! | [`map`] | mappings, and words shared with eBPF programs or other processes |
//! | [`padded`] | slices on cache lines of their own |
//! | [`netlink`] | requests to the kernel by netlink, its replies and its events |
//! | [`netns`] | network namespaces and their devices |
//! | [`timer`] | timers to wait for beside sockets |
//! | [`tick`] | sleeping to a common beat, milliseconds without a system call, timer slack |
//! | [`process`] | running in place of a child: its signals, its end |
//! | [`send_burst`] | sending one datagram many times, as a generator |
//! | [`barrier`] | waiting for packets that are being steered |
//! | [`bound_sockets`] | the UDP sockets that are bound to a port |
//! | [`udp_table`] | the kernel's tables of bound UDP sockets |
//! | [`uring`] | io_uring: multishot receives into registered buffers |
//! | [`xsk`] | queues of a device in user space: AF_XDP sockets, their rings and frames |
//! | [`shared`] | memory that processes share |
//! | [`unix_socket`] | local sockets that carry messages and descriptors |
//! | `measure`, `numa` | with the feature `bench`: CPU time of threads, NUMA nodes of memory |
//! | `packet`, `recvfrom` | with the feature `bench`: whole frames, one datagram per call |
//! | `kernel_module` | with the feature `bench`: the sockets of the kernel module |
//!
//! What only benches, testbeds and tests need is behind the feature `bench`. It is not in a crate
//! of its own: the private parts of [`uring`] and [`xsk`] that it uses would have to be public for
//! that, and one more crate would have `unsafe` code.

pub mod addr;
pub mod barrier;
pub mod bound_sockets;
pub mod busy_poll;
pub mod cbpf;
pub mod control;
pub mod cpu;
pub mod device;
pub mod epoll;
pub mod errno;
pub mod event_fd;
pub mod fd;
#[cfg(any(test, feature = "bench"))]
pub mod kernel_module;
pub mod map;
#[cfg(any(test, feature = "bench"))]
pub mod measure;
pub mod mmsg;
pub mod netlink;
pub mod netns;
#[cfg(any(test, feature = "bench"))]
pub mod numa;
#[cfg(any(test, feature = "bench"))]
pub mod packet;
pub mod padded;
pub mod process;
pub mod random;
pub mod raw_ip;
#[cfg(any(test, feature = "bench"))]
pub mod recvfrom;
pub mod send_burst;
pub mod shared;
pub mod sock;
pub mod tick;
pub mod timer;
pub mod udp_table;
pub mod unix_socket;
pub mod uring;
pub mod xsk;

/// The result of a system call that returns -1 and sets `errno` on failure.
pub(crate) fn check(ret: libc::c_int) -> std::io::Result<libc::c_int> {
    if ret < 0 { Err(std::io::Error::last_os_error()) } else { Ok(ret) }
}
