//! Load: many flows, each with a few outstanding requests, so that no buffer overflows.

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use crate::sandbox::Sandbox;
use crate::server::{TEST_TIMEOUT, retry_interrupted};

/// Max outstanding requests of a flow. Every receive buffer has room for those of all flows.
const WINDOW_REQUESTS: usize = 3;

/// Size of the load.
#[derive(Clone, Copy)]
pub(crate) struct Load {
    /// Number of flows, each with a source port of its own.
    pub(crate) flows: usize,
    /// Requests per flow.
    pub(crate) each: usize,
}

impl Load {
    /// Enough flows that each of four lanes almost certainly gets some.
    pub(crate) const DEFAULT: Self = Self { flows: 32, each: 250 };

    /// A small load, for receivers to get their lanes.
    pub(crate) const WARM_UP: Self = Self { flows: 32, each: 8 };

    /// Total number of requests.
    pub(crate) fn count(self) -> u64 {
        (self.flows * self.each) as u64
    }

    /// Sends `request(n)` for all n to `addr`, and returns all replies, sorted: one for each
    /// request, from that address, and none after them.
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
                    // A duplicate answer would have arrived by now.
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
