//! A kernel for tests: the other end of four rings in plain memory.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;

use libc::xdp_desc;

use super::core::{Bell, Core, Kick, Rings};
use super::ring::{Consumer, PlainRing, Producer};
use super::{Mode, QueueOptions};
use crate::map::Mapping;

/// Where the kernel puts a packet in a frame.
pub(super) const HEADROOM: u64 = 256;

/// The kernel's side, and what it owns.
pub(super) struct Kernel {
    fill: Consumer<u64>,
    rx: Producer<xdp_desc>,
    tx: Consumer<xdp_desc>,
    completion: Producer<u64>,
    memory: *mut u8,
    options: QueueOptions,
    /// Frames to receive into.
    spare: VecDeque<u64>,
    /// Taken from the send ring and not completed.
    sending: Vec<u64>,
    /// What is in the receive and in the completion ring.
    in_rx: VecDeque<u64>,
    in_completion: VecDeque<u64>,
    /// The bytes of all that was ever sent.
    pub(super) sent: Vec<Vec<u8>>,
}

impl Kernel {
    fn bytes(&mut self, addr: u64, len: usize) -> *mut u8 {
        let frame_size = u64::from(self.options.frame_size);
        assert!(addr % frame_size + len as u64 <= frame_size, "a frame ends where the next begins");
        assert!(addr + len as u64 <= u64::from(self.options.frames) * frame_size);
        self.memory.wrapping_add(addr as usize)
    }

    /// Takes what is in the fill ring.
    pub(super) fn take_fill(&mut self) {
        self.spare.extend(std::iter::from_fn(|| self.fill.take()));
        self.fill.release();
    }

    /// A packet arrives; false if there is no frame or no room for it.
    pub(super) fn receive(&mut self, packet: &[u8]) -> bool {
        self.receive_as(packet.len() as u32, 0, packet)
    }

    /// A packet arrives, and the kernel says that it has this length and these options.
    pub(super) fn receive_as(&mut self, len: u32, options: u32, packet: &[u8]) -> bool {
        self.take_fill();
        let Some(&frame) = self.spare.front() else { return false };
        let addr = frame + HEADROOM;
        let to = self.bytes(addr, packet.len());
        // SAFETY: these bytes are in a frame that the queue gave the kernel to receive into.
        unsafe { to.copy_from_nonoverlapping(packet.as_ptr(), packet.len()) };
        if !self.rx.put(xdp_desc { addr, len, options }) {
            return false;
        }
        self.rx.publish();
        self.spare.pop_front();
        self.in_rx.push_back(frame);
        true
    }

    /// The kernel says what it has no ground for.
    pub(super) fn lie_in_rx(&mut self, addr: u64) -> bool {
        let put = self.rx.put(xdp_desc { addr, len: 60, options: 0 });
        self.rx.publish();
        if put {
            self.in_rx.push_back(addr);
        }
        put
    }

    /// Sends up to `most` packets.
    pub(super) fn send(&mut self, most: usize) {
        for _ in 0..most {
            // As the kernel does: no packet leaves without a place for its completion.
            let Some(desc) = self.has_room().then(|| self.tx.take()).flatten() else { break };
            assert!(desc.len > 0 && desc.options == 0);
            let from = self.bytes(desc.addr, desc.len as usize);
            // SAFETY: the queue gave these bytes to the kernel to send.
            let bytes = unsafe { std::slice::from_raw_parts(from.cast_const(), desc.len as usize) };
            self.sent.push(bytes.to_vec());
            assert!(!self.sending.contains(&desc.addr), "sent twice");
            self.sending.push(desc.addr);
        }
        self.tx.release();
    }

    /// Completes one of the packets sent.
    pub(super) fn complete(&mut self, which: usize) {
        if !self.sending.is_empty() {
            let addr = self.sending.swap_remove(which % self.sending.len());
            assert!(self.lie_in_completion(addr), "the completion ring has room for all that is being sent");
        }
    }

    /// The kernel says that it has sent what it may not have.
    pub(super) fn lie_in_completion(&mut self, addr: u64) -> bool {
        let put = self.completion.put(addr);
        self.completion.publish();
        if put {
            self.in_completion.push_back(addr);
        }
        put
    }

    /// Whether the completion ring has room for one more than those being sent.
    pub(super) fn has_room(&mut self) -> bool {
        (self.completion.waiting() as usize + self.sending.len()) < self.options.tx_ring as usize
    }

