//! Descriptors: what a number means, and the descriptors that the library hides.
//!
//! | file | what it does |
//! |---|---|
//! | `table.rs` | descriptor to socket or epoll instance |
//! | `hidden_fds.rs` | the library's own descriptors |
//! | `identity.rs` | the cookie of a socket |
//! | `lane_socket.rs` | a lane's kernel socket: opened, steered to, retired |
//! | `sock_fds.rs` | the descriptors of a socket and its lanes; the receive timeout of its own |

pub(crate) mod hidden_fds;
pub(crate) mod identity;
pub(crate) mod lane_socket;
pub(crate) mod sock_fds;
pub(crate) mod table;
