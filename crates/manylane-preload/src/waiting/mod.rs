//! Waiting: for which lane, and for how long.
//!
//! | file | what it does |
//! |---|---|
//! | `wait.rs` | what all waits have in common: slices, deadlines |
//! | `poll.rs` | poll, and the slices of select |
//! | `select.rs` | select |
//! | `epoll/` | epoll |

pub(crate) mod epoll;
pub(crate) mod poll;
pub(crate) mod select;
pub(crate) mod wait;
