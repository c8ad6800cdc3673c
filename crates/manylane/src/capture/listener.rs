//! The thread that serves captures of a socket: it listens, verifies clients, makes rings, and
//! posts them to the lanes.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use manylane_ipc::capture as rings;
use manylane_ipc::capture::messages::{self, Description, Reply, Request};
use manylane_sys::epoll::Epoll;
use manylane_sys::sock;
use manylane_sys::unix_socket::{self, PeerCred};

use super::tap::{Mailbox, Ring, Tap};
use crate::connection::{Connection, Listener};
use crate::counters::LaneId;
use crate::peer;
use crate::service::{FIRST_CLIENT, LISTENER, Service, WAKE, Wakeups};

/// Maximum number of connections at a time.
const CLIENTS_MAX: usize = 16;
/// Maximum size of a request, in bytes.
const REQUEST_LEN_MAX: usize = 256;
/// Range of the memory for one lane, in bytes.
const BUFFER_SIZE_MIN: usize = 64 << 10;
const BUFFER_SIZE_MAX: usize = 64 << 20;

/// The bytes that a lane uses if `asked` bytes are requested.
pub(super) fn clamp_buffer_size(asked: usize) -> usize {
    asked.clamp(BUFFER_SIZE_MIN, BUFFER_SIZE_MAX)
}
/// Time that a message may wait for room.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval of checks for rings that lanes have left: short at first, then longer.
const RECLAIM_INTERVAL_MIN: Duration = Duration::from_millis(10);
const RECLAIM_INTERVAL_MAX: Duration = Duration::from_secs(1);
/// Bound of an idle wait.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// The capture socket of a socket; dropping it closes it.
pub(crate) struct CaptureListener {
    lanes: Arc<LaneRegistry>,
    service: Service,
}

/// The lanes that can be captured, each with its mailbox.
#[derive(Default)]
struct LaneRegistry(Mutex<Vec<(LaneId, Weak<Mailbox>)>>);

