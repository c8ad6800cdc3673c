//! `xsk/raw`: a minimal loop over raw AF_XDP rings, with a minimal XDP program.
//!
//! Replies are sent in the frame of their request: both addresses and both ports are swapped,
//! which does not change the checksums. No frame is checked; that makes it minimal.
//! [`xsk_checked`](super::xsk_checked) is the same loop with another way to read a frame.

use std::any::Any;
use std::hint::black_box;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aya::maps::XskMap;
use aya::programs::{Xdp, XdpMode};
use aya::{Ebpf, EbpfLoader};
use manylane_sys::measure::Epoll;
use manylane_sys::raw_xsk::RawXsk;
use manylane_sys::{device, netns, tick};

use super::workers::{Source, WorkerCtx, Workers};
use crate::receivers::{ReceiverOptions, RunningReceiver, Work};
use crate::work::SyntheticWork;

/// Where the payload of UDP over IPv4 starts in an untagged frame without options.
const PAYLOAD_OFFSET: usize = 42;
/// The longest sleep of an idle receiver, and so the latency of a stop.
const IDLE_POLL_TIMEOUT: Duration = Duration::from_millis(20);
/// The same, while the TX ring had no room for all replies.
const TX_POLL_TIMEOUT: Duration = Duration::from_millis(1);

/// How frames are read.
pub(crate) trait FrameParser: Copy + Send + 'static {
    /// Name of the receiver.
    const NAME: &'static str;
    /// True if a frame without a payload is not counted.
    const REJECTS_INVALID: bool;

    /// The payload of a frame.
    fn payload(packet: &[u8]) -> Option<&[u8]>;

    /// Turns a frame into its reply. Returns false if that is not possible.
    fn reply_in_place(packet: &mut [u8]) -> bool;
}

/// Accepts every frame.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unchecked;

/// Result of polling a queue.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PollResult {
    /// Frames.
    pub(crate) frames: u32,
    /// Datagrams.
    pub(crate) datagrams: u32,
}

/// The open queues of the devices, with the program that redirects frames into them as long as
/// this lives.
pub(crate) struct OpenQueues {
    /// Each with the index of its device and its own.
    pub(crate) queues: Vec<(usize, u32, RawXsk)>,
    pub(crate) programs: Box<dyn Any + Send>,
}

/// Opens all queues of the devices, and redirects UDP to `port` into them.
pub(crate) fn open_queues(
    name: &str,
    devices: &[String],
    port: u16,
    ring: u32,
    answers: bool,
) -> Result<OpenQueues> {
    ensure!(!devices.is_empty(), "{name} needs a device: it does not run over loopback");
    let (mut programs, mut queues) = (Vec::new(), Vec::new());
    for (number, name) in devices.iter().enumerate() {
        let index = netns::device_index(name)?;
        let mut program = load_redirect(index, port)?;
        let mut map: XskMap<_> = program.take_map("ml_raw").context("no map ml_raw")?.try_into()?;
        for queue in 0..device::receive_queues(name)? {
            let socket =
                RawXsk::open(index, queue, ring, answers).with_context(|| format!("{name} queue {queue}"))?;
            map.set(queue, socket.as_fd().as_raw_fd(), 0)?;
            queues.push((number, queue, socket));
        }
        programs.push((program, map));
    }
    Ok(OpenQueues { queues, programs: Box::new(programs) })
}

pub(crate) fn start<R: FrameParser>(options: &ReceiverOptions) -> Result<Box<dyn RunningReceiver>> {
    let answers = options.work == Work::Echo;
    let OpenQueues { queues, programs } =
        open_queues(R::NAME, &options.devices, options.addr.port(), options.ring, answers)?;
    let mut shares: Vec<Vec<RawXsk>> = (0..options.threads).map(|_| Vec::new()).collect();
    let mut inlets = Vec::new();
    for (number, queue, socket) in queues {
        inlets.push(Source::Queue(socket.as_fd().try_clone_to_owned()?));
        // Equal queues of two devices are often busy at the same time, so that they go to two
        // threads.
        shares[(number + queue as usize) % options.threads].push(socket);
    }
    let (batch, pause, toil) = (options.batch as u32, options.rx_coalesce, options.synthetic_work);
    // Without simulated work, the check is not in the loop.
    let is_idle = toil.is_zero();
    Workers::start(options, (options.addr, inlets), shares, programs, move |post, share| {
        match (answers, is_idle) {
            (false, true) => {
                recv_loop(post, share, (batch, pause), |socket| Ok(poll_queue::<R>(socket, batch, || ())))
            }
            (false, false) => recv_loop(post, share, (batch, pause), |socket| {
                Ok(poll_queue::<R>(socket, batch, || toil.run()))
            }),
            (true, _) => {
                recv_loop(post, share, (batch, pause), |socket| poll_and_reply::<R>(socket, batch, toil))
            }
        }
    })
}

/// Attaches the program that redirects UDP to `port` into the rings, to the device `index` of the
/// calling thread's namespace, as long as the value lives.
pub(crate) fn load_redirect(index: u32, port: u16) -> Result<Ebpf> {
    let mut ebpf =
        EbpfLoader::new().btf(None).override_global("ml_port", &port, true).load(manylane_bpf::REDIRECT)?;
    let program: &mut Xdp = ebpf.program_mut("ml_redirect").context("no program ml_redirect")?.try_into()?;
    program.load().context("loading the XDP program of xsk/raw")?;
    program.attach_to_if_index(index, XdpMode::Driver).context("attaching the XDP program of xsk/raw")?;
    Ok(ebpf)
}

impl FrameParser for Unchecked {
    const NAME: &'static str = "xsk/raw";
    const REJECTS_INVALID: bool = false;

