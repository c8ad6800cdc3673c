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
//!  program: recvfrom(fd) ─► exports.rs ─► table.rs: ours? ──no──► the C library's own recvfrom(fd)
//!                                          │ yes
//!                                          ▼
//!                   receive.rs: mode of the socket ── SINGLE ──► recvfrom(fd), a wait without a bound
//!                                          │
//!                                          └─ MULTI_LANE ─► recv_dispatch.rs
//!                                               │ 1. the lane that was peeked at
//!                                               │ 2. datagrams older than the lanes
//!                                               │ 3. the thread's own lane
//!                                               │ 4. lanes whose owners do not wait
//! ```
//!
//! A socket is SINGLE at first. Its second receiver makes it OBSERVING, and it becomes MULTI_LANE
//! once every thread that waits for it has received repeatedly. If a lane cannot mirror what the
//! program does, the socket becomes PLAIN for good.
//!
//! # Owners
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
//! # Layers
//!
//! A layer uses only those above it in this table. Each has a table of its files.
//!
//! | layer | what it has |
//! |---|---|
//! | `base/` | the C library, the program's arguments and the settings: what needs no state of the library |
//! | `shared/` | state in mappings: of a socket, its members, the threads. A fork shares what is marked so |
//! | `fds/` | descriptors: what a number means, and the descriptors that the library hides |
//! | `xdp/` | queues of devices on lease (engine `xdp`) |
//! | `batching/` | fewer system calls than datagrams |
//! | `group/` | the lanes of a socket as a group: which thread owns which, what is steered to, how it ends |
//! | `lanes/` | when a socket gets lanes, which threads join and leave, and why it becomes plain |
//! | `transfer/` | receiving and sending |
//! | `waiting/` | waiting: for which lane, and for how long |
//! | `calls/` | calls that change what a descriptor means, the exports, and the start |
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
//! direct system calls (`exports.rs`), `execl` (its arguments cannot be passed on), the C
//! library's own calls inside `system` and `popen`. A descriptor that is used that way is the
//! program's own socket: lane 0.

#![cfg_attr(test, allow(dead_code, reason = "without its exports, most of the library has no callers"))]

mod base;
mod batching;
mod calls;
mod fds;
mod group;
mod lanes;
mod shared;
mod transfer;
mod waiting;
mod xdp;
