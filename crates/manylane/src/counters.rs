//! Counters of a lane: written by its thread alone, readable from any other without a lock.
//!
//! On the receiving side, `arrived = delivered + kernel_dropped + overtaken + discarded`, with engine `xdp` also
//! `bad_checksum + malformed + xsk_dropped`; on the sending side,
//! `offered = sent + every lost_… + abandoned`. The program that steers counts on its own, so that the first sum
//! can be checked against it ([`LaneCounters::steered`]).

use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a lane counts. Each variant is one cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Count {
    Batches,
    FullBatches,
    Messages,
    Delivered,
    DeliveredBytes,
    Truncated,
    GroMessages,
    Stolen,
    DroppedStale,
    Discarded,
    RecvErrors,
    Offered,
    Sent,
    SentBytes,
    SendCalls,
    GsoMessages,
    LostFull,
    LostNoBuffers,
    LostUnreachable,
    LostTooLarge,
    LostDenied,
    LostOther,
    Abandoned,
    GsoFallbacks,
    DeliveredByXdp,
    BadChecksum,
    Malformed,
    SentByXdp,
    UringNoBuffers,
    UringFallbacks,
    Sleeps,
    EmptyPolls,
    // No counters: what there was when the lane last looked.
    RingFrames,
    RingEntries,
}

const CELLS: usize = Count::RingEntries as usize + 1;

/// The cells of one lane, on cache lines of their own.
///
/// A cell has one writer, the lane's thread, so that adding is a plain load and store: no locked instruction.
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

    pub(crate) fn read(&self) -> LaneCounters {
        LaneCounters {
            batches: self.get(Count::Batches),
            messages: self.get(Count::Messages),
            delivered: self.get(Count::Delivered),
            delivered_bytes: self.get(Count::DeliveredBytes),
            truncated: self.get(Count::Truncated),
            gro_messages: self.get(Count::GroMessages),
            stolen: self.get(Count::Stolen),
            kernel_dropped: 0,
            dropped_stale: self.get(Count::DroppedStale),
            discarded: self.get(Count::Discarded),
            recv_errors: self.get(Count::RecvErrors),
            steered: None,
            offered: self.get(Count::Offered),
            sent: self.get(Count::Sent),
            sent_bytes: self.get(Count::SentBytes),
            send_calls: self.get(Count::SendCalls),
            gso_messages: self.get(Count::GsoMessages),
            lost_full: self.get(Count::LostFull),
            lost_no_buffers: self.get(Count::LostNoBuffers),
            lost_unreachable: self.get(Count::LostUnreachable),
            lost_too_large: self.get(Count::LostTooLarge),
            lost_denied: self.get(Count::LostDenied),
            lost_other: self.get(Count::LostOther),
            abandoned: self.get(Count::Abandoned),
            gso_fallbacks: self.get(Count::GsoFallbacks),
            delivered_by_xdp: self.get(Count::DeliveredByXdp),
            bad_checksum: self.get(Count::BadChecksum),
            malformed: self.get(Count::Malformed),
            xsk_dropped: 0,
            sent_by_xdp: self.get(Count::SentByXdp),
            uring_no_buffers: self.get(Count::UringNoBuffers),
            uring_fallbacks: self.get(Count::UringFallbacks),
            sleeps: self.get(Count::Sleeps),
            empty_polls: self.get(Count::EmptyPolls),
        }
    }
}

/// What happened on a lane, or on several together. Units are datagrams unless a field says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LaneCounters {
    /// Receive calls that brought something.
    pub batches: u64,
    /// Messages taken from the kernel for the application; a GRO train of many datagrams is one message.
    pub messages: u64,
    /// Handed to the application.
    pub delivered: u64,
    /// Payload bytes handed to the application.
    pub delivered_bytes: u64,
    /// Delivered, but cut off at the size of the buffer, and flagged so.
    pub truncated: u64,
    /// Messages that were trains of more than one datagram.
    pub gro_messages: u64,
    /// Delivered by this lane, but taken from the queue of another.
    pub stolen: u64,
    /// Dropped by the kernel at this lane's queue: queue full, no memory, or a wrong checksum. With GRO the
    /// kernel counts a dropped train once.
    pub kernel_dropped: u64,
    /// Thrown away unread for newer ones, with [`DropPolicy::Head`](crate::DropPolicy).
    pub dropped_stale: u64,
    /// Still queued when the lane was closed, and thrown away with it.
    pub discarded: u64,
    /// Receive calls that failed.
    pub recv_errors: u64,
    /// Messages that eBPF steered to the lane, counted on the kernel's side; none without eBPF. A train that was sent
    /// on this host (GSO over loopback or veth) is steered once, also where GRO is off and it then comes apart.
    pub steered: Option<u64>,
    /// Given to the lane for sending.
    pub offered: u64,
    /// Taken by the kernel for sending.
    pub sent: u64,
    /// Payload bytes taken by the kernel for sending.
    pub sent_bytes: u64,
    /// System calls for sending.
    pub send_calls: u64,
    /// Messages sent that were trains of more than one datagram.
    pub gso_messages: u64,
    /// Not sent: the socket's send buffer stayed full (`EAGAIN`).
    pub lost_full: u64,
    /// Not sent: no memory, such as for the pieces of a datagram larger than a frame and the send buffer (`ENOBUFS`,
    /// `ENOMEM`). What a full device queue drops counts as sent: of that the kernel tells UDP nothing.
    pub lost_no_buffers: u64,
    /// Not sent: no route, or the network is down.
    pub lost_unreachable: u64,
    /// Not sent: larger than a datagram or the path can be.
    pub lost_too_large: u64,
    /// Not sent: a firewall rule or a missing privilege (`EPERM`, `EACCES`).
    pub lost_denied: u64,
    /// Not sent for any other reason.
    pub lost_other: u64,
    /// Not sent: the queue of replies was given up before it was flushed.
    pub abandoned: u64,
    /// Trains that the device or the path refused and that were sent datagram by datagram.
    pub gso_fallbacks: u64,
    /// Delivered past the kernel's stack, from a queue of a device; the rest came through the companion socket.
    pub delivered_by_xdp: u64,
    /// Came from a queue of a device with a wrong checksum. (The kernel's are in `kernel_dropped`.)
    pub bad_checksum: u64,
    /// Came from a queue of a device with headers that are broken or lie about lengths.
    pub malformed: u64,
    /// Could not be put into the rings of a queue, because the lane was late or the frame did not fit.
    pub xsk_dropped: u64,
    /// Sent past the kernel's stack. The rest went through the companion socket.
    pub sent_by_xdp: u64,
    /// How often engine `uring` had no buffer for what was there. Nothing is lost by it: it stays in the queue.
    pub uring_no_buffers: u64,
    /// Lanes of engine `uring` that went on with `mmsg` because io_uring failed, such as by a filter of system calls that came
    /// later.
    pub uring_fallbacks: u64,
    /// Calls in which the lane was to sleep until something came, or for a time.
    pub sleeps: u64,
    /// Looks for something to receive, without sleep, that found nothing: what [spinning](crate::WaitPolicy) costs.
    pub empty_polls: u64,
}

