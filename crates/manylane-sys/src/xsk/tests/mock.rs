//! A mock kernel for tests: the other end of the rings, in plain memory.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use libc::xdp_desc;

use crate::map::Mapping;
use crate::xsk::allocator::FrameAllocator;
use crate::xsk::frames::Frames;
use crate::xsk::linearize::Linearizer;
use crate::xsk::queue::Queue;
use crate::xsk::ring::{Consumer, MockRing, Producer};
use crate::xsk::socket::{MemberRings, UmemRings};
use crate::xsk::wakeup::{KickOutcome, RingWakeup};
use crate::xsk::{Mode, QueueOptions};

/// Offset at which the kernel writes a packet in a frame.
pub(super) const HEADROOM: u64 = 256;

/// The kernel's ends of the rings of one member.
struct Socket {
    rx: Producer<xdp_desc>,
    tx: Consumer<xdp_desc>,
    /// Content of the RX ring.
    in_rx: VecDeque<u64>,
    /// Entries of the RX ring.
    ring: u32,
    closed: bool,
}

/// The kernel's side, and the frames that it owns.
pub(super) struct Kernel {
    fill: Consumer<u64>,
    completion: Producer<u64>,
    sockets: Vec<Socket>,
    memory: *mut u8,
    pub(super) options: QueueOptions,
    /// Bytes reserved before a packet to be sent.
    tx_metadata_len: usize,
    /// Offset at which it writes packets in frames.
    pub(super) headroom: u64,
    /// Metadata of the packets that it sent.
    pub(super) sent_metadata: Vec<[u8; 24]>,
    /// Frames to receive into.
    rx_frames: VecDeque<u64>,
    /// Taken from a TX ring and not completed.
    sending: Vec<u64>,
    in_completion: VecDeque<u64>,
    /// All packets ever sent, with their member.
    pub(super) sent: Vec<(usize, Vec<u8>)>,
}

// SAFETY: a pointer into the memory of the queue; the rings tell which frames the kernel owns.
unsafe impl Send for Kernel {}

impl Kernel {
    fn bytes(&mut self, addr: u64, len: usize) -> *mut u8 {
        let frame_size = u64::from(self.options.frame_size);
        assert!(addr % frame_size + len as u64 <= frame_size, "a frame ends where the next begins");
        assert!(addr + len as u64 <= u64::from(self.options.frames) * frame_size);
        self.memory.wrapping_add(addr as usize)
    }

    /// Takes the entries of the fill ring. As in Linux, the ring shows that only when more are
    /// needed.
    pub(super) fn drain_fill_ring(&mut self) {
        self.fill.release();
        self.rx_frames.extend(std::iter::from_fn(|| self.fill.pop()));
    }

    /// Delivers a packet to the first member; false if there is no frame or no room for it.
    pub(super) fn receive(&mut self, packet: &[u8]) -> bool {
        self.receive_at(0, packet)
    }

    /// Delivers a packet to a member.
    pub(super) fn receive_at(&mut self, member: usize, packet: &[u8]) -> bool {
        let put = self.push_packet(member, packet.len() as u32, 0, packet);
        self.sockets[member].rx.publish();
        put
    }

    /// Delivers a packet with this length and these options in its descriptor.
    pub(super) fn receive_with(&mut self, member: usize, len: u32, options: u32, packet: &[u8]) -> bool {
        let put = self.push_packet(member, len, options, packet);
        self.sockets[member].rx.publish();
        put
    }

    /// Delivers a packet in fragments, each except the last with the flag that it continues;
    /// nothing if not all of it fits.
    pub(super) fn receive_frags(&mut self, member: usize, packet: &[u8], piece: usize) -> bool {
        self.drain_fill_ring();
        let count = packet.len().div_ceil(piece);
        let room = self.sockets[member].ring - self.sockets[member].rx.pending();
        if count > self.rx_frames.len() || count > room as usize {
            return false;
        }
        for (at, bytes) in packet.chunks(piece).enumerate() {
            let options = if at + 1 < count { libc::XDP_PKT_CONTD } else { 0 };
            assert!(self.push_packet(member, bytes.len() as u32, options, bytes));
        }
        self.sockets[member].rx.publish();
        true
    }

