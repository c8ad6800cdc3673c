//! Those who have connected: who they are, and what they ask.
//!
//! A program connects by what is in its environment
//! ([`LeaseToken`](manylane_sys::lease::LeaseToken)), and asks at once. Anybody can do so in this
//! network namespace, as often as they like: who says nothing, or what is no question, is sent
//! away, and whoever comes next is heard meanwhile. Queues are for who has the secret, and is of
//! the user that this process runs as, or, if that is root, of one other: the first that asks.

use std::io;
use std::net::UdpSocket;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use manylane_sys::lease::{Fds, Message};
use manylane_sys::unix_socket::{self, PeerProcess};

use super::Lessor;
use crate::error::EPROTO;

/// Connections of which nothing has become yet; the oldest goes for a new one.
const PENDING_MAX: usize = 64;
/// Connections that are taken at a time.
const ACCEPT_BATCH_MAX: usize = 16;
/// They have to ask within so long, and are not kept waiting for longer by what another lease has
/// left.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
const EACCES: i32 = 13;

/// Who has connected.
pub(super) struct Client {
    pub(super) token: u64,
    pub(super) connection: OwnedFd,
    pub(super) process: Arc<PeerProcess>,
}

/// A caller of whom nothing has become yet.
pub(super) struct PendingClient {
    client: Client,
    since: Instant,
    /// It asks for this one.
    socket: Option<UdpSocket>,
}

impl Client {
    /// Says that it gets nothing. Who does not listen misses nothing.
    pub(super) fn refuse(&self, errno: i32) {
        _ = Message::Refused(errno).send(self.connection.as_fd(), &[]);
    }
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
            let Ok(process) = PeerProcess::from_socket(end.as_fd()) else { continue };
            self.last_token += 1;
            let caller = Client { token: self.last_token, connection: end, process: Arc::new(process) };
            if self.epoll.add(&caller.connection, caller.token).is_ok() {
                if self.pending.len() == PENDING_MAX {
                    self.pending.remove(0);
                }
                self.pending.push(PendingClient { client: caller, since: Instant::now(), socket: None });
            }
        }
    }

    pub(super) fn find_pending(&self, token: u64) -> Option<usize> {
        self.pending.iter().position(|visitor| visitor.client.token == token)
    }

    /// A visitor says something, or is gone. Only one question is one.
    pub(super) fn handle_pending(&mut self, at: usize) {
        let mut fds = Fds::default();
        let visitor = &mut self.pending[at];
        match Message::receive(visitor.client.connection.as_fd(), &mut fds) {
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => {}
            Ok(Some(Message::Request(secret)))
                if secret == self.lease_token.secret && visitor.socket.is_none() =>
            {
                let [Some(socket), None, None, None] = fds else {
                    visitor.client.refuse(EPROTO);
                    self.pending.remove(at);
                    return;
                };
                visitor.socket = Some(UdpSocket::from(socket));
            }
            _ => drop(self.pending.remove(at)),
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
            let offer = match self.authorize(&caller) {
                Ok(()) => self.offer(&caller, &socket, waits),
                Err(err) => Err(err),
            };
            if offer.as_ref().is_err_and(|err| err.kind() == io::ErrorKind::WouldBlock) {
                // Nobody goes first: what is ready is for this one.
                return self
                    .pending
                    .insert(at, PendingClient { client: caller, since, socket: Some(socket) });
            }
            // Before the answer: whoever has it may close the socket, and find the port free.
            drop(socket);
            match offer {
                Ok(offer) => self.start(caller, offer),
                Err(err) => caller.refuse(err.raw_os_error().unwrap_or(EPROTO)),
            }
        }
    }

    /// Whether a caller is of a user who may have queues.
    fn authorize(&mut self, caller: &Client) -> io::Result<()> {
        let (uid, own) = (caller.process.cred.uid, unix_socket::effective_uid());
        let may = uid == own || own == 0 && *self.other_user.get_or_insert(uid) == uid;
        if !may {
            log::warn!("process {} of user {uid} gets no queues", caller.process.cred.pid);
            return Err(io::Error::from_raw_os_error(EACCES));
        }
        Ok(())
    }
}
