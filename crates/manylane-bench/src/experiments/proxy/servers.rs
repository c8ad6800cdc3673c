//! Servers, on one thread: what a connection does is said by the first byte of its requests.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use manylane_sys::cpu;
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};

use super::bed::{Bed, SERVER_LINK};

/// Bytes of a request and of its answer.
pub(super) const REQUEST_LEN: usize = 128;
pub(super) const ANSWER_LEN: usize = 512;
/// First byte of a request: answered, answered and closed, or answered with bytes without an end.
pub(super) const KEEP: u8 = b'k';
pub(super) const CLOSE: u8 = b'c';
pub(super) const STREAM: u8 = b's';
/// First byte of a request of HTTP, of which a client has one at a time: `GET`.
const HTTP: u8 = b'G';
const HTTP_HEAD_END: &[u8] = b"\r\n\r\n";
/// As long as the other answers.
static HTTP_ANSWER: [u8; ANSWER_LEN] = http_answer();
/// Bytes that are written at a time by a stream.
const CHUNK_LEN: usize = 256 << 10;
/// How often the request to end is looked at.
const TICK: Duration = Duration::from_millis(20);
const LISTENER: Token = Token(usize::MAX);

/// A server that runs until it is dropped.
pub(super) struct Servers {
    addr: SocketAddr,
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Servers {
    /// Starts it on its host.
    pub(super) fn start(bed: &Bed) -> Result<Servers> {
        let address = SocketAddr::new(bed.servers().ip4(SERVER_LINK).into(), 0);
        let listener = bed.servers().run(|| listen(address)).context("cannot listen")?;
        let addr = listener.local_addr()?;
        let end = Arc::new(AtomicBool::new(false));
        let (stop, on) = (Arc::clone(&end), bed.peers_cpu);
        let serve = move || {
            if cpu::pin(on).and_then(|()| serve(listener, &stop)).is_err() {
                // Clients see connections that are refused, and count them.
                stop.store(true, Ordering::Relaxed);
            }
        };
        let thread = bed.servers().spawn("servers", serve)?;
        Ok(Servers { addr, end, thread: Some(thread) })
    }

    pub(super) fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    debug_assert_ne!(address.ip(), Ipv4Addr::UNSPECIFIED);
    TcpListener::bind(address)
}

const fn http_answer() -> [u8; ANSWER_LEN] {
    const BODY_LEN: usize = 472;
    const HEAD: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 472\r\n\r\n";
    const { assert!(HEAD.len() + BODY_LEN == ANSWER_LEN) }
    let mut answer = [b'm'; ANSWER_LEN];
    let (head, _) = answer.split_at_mut(HEAD.len());
    head.copy_from_slice(HEAD);
    answer
}

struct Connection {
    stream: TcpStream,
    /// Bytes of a request that has not come whole.
    received: usize,
    streams: bool,
}

fn serve(mut listener: TcpListener, end: &AtomicBool) -> io::Result<()> {
    let mut poll = Poll::new()?;
    let mut events = Events::with_capacity(1024);
    poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
    let mut connections: Vec<Option<Connection>> = Vec::new();
    let mut free = VecDeque::new();
    let (mut buffer, chunk) = (vec![0; 64 << 10], vec![7; CHUNK_LEN]);
    while !end.load(Ordering::Relaxed) {
        match poll.poll(&mut events, Some(TICK)) {
            Err(err) if err.kind() == ErrorKind::Interrupted => {}
            result => result?,
        }
        for event in &events {
            if event.token() == LISTENER {
                while let Ok((mut stream, _)) = listener.accept() {
                    let at = free.pop_front().unwrap_or_else(|| {
                        connections.push(None);
                        connections.len() - 1
                    });
                    _ = stream.set_nodelay(true);
                    let interest = Interest::READABLE | Interest::WRITABLE;
                    poll.registry().register(&mut stream, Token(at), interest)?;
                    connections[at] = Some(Connection { stream, received: 0, streams: false });
                }
                continue;
            }
            let at = event.token().0;
            let Some(connection) = &mut connections[at] else { continue };
            if !connection.turn(&mut buffer, &chunk) {
                connections[at] = None;
                free.push_back(at);
            }
        }
    }
    Ok(())
}

impl Connection {
    /// Reads requests and answers them. False if it is over.
    fn turn(&mut self, buffer: &mut [u8], chunk: &[u8]) -> bool {
        loop {
            if self.streams {
                // All bytes are alike, so that it does not matter how many were taken.
                match self.stream.write_all(chunk) {
                    Ok(()) => continue,
                    Err(err) => return err.kind() == ErrorKind::WouldBlock,
                }
            }
            let read = match self.stream.read(buffer) {
                Ok(0) => return false,
                Ok(read) => read,
                Err(err) => return err.kind() == ErrorKind::WouldBlock,
            };
            if buffer[0] == HTTP {
                if buffer[..read].ends_with(HTTP_HEAD_END) && self.stream.write(&HTTP_ANSWER).is_err() {
                    return false;
                }
                continue;
            }
            self.received += read;
            while self.received >= REQUEST_LEN {
                self.received -= REQUEST_LEN;
                self.streams = buffer[0] == STREAM;
                if !self.streams && self.stream.write(&chunk[..ANSWER_LEN]).is_err() || buffer[0] == CLOSE {
                    return false;
                }
            }
            if read < buffer.len() && !self.streams {
                // More raises another event.
                return true;
            }
        }
    }
}