    fn push_packet(&mut self, member: usize, len: u32, options: u32, packet: &[u8]) -> bool {
        self.drain_fill_ring();
        assert!(!self.sockets[member].closed);
        let Some(&frame) = self.rx_frames.front() else { return false };
        let addr = frame + self.headroom;
        let to = self.bytes(addr, packet.len());
        // SAFETY: these bytes are in a frame that the queue gave to the kernel to receive into.
        unsafe { to.copy_from_nonoverlapping(packet.as_ptr(), packet.len()) };
        if !self.sockets[member].rx.push(xdp_desc { addr, len, options }) {
            return false;
        }
        self.rx_frames.pop_front();
        self.sockets[member].in_rx.push_back(frame);
        true
    }

    /// Produces an invalid descriptor.
    pub(super) fn push_rx(&mut self, member: usize, addr: u64) -> bool {
        let socket = &mut self.sockets[member];
        let put = socket.rx.push(xdp_desc { addr, len: 60, options: 0 });
        socket.rx.publish();
        if put {
            socket.in_rx.push_back(addr);
        }
        put
    }

    /// Sends up to `max` packets of a member. Returns what the call does. If it leaves packets and
    /// `hides`, the ring does not show those that it has sent.
    pub(super) fn send(&mut self, member: usize, max: usize, hides: bool) -> KickOutcome {
        for _ in 0..max {
            // As in the kernel: no packet is sent without room for its completion.
            let desc = self.has_room().then(|| self.sockets[member].tx.pop()).flatten();
            let Some(desc) = desc else { break };
            let frame_size = u64::from(self.options.frame_size);
            assert!(desc.len > 0 && desc.addr % frame_size >= self.tx_metadata_len as u64);
            if desc.options == libc::XDP_TX_METADATA {
                let mut told = [0; 24];
                let from = self.bytes(desc.addr - told.len() as u64, told.len());
                // SAFETY: the queue gave these bytes to the kernel, too.
                unsafe { from.copy_to_nonoverlapping(told.as_mut_ptr(), told.len()) };
                self.sent_metadata.push(told);
            } else {
                assert_eq!(desc.options, 0);
            }
            let from = self.bytes(desc.addr, desc.len as usize);
            // SAFETY: the queue gave these bytes to the kernel to send.
            let bytes = unsafe { std::slice::from_raw_parts(from.cast_const(), desc.len as usize) };
            self.sent.push((member, bytes.to_vec()));
            assert!(!self.sending.contains(&desc.addr), "sent twice");
            self.sending.push(desc.addr);
        }
        let leaves = max > 0 && self.has_room() && !self.sockets[member].tx.is_empty();
        if !leaves || !hides {
            self.sockets[member].tx.release();
        }
        if leaves { KickOutcome::Partial } else { KickOutcome::Accepted }
    }

    /// Completes one of the packets sent.
    pub(super) fn complete(&mut self, which: usize) {
        if !self.sending.is_empty() {
            let addr = self.sending.swap_remove(which % self.sending.len());
            assert!(self.push_completion(addr), "the completion ring has room for all that is being sent");
        }
    }

    /// Produces an invalid completion.
    pub(super) fn push_completion(&mut self, addr: u64) -> bool {
        let put = self.completion.push(addr);
        self.completion.publish();
        if put {
            self.in_completion.push_back(addr);
        }
        put
    }

    /// True if the completion ring has room for one more than those being sent.
    pub(super) fn has_room(&mut self) -> bool {
        (self.completion.pending() as usize + self.sending.len()) < self.options.tx_ring as usize
    }