impl LaneRegistry {
    /// The open lanes. Drops the entries of closed ones.
    fn open(&self) -> Vec<(LaneId, Arc<Mailbox>)> {
        let mut lanes = self.lock();
        lanes.retain(|(_, mailbox)| mailbox.strong_count() > 0);
        lanes.iter().filter_map(|(lane, mailbox)| Some((*lane, mailbox.upgrade()?))).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(LaneId, Weak<Mailbox>)>> {
        // Nothing that holds the lock can panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CaptureListener {
    /// Listens for captures of the lanes of the socket that is bound to `address` and uses
    /// `devices` (index and name).
    pub(crate) fn open(address: SocketAddr, devices: Vec<(u32, String)>) -> io::Result<Self> {
        Self::serve(peer::listen(messages::NAME_PREFIX)?, address, devices)
    }

    pub(super) fn serve(
        listener: Listener,
        address: SocketAddr,
        devices: Vec<(u32, String)>,
    ) -> io::Result<Self> {
        let lanes = Arc::<LaneRegistry>::default();
        let shared = Arc::clone(&lanes);
        let run = move |epoll, listener, wakeups: &Wakeups| {
            let server = Server {
                lanes: shared,
                address,
                devices,
                listener,
                wakeups,
                epoll,
                clients: Vec::new(),
                next_token: FIRST_CLIENT,
                active: None,
                reclaim_interval: IDLE_TIMEOUT,
            };
            server.run();
        };
        let service = Service::start("manylane-capture", listener, CLIENTS_MAX, run)?;
        Ok(Self { lanes, service })
    }

    /// The tap of a new lane.
    pub(crate) fn tap(&self, lane: LaneId) -> Tap {
        let mailbox = Arc::new(Mailbox::default());
        self.lanes.lock().push((lane, Arc::downgrade(&mailbox)));
        self.service.wake();
        Tap::new(mailbox)
    }
}

struct Client {
    token: u64,
    connection: Connection,
    peer: PeerCred,
}

/// The running capture.
struct Active {
    token: u64,
    snaplen: usize,
    buffer: usize,
    /// Lanes that were offered a ring.
    served: Vec<LaneId>,
}

struct Server<'a> {
    lanes: Arc<LaneRegistry>,
    address: SocketAddr,
    devices: Vec<(u32, String)>,
    listener: Listener,
    wakeups: &'a Wakeups,
    epoll: Epoll,
    clients: Vec<Client>,
    next_token: u64,
    active: Option<Active>,
    /// Interval until the next check for rings that lanes have left.
    reclaim_interval: Duration,
}

impl Server<'_> {
    fn run(mut self) {
        'serve: loop {
            let ready: Vec<u64> = match self.epoll.wait(self.reclaim_interval) {
                Ok(ready) => ready.collect(),
                Err(err) => {
                    log::warn!("no more captures of {}: {err}", self.address);
                    break;
                }
            };
            for token in ready {
                match token {
                    WAKE if self.wakeups.is_over() => break 'serve,
                    WAKE => self.offer_rings(),
                    LISTENER => self.accept_clients(),
                    client => self.handle_request(client),
                }
            }
            self.reclaim_rings();
        }
        for (_, mailbox) in self.lanes.open() {
            mailbox.set_ring(None);
        }
    }

    /// Unmaps rings that lanes have left.
    fn reclaim_rings(&mut self) {
        if self.reclaim_interval < IDLE_TIMEOUT {
            let lanes = self.lanes.open().into_iter();
            // No short circuit: reclaim from all lanes, even behind one that has not polled yet.
            let all = lanes.fold(true, |all, (_, mailbox)| mailbox.reclaim() && all);
            self.reclaim_interval =
                if all { IDLE_TIMEOUT } else { (self.reclaim_interval * 2).min(RECLAIM_INTERVAL_MAX) };
        }
    }

    fn client(&self, token: u64) -> Option<&Client> {
        self.clients.iter().find(|client| client.token == token)
    }

    /// Accepts connections of permitted users.
    fn accept_clients(&mut self) {
        for _ in 0..CLIENTS_MAX {
            let connection = match self.listener.accept() {
                Ok(connection) => connection,
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => return,
                Err(err) => {
                    // The connection is still pending at the next poll. Wait a moment: probably
                    // out of descriptors.
                    log::debug!("a capture could not connect: {err}");
                    return thread::sleep(RECLAIM_INTERVAL_MIN);
                }
            };
            let Ok(peer) = unix_socket::peer_cred(connection.as_fd()) else { continue };
            let own = unix_socket::effective_uid();
            let why = if !peer.is_user(0) && !peer.is_user(own) {
                Some(format!("only root and the user {own} of this process may capture it"))
            } else if self.clients.len() >= CLIENTS_MAX {
                Some("too many requests at the same time: try again".into())
            } else {
                None
            };
            if let Some(why) = why {
                // It does not matter whether the refusal arrives.
                _ = send_reply(connection.as_fd(), &Reply::Refused(why), &[]);
                continue;
            }
            let token = self.next_token;
            self.next_token += 1;
            if self.epoll.add(&connection, token).is_ok() {
                self.clients.push(Client { token, connection, peer });
            }
        }
    }

    /// Handles a request of a client, or its disconnect.
    fn handle_request(&mut self, token: u64) {
        let Some(client) = self.client(token) else { return };
        let mut buffer = [0; REQUEST_LEN_MAX];
        let received = unix_socket::recv_without_fds(client.connection.as_fd(), &mut buffer);
        let request = match received {
            Ok(len @ 1..) => Request::parse(&buffer[..len]),
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => return,
            _ => return self.remove_client(token),
        };
        let answer = match request {
            Ok(Request::Describe) => Reply::Description(self.describe()),
            Ok(Request::Start { snaplen, buffer }) => return self.start(token, snaplen, buffer),
            Err(why) => Reply::Refused(why),
        };
        if send_reply(client.connection.as_fd(), &answer, &[]).is_err() {
            self.remove_client(token);
        }
    }

    fn captured_by(&self) -> Option<u32> {
        let active = self.active.as_ref()?;
        self.client(active.token).map(|client| client.peer.pid)
    }

    fn describe(&self) -> Description {
        Description {
            address: self.address,
            devices: self.devices.clone(),
            lanes: self.lanes.open().into_iter().map(|(lane, _)| lane.0).collect(),
            captured_by: self.captured_by(),
        }
    }

    fn start(&mut self, token: u64, snaplen: usize, buffer: usize) {
        let Some(client) = self.client(token) else { return };
        if self.active.is_some() {
            let why = format!("process {} already captures it", self.captured_by().unwrap_or(0));
            _ = send_reply(client.connection.as_fd(), &Reply::Refused(why), &[]);
            return self.remove_client(token);
        }
        log::info!("{}: process {} captures the frames of lanes", self.address, client.peer.pid);
        self.active = Some(Active {
            token,
            snaplen: snaplen.clamp(1, rings::SNAPLEN_MAX),
            buffer: clamp_buffer_size(buffer),
            served: Vec::new(),
        });
        self.offer_rings();
        // The capture has ended if something failed.
        if let Some(client) = self.client(token)
            && send_reply(client.connection.as_fd(), &Reply::Started, &[]).is_err()
        {
            self.remove_client(token);
        }
    }

    /// Gives a ring to each lane without one, if a capture is running.
    fn offer_rings(&mut self) {
        let Some(active) = &self.active else { return };
        let token = active.token;
        if let Err(why) = self.try_offer_rings() {
            log::warn!("{}: the capture ends: {why}", self.address);
            if let Some(client) = self.client(token) {
                _ = send_reply(client.connection.as_fd(), &Reply::Refused(why), &[]);
            }
            self.remove_client(token);
        }
    }

    fn try_offer_rings(&mut self) -> Result<(), String> {
        let Some(active) = &mut self.active else { return Ok(()) };
        let Some(client) = self.clients.iter().find(|client| client.token == active.token) else {
            return Ok(());
        };
        let devices: Vec<u32> = self.devices.iter().map(|(ifindex, _)| *ifindex).collect();
        for (lane, mailbox) in self.lanes.open() {
            if active.served.contains(&lane) {
                continue;
            }
            let (producer, files) = rings::create(&devices, active.buffer)
                .map_err(|err| format!("cannot allocate the capture buffer of lane {lane}: {err}"))?;
            let [data, consumed] = &files;
            send_reply(client.connection.as_fd(), &Reply::Ring(lane.0), &[data.as_fd(), consumed.as_fd()])
                .map_err(|err| format!("cannot pass on its memory: {err}"))?;
            mailbox.set_ring(Some(Ring { producer, snaplen: active.snaplen }));
            active.served.push(lane);
        }
        Ok(())
    }

    /// Removes a client that has disconnected or must be disconnected.
    fn remove_client(&mut self, token: u64) {
        if let Some(at) = self.clients.iter().position(|client| client.token == token) {
            let client = self.clients.swap_remove(at);
            // It may stay open in another thread.
            _ = self.epoll.remove(&client.connection);
        }
        if self.active.take_if(|active| active.token == token).is_some() {
            log::info!("{}: the capture has ended", self.address);
            for (_, mailbox) in self.lanes.open() {
                mailbox.set_ring(None);
            }
            self.reclaim_interval = RECLAIM_INTERVAL_MIN;
        }
    }
}

