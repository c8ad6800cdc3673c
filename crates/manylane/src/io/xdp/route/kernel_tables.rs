//! A copy of the kernel's tables: devices, neighbours, addresses. No I/O and no clock.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use manylane_ipc::next_hops::{NextHop, RouteKey};
use manylane_sys::device::LOOPBACK_IFINDEX;

use super::changes::{Change, LocalState};
use super::netlink::RouteQuery;
use super::rtnetlink::{KernelUpdate, LinkUpdate, LocalAddr, Neighbour, Route};
use super::table::{Entry, NeighbourKey, Writer};

/// Maximum number of neighbours. The kernel keeps 1,024 by default (`gc_thresh3`), not counting
/// permanent ones.
const NEIGHBOURS_MAX: usize = 65_536;
/// Maximum number of neighbours that are awaited. Lanes that wait for more retry at the next
/// epoch.
const AWAITED_MAX: usize = 4096;

/// Route changes at one time up to which the table is searched for each.
const ROUTE_CHANGES_MAX: usize = 32;

/// Effects of updates, besides those on the entries of the table.
#[derive(Debug, Default)]
pub(super) struct Effects {
    /// Remove all entries.
    pub(super) flush: bool,
    /// Better routes may exist. The entries stay in force until they were queried again.
    pub(super) revalidate: bool,
    /// Pairs that had no result or were removed may be queried again: an awaited neighbour became
    /// reachable, or routes, a device or an address have changed.
    pub(super) requery: bool,
    /// The routing tables are to be read again.
    pub(super) routes_changed: bool,
    /// A neighbour that is resolved has changed, or one was resolved.
    pub(super) neighbours_changed: bool,
    /// Changes to report to watchers.
    pub(super) changes: Vec<Change>,
    /// Number of changed routes.
    route_changes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Link {
    ethernet: bool,
    up: bool,
    running: bool,
    mac: Option<[u8; 6]>,
    mtu: u32,
    mtu6: u32,
    master: Option<u32>,
    vrf: bool,
}

impl Link {
    /// The state whose changes are reported to watchers: up, running, and the master.
    fn reported(&self) -> (bool, bool, Option<u32>) {
        (self.up, self.running, self.master)
    }
}

/// The change to report of a device that was `before` and is `now`, if there is one.
fn link_change(ifindex: u32, before: Option<&Link>, now: Option<&Link>) -> Option<Change> {
    let change = Change::Link { ifindex, up: now.is_some_and(|link| link.running), gone: now.is_none() };
    (before.map(Link::reported) != now.map(Link::reported)).then_some(change)
}

/// A reachable neighbour, and whether entries of the table may use it.
#[derive(Clone, Copy, Debug)]
struct NeighbourEntry {
    neighbour: Neighbour,
    used: bool,
}

/// A neighbour that the kernel has resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Resolved {
    pub(super) key: NeighbourKey,
    pub(super) next: NextHop,
    /// The kernel has not heard of it for a while.
    pub(super) stale: bool,
}

/// The tables of one namespace.
#[derive(Debug, Default)]
pub(super) struct KernelTables {
    links: BTreeMap<u32, Link>,
    neighbours: HashMap<NeighbourKey, NeighbourEntry>,
    /// Each with the broadcast addresses of its network.
    addresses: BTreeMap<(u32, IpAddr), [Option<Ipv4Addr>; 2]>,
    awaited: HashSet<NeighbourKey>,
}

impl KernelTables {
    /// The local state: the devices that are up, all addresses, the broadcast addresses, the
    /// masters of devices, and the VRFs.
    pub(super) fn local_state(&self) -> LocalState {
        let is_up = |ifindex: &u32| self.links.get(ifindex).is_some_and(|link| link.up);
        let (up, down): (Vec<_>, Vec<_>) =
            self.addresses.iter().partition(|((ifindex, _), _)| is_up(ifindex));
        let devices = |wanted: &dyn Fn(u32, &Link) -> bool| {
            let found = self.links.iter().filter(|(ifindex, link)| wanted(**ifindex, link));
            found.map(|(ifindex, _)| *ifindex).collect()
        };
        let masters = self.links.iter().filter_map(|(ifindex, link)| Some((*ifindex, link.master?)));
        LocalState {
            addresses: up.iter().map(|(at, _)| **at).collect(),
            down_addresses: down.iter().map(|(at, _)| **at).collect(),
            broadcasts: up.iter().flat_map(|(_, all)| all.iter().flatten()).copied().collect(),
            masters: masters.collect(),
            vrfs: devices(&|_, link| link.vrf),
            up: devices(&|ifindex, link| link.up && ifindex != LOOPBACK_IFINDEX),
        }
    }

