//! Counters of a lane. Only its thread writes them; any thread can read them without a lock.
//!
//! On the receiving side, `arrived` is `delivered` plus each receive loss. On the sending side,
//! `offered` is `sent` plus each send loss. `lane_counters!` gives the class of each counter;
//! everything else here follows from that table. The steering program counts on its own, to check
//! the first sum ([`LaneCounters::steered`]).

use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, Ordering};

/// The side of a counter, and whether it is a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Recv,
    /// A datagram that arrived and was not delivered.
    RecvLoss,
    Send,
    /// A datagram that was offered and not sent.
    SendLoss,
}

/// Properties of a counter or sum.
pub(crate) struct Description {
    pub(crate) name: &'static str,
    /// The documentation, with a space before each line.
    doc: &'static str,
    class: Class,
    pub(crate) value: fn(&LaneCounters) -> Option<u64>,
}

impl Description {
    pub(crate) fn doc(&self) -> &'static str {
        self.doc.trim_start()
    }
}

macro_rules! steered_doc {
    () => {
        " Messages that eBPF steered to the lane, counted in the kernel; none without eBPF. A GSO \
         message that was sent on this host (over loopback or veth) is steered once, even if GRO is \
         off and the kernel then splits it."
    };
}

/// Generates the cells of a lane ([`Count`]), the public snapshot ([`LaneCounters`]) and its sums.
/// A row has the documentation, the field (also its name in metrics and JSON), the cell, and the
/// [`Class`].
macro_rules! lane_counters {
    ($($(#[doc = $doc:literal])* $field:ident: $cell:ident, $class:ident;)*) => {
        /// The cells of a lane.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub(crate) enum Count {
            $($cell,)*
            // Gauges: the receive rings when the lane last polled them.
            RingFrames,
            RingEntries,
        }

        /// Counters of one lane, or of several together. The unit is datagrams unless a field says
        /// otherwise.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct LaneCounters {
            $($(#[doc = $doc])* pub $field: u64,)*
            #[doc = steered_doc!()]
            pub steered: Option<u64>,
        }

        impl LaneCounters {
            pub(crate) const TABLE: &'static [Description] = &[
                Description {
                    name: "arrived",
                    doc: "Datagrams that reached the lane: `delivered` and the receive losses.",
                    class: Class::Recv,
                    value: |counters| Some(counters.arrived()),
                },
                Description {
                    name: "lost",
                    doc: "Datagrams that were offered and not sent: the sum of the send losses.",
                    class: Class::Send,
                    value: |counters| Some(counters.lost()),
                },
                Description {
                    name: "steered",
                    doc: steered_doc!(),
                    class: Class::Recv,
                    value: |counters| counters.steered,
                },
                $(Description {
                    name: stringify!($field),
                    doc: concat!($($doc),*),
                    class: Class::$class,
                    value: |counters| Some(counters.$field),
                },)*
            ];
        }

        impl Cells {
            pub(crate) fn read(&self) -> LaneCounters {
                LaneCounters { $($field: self.get(Count::$cell),)* steered: None }
            }
        }

        impl AddAssign for LaneCounters {
            fn add_assign(&mut self, other: Self) {
                $(self.$field += other.$field;)*
                self.steered = match (self.steered, other.steered) {
                    (None, None) => None,
                    (one, two) => Some(one.unwrap_or(0) + two.unwrap_or(0)),
                };
            }
        }
    };
}

lane_counters! {
    /// Datagrams handed to the application.
    delivered: Delivered, Recv;
    /// Payload bytes handed to the application.
    delivered_bytes: DeliveredBytes, Recv;
    /// Datagrams delivered from a queue of a device, past the kernel's stack. All others arrived
    /// on the companion socket.
    delivered_by_bypass: DeliveredByBypass, Recv;
    /// Datagrams delivered, but truncated to the size of the buffer, and flagged.
    truncated: Truncated, Recv;
    /// Dropped by the kernel at this lane's queue: queue full, no memory, or a wrong checksum.
    /// With GRO the kernel counts a dropped GRO message once.
    kernel_dropped: KernelDropped, RecvLoss;
    /// Dropped unread in favour of newer datagrams, with `DropPolicy::Head` (`--drop head`).
    dropped_stale: DroppedStale, RecvLoss;
    /// Still queued when the lane was closed, and dropped with it.
    discarded: Discarded, RecvLoss;
    /// Received from a queue of a device with a wrong checksum. (`kernel_dropped` includes the
    /// kernel's.)
    bad_checksum: BadChecksum, RecvLoss;
    /// Received from a queue of a device with malformed headers or inconsistent lengths.
    malformed: Malformed, RecvLoss;
    /// Dropped by the kernel at an AF_XDP socket (`XDP_STATISTICS`): its rings were full because
    /// the lane was late, or the frame was too long.
    xsk_dropped: XskDropped, RecvLoss;
    /// Receive calls that returned at least one message.
    batches: Batches, Recv;
    /// Messages received from the kernel for the application; a GRO message of many datagrams is
    /// one.
    messages: Messages, Recv;
    /// GRO messages of more than one datagram that were received.
    gro_messages: GroMessages, Recv;
    /// Receive calls that failed. No datagram was lost by them.
    recv_errors: RecvErrors, Recv;
    /// Calls in which the lane was to sleep until a datagram arrives, or for a given time.
    sleeps: Sleeps, Recv;
    /// Polls without sleep that found nothing to receive: the cost of spinning.
    empty_polls: EmptyPolls, Recv;
    /// Datagrams given to the lane for sending.
    offered: Offered, Send;
    /// Datagrams accepted by the kernel for sending. That is no promise that they arrive.
    sent: Sent, Send;
    /// Payload bytes accepted by the kernel for sending.
    sent_bytes: SentBytes, Send;
    /// Datagrams sent past the kernel's stack. All others were sent by the companion socket.
    sent_by_bypass: SentByBypass, Send;
    /// System calls for sending.
    send_calls: SendCalls, Send;
    /// GSO messages of more than one datagram that were sent.
    gso_messages: GsoMessages, Send;
    /// GSO messages that the device or the path refused, and that were sent datagram by datagram.
    gso_fallbacks: GsoFallbacks, Send;
    /// Not sent: the socket's send buffer stayed full (`EAGAIN`) for 100 ms, or a flush took 1 s.
    lost_sndbuf_full: LostSndbufFull, SendLoss;
    /// Not sent: no memory (`ENOBUFS`, `ENOMEM`), for example for the fragments of a datagram that
    /// is larger than a frame and the send buffer. A datagram that a full device queue drops
    /// counts as sent, because the kernel does not report that to UDP.
    lost_no_buffers: LostNoBuffers, SendLoss;
    /// Not sent: no route, or the network is down.
    lost_unreachable: LostUnreachable, SendLoss;
    /// Not sent: larger than a datagram or the path allows (`EMSGSIZE`).
    lost_too_large: LostTooLarge, SendLoss;
    /// Not sent: a firewall rule or a missing privilege (`EPERM`, `EACCES`).
    lost_denied: LostDenied, SendLoss;
    /// Not sent for any other reason.
    lost_other: LostOther, SendLoss;
    /// Not sent: the outbox was dropped in a panic before it was flushed.
    abandoned: Abandoned, SendLoss;
    /// Times that the engine had no buffer for a queued datagram (`uring`: `ENOBUFS`). No datagram
    /// is lost by it: it stays in the socket's queue.
    recv_no_buffers: RecvNoBuffers, Recv;
    /// Lanes that fell back to another engine because theirs failed: from `uring` to `mmsg`, for
    /// example because a seccomp filter was installed later.
    engine_fallbacks: EngineFallbacks, Recv;
}

/// Counters by name; see [`LaneCounters::named`].
pub type NamedCounters = Vec<(&'static str, Option<u64>)>;

const CELLS: usize = Count::RingEntries as usize + 1;

/// The cells of one lane, on cache lines of their own.
///
/// A cell has one writer, the lane's thread. So an addition is a plain load and store, without a
/// locked instruction. The cells of what the kernel counts (`kernel_dropped`, `xsk_dropped`) stay
/// zero: its numbers are added when the lane is read.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Cells([AtomicU64; CELLS]);

impl Cells {
    pub(crate) fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }

    /// Adds to a cell. Only the lane's thread may call it.
    #[inline]
    pub(crate) fn add(&self, count: Count, n: u64) {
        let cell = &self.0[count as usize];
        cell.store(cell.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// Sets a gauge. Only the lane's thread may call it.
    #[inline]
    pub(crate) fn set(&self, count: Count, n: u64) {
        self.0[count as usize].store(n, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn get(&self, count: Count) -> u64 {
        self.0[count as usize].load(Ordering::Relaxed)
    }
}

impl LaneCounters {
    /// Datagrams that reached the lane: delivered, or dropped for any counted reason
    /// (`kernel_dropped`, `dropped_stale`, `discarded`, `bad_checksum`, `malformed`,
    /// `xsk_dropped`).
    #[must_use]
    pub fn arrived(&self) -> u64 {
        self.delivered + self.sum(Class::RecvLoss)
    }

    /// Datagrams that were offered and not sent: the sum of every `lost_…` and `abandoned`.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.sum(Class::SendLoss)
    }

    fn sum(&self, class: Class) -> u64 {
        Self::TABLE.iter().filter(|row| row.class == class).filter_map(|row| (row.value)(self)).sum()
    }

    /// All counters with their names in metrics and JSON, and the sums `arrived` and `lost`. A
    /// counter that is not available here has no value.
    #[must_use]
    pub fn named(&self) -> NamedCounters {
        Self::TABLE.iter().map(|row| (row.name, (row.value)(self))).collect()
    }

    /// True if the counter of this name counts datagrams lost while receiving or sending.
    #[must_use]
    pub fn is_loss(name: &str) -> bool {
        let is_loss = |class| matches!(class, Class::RecvLoss | Class::SendLoss);
        Self::TABLE.iter().any(|row| row.name == name && is_loss(row.class))
    }
}

/// A lane's id. Never reused within a socket, unlike its index in the kernel's group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LaneId(pub(crate) u64);

impl std::fmt::Display for LaneId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// A snapshot of the counters of a socket: its open lanes, and the sum over closed ones.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    /// The open lanes, by id.
    pub lanes: Vec<(LaneId, LaneCounters)>,
    /// Sum over lanes that were closed.
    pub closed: LaneCounters,
    /// Datagrams too short for the steering key, steered by flow instead (eBPF only).
    pub steered_short: u64,
    /// Messages that eBPF left to the kernel's choice because the table named no open lane.
    pub steered_by_kernel: u64,
    /// Datagrams to the socket that the XDP program dropped before they reached a lane: see
    /// [`FilterHandle`](crate::FilterHandle). Datagrams sent to the socket are these plus those
    /// that [arrived](LaneCounters::arrived) at its lanes.
    pub filter_drops: FilterDrops,
}

/// Counts of datagrams dropped by a [`Filter`](crate::Filter).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FilterDrops {
    /// From a denied prefix.
    pub denied: u64,
    /// Over a limit.
    pub limited: u64,
}

impl AddAssign for FilterDrops {
    fn add_assign(&mut self, other: Self) {
        self.denied += other.denied;
        self.limited += other.limited;
    }
}

impl Counters {
    /// The sum over all lanes, open and closed.
    #[must_use]
    pub fn total(&self) -> LaneCounters {
        let mut total = self.closed;
        for (_, lane) in &self.lanes {
            total += *lane;
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use manylane_test_support::docs::check_table;

    use super::*;

    #[test]
    fn operating_docs_describe_every_counter() {
        for (side, classes) in
            [("receiving", [Class::Recv, Class::RecvLoss]), ("sending", [Class::Send, Class::SendLoss])]
        {
            let rows = LaneCounters::TABLE.iter().filter(|row| classes.contains(&row.class));
            let rows = rows.map(|row| [format!("`{}`", row.name), row.doc().into()]);
            check_table("operating.md", &format!("counters of {side}"), ["counter", "counts"], rows);
        }
    }

    #[test]
    fn xdp_docs_describe_every_outcome() {
        let rows =
            manylane_bpf::abi::XDP_COUNTS.iter().map(|(name, doc)| [format!("`{name}`"), (*doc).into()]);
        check_table("xdp.md", "counters of outcomes", ["outcome", "counts"], rows);
    }
}
