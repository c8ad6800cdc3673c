//! A server with one lane that is busy until the test releases it.

use std::sync::mpsc;

use manylane::{Batch, LaneId, Outbox, Socket};

use crate::{Serving, TEST_TIMEOUT};

/// A server with one lane that stays in its first call until it is released, and a record of what
/// all its lanes handle.
pub struct SlowServer<T> {
    /// The server.
    pub serving: Serving,
    /// The slow lane is in its closure.
    pub entered: mpsc::Receiver<()>,
    /// Ends the wait of the slow lane, when dropped.
    pub release: mpsc::Sender<()>,
    /// Lane and `read_payload` of each datagram, when it has been handled.
    pub handled: mpsc::Receiver<(LaneId, T)>,
}

impl<T: Send + 'static> SlowServer<T> {
    /// Serves `socket`, whose lane `slow` is slow.
    pub fn start(socket: Socket, slow: LaneId, read_payload: fn(&[u8]) -> T) -> Self {
        let (enter, entered) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        let (tell, handled) = mpsc::channel();
        let mut released = Some(released);
        let serving = Serving::start_with(socket, move |info| {
            let (enter, tell) = (enter.clone(), tell.clone());
            let mut released = if info.id == slow { released.take() } else { None };
            move |batch: Batch<'_>, _: &mut Outbox<'_>| {
                if let Some(released) = released.take() {
                    enter.send(()).unwrap();
                    let _ = released.recv_timeout(TEST_TIMEOUT);
                }
                batch.for_each(|datagram| tell.send((info.id, read_payload(datagram.payload()))).unwrap());
            }
        });
        Self { serving, entered, release, handled }
    }
}
