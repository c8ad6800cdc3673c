//! Sends by XDP: replies in the frame of their request, other datagrams in frames of their own.
//!
//! 1. Route: the next hop of the peer, from the kernel's tables. If it is unknown, the companion
//!    sends, which makes the kernel resolve it.
//! 2. Frame: the request's own if the payload is already in place, else a free one.
//! 3. Headers. The device computes the UDP checksum if it can and the payload is long, else
//!    software does.
//! 4. Into the TX ring. The kernel is notified once a batch.
//!
//! The usual reply goes to the peer of the last one, from the address that its request was sent
//! to. Then step 1 is a comparison, and step 3 writes the request's headers reversed
//! ([`XdpSender::try_reply_in_place`]). The resulting bytes are the same.
//!
//! Datagrams that fail here are left to the companion, unchanged.

use std::net::{IpAddr, SocketAddr};

use manylane_ipc::next_hops::NextHop;
use manylane_sys::xsk::{Sender, TxFrame};
use manylane_wire::datagram::Datagram;
use manylane_wire::ethernet::{self, Ethernet, Mac};
use manylane_wire::frame::{UdpFrame, ip_udp_len};

use super::route::Reader;
use super::unsent::UnsentTimer;
use crate::capture::tap::Tap;
use crate::counters::{Cells, Count};
use crate::io::batch::{self, RecvMeta};

/// Length of an Ethernet header with two tags: no longer than the headers of any datagram.
const LINK_HEADER_MAX: usize = ethernet::HEADER_LEN + 2 * ethernet::TAG_LEN;
/// Minimum payload for checksum offload, if the device supports it: for shorter ones it does not
/// pay.
const CHECKSUM_OFFLOAD_BYTES_MIN: usize = 512;

/// The send path of a lane through one of its queues.
pub(crate) struct XdpSender<'a> {
    sender: Sender<'a>,
    reader: &'a mut Reader,
    tap: &'a mut Tap,
    unsent: &'a mut UnsentTimer,
    /// Index of the queue's device.
    device: u32,
    /// The device completes checksums.
    has_tx_checksum: bool,
    bound_addr: &'a SocketAddr,
    /// The TX ring has frames that the kernel was not notified of.
    flush_pending: bool,
    /// Peers with datagrams in the companion's queue, as bits of a hash. Later datagrams to them
    /// use the companion too, to keep the order.
    diverted_peers: u64,
}

impl<'a> XdpSender<'a> {
    #[inline]
    pub(super) fn new(
        sender: Sender<'a>,
        reader: &'a mut Reader,
        tap: &'a mut Tap,
        unsent: &'a mut UnsentTimer,
        (device, finishes): (u32, bool),
        bound: &'a SocketAddr,
    ) -> Self {
        Self {
            sender,
            reader,
            tap,
            unsent,
            device,
            has_tx_checksum: finishes,
            bound_addr: bound,
            flush_pending: false,
            diverted_peers: 0,
        }
    }

    /// Replies with a copy of `payload`. False: nothing was sent.
    #[inline]
    pub(crate) fn reply(&mut self, request: &batch::Datagram<'_>, payload: &[u8]) -> bool {
        match request.meta() {
            RecvMeta::Frame { index, headers, .. } => self.reply_with_copy(*index as usize, headers, payload),
            RecvMeta::Message { .. } => {
                self.send(request.source().map(|source| source.ip), request.peer(), payload)
            }
        }
    }

    /// As [`reply`](Self::reply), without a copy if `payload` is a prefix of the request's.
    #[inline]
    pub(crate) fn reply_borrowed(&mut self, request: &batch::Datagram<'_>, payload: &'a [u8]) -> bool {
        match request.meta() {
            RecvMeta::Frame { index, headers, .. } => self.reply_in_place(*index as usize, headers, payload),
            RecvMeta::Message { .. } => self.reply(request, payload),
        }
    }

    /// Replies in the frame of the request, if `payload` is a prefix of its payload; else with a
    /// copy.
    fn reply_in_place(&mut self, index: usize, request: &Datagram, payload: &'a [u8]) -> bool {
        let is_prefix = self
            .sender
            .payload(index)
            .is_some_and(|own| std::ptr::eq(own.as_ptr(), payload.as_ptr()) && payload.len() <= own.len());
        if !is_prefix {
            return self.reply_with_copy(index, request, payload);
        }
        if let Some(is_sent) = self.try_reply_in_place(index, request, payload) {
            return is_sent || self.divert(request.source());
        }
        let peer = request.source();
        if self.is_diverted(peer) {
            return false;
        }
        let Some(plan) = self.plan_reply(index, request, payload) else { return self.divert(peer) };
        let by_device = self.is_checksum_offloaded(payload.len());
        let Some(head) = self.sender.in_place_header_mut(index) else {
            return self.reply_with_copy(index, request, payload);
        };
        if head.len() != plan.len() - payload.len() {
            return self.reply_with_copy(index, request, payload);
        }
        let written = if by_device {
            plan.write_headers_partial_checksum(head).map(Some)
        } else {
            plan.write_headers(head).map(|()| None)
        };
        let Ok(left) = written else { return self.reply_with_copy(index, request, payload) };
        self.push_in_place(index, payload.len(), left) || self.divert(peer)
    }

