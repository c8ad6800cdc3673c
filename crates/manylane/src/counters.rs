//! Counters of a lane: written by its thread alone, readable from any other without a lock.
//!
//! On the receiving side `arrived` is `delivered` plus each receive loss, on the sending side
//! `offered` is `sent` plus each send loss: `lane_counters!` says of each counter which it is,
//! and everything else here follows from that table. The program that steers counts on its own, so
//! that the first sum can be checked against it ([`LaneCounters::steered`]).

use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a counter is in the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// A datagram that arrived and was not delivered.
    RecvLoss,
    /// A datagram that was offered and not sent.
    SendLoss,
    /// Neither.
    Other,
}

/// Makes of one table the cells of a lane ([`Count`]), the public snapshot ([`LaneCounters`]) and
/// its sums. A row is the documentation, the field, which is also the name in metrics and JSON, the
/// cell, and the [`Class`].
macro_rules! lane_counters {
    ($($(#[$doc:meta])* $field:ident: $cell:ident, $class:ident;)*) => {
        /// The cells of a lane.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub(crate) enum Count {
            $($cell,)*
            // No counters: the receive rings when the lane last looked at them.
            RingFrames,
            RingEntries,
        }

        /// What happened on a lane, or on several together. Units are datagrams unless a field says
        /// otherwise.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct LaneCounters {
            $($(#[$doc])* pub $field: u64,)*
            /// Messages that eBPF steered to the lane, counted on the kernel's side; none without
            /// eBPF. A GRO train that was sent on this host (GSO over loopback or veth) is steered
            /// once, also where GRO is off and it then comes apart.
            pub steered: Option<u64>,
        }

        impl LaneCounters {
            const TABLE: &'static [(&'static str, Class, fn(&Self) -> u64)] =
                &[$((stringify!($field), Class::$class, |counters| counters.$field),)*];
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
    /// Handed to the application.
    delivered: Delivered, Other;
    /// Payload bytes handed to the application.
    delivered_bytes: DeliveredBytes, Other;
    /// Delivered past the kernel's stack, from a queue of a device; the rest came through the
    /// companion socket.
    delivered_by_xdp: DeliveredByXdp, Other;
    /// Delivered, but cut off at the size of the buffer, and flagged so.
    truncated: Truncated, Other;
    /// Dropped by the kernel at this lane's queue: queue full, no memory, or a wrong checksum. With
    /// GRO the kernel counts a dropped train once.
    kernel_dropped: KernelDropped, RecvLoss;
    /// Dropped unread in favour of newer ones, with [`DropPolicy::Head`](crate::DropPolicy).
    dropped_stale: DroppedStale, RecvLoss;
    /// Still queued when the lane was closed, and dropped with it.
    discarded: Discarded, RecvLoss;
    /// Came from a queue of a device with a wrong checksum. (The kernel's are in `kernel_dropped`.)
    bad_checksum: BadChecksum, RecvLoss;
    /// Came from a queue of a device with headers that are broken or lie about lengths.
    malformed: Malformed, RecvLoss;
    /// Did not fit the rings of a queue, because the lane was late, or the frame too long.
    xsk_dropped: XskDropped, RecvLoss;
    /// Receive calls that returned at least one message.
    batches: Batches, Other;
    /// Messages received from the kernel for the application; a GRO train of many datagrams is one
    /// message.
    messages: Messages, Other;
    /// Messages received that were GRO trains of more than one datagram.
    gro_messages: GroMessages, Other;
    /// Receive calls that failed. None of them lost a datagram.
    recv_errors: RecvErrors, Other;
    /// Calls in which the lane was to sleep until a datagram arrives, or for a time.
    sleeps: Sleeps, Other;
    /// Polls, without sleep, that found nothing to receive: what [spinning](crate::WaitPolicy)
    /// costs.
    empty_polls: EmptyPolls, Other;
    /// Given to the lane for sending.
    offered: Offered, Other;
    /// Taken by the kernel for sending.
    sent: Sent, Other;
    /// Payload bytes taken by the kernel for sending.
    sent_bytes: SentBytes, Other;
    /// Sent past the kernel's stack. The rest went through the companion socket.
    sent_by_xdp: SentByXdp, Other;
    /// System calls for sending.
    send_calls: SendCalls, Other;
    /// Messages sent that were GSO trains of more than one datagram.
    gso_messages: GsoMessages, Other;
    /// GSO trains that the device or the path refused and that were sent datagram by datagram.
    gso_fallbacks: GsoFallbacks, Other;
    /// Not sent: the socket's send buffer stayed full (`EAGAIN`).
    lost_sndbuf_full: LostSndbufFull, SendLoss;
    /// Not sent: no memory, such as for the pieces of a datagram larger than a frame and the send
    /// buffer (`ENOBUFS`, `ENOMEM`). What a full device queue drops counts as sent: the kernel does
    /// not report it to UDP.
    lost_no_buffers: LostNoBuffers, SendLoss;
    /// Not sent: no route, or the network is down.
    lost_unreachable: LostUnreachable, SendLoss;
    /// Not sent: larger than a datagram or the path can be.
    lost_too_large: LostTooLarge, SendLoss;
    /// Not sent: a firewall rule or a missing privilege (`EPERM`, `EACCES`).
    lost_denied: LostDenied, SendLoss;
    /// Not sent for any other reason.
    lost_other: LostOther, SendLoss;
    /// Not sent: the queue of replies was given up before it was flushed.
    abandoned: Abandoned, SendLoss;
    /// How often engine `uring` had no buffer for a queued datagram (`ENOBUFS`). Nothing is lost by
    /// it: the datagram stays in the socket's queue.
    uring_no_buffers: UringNoBuffers, Other;
    /// Lanes of engine `uring` that went on with `mmsg` because io_uring failed, such as by a
    /// filter of system calls that came later.
    uring_fallbacks: UringFallbacks, Other;
}

/// Counters by name; see [`LaneCounters::named`].
pub type NamedCounters = Vec<(&'static str, Option<u64>)>;

const CELLS: usize = Count::RingEntries as usize + 1;

/// The cells of one lane, on cache lines of their own.
///
/// A cell has one writer, the lane's thread, so that adding is a plain load and store: no locked
/// instruction. Those of what the kernel counts (`kernel_dropped`, `xsk_dropped`) stay zero: its
/// numbers are added when the lane is read.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Cells([AtomicU64; CELLS]);

impl Cells {
    pub(crate) fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }

    /// Adds to a cell. Only the lane's own thread may.
    #[inline]
    pub(crate) fn add(&self, count: Count, n: u64) {
        let cell = &self.0[count as usize];
        cell.store(cell.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// Sets a cell that is no counter. Only the lane's own thread may.
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
    /// Datagrams that reached the lane: those delivered, and those dropped for any of the reasons
    /// that are counted (`kernel_dropped`, `dropped_stale`, `discarded`, `bad_checksum`,
    /// `malformed`, `xsk_dropped`).
    #[must_use]
    pub fn arrived(&self) -> u64 {
        self.delivered + self.sum(Class::RecvLoss)
    }

    /// Datagrams that were offered and not sent: every `lost_…`, and `abandoned`.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.sum(Class::SendLoss)
    }

    fn sum(&self, class: Class) -> u64 {
        Self::TABLE.iter().filter(|(_, of, _)| *of == class).map(|(_, _, value)| value(self)).sum()
    }

    /// All counters with their names in metrics and JSON, and the sums `arrived` and `lost`. One
    /// that is not counted here has no value.
    #[must_use]
    pub fn named(&self) -> NamedCounters {
        let sums =
            [("arrived", Some(self.arrived())), ("lost", Some(self.lost())), ("steered", self.steered)];
        let counters = Self::TABLE.iter().map(|(name, _, value)| (*name, Some(value(self))));
        sums.into_iter().chain(counters).collect()
    }

    /// Whether the counter of this name counts datagrams that were lost, while receiving or
    /// sending.
    #[must_use]
    pub fn is_loss(name: &str) -> bool {
        Self::TABLE.iter().any(|(one, class, _)| *one == name && *class != Class::Other)
    }
}

/// A lane's id: never used again within a socket, unlike its place in the kernel's group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LaneId(pub(crate) u64);

impl std::fmt::Display for LaneId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// The counters of a socket at one moment: its lanes, and what lanes counted that are gone.
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
    /// Datagrams to the socket that the XDP program dropped before they got to a lane: see
    /// [`FilterHandle`](crate::FilterHandle). What was sent to the socket is these and what
    /// [arrived](LaneCounters::arrived) at its lanes.
    pub filter_drops: crate::FilterDrops,
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
