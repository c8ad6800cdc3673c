//! The state of one lease, and the check that its socket may have it.

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use manylane_sys::bound_sockets::BoundSocket;

use super::connection::Client;
use super::devices::Member;
use super::peers::LeaseNextHops;
use crate::io::filter::SocketIndex;

/// The lease of one socket of a program.
pub(super) struct Lease {
    /// Identifies the lease in the locks of its queues.
    pub(super) number: u16,
    pub(super) client: Client,
    pub(super) addr: SocketAddr,
    pub(super) cookie: u64,
    pub(super) only_v6: bool,
    /// Time of the last check that its socket is still the only one there.
    pub(super) verified: Instant,
    pub(super) stage: Stage,
    /// Its socket number on each device that it has queues of.
    pub(super) socket_indexes: Vec<(u32, SocketIndex)>,
    pub(super) members: Vec<Member>,
    pub(super) next_hops: LeaseNextHops,
}

/// States of a lease, passed in this order, each at most once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Leased,
    Open,
    Closed,
}

/// Checks that all datagrams to a socket's bound address are for that socket and its lanes. `all`
/// are the sockets on its port.
pub(super) fn verify_binding(cookie: u64, ip: IpAddr, all: &[BoundSocket]) -> Result<(), &'static str> {
    let ours = all.iter().find(|bound| bound.cookie == cookie).filter(|ours| ours.ip == ip);
    let ours = ours.ok_or("it is not bound there")?;
    if ours.device != 0 {
        return Err("it is bound to a device");
    }
    if ours.is_connected {
        return Err("it is connected");
    }
    for other in all.iter().filter(|other| other.cookie != cookie && other.overlaps(ours)) {
        if other.uid != ours.uid {
            return Err("another user's socket is bound there");
        }
        // The kernel would prefer that socket for some datagrams.
        if other.is_connected
            || other.device != 0
            || other.ip != ours.ip && ours.matches(other.ip.to_canonical())
        {
            return Err("another socket is bound to a part of its addresses");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(cookie: u64, ip: &str) -> BoundSocket {
        let ip = ip.parse().unwrap();
        BoundSocket { cookie, ip, only_v6: false, device: 0, is_connected: false, uid: 7, inode: 0 }
    }

    #[test]
    fn a_socket_is_leased_only_queues_of_its_own_traffic() {
        let one = |ours: BoundSocket, others: &[BoundSocket]| {
            verify_binding(1, ours.ip, &[&[ours], others].concat())
        };
        let (any, some) = (bound(1, "0.0.0.0"), bound(1, "10.0.0.1"));
        let lane = |ours: BoundSocket| BoundSocket { cookie: 2, ..ours };
        assert_eq!((one(any, &[lane(any), lane(any)]), one(some, &[lane(some)])), (Ok(()), Ok(())));
        // At another address, or a less specific one.
        assert_eq!(one(some, &[bound(2, "10.0.0.2"), bound(3, "127.0.0.53"), bound(4, "0.0.0.0")]), Ok(()));
        let other_user = |ip| BoundSocket { uid: 8, ..bound(2, ip) };
        assert_eq!(one(some, &[other_user("10.0.0.2")]), Ok(()));
        let only_v6 = BoundSocket { only_v6: true, ..bound(1, "::") };
        assert_eq!(one(only_v6, &[other_user("0.0.0.0"), other_user("10.0.0.1")]), Ok(()));

        assert!(verify_binding(1, some.ip, &[lane(some)]).is_err(), "it was closed");
        assert!(verify_binding(1, any.ip, &[some]).is_err(), "it is bound elsewhere");
        assert!(one(BoundSocket { device: 1, ..any }, &[]).is_err());
        assert!(one(BoundSocket { is_connected: true, ..any }, &[]).is_err());
        assert!(one(any, &[other_user("0.0.0.0")]).is_err());
        assert!(one(any, &[BoundSocket { device: 3, ..other_user("0.0.0.0") }]).is_err());
        assert!(one(bound(1, "::"), &[other_user("10.0.0.1")]).is_err());
        assert!(one(any, &[bound(2, "10.0.0.1")]).is_err(), "the kernel gives that one its own");
        assert!(one(some, &[BoundSocket { is_connected: true, ..lane(some) }]).is_err());
        assert!(one(some, &[BoundSocket { device: 3, ..bound(2, "0.0.0.0") }]).is_err());
    }
}