    /// Fast path for a reply that is a prefix of its request's payload: in the same frame, with
    /// the headers reversed. Returns whether it was sent; none, with nothing changed, if the fast
    /// path does not apply.
    #[inline]
    fn try_reply_in_place(&mut self, index: usize, request: &Datagram, payload: &'a [u8]) -> Option<bool> {
        let is_whole = payload.len() == usize::from(request.len);
        let sums = !(is_whole && request.can_reuse_checksum());
        let hop = self.cached_next_hop(request, payload.len(), sums)?;
        let head = self.sender.in_place_header_mut(index)?;
        if !request.write_reply_headers(head, Mac(hop.source_mac), Mac(hop.mac), payload, is_whole) {
            return None;
        }
        Some(self.push_in_place(index, payload.len(), None))
    }

    /// Fast path for any other reply: in a new frame, with the bytes before the addresses copied
    /// from the request. Returns as above.
    #[inline]
    fn try_reply_in_new_frame(&mut self, index: usize, request: &Datagram, payload: &[u8]) -> Option<bool> {
        let hop = self.cached_next_hop(request, payload.len(), true)?;
        let at = usize::from(request.payload_offset);
        let link: [u8; LINK_HEADER_MAX] = *self.sender.header(index)?.first_chunk()?;
        let mut fresh = self.sender.alloc()?;
        let room = self.sender.frame_mut(&mut fresh);
        let written = room.get_mut(..at + payload.len()).is_some_and(|frame| {
            let (head, body) = frame.split_at_mut(at);
            if let Some(to) = head.first_chunk_mut() {
                *to = link;
            }
            body.copy_from_slice(payload);
            request.write_reply_headers(head, Mac(hop.source_mac), Mac(hop.mac), payload, false)
        });
        if !written {
            self.sender.free(fresh);
            return None;
        }
        Some(self.push_tx_frame(fresh, at + payload.len(), None))
    }

    /// The next hop of a reply of `len` bytes that needs no lookup, and no checksum offload if
    /// `sums` (a checksum is to be computed).
    #[inline]
    fn cached_next_hop(&self, request: &Datagram, len: usize, sums: bool) -> Option<NextHop> {
        let (peer, port) = request.ports();
        let next = self.reader.cached_next_hop(request)?;
        let is_usual = self.diverted_peers == 0
            && peer != 0
            && port == self.bound_addr.port()
            && next.ifindex == self.device
            && len + ip_udp_len(request.addr_pair().is_ipv6()) <= next.mtu as usize
            && !(sums && self.is_checksum_offloaded(len));
        is_usual.then_some(*next)
    }

    /// Replies with a copy of `payload`.
    fn reply_with_copy(&mut self, index: usize, request: &Datagram, payload: &[u8]) -> bool {
        if let Some(is_sent) = self.try_reply_in_new_frame(index, request, payload) {
            return is_sent || self.divert(request.source());
        }
        let peer = request.source();
        if self.is_diverted(peer) {
            return false;
        }
        let plan = self.plan_reply(index, request, payload);
        plan.is_some_and(|plan| self.send_copy(&plan)) || self.divert(peer)
    }

    /// Sends a copy of `payload` that is no reply.
    pub(crate) fn send(&mut self, from: Option<IpAddr>, peer: SocketAddr, payload: &[u8]) -> bool {
        if self.is_diverted(peer) {
            return false;
        }
        let plan = self.plan(from.unwrap_or(self.bound_addr.ip()), peer, payload, None);
        plan.is_some_and(|plan| self.send_copy(&plan)) || self.divert(peer)
    }

    /// The companion's queue has been sent: later datagrams cannot overtake it.
    pub(crate) fn clear_diverted(&mut self) {
        self.diverted_peers = 0;
    }

    fn is_diverted(&self, peer: SocketAddr) -> bool {
        self.diverted_peers != 0 && self.diverted_peers & peer_bit(peer) != 0
    }

    /// Diverts a peer to the companion until that has been flushed. Always returns false: not
    /// sent.
    #[cold]
    fn divert(&mut self, peer: SocketAddr) -> bool {
        self.diverted_peers |= peer_bit(peer);
        false
    }

    fn send_copy(&mut self, plan: &UdpFrame<'_>) -> bool {
        let Some(mut fresh) = self.sender.alloc() else { return false };
        let by_device = self.is_checksum_offloaded(plan.payload.len());
        let room = self.sender.frame_mut(&mut fresh);
        let written = if by_device {
            plan.write_partial_checksum(room).map(Some)
        } else {
            plan.write(room).map(|_| None)
        };
        let Ok(left) = written else {
            self.sender.free(fresh);
            return false;
        };
        self.push_tx_frame(fresh, plan.len(), left)
    }

