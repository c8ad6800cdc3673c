//! Sends the datagrams of a lane, collected into a batch, and counts the fate of each.
//!
//! No function here returns an error for a single datagram. Each datagram ends up as sent, or in a
//! loss counter with its reason. Every wait and every retry has a bound.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use manylane_sys::addr::{SockAddr, Source, in_socket_family};
use manylane_sys::mmsg::{SendBatch, fits};
use manylane_sys::{errno, sock};

use crate::counters::{Cells, Count};
use crate::io::batch::Datagram;
use crate::io::{Bypass, Replies, Transport};

/// Longest wait of a flush for room in the send buffer. A device that sends nothing in that time
/// is stuck.
const STALL_TIMEOUT: Duration = Duration::from_millis(100);
/// Total time that one flush waits, while the device keeps sending.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);
/// Retries per flush of errors that may pass without a wait.
const RETRIES_MAX: u32 = 10;

/// Datagrams to send, collected until the batch is full, [`flush`](Self::flush) is called, or the
/// value is dropped.
///
/// The request of a reply has to be of the batch that this outbox answers. A bypass copies
/// headers from that batch, and a reply to another request may have the wrong ones.
///
/// Send failures are counted, not returned: [`LaneCounters`](crate::LaneCounters) has the reasons.
/// [`flush`](Self::flush) returns how many of a batch were sent.
pub struct Outbox<'a> {
    queue: SendBatch<'a>,
    transport: Transport<'a>,
    cells: &'a Cells,
    datagrams: u64,
    /// The result of sends since the last flush: some make room before one is asked for.
    since_flush: Flushed,
    /// The send path past the kernel's stack, tried first.
    bypass: Option<Bypass<'a>>,
    /// Datagrams and bytes that it has taken and that are not counted as sent yet.
    bypass_pending: (u64, u64),
    /// Link-local sources and IPv4-mapped ones need the socket's family.
    v6: bool,
}

/// Remaining time and retries of one flush.
struct RetryBudget {
    /// Deadline of all waits of the flush. The first wait sets it, so the clock is read only then.
    deadline: Option<Instant>,
    retries: u32,
    /// The last ICMP error of the message that is being tried.
    last_error: Option<i32>,
}

/// The result of sending datagrams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flushed {
    /// Datagrams that the kernel accepted.
    pub sent: u64,
    /// Datagrams that it did not accept; the counters have the reasons.
    pub lost: u64,
}

impl<'a> Outbox<'a> {
    #[inline]
    pub(crate) fn new(replies: Replies<'a>, bypass: Option<Bypass<'a>>, cells: &'a Cells, v6: bool) -> Self {
        let Replies { queue, transport } = replies;
        let since_flush = Flushed::default();
        Self { queue, transport, cells, datagrams: 0, since_flush, v6, bypass, bypass_pending: (0, 0) }
    }

    /// Answers `request` with a copy of `payload`, from the address that the request was sent to.
    #[inline]
    pub fn reply(&mut self, request: &Datagram<'_>, payload: &[u8]) {
        if let Some(bypass) = &mut self.bypass
            && bypass.reply(request, payload)
        {
            return self.count_bypassed(payload.len());
        }
        self.copy(&request.raw_peer(), request.source(), payload);
    }

    /// Answers `request` without a copy, with bytes that live as long as the batch, such as the
    /// request's.
    #[inline]
    pub fn reply_borrowed(&mut self, request: &Datagram<'_>, payload: &'a [u8]) {
        if let Some(bypass) = &mut self.bypass
            && bypass.reply_borrowed(request, payload)
        {
            return self.count_bypassed(payload.len());
        }
        self.cells.add(Count::Offered, 1);
        let (peer, source) = (&request.raw_peer(), request.source());
        if !fits(peer, payload.len()) {
            self.cells.add(Count::LostTooLarge, 1);
            return;
        }
        if !self.queue.push(peer, source, payload) {
            self.make_room();
            // An empty ring has room for any datagram.
            self.queue.push(peer, source, payload);
        }
        self.datagrams += 1;
    }

    /// Answers `request` with a payload that `build` writes. `build` gets `len` bytes of the
    /// lane's send buffer, with undefined content, and returns the length of the payload.
    #[inline]
    pub fn reply_with(&mut self, request: &Datagram<'_>, len: usize, build: impl FnOnce(&mut [u8]) -> usize) {
        self.build(&request.raw_peer(), request.source(), Some(request), len, build);
    }

    /// Sends a copy of `payload` to `peer`, without a request. A dual-stack socket accepts IPv4
    /// peers too.
    pub fn send_to(&mut self, peer: SocketAddr, payload: &[u8]) {
        self.send(None, peer, payload);
    }

