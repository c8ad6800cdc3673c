//! A connection of a lane on kernel sockets, and what is read and written there.

use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;

use manylane::tcp::Reason;
use mio::net::TcpStream;

/// A connection.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) stream: TcpStream,
    pub(crate) is_connecting: bool,
    /// The peer has sent its last byte.
    pub(crate) is_at_end: bool,
    /// The end was told: the next reads go up to it.
    pub(crate) is_read_closed: bool,
    /// A read found nothing more.
    pub(crate) is_drained: bool,
    /// Bytes that the socket did not take. They are added when it is empty, and its memory is given
    /// back once they are written.
    pub(crate) pending: Vec<u8>,
    /// To be shut down, or closed, once they are written.
    pub(crate) shuts_down: bool,
    pub(crate) closes: bool,
}

impl Connection {
    pub(crate) fn new(stream: TcpStream, is_connecting: bool) -> Connection {
        Connection {
            stream,
            is_connecting,
            is_at_end: false,
            is_read_closed: false,
            is_drained: false,
            pending: Vec::new(),
            shuts_down: false,
            closes: false,
        }
    }

    /// Writes what is pending. True if nothing is left.
    pub(crate) fn flush(&mut self) -> io::Result<bool> {
        if !self.pending.is_empty() {
            let written = write(&mut self.stream, &self.pending)?;
            self.pending.drain(..written);
            if !self.pending.is_empty() {
                return Ok(false);
            }
            self.pending = Vec::new();
        }
        if std::mem::take(&mut self.shuts_down) {
            self.stream.shutdown(Shutdown::Write)?;
        }
        Ok(true)
    }

    /// Removes bytes from the socket that were peeked at.
    pub(crate) fn discard(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        self.stream.read_exact(bytes)
    }
}

/// Writes what the socket takes.
pub(crate) fn write(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < bytes.len() {
        match stream.write(&bytes[done..]) {
            Ok(written) => done += written,
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => break,
            Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
            Err(err) => return Err(err),
        }
    }
    Ok(done)
}

pub(crate) fn reason_of(err: &io::Error) -> Reason {
    match err.kind() {
        io::ErrorKind::ConnectionRefused => Reason::Refused,
        io::ErrorKind::TimedOut => Reason::TimedOut,
        io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => Reason::Unreachable,
        _ => Reason::Reset,
    }
}