    /// Applies an update, and changes the affected entries of the table.
    pub(super) fn apply(&mut self, fact: KernelUpdate, table: &mut Writer, effects: &mut Effects) {
        match fact {
            KernelUpdate::Link(ifindex, fact) => self.apply_link(ifindex, &fact, table, effects),
            KernelUpdate::LinkGone(ifindex) => {
                if let Some(link) = self.links.remove(&ifindex) {
                    table.remove_device(ifindex);
                    (effects.requery, effects.routes_changed) = (true, true);
                    effects.changes.extend(link_change(ifindex, Some(&link), None));
                }
                // Its addresses and neighbours were removed before, each with an event; this makes
                // sure.
                self.neighbours.retain(|hop, _| hop.ifindex != ifindex);
                let before = self.addresses.len();
                self.addresses.retain(|(index, _), _| *index != ifindex);
                if before != self.addresses.len() {
                    effects.changes.push(Change::Addresses);
                }
            }
            KernelUpdate::Neighbour(hop, neighbour) => self.apply_neighbour(hop, neighbour, table, effects),
            KernelUpdate::Address(ifindex, LocalAddr { ip, broadcasts }, delivered) => {
                let changed = match delivered {
                    true => self.addresses.insert((ifindex, ip), broadcasts) != Some(broadcasts),
                    false => self.addresses.remove(&(ifindex, ip)).is_some(),
                };
                // Changed lifetimes, which use the same message, do not matter.
                if changed {
                    // The routes of a new address have events of their own. With a removed address
                    // the kernel also removes the routes that prefer it as a source, and reports
                    // those only since Linux 6.6.
                    table.remove_address(ip);
                    (effects.requery, effects.routes_changed) = (true, true);
                    effects.revalidate |= !delivered;
                    effects.changes.push(Change::Addresses);
                }
            }
            KernelUpdate::Routes(prefix) => {
                // A routing daemon may change a million routes: then it is cheaper to query all
                // peers again.
                effects.route_changes += 1;
                effects.flush |= effects.route_changes > ROUTE_CHANGES_MAX;
                if !effects.flush {
                    table.remove_prefix(&prefix);
                }
                (effects.requery, effects.routes_changed) = (true, true);
            }
            KernelUpdate::AllRoutes | KernelUpdate::Malformed => {
                (effects.flush, effects.routes_changed) = (true, true);
            }
        }
    }

    fn apply_link(&mut self, ifindex: u32, fact: &LinkUpdate, table: &mut Writer, effects: &mut Effects) {
        let before = self.links.get(&ifindex).copied();
        let link = Link {
            ethernet: fact.ethernet,
            up: fact.up,
            running: fact.running,
            mac: fact.mac.or(before.and_then(|link| link.mac)),
            mtu: fact.mtu.or(before.map(|link| link.mtu)).unwrap_or(0),
            mtu6: fact.mtu6.or(before.map(|link| link.mtu6)).unwrap_or(u32::MAX),
            // A message without the MAC address is a partial one, which omits what has not
            // changed.
            master: fact.master.or(before.filter(|_| fact.mac.is_none()).and_then(|link| link.master)),
            // A device stays of its kind.
            vrf: fact.vrf || before.is_some_and(|link| link.vrf),
        };
        // Devices also send events when nothing relevant has changed.
        if before == Some(link) {
            return;
        }
        self.links.insert(ifindex, link);
        // Entries by other devices stay in force while lanes query whether this device is a better
        // way. The kernel sends no events for routes that return with a carrier.
        table.remove_device(ifindex);
        (effects.requery, effects.routes_changed) = (true, true);
        effects.revalidate |= link.running && before.is_none_or(|before| !before.running);
        effects.changes.extend(link_change(ifindex, before.as_ref(), Some(&link)));
        // Datagrams to the addresses of a device that is down are left to the kernel.
        let has_addresses = || self.addresses.range((ifindex, IpAddr::from([0; 4]))..).next();
        if before.is_some_and(|before| before.up != link.up)
            && has_addresses().is_some_and(|((index, _), _)| *index == ifindex)
        {
            effects.changes.push(Change::Addresses);
        }
    }