    /// As [`send_to`](Self::send_to), from the local address `from`, such as
    /// [`Datagram::local`] of an earlier request. The port is that of the socket. If `from` is a
    /// wildcard or a multicast address, the kernel selects the address.
    pub fn send_from(&mut self, from: SocketAddr, peer: SocketAddr, payload: &[u8]) {
        let interface = match from {
            SocketAddr::V4(_) => 0,
            SocketAddr::V6(v6) => v6.scope_id(),
        };
        let ip = in_socket_family(from, self.v6).ip();
        let is_source = !ip.is_unspecified() && !ip.is_multicast();
        self.send(is_source.then_some(Source { ip, interface }), peer, payload);
    }

    fn send(&mut self, source: Option<Source>, peer: SocketAddr, payload: &[u8]) {
        let peer = in_socket_family(peer, self.v6);
        if let Some(bypass) = &mut self.bypass
            && bypass.send(source.map(|source| source.ip), peer, payload)
        {
            return self.count_bypassed(payload.len());
        }
        self.copy(&peer.into(), source, payload);
    }

    #[inline]
    fn count_bypassed(&mut self, bytes: usize) {
        self.cells.add(Count::Offered, 1);
        self.bypass_pending = (self.bypass_pending.0 + 1, self.bypass_pending.1 + bytes as u64);
    }

    /// Submits what the bypass has taken; returns the number of datagrams.
    fn flush_bypass(&mut self) -> u64 {
        let Some(bypass) = &mut self.bypass else { return 0 };
        let (datagrams, bytes) = std::mem::take(&mut self.bypass_pending);
        bypass.flush(datagrams, self.cells);
        if datagrams > 0 {
            self.cells.add(Count::Sent, datagrams);
            self.cells.add(Count::SentBytes, bytes);
        }
        datagrams
    }

    #[inline]
    fn copy(&mut self, peer: &SockAddr, source: Option<Source>, payload: &[u8]) {
        self.build(peer, source, None, payload.len(), |space| {
            space.copy_from_slice(payload);
            payload.len()
        });
    }

    /// Lets `build` write a payload, and sends it to `peer` from `source`. A reply to `request` is
    /// sent past the kernel's stack if possible. `request` is none if that was tried already.
    #[inline]
    fn build(
        &mut self,
        peer: &SockAddr,
        source: Option<Source>,
        request: Option<&Datagram<'_>>,
        len: usize,
        build: impl FnOnce(&mut [u8]) -> usize,
    ) {
        if !fits(peer, len) {
            self.cells.add(Count::Offered, 1);
            self.cells.add(Count::LostTooLarge, 1);
            return;
        }
        if self.queue.reserve(len).is_none() {
            self.make_room();
        }
        // An empty arena has room for any datagram.
        let Some(space) = self.queue.reserve(len) else { return };
        let used = build(space).min(len);
        if let (Some(bypass), Some(request)) = (&mut self.bypass, request)
            && bypass.reply(request, &space[..used])
        {
            return self.count_bypassed(used);
        }
        // Counted only here: `build` may panic, and an unfinished datagram was never offered.
        self.cells.add(Count::Offered, 1);
        if !self.queue.push_reserved(peer, source, used) {
            self.send_queued();
            self.queue.clear_keep_reserved(used);
            // An empty ring has room for any datagram.
            self.queue.push_reserved(peer, source, used);
        }
        self.datagrams += 1;
    }

    /// Datagrams collected and not sent yet.
    #[must_use]
    pub fn len(&self) -> usize {
        (self.datagrams + self.bypass_pending.0) as usize
    }

    /// True if there is nothing to send.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sends the collected datagrams, and returns how many the kernel has accepted since the last
    /// flush, those included that were sent to make room.
    ///
    /// While the device keeps sending, waits for room in the send buffer: at most 100 ms at a time
    /// and 1 s in all. Datagrams that still do not fit are lost and counted. Later ones do not
    /// wait either, until one fits again.
    pub fn flush(&mut self) -> Flushed {
        self.make_room();
        if let Some(bypass) = &mut self.bypass {
            bypass.clear_diverted();
        }
        std::mem::take(&mut self.since_flush)
    }

    /// As [`flush`](Self::flush), for a datagram that does not fit yet and must stay behind
    /// earlier ones to its peer.
    fn make_room(&mut self) {
        self.since_flush.sent += self.flush_bypass();
        self.send_queued();
        self.queue.clear();
    }

    /// Sends the queue and leaves it in the ring.
    fn send_queued(&mut self) {
        let mut done = Flushed::default();
        let mut budget = RetryBudget { deadline: None, retries: RETRIES_MAX, last_error: None };
        let mut at = 0;
        while at < self.queue.messages() {
            self.cells.add(Count::SendCalls, 1);
            match self.transport.send(&mut self.queue, at) {
                Ok(taken) => {
                    for index in at..at + taken {
                        let (datagrams, bytes) = self.queue.message_counts(index);
                        self.count_sent(datagrams, bytes, &mut done);
                    }
                    at += taken;
                    budget.last_error = None;
                }
                Err(err) => {
                    let code = err.raw_os_error().unwrap_or(0);
                    if !self.retry(code, &mut budget) {
                        self.split_or_drop(at, code, &mut budget, &mut done);
                        at += 1;
                        budget.last_error = None;
                    }
                }
            }
        }
        self.datagrams = 0;
        self.since_flush.sent += done.sent;
        self.since_flush.lost += done.lost;
    }

