//! Options of a queue.

/// Sizes of a [`Queue`](super::Queue), and what it binds to. For a queue that joins others see
/// [`Queue::join`](super::Queue::join).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueOptions {
    /// Index of the device.
    pub ifindex: u32,
    /// Queue of the device.
    pub queue: u32,
    /// Number of frames. As many as `ring`, but at most half, are kept for receiving; the others
    /// are for the batch and for sending. Twice `ring` suits most uses.
    pub frames: u32,
    /// Size of a frame: 2048 or 4096 bytes, and at most a page. The kernel reserves the first 256
    /// of a frame that it receives into.
    pub frame_size: u32,
    /// Entries of the RX and the fill ring, a power of two.
    pub ring: u32,
    /// Entries of the TX and the completion ring, a power of two.
    pub tx_ring: u32,
    /// Maximum packets of one receive, and those taken from the RX ring at once.
    pub batch: usize,
    /// Transfer of packets from the device into the frames.
    pub mode: Mode,
    /// True to accept packets that are longer than a frame (Linux 6.6, `XDP_USE_SG`).
    /// [`Queue::has_multi_buffer`](super::Queue::has_multi_buffer) tells if that is in force.
    /// Costs 1 MiB of address space for each member; with [`Mode::Auto`], packets are copied if
    /// the driver supports zero copy only for packets of one frame. If the device makes fragments,
    /// the XDP program has to be loaded for them (`BPF_F_XDP_HAS_FRAGS`).
    pub multi_buffer: bool,
}

/// Transfer of packets between the device and the frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Zero copy if the driver supports it, else copied.
    #[default]
    Auto,
    /// Copied: works on every device, also with generic XDP.
    Copy,
    /// Zero copy: the device writes into the frames. Binding fails if the driver does not support
    /// it.
    ZeroCopy,
}
