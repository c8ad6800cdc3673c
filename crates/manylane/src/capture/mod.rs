//! Captures of the frames that lanes of engine `xdp` receive and send. tcpdump does not see frames
//! that XDP takes. Every socket of this engine offers copies of them, and `manylane capture` reads
//! them.
//!
//! ```text
//!  process with lanes                                          process that captures
//!  lane k ── tap.rs: copies into its ring (shared memory) ───► Capture::take: the oldest frame of all rings
//!     ▲ checks once a batch                                        ▲ checks every few milliseconds
//!     │ a mailbox: "here is your ring"                             │ memory of the rings, as descriptors
//!  listener.rs: a thread that listens on a local socket ──────────┘ (messages)
//! ```
//!
//! - **Without a capture**, a lane reads one word a batch.
//! - **During a capture**, a lane copies each frame that it received, before it is checked, and
//!   each frame that goes into the TX ring, into a ring that it alone writes to. Frames that find
//!   no room are counted. A lane makes no system call for a capture, takes no lock that another
//!   thread holds for long, and never waits.
//! - **Access**: root, and the user that the process runs as, verified by the kernel
//!   (`SO_PEERCRED`). The socket has an abstract name, `manylane.capture.PID.N`, in the network
//!   namespace of the lanes. There is one capture at a time.
//! - **Start and end**: the thread makes a ring for each lane, sends its files to the process that
//!   captures, and posts the ring to the lane's mailbox. The lane finds it at its next batch.
//!   Lanes that are added later get a ring when they open. When the connection ends, the thread
//!   posts "no ring". At its next batch the lane leaves its ring in the mailbox, and the thread
//!   unmaps it. A lane that closes drops its ring.
//! - **Neither side trusts the other**: see [`manylane_ipc::capture`].

pub(crate) mod listener;
pub(crate) mod tap;
#[cfg(test)]
mod tests;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use manylane_bpf::abi;
use manylane_ipc::capture::messages::{self, Description, Reply, Request};
use manylane_ipc::capture::{self as rings, Consumer};
pub use manylane_ipc::capture::{Direction, SNAPLEN_MAX};
use manylane_sys::epoll::Epoll;
use manylane_sys::unix_socket::{self, Peeked};

use crate::connection::Connection;
use crate::counters::LaneId;
use crate::error::{Error, ErrorKind, Result};
use crate::peer::{self, Scan, run_in_netns};

/// Time limits of one reply, and of starting a capture.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of rings of one socket: for its lanes, and for as many closed lanes whose rings
/// still hold frames.
const RINGS_MAX: usize = 2 * abi::LANES_MAX;
/// Maximum number of devices that are told apart; all further ones count as one.
const DEVICES_MAX: usize = 256;

/// A socket of a running process whose lanes can be captured.
#[derive(Debug)]
pub struct Target {
    connection: Connection,
    pid: u32,
    description: Description,
    lanes: Vec<LaneId>,
}

/// The result of [`find_targets`].
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Targets {
    /// The sockets, ordered by process and number.
    pub targets: Vec<Target>,
    /// Processes with a socket that refused this user or did not answer, with the reason.
    pub refused: Vec<(u32, String)>,
}

/// Finds the sockets that can be captured: of all processes in the network namespace of the
/// calling thread, or of process `of`, in whichever namespace it is.
///
/// # Errors
/// [`ErrorKind::State`] if there is no process `of`. [`ErrorKind::Permission`] if it is in another
/// network namespace that this process may not enter (`CAP_SYS_ADMIN`).
pub fn find_targets(of: Option<u32>) -> Result<Targets> {
    of.map_or_else(|| scan(None), |pid| run_in_netns(pid, || scan(of)))
}