    fn frames(&self, addrs: impl Iterator<Item = u64>) -> Vec<u32> {
        let mut frames: Vec<u32> =
            addrs.map(|addr| (addr / u64::from(self.options.frame_size)) as u32).collect();
        frames.sort_unstable();
        frames
    }

    /// The frames that the kernel has to receive into or has put into the receive ring.
    pub(super) fn receiving(&mut self) -> Vec<u32> {
        self.take_fill();
        let taken = self.in_rx.len() - self.rx.waiting() as usize;
        self.in_rx.drain(..taken);
        self.frames(self.spare.iter().chain(&self.in_rx).copied())
    }

    /// The frames that the kernel has taken to send and that the queue has not taken back.
    pub(super) fn sending(&mut self) -> Vec<u32> {
        let taken = self.in_completion.len() - self.completion.waiting() as usize;
        self.in_completion.drain(..taken);
        self.frames(self.sending.iter().chain(&self.in_completion).copied())
    }
}

/// The kernel as the queue sees it.
pub(super) struct Mock {
    pub(super) kernel: RefCell<Kernel>,
    /// Packets that one call sends at most.
    pub(super) budget: Cell<usize>,
    /// What a call says.
    pub(super) answer: Cell<fn() -> io::Result<Kick>>,
    pub(super) zero_copy: Cell<bool>,
    pub(super) busy: Cell<bool>,
    pub(super) send_calls: Cell<usize>,
    pub(super) receive_calls: Cell<usize>,
    pub(super) fill: Rc<PlainRing<u64>>,
    pub(super) tx: Rc<PlainRing<xdp_desc>>,
    /// Kept for the ends that point at them.
    _others: (Rc<PlainRing<xdp_desc>>, Rc<PlainRing<u64>>),
}

impl Bell for Mock {
    fn is_zero_copy(&self) -> bool {
        self.zero_copy.get()
    }

    fn is_busy_polling(&self) -> bool {
        self.busy.get()
    }

    fn send(&self) -> io::Result<Kick> {
        self.send_calls.set(self.send_calls.get() + 1);
        self.kernel.borrow_mut().send(self.budget.get());
        self.answer.get()()
    }

    fn receive(&self) {
        self.receive_calls.set(self.receive_calls.get() + 1);
    }
}

/// Options of a small queue on no device.
pub(super) fn options(frames: u32, ring: u32, tx_ring: u32, batch: usize) -> QueueOptions {
    QueueOptions { ifindex: 0, queue: 0, frames, frame_size: 2048, ring, tx_ring, batch, mode: Mode::Copy }
}

/// A queue without a socket, and its kernel. Drop the queue first.
pub(super) fn open(options: QueueOptions) -> (Mock, Core) {
    let QueueOptions { frames, frame_size, ring, tx_ring, .. } = options;
    let empty = xdp_desc { addr: 0, len: 0, options: 0 };
    let rings = (PlainRing::new(ring, 0), PlainRing::new(ring, empty));
    let (fill, rx) = (Rc::new(rings.0), Rc::new(rings.1));
    let (tx, completion) = (Rc::new(PlainRing::new(tx_ring, empty)), Rc::new(PlainRing::new(tx_ring, 0)));
    let (our_fill, its_fill) = fill.ends();
    let (its_rx, our_rx) = rx.ends();
    let (our_tx, its_tx) = tx.ends();
    let (its_completion, our_completion) = completion.ends();
    let memory = Mapping::new((frames * frame_size) as usize).unwrap();
    let kernel = Kernel {
        fill: its_fill,
        rx: its_rx,
        tx: its_tx,
        completion: its_completion,
        memory: memory.as_ptr(),
        options,
        spare: VecDeque::new(),
        sending: Vec::new(),
        in_rx: VecDeque::new(),
        in_completion: VecDeque::new(),
        sent: Vec::new(),
    };
    let rings = Rings { fill: our_fill, rx: our_rx, tx: our_tx, completion: our_completion };
    let mock = Mock {
        kernel: RefCell::new(kernel),
        budget: Cell::new(32),
        answer: Cell::new(|| Ok(Kick::Worked)),
        zero_copy: Cell::new(false),
        busy: Cell::new(false),
        send_calls: Cell::new(0),
        receive_calls: Cell::new(0),
        fill,
        tx,
        _others: (rx, completion),
    };
    (mock, Core::new(rings, memory, &options))
}