    /// Entries in the RX ring of a member that are not released: with any, it is readable.
    pub(super) fn unread(&mut self, member: usize) -> u32 {
        self.sockets[member].rx.pending()
    }

    /// The kernel stops using the rings of a member.
    pub(super) fn close(&mut self, member: usize) {
        self.sockets[member].closed = true;
    }

    fn frames(&self, addrs: impl Iterator<Item = u64>) -> Vec<u32> {
        let mut frames: Vec<u32> =
            addrs.map(|addr| (addr / u64::from(self.options.frame_size)) as u32).collect();
        frames.sort_unstable();
        frames
    }

    /// Frames that the kernel has to receive into, or has put into an RX ring.
    pub(super) fn receiving(&mut self) -> Vec<u32> {
        self.drain_fill_ring();
        for socket in &mut self.sockets {
            let taken = socket.in_rx.len() - socket.rx.pending() as usize;
            socket.in_rx.drain(..taken);
        }
        let in_rx = self.sockets.iter().flat_map(|socket| &socket.in_rx);
        self.frames(self.rx_frames.iter().chain(in_rx).copied())
    }

    /// Frames that the kernel has taken to send and that the queue has not reclaimed.
    pub(super) fn sending(&mut self) -> Vec<u32> {
        let taken = self.in_completion.len() - self.completion.pending() as usize;
        self.in_completion.drain(..taken);
        self.frames(self.sending.iter().chain(&self.in_completion).copied())
    }
}

/// The rings of one member, for both ends.
pub(super) struct MemberMemory {
    pub(super) tx: MockRing<xdp_desc>,
    rx: MockRing<xdp_desc>,
}

type SendResult = fn() -> io::Result<KickOutcome>;

/// The mock kernel of a queue.
pub(super) struct Mock {
    pub(super) kernel: RefCell<Kernel>,
    pub(super) allocator: Arc<FrameAllocator>,
    /// Maximum number of packets that one call sends.
    pub(super) budget: Cell<usize>,
    /// Result of a call, if it is not what the kernel says.
    pub(super) send_result: Cell<Option<SendResult>>,
    /// As before Linux 6.17: calls that leave packets do not show what they have sent.
    pub(super) hides_progress: Cell<bool>,
    pub(super) zero_copy: Cell<bool>,
    pub(super) busy_polling: Cell<bool>,
    pub(super) send_calls: Cell<usize>,
    pub(super) receive_calls: Cell<usize>,
    pub(super) fill: Rc<MockRing<u64>>,
    /// Keeps the memory that the ends point at.
    pub(super) members: RefCell<Vec<Rc<MemberMemory>>>,
    _completion: Rc<MockRing<u64>>,
}

impl Mock {
    /// Adds a member with RX and TX rings of these sizes. Returns its number for the kernel, too.
    pub(super) fn join(
        self: &Rc<Self>,
        options: &QueueOptions,
        linearizer: Linearizer,
    ) -> (usize, MockQueue) {
        let member = self.kernel.borrow().sockets.len();
        (member, self.join_with(MockWakeup { mock: Rc::clone(self), member }, options, linearizer))
    }

    /// Adds a member with other system calls.
    pub(super) fn join_with<W: RingWakeup>(
        &self,
        wakeup: W,
        options: &QueueOptions,
        linearizer: Linearizer,
    ) -> Queue<W> {
        let empty = xdp_desc { addr: 0, len: 0, options: 0 };
        let (tx, rx) = (MockRing::new(options.tx_ring, empty), MockRing::new(options.ring, empty));
        // At their final address, before their ends point at them.
        let memory = Rc::new(MemberMemory { tx, rx });
        let (its_rx, rx) = memory.rx.split();
        let (tx, its_tx) = memory.tx.split();
        self.members.borrow_mut().push(memory);
        self.kernel.borrow_mut().sockets.push(Socket {
            rx: its_rx,
            tx: its_tx,
            in_rx: VecDeque::new(),
            ring: options.ring,
            closed: false,
        });
        let rings = MemberRings { rx, tx, maps: None };
        Queue::new(Arc::clone(&self.allocator), rings, wakeup, options, linearizer, true).unwrap()
    }

