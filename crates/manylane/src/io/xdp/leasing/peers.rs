//! Next hops of the peers that the lanes of one lease send to: queried from the kernel, and
//! entered in a table that those lanes read. Each lease has its own table and its own queue of
//! queries, so a program that fills them with garbage harms only itself. With needless requests it
//! can replace entries of others in the table of routes, which are then queried again.
//!
//! Senders control the number of peers. So a tick checks a limited number of peers, and sends a
//! limited number of queries to the kernel, whatever their results.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use manylane_ipc::next_hops::{self, NextHop, NextHops, RouteKey};
use manylane_sys::shared::{self, Shared};

use crate::io::xdp::route::Reader;

/// Time without use after which a next hop is removed, and a request is no longer answered.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval after which a source address is queried again, whether the kernel had one or not.
const SOURCE_REFRESH_INTERVAL: Duration = Duration::from_secs(2);
/// Maximum number of peers that one tick checks. Later ticks check the others.
const PEERS_PER_TICK_MAX: usize = 512;
/// Peers of which a new one replaces the least useful, if there are `next_hops::ENTRIES`.
const EVICTION_CANDIDATES: usize = 8;
/// Maximum number of source addresses that one tick queries: enough for all peers within
/// `SOURCE_REFRESH_INTERVAL`.
const QUERIES_PER_TICK_MAX: usize = 32;

/// The table of a lease, and its contents.
pub(super) struct LeaseNextHops {
    table: Shared<NextHops>,
    file: OwnedFd,
    reader: Reader,
    peers: Peers,
}

/// The peers that lanes send to.
#[derive(Default)]
struct Peers {
    all: HashMap<RouteKey, Peer>,
    /// The order in which they are checked.
    schedule: VecDeque<RouteKey>,
    /// Counts insertions, to select an entry to replace.
    inserts: usize,
}

struct Peer {
    /// The source address and the next hop in the table.
    next_hop: Option<(IpAddr, NextHop)>,
    /// The last check found one.
    was_found: bool,
    last_used: Instant,
    /// The kernel's source address, if it has one, and when it was queried.
    source: Option<IpAddr>,
    last_query: Option<Instant>,
}

impl LeaseNextHops {
    pub(super) fn new(reader: Reader) -> io::Result<Self> {
        let (next_hops, file) = Shared::<NextHops>::create(c"manylane-hops")?;
        next_hops.set_seed(std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0));
        next_hops.heartbeat();
        Ok(Self { table: next_hops, file, reader, peers: Peers::default() })
    }

    /// The memory of the table, for the program.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Enters requested next hops, updates changed ones, and removes those by a device that
    /// `is_gone`.
    pub(super) fn update(&mut self, is_gone: impl Fn(u32) -> bool) {
        let Self { table: next_hops, reader, peers, .. } = self;
        reader.refresh();
        next_hops.heartbeat();
        peers.tick(next_hops, Instant::now(), kernel_source, |source, remote, was_found| {
            let next = if was_found {
                reader.next_hop_again(source, remote)
            } else {
                reader.next_hop(source, remote)
            };
            next.filter(|next| !is_gone(next.ifindex))
        });
    }
}

impl Drop for LeaseNextHops {
    fn drop(&mut self) {
        // The program may keep the memory mapped, so free its pages.
        shared::discard(self.file.as_fd(), size_of::<NextHops>());
    }
}

