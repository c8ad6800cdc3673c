//! The metrics page over HTTP, on request, for programs that have no HTTP server of their own.
//!
//! One thread serves all clients without blocking on any of them. Lanes are not affected: only
//! their counters are read. A client has a bounded time to send its request and to read the
//! response. Requests for anything but the page get an error. The number of clients is bounded: a
//! new client replaces the oldest that has not sent its request yet, so idle connections cannot
//! lock others out.
//!
//! `httparse`, the parser of hyper, parses the untrusted input; it has no dependencies. The rest
//! is our own loop with a deadline per client, because no server without an async runtime bounds
//! the cost of a client. Evaluated in November 2026:
//! - `tiny_http` 0.12 (2022; used by `rouille` and exporters): no timeout, a thread for each idle
//!   client, and unlimited headers. Its port stays in use for a while after it is dropped.
//! - `oxhttp` 0.3: a timeout per read, so a client that sends a byte now and then stays for ever,
//!   and eight of them lock all others out. It cannot be stopped.
//! - `touche` 0.0.15 (read, not tried): the same timeout, none for writes, no limit for headers.
//! - `hyper` 1.12 has all the bounds if it is given sockets, a timer and an executor: more code
//!   than here, and twelve crates.

use std::io::{self, ErrorKind as Io, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use manylane_sys::epoll::Epoll;

use crate::error::{Error, Result};
use crate::service::{FIRST_CLIENT, LISTENER, Service, WAKE, Wakeups};
use crate::socket::Handle;

/// Time limit of a client for its request, and for reading the response.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(2);
/// Bound of an idle wait.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum size of a request, and maximum number of its headers.
const REQUEST_LEN_MAX: usize = 8192;
const HEADERS_MAX: usize = 64;
/// Maximum number of clients at a time.
const CLIENTS_MAX: usize = 32;
const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Makes the page.
type Page = Box<dyn Fn() -> String + Send>;

impl Handle {
    /// Serves the counters of the socket at `http://AT/metrics`, in the text format of Prometheus,
    /// as long as the returned value lives. The page is that of
    /// [`write_metrics`](Self::write_metrics). Access is not restricted: any client that reaches
    /// the address can read it.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), manylane::Error> {
    /// let socket = manylane::Socket::bind("127.0.0.1:7777")?;
    /// let _metrics = socket.handle().serve_metrics(([127, 0, 0, 1], 9100).into())?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If the port cannot be bound, or no thread can be created.
    pub fn serve_metrics(&self, at: SocketAddr) -> Result<MetricsServer> {
        let own = self.clone();
        MetricsPort::bind(at)?.serve(move || own.metrics_page())
    }
}

/// A bound port for metrics that does not answer yet: for programs that bind their ports before
/// they do anything else, and for pages of several sockets
/// ([`write_all_metrics`](crate::write_all_metrics)).
#[derive(Debug)]
pub struct MetricsPort {
    listener: TcpListener,
    addr: SocketAddr,
}

impl MetricsPort {
    /// Binds the port; port 0 selects a free one.
    ///
    /// # Errors
    /// If the port cannot be bound.
    pub fn bind(at: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind(at).map_err(|err| failed(at, err))?;
        let at = listener.local_addr().map_err(|err| failed(at, err))?;
        Ok(Self { listener, addr: at })
    }

    /// The address that it is bound to.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Serves the result of `page` for each request. The serving thread has the signal mask of the
    /// calling one.
    ///
    /// # Errors
    /// If no descriptors or no thread can be created.
    pub fn serve(self, page: impl Fn() -> String + Send + 'static) -> Result<MetricsServer> {
        let Self { listener, addr: at } = self;
        let failed = |err| failed(at, err);
        listener.set_nonblocking(true).map_err(failed)?;
        let page: Page = Box::new(page);
        let work = move |watch, listener, wakeups: &Wakeups| serve(watch, &listener, wakeups, &page);
        let service = Service::start("manylane-metrics", listener, CLIENTS_MAX, work).map_err(failed)?;
        Ok(MetricsServer { addr: at, _service: service })
    }
}

/// A server of metrics; dropping it stops it.
#[derive(Debug)]
pub struct MetricsServer {
    addr: SocketAddr,
    _service: Service,
}

impl MetricsServer {
    /// The address that it is bound to.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

fn failed(at: SocketAddr, err: io::Error) -> Error {
    Error::system(format!("serving metrics at {at}"), err)
}

/// Serves clients until the server is dropped.
fn serve(mut watch: Epoll, listener: &TcpListener, wakeups: &Wakeups, page: &Page) {
    // Oldest first.
    let (mut clients, mut next) = (Vec::<Client>::new(), FIRST_CLIENT);
    loop {
        let now = Instant::now();
        let left = clients.iter().map(|client| client.deadline.saturating_duration_since(now)).min();
        let Ok(ready) = watch.wait(left.unwrap_or(IDLE_TIMEOUT)) else { return };
        let ready: Vec<u64> = ready.collect();
        let woken_at = Instant::now();
        for token in ready {
            match token {
                WAKE if wakeups.is_over() => return,
                LISTENER => match listener.accept() {
                    Ok((stream, _)) => {
                        if clients.len() >= CLIENTS_MAX {
                            clients.remove(clients.iter().position(Client::is_reading).unwrap_or(0));
                        }
                        // The client may have disconnected meanwhile.
                        clients.extend(Client::accept(stream, next, &watch));
                        next += 1;
                    }
                    Err(err) if err.kind() == Io::WouldBlock => {}
                    // For example out of descriptors: do not spin.
                    Err(_) => thread::sleep(Duration::from_millis(100)),
                },
                _ => {
                    let Some(at) = clients.iter().position(|client| client.token == token) else { continue };
                    if !clients[at].advance(&watch, page).unwrap_or(false) {
                        clients.remove(at);
                    }
                }
            }
        }
        // After the clients that are ready, so that a client is not charged for the time of
        // others' pages.
        clients.retain(|client| client.deadline > woken_at);
    }
}

/// A connected client.
struct Client {
    token: u64,
    stream: TcpStream,
    /// Deadline of its current state.
    deadline: Instant,
    state: ClientState,
}

enum ClientState {
    /// The part of the request read so far.
    Reading(Vec<u8>),
    /// The response, and the number of bytes written.
    Writing(Vec<u8>, usize),
}

impl Client {
    fn accept(stream: TcpStream, token: u64, watch: &Epoll) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        watch.add(&stream, token)?;
        Ok(Self {
            token,
            stream,
            deadline: Instant::now() + CLIENT_TIMEOUT,
            state: ClientState::Reading(Vec::new()),
        })
    }

    fn is_reading(&self) -> bool {
        matches!(self.state, ClientState::Reading(_))
    }

    /// Proceeds as far as possible without blocking; false when done.
    fn advance(&mut self, watch: &Epoll, page: &Page) -> io::Result<bool> {
        if let ClientState::Reading(said) = &mut self.state {
            let Some(answer) = read_request(&mut self.stream, said, page)? else { return Ok(true) };
            self.state = ClientState::Writing(answer, 0);
            self.deadline = Instant::now() + CLIENT_TIMEOUT;
            watch.set_writable_interest(&self.stream, self.token)?;
        }
        let ClientState::Writing(answer, taken) = &mut self.state else { return Ok(true) };
        while *taken < answer.len() {
            match self.stream.write(&answer[*taken..]) {
                Ok(0) => return Err(Io::WriteZero.into()),
                Ok(len) => *taken += len,
                Err(err) if err.kind() == Io::WouldBlock => return Ok(true),
                Err(err) if err.kind() == Io::Interrupted => {}
                Err(err) => return Err(err),
            }
        }
        Ok(false)
    }
}

/// Reads on, and returns the response as soon as the headers are complete; ignores what follows
/// them. None if more is needed.
fn read_request(stream: &mut TcpStream, said: &mut Vec<u8>, page: &Page) -> io::Result<Option<Vec<u8>>> {
    let mut part = [0; 1024];
    while said.len() <= REQUEST_LEN_MAX {
        match stream.read(&mut part) {
            Ok(0) => return Err(Io::UnexpectedEof.into()),
            Ok(len) => said.extend(&part[..len]),
            Err(err) if err.kind() == Io::WouldBlock => return Ok(None),
            Err(err) if err.kind() == Io::Interrupted => continue,
            Err(err) => return Err(err),
        }
        let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut request = httparse::Request::new(&mut headers);
        match request.parse(said) {
            Ok(httparse::Status::Complete(_)) => {
                let asked = (request.method.unwrap_or_default(), request.path.unwrap_or_default());
                return Ok(Some(build_response(Some(asked), page)));
            }
            Ok(httparse::Status::Partial) => {}
            Err(_) => return Ok(Some(build_response(None, page))),
        }
    }
    Err(Io::InvalidData.into())
}

/// The response to a method and a target, or to invalid HTTP.
fn build_response(request: Option<(&str, &str)>, page: &Page) -> Vec<u8> {
    // Scrapers may add query parameters; the page ignores them.
    let path = |target: &str| target.split('?').next() == Some("/metrics");
    let (status, kind, body) = match request.map(|(method, target)| (method, path(target))) {
        Some(("GET", true)) => ("200 OK", CONTENT_TYPE, page()),
        Some(("GET", false)) => ("404 Not Found", "text/plain", "see /metrics\n".into()),
        Some(_) => ("405 Method Not Allowed\r\nAllow: GET", "text/plain", "GET /metrics\n".into()),
        None => ("400 Bad Request", "text/plain", "GET /metrics\n".into()),
    };
    let len = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len}\r\nConnection: close\r\n\r\n"
    );
    (head + &body).into_bytes()
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;

    use manylane_test_support::wait_for;

    use super::*;

    fn local() -> SocketAddr {
        ([127, 0, 0, 1], 0).into()
    }

    fn request(at: SocketAddr, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(at).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        // An oversized request may be reset before it is sent completely.
        let _ = stream.write_all(request).and_then(|()| stream.shutdown(Shutdown::Write));
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    }

    /// The answer to a request that gets one; again, as long as a side had no CPU for the 2 s that
    /// it has.
    fn ask(at: SocketAddr, text: &[u8]) -> String {
        wait_for("an answer", || request(at, text), |answer| !answer.is_empty())
    }

    #[test]
    fn loopback_only_valid_requests_are_answered() {
        let server = MetricsPort::bind(local()).unwrap().serve(|| "up 1\n".into()).unwrap();
        let at = server.addr();
        let answer = ask(at, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\nup 1\n"), "{answer}");
        assert!(answer.contains("Content-Length: 5\r\n"));
        assert!(ask(at, b"GET /metrics?of=all HTTP/1.1\r\n\r\n").contains("up 1"));
        assert!(ask(at, b"GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
        assert!(ask(at, b"GET /metricsx HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
        assert!(ask(at, b"POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
        assert!(ask(at, b"no HTTP\r\n\r\n").starts_with("HTTP/1.1 400 "));
        for nonsense in [&b""[..], b"GET /metrics", &[b'x'; 20_000], b"\xff\xfe\r\n\r\n"] {
            let answer = request(at, nonsense);
            assert!(!answer.starts_with("HTTP/1.1 200"), "{answer}");
        }
        // The server still answers.
        assert!(ask(at, b"GET /metrics HTTP/1.0\r\n\r\n").contains("up 1"));
        drop(server);
        // A program that another test starts has a copy until it executes.
        wait_for("the port to be free", || MetricsPort::bind(at).is_ok(), |is_free| *is_free);
    }

    #[test]
    fn loopback_partial_and_endless_requests_time_out() {
        let server = MetricsPort::bind(local()).unwrap().serve(|| "up 1\n".into()).unwrap();
        let silent = TcpStream::connect(server.addr()).unwrap();
        let mut half = TcpStream::connect(server.addr()).unwrap();
        half.write_all(b"GET /metrics HTTP/1.1\r\n").unwrap();
        // One deadline for the request, not one for each part.
        let mut slow = TcpStream::connect(server.addr()).unwrap();
        slow.write_all(b"GET /metrics HTTP/1.1\r\na: ").unwrap();
        let drip = thread::spawn(move || {
            (0..600).any(|_| {
                thread::sleep(Duration::from_millis(100));
                slow.write_all(b"b").is_err()
            })
        });
        let mut endless = TcpStream::connect(server.addr()).unwrap();
        endless.write_all(b"GET /metrics HTTP/1.1\r\na: ").unwrap();
        // Far more than the buffers of both ends hold; a server that kept reading would accept it
        // all.
        assert!((0..1 << 10).any(|_| endless.write_all(&[b'x'; 64 << 10]).is_err()));
        let long = format!("GET /metrics HTTP/1.1\r\na: {}\r\n\r\n", "x".repeat(2 * REQUEST_LEN_MAX));
        assert!(!request(server.addr(), long.as_bytes()).contains("up 1"));
        assert!(ask(server.addr(), b"GET /metrics HTTP/1.1\r\n\r\n").contains("up 1"));
        assert!(drip.join().unwrap(), "a byte now and then is enough to stay");
        drop((silent, half));
    }

    #[test]
    fn loopback_clients_that_do_not_read_time_out() {
        // More than the buffers of both ends hold.
        let long = "x".repeat(64 << 20);
        let server = MetricsPort::bind(local()).unwrap().serve(move || long.clone()).unwrap();
        let mut idle = TcpStream::connect(server.addr()).unwrap();
        idle.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        // Other clients are not delayed by it.
        assert!(ask(server.addr(), b"GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
        // The server's end of the connection, by its ports: 01 is established.
        let port = |at: io::Result<SocketAddr>| format!(":{:04X}", at.unwrap().port());
        let (theirs, ours) = (port(idle.peer_addr()), port(idle.local_addr()));
        let is_served = || {
            let table = std::fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
            table.lines().any(|line| {
                let words: Vec<&str> = line.split_ascii_whitespace().collect();
                words[1].ends_with(&theirs) && words[2].ends_with(&ours) && words[3] == "01"
            })
        };
        let start = Instant::now();
        while is_served() {
            assert!(start.elapsed() < Duration::from_secs(120), "it stays for good");
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn loopback_a_slow_page_does_not_delay_other_clients() {
        // Again, as long as a client had no CPU for the 2 s that the server waits for it.
        let mut answers = (0..10).map(|_| answers_beside_a_slow_page());
        let are_right = |[first, second]: &[String; 2]| {
            first.starts_with("HTTP/1.1 404 ") && second.starts_with("HTTP/1.1 200 ")
        };
        assert!(answers.any(|answers| are_right(&answers)), "no two right answers in ten attempts");
    }

    fn answers_beside_a_slow_page() -> [String; 2] {
        let (begun, begins) = std::sync::mpsc::channel();
        let slow = move || {
            _ = begun.send(());
            thread::sleep(CLIENT_TIMEOUT + Duration::from_millis(100));
            "up 1\n".into()
        };
        let server = MetricsPort::bind(local()).unwrap().serve(slow).unwrap();
        // Accepted before the client that asks for the page; it sends its request while the page
        // is made.
        let mut first = TcpStream::connect(server.addr()).unwrap();
        let mut second = TcpStream::connect(server.addr()).unwrap();
        second.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        // Not at all if the second one came too late.
        _ = begins.recv_timeout(3 * CLIENT_TIMEOUT);
        _ = first.write_all(b"GET / HTTP/1.1\r\n\r\n");
        [first, second].map(|mut client| {
            let mut answer = String::new();
            _ = client.read_to_string(&mut answer);
            answer
        })
    }

    #[test]
    fn loopback_silent_clients_do_not_block_others() {
        let server = MetricsPort::bind(local()).unwrap().serve(|| "up 1\n".into()).unwrap();
        let connect = || TcpStream::connect(server.addr()).unwrap();
        let silent: Vec<TcpStream> = (0..4 * CLIENTS_MAX).map(|_| connect()).collect();
        assert!(ask(server.addr(), b"GET /metrics HTTP/1.1\r\n\r\n").contains("up 1"));
        drop(silent);
    }

    #[test]
    fn loopback_a_socket_serves_its_own_page() {
        let socket = crate::Socket::bind("127.0.0.1:0").unwrap();
        let server = socket.handle().serve_metrics(local()).unwrap();
        let answer = ask(server.addr(), b"GET /metrics HTTP/1.1\r\n\r\n");
        let mut page = String::new();
        socket.handle().write_metrics(&mut page).unwrap();
        assert!(answer.ends_with(&page) && page.contains("manylane_lane_delivered_total"), "{answer}");
        let taken = socket.handle().serve_metrics(server.addr()).unwrap_err();
        assert!(taken.chain().contains(&server.addr().to_string()), "{}", taken.chain());
    }
}