    fn send_for(&self, member: usize) -> io::Result<KickOutcome> {
        self.send_calls.set(self.send_calls.get() + 1);
        let outcome = self.kernel.borrow_mut().send(member, self.budget.get(), self.hides_progress.get());
        self.send_result.get().map_or(Ok(outcome), |result| result())
    }
}

/// The kernel as seen by one member.
pub(super) struct MockWakeup {
    mock: Rc<Mock>,
    member: usize,
}

impl RingWakeup for MockWakeup {
    fn is_zero_copy(&self) -> bool {
        self.mock.zero_copy.get()
    }

    fn is_busy_polling(&self) -> bool {
        self.mock.busy_polling.get()
    }

    fn tx_budget(&self) -> u32 {
        self.mock.budget.get().max(1) as u32
    }

    fn send(&self) -> io::Result<KickOutcome> {
        self.mock.send_for(self.member)
    }

    fn receive(&self) {
        self.mock.receive_calls.set(self.mock.receive_calls.get() + 1);
    }
}

/// A member of a queue without a socket.
pub(super) type MockQueue = Queue<MockWakeup>;

/// Options of a small queue on no device.
pub(super) fn options(frames: u32, ring: u32, tx_ring: u32, batch: usize) -> QueueOptions {
    QueueOptions {
        ifindex: 0,
        queue: 0,
        frames,
        frame_size: 2048,
        ring,
        tx_ring,
        batch,
        mode: Mode::Copy,
        multi_buffer: false,
    }
}

/// A queue without a socket, with one member, and its mock kernel.
pub(super) fn open(options: QueueOptions) -> (Rc<Mock>, MockQueue) {
    open_with(options, Linearizer::disabled(), 0)
}

/// A queue whose first member assembles packets, and that reserves `room` before packets to be
/// sent.
pub(super) fn open_with(options: QueueOptions, linearizer: Linearizer, room: usize) -> (Rc<Mock>, MockQueue) {
    let mock = kernel(options, room);
    let (_, queue) = mock.join(&options, linearizer);
    (mock, queue)
}

/// A mock kernel, with a queue that has no member yet.
pub(super) fn kernel(options: QueueOptions, room: usize) -> Rc<Mock> {
    let QueueOptions { frames, frame_size, ring, tx_ring, .. } = options;
    let fill = Rc::new(MockRing::new(ring, 0));
    let completion = Rc::new(MockRing::new(tx_ring, 0));
    let (our_fill, its_fill) = fill.split();
    let (its_completion, our_completion) = completion.split();
    let memory = Mapping::new((frames * frame_size) as usize).unwrap();
    let kernel = Kernel {
        fill: its_fill,
        completion: its_completion,
        sockets: Vec::new(),
        memory: memory.as_ptr(),
        options,
        tx_metadata_len: room,
        headroom: HEADROOM,
        sent_metadata: Vec::new(),
        rx_frames: VecDeque::new(),
        sending: Vec::new(),
        in_completion: VecDeque::new(),
        sent: Vec::new(),
    };
    let rings = UmemRings { fill: our_fill, completion: our_completion };
    let frames = Frames::new(memory, frames, frame_size, room);
    Rc::new(Mock {
        kernel: RefCell::new(kernel),
        allocator: Arc::new(FrameAllocator::new(rings, None, frames, ring)),
        budget: Cell::new(32),
        send_result: Cell::new(None),
        hides_progress: Cell::new(false),
        zero_copy: Cell::new(false),
        busy_polling: Cell::new(false),
        send_calls: Cell::new(0),
        receive_calls: Cell::new(0),
        fill,
        members: RefCell::new(Vec::new()),
        _completion: completion,
    })
}