impl Peers {
    /// Takes requests, and checks peers in turn. `choose` queries the kernel for the source
    /// address, `find` the next hop from there, and is told whether it was found at the last check.
    fn tick(
        &mut self,
        next_hops: &NextHops,
        now: Instant,
        mut choose: impl FnMut(IpAddr, IpAddr) -> Option<IpAddr>,
        mut find: impl FnMut(IpAddr, IpAddr, bool) -> Option<NextHop>,
    ) {
        // New peers are at the front of the schedule.
        let mut added = 0;
        next_hops.drain_requests(|pair| {
            if let Some(peer) = self.all.get_mut(&pair) {
                peer.last_used = now;
                // Another pair has replaced its entry: it is inserted again.
                peer.next_hop = None;
                return;
            }
            if self.all.len() >= next_hops::ENTRIES {
                self.evict(next_hops, added);
            }
            let new =
                Peer { next_hop: None, was_found: false, last_used: now, source: None, last_query: None };
            self.all.insert(pair, new);
            self.schedule.push_front(pair);
            added += 1;
        });
        let Self { all, schedule, inserts: entered } = self;
        let mut questions = QUERIES_PER_TICK_MAX;
        for _ in 0..schedule.len().min(PEERS_PER_TICK_MAX) {
            let Some(pair) = schedule.pop_front() else { break };
            let Some(peer) = all.get_mut(&pair) else { continue };
            if next_hops.test_and_clear_used(&pair) {
                peer.last_used = now;
            }
            let is_kept = now.duration_since(peer.last_used) <= IDLE_TIMEOUT;
            let source = if is_kept { peer.source(&pair, now, &mut questions, &mut choose) } else { None };
            let hop = source.and_then(|source| Some((source, find(source, pair.peer(), peer.was_found)?)));
            peer.was_found = hop.is_some();
            match (&hop, &peer.next_hop) {
                (Some(found), known) if known.as_ref() != Some(found) => {
                    *entered = entered.wrapping_add(1);
                    // The next datagram of the replaced pair requests it again.
                    _ = next_hops.insert(&pair, found.0, &found.1, *entered);
                }
                (None, _) => next_hops.remove(&pair),
                _ => {}
            }
            peer.next_hop = hop;
            if is_kept {
                schedule.push_back(pair);
            } else {
                all.remove(&pair);
            }
        }
    }

    /// Removes one of the next few peers to check, but none of the first `added`: one without a
    /// next hop, or else one that was not used since its last check, or else the one whose last use
    /// was the earliest.
    fn evict(&mut self, next_hops: &NextHops, added: usize) {
        let Self { all, schedule, .. } = self;
        let rank = |pair: &RouteKey| {
            all.get(pair).map(|peer: &Peer| {
                let has_next_hop = peer.next_hop.is_some();
                (has_next_hop, has_next_hop && next_hops.is_used(pair), peer.last_used)
            })
        };
        let candidates = schedule.iter().enumerate().skip(added).take(EVICTION_CANDIDATES);
        let Some((at, _)) = candidates.min_by_key(|(_, pair)| rank(pair)) else { return };
        if let Some(pair) = schedule.remove(at) {
            next_hops.remove(&pair);
            all.remove(&pair);
        }
    }
}

impl Peer {
    /// The source address: the socket's own, or the kernel's choice.
    fn source(
        &mut self,
        pair: &RouteKey,
        now: Instant,
        questions: &mut usize,
        choose: &mut impl FnMut(IpAddr, IpAddr) -> Option<IpAddr>,
    ) -> Option<IpAddr> {
        let local = pair.local();
        if !local.is_unspecified() {
            return Some(local);
        }
        let is_due = self.last_query.is_none_or(|at| now.duration_since(at) >= SOURCE_REFRESH_INTERVAL);
        if is_due && *questions > 0 {
            *questions -= 1;
            self.source = choose(local, pair.peer());
            self.last_query = Some(now);
        }
        self.source
    }
}

