//! Load: many flows, each with a few requests on their way at a time, so that nothing has to get
//! lost.

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use crate::sandbox::Sandbox;
use crate::server::{TEST_TIMEOUT, retry_interrupted};

/// Requests of a flow that wait for an answer at a time. All of them together fit every receive
/// buffer.
const WINDOW_REQUESTS: usize = 3;

/// What to ask.
#[derive(Clone, Copy)]
pub(crate) struct Load {
    /// Sources, each with a port of its own.
    pub(crate) flows: usize,
    /// Requests of each.
    pub(crate) each: usize,
}

impl Load {
    /// Enough flows to give each of four lanes some, to all probability.
    pub(crate) const DEFAULT: Self = Self { flows: 32, each: 250 };

    /// For receivers to get their lanes by.
    pub(crate) const WARM_UP: Self = Self { flows: 32, each: 8 };

    /// Requests in all.
    pub(crate) fn count(self) -> u64 {
        (self.flows * self.each) as u64
    }

    /// Asks `request(n)` for all n at `addr`, and returns all replies, sorted: as many as requests,
    /// from that address, and nothing behind them.
    pub(crate) fn request_all(
        self,
        sandbox: &Sandbox,
        addr: SocketAddr,
        request: impl Fn(usize) -> Vec<u8> + Sync,
    ) -> Vec<Vec<u8>> {
        let from = if addr.ip().is_loopback() { "127.0.0.1:0" } else { "0.0.0.0:0" };
        let sockets: Vec<_> = (0..self.flows).map(|_| sandbox.socket_at(from)).collect();
        let mut replies: Vec<Vec<u8>> = thread::scope(|scope| {
            let flows = sockets.iter().enumerate().map(|(flow, socket)| {
                let request = &request;
                scope.spawn(move || {
                    socket.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
                    let mut replies = Vec::new();
                    let mut buffer = [0; 4096];
                    for at in 0..self.each + WINDOW_REQUESTS {
                        if at < self.each {
                            socket.send_to(&request(flow * self.each + at), addr).unwrap();
                        }
                        if at >= WINDOW_REQUESTS {
                            let received = retry_interrupted(|| socket.recv_from(&mut buffer));
                            let (len, peer) = received.unwrap_or_else(|err| {
                                panic!(
                                    "flow {flow} waits for answer {} of {}: {err}",
                                    replies.len(),
                                    self.each
                                )
                            });
                            assert_eq!(peer, addr);
                            replies.push(buffer[..len].to_vec());
                        }
                    }
                    // An answer that came twice would be here by now.
                    socket.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
                    assert!(socket.recv_from(&mut buffer).is_err(), "flow {flow} has one more answer");
                    replies
                })
            });
            let flows: Vec<_> = flows.collect();
            flows.into_iter().flat_map(|flow| flow.join().unwrap()).collect()
        });
        replies.sort();
        replies
    }
}