    /// The payload of UDP over IPv4. Its length is read from the header, because a short frame has
    /// padding.
    #[inline]
    fn payload(packet: &[u8]) -> Option<&[u8]> {
        let head = packet.first_chunk::<PAYLOAD_OFFSET>()?;
        let length = usize::from(u16::from_be_bytes([head[PAYLOAD_OFFSET - 4], head[PAYLOAD_OFFSET - 3]]));
        packet.get(PAYLOAD_OFFSET..PAYLOAD_OFFSET - 8 + length)
    }

    /// For UDP over IPv4.
    #[inline]
    fn reply_in_place(packet: &mut [u8]) -> bool {
        let Some(head) = packet.first_chunk_mut::<PAYLOAD_OFFSET>() else { return false };
        // Ethernet, IPv4 and UDP have the addresses in pairs of equal size.
        for (start, size) in [(0, 6), (26, 4), (34, 2)] {
            let (from, to) = head[start..start + 2 * size].split_at_mut(size);
            from.swap_with_slice(to);
        }
        true
    }
}

/// Receives a batch of one queue, reads it, and does `work` for each datagram.
#[inline]
pub(crate) fn poll_queue<R: FrameParser>(socket: &mut RawXsk, batch: u32, work: impl Fn()) -> PollResult {
    let mut refused = 0;
    let taken = socket.receive(batch, |packet| {
        let payload = R::payload(packet);
        if R::REJECTS_INVALID && payload.is_none() {
            refused += 1;
            return;
        }
        black_box(payload.and_then(<[u8]>::first).copied());
        work();
    });
    PollResult { frames: taken, datagrams: taken - refused }
}

/// Receives a batch of one queue, and sends it back.
fn poll_and_reply<R: FrameParser>(
    socket: &mut RawXsk,
    batch: u32,
    toil: SyntheticWork,
) -> Result<PollResult> {
    let mut refused = 0;
    let taken = socket.reply(batch, |packet| {
        let payload = R::payload(packet);
        if R::REJECTS_INVALID && payload.is_none() {
            refused += 1;
            return false;
        }
        black_box(payload.and_then(<[u8]>::first).copied());
        toil.run();
        R::reply_in_place(packet)
    });
    let taken = taken.context("answering from a queue")?;
    Ok(PollResult { frames: taken, datagrams: taken - refused })
}

#[inline]
fn recv_loop(
    post: &WorkerCtx<'_>,
    mut share: Vec<RawXsk>,
    (batch, pause): (u32, Duration),
    take: impl Fn(&mut RawXsk) -> Result<PollResult>,
) -> Result<()> {
    let mut watch = Epoll::new(share.len())?;
    for (token, socket) in share.iter().enumerate() {
        watch.add(socket, token as u64)?;
    }
    let mut delivered = 0;
    // The last batch was full, so that there was no delay after it.
    let mut is_owed = false;
    while !post.should_stop() {
        let mut most = 0;
        for socket in &mut share {
            let looked = take(socket)?;
            delivered += u64::from(looked.datagrams);
            most = most.max(looked.frames);
        }
        if most == 0 && is_owed {
            is_owed = false;
            tick::sleep(pause);
            continue;
        }
        if most == 0 {
            let idle = if share.iter().any(RawXsk::is_sending) { TX_POLL_TIMEOUT } else { IDLE_POLL_TIMEOUT };
            // Errors are ignored, because the rings show readiness, too.
            let _ = watch.wait(idle)?.count();
            continue;
        }
        post.stats.set_delivered(delivered);
        is_owed = !pause.is_zero() && most == batch;
        if !pause.is_zero() && most < batch {
            tick::sleep(pause);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use manylane_wire::datagram::{Checksum, Datagram};
    use manylane_wire::ethernet::{Ethernet, Mac};
    use manylane_wire::frame::UdpFrame;

    use super::*;

    #[test]
    fn a_frame_that_is_turned_around_goes_back_with_right_checksums() {
        let (here, there) = ("10.0.0.1:1000".parse().unwrap(), "10.9.8.7:53".parse().unwrap());
        let (ours, theirs) = (Mac([2, 1, 1, 1, 1, 1]), Mac([2, 7, 7, 7, 7, 7]));
        let plan = UdpFrame { payload: b"request", ..UdpFrame::new(ours, theirs, here, there) };
        let mut frame = vec![0; plan.len()];
        plan.write(&mut frame).unwrap();
        assert!(Unchecked::reply_in_place(&mut frame));
        let back = Datagram::parse(&frame).unwrap();
        assert_eq!((back.source(), back.destination(), back.checksum), (there, here, Checksum::Valid));
        assert_eq!(&frame[back.payload_offset.into()..][..back.len.into()], b"request");
        let (ethernet, _) = Ethernet::parse(&frame).unwrap();
        assert_eq!((ethernet.source, ethernet.destination), (theirs, ours));
        assert!(!Unchecked::reply_in_place(&mut frame[..41]));
    }

    #[test]
    fn padding_is_no_payload() {
        let plan = UdpFrame {
            payload: b"request",
            ..UdpFrame::new(
                Mac([2; 6]),
                Mac([4; 6]),
                "10.0.0.1:1000".parse().unwrap(),
                "10.9.8.7:53".parse().unwrap(),
            )
        };
        let mut frame = [0xaa; 60];
        plan.write(&mut frame).unwrap();
        assert_eq!(Unchecked::payload(&frame), Some(&b"request"[..]));
        assert_eq!((Unchecked::payload(&frame[..48]), Unchecked::payload(&frame[..41])), (None, None));
    }
}
