//! The table of Maglev (Eisenbud et al., NSDI 2016, section 3.4): each server has nearly the same
//! share of it, and a change of the servers changes little more than the shares of those concerned.
//!
//! It depends on the addresses of the servers alone, in any order. So proxies on several machines
//! that have the same servers choose alike, without talking to each other.

use std::hash::Hasher;
use std::net::SocketAddr;

use siphasher::sip::SipHasher13;

/// Places of the table: a prime, a hundred times more than servers (section 5.3).
const PLACES: usize = 65_537;

// Anyone may know these: machines have to agree.
const KEY_OFFSET: u64 = 0x6d61_6e79_6c61_6e65;
const KEY_SKIP: u64 = 0x7072_6f78_7900_0001;
const KEY_CLIENT: u64 = 0x636c_6965_6e74_0001;

/// What a server is looked up by.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Lookup<'a> {
    /// A client's address and port.
    Client(SocketAddr),
    /// A key in the payload of its datagrams.
    Payload(&'a [u8]),
}

/// The table.
#[derive(Clone, Debug, Default)]
pub(crate) struct Maglev {
    /// A server for each place; empty without servers.
    places: Vec<u16>,
}

impl Maglev {
    /// The table of the servers at these places of a list.
    pub(crate) fn new(servers: impl Iterator<Item = (usize, SocketAddr)>) -> Maglev {
        let mut servers: Vec<(SocketAddr, u16)> =
            servers.filter_map(|(at, address)| Some((address, u16::try_from(at).ok()?))).collect();
        if servers.is_empty() {
            return Maglev::default();
        }
        // In the order of the addresses, which is the same everywhere.
        servers.sort_unstable();
        let mut walks: Vec<(usize, usize)> = servers
            .iter()
            .map(|(address, _)| {
                let offset = hash(*address, KEY_OFFSET) % PLACES as u64;
                let skip = hash(*address, KEY_SKIP) % (PLACES as u64 - 1) + 1;
                (offset as usize, skip as usize)
            })
            .collect();
        const NONE: u16 = u16::MAX;
        let mut places = vec![NONE; PLACES];
        let mut filled = 0;
        loop {
            for ((_, server), (place, skip)) in servers.iter().zip(&mut walks) {
                // The next place of the server's own order that is free. The order has them all.
                while places[*place] != NONE {
                    *place = (*place + *skip) % PLACES;
                }
                places[*place] = *server;
                filled += 1;
                if filled == PLACES {
                    return Maglev { places };
                }
            }
        }
    }

    /// The server of a client; another one, mostly, for another `salt`.
    pub(crate) fn find(&self, by: Lookup<'_>, salt: u64) -> Option<usize> {
        let key = KEY_CLIENT.wrapping_add(salt);
        let hash = match by {
            Lookup::Client(client) => hash(client, key),
            Lookup::Payload(bytes) => {
                let mut hasher = SipHasher13::new_with_keys(key, KEY_OFFSET);
                hasher.write(bytes);
                hasher.finish()
            }
        };
        let place = hash % PLACES as u64;
        self.places.get(place as usize).map(|server| usize::from(*server))
    }
}

fn hash(address: SocketAddr, key: u64) -> u64 {
    let mut hasher = SipHasher13::new_with_keys(key, KEY_OFFSET);
    match address.ip().to_canonical() {
        std::net::IpAddr::V4(ip) => hasher.write(&ip.octets()),
        std::net::IpAddr::V6(ip) => hasher.write(&ip.octets()),
    }
    hasher.write(&address.port().to_be_bytes());
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn servers(count: u8) -> Vec<(usize, SocketAddr)> {
        (0..count).map(|at| (at.into(), ([10, 0, 0, at], 80).into())).collect()
    }

    fn clients() -> impl Iterator<Item = Lookup<'static>> {
        (0..10_000_u16).map(|at| Lookup::Client(([10, 1, (at >> 8) as u8, at as u8], 1024 + at).into()))
    }

    #[test]
    fn servers_have_nearly_the_same_share() {
        let table = Maglev::new(servers(7).into_iter());
        let mut shares = [0_usize; 7];
        table.places.iter().for_each(|server| shares[usize::from(*server)] += 1);
        let (least, most) = (shares.iter().min().unwrap(), shares.iter().max().unwrap());
        // Their walks take turns.
        assert!(most - least <= 1, "{shares:?}");
    }

    #[test]
    fn the_order_of_servers_does_not_matter() {
        let one = Maglev::new(servers(5).into_iter());
        let mut reversed = servers(5);
        reversed.reverse();
        assert_eq!(one.places, Maglev::new(reversed.into_iter()).places);
    }

    #[test]
    fn a_server_that_goes_moves_few_clients_of_others() {
        let all = Maglev::new(servers(10).into_iter());
        let left = Maglev::new(servers(10).into_iter().filter(|(at, _)| *at != 3));
        let moved = clients().filter(|client| {
            let before = all.find(*client, 0).unwrap();
            before != 3 && left.find(*client, 0).unwrap() != before
        });
        // A fifth of what a hash modulo the number of servers would move.
        assert!(moved.count() < 10_000 / 5, "clients of other servers were moved");
    }

    /// Permille of the places of servers that stay which get another server, when one of `count` is
    /// removed: the largest of all choices.
    fn moved_permille(count: u8) -> usize {
        let all = Maglev::new(servers(count).into_iter());
        let moved = |gone: usize| {
            let left = Maglev::new(servers(count).into_iter().filter(|(at, _)| *at != gone));
            let pairs = all.places.iter().zip(&left.places);
            let stayed = pairs.filter(|(before, _)| usize::from(**before) != gone);
            let (same, other): (Vec<_>, Vec<_>) = stayed.partition(|(before, after)| before == after);
            (other.len() * 1000).div_ceil(same.len() + other.len())
        };
        (0..count.into()).map(moved).max().unwrap()
    }

    /// The numbers of docs/proxy-growing.md. A server that comes is the same change backwards.
    #[test]
    fn the_documented_share_of_clients_moves() {
        for (count, permille) in [(3, 3), (10, 5), (50, 6), (100, 7)] {
            let moved = moved_permille(count);
            assert!(moved <= permille, "{moved} of 1000 places of other servers, {count} servers");
        }
    }

    #[test]
    fn without_servers_there_is_none() {
        assert_eq!(Maglev::new(std::iter::empty()).find(Lookup::Payload(b"key"), 0), None);
    }
}