/// Sends a reply, after waiting for room if needed.
fn send_reply(connection: BorrowedFd<'_>, answer: &Reply, files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let text = answer.to_text();
    match unix_socket::send(connection, text.as_bytes(), files) {
        Err(err)
            if err.kind() == io::ErrorKind::WouldBlock && sock::wait_writable(connection, SEND_TIMEOUT) =>
        {
            unix_socket::send(connection, text.as_bytes(), files)
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use manylane_test_support::wait_for;

    use super::super::{Capture, SNAPLEN_MAX, find_targets};
    use super::*;

    /// Passes one frame through the tap of a lane.
    fn frame(tap: &mut Tap, bytes: &[u8]) {
        tap.refresh();
        tap.record_rx(3, 0, [bytes].into_iter());
    }

    fn drain(capture: &mut Capture) -> Vec<(LaneId, Vec<u8>)> {
        let mut all = Vec::new();
        while let Some(frame) = capture.next_frame() {
            all.push((frame.lane, frame.bytes.to_vec()));
        }
        all
    }

    #[test]
    fn lanes_change_before_during_and_after_a_capture() {
        let address: SocketAddr = "192.0.2.1:4711".parse().unwrap();
        let point = CaptureListener::open(address, vec![(3, "eth0".into())]).unwrap();
        let ours = || {
            let mut found = find_targets(Some(std::process::id())).unwrap().targets;
            found.retain(|point| point.address() == address);
            found
        };
        // Again, as long as its thread had no CPU for the seconds that it has for a reply.
        let found = || wait_for("the socket", ours, |found| !found.is_empty());
        let mut first = point.tap(LaneId(1));
        drop(point.tap(LaneId(2)));
        frame(&mut first, b"before");
        assert_eq!(found()[0].lanes(), [LaneId(1)]);
        let start = || Capture::start(found(), SNAPLEN_MAX, 0);
        let mut capture = wait_for("a capture", start, Result::is_ok).unwrap();
        // The only test that opens a capture socket, so no other one can close meanwhile.
        send_malformed_requests();
        frame(&mut first, b"during");
        assert_eq!(drain(&mut capture), [(LaneId(1), b"during".to_vec())]);
        // A new lane is captured as soon as both sides know about it.
        let mut late = point.tap(LaneId(5));
        let captured = || {
            frame(&mut late, b"late");
            capture.wait(Duration::from_millis(1)).unwrap();
            drain(&mut capture)
        };
        wait_for("a frame of the new lane", captured, |all| all.contains(&(LaneId(5), b"late".to_vec())));
        // The frames of a lane that closes are not lost.
        frame(&mut first, b"last");
        drop(first);
        capture.wait(Duration::ZERO).unwrap();
        assert!(drain(&mut capture).contains(&(LaneId(1), b"last".to_vec())));
        capture.wait(Duration::ZERO).unwrap();
        assert!(!capture.is_finished());
        // The capture socket closes before its lane.
        drop(point);
        frame(&mut late, b"it is not captured");
        let is_finished = || {
            capture.wait(Duration::from_millis(1)).unwrap();
            capture.is_finished()
        };
        wait_for("the end of the capture", is_finished, |is| *is);
        assert!(ours().is_empty());
    }

    /// Sends malformed requests to every capture socket of this process.
    fn send_malformed_requests() {
        for (_, name) in peer::find_listeners(messages::NAME_PREFIX, Some(std::process::id())).unwrap() {
            let connection = unix_socket::connect(&name, Duration::from_secs(120)).unwrap();
            unix_socket::send(connection.as_fd(), b"what is this?", &[]).unwrap();
            let mut buffer = [0; 256];
            let (len, _) = unix_socket::recv(connection.as_fd(), &mut buffer).unwrap();
            assert!(buffer[..len].starts_with(b"refused "));
            unix_socket::send(connection.as_fd(), &[b'x'; 1000], &[]).unwrap();
            assert_eq!(
                unix_socket::recv(connection.as_fd(), &mut buffer).unwrap().0,
                0,
                "too long to be heard"
            );
        }
    }
}
