//! Waiting: for which lane, and for how long.
//!
//! | file | what it does |
//! |---|---|
//! | `wait.rs` | poll, and the slices of all waits |
//! | `select.rs` | select |
//! | `epoll/` | epoll |

pub(crate) mod epoll;
pub(crate) mod select;
pub(crate) mod wait;
