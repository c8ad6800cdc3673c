//! Next hops of peers that no lane has asked for, by prefixes: for short packets of a TCP stack.
//!
//! A flood comes from more addresses than the table of pairs has entries. Each answer would ask
//! the kernel for a route, evict a pair in use, and leave by a system call. For a short packet the
//! peer's address is enough: no path has a smaller MTU. So the thread that follows routes publishes
//! the few prefixes of plain tables ([`Fib`]), with the neighbours that the kernel knows. A peer on
//! a link that is not among them is unresolved: only the kernel can resolve it, and it has room for
//! few that it resolves at a time.

use std::net::IpAddr;

use manylane_ipc::next_hops::addr_bits;

use super::fib::{Fib, PrefixRoute};
use super::kernel_tables::{KernelTables, Resolved};
use super::table::NeighbourKey;

/// Longest packet that goes by a prefix: every host has to take it (RFC 791, section 3.1).
pub(super) const SHORT_LEN_MAX: usize = 576;
/// Neighbours at most; of more, only gateways.
const NEIGHBOURS_MAX: usize = 1024;

/// What the prefixes say of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ByPrefix<'a> {
    /// Its next hop, with its place among the neighbours.
    Resolved(usize, &'a Resolved),
    /// Its neighbour is not resolved.
    Unresolved,
    /// The kernel has to be asked.
    Unknown,
}

/// The routes, and the neighbours in the order of their keys.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Prefixes {
    fib: Fib,
    neighbours: Vec<Resolved>,
    /// All neighbours are among them.
    has_all: bool,
}

impl Prefixes {
    /// What these tables say together.
    pub(super) fn new(fib: &Fib, kernel: &KernelTables) -> Prefixes {
        let has_all = kernel.neighbour_count() <= NEIGHBOURS_MAX;
        let mut neighbours: Vec<Resolved> = if has_all {
            kernel.resolved().collect()
        } else {
            let gateways = fib.ipv4.iter().chain(&fib.ipv6).filter_map(|route| {
                let (ifindex, gateway) = route.way?;
                kernel.resolved_one(&NeighbourKey { ifindex, address: gateway? })
            });
            gateways.collect()
        };
        neighbours.sort_unstable_by_key(|neighbour| neighbour.key);
        neighbours.dedup();
        let usable = |routes: &[PrefixRoute]| {
            let has_link = |way: &(u32, _)| kernel.can_send_by(way.0, SHORT_LEN_MAX as u32);
            let keep = |route: &PrefixRoute| PrefixRoute { way: route.way.filter(has_link), ..route.clone() };
            routes.iter().map(keep).collect()
        };
        Prefixes { fib: Fib { ipv4: usable(&fib.ipv4), ipv6: usable(&fib.ipv6) }, neighbours, has_all }
    }

    /// How many neighbours there are.
    pub(super) fn neighbours(&self) -> usize {
        self.neighbours.len()
    }

    pub(super) fn find(&self, peer: IpAddr) -> ByPrefix<'_> {
        let routes = match peer {
            IpAddr::V4(_) => &self.fib.ipv4,
            // Whose device is not known.
            IpAddr::V6(ip) if ip.is_unicast_link_local() => return ByPrefix::Unknown,
            IpAddr::V6(_) => &self.fib.ipv6,
        };
        let bits = addr_bits(peer);
        let route = routes.iter().find(|route| route.prefix.contains(bits));
        let Some((ifindex, gateway)) = route.and_then(|route| route.way) else { return ByPrefix::Unknown };
        let key = NeighbourKey { ifindex, address: gateway.unwrap_or(peer) };
        match self.neighbours.binary_search_by_key(&key, |neighbour| neighbour.key) {
            Ok(at) => ByPrefix::Resolved(at, &self.neighbours[at]),
            Err(_) if self.has_all => ByPrefix::Unresolved,
            Err(_) => ByPrefix::Unknown,
        }
    }
}
