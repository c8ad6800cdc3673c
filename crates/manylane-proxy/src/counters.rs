//! What has become of connections. Each lane writes its own counters; anyone may read them.
//! `counters!` makes the types, those of [`udp`](crate::udp) too.

use std::sync::atomic::{AtomicU64, Ordering};

/// Makes two types: values, and the counters of one lane.
macro_rules! counters {
    ($(#[doc = $about:literal])+ $values:ident, $lane:ident: $($(#[doc = $doc:literal])+ $name:ident,)+) => {
        $(#[doc = $about])+
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $values {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        impl $values {
            /// Names and values.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$((stringify!($name), self.$name)),+].into_iter()
            }

            /// Adds those of another lane.
            pub fn add(&mut self, other: &$values) {
                $(self.$name += other.$name;)+
            }
        }

        /// The counters of one lane.
        #[derive(Debug, Default)]
        pub struct $lane {
            $(pub(crate) $name: std::sync::atomic::AtomicU64,)+
        }

        impl $lane {
            /// Their values.
            #[must_use]
            pub fn snapshot(&self) -> $values {
                $values { $($name: self.$name.load(std::sync::atomic::Ordering::Relaxed),)+ }
            }
        }
    };
}
pub(crate) use counters;

counters! {
    /// Counts since the start. `accepted` is `open` plus all that have ended: from `finished` on,
    /// each connection of a client is in one of them.
    Counters, LaneCounters:
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
