//! What has become of datagrams and sessions.

use crate::counters::counters;

counters! {
    /// Counts since the start. `datagrams` is `forwarded` plus all with another reason, up to
    /// `stopping`; `answers` is `answers_sent` plus `answers_lost`; `sessions` is `open` plus
    /// all that have ended, from `finished` on.
    UdpCounters, UdpLaneCounters:
    /// Datagrams of clients that lanes have received.
    datagrams,
    /// Sent to a server.
    forwarded,
    /// Dropped: too short for the key.
    too_short,
    /// Dropped: longer than the buffer of the lane.
    truncated,
    /// Dropped: above the limit of sessions in all.
    over_limit,
    /// Dropped: above the limit of sessions of one source.
    over_source_limit,
    /// Dropped: no server was up, or those tried have refused earlier datagrams.
    no_server,
    /// Dropped: no descriptor, port or route for a socket to the server.
    no_socket,
    /// Dropped: the send buffer of the session's socket was full.
    buffer_full,
    /// Dropped: the kernel did not send it for another reason, such as its length.
    send_failed,
    /// Dropped: of a new session, while the proxy ends.
    stopping,
    /// Datagrams of servers.
    answers,
    /// Sent to a client.
    answers_sent,
    /// Not sent. The counters of the lanes have the reasons.
    answers_lost,
    /// Bytes forwarded to servers.
    bytes_to_servers,
    /// Bytes of servers' answers.
    bytes_to_clients,
    /// Sessions that have begun.
    sessions,
    /// Sessions that there are now.
    open,
    /// Ended: each datagram was answered, as often as expected.
    finished,
    /// Ended: no datagrams for longer than the idle timeout, or for a moment at the end.
    idle,
    /// Ended: the server has refused a datagram.
    refused,
    /// Ended: still in use when the time to end was over.
    cut_off,
}
