//! Which server gets a connection.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use crate::maglev::{Lookup, Maglev};
use crate::servers::Servers;

/// How servers are chosen, among those that are up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Balance {
    /// One after the other, for each lane.
    #[default]
    RoundRobin,
    /// The one with the fewest connections of all lanes.
    LeastConnections,
    /// By the client's address and port, or the key of a session of UDP, and Maglev's table:
    /// proxies with the same servers choose alike.
    Hash,
}

const NAMES: [(&str, Balance); 3] = [
    ("round-robin", Balance::RoundRobin),
    ("least-connections", Balance::LeastConnections),
    ("hash", Balance::Hash),
];

impl FromStr for Balance {
    type Err = String;

    fn from_str(text: &str) -> Result<Balance, String> {
        let found = NAMES.iter().find(|(name, _)| *name == text);
        found
            .map(|(_, balance)| *balance)
            .ok_or_else(|| format!("expected {}", NAMES.map(|(name, _)| name).join(", ")))
    }
}

impl fmt::Display for Balance {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = NAMES.iter().find(|(_, balance)| balance == self);
        formatter.write_str(found.map_or("", |(name, _)| name))
    }
}

/// Chooses for one lane.
#[derive(Debug)]
pub(crate) struct Balancer {
    balance: Balance,
    next: usize,
    table: Maglev,
    /// The version of the servers that the table is of. They have none that is zero.
    version: u64,
}

impl Balancer {
    pub(crate) fn new(balance: Balance) -> Balancer {
        Balancer { balance, next: 0, table: Maglev::default(), version: 0 }
    }

    /// The place of a server that is up and was not tried, if there is one.
    pub(crate) fn choose(
        &mut self,
        servers: &Servers,
        by: Lookup<'_>,
        tried: &[SocketAddr],
    ) -> Option<usize> {
        let all = servers.all();
        let is_free = |at: &usize| {
            all.get(*at).is_some_and(|server| server.is_up() && !tried.contains(&server.address))
        };
        match self.balance {
            Balance::RoundRobin => {
                let found = (0..all.len()).map(|ahead| (self.next + ahead) % all.len()).find(is_free)?;
                self.next = found + 1;
                Some(found)
            }
            Balance::LeastConnections => {
                // From the one behind the last, so that equal ones take turns.
                let ahead = (0..all.len()).map(|ahead| (self.next + ahead) % all.len());
                let found = ahead.filter(is_free).min_by_key(|at| all[*at].connections())?;
                self.next = found + 1;
                Some(found)
            }
            Balance::Hash => {
                if self.version != servers.version() {
                    self.version = servers.version();
                    let up = all.iter().enumerate().filter(|(_, server)| server.is_up());
                    self.table = Maglev::new(up.map(|(at, server)| (at, server.address)));
                }
                let by_table = (0..=tried.len() as u64).filter_map(|salt| self.table.find(by, salt));
                by_table.chain(0..all.len()).find(is_free)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddrV4};

    use super::*;

    const ADDRESSES: [SocketAddr; 3] = [server(1), server(2), server(3)];

    const fn server(last: u8) -> SocketAddr {
        SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::new(10, 0, 0, last), 80))
    }

    fn servers() -> Servers {
        Servers::new(&ADDRESSES, &Servers::default())
    }

    fn client() -> Lookup<'static> {
        Lookup::Client(([10, 9, 0, 1], 4000).into())
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        for (name, balance) in NAMES {
            assert_eq!((name.parse(), balance.to_string().as_str()), (Ok(balance), name));
        }
        assert!("random".parse::<Balance>().unwrap_err().contains("round-robin"));
    }

    #[test]
    fn round_robin_takes_turns_and_skips_those_that_were_tried() {
        let servers = servers();
        let mut balancer = Balancer::new(Balance::RoundRobin);
        let mut choose = |tried: &[SocketAddr]| balancer.choose(&servers, client(), tried);
        assert_eq!(
            [choose(&[]), choose(&[]), choose(&[]), choose(&[])],
            [Some(0), Some(1), Some(2), Some(0)]
        );
        assert_eq!(choose(&ADDRESSES[1..]), Some(0));
        assert_eq!(choose(&ADDRESSES), None);
    }

    #[test]
    fn the_least_busy_server_is_chosen() {
        let servers = servers();
        let mut balancer = Balancer::new(Balance::LeastConnections);
        for expected in [0, 1, 2, 0] {
            let at = balancer.choose(&servers, client(), &[]).unwrap();
            assert_eq!(at, expected);
            servers.all()[at].add_connection();
        }
        servers.all()[1].remove_connection();
        assert_eq!(balancer.choose(&servers, client(), &[]), Some(1));
    }

    #[test]
    fn a_client_keeps_its_server() {
        let servers = servers();
        let mut balancer = Balancer::new(Balance::Hash);
        let first = balancer.choose(&servers, client(), &[]).unwrap();
        assert_eq!(balancer.choose(&servers, client(), &[]), Some(first));
        let second = balancer.choose(&servers, client(), &[ADDRESSES[first]]).unwrap();
        assert_ne!(second, first);
        assert_eq!(balancer.choose(&servers, client(), &ADDRESSES), None);
    }
}
