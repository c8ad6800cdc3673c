//! epoll: an instance that one thread waits on watches that thread's lane, with the program's own
//! events and data.
//!
//! The program adds its descriptor, and the kernel watches lane 0. If the thread that waits owns
//! another lane, the entry moves to that lane. A move happens within that thread's own wait, which
//! has a bound once there are two receivers. When the socket falls back, its entries move back at
//! once, also under a thread that sleeps. Datagrams in other lanes that are not covered are
//! reported after a slice, as by poll.
//!
//! A socket becomes plain if an instance with it is waited on by several threads or processes; if
//! its entry would move after a fork shared the instance, because the other process would not find
//! it; if the instance is itself waited for as a descriptor (by another instance, poll or select);
//! if two descriptors of it are in one instance; and with EPOLLONESHOT, because the kernel does not
//! say whether the entry has fired.
//!
//! | file | what it does |
//! |---|---|
//! | `change.rs` | instances that are made; entries that are added and changed |
//! | `wait.rs` | waiting on an instance, and the events that it reports |

mod change;
mod wait;

pub(crate) use change::{epoll_create, epoll_create1, epoll_ctl};
pub(crate) use wait::{epoll_pwait, epoll_pwait2, epoll_wait};
