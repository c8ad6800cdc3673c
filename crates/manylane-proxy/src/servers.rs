//! The servers behind a proxy: which are up, and how many connections they have. All lanes share
//! them.
//!
//! Servers of TCP are checked by connecting. UDP has no connections: what sessions hear from a
//! server takes its place.

use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Checks in a row that have to fail before a server is down: one may be lost by accident. Of UDP,
/// datagrams in a row that it refuses.
const FAILURES_MAX: u32 = 2;

/// A server.
#[derive(Debug)]
pub struct Server {
    /// Its address.
    pub address: SocketAddr,
    is_up: AtomicBool,
    /// Checks that have failed in a row.
    failures: AtomicU32,
    connections: AtomicU32,
}

impl Server {
    fn new(address: SocketAddr) -> Server {
        let (failures, connections) = (AtomicU32::new(0), AtomicU32::new(0));
        Server { address, is_up: AtomicBool::new(true), failures, connections }
    }

    /// True if it passed the last checks, or was not checked yet.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.is_up.load(Ordering::Relaxed)
    }

    /// Connections that it has, those included that are being made.
    #[must_use]
    pub fn connections(&self) -> u32 {
        self.connections.load(Ordering::Relaxed)
    }

    pub(crate) fn add_connection(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn remove_connection(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The servers of a proxy.
#[derive(Debug, Default)]
pub struct Servers {
    servers: Vec<Arc<Server>>,
    /// Counts changes of what is up.
    version: AtomicU64,
}

impl Servers {
    /// Servers at these addresses. Those that were among `before` stay what they are.
    #[must_use]
    pub fn new(addresses: &[SocketAddr], before: &Servers) -> Servers {
        let server = |address: &SocketAddr| {
            let known = before.servers.iter().find(|server| server.address == *address);
            known.map_or_else(|| Arc::new(Server::new(*address)), Arc::clone)
        };
        Servers { servers: addresses.iter().map(server).collect(), version: AtomicU64::new(1) }
    }

    /// All of them, in the order in which they were given.
    #[must_use]
    pub fn all(&self) -> &[Arc<Server>] {
        &self.servers
    }

    /// Changes whenever a server goes up or down.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Tries once to connect to each server, for at most `timeout`, by sockets of the kernel: a
    /// server is down after two failures in a row, and up after one success.
    pub fn check(&self, timeout: Duration) {
        for server in &self.servers {
            let is_there = TcpStream::connect_timeout(&server.address, timeout).is_ok();
            let failures = if is_there { 0 } else { server.failures.load(Ordering::Relaxed) + 1 };
            server.failures.store(failures, Ordering::Relaxed);
            self.set_up(server, failures < FAILURES_MAX && (is_there || server.is_up()));
        }
    }

    /// Puts servers back that have refused datagrams. One more takes such a server out again.
    pub fn readmit(&self) {
        self.servers.iter().for_each(|server| self.set_up(server, true));
    }

    /// A server has refused a datagram: nothing is bound to its port.
    pub(crate) fn record_refusal(&self, server: &Server) {
        if server.failures.fetch_add(1, Ordering::Relaxed) + 1 >= FAILURES_MAX {
            self.set_up(server, false);
        }
    }

    /// A server has answered. Writes nothing if it has refused nothing since its last answer.
    #[inline]
    pub(crate) fn record_answer(&self, server: &Server) {
        if server.failures.load(Ordering::Relaxed) > 0 {
            server.failures.store(0, Ordering::Relaxed);
            self.set_up(server, true);
        }
    }

    fn set_up(&self, server: &Server, is_up: bool) {
        if server.is_up.swap(is_up, Ordering::Relaxed) != is_up {
            log::warn!("server {} is {}", server.address, if is_up { "up" } else { "down" });
            self.version.fetch_add(1, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_server_is_down_after_two_failures_and_up_again_at_once() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let servers = Servers::new(&[address], &Servers::default());
        let check = || {
            servers.check(Duration::from_secs(10));
            (servers.all()[0].is_up(), servers.version())
        };
        assert_eq!(check(), (true, 1));
        drop(listener);
        assert_eq!(check(), (true, 1));
        assert_eq!(check(), (false, 2));
        assert_eq!(check(), (false, 2));
        let _listener = TcpListener::bind(address).unwrap();
        assert_eq!(check(), (true, 3));
    }

    #[test]
    fn a_server_that_refuses_twice_in_a_row_is_down_until_it_is_readmitted() {
        let servers = Servers::new(&[([10, 0, 0, 1], 53).into()], &Servers::default());
        let server = &servers.all()[0];
        servers.record_refusal(server);
        servers.record_answer(server);
        servers.record_refusal(server);
        assert_eq!((server.is_up(), servers.version()), (true, 1));
        servers.record_refusal(server);
        assert_eq!((server.is_up(), servers.version()), (false, 2));
        servers.readmit();
        assert_eq!((server.is_up(), servers.version()), (true, 3));
        // It has not answered since.
        servers.record_refusal(server);
        assert_eq!((server.is_up(), servers.version()), (false, 4));
        servers.record_answer(server);
        assert_eq!((server.is_up(), servers.version()), (true, 5));
    }

    #[test]
    fn servers_that_stay_keep_their_connections() {
        let [one, two]: [SocketAddr; 2] = [([10, 0, 0, 1], 80).into(), ([10, 0, 0, 2], 80).into()];
        let before = Servers::new(&[one], &Servers::default());
        before.all()[0].add_connection();
        let after = Servers::new(&[two, one], &before);
        let counts: Vec<u32> = after.all().iter().map(|server| server.connections()).collect();
        assert_eq!(counts, [0, 1]);
    }
}
