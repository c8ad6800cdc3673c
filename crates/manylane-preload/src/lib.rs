//! `libmanylane_preload.so`: gives lanes to an unmodified UDP server. docs/run.md has the user's
//! view.
//!
//! The library stands in front of the C library's calls that take descriptors (`LD_PRELOAD`). It
//! passes calls for other descriptors on unchanged. A UDP socket that one thread receives on is
//! used by that thread with the kernel's own calls. Once several threads, epoll instances or
//! forked children receive on one socket, each gets a kernel socket of its own, bound to the same
//! address in one reuseport group: its lane. One condition comes before any gain: the program must
//! see no difference but time.
//!
//! ```text
//!  program: recvfrom(fd) ─► calls.rs ─► table.rs: ours? ──no──► the C library's own recvfrom(fd)
//!                                          │ yes
//!                                          ▼
//!                   receive.rs: mode of the socket ── SINGLE ──► recvfrom(fd), a wait without a bound
//!                                          │
//!                                          └─ MULTI_LANE ─► recv_call.rs
//!                                               │ 1. the lane that was peeked at
//!                                               │ 2. datagrams older than the lanes
//!                                               │ 3. the thread's own lane
//!                                               │ 4. lanes whose owners do not wait
//! ```
//!
//! # Who owns what
//!
//! - A socket of the program (`Sock`) holds this process's view of it: descriptors. A fork copies
//!   it, as it copies the descriptors.
//! - `Shared` holds what all processes must agree on: the mode, the members, the owner of each
//!   lane. It is in a shared mapping that is made at bind.
//! - A *member* is a thread that has received on the socket or waited for it. It has one cache
//!   line in `Shared`. That thread alone writes it, except for the lane.
//! - Lane 0 is the program's own kernel socket, by whichever descriptor the program uses. The
//!   other lanes have descriptors of the library's own (`hidden_fds.rs`).
//! - The library does not use the program's heap after start-up, because a signal handler may
//!   receive and send.
//!
//! # Files, in the order in which a call meets them
//!
//! | file | stage |
//! |---|---|
//! | `start.rs`, `settings.rs` | start-up in phases; the settings in the environment |
//! | `calls.rs`, `real.rs` | the one list: prototypes, the C library's functions, exports |
//! | `table.rs` | descriptor to socket or epoll instance; other descriptors go no further |
//! | `identity.rs` | whether a descriptor still is what the table says |
//! | `descriptors.rs`, `process.rs`, `options.rs`, `signals.rs` | calls that change what a descriptor means |
//! | `new_fds.rs`, `syscall.rs`, `inherited.rs` | descriptors that other calls hand out; syscall(2); descriptors from before the start |
//! | `receive.rs`, `recv_call.rs`, `readiness.rs` | receiving: the calls; the order of lanes; the datagrams that wait in each |
//! | `wait.rs`, `select.rs`, `epoll/`, `pollfds.rs` | waiting: for which lane, and for how long; room for poll entries |
//! | `single_receiver.rs` | the fast path of a program with one receiver |
//! | `prefetch.rs`, `recv_bufs.rs` | datagrams received ahead with one call; copies into the program's buffers |
//! | `rx_coalesce.rs` | the delay before a sleep, for larger batches |
//! | `send.rs`, `send_batch.rs` | sending from the thread's lane; replies that are sent together |
//! | `sock.rs`, `thread.rs`, `memory.rs`, `lock.rs` | a socket and its members; the calling thread; mappings; the lock of changes |
//! | `lanes/` | when lanes are made, their owners, how a socket falls back |
//! | `active_set.rs` | steering to no more lanes than there are processors |
//! | `coverage.rs` | which lanes other threads must poll: why each datagram is received |
//! | `liveness.rs`, `recovery.rs`, `failpoint.rs` | which threads are alive; recovery after a thread died; where tests kill a thread |
//! | `lane_socket.rs`, `hidden_fds.rs`, `sockopt.rs`, `steer.rs` | a lane's kernel socket, its descriptor, its options, its steering |
//! | `lease.rs`, `queues.rs`, `frames.rs` | engine `xdp`: queues on lease; receiving and sending frames |
//! | `quiesce.rs`, `seccomp.rs`, `leftovers.rs`, `detached.rs` | detaching before a seccomp filter |
//! | `report.rs` | counters for the launcher |
//!
//! # When something is full or missing
//!
//! | what | then |
//! |---|---|
//! | no memory or no fork handlers at start | every call is the C library's own |
//! | more UDP sockets than the table holds (4096) | the others are the kernel's |
//! | more members of a socket (128), sockets in an epoll instance (32), or no descriptor for a lane | the socket is plain, counted |
//! | no report file | no report |
//! | the holder of a lock is stopped | a thread that waits for the lock gives up after 5 s, and the socket stays as it is |
//!
//! # Where it ends
//!
//! The library does not see calls that bypass the C library's dynamic symbols: io_uring, most
//! direct system calls (`syscall.rs`), `execl` (its arguments cannot be passed on), the C
//! library's own calls inside `system` and `popen`. A descriptor that is used that way is the
//! program's own socket: lane 0.

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