/// Queries every capture socket in the network namespace of the calling thread.
fn scan(of: Option<u32>) -> Result<Targets> {
    let mut found = Targets::default();
    let (mut scan, mut requested) = (Scan::start(), Vec::new());
    for (pid, name) in peer::find_listeners(messages::NAME_PREFIX, of)? {
        let connection = match Connection::connect_now(&name, REPLY_TIMEOUT) {
            Ok(connection) => connection,
            // The socket was closed meanwhile: skip it.
            Err(err) if err.kind() == io::ErrorKind::ConnectionRefused => continue,
            Err(err) => {
                found.refused.push((pid, explain(err).to_string()));
                continue;
            }
        };
        let Ok(peer) = unix_socket::peer_cred(connection.as_fd()) else { continue };
        let verified = peer::verify_peer(peer, pid, unix_socket::effective_uid());
        let sent = verified.and_then(|()| {
            let sent = scan.admit(peer).and_then(|()| send_describe(&connection));
            sent.map_err(|err| explain(err).to_string())
        });
        match sent {
            Ok(()) => requested.push((pid, connection)),
            Err(why) => found.refused.push((pid, why)),
        }
    }
    for (pid, connection) in requested {
        let reply = peer::wait_for_reply(&connection, scan.until).map_err(explain);
        match reply.and_then(|()| recv_reply(&connection, false)) {
            Ok((Reply::Description(about), _)) => {
                let lanes = about.lanes.iter().copied().map(LaneId).collect();
                found.targets.push(Target { connection, pid, description: about, lanes });
            }
            Ok((Reply::Refused(why), _)) => found.refused.push((pid, why)),
            Ok(_) => found.refused.push((pid, "unexpected reply".into())),
            Err(err) => found.refused.push((pid, err.to_string())),
        }
    }
    // A process is named once with each reason.
    found.refused.sort();
    found.refused.dedup();
    found.targets.sort_by(|a, b| (a.pid, &a.description.address).cmp(&(b.pid, &b.description.address)));
    Ok(found)
}

fn send_describe(connection: &Connection) -> io::Result<()> {
    match unix_socket::send(connection.as_fd(), Request::Describe.to_text().as_bytes(), &[]) {
        // A client that is refused was told so before its request.
        Err(err) if err.kind() != io::ErrorKind::BrokenPipe => Err(err),
        _ => Ok(()),
    }
}

/// Receives a reply, and the descriptors of a ring if it `may_be_ring`. Any other reply with
/// descriptors is an error and stays queued: closing those may block.
fn recv_reply(connection: &Connection, may_be_ring: bool) -> io::Result<(Reply, Vec<OwnedFd>)> {
    let mut buffer = [0; messages::MESSAGE_LEN_MAX];
    let reply = match recv_message(connection, &mut buffer, may_be_ring) {
        // The peer closed the connection with our request unread. Its reply is still queued behind
        // this error.
        Err(err) if err.kind() == io::ErrorKind::ConnectionReset => {
            recv_message(connection, &mut buffer, may_be_ring)
        }
        other => other,
    };
    let (len, files) = reply.map_err(explain)?;
    if len == 0 {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the process closed the connection"));
    }
    Ok((Reply::parse(&buffer[..len])?, files))
}

fn recv_message(
    connection: &Connection,
    buffer: &mut [u8],
    may_be_ring: bool,
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let from = connection.as_fd();
    unix_socket::wait_for_message(from)?;
    if may_be_ring && let Some(Peeked { len, .. }) = unix_socket::peek(from, buffer)? {
        let text = &buffer[..len.min(buffer.len())];
        if matches!(Reply::parse(text), Ok(Reply::Ring(_))) {
            return unix_socket::recv(from, buffer);
        }
    }
    unix_socket::recv_without_fds(from, buffer).map(|len| (len, Vec::new()))
}

fn explain(err: io::Error) -> io::Error {
    match err.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            io::Error::new(io::ErrorKind::TimedOut, "no reply")
        }
        _ => err,
    }
}

impl Target {
    /// The process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The address that the socket is bound to.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.description.address
    }

    /// Its lanes when it was queried.
    #[must_use]
    pub fn lanes(&self) -> &[LaneId] {
        &self.lanes
    }

    /// Names of its devices.
    pub fn devices(&self) -> impl Iterator<Item = &str> {
        self.description.devices.iter().map(|(_, name)| name.as_str())
    }

    /// The process that is capturing it; a second one is refused.
    #[must_use]
    pub fn captured_by(&self) -> Option<u32> {
        self.description.captured_by
    }
}

/// A device in a [`Capture`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Device {
    /// Its name, or `if` and its index if only that is known.
    pub name: String,
    ifindex: u32,
}

/// One frame that a lane received or put into its TX ring.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Frame<'a> {
    /// Nanoseconds since 1970 of the wall clock, read once a batch: when the lane received the
    /// batch, or when it wrote the first reply of it.
    pub time: u64,
    /// Index of the device in [`Capture::devices`].
    pub device: usize,
    /// Its name.
    pub device_name: &'a str,
    /// The queue of the device.
    pub queue: u32,
    /// The lane.
    pub lane: LaneId,
    /// Received or sent.
    pub direction: Direction,
    /// Length of the frame; `bytes` may be truncated.
    pub len: usize,
    /// The frame, from its Ethernet header on.
    pub bytes: &'a [u8],
}

