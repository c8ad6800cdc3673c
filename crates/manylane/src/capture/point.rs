//! The thread that lets others capture a socket: it listens, checks who asks, makes rings, posts them to the lanes.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use manylane_sys::capture as rings;
use manylane_sys::local::{self, Peer};
use manylane_sys::measure::Watch;
use manylane_sys::sock;

use super::tap::{Post, Ring, Tap};
use super::wire::{self, About, Answer, Ask};
use crate::counters::LaneId;

/// Tokens of what the thread waits for; connections count on from the last.
const WAKE: u64 = 0;
const LISTENER: u64 = 1;
const FIRST_CLIENT: u64 = 2;

/// Connections at a time.
const MOST_CLIENTS: usize = 16;
/// Names that are tried.
const MOST_NAMES: u32 = 1024;
/// Bytes of a question.
const LONGEST_QUESTION: usize = 256;
/// Memory for one lane.
const SMALLEST: usize = 64 << 10;
const LARGEST: usize = 64 << 20;

/// What a lane gets who is asked for so many bytes.
pub(super) fn buffer_of(asked: usize) -> usize {
    asked.clamp(SMALLEST, LARGEST)
}
/// How long a message may wait for room.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often to look for rings that lanes have left: soon at first, then now and then.
const SOON: Duration = Duration::from_millis(10);
const LATER: Duration = Duration::from_secs(1);
/// Every wait has a bound.
const IDLE: Duration = Duration::from_secs(60);

/// The number of the next point of this process.
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// Where a socket can be captured, as long as this value lives.
pub(crate) struct Point {
    shared: Arc<Shared>,
    wake: UnixStream,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    lanes: Mutex<Vec<(LaneId, Weak<Post>)>>,
    stop: AtomicBool,
}

