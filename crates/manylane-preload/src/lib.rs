//! `libmanylane_preload.so`: gives an unmodified UDP server lanes.
//!
//! The library stands in front of the C library's calls that take descriptors. A call for a
//! descriptor that is none of its business goes on as it came. A UDP socket that one thread
//! receives on is used by that thread with the kernel's own calls, too. Only when several threads,
//! epoll instances or forked children receive on one socket does each get a kernel socket of its
//! own, bound to the same address in one reuseport group: its lane. ARCHITECTURE.md, "The shim",
//! has the whole design; docs/run.md says what users see.
//!
//! In the order in which a call meets them:
//!
//! | file | stage |
//! |---|---|
//! | `start.rs`, `settings.rs` | start-up in phases; what the environment asks for |
//! | `calls.rs`, `real.rs` | the one list: prototypes, the C library's functions, exports |
//! | `table.rs` | descriptor to socket or epoll instance; a descriptor that is not ours goes no further |
//! | `identity.rs` | whether a descriptor still is what the table says |
//! | `descriptors.rs`, `process.rs`, `options.rs`, `signals.rs` | calls that change what a descriptor means |
//! | `new_fds.rs`, `syscall.rs`, `inherited.rs` | descriptors that are handed out, closed by number, or there from the start |
//! | `receive.rs`, `recv_call.rs`, `readiness.rs` | receiving: the calls; in which order they look at lanes; what waits in which |
//! | `wait.rs`, `select.rs`, `epoll/`, `pollfds.rs` | waiting: for which lane, and how long at most; room for what is waited for |
//! | `single_receiver.rs` | a program with one receiver goes straight through |
//! | `prefetch.rs`, `recv_bufs.rs` | datagrams taken ahead, many with one call; into the program's buffers |
//! | `rx_coalesce.rs` | the pause before a sleep, for more than one datagram |
//! | `send.rs`, `send_batch.rs` | sending: from which lane; replies that are sent together |
//! | `sock.rs`, `thread.rs`, `memory.rs`, `lock.rs` | a socket and its members; the calling thread; memory; the lock of changes |
//! | `lanes/` | when lanes are made, who owns which, how a socket falls back |
//! | `active_set.rs` | threads beyond the processors rest: their lanes are not steered to |
//! | `coverage.rs` | which lanes others must look at: why nothing is out of reach |
//! | `liveness.rs`, `recovery.rs`, `failpoint.rs` | which threads are alive; cleaning up after one that died; where tests kill a thread |
//! | `lane_socket.rs`, `hidden_fds.rs`, `sockopt.rs`, `steer.rs` | a lane's kernel socket, its number, its options, its steering |
//! | `lease.rs`, `queues.rs`, `frames.rs` | engine `xdp`: queues of devices that the launcher leases; which lane has which; from frames to the program's buffers and back |
//! | `quiesce.rs`, `seccomp.rs`, `leftovers.rs`, `detached.rs` | standing aside before a seccomp filter |
//! | `report.rs` | what the launcher reads |

#![cfg_attr(test, allow(dead_code, reason = "without its exports, most of the library is called by nobody"))]

mod active_set;
mod calls;
mod coverage;
mod descriptors;
mod detached;
mod epoll;
mod failpoint;
mod frames;
mod hidden_fds;
mod identity;
mod inherited;
mod lane_socket;
mod lanes;
mod lease;
mod leftovers;
mod liveness;
mod lock;
mod memory;
mod new_fds;
mod options;
mod pollfds;
mod prefetch;
mod process;
mod queues;
mod quiesce;
mod readiness;
mod real;
mod receive;
mod recovery;
mod recv_bufs;
mod recv_call;
mod report;
mod rx_coalesce;
mod seccomp;
mod select;
mod send;
mod send_batch;
mod settings;
mod signals;
mod single_receiver;
mod sock;
mod sockopt;
mod start;
mod steer;
mod syscall;
mod table;
mod thread;
mod wait;
