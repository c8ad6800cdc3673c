//! Those who have connected: who they are, and what they ask.
//!
//! A program connects by what is in its environment ([`Ticket`](manylane_sys::lend::Ticket)), and
//! asks at once. Anybody can do so in this network namespace, as often as they like: who says
//! nothing, or what is no question, is sent away, and whoever comes next is heard meanwhile.
//! Queues are for who has the secret, and is of the user that this process runs as, or, if that is
//! root, of one other: the first that asks.

use std::io;
use std::net::UdpSocket;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use manylane_sys::lend::{Fds, Message};
use manylane_sys::local::{self, Process};

use super::Lender;
use super::loan::EPROTO;

/// Connections of which nothing has become yet; the oldest goes for a new one.
const MOST: usize = 64;
/// Connections that are taken at a time.
const AT_ONCE: usize = 16;
/// They have to ask within so long, and are not kept waiting for longer by what another loan has
/// left.
const PATIENCE: Duration = Duration::from_secs(1);
const EACCES: i32 = 13;

/// Who has connected.
pub(super) struct Caller {
    pub(super) token: u64,
    pub(super) end: OwnedFd,
    pub(super) process: Arc<Process>,
}

/// A caller of whom nothing has become yet.
pub(super) struct Visitor {
    caller: Caller,
    since: Instant,
    /// It asks for this one.
    socket: Option<UdpSocket>,
}

impl Caller {
    /// Says that it gets nothing. Who does not listen misses nothing.
    pub(super) fn refuse(&self, errno: i32) {
        _ = Message::Refused(errno).send(self.end.as_fd(), &[]);
    }
}

impl Lender {
    /// Takes connections.
    pub(super) fn let_in(&mut self) {
        for _ in 0..AT_ONCE {
            let end = match local::accept(self.listener.as_fd()) {
                Ok(end) => end,
                Err(err) => {
                    if err.kind() != io::ErrorKind::WouldBlock {
                        // It waits until there are descriptors: not without a pause.
                        std::thread::sleep(super::BUSY);
                    }
                    return;
                }
            };
            let Ok(process) = Process::of(end.as_fd()) else { continue };
            self.last_token += 1;
            let caller = Caller { token: self.last_token, end, process: Arc::new(process) };
            if self.watch.add(&caller.end, caller.token).is_ok() {
                if self.visitors.len() == MOST {
                    self.visitors.remove(0);
                }
                self.visitors.push(Visitor { caller, since: Instant::now(), socket: None });
            }
        }
    }

    pub(super) fn visitor(&self, token: u64) -> Option<usize> {
        self.visitors.iter().position(|visitor| visitor.caller.token == token)
    }

    /// A visitor says something, or is gone. Only one question is one.
    pub(super) fn hear_visitor(&mut self, at: usize) {
        let mut fds = Fds::default();
        let visitor = &mut self.visitors[at];
        match Message::receive(visitor.caller.end.as_fd(), &mut fds) {
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => {}
            Ok(Some(Message::Ask(secret))) if secret == self.ticket.secret && visitor.socket.is_none() => {
                let [Some(socket), None, None, None] = fds else {
                    visitor.caller.refuse(EPROTO);
                    self.visitors.remove(at);
                    return;
                };
                visitor.socket = Some(UdpSocket::from(socket));
            }
            _ => drop(self.visitors.remove(at)),
        }
    }

    /// Lends queues to those who ask, one after the other.
    pub(super) fn answer(&mut self) {
        self.visitors.retain(|visitor| visitor.socket.is_some() || visitor.since.elapsed() < PATIENCE);
        let asks = |visitor: &Visitor| visitor.socket.is_some();
        while let Some(at) = self.visitors.iter().position(asks) {
            let Visitor { caller, since, socket: Some(socket) } = self.visitors.remove(at) else { return };
            let waits = since.elapsed() < PATIENCE;
            let offer = match self.admit(&caller) {
                Ok(()) => self.offer(&caller, &socket, waits),
                Err(err) => Err(err),
            };
            if offer.as_ref().is_err_and(|err| err.kind() == io::ErrorKind::WouldBlock) {
                // Nobody goes first: what is ready is for this one.
                return self.visitors.insert(at, Visitor { caller, since, socket: Some(socket) });
            }
            // Before the answer: whoever has it may close the socket, and find the port free.
            drop(socket);
            match offer {
                Ok(offer) => self.begin(caller, offer),
                Err(err) => caller.refuse(err.raw_os_error().unwrap_or(EPROTO)),
            }
        }
    }

    /// Whether a caller is of a user who may have queues.
    fn admit(&mut self, caller: &Caller) -> io::Result<()> {
        let (uid, own) = (caller.process.peer.uid, local::effective_uid());
        let may = uid == own || own == 0 && *self.other_user.get_or_insert(uid) == uid;
        if !may {
            log::warn!("process {} of user {uid} is lent no queues", caller.process.peer.pid);
            return Err(io::Error::from_raw_os_error(EACCES));
        }
        Ok(())
    }
}
