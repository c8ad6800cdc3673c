//! A socket that serves in a thread of its own during a test.

use std::net::SocketAddr;
use std::sync::mpsc::{self, Receiver};
use std::thread;

use manylane::{Batch, Counters, Error, Handle, LaneInfo, Outbox, Socket};

use crate::{Client, TEST_TIMEOUT, record_counters};

/// A running [`Socket::serve`].
pub struct Serving {
    /// Control over the socket.
    pub handle: Handle,
    /// Its address.
    pub addr: SocketAddr,
    outcome: Receiver<Result<Counters, Error>>,
}

impl Serving {
    /// Serves with one closure for all lanes.
    pub fn start<F>(socket: Socket, handler: F) -> Self
    where
        F: for<'a> FnMut(Batch<'a>, &mut Outbox<'a>) + Clone + Send + 'static,
    {
        Self::start_with(socket, move |_| handler.clone())
    }

    /// Serves with a closure made for each lane.
    pub fn start_with<M, F>(socket: Socket, make: M) -> Self
    where
        M: FnMut(LaneInfo) -> F + Send + 'static,
        F: for<'a> FnMut(Batch<'a>, &mut Outbox<'a>) + Send,
    {
        let (handle, addr) = (socket.handle(), socket.local_addr());
        let (tell, outcome) = mpsc::channel();
        // Not joined: if it hangs, the test must report that instead of hanging, too.
        thread::spawn(move || drop(tell.send(socket.serve_with(make))));
        Self { handle, addr, outcome }
    }

    /// Serves echo.
    #[must_use]
    pub fn echo(socket: Socket) -> Self {
        let serving = Self::start(socket, |batch, out| {
            for datagram in batch {
                out.reply(&datagram, datagram.payload());
            }
        });
        // Control calls need a running server.
        Client::to(serving.addr).ping();
        serving
    }

    /// The result of `serve`, which ended by itself.
    ///
    /// # Panics
    /// If it does not return.
    pub fn outcome(self) -> Result<Counters, Error> {
        let outcome = self.outcome.recv_timeout(TEST_TIMEOUT).expect("serve returns");
        record_counters(&self.handle.counters().total());
        outcome
    }

    /// Stops the socket and returns the result of `serve`.
    ///
    /// # Panics
    /// If it does not return.
    pub fn stop(self) -> Result<Counters, Error> {
        self.handle.stop();
        self.outcome()
    }
}
