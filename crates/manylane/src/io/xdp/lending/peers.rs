//! Next hops of the peers that the lanes of one loan send to: asked of the kernel, entered where
//! those lanes read them. Each loan has a table of its own: what its program writes there, or asks
//! for without need, is its own loss.
//!
//! Senders choose how many peers there are: a tick looks at some of them and asks the kernel a few questions, however many
//! there are and whatever it answers.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use manylane_sys::hops::{self, Hop, Hops, Pair};
use manylane_sys::shared::{self, Shared};

use crate::io::xdp::route::Reader;

/// A next hop that nobody used for so long is forgotten, and a question is not answered any more.
const KEPT: Duration = Duration::from_secs(60);
/// A source address is asked for again after this, whether the kernel had one or not.
const SOURCE_KEPT: Duration = Duration::from_secs(2);
/// Peers that one tick looks at; all, where there are no more. The next ticks look at the others.
const PEERS_PER_TICK: usize = 512;
/// Source addresses that one tick asks the kernel for: enough for all peers within `SOURCE_KEPT`.
const QUESTIONS_PER_TICK: usize = 32;

/// The table of a loan, and what is in it.
pub(super) struct NextHops {
    hops: Shared<Hops>,
    file: OwnedFd,
    peers: Peers,
}

/// The peers that lanes send to.
#[derive(Default)]
struct Peers {
    all: HashMap<[IpAddr; 2], Peer>,
    /// In the order in which they are looked at.
    schedule: VecDeque<[IpAddr; 2]>,
    /// Counts what was entered: which of several has to go.
    entered: usize,
}

struct Peer {
    pair: Pair,
    known: Option<Hop>,
    used: Instant,
    /// The address that the kernel would send from, if any, and when it was asked.
    source: Option<IpAddr>,
    asked: Option<Instant>,
}

impl NextHops {
    pub(super) fn new() -> io::Result<Self> {
        let (hops, file) = Shared::<Hops>::create(c"manylane-hops")?;
        hops.seed(std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0));
        hops.beat();
        Ok(Self { hops, file, peers: Peers::default() })
    }

    /// Their memory, for the program.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Enters what lanes ask for, and what has changed of it.
    pub(super) fn keep(&mut self, reader: &mut Reader) {
        let Self { hops, peers, .. } = self;
        hops.beat();
        peers.tick(hops, Instant::now(), chosen_source, |source, remote| {
            let next = reader.next_hop(source, remote)?;
            let (source_mac, mac) = (next.source_mac, next.mac);
            Some(Hop { source, ifindex: next.ifindex, mtu: next.mtu, source_mac, mac })
        });
    }
}

impl Drop for NextHops {
    fn drop(&mut self) {
        // Who had them may keep the memory, but not at our expense.
        shared::discard(self.file.as_fd(), size_of::<Hops>());
    }
}

impl Peers {
    /// Takes questions, and looks at peers in turn. `choose` asks the kernel for the address to send from, `find` has the
    /// way from there.
    fn tick(
        &mut self,
        hops: &Hops,
        now: Instant,
        mut choose: impl FnMut(IpAddr, IpAddr) -> Option<IpAddr>,
        mut find: impl FnMut(IpAddr, IpAddr) -> Option<Hop>,
    ) {
        let Self { all, schedule, entered } = self;
        hops.questions(|pair| {
            let ends = [pair.local(), pair.peer()];
            let is_full = all.len() >= hops::PLACES;
            match all.entry(ends) {
                Entry::Occupied(mut peer) => peer.get_mut().used = now,
                Entry::Vacant(place) if !is_full => {
                    place.insert(Peer { pair, known: None, used: now, source: None, asked: None });
                    schedule.push_front(ends);
                }
                Entry::Vacant(_) => {}
            }
        });
        let mut questions = QUESTIONS_PER_TICK;
        for _ in 0..schedule.len().min(PEERS_PER_TICK) {
            let Some(ends) = schedule.pop_front() else { break };
            let Some(peer) = all.get_mut(&ends) else { continue };
            if hops.was_used(&peer.pair) {
                peer.used = now;
            }
            let is_kept = now.duration_since(peer.used) <= KEPT;
            let source = if is_kept { peer.source(ends, now, &mut questions, &mut choose) } else { None };
            let hop = source.and_then(|source| find(source, ends[1]));
            match (&hop, &peer.known) {
                (Some(found), known) if known.as_ref() != Some(found) => {
                    *entered = entered.wrapping_add(1);
                    // One that had to go is asked for again by its next datagram.
                    _ = hops.put(&peer.pair, found, *entered);
                }
                (None, Some(_)) => hops.forget(&peer.pair),
                _ => {}
            }
            peer.known = hop;
            if is_kept {
                schedule.push_back(ends);
            } else {
                all.remove(&ends);
            }
        }
    }
}

