//! Local connections with processes that are not trusted. Accepting and closing them never blocks.
//!
//! Before Linux 6.16, any process can queue descriptors at such a connection. The kernel closes
//! them with it, and that can block for as long as their sender likes: a TCP socket with
//! `SO_LINGER` and unacknowledged data, a file of a FUSE server that does not answer. So a
//! connection that holds some is left to a thread of its own, and the number of these threads is
//! bounded: at [`CLOSING_MAX`], this process opens no further connections until one has ended.

use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use manylane_sys::unix_socket;

/// Number of connections being closed from which on none is opened. Each is a thread and a
/// descriptor.
const CLOSING_MAX: usize = 64;
/// Stack of such a thread, which makes a few system calls.
const STACK_SIZE: usize = 64 << 10;

/// Connections that threads are closing.
static CLOSING: AtomicUsize = AtomicUsize::new(0);

/// A connection. Dropping it does not block.
#[derive(Debug)]
pub(crate) struct Connection(
    /// Shared with the closing thread. That thread empties the connection first, so the last close
    /// does not block.
    Arc<OwnedFd>,
);

impl Connection {
    /// As [`unix_socket::connect_without_fds`].
    ///
    /// # Errors
    /// `QuotaExceeded` while too many are being closed.
    pub(crate) fn connect(name: &str, timeout: Duration) -> io::Result<Self> {
        check_closing()?;
        Ok(Self(Arc::new(unix_socket::connect_without_fds(name, timeout)?)))
    }

    /// As [`unix_socket::connect_now_without_fds`].
    ///
    /// # Errors
    /// As for [`connect`](Self::connect).
    pub(crate) fn connect_now(name: &str, timeout: Duration) -> io::Result<Self> {
        check_closing()?;
        Ok(Self(Arc::new(unix_socket::connect_now_without_fds(name, timeout)?)))
    }
}

fn check_closing() -> io::Result<()> {
    if CLOSING.load(Ordering::Relaxed) < CLOSING_MAX {
        return Ok(());
    }
    let why = "too many processes have sent descriptors whose close blocks: end these processes first";
    Err(io::Error::new(io::ErrorKind::QuotaExceeded, why))
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if unix_socket::drain(self.as_fd()) {
            return;
        }
        CLOSING.fetch_add(1, Ordering::Relaxed);
        let fd = Arc::clone(&self.0);
        let close = move || {
            unix_socket::drain_blocking(fd.as_fd());
            CLOSING.fetch_sub(1, Ordering::Relaxed);
        };
        let thread = thread::Builder::new().name("manylane-closer".into()).stack_size(STACK_SIZE);
        if thread.spawn(close).is_err() {
            // It stays open for ever, and counted: a blocked caller would be worse.
            mem::forget(Arc::clone(&self.0));
        }
    }
}

/// A local socket that listens.
#[derive(Debug)]
pub(crate) struct Listener(OwnedFd);

impl Listener {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Accepts a connection, whose operations do not block.
    ///
    /// # Errors
    /// `WouldBlock` if there is none; `QuotaExceeded` while too many are being closed.
    pub(crate) fn accept(&self) -> io::Result<Connection> {
        check_closing()?;
        self.accept_pending()
    }

    fn accept_pending(&self) -> io::Result<Connection> {
        let connection = Connection(Arc::new(unix_socket::accept(self.0.as_fd())?));
        unix_socket::enable_peek(connection.as_fd())?;
        Ok(connection)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Closing it would close those that are pending, in this thread.
        unix_socket::refuse_connections(self.as_fd());
        while self.accept_pending().is_ok() {}
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::Write as _;
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;

    use rustix::net::sockopt::set_socket_linger;

    use super::*;

    /// More than anything takes that does not block.
    pub(crate) const BLOCKED: Duration = Duration::from_secs(120);

    /// A TCP socket whose last close blocks until the other end is dropped.
    fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other, _) = listener.accept().unwrap();
        set_socket_linger(&stream, Some(Duration::from_secs(3600))).unwrap();
        stream.set_nonblocking(true).unwrap();
        while stream.write(&[0; 1 << 16]).is_ok() {}
        (stream, other)
    }

    /// A socket that listens and, as before Linux 6.16, takes descriptors.
    pub(crate) fn listen_with_fds(name: &str) -> Listener {
        Listener::new(unix_socket::listen(name).unwrap())
    }

    /// Connects, and does as [`queue_lingering`].
    pub(crate) fn send_lingering(name: &str) -> (OwnedFd, TcpStream) {
        let connection = unix_socket::connect(name, BLOCKED).unwrap();
        let other = queue_lingering(connection.as_fd());
        (connection, other)
    }

    /// Sends the last descriptor of a socket whose close blocks until the result is dropped. No
    /// thread may receive from the connection yet: the caller's own close would be the last.
    pub(crate) fn queue_lingering(connection: BorrowedFd<'_>) -> TcpStream {
        let (stream, other) = lingering();
        unix_socket::send(connection, b"take this", &[stream.as_fd()]).unwrap();
        other
    }

    /// Runs the test `name` in a process of its own, because it uses up what is counted for a
    /// process, or has descriptors that block when they are closed: a program that another test
    /// starts meanwhile would have copies of both ends, and block for ever in closing the first.
    pub(crate) fn run_alone(name: &str, test: impl FnOnce()) {
        if std::env::var_os("MANYLANE_TEST_ALONE").is_some() {
            return test();
        }
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        let output = command.args(["--exact", name]).env("MANYLANE_TEST_ALONE", "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{name}: {text}");
    }

    #[test]
    fn loopback_a_descriptor_that_blocks_blocks_nobody_who_closes() {
        run_alone("connection::tests::loopback_a_descriptor_that_blocks_blocks_nobody_who_closes", || {
            let name = format!("manylane.test.blocking.{}", std::process::id());
            let listener = listen_with_fds(&name);
            let start = Instant::now();
            // One in a connection that was accepted, and one that was not.
            let accepted = send_lingering(&name);
            drop(listener.accept().unwrap());
            let pending = send_lingering(&name);
            drop(listener);
            assert!(start.elapsed() < BLOCKED, "{:?}", start.elapsed());
            assert!(unix_socket::connect(&name, BLOCKED).is_err(), "it is closed");
            for (client, other) in [accepted, pending] {
                let is_blocked = || unix_socket::send(client.as_fd(), b"more", &[]).is_err();
                assert!(is_blocked(), "no more is taken");
                drop(other);
            }
        });
    }

    #[test]
    fn loopback_no_connection_opens_while_too_many_close() {
        run_alone("connection::tests::loopback_no_connection_opens_while_too_many_close", || {
            let name = format!("manylane.test.closing.{}", std::process::id());
            let listener = listen_with_fds(&name);
            let all: Vec<_> = (0..CLOSING_MAX)
                .map(|_| {
                    let sent = send_lingering(&name);
                    drop(listener.accept().unwrap());
                    sent
                })
                .collect();
            let waiting = unix_socket::connect(&name, BLOCKED).unwrap();
            assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::QuotaExceeded);
            let err = Connection::connect(&name, BLOCKED).unwrap_err();
            assert_eq!(err.kind(), io::ErrorKind::QuotaExceeded);
            // As soon as they no longer block, it goes on.
            drop(all);
            let start = Instant::now();
            while listener.accept().is_err() {
                assert!(start.elapsed() < BLOCKED, "they have not been closed");
                thread::sleep(Duration::from_millis(1));
            }
            drop(waiting);
        });
    }
}
