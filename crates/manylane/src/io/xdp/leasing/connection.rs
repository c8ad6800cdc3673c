//! Connections of clients, and the threads that receive and close descriptors.
//!
//! Closing a descriptor can block for as long as its sender likes: a TCP socket with `SO_LINGER`
//! and unacknowledged data, a file of a FUSE server that does not answer. So can a receive, where
//! there is no room for all descriptors, and the close of a connection with descriptors in unread
//! messages. The lessor's thread does none of these: it reads messages without their descriptors,
//! and leaves the rest to three threads, one for each group of users.
//!
//! | stage | thread | when that thread is blocked |
//! |---|---|---|
//! | a message is peeked at ([`Message::peek`]) | the lessor's | |
//! | the socket of an authorized request is received, looked at and closed, before the answer | that user's | requests of that user wait, until their clients give up |
//! | that of any other request is closed, before the refusal | one for all users that get no queues | the same |
//! | the end of a connection without unread descriptors ([`unix_socket::drain`]) | the lessor's | |
//! | the end of one with unread descriptors | its user's; one for all users that get no queues | it stays open, with the one descriptor of this process that it is |
//!
//! So a blocked thread stops only the users that it is for. What is left is the number of open
//! files: each connection that waits to be closed counts. So only a part of the limit of this
//! process (`RLIMIT_NOFILE`) is for connections without a lease. When that is used up, none is
//! accepted, and the other parts of this process still have descriptors.

use std::io::{self, PipeReader, PipeWriter, Read as _, Write as _};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Instant;

use manylane_ipc::lease::{Fds, Message};
use manylane_sys::epoll::{Epoll, EpollHandle};
use manylane_sys::errno::EPROTO;
use manylane_sys::sock::{self, SocketInfo};
use manylane_sys::unix_socket::{self, PeerProcess};

/// Groups of users, each with a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum User {
    /// The user of this process.
    Own,
    /// The one other user that gets queues.
    Other,
    /// All users that get none.
    Stranger,
}

/// A connection that a client has made. Dropping it does not block.
pub(super) struct Connection {
    /// Shared with the closing thread. That thread empties the connection first, so the last close
    /// does not block.
    fd: Arc<CountedFd>,
    epoll: Arc<EpollHandle>,
    closer: Sender<Job>,
}

/// The descriptor of a connection, which counts as open until it is closed.
struct CountedFd {
    fd: OwnedFd,
    /// One reference for each that is open.
    _open: Arc<()>,
}

/// A connected process.
pub(super) struct Client {
    pub(super) token: u64,
    pub(super) connection: Connection,
    pub(super) process: Arc<PeerProcess>,
}

impl Client {
    /// Sends a refusal. It does not matter whether it arrives.
    pub(super) fn refuse(&self, errno: i32) {
        _ = Message::Refused(errno).send(self.connection.as_fd(), &[]);
    }
}

/// A job for one of the threads.
enum Job {
    /// Receive the request that is queued.
    Receive(Client),
    /// Discard the request that is queued, and refuse it with this error.
    Refuse(Client, i32),
    /// Discard all that is queued, and close the connection.
    Close(Arc<CountedFd>),
}

/// A client without a lease yet.
pub(super) struct PendingClient {
    pub(super) client: Client,
    /// When it connected, or when its request was received.
    pub(super) since: Instant,
    /// The socket that it requests queues for.
    pub(super) socket: Option<RequestedSocket>,
}

/// A request whose socket has been received.
pub(super) struct ReceivedRequest {
    pub(super) client: Client,
    pub(super) socket: RequestedSocket,
}

/// A socket that queues are requested for, as it was when the request was received.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestedSocket {
    pub(super) info: SocketInfo,
    pub(super) addr: SocketAddr,
}

/// The threads that receive requests and close connections, one for each class of users.
pub(super) struct CloserThreads {
    epoll: Arc<EpollHandle>,
    open: Arc<()>,
    jobs: [Sender<Job>; 3],
    received: Receiver<ReceivedRequest>,
    /// Readable when a request has been received.
    wakeup: PipeReader,
}