impl Peer {
    /// The address to send from: the socket's own, or the kernel's choice.
    fn source(
        &mut self,
        [local, remote]: [IpAddr; 2],
        now: Instant,
        questions: &mut usize,
        choose: &mut impl FnMut(IpAddr, IpAddr) -> Option<IpAddr>,
    ) -> Option<IpAddr> {
        if !local.is_unspecified() {
            return Some(local);
        }
        let is_due = self.asked.is_none_or(|at| now.duration_since(at) >= SOURCE_KEPT);
        if is_due && *questions > 0 {
            *questions -= 1;
            self.source = choose(local, remote);
            self.asked = Some(now);
        }
        self.source
    }
}

/// The address that the kernel would send from.
fn chosen_source(local: IpAddr, remote: IpAddr) -> Option<IpAddr> {
    // No datagram is sent: a socket that is connected has chosen.
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

    fn pair(n: u32) -> Pair {
        Pair::new(ANY, Ipv4Addr::from(0x0a00_0000 + n).into()).unwrap()
    }

    fn hop(source: IpAddr) -> Hop {
        Hop { source, ifindex: 7, mtu: 1500, source_mac: [2; 6], mac: [3; 6] }
    }

    #[test]
    fn a_tick_asks_the_kernel_a_few_questions_however_many_peers_there_are() {
        let (hops, _file) = Shared::<Hops>::create(c"hops").unwrap();
        hops.seed(0x0123_4567_89ab_cdef);
        let mut peers = Peers::default();
        let (mut now, mut next) = (Instant::now(), 0);
        let mut asked = HashMap::new();
        let mut tick = |peers: &mut Peers, now: Instant| {
            let (mut questions, mut looks) = (0, 0);
            let choose = |_, remote| {
                questions += 1;
                let before = asked.insert(remote, now);
                // No route, which is remembered as an answer is.
                assert!(before.is_none_or(|at| now.duration_since(at) >= SOURCE_KEPT), "{remote}");
                None
            };
            peers.tick(&hops, now, choose, |_, _| {
                looks += 1;
                None
            });
            assert_eq!(looks, 0, "nothing is found without a source");
            questions
        };
        // A flood from ever other addresses.
        for _ in 0..1000 {
            for _ in 0..200 {
                hops.ask(&pair(next));
                next += 1;
            }
            let questions = tick(&mut peers, now);
            assert!(questions <= QUESTIONS_PER_TICK, "{questions}");
            now += TICK;
        }
        assert_eq!(peers.all.len(), hops::PLACES);
        assert_eq!(peers.schedule.len(), hops::PLACES);
        // All of it is forgotten.
        now += KEPT + TICK;
        for _ in 0..hops::PLACES / PEERS_PER_TICK {
            assert_eq!(tick(&mut peers, now), 0);
        }
        assert_eq!((peers.all.len(), peers.schedule.len()), (0, 0));
    }

    #[test]
    fn what_is_asked_for_is_entered_kept_and_forgotten() {
        let (hops, _file) = Shared::<Hops>::create(c"hops").unwrap();
        let mut peers = Peers::default();
        let start = Instant::now();
        let found = |source| Some(hop(source));
        let tick = |peers: &mut Peers, now, source| peers.tick(&hops, now, |_, _| source, |at, _| found(at));
        hops.ask(&pair(1));
        tick(&mut peers, start, None);
        assert_eq!(hops.find(&pair(1)), None);
        // The kernel is asked again after a while, and has a route now.
        tick(&mut peers, start + SOURCE_KEPT - TICK, Some(OURS));
        assert_eq!(hops.find(&pair(1)), None);
        tick(&mut peers, start + SOURCE_KEPT, Some(OURS));
        assert_eq!(hops.find(&pair(1)), Some(hop(OURS)));
        // That counts as a use; then there is none any more.
        tick(&mut peers, start + KEPT, Some(OURS));
        tick(&mut peers, start + KEPT + KEPT, Some(OURS));
        assert_eq!(peers.all.len(), 1);
        tick(&mut peers, start + KEPT + KEPT + TICK, Some(OURS));
        assert_eq!((peers.all.len(), hops.find(&pair(1))), (0, None));
    }
}
