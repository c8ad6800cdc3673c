//! Next hops of the peers that lanes send to: asked of the kernel, entered where lanes read them.

use std::net::{IpAddr, UdpSocket};
use std::time::{Duration, Instant};

use manylane_sys::hops::{self, Hop, Pair};

use super::Lender;

/// A next hop that nobody used for so long is forgotten, and a question is not answered any more.
const KEPT: Duration = Duration::from_secs(60);
/// A source address that the kernel chose is asked for again.
const SOURCE_KEPT: Duration = Duration::from_secs(2);

/// A peer that lanes send to.
pub(super) struct Peer {
    pair: Pair,
    known: Option<Hop>,
    used: Instant,
    /// The address that the kernel would send from, and when it said so.
    source: Option<(IpAddr, Instant)>,
}

impl Lender {
    /// Enters what lanes ask for, and what has changed of it.
    pub(super) fn keep_hops(&mut self) {
        let now = Instant::now();
        let Self { hops, peers, reader, turn, .. } = self;
        reader.refresh();
        hops.questions(|pair| {
            if peers.len() < hops::PLACES {
                let fresh = Peer { pair, known: None, used: now, source: None };
                peers.entry([pair.local(), pair.peer()]).or_insert(fresh).used = now;
            }
        });
        peers.retain(|[local, remote], peer| {
            if hops.was_used(&peer.pair) {
                peer.used = now;
            }
            let hop = if now.duration_since(peer.used) > KEPT {
                None
            } else {
                peer.source(*local, *remote, now).and_then(|source| {
                    let next = reader.next_hop(source, *remote)?;
                    let (source_mac, mac) = (next.source_mac, next.mac);
                    Some(Hop { source, ifindex: next.ifindex, mtu: next.mtu, source_mac, mac })
                })
            };
            match (&hop, &peer.known) {
                (Some(found), known) if known.as_ref() != Some(found) => {
                    *turn = turn.wrapping_add(1);
                    // One that had to go is asked for again by its next datagram.
                    _ = hops.put(&peer.pair, found, *turn);
                }
                (None, Some(_)) => hops.forget(&peer.pair),
                _ => {}
            }
            peer.known = hop;
            now.duration_since(peer.used) <= KEPT
        });
    }
}

impl Peer {
    /// The address to send from: the socket's own, or the kernel's choice.
    fn source(&mut self, local: IpAddr, remote: IpAddr, now: Instant) -> Option<IpAddr> {
        if !local.is_unspecified() {
            return Some(local);
        }
        if let Some((source, _)) = self.source.filter(|(_, at)| now.duration_since(*at) < SOURCE_KEPT) {
            return Some(source);
        }
        // No datagram is sent: a socket that is connected has chosen.
        let chosen = UdpSocket::bind((local, 0)).and_then(|socket| {
            socket.connect((remote, 9))?;
            socket.local_addr()
        });
        self.source = chosen.ok().map(|addr| (addr.ip(), now));
        self.source.map(|(source, _)| source)
    }
}