impl LaneCounters {
    /// What has reached the lane and left it again, one way or another: `delivered + kernel_dropped +
    /// overtaken + discarded + bad_checksum + malformed + xsk_dropped`.
    #[must_use]
    pub fn arrived(&self) -> u64 {
        self.delivered
            + self.kernel_dropped
            + self.dropped_stale
            + self.discarded
            + self.bad_checksum
            + self.malformed
            + self.xsk_dropped
    }

    /// All counters with their names in metrics, sums among them. One that there is not has no value.
    pub(crate) fn named(&self) -> [(&'static str, Option<u64>); 34] {
        let steered = ("steered", self.steered);
        let all = [
            ("arrived", self.arrived()),
            ("delivered", self.delivered),
            ("delivered_bytes", self.delivered_bytes),
            ("kernel_dropped", self.kernel_dropped),
            ("overtaken", self.dropped_stale),
            ("discarded", self.discarded),
            ("truncated", self.truncated),
            ("batches", self.batches),
            ("messages", self.messages),
            ("trains", self.gro_messages),
            ("stolen", self.stolen),
            ("recv_errors", self.recv_errors),
            ("offered", self.offered),
            ("sent", self.sent),
            ("sent_bytes", self.sent_bytes),
            ("send_calls", self.send_calls),
            ("lost", self.lost()),
            ("lost_full", self.lost_full),
            ("lost_no_buffers", self.lost_no_buffers),
            ("lost_unreachable", self.lost_unreachable),
            ("lost_too_large", self.lost_too_large),
            ("lost_denied", self.lost_denied),
            ("lost_other", self.lost_other),
            ("abandoned", self.abandoned),
            ("by_xdp", self.delivered_by_xdp),
            ("bad_checksum", self.bad_checksum),
            ("malformed", self.malformed),
            ("xsk_dropped", self.xsk_dropped),
            ("sent_by_xdp", self.sent_by_xdp),
            ("uring_short", self.uring_no_buffers),
            ("uring_fallbacks", self.uring_fallbacks),
            ("sleeps", self.sleeps),
            ("looks", self.empty_polls),
        ];
        std::array::from_fn(|at| all.get(at).map_or(steered, |(name, value)| (*name, Some(*value))))
    }

    /// What was to be sent and was not.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost_full
            + self.lost_no_buffers
            + self.lost_unreachable
            + self.lost_too_large
            + self.lost_denied
            + self.lost_other
            + self.abandoned
    }
}

impl AddAssign for LaneCounters {
    fn add_assign(&mut self, other: Self) {
        self.batches += other.batches;
        self.messages += other.messages;
        self.delivered += other.delivered;
        self.delivered_bytes += other.delivered_bytes;
        self.truncated += other.truncated;
        self.gro_messages += other.gro_messages;
        self.stolen += other.stolen;
        self.kernel_dropped += other.kernel_dropped;
        self.dropped_stale += other.dropped_stale;
        self.discarded += other.discarded;
        self.recv_errors += other.recv_errors;
        self.steered = match (self.steered, other.steered) {
            (None, None) => None,
            (one, two) => Some(one.unwrap_or(0) + two.unwrap_or(0)),
        };
        self.offered += other.offered;
        self.sent += other.sent;
        self.sent_bytes += other.sent_bytes;
        self.send_calls += other.send_calls;
        self.gso_messages += other.gso_messages;
        self.lost_full += other.lost_full;
        self.lost_no_buffers += other.lost_no_buffers;
        self.lost_unreachable += other.lost_unreachable;
        self.lost_too_large += other.lost_too_large;
        self.lost_denied += other.lost_denied;
        self.lost_other += other.lost_other;
        self.abandoned += other.abandoned;
        self.gso_fallbacks += other.gso_fallbacks;
        self.delivered_by_xdp += other.delivered_by_xdp;
        self.bad_checksum += other.bad_checksum;
        self.malformed += other.malformed;
        self.xsk_dropped += other.xsk_dropped;
        self.sent_by_xdp += other.sent_by_xdp;
        self.uring_no_buffers += other.uring_no_buffers;
        self.uring_fallbacks += other.uring_fallbacks;
        self.sleeps += other.sleeps;
        self.empty_polls += other.empty_polls;
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