    fn apply_neighbour(
        &mut self,
        hop: NeighbourKey,
        neighbour: Option<Neighbour>,
        table: &mut Writer,
        effects: &mut Effects,
    ) {
        let before = self.neighbours.get(&hop).copied();
        effects.neighbours_changed |= before.map(|before| before.neighbour) != neighbour;
        let mac = neighbour.map(|neighbour| neighbour.mac);
        let mut used = before.is_some_and(|before| before.used);
        // Searching the table is cheap, but a network can have many neighbours that change.
        if used && before.is_some_and(|before| Some(before.neighbour.mac) != mac) {
            table.set_mac(&hop, mac);
            used = mac.is_some();
            if mac.is_none() {
                self.await_neighbour(hop);
            }
        }
        match neighbour {
            Some(neighbour) => {
                if before.is_some() || self.neighbours.len() < NEIGHBOURS_MAX {
                    self.neighbours.insert(hop, NeighbourEntry { neighbour, used });
                    effects.requery |= self.awaited.remove(&hop);
                }
            }
            None => {
                self.neighbours.remove(&hop);
            }
        }
    }

    /// The route query for a pair; None if the kernel cannot be asked.
    pub(super) fn query(&self, pair: &RouteKey) -> Option<RouteQuery> {
        let (local, peer) = (pair.local(), pair.peer());
        let link_local = |ip| matches!(ip, IpAddr::V6(ip) if Ipv6Addr::is_unicast_link_local(&ip));
        if !link_local(local) && !link_local(peer) {
            return Some(RouteQuery { local, peer, device: None });
        }
        // Link-local addresses: the local one has to identify the device. Devices with the same
        // MAC have the same one, and then it does not.
        let mut devices = self.addresses.keys().filter(|(_, ip)| *ip == local).map(|(ifindex, _)| *ifindex);
        let device = devices.next().filter(|_| link_local(local) && devices.next().is_none())?;
        Some(RouteQuery { local, peer, device: Some(device) })
    }

    /// The next hop of a route to `peer`, if it is reachable. If only the neighbour is missing, it
    /// is awaited.
    pub(super) fn resolve(
        &mut self,
        peer: IpAddr,
        route: &Route,
        epoch: u16,
    ) -> Option<(NeighbourKey, Entry)> {
        let hop = NeighbourKey { ifindex: route.ifindex, address: route.gateway.unwrap_or(peer) };
        let link = self.links.get(&route.ifindex).filter(|link| link.ethernet && link.running)?;
        let source_mac = link.mac?;
        let Some(known) = self.neighbours.get_mut(&hop) else {
            self.await_neighbour(hop);
            return None;
        };
        known.used = true;
        let device_mtu = if peer.is_ipv6() { link.mtu.min(link.mtu6) } else { link.mtu };
        let mtu = route.mtu.unwrap_or(u32::MAX).min(device_mtu);
        let next = NextHop { ifindex: route.ifindex, source_mac, mac: known.neighbour.mac, mtu };
        Some((hop, Entry { next, epoch, stale: known.neighbour.stale }))
    }

    /// A new epoch: lanes query again, and neighbours that are still missing are awaited again.
    pub(super) fn clear_awaited(&mut self) {
        self.awaited.clear();
    }

    fn await_neighbour(&mut self, hop: NeighbourKey) {
        if self.awaited.len() < AWAITED_MAX {
            self.awaited.insert(hop);
        }
    }

    /// Replaces the tables by a new dump of them, and records the differences.
    pub(super) fn replace(&mut self, new: KernelTables, effects: &mut Effects) {
        let devices: BTreeSet<u32> = self.links.keys().chain(new.links.keys()).copied().collect();
        let change = |&at: &u32| link_change(at, self.links.get(&at), new.links.get(&at));
        effects.changes.extend(devices.iter().filter_map(change));
        if self.local_state() != new.local_state() {
            effects.changes.push(Change::Addresses);
        }
        (effects.flush, effects.routes_changed) = (true, true);
        *self = new;
    }

    pub(super) fn neighbour_count(&self) -> usize {
        self.neighbours.len()
    }

    /// The neighbours by which packets can be sent.
    pub(super) fn resolved(&self) -> impl Iterator<Item = Resolved> {
        self.neighbours.keys().filter_map(|key| self.resolved_one(key))
    }

    /// One of them.
    pub(super) fn resolved_one(&self, key: &NeighbourKey) -> Option<Resolved> {
        let NeighbourEntry { neighbour, .. } = self.neighbours.get(key)?;
        let link = self.links.get(&key.ifindex).filter(|link| link.ethernet && link.running)?;
        let NeighbourKey { ifindex, .. } = *key;
        let next = NextHop { ifindex, source_mac: link.mac?, mac: neighbour.mac, mtu: link.mtu };
        Some(Resolved { key: *key, next, stale: neighbour.stale })
    }

    /// True if a device sends packets of this length.
    pub(super) fn can_send_by(&self, ifindex: u32, length: u32) -> bool {
        self.links.get(&ifindex).is_some_and(|link| link.ethernet && link.running && link.mtu >= length)
    }
}

#[cfg(test)]
mod tests;
