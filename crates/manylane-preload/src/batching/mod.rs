//! Fewer system calls than datagrams.
//!
//! | file | what it does |
//! |---|---|
//! | `prefetch/` | datagrams received ahead with one call |
//! | `send_batch.rs` | replies that are sent together |
//! | `outbox.rs` | the queued replies of a lane |
//! | `rx_coalesce.rs` | the delay before a sleep, for larger batches |
//! | `readiness.rs` | which lanes have a datagram |

pub(crate) mod outbox;
pub(crate) mod prefetch;
pub(crate) mod readiness;
pub(crate) mod rx_coalesce;
pub(crate) mod send_batch;