    fn count_sent(&self, datagrams: u64, bytes: u64, done: &mut Flushed) {
        self.cells.add(Count::Sent, datagrams);
        self.cells.add(Count::SentBytes, bytes);
        if datagrams > 1 {
            self.cells.add(Count::GsoMessages, 1);
        }
        done.sent += datagrams;
    }

    /// Decides whether to retry the same message, after a wait if needed. Charges `budget`.
    fn retry(&mut self, code: i32, budget: &mut RetryBudget) -> bool {
        match code {
            // One wait without progress is enough: waiting again for each batch would stall the
            // lane.
            errno::EAGAIN if self.queue.is_stuck() => return false,
            errno::EAGAIN => {
                // Each wait has its own bound. With a small buffer, a device that keeps up takes
                // many short waits, and on a busy machine the thread runs late after each of them.
                let now = self.transport.now();
                let left = budget.deadline.get_or_insert(now + FLUSH_TIMEOUT).saturating_duration_since(now);
                let has_room = !left.is_zero() && self.transport.wait_writable(left.min(STALL_TIMEOUT));
                if !has_room {
                    self.queue.set_stuck(true);
                }
                return has_room;
            }
            // Memory may be free in a moment; writability does not tell when.
            errno::ENOBUFS | errno::ENOMEM if budget.retries > 0 => std::thread::yield_now(),
            // A signal, or an error that never belongs to this datagram.
            errno::EINTR | errno::ECONNREFUSED if budget.retries > 0 => {}
            // An ICMP error that an earlier datagram left on the socket is reported once. The
            // second time, the error belongs to this datagram.
            _ if sock::is_icmp_error(code) && budget.retries > 0 && budget.last_error != Some(code) => {
                budget.last_error = Some(code);
            }
            _ => return false,
        }
        budget.retries -= 1;
        true
    }

    /// Handles message `at`, which was refused for good. A GSO message is retried datagram by
    /// datagram; anything else is lost.
    fn split_or_drop(&mut self, at: usize, code: i32, budget: &mut RetryBudget, done: &mut Flushed) {
        let (datagrams, _) = self.queue.message_counts(at);
        let splits = matches!(code, errno::EINVAL | errno::EMSGSIZE | errno::EIO | errno::EOPNOTSUPP);
        if datagrams == 1 || !splits {
            self.cells.add(loss_counter(code), datagrams);
            done.lost += datagrams;
            return;
        }
        self.cells.add(Count::GsoFallbacks, 1);
        let lost_before = done.lost;
        let mut tried = 0;
        budget.last_error = None;
        while tried < datagrams {
            let (sent, bytes, err) = self.transport.send_split(&mut self.queue, at, tried);
            self.cells.add(Count::SendCalls, sent + u64::from(err.is_some()));
            self.cells.add(Count::Sent, sent);
            self.cells.add(Count::SentBytes, bytes);
            done.sent += sent;
            tried += sent;
            let Some(err) = err else { break };
            let code = err.raw_os_error().unwrap_or(0);
            if !self.retry(code, budget) {
                self.cells.add(loss_counter(code), 1);
                done.lost += 1;
                tried += 1;
                budget.last_error = None;
            }
        }
        // If single datagrams pass and the GSO message does not, it exceeds the path's MTU with
        // the headers, or the device cannot checksum segments (EIO, udp_send_skb in
        // net/ipv4/udp.c). Segments of this size or larger are then never sent by GSO again, and
        // after EIO none are.
        if done.lost == lost_before {
            let limit = if code == errno::EIO { 0 } else { self.queue.segment_size(at).saturating_sub(1) };
            self.queue.limit_gso(limit);
            if self.cells.get(Count::GsoFallbacks) == 1 {
                log::warn!(
                    "the kernel refused a GSO message (errno {code}): this lane now joins datagrams of at most {limit} bytes"
                );
            }
        }
    }
}

/// The counter for a datagram that was refused with `code`.
fn loss_counter(code: i32) -> Count {
    match code {
        errno::EAGAIN => Count::LostSndbufFull,
        errno::ENOBUFS | errno::ENOMEM => Count::LostNoBuffers,
        errno::ENETUNREACH | errno::EHOSTUNREACH | errno::ENETDOWN | errno::EADDRNOTAVAIL => {
            Count::LostUnreachable
        }
        errno::EMSGSIZE => Count::LostTooLarge,
        errno::EPERM | errno::EACCES => Count::LostDenied,
        _ => Count::LostOther,
    }
}

impl Drop for Outbox<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The closure panicked in the middle of a batch, so its replies are not sent.
            self.cells.add(Count::Abandoned, self.datagrams + self.bypass_pending.0);
            if let Some(bypass) = &mut self.bypass {
                bypass.abandon();
            }
        } else {
            self.flush_bypass();
            if self.datagrams > 0 {
                self.flush();
            }
        }
    }
}
