//! `libmanylane_preload.so`: gives an unmodified UDP server lanes.
//!
//! The library stands in front of the C library's calls that take descriptors. A call for a descriptor that is none of its
//! business goes on as it came. A UDP socket that one thread receives on is used by that thread with the kernel's own
//! calls, too. Only when several threads, epoll instances or forked children receive on one socket does each get a
//! kernel socket of its own, bound to the same address in one reuseport group: its lane. ARCHITECTURE.md, "The shim", has
//! the whole design; docs/run.md says what users see.
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
//! | `fresh.rs`, `syscall.rs`, `inherited.rs` | descriptors that are handed out, closed by number, or there from the start |
//! | `receive.rs`, `order.rs`, `look.rs` | receiving: the calls; in which order they look at lanes; what waits in which |
//! | `wait.rs`, `select.rs`, `epoll/`, `entries.rs` | waiting: for which lane, and how long at most; room for what is waited for |
//! | `alone.rs` | a program with one receiver goes straight through |
//! | `hold.rs`, `deliver.rs` | datagrams taken ahead, many with one call; into the program's buffers |
//! | `overtake.rs` | under overload, the newest wins (`--overload newest`) |
//! | `pace.rs` | the pause before a sleep, for more than one datagram |
//! | `send.rs`, `gather.rs` | sending: from which lane; replies that are sent together |
//! | `sock.rs`, `me.rs`, `memory.rs`, `lock.rs` | a socket and its members; the calling thread; memory; the lock of changes |
//! | `lanes/` | when lanes are made, who owns which, how a socket falls back |
//! | `rest.rs` | threads beyond the processors rest: their lanes are not steered to |
//! | `reach.rs` | which lanes others must look at: why nothing is out of reach |
//! | `life.rs`, `mend.rs`, `points.rs` | who is alive; what the living do for the dead; where tests have somebody die |
//! | `open.rs`, `hidden.rs`, `mirror.rs`, `steer.rs` | a lane's kernel socket, its number, its options, its steering |
//! | `loan.rs`, `queues.rs`, `frames.rs` | engine `xdp`: queues of devices that the launcher lends; which lane has which; from frames to the program's buffers and back |
//! | `inside.rs`, `aside.rs`, `leftovers.rs`, `aftermath.rs` | standing aside before a seccomp filter |
//! | `report.rs` | what the launcher reads |

#![cfg_attr(test, allow(dead_code, reason = "without its exports, most of the library is called by nobody"))]

mod aftermath;
mod alone;
mod aside;
mod calls;
mod deliver;
mod descriptors;
mod entries;
mod epoll;
mod frames;
mod fresh;
mod gather;
mod hidden;
mod hold;
mod identity;
mod inherited;
mod inside;
mod lanes;
mod leftovers;
mod life;
mod loan;
mod lock;
mod look;
mod me;
mod memory;
mod mend;
mod mirror;
mod open;
mod options;
mod order;
mod overtake;
mod pace;
mod points;
mod process;
mod queues;
mod reach;
mod real;
mod receive;
mod report;
mod rest;
mod select;
mod send;
mod settings;
mod signals;
mod sock;
mod start;
mod steer;
mod syscall;
mod table;
mod wait;
