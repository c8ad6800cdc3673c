//! Creation of lanes, threads that join and leave, and the fallback to a plain socket.
//!
//! | file | what it does |
//! |---|---|
//! | `epoll_set/` | instances of epoll, and the sockets in them |
//! | `entries.rs` | whether a descriptor still is what its entry says; entries that go |
//! | `fallback.rs` | why and when a socket becomes plain |
//! | `create.rs` | when a socket gets lanes and queues, and which are opened in advance |
//! | `members.rs`, `single_receiver.rs` | threads that join and leave; waits of the only one |
//! | `registry.rs`, `inherited.rs` | new descriptors; descriptors from before the start |

pub(crate) mod create;
pub(crate) mod entries;
pub(crate) mod epoll_set;
pub(crate) mod fallback;
pub(crate) mod inherited;
pub(crate) mod members;
pub(crate) mod registry;
pub(crate) mod single_receiver;
