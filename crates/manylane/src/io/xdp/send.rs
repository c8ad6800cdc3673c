//! Sending by XDP: replies in the frame of their request, other datagrams in frames of their own.
//!
//! 1. Route: the next hop of the peer, from the kernel's tables; unknown means the companion, which makes the
//!    kernel find it out.
//! 2. Frame: the request's own if the payload is already in its place, else a free one.
//! 3. Headers, with checksums in software.
//! 4. Into the TX ring; the kernel is told once a batch.
//!
//! Whatever does not work out is left to the companion, untouched.

use std::net::SocketAddr;

use manylane_sys::addr::{SockAddr, Source};
use manylane_sys::xsk::Sender;
use manylane_wire::ethernet::{Ethernet, Mac};
use manylane_wire::frame::UdpFrame;

use super::route::{NextHop, Reader};
use crate::capture::tap::Tap;

/// Bytes of IP and UDP headers in front of a payload.
const OVER_V4: usize = 28;
const OVER_V6: usize = 48;

/// The way out of a lane through one of its queues.
pub(crate) struct XdpOut<'a> {
    sender: Sender<'a>,
    reader: &'a mut Reader,
    tap: &'a mut Tap,
    /// Index of the device that the queue belongs to.
    device: u32,
    bound: SocketAddr,
    /// In the TX ring, and the kernel has not been told.
    queued: bool,
}

impl<'a> XdpOut<'a> {
    pub(super) fn new(
        sender: Sender<'a>,
        reader: &'a mut Reader,
        tap: &'a mut Tap,
        device: u32,
        bound: SocketAddr,
    ) -> Self {
        Self { sender, reader, tap, device, bound, queued: false }
    }

    /// Answers frame `index` with the first `len` bytes of its own payload, in place.
    pub(crate) fn reply_in_place(
        &mut self,
        index: usize,
        peer: &SockAddr,
        source: Option<Source>,
        payload: &'a [u8],
    ) -> bool {
        let own = self.sender.payload(index);
        if !std::ptr::eq(own.as_ptr(), payload.as_ptr())
            || payload.len() > own.len()
            || self.sender.is_sent(index)
        {
            return self.send(Some(index), peer, source, payload);
        }
        let Some(plan) = self.plan(Some(index), peer, source, payload) else { return false };
        let head = self.sender.header_mut(index);
        if head.len() != plan.len() - payload.len() || plan.write_head(head).is_err() {
            return self.send(Some(index), peer, source, payload);
        }
        self.tap.sending(self.sender.held(index, payload.len()));
        let is_sent = self.put(|sender| sender.send_held(index, payload.len()));
        self.tap.settle(is_sent)
    }

    /// Sends a copy of `payload`, as an answer to frame `request` or of the lane's own accord.
    pub(crate) fn send(
        &mut self,
        request: Option<usize>,
        peer: &SockAddr,
        source: Option<Source>,
        payload: &[u8],
    ) -> bool {
        let Some(plan) = self.plan(request, peer, source, payload) else { return false };
        let Some(mut fresh) = self.sender.take() else { return false };
        let Ok(len) = plan.write(self.sender.fresh_mut(&mut fresh)) else {
            self.sender.give_back(fresh);
            return false;
        };
        self.tap.sending(&self.sender.fresh_mut(&mut fresh)[..len]);
        let refused = match self.sender.send_fresh(fresh, len) {
            Ok(()) => None,
            Err(fresh) => {
                // The ring is full: once the kernel has been told, there may be room.
                self.flush();
                self.sender.send_fresh(fresh, len).err()
            }
        };
        self.tap.settle(refused.is_none());
        match refused {
            None => {
                self.queued = true;
                true
            }
            Some(fresh) => {
                self.sender.give_back(fresh);
                false
            }
        }
    }

    /// The frame for a datagram, if its next hop is known and on this device, and it is short enough.
    fn plan<'p>(
        &mut self,
        request: Option<usize>,
        peer: &SockAddr,
        source: Option<Source>,
        payload: &'p [u8],
    ) -> Option<UdpFrame<'p>> {
        let peer = peer.to_std()?;
        let from = source.map_or(self.bound.ip(), |source| source.ip).to_canonical();
        let to = peer.ip().to_canonical();
        if from.is_unspecified() || from.is_ipv4() != to.is_ipv4() {
            return None;
        }
        let NextHop { ifindex, source_mac, mac, mtu } = self.reader.next_hop(from, to)?;
        let over = if to.is_ipv4() { OVER_V4 } else { OVER_V6 };
        if ifindex != self.device || payload.len() + over > mtu as usize {
            return None;
        }
        let (source, destination) =
            (SocketAddr::new(from, self.bound.port()), SocketAddr::new(to, peer.port()));
        // A reply has the tags of its request.
        let vlans = match request {
            Some(index) => Ethernet::parse(self.sender.header_mut(index)).ok()?.0.vlans,
            None => [None; 2],
        };
        Some(UdpFrame { payload, vlans, ..UdpFrame::new(Mac(source_mac), Mac(mac), source, destination) })
    }

    /// Puts a frame into the ring, after telling the kernel if it is full.
    fn put(&mut self, mut send: impl FnMut(&mut Sender<'a>) -> bool) -> bool {
        if !send(&mut self.sender) {
            self.flush();
            if !send(&mut self.sender) {
                return false;
            }
        }
        self.queued = true;
        true
    }

    /// Tells the kernel of what is in the ring.
    pub(crate) fn flush(&mut self) {
        if std::mem::take(&mut self.queued) {
            // What the device does not take now stays in the ring, and the next batch tells the kernel again. An
            // error means that the device is gone: what is in the ring is lost with it, as in a device's own queue.
            _ = self.sender.flush();
        }
    }
}
