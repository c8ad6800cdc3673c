//! Clients that have connected: their identity, and their requests.
//!
//! A program finds the socket and the secret in its environment
//! ([`LeaseToken`]), connects, and sends its request at once. Any
//! process in this network namespace can connect, as often as it likes. A client that sends
//! nothing or an invalid request is disconnected, and other clients are served meanwhile. Queues
//! are leased only to clients with the secret whose user is that of this process or, if that is
//! root, one other user: the first that sends a request.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use manylane_ipc::lease::{LeaseToken, Message};
use manylane_sys::epoll::Epoll;
use manylane_sys::errno::{EACCES, EPROTO};
use manylane_sys::process;
use manylane_sys::unix_socket::{self, PeerProcess};

use super::connection::{Client, CloserThreads, PendingClient, ReceivedRequest, User};
use super::lifecycle::LeaseTable;

/// Maximum number of pending connections; the oldest is dropped for a new one.
const PENDING_MAX: usize = 64;
/// The part of this process's descriptors that connections without a lease may use, each with two:
/// one in this number.
const DESCRIPTORS_PART: usize = 4;
/// Maximum number of connections accepted at a time.
const ACCEPT_BATCH_MAX: usize = 16;
/// Delay before the next attempt to accept, while descriptors are lacking.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(5);
/// Time limit for the request, and for waiting until the queues of an earlier lease are free.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of events per wait.
const EVENTS_MAX: usize = 32;
/// Token of the listener; clients have tokens of their own.
pub(super) const LISTENER: u64 = 0;
/// Token of requests that were received.
pub(super) const RECEIVED: u64 = 1;

/// Clients without a lease, and the socket to which they connect.
pub(super) struct Clients {
    pub(super) lease_token: LeaseToken,
    listener: OwnedFd,
    /// Events of the listener and of all clients, also of those with a lease.
    pub(super) epoll: Epoll,
    closers: CloserThreads,
    pub(super) pending: Vec<PendingClient>,
    /// The user beside root that may have queues.
    other_user: Option<u32>,
    pub(super) last_token: u64,
}

impl Clients {
    /// Opens the socket.
    pub(super) fn listen() -> io::Result<Self> {
        let lease_token = LeaseToken::new()?;
        let listener = lease_token.listen()?;
        let epoll = Epoll::new(EVENTS_MAX)?;
        epoll.add(&listener, LISTENER)?;
        let closers = CloserThreads::start(&epoll, RECEIVED)?;
        let (pending, other_user, last_token) = (Vec::new(), None, RECEIVED);
        Ok(Self { lease_token, listener, epoll, closers, pending, other_user, last_token })
    }

    /// Accepts connections, as many as leave descriptors for everything else.
    pub(super) fn accept(&mut self, lease_count: usize) {
        let count_max = process::descriptors_max() / 2 / DESCRIPTORS_PART;
        for _ in 0..ACCEPT_BATCH_MAX {
            let is_full = |clients: &Self| clients.closers.open_count() - lease_count >= count_max;
            if is_full(self) {
                let oldest = self.pending.iter().position(|pending| pending.socket.is_none());
                oldest.map(|at| self.pending.remove(at));
                // It counts until a thread has closed it.
                if is_full(self) {
                    std::thread::sleep(ACCEPT_RETRY_DELAY);
                    return;
                }
            }
            let end = match unix_socket::accept(self.listener.as_fd()) {
                Ok(end) => end,
                Err(err) => {
                    if err.kind() != io::ErrorKind::WouldBlock {
                        // It stays queued, probably for lack of descriptors: do not spin.
                        std::thread::sleep(ACCEPT_RETRY_DELAY);
                    }
                    return;
                }
            };
            let connection = self.closers.connection(end);
            if unix_socket::enable_peek(connection.as_fd()).is_err() {
                continue;
            }
            let Ok(process) = PeerProcess::from_socket(connection.as_fd()) else { continue };
            self.last_token += 1;
            let client = Client { token: self.last_token, connection, process: Arc::new(process) };
            self.add_pending(PendingClient { client, since: Instant::now(), socket: None });
        }
    }

    fn add_pending(&mut self, pending: PendingClient) {
        if self.epoll.add(&pending.client.connection, pending.client.token).is_ok() {
            if self.pending.len() == PENDING_MAX {
                self.pending.remove(0);
            }
            self.pending.push(pending);
        }
    }

    pub(super) fn find_pending(&self, token: u64) -> Option<usize> {
        self.pending.iter().position(|pending| pending.client.token == token)
    }

    /// Handles a message of a pending client, or the end of its connection. Only one request is
    /// valid.
    pub(super) fn handle_pending(&mut self, at: usize) {
        let pending = &self.pending[at];
        let request = match Message::peek(pending.client.connection.as_fd()) {
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => return,
            request => request.ok().flatten(),
        };
        let has_requested = pending.socket.is_some();
        let PendingClient { client, .. } = self.pending.remove(at);
        match request {
            Some((Message::Request(secret), _)) if secret == self.lease_token.secret && !has_requested => {
                match self.authorize(&client) {
                    Ok(user) => self.closers.receive(client, user),
                    Err(errno) => self.closers.refuse(client, errno),
                }
            }
            _ => drop(client),
        }
    }

    /// Makes clients whose sockets were received pending again.
    pub(super) fn take_received(&mut self) {
        let received: Vec<_> = self.closers.received().collect();
        for ReceivedRequest { client, socket } in received {
            self.add_pending(PendingClient { client, since: Instant::now(), socket: Some(socket) });
        }
    }

    /// Leases queues to the clients with a request, in order.
    pub(super) fn grant_pending(&mut self, table: &mut LeaseTable) {
        // A request that is queued is handled next, however late: this thread may have had no CPU.
        let is_silent = |pending: &PendingClient| {
            let request = Message::peek(pending.client.connection.as_fd());
            request.is_err_and(|err| err.kind() == io::ErrorKind::WouldBlock)
        };
        self.pending.retain(|pending| {
            pending.socket.is_some() || pending.since.elapsed() < REQUEST_TIMEOUT || !is_silent(pending)
        });
        let has_requested = |pending: &PendingClient| pending.socket.is_some();
        while let Some(at) = self.pending.iter().position(has_requested) {
            let PendingClient { client, since, socket: Some(socket) } = self.pending.remove(at) else {
                return;
            };
            let waits = since.elapsed() < REQUEST_TIMEOUT;
            let offer = table.offer(&client, socket, waits);
            if offer.as_ref().is_err_and(|err| err.kind() == io::ErrorKind::WouldBlock) {
                // In order: queues that become free are for this client.
                return self.pending.insert(at, PendingClient { client, since, socket: Some(socket) });
            }
            match offer {
                Ok(offer) => table.start(client, offer),
                Err(err) => client.refuse(err.raw_os_error().unwrap_or(EPROTO)),
            }
        }
    }

    /// The user of a client that may have queues; otherwise the error to refuse it with.
    fn authorize(&mut self, client: &Client) -> Result<User, i32> {
        let (peer, own) = (client.process.cred, unix_socket::effective_uid());
        // A client whose user is ambiguous must not take the place of the other user either.
        if peer.is_user(peer.uid) {
            if peer.uid == own {
                return Ok(User::Own);
            }
            if own == 0 && *self.other_user.get_or_insert(peer.uid) == peer.uid {
                return Ok(User::Other);
            }
        }
        log::warn!("refused queues to process {} of user {}", peer.pid, peer.uid);
        Err(EACCES)
    }
}
