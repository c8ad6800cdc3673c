//! Counts of a stack.

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Counts since the start. Each segment that came in is in `segments_in` once; the fields
        /// that begin with `dropped` are those which reached no connection, each in one of them.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        impl Counters {
            /// Names and values.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$((stringify!($name), self.$name)),+].into_iter()
            }
        }
    };
}

counters! {
    /// Packets given to the stack.
    segments_in,
    /// Packets that it has sent.
    segments_out,
    /// Connections accepted.
    accepted,
    /// Connections that we asked for and that were established.
    connected,
    /// SYNs that were answered with a cookie.
    cookies_sent,
    /// Connections accepted by a cookie.
    cookies_accepted,
    /// Resets sent: for unknown connections, and by the application's abort.
    resets_sent,
    /// Challenge ACKs sent (RFC 5961).
    challenges_sent,
    /// Segments sent again.
    retransmitted,
    /// Windows of which segments were lost, as duplicate ACKs have shown, or a probe.
    losses,
    /// Segments sent again because nothing came back for two round trips (tail loss probes).
    probes,
    /// Timeouts: nothing came back for longer.
    timeouts,
    /// Segments that were not sent because the output had no space. They are sent later.
    output_full,
    /// Connections that got buffers.
    buffers_taken,
    /// Packets that belong to no connection, and that the output has passed on.
    passed_on,
    /// Dropped: not TCP, inconsistent lengths, fragments, addresses that no sender may have.
    dropped_malformed,
    /// Dropped: wrong checksum.
    dropped_checksum,
    /// Dropped: no connection has these addresses, and no port is listened on.
    dropped_unknown,
    /// Dropped: SYNs, and ACKs with cookies, above the number of connections.
    dropped_full,
    /// Dropped: segments that needed buffers when none were left.
    dropped_no_buffers,
    /// Dropped: resets and SYNs outside of what RFC 5961 accepts, old time stamps (RFC 7323),
    /// numbers outside of the window.
    dropped_unacceptable,
}
