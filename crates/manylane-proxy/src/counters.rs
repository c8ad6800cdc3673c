//! What has become of connections. Each lane writes its own counters; anyone may read them.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Counts since the start. `accepted` is `open` plus all that have ended: from `finished`
        /// on, each connection of a client is in one of them.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        impl Counters {
            /// Names and values.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$((stringify!($name), self.$name)),+].into_iter()
            }

            /// Adds those of another lane.
            pub fn add(&mut self, other: &Counters) {
                $(self.$name += other.$name;)+
            }
        }

        /// The counters of one lane.
        #[derive(Debug, Default)]
        pub struct LaneCounters {
            $(pub(crate) $name: AtomicU64,)+
        }

        impl LaneCounters {
            /// Their values.
            #[must_use]
            pub fn snapshot(&self) -> Counters {
                Counters { $($name: self.$name.load(Ordering::Relaxed),)+ }
            }
        }
    };
}

counters! {
    /// Connections of clients that were accepted.
    accepted,
    /// Connections that were made to servers.
    connected,
    /// Connections to servers that were not made. Another server is tried.
    connect_failed,
    /// Bytes from clients to servers.
    bytes_to_servers,
    /// Bytes from servers to clients.
    bytes_to_clients,
    /// Connections of clients that there are now.
    open,
    /// Both sides have ended it.
    finished,
    /// The client has reset it, or is gone.
    client_gone,
    /// The server has reset it, or is gone.
    server_gone,
    /// No server was up, or none could be reached.
    no_server,
    /// No bytes for longer than the idle timeout, or the half-closed one.
    idle,
    /// Above the limit of connections in all.
    over_limit,
    /// Above the limit of connections of one source.
    over_source_limit,
    /// Open when the time to end was over.
    cut_off,
}

/// Adds to a counter that only the calling thread writes.
#[inline]
pub(crate) fn add(counter: &AtomicU64, count: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
}
