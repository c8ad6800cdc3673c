//! A thread beside the lanes that serves a listener until its [`Service`] is dropped.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use manylane_sys::epoll::Epoll;

use crate::peer;

/// Epoll tokens. Those of clients count up from [`FIRST_CLIENT`].
pub(crate) const WAKE: u64 = 0;
pub(crate) const LISTENER: u64 = 1;
pub(crate) const FIRST_CLIENT: u64 = 2;

/// Maximum wait for the thread to end: more than it takes to handle a client. A thread that takes
/// longer is left behind, so that none can keep a program from ending.
pub(crate) const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// The running thread. Dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct Service {
    wake: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl Service {
    /// Runs `serve` on a thread called `name`, with an epoll that reports [`LISTENER`], [`WAKE`],
    /// and at most `events` sockets at a time. `serve` has to return once [`Wakeups::is_over`].
    pub(crate) fn start<L: AsFd + Send + 'static>(
        name: &str,
        listener: L,
        events: usize,
        serve: impl FnOnce(Epoll, L, &Wakeups) + Send + 'static,
    ) -> io::Result<Self> {
        let (wake, woken) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        let epoll = Epoll::new(events)?;
        epoll.add(&woken, WAKE)?;
        epoll.add(&listener, LISTENER)?;
        // The other end of `wake` is dropped last, when `serve` has dropped all that it was given.
        let serve = move || serve(epoll, listener, &Wakeups(woken));
        let thread = thread::Builder::new().name(name.into()).spawn(serve)?;
        Ok(Self { wake, thread: Some(thread) })
    }

    /// Wakes the thread.
    pub(crate) fn wake(&self) {
        // If the socket is full, a wake-up is pending already.
        _ = (&self.wake).write(&[0]);
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        _ = self.wake.shutdown(Shutdown::Write);
        let has_ended = peer::wait_for_reply(&self.wake, Instant::now() + EXIT_TIMEOUT).is_ok();
        if let Some(thread) = self.thread.take() {
            if !has_ended {
                let name = thread.thread().name().unwrap_or_default();
                return log::warn!("the thread {name} has not ended yet");
            }
            // A panic there was reported on standard error.
            _ = thread.join();
        }
    }
}

/// The end at which the thread receives its wake-ups.
pub(crate) struct Wakeups(UnixStream);

impl Drop for Wakeups {
    fn drop(&mut self) {
        // A forked child may have a copy of the descriptor.
        _ = self.0.shutdown(Shutdown::Both);
    }
}

impl Wakeups {
    /// Reads all wake-ups; true once the service is being dropped.
    pub(crate) fn is_over(&self) -> bool {
        loop {
            match (&self.0).read(&mut [0; 64]) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(_) => return false,
            }
        }
    }
}