impl Shared {
    /// The lanes that live. Those that are gone are forgotten.
    fn lanes(&self) -> Vec<(LaneId, Arc<Post>)> {
        let mut lanes = self.lock();
        lanes.retain(|(_, post)| post.strong_count() > 0);
        lanes.iter().filter_map(|(lane, post)| Some((*lane, post.upgrade()?))).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(LaneId, Weak<Post>)>> {
        // Nothing that holds the lock can panic.
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Point {
    /// Listens for those who want to capture the lanes of the socket that is bound to `address` and uses `devices`
    /// (index and name).
    pub(crate) fn open(address: SocketAddr, devices: Vec<(u32, String)>) -> io::Result<Self> {
        let listener = listen()?;
        let (wake, woken) = UnixStream::pair()?;
        woken.set_nonblocking(true)?;
        wake.set_nonblocking(true)?;
        let watch = Watch::new(MOST_CLIENTS)?;
        watch.add(&woken, WAKE)?;
        watch.add(&listener, LISTENER)?;
        let shared = Arc::new(Shared { lanes: Mutex::default(), stop: AtomicBool::new(false) });
        let server = Server {
            shared: Arc::clone(&shared),
            address,
            devices,
            listener,
            woken,
            watch,
            clients: Vec::new(),
            next: FIRST_CLIENT,
            active: None,
            tidy: IDLE,
        };
        let thread = thread::Builder::new().name("manylane-capture".into()).spawn(move || server.run())?;
        Ok(Self { shared, wake, thread: Some(thread) })
    }

    /// What a lane that comes needs.
    pub(crate) fn tap(&self, lane: LaneId) -> Tap {
        let post = Arc::new(Post::default());
        self.shared.lock().push((lane, Arc::downgrade(&post)));
        self.wake();
        Tap::new(post)
    }

    fn wake(&self) {
        // A buffer that is full has woken it.
        _ = io::Write::write(&mut &self.wake, &[0]);
    }
}

impl Drop for Point {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.wake();
        if let Some(thread) = self.thread.take() {
            // It has panicked, which it has said, or it has ended.
            _ = thread.join();
        }
    }
}

/// Listens under the first name that is free.
fn listen() -> io::Result<OwnedFd> {
    let pid = std::process::id();
    for _ in 0..MOST_NAMES {
        match local::listen(&wire::name(pid, NUMBER.fetch_add(1, Ordering::Relaxed))) {
            Err(err) if err.kind() == io::ErrorKind::AddrInUse => {}
            other => return other,
        }
    }
    Err(io::Error::from(io::ErrorKind::AddrInUse))
}

struct Client {
    token: u64,
    connection: OwnedFd,
    peer: Peer,
}

/// The capture that runs.
struct Active {
    token: u64,
    snaplen: usize,
    buffer: usize,
    /// Lanes that have been offered a ring.
    served: Vec<LaneId>,
}

struct Server {
    shared: Arc<Shared>,
    address: SocketAddr,
    devices: Vec<(u32, String)>,
    listener: OwnedFd,
    woken: UnixStream,
    watch: Watch,
    clients: Vec<Client>,
    next: u64,
    active: Option<Active>,
    /// When to look next for rings that lanes have left.
    tidy: Duration,
}

impl Server {
    fn run(mut self) {
        while !self.shared.stop.load(Ordering::Acquire) {
            let ready: Vec<u64> = match self.watch.wait(self.tidy) {
                Ok(ready) => ready.collect(),
                Err(err) => {
                    log::warn!("captures of {} end: {err}", self.address);
                    break;
                }
            };
            for token in ready {
                match token {
                    WAKE => {
                        while matches!(io::Read::read(&mut &self.woken, &mut [0; 64]), Ok(1..)) {}
                        self.offer();
                    }
                    LISTENER => self.welcome(),
                    client => self.hear(client),
                }
            }
            self.tidy();
        }
        for (_, post) in self.shared.lanes() {
            post.put(None);
        }
    }

    /// Unmaps rings that lanes have left.
    fn tidy(&mut self) {
        if self.tidy < IDLE {
            let lanes = self.shared.lanes().into_iter();
            // All of them, also behind one that has not looked.
            let all = lanes.fold(true, |all, (_, post)| post.tidy() && all);
            self.tidy = if all { IDLE } else { (self.tidy * 2).min(LATER) };
        }
    }

    fn client(&self, token: u64) -> Option<&Client> {
        self.clients.iter().find(|client| client.token == token)
    }

    /// Takes connections of those who may.
    fn welcome(&mut self) {
        for _ in 0..MOST_CLIENTS {
            let connection = match local::accept(self.listener.as_fd()) {
                Ok(connection) => connection,
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => return,
                Err(err) => {
                    // It is still there at the next look: not at once, for want of descriptors.
                    log::debug!("a capture could not connect: {err}");
                    return thread::sleep(SOON);
                }
            };
            let Ok(peer) = local::peer(connection.as_fd()) else { continue };
            let own = local::effective_uid();
            let why = if !peer.is_of(0) && !peer.is_of(own) {
                Some(format!("only root and the user {own} of this process may capture it"))
            } else if self.clients.len() >= MOST_CLIENTS {
                Some("too many others ask at the same time".into())
            } else {
                None
            };
            if let Some(why) = why {
                // Whether it is heard is not ours to care about.
                _ = say(connection.as_fd(), &Answer::Refused(why), &[]);
                continue;
            }
            let token = self.next;
            self.next += 1;
            if self.watch.add(&connection, token).is_ok() {
                self.clients.push(Client { token, connection, peer });
            }
        }
    }

    /// A client said something, or is gone.
    fn hear(&mut self, token: u64) {
        let Some(client) = self.client(token) else { return };
        let mut buffer = [0; LONGEST_QUESTION];
        let said = local::recv(client.connection.as_fd(), &mut buffer).map(|(len, _)| len);
        let asked = match said {
            Ok(len @ 1..) => Ask::parse(&buffer[..len]),
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => return,
            _ => return self.forget(token),
        };
        let answer = match asked {
            Ok(Ask::Describe) => Answer::About(self.about()),
            Ok(Ask::Start { snaplen, buffer }) => return self.start(token, snaplen, buffer),
            Err(why) => Answer::Refused(why),
        };
        if say(client.connection.as_fd(), &answer, &[]).is_err() {
            self.forget(token);
        }
    }

    fn captured_by(&self) -> Option<u32> {
        let active = self.active.as_ref()?;
        self.client(active.token).map(|client| client.peer.pid)
    }

    fn about(&self) -> About {
        About {
            address: self.address,
            devices: self.devices.clone(),
            lanes: self.shared.lanes().into_iter().map(|(lane, _)| lane).collect(),
            captured_by: self.captured_by(),
        }
    }

    fn start(&mut self, token: u64, snaplen: usize, buffer: usize) {
        let Some(client) = self.client(token) else { return };
        if self.active.is_some() {
            let why = format!("process {} captures it already", self.captured_by().unwrap_or(0));
            _ = say(client.connection.as_fd(), &Answer::Refused(why), &[]);
            return self.forget(token);
        }
        log::info!("{}: process {} captures what lanes receive and send", self.address, client.peer.pid);
        self.active = Some(Active {
            token,
            snaplen: snaplen.clamp(1, rings::LONGEST),
            buffer: buffer_of(buffer),
            served: Vec::new(),
        });
        self.offer();
        // It has ended if something went wrong.
        if let Some(client) = self.client(token)
            && say(client.connection.as_fd(), &Answer::Started, &[]).is_err()
        {
            self.forget(token);
        }
    }

    /// Gives lanes that have none a ring, if there is a capture.
    fn offer(&mut self) {
        let Some(active) = &self.active else { return };
        let token = active.token;
        if let Err(why) = self.try_offer() {
            log::warn!("{}: the capture ends: {why}", self.address);
            if let Some(client) = self.client(token) {
                _ = say(client.connection.as_fd(), &Answer::Refused(why), &[]);
            }
            self.forget(token);
        }
    }

    fn try_offer(&mut self) -> Result<(), String> {
        let Some(active) = &mut self.active else { return Ok(()) };
        let Some(client) = self.clients.iter().find(|client| client.token == active.token) else {
            return Ok(());
        };
        let devices: Vec<u32> = self.devices.iter().map(|(ifindex, _)| *ifindex).collect();
        for (lane, post) in self.shared.lanes() {
            if active.served.contains(&lane) {
                continue;
            }
            let (producer, files) = rings::create(&devices, active.buffer)
                .map_err(|err| format!("no memory for what lane {lane} does: {err}"))?;
            let [data, taken] = &files;
            say(client.connection.as_fd(), &Answer::Ring(lane), &[data.as_fd(), taken.as_fd()])
                .map_err(|err| format!("its memory cannot be passed on: {err}"))?;
            post.put(Some(Ring { producer, snaplen: active.snaplen }));
            active.served.push(lane);
        }
        Ok(())
    }

    /// A client is gone, or shall go.
    fn forget(&mut self, token: u64) {
        self.clients.retain(|client| client.token != token);
        if self.active.take_if(|active| active.token == token).is_some() {
            log::info!("{}: the capture has ended", self.address);
            for (_, post) in self.shared.lanes() {
                post.put(None);
            }
            self.tidy = SOON;
        }
    }
}

/// Says something, for which there may have to be room first.
fn say(connection: BorrowedFd<'_>, answer: &Answer, files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let text = answer.to_text();
    match local::send(connection, text.as_bytes(), files) {
        Err(err) if err.kind() == io::ErrorKind::WouldBlock && sock::wait_writable(connection, PATIENCE) => {
            local::send(connection, text.as_bytes(), files)
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Capture, LONGEST, points};
    use super::*;

    /// One frame through the tap of a lane.
    fn frame(tap: &mut Tap, bytes: &[u8]) {
        tap.look();
        tap.received(3, 0, [bytes].into_iter());
    }

    fn take(capture: &mut Capture) -> Vec<(LaneId, Vec<u8>)> {
        let mut all = Vec::new();
        while let Some(frame) = capture.take() {
            all.push((frame.lane, frame.bytes.to_vec()));
        }
        all
    }

    /// What happens within a moment, by the clock of a test.
    fn soon(mut done: impl FnMut() -> bool) {
        let start = std::time::Instant::now();
        while !done() {
            assert!(start.elapsed() < Duration::from_secs(30), "it does not come to that");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn lanes_may_come_and_go_before_during_and_after_a_capture() {
        let address: SocketAddr = "192.0.2.1:4711".parse().unwrap();
        let point = Point::open(address, vec![(3, "eth0".into())]).unwrap();
        let ours = || {
            let mut found = points(Some(std::process::id())).unwrap().points;
            found.retain(|point| point.address() == address);
            found
        };
        let mut first = point.tap(LaneId(1));
        drop(point.tap(LaneId(2)));
        frame(&mut first, b"before");
        assert_eq!(ours()[0].lanes(), [LaneId(1)]);
        let mut capture = Capture::start(ours(), LONGEST, 0).unwrap();
        // The only test that opens a point: there is no other one that could close meanwhile.
        ask_nonsense();
        frame(&mut first, b"during");
        assert_eq!(take(&mut capture), [(LaneId(1), b"during".to_vec())]);
        // One that comes is captured as soon as both sides have been told of it.
        let mut late = point.tap(LaneId(5));
        soon(|| {
            frame(&mut late, b"late");
            capture.wait(Duration::from_millis(1)).unwrap();
            take(&mut capture).contains(&(LaneId(5), b"late".to_vec()))
        });
        // What one has seen that goes is not lost.
        frame(&mut first, b"last");
        drop(first);
        capture.wait(Duration::ZERO).unwrap();
        assert!(take(&mut capture).contains(&(LaneId(1), b"last".to_vec())));
        capture.wait(Duration::ZERO).unwrap();
        assert!(!capture.is_over());
        // The point ends before its lane does.
        drop(point);
        frame(&mut late, b"nobody sees it");
        soon(|| {
            capture.wait(Duration::from_millis(1)).unwrap();
            capture.is_over()
        });
        assert!(ours().is_empty());
    }

    /// Somebody who does not speak our language asks every point of this process.
    fn ask_nonsense() {
        let listed = std::fs::read_to_string("/proc/thread-self/net/unix").unwrap();
        let own = wire::name(std::process::id(), 0);
        let own = own.strip_suffix('0').unwrap();
        for name in wire::listeners(&listed).into_iter().filter(|name| name.starts_with(own)) {
            let connection = local::connect(name, Duration::from_secs(30)).unwrap();
            local::send(connection.as_fd(), b"what is this?", &[]).unwrap();
            let mut buffer = [0; 256];
            let (len, _) = local::recv(connection.as_fd(), &mut buffer).unwrap();
            assert!(buffer[..len].starts_with(b"refused "));
            local::send(connection.as_fd(), &[b'x'; 1000], &[]).unwrap();
            assert_eq!(local::recv(connection.as_fd(), &mut buffer).unwrap().0, 0, "too long to be heard");
        }
    }
}
