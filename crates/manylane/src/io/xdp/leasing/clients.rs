//! Those who have connected: who they are, and what they ask.
//!
//! A program connects by what is in its environment
//! ([`LeaseToken`](manylane_sys::lease::LeaseToken)), and asks at once. Anybody can do so in this
//! network namespace, as often as they like: who says nothing, or what is no question, is sent
//! away, and whoever comes next is heard meanwhile. Queues are for who has the secret, and is of
//! the user that this process runs as, or, if that is root, of one other: the first that asks.

use std::io;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use manylane_sys::lease::Message;
use manylane_sys::unix_socket::{self, PeerProcess};

use super::Lessor;
use super::connection::{Client, ReceivedRequest, RequestedSocket, User};
use crate::error::EPROTO;

/// Connections of which nothing has become yet; the oldest goes for a new one.
const PENDING_MAX: usize = 64;
/// Connections that are taken at a time.
const ACCEPT_BATCH_MAX: usize = 16;
/// They have to ask within so long, and are not kept waiting for longer by what another lease has
/// left.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
const EACCES: i32 = 13;

/// A caller of whom nothing has become yet.
pub(super) struct PendingClient {
    client: Client,
    since: Instant,
    /// It asks for this one.
    socket: Option<RequestedSocket>,
}

impl Lessor {
    /// Takes connections.
    pub(super) fn accept_clients(&mut self) {
        for _ in 0..ACCEPT_BATCH_MAX {
            let end = match unix_socket::accept(self.listener.as_fd()) {
                Ok(end) => end,
                Err(err) => {
                    if err.kind() != io::ErrorKind::WouldBlock {
                        // It waits until there are descriptors: not without a pause.
                        std::thread::sleep(super::BUSY_INTERVAL);
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
        self.pending.iter().position(|visitor| visitor.client.token == token)
    }

    /// Handles a message of a pending client, or the end of its connection. Only one request is
    /// valid.
    pub(super) fn handle_pending(&mut self, at: usize) {
        let visitor = &self.pending[at];
        let said = match Message::peek(visitor.client.connection.as_fd()) {
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => return,
            said => said.ok().flatten(),
        };
        let has_requested = visitor.socket.is_some();
        let PendingClient { client, since, .. } = self.pending.remove(at);
        match said {
            Some((Message::Request(secret), _)) if secret == self.lease_token.secret && !has_requested => {
                match self.authorize(&client) {
                    Ok(user) => self.closers.receive(client, user, since),
                    Err(errno) => self.closers.refuse(client, errno),
                }
            }
            _ => drop(client),
        }
    }

    /// Makes clients pending again whose sockets have been received.
    pub(super) fn take_received(&mut self) {
        let received: Vec<_> = self.closers.received().collect();
        for ReceivedRequest { client, since, socket } in received {
            self.add_pending(PendingClient { client, since, socket: Some(socket) });
        }
    }

    /// Lends queues to those who ask, one after the other.
    pub(super) fn grant_pending(&mut self) {
        self.pending.retain(|visitor| visitor.socket.is_some() || visitor.since.elapsed() < REQUEST_TIMEOUT);
        let asks = |visitor: &PendingClient| visitor.socket.is_some();
        while let Some(at) = self.pending.iter().position(asks) {
            let PendingClient { client: caller, since, socket: Some(socket) } = self.pending.remove(at)
            else {
                return;
            };
            let waits = since.elapsed() < REQUEST_TIMEOUT;
            let offer = self.offer(&caller, socket, waits);
            if offer.as_ref().is_err_and(|err| err.kind() == io::ErrorKind::WouldBlock) {
                // Nobody goes first: what is ready is for this one.
                return self
                    .pending
                    .insert(at, PendingClient { client: caller, since, socket: Some(socket) });
            }
            match offer {
                Ok(offer) => self.start(caller, offer),
                Err(err) => caller.refuse(err.raw_os_error().unwrap_or(EPROTO)),
            }
        }
    }

    /// The user of a client, if it may have queues; the error that it is refused with, if not.
    fn authorize(&mut self, client: &Client) -> Result<User, i32> {
        let (peer, own) = (client.process.cred, unix_socket::effective_uid());
        // One that may be anybody takes nobody's place, either.
        if peer.is_user(peer.uid) {
            if peer.uid == own {
                return Ok(User::Own);
            }
            if own == 0 && *self.other_user.get_or_insert(peer.uid) == peer.uid {
                return Ok(User::Other);
            }
        }
        log::warn!("process {} of user {} gets no queues", peer.pid, peer.uid);
        Err(EACCES)
    }
}