    /// Sends the written frame of a request, with the remainder `left` of its checksum for the
    /// device. This and [`push_tx_frame`](Self::push_tx_frame) are the only ways into the TX ring:
    /// captures see each frame there.
    #[inline]
    fn push_in_place(&mut self, index: usize, len: usize, left: Option<(u16, u16)>) -> bool {
        self.tap.stage_tx(self.sender.in_place_packet(index, len));
        let send = |sender: &mut Sender<'a>| match left {
            Some((start, offset)) => sender.send_in_place_partial(index, len, start, offset),
            None => sender.send_in_place(index, len),
        };
        let mut is_sent = send(&mut self.sender);
        if !is_sent {
            // The ring is full; notifying the kernel may make room.
            self.notify();
            is_sent = send(&mut self.sender);
        }
        self.flush_pending |= is_sent;
        self.tap.commit_tx(is_sent)
    }

    /// As [`push_in_place`](Self::push_in_place), for a frame of its own, which is freed if there
    /// is no room.
    fn push_tx_frame(&mut self, mut fresh: TxFrame, len: usize, left: Option<(u16, u16)>) -> bool {
        self.tap.stage_tx(&self.sender.frame_mut(&mut fresh)[..len]);
        let send = |sender: &mut Sender<'a>, fresh| match left {
            Some((start, offset)) => sender.send_frame_partial(fresh, len, start, offset),
            None => sender.send_frame(fresh, len),
        };
        let mut refused = send(&mut self.sender, fresh).err();
        if let Some(fresh) = refused {
            self.notify();
            refused = send(&mut self.sender, fresh).err();
        }
        let is_sent = refused.is_none();
        if let Some(fresh) = refused {
            self.sender.free(fresh);
        }
        self.flush_pending |= is_sent;
        self.tap.commit_tx(is_sent)
    }

    /// True if the device is to compute the checksum of a datagram with `len` bytes of payload.
    #[inline]
    fn is_checksum_offloaded(&self, len: usize) -> bool {
        len >= CHECKSUM_OFFLOAD_BYTES_MIN && self.has_tx_checksum && self.sender.has_csum_offload()
    }

    fn plan_reply<'p>(
        &mut self,
        index: usize,
        request: &Datagram,
        payload: &'p [u8],
    ) -> Option<UdpFrame<'p>> {
        let plan = self.plan(request.destination().ip(), request.source(), payload, Some(request))?;
        // A reply has the VLAN tags of its request.
        let vlans = if usize::from(request.payload_offset) == plain_header_len(request) {
            [None; 2]
        } else {
            Ethernet::parse(self.sender.header(index)?).ok()?.0.vlans
        };
        Some(UdpFrame { vlans, ..plan })
    }

    /// The frame for a datagram, if its next hop is known and on this device, and it fits the MTU.
    /// `request` is the one it answers, if any: the addresses are then those of the request.
    fn plan<'p>(
        &mut self,
        from: IpAddr,
        peer: SocketAddr,
        payload: &'p [u8],
        request: Option<&Datagram>,
    ) -> Option<UdpFrame<'p>> {
        let (from, to) = (from.to_canonical(), peer.ip().to_canonical());
        // The kernel rejects port 0 with an error; leave it to the companion.
        if from.is_unspecified() || from.is_ipv4() != to.is_ipv4() || peer.port() == 0 {
            return None;
        }
        let next = match request {
            Some(request) => self.reader.reply_next_hop(request),
            None => self.reader.next_hop(from, to),
        };
        let NextHop { ifindex, source_mac, mac, mtu } = next?;
        if ifindex != self.device || payload.len() + ip_udp_len(to.is_ipv6()) > mtu as usize {
            return None;
        }
        let (source, destination) =
            (SocketAddr::new(from, self.bound_addr.port()), SocketAddr::new(to, peer.port()));
        Some(UdpFrame { payload, ..UdpFrame::new(Mac(source_mac), Mac(mac), source, destination) })
    }

    /// Removes the frames that the kernel was not notified of.
    pub(crate) fn abandon(&mut self) {
        self.flush_pending = false;
        self.sender.abandon();
    }

    /// Notifies the kernel of the frames in the ring, and counts the `datagrams` that were sent
    /// since the last flush.
    pub(crate) fn flush(&mut self, datagrams: u64, cells: &Cells) {
        self.notify();
        cells.add(Count::SentByBypass, datagrams);
    }

    fn notify(&mut self) {
        if std::mem::take(&mut self.flush_pending) {
            // An error means that the device is gone: the frames in the ring are lost, as in a
            // device's own queue.
            self.unsent.add(self.sender.flush().unwrap_or(0));
        }
    }
}

/// Length of the headers of a frame without tags and options.
fn plain_header_len(datagram: &Datagram) -> usize {
    ethernet::HEADER_LEN + ip_udp_len(datagram.addr_pair().is_ipv6())
}

/// One of 64 bits for a peer.
fn peer_bit(peer: SocketAddr) -> u64 {
    const HASH_MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c55;
    let ip = match peer.ip().to_canonical() {
        IpAddr::V4(ip) => u64::from(u32::from(ip)),
        IpAddr::V6(ip) => (u128::from(ip) >> 64) as u64 ^ u128::from(ip) as u64,
    };
    1 << ((ip ^ u64::from(peer.port()) << 32).wrapping_mul(HASH_MULTIPLIER) >> 58)
}