/// A running capture; dropping it ends it.
#[derive(Debug)]
pub struct Capture {
    sources: Vec<Source>,
    devices: Vec<Device>,
    /// Frames dropped for lack of room, received and sent, of rings that are gone; by device.
    dropped: Vec<(u64, u64)>,
    bytes: Vec<u8>,
    epoll: Epoll,
}

/// One captured socket.
#[derive(Debug)]
struct Source {
    /// None once the peer has ended it.
    connection: Option<Connection>,
    lanes: Vec<(LaneId, Consumer)>,
    /// Expected shape of a ring: number of devices, and bytes.
    expected_ring: (usize, usize),
}

impl Source {
    /// Adds the ring of a lane. Checks that it has the requested size, because its pages are
    /// mapped by this process too.
    fn add(&mut self, lane: LaneId, files: Vec<OwnedFd>) -> io::Result<()> {
        let wrong = |why| io::Error::new(io::ErrorKind::InvalidData, why);
        let files: [OwnedFd; 2] = files.try_into().map_err(|_| wrong("a ring without memory"))?;
        if self.lanes.len() >= RINGS_MAX {
            return Err(wrong("more rings than a socket has lanes"));
        }
        let (devices, bytes) = self.expected_ring;
        self.lanes.push((lane, rings::open(&files, devices, bytes)?));
        Ok(())
    }
}

impl Capture {
    /// Starts to capture `targets`. Keeps the first `snaplen` bytes of each frame (at most
    /// [`SNAPLEN_MAX`]). Each lane uses `buffer` bytes of memory (64 KiB to 64 MiB, rounded up to
    /// a power of two), charged to the process of the lane. When this returns, every batch that a
    /// lane begins is captured.
    ///
    /// # Errors
    /// [`ErrorKind::InUse`] or [`ErrorKind::State`] with the reason of the peer; system errors.
    pub fn start(targets: Vec<Target>, snaplen: usize, buffer: usize) -> Result<Self> {
        let failed = |err| Error::system("starting a capture", err);
        let watch = Epoll::new(targets.len()).map_err(failed)?;
        let mut capture = Self {
            sources: Vec::new(),
            devices: Vec::new(),
            dropped: Vec::new(),
            bytes: Vec::new(),
            epoll: watch,
        };
        for Target { connection, pid, description: about, .. } in targets {
            let ring = (about.devices.len(), listener::clamp_buffer_size(buffer));
            for (ifindex, name) in about.devices {
                capture.add_device(ifindex, name);
            }
            // The rings are descriptors. Before Linux 6.16 they arrive in any case.
            _ = unix_socket::accept_fds(connection.as_fd(), true);
            let start = Request::Start { snaplen, buffer }.to_text();
            unix_socket::send(connection.as_fd(), start.as_bytes(), &[]).map_err(explain).map_err(failed)?;
            let mut source = Source { connection: None, lanes: Vec::new(), expected_ring: ring };
            let until = Instant::now() + START_TIMEOUT;
            loop {
                if Instant::now() >= until {
                    return Err(failed(explain(io::ErrorKind::WouldBlock.into())));
                }
                match recv_reply(&connection, true).map_err(failed)? {
                    (Reply::Ring(lane), files) => source.add(LaneId(lane), files).map_err(failed)?,
                    (Reply::Started, _) => break,
                    (Reply::Refused(why), _) => {
                        return Err(Error::new(ErrorKind::InUse, format!("process {pid}: {why}")));
                    }
                    (Reply::Description(_), _) => {
                        let kind = io::ErrorKind::InvalidData;
                        return Err(failed(io::Error::new(kind, "unexpected reply")));
                    }
                }
            }
            capture.epoll.add(&connection, capture.sources.len() as u64).map_err(failed)?;
            source.connection = Some(connection);
            capture.sources.push(source);
        }
        Ok(capture)
    }

    fn add_device(&mut self, ifindex: u32, name: String) -> usize {
        if let Some(at) = self.devices.iter().position(|known| known.ifindex == ifindex) {
            return at;
        }
        self.devices.push(Device { name, ifindex });
        self.dropped.push((0, 0));
        self.devices.len() - 1
    }

    /// Index of a device, which is added if it is new.
    fn device(&mut self, ifindex: u32) -> usize {
        let is_known = self.devices.iter().any(|known| known.ifindex == ifindex);
        // Bounded, because another process may report any number of devices.
        let ifindex = if is_known || self.devices.len() < DEVICES_MAX { ifindex } else { 0 };
        let name = if ifindex == 0 { "other".into() } else { format!("if{ifindex}") };
        self.add_device(ifindex, name)
    }

