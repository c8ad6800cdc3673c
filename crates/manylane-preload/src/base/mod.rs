//! The C library, the program's arguments and the settings: what needs no state of the library.
//!
//! | file | what it does |
//! |---|---|
//! | `functions.rs` | the list of functions that the library stands in front of; the contract of the unsafe ones |
//! | `real.rs` | the C library's own functions, by name; errno; direct system calls |
//! | `by_select.rs` | polls of more entries than the limit of open files |
//! | `settings.rs`, `state.rs` | the settings in the environment; whether the library is started |
//! | `quiesce.rs` | which threads are in the library, and how all of them leave it |
//! | `signals.rs` | whether a wait continues after a signal; signals that are deferred |
//! | `sockopt.rs`, `steer.rs` | options of a socket; classic BPF that steers and filters |
//! | `recv_bufs.rs`, `pollfds.rs` | the program's receive buffers; room for poll entries |

pub(crate) mod by_select;
pub(crate) mod functions;
pub(crate) mod pollfds;
pub(crate) mod quiesce;
pub(crate) mod real;
pub(crate) mod recv_bufs;
pub(crate) mod settings;
pub(crate) mod signals;
pub(crate) mod sockopt;
pub(crate) mod state;
pub(crate) mod steer;