/// The source address that the kernel would choose.
fn kernel_source(local: IpAddr, remote: IpAddr) -> Option<IpAddr> {
    // Sends no datagram: connecting a socket selects the source.
    let socket = UdpSocket::bind((local, 0)).ok()?;
    socket.connect((remote, 9)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const ANY: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    const OURS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
    const TICK: Duration = Duration::from_millis(5);

    fn pair(n: u32) -> RouteKey {
        RouteKey::new(ANY, Ipv4Addr::from(0x0a00_0000 + n).into()).unwrap()
    }

    const NEXT_HOP: NextHop = NextHop { ifindex: 7, mtu: 1500, source_mac: [2; 6], mac: [3; 6] };

    #[test]
    fn a_tick_sends_few_queries_however_many_peers_there_are() {
        let (next_hops, _file) = Shared::<NextHops>::create(c"hops").unwrap();
        next_hops.set_seed(0x0123_4567_89ab_cdef);
        let mut peers = Peers::default();
        let (mut now, mut next) = (Instant::now(), 0);
        let mut asked = HashMap::new();
        let mut tick = |peers: &mut Peers, now: Instant| {
            let (mut questions, mut lookups) = (0, 0);
            let choose = |_, remote| {
                questions += 1;
                let before = asked.insert(remote, now);
                // No route, which is remembered like any other result.
                assert!(
                    before.is_none_or(|at| now.duration_since(at) >= SOURCE_REFRESH_INTERVAL),
                    "{remote}"
                );
                None
            };
            peers.tick(&next_hops, now, choose, |_, _, _| {
                lookups += 1;
                None
            });
            assert_eq!(lookups, 0, "nothing is found without a source");
            questions
        };
        // A flood from many addresses.
        for _ in 0..1000 {
            for _ in 0..200 {
                next_hops.request(&pair(next));
                next += 1;
            }
            let questions = tick(&mut peers, now);
            assert!(questions <= QUERIES_PER_TICK_MAX, "{questions}");
            now += TICK;
        }
        assert_eq!(peers.all.len(), next_hops::ENTRIES);
        assert_eq!(peers.schedule.len(), next_hops::ENTRIES);
        // All entries expire.
        now += IDLE_TIMEOUT + TICK;
        for _ in 0..next_hops::ENTRIES / PEERS_PER_TICK_MAX {
            assert_eq!(tick(&mut peers, now), 0);
        }
        assert_eq!((peers.all.len(), peers.schedule.len()), (0, 0));
    }

    #[test]
    fn requested_next_hops_are_inserted_kept_and_evicted() {
        let (next_hops, _file) = Shared::<NextHops>::create(c"hops").unwrap();
        let mut peers = Peers::default();
        let start = Instant::now();
        let tick = |peers: &mut Peers, now, source| {
            peers.tick(&next_hops, now, |_, _| source, |_, _, _| Some(NEXT_HOP));
        };
        next_hops.request(&pair(1));
        tick(&mut peers, start, None);
        assert_eq!(next_hops.find(&pair(1)), None);
        // The kernel is queried again after a while, and has a route then.
        tick(&mut peers, start + SOURCE_REFRESH_INTERVAL - TICK, Some(OURS));
        assert_eq!(next_hops.find(&pair(1)), None);
        tick(&mut peers, start + SOURCE_REFRESH_INTERVAL, Some(OURS));
        assert_eq!(next_hops.find(&pair(1)), Some((OURS, NEXT_HOP)));
        // That counts as a use; after it there is none.
        tick(&mut peers, start + IDLE_TIMEOUT, Some(OURS));
        tick(&mut peers, start + IDLE_TIMEOUT + IDLE_TIMEOUT, Some(OURS));
        assert_eq!(peers.all.len(), 1);
        tick(&mut peers, start + IDLE_TIMEOUT + IDLE_TIMEOUT + TICK, Some(OURS));
        assert_eq!((peers.all.len(), next_hops.find(&pair(1))), (0, None));
    }

    #[test]
    fn a_replaced_next_hop_is_inserted_again_when_it_is_requested() {
        let (next_hops, _file) = Shared::<NextHops>::create(c"hops").unwrap();
        next_hops.set_seed(0x0123_4567_89ab_cdef);
        let mut peers = Peers::default();
        let start = Instant::now();
        let mut tick = || peers.tick(&next_hops, start, |_, _| Some(OURS), |_, _, _| Some(NEXT_HOP));
        let is_missing = |number: &u32| next_hops.find(&pair(*number)).is_none();
        // More pairs than have room in each bucket: some are replaced.
        let count = next_hops::ENTRIES as u32 / 2;
        for number in 0..count {
            next_hops.request(&pair(number));
            tick();
        }
        let replaced = (0..count).find(is_missing).unwrap();
        next_hops.request(&pair(replaced));
        (0..=count as usize / PEERS_PER_TICK_MAX).for_each(|_| tick());
        assert!(!is_missing(&replaced));
    }

    #[test]
    fn a_next_hop_that_is_lost_is_looked_up_as_such_once() {
        let (next_hops, _file) = Shared::<NextHops>::create(c"hops").unwrap();
        let mut peers = Peers::default();
        let start = Instant::now();
        let mut tick = |next_hop| {
            let mut told = None;
            peers.tick(
                &next_hops,
                start,
                |_, _| Some(OURS),
                |_, _, was_found| {
                    told = Some(was_found);
                    next_hop
                },
            );
            told
        };
        next_hops.request(&pair(1));
        let next_hop = Some(NEXT_HOP);
        let told = [next_hop, next_hop, None, None].map(&mut tick);
        assert_eq!(told, [Some(false), Some(true), Some(true), Some(false)]);
        assert_eq!(next_hops.find(&pair(1)), None);
    }

    #[test]
    fn a_new_peer_replaces_one_without_a_next_hop_or_the_oldest() {
        let (next_hops, _file) = Shared::<NextHops>::create(c"hops").unwrap();
        next_hops.set_seed(0x0123_4567_89ab_cdef);
        let mut peers = Peers::default();
        let start = Instant::now();
        let mut now = start;
        let local = |n: u32| RouteKey::new(OURS, Ipv4Addr::from(0x0a00_0000 + n).into()).unwrap();
        let mut tick = |peers: &mut Peers| {
            now += TICK / 100;
            peers.tick(&next_hops, now, |_, _| None, |_, _, _| Some(NEXT_HOP));
        };
        // Spoofed sources, each with a route.
        let mut last = 0;
        while peers.all.len() < next_hops::ENTRIES {
            // Requests that share a slot are lost.
            let missing = next_hops::ENTRIES - peers.all.len();
            for _ in 0..missing.min(128) {
                last += 1;
                next_hops.request(&local(last));
            }
            tick(&mut peers);
        }
        // All of them are checked, so that the next ones to check have next hops.
        (0..next_hops::ENTRIES / PEERS_PER_TICK_MAX).for_each(|_| tick(&mut peers));
        assert!(peers.all.values().all(|peer| peer.next_hop.is_some()));

        let candidates = |peers: &Peers| {
            let pairs: Vec<RouteKey> = peers.schedule.iter().take(EVICTION_CANDIDATES).copied().collect();
            pairs
        };
        let mut request = |peers: &mut Peers| {
            last += 1;
            next_hops.request(&local(last));
            tick(peers);
            assert_eq!(next_hops.find(&local(last)), Some((OURS, NEXT_HOP)));
            assert_eq!((peers.all.len(), peers.schedule.len()), (next_hops::ENTRIES, next_hops::ENTRIES));
        };
        // A lane has sent to the oldest one since its last check. Some peers are not in the table.
        let used = *candidates(&peers).iter().find(|pair| next_hops.find(pair).is_some()).unwrap();
        peers.all.get_mut(&used).unwrap().last_used = start;
        let mut idle = candidates(&peers);
        idle.retain(|pair| *pair != used);
        let oldest = *idle.iter().min_by_key(|pair| peers.all[*pair].last_used).unwrap();
        request(&mut peers);
        assert!(peers.all.contains_key(&used) && !peers.all.contains_key(&oldest));
        assert_eq!(next_hops.find(&oldest), None);

        let unreachable = candidates(&peers)[5];
        peers.all.get_mut(&unreachable).unwrap().next_hop = None;
        request(&mut peers);
        assert!(!peers.all.contains_key(&unreachable));
    }
}