impl CloserThreads {
    /// Starts the threads; `epoll` reports `token` when a request has been received.
    pub(super) fn start(epoll: &Epoll, token: u64) -> io::Result<Self> {
        let (to_lessor, received) = mpsc::channel();
        let (wakeup, writer) = io::pipe()?;
        epoll.add(&wakeup, token)?;
        let start = || {
            let (jobs, queued) = mpsc::channel();
            let (to_lessor, writer) = (to_lessor.clone(), writer.try_clone()?);
            let work = move || run(&queued, &to_lessor, &writer);
            thread::Builder::new().name("manylane-closer".into()).spawn(work)?;
            io::Result::Ok(jobs)
        };
        let jobs = [start()?, start()?, start()?];
        Ok(Self { epoll: Arc::new(epoll.handle()?), open: Arc::default(), jobs, received, wakeup })
    }

    /// A connection that was just accepted.
    pub(super) fn connection(&self, fd: OwnedFd) -> Connection {
        let closer = self.jobs[User::Stranger as usize].clone();
        let fd = Arc::new(CountedFd { fd, _open: Arc::clone(&self.open) });
        Connection { fd, epoll: Arc::clone(&self.epoll), closer }
    }

    /// Number of connections that are open.
    pub(super) fn open_count(&self) -> usize {
        Arc::strong_count(&self.open) - 1
    }

    /// Passes the request of a client to a thread that receives it. A client with an invalid
    /// request is refused.
    pub(super) fn receive(&self, mut client: Client, user: User) {
        _ = self.epoll.remove(&client.connection);
        let jobs = &self.jobs[user as usize];
        client.connection.closer = jobs.clone();
        _ = jobs.send(Job::Receive(client));
    }

    /// Passes the client to a thread that discards its request and refuses it. The client's socket
    /// is closed before the refusal is sent, so that the client can close its own and find the
    /// port free.
    pub(super) fn refuse(&self, client: Client, errno: i32) {
        _ = self.epoll.remove(&client.connection);
        _ = self.jobs[User::Stranger as usize].send(Job::Refuse(client, errno));
    }

    /// Requests that were received.
    pub(super) fn received(&self) -> impl Iterator<Item = ReceivedRequest> {
        // One byte per request; one wakeup may read several.
        _ = (&self.wakeup).read(&mut [0; 64]);
        self.received.try_iter()
    }
}

impl AsFd for CountedFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.fd.as_fd()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        _ = self.epoll.remove(&self.fd);
        if !unix_socket::drain(self.as_fd()) {
            _ = self.closer.send(Job::Close(Arc::clone(&self.fd)));
        }
    }
}

/// Main function of a thread. Ends when the lessor and all its connections are gone.
fn run(jobs: &Receiver<Job>, to_lessor: &Sender<ReceivedRequest>, wakeup: &PipeWriter) {
    for job in jobs {
        match job {
            Job::Receive(client) => match receive_socket(client.connection.as_fd()) {
                Ok(socket) => {
                    if to_lessor.send(ReceivedRequest { client, socket }).is_ok() {
                        _ = { wakeup }.write(&[0]);
                    }
                }
                Err(err) => client.refuse(err.raw_os_error().unwrap_or(EPROTO)),
            },
            Job::Refuse(client, errno) => {
                _ = unix_socket::discard(client.connection.as_fd());
                client.refuse(errno);
            }
            Job::Close(fd) => unix_socket::drain_blocking(fd.as_fd()),
        }
    }
}

fn receive_socket(from: BorrowedFd<'_>) -> io::Result<RequestedSocket> {
    let mut fds = Fds::default();
    Message::receive(from, &mut fds)?;
    let [Some(socket), None, None, None] = fds else { return Err(io::Error::from_raw_os_error(EPROTO)) };
    Ok(RequestedSocket { info: sock::socket_info(socket.as_fd())?, addr: sock::local_addr(socket.as_fd())? })
}