    /// The devices. New ones may be appended; none is removed.
    #[must_use]
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Removes and returns the oldest captured frame, if there is one. Does not wait.
    pub fn next_frame(&mut self) -> Option<Frame<'_>> {
        let mut oldest: Option<(u64, usize, usize)> = None;
        for (s, source) in self.sources.iter_mut().enumerate() {
            for (l, (_, ring)) in source.lanes.iter_mut().enumerate() {
                // A broken ring is skipped until the next wait, which removes it.
                if let Ok(Some(head)) = ring.peek()
                    && oldest.is_none_or(|(time, ..)| head.time < time)
                {
                    oldest = Some((head.time, s, l));
                }
            }
        }
        let (_, s, l) = oldest?;
        let (lane, ring) = self.sources.get_mut(s)?.lanes.get_mut(l)?;
        // Present and checked above, and kept until it is removed.
        let (lane, head) = (*lane, ring.pop(&mut self.bytes).ok()??);
        let device = self.device(head.ifindex);
        Some(Frame {
            time: head.time,
            device,
            device_name: &self.devices.get(device)?.name,
            queue: head.queue,
            lane,
            direction: head.direction,
            len: head.len as usize,
            bytes: &self.bytes,
        })
    }

    /// Ends the capture: from now on, [`next_frame`](Self::next_frame) returns only frames that are
    /// in the rings now. Call it last: rings that a later [`wait`](Self::wait) adds have no end.
    pub fn stop(&mut self) {
        let lanes = self.sources.iter_mut().flat_map(|source| &mut source.lanes);
        lanes.for_each(|(_, ring)| ring.stop());
    }

    /// Waits for `timeout`, or until a lane or a process is added or ends. Frames do not end the
    /// wait, because lanes wake no other process.
    ///
    /// # Errors
    /// System errors.
    pub fn wait(&mut self, timeout: Duration) -> Result<()> {
        let failed = |err| Error::system("waiting for a capture", err);
        let ready: Vec<u64> = self.epoll.wait(timeout).map_err(failed)?.collect();
        for token in ready {
            let Some(source) = self.sources.get_mut(token as usize) else { continue };
            let Some(connection) = &source.connection else { continue };
            // Reads one message; the next poll reports further ones.
            match recv_reply(connection, true) {
                Ok((Reply::Ring(lane), files)) => {
                    if let Err(err) = source.add(LaneId(lane), files) {
                        log::warn!("cannot capture lane {lane}: {err}");
                    }
                }
                Ok(_) => {}
                Err(_) => {
                    // It may stay open in another thread.
                    _ = self.epoll.remove(connection);
                    source.connection = None;
                }
            }
        }
        self.remove_lanes();
        Ok(())
    }

    /// Drops the rings of closed lanes, and those with invalid content.
    fn remove_lanes(&mut self) {
        let mut gone = Vec::new();
        for source in &mut self.sources {
            let is_closed = source.connection.is_none();
            source.lanes.retain_mut(|(lane, ring)| {
                let over =
                    ring.is_finished().and_then(|over| Ok(over || is_closed && ring.peek()?.is_none()));
                match over {
                    Ok(true) => gone.extend(ring.dropped()),
                    Ok(false) => return true,
                    Err(err) => log::warn!("lane {lane} is no longer captured: {err}"),
                }
                false
            });
        }
        for of in gone {
            let device = self.device_of(&of);
            add(&mut self.dropped, device, &of);
        }
    }

    /// The device of a drop count; none if the count is zero.
    fn device_of(&mut self, of: &rings::DropCounts) -> Option<usize> {
        (of.received > 0 || of.sent > 0).then(|| self.device(of.ifindex))
    }

    /// True if every process has ended its side, and all remaining frames were read.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.sources.iter().all(|source| source.connection.is_none() && source.lanes.is_empty())
    }

    /// Frames that were not captured because this side was too slow, received and sent; by device.
    pub fn dropped(&mut self) -> Vec<(u64, u64)> {
        let lanes = self.sources.iter().flat_map(|source| &source.lanes);
        let live: Vec<rings::DropCounts> = lanes.flat_map(|(_, ring)| ring.dropped()).collect();
        let live: Vec<_> = live.into_iter().map(|of| (self.device_of(&of), of)).collect();
        let mut all = self.dropped.clone();
        for (device, of) in &live {
            add(&mut all, *device, of);
        }
        all
    }
}

fn add(counts: &mut [(u64, u64)], device: Option<usize>, of: &rings::DropCounts) {
    if let Some((received, sent)) = device.and_then(|device| counts.get_mut(device)) {
        // Untrusted counts of another process: saturate.
        *received = received.saturating_add(of.received);
        *sent = sent.saturating_add(of.sent);
    }
}
