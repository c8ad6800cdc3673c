//! Netlink sockets: one for queries, and one for events.
//!
//! Nothing here needs a privilege.
//!
//! They are for the thread that keeps next hops current: many queries are sent in one call, and
//! lost events and inconsistent dumps are detected.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};

use manylane_sys::netlink::{Attrs, NETLINK_ROUTE, NLM_F_DUMP, NetlinkSocket};
use manylane_sys::sock::{self, Buffer};

use super::rtnetlink::{KernelUpdate, Route, decode, parse_route_reply, parse_xdp_program};

/// Subscribed event groups of linux/rtnetlink.h.
const GROUPS: [u32; 8] = [
    1,  // RTNLGRP_LINK
    3,  // RTNLGRP_NEIGH
    5,  // RTNLGRP_IPV4_IFADDR
    7,  // RTNLGRP_IPV4_ROUTE
    8,  // RTNLGRP_IPV4_RULE
    9,  // RTNLGRP_IPV6_IFADDR
    11, // RTNLGRP_IPV6_ROUTE
    19, // RTNLGRP_IPV6_RULE
];
/// Next hop objects, which routes share; Linux 5.3.
const RTNLGRP_NEXTHOP: u32 = 32;

/// Requested size of the event buffer; the kernel may limit it. Lost events are detected.
const EVENT_BUFFER_BYTES: usize = 4 << 20;
/// Maximum number of queries per call. Their answers fit into a receive buffer of the default
/// size.
pub(super) const QUERIES_MAX: usize = 16;

/// Dumps of linux/rtnetlink.h: devices, addresses, neighbours. Each has its own header.
const GET_LINK: (u16, &[u8]) = (18, &[0; 16]);
const GET_ADDRESS: (u16, &[u8]) = (22, &[0; 8]);
const GET_NEIGHBOUR: (u16, &[u8]) = (30, &[0; 12]);
const RTM_GETROUTE: u16 = 26;
const IPPROTO_UDP: u8 = 17;

/// A route query. The kernel decides as for a datagram of this host: by tables, rules and weights.
#[derive(Clone, Copy, Debug)]
pub(super) struct RouteQuery {
    pub(super) local: IpAddr,
    pub(super) peer: IpAddr,
    /// The outgoing device, for addresses that are valid only on one.
    pub(super) device: Option<u32>,
}

/// The socket for events.
pub(super) struct EventSocket(NetlinkSocket);

impl EventSocket {
    /// Subscribes to events of the calling thread's namespace.
    pub(super) fn subscribe() -> io::Result<Self> {
        let socket = NetlinkSocket::open(NETLINK_ROUTE)?;
        // As large as allowed without privileges. If it is smaller, events are only lost earlier.
        let _ = sock::set_buffer(socket.as_fd(), Buffer::Receive, EVENT_BUFFER_BYTES);
        for group in GROUPS {
            socket.join(group)?;
        }
        // Optional: the kernel reports routes that use next hop objects anyway.
        let _ = socket.join(RTNLGRP_NEXTHOP);
        Ok(Self(socket))
    }

    /// Reads at most `max` datagrams of events; true if there may be more. `ENOBUFS` and
    /// `EBADMSG`: events were lost.
    pub(super) fn read(&mut self, max: usize, mut each: impl FnMut(KernelUpdate)) -> io::Result<bool> {
        for _ in 0..max {
            let Some(messages) = self.0.receive()? else { return Ok(false) };
            messages.filter_map(|message| decode(message.kind, message.payload)).for_each(&mut each);
        }
        Ok(true)
    }
}

impl AsFd for EventSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The socket for queries.
pub(super) struct QuerySocket(NetlinkSocket);

impl QuerySocket {
    pub(super) fn open() -> io::Result<Self> {
        NetlinkSocket::open(NETLINK_ROUTE).map(Self)
    }

    /// Dumps all devices, then addresses, then neighbours of the namespace to `each`. False if
    /// some changed meanwhile: the dump may then be inconsistent.
    pub(super) fn dump(&mut self, mut each: impl FnMut(KernelUpdate)) -> io::Result<bool> {
        let mut whole = true;
        for (kind, header) in [GET_LINK, GET_ADDRESS, GET_NEIGHBOUR] {
            whole &=
                self.0.request(kind, NLM_F_DUMP, header, |kind, payload| match decode(kind, payload) {
                    None | Some(KernelUpdate::Malformed) => {}
                    Some(fact) => each(fact),
                })?;
        }
        Ok(whole)
    }

    /// The id of the XDP program on a device, if there is one.
    pub(super) fn xdp_program_id(&mut self, ifindex: u32) -> io::Result<Option<u32>> {
        let mut found = None;
        self.0.request(GET_LINK.0, NLM_F_DUMP, GET_LINK.1, |_, payload| {
            found = found.or(parse_xdp_program(ifindex, payload));
        })?;
        Ok(found)
    }

    /// Queries routes, at most [`QUERIES_MAX`] at a time. Calls `each` with the index of each
    /// query that has a route, and the route. Any other decision of the kernel is no route.
    pub(super) fn routes<'a>(
        &mut self,
        questions: impl Iterator<Item = &'a RouteQuery>,
        mut each: impl FnMut(usize, Route),
    ) -> io::Result<()> {
        let (mut first, mut asked) = (0, 0);
        for question in questions.take(QUERIES_MAX) {
            let sequence = self.0.queue(RTM_GETROUTE, 0, &route_request(question));
            first = if asked == 0 { sequence } else { first };
            asked += 1;
        }
        if asked == 0 {
            return Ok(());
        }
        self.0.send()?;
        // One answer each, and as many again in case answers of an earlier call are left.
        for _ in 0..2 * asked {
            let Some(messages) = self.0.receive()? else { break };
            for message in messages {
                let index = message.sequence.wrapping_sub(first) as usize;
                if index < asked
                    && let Some(route) = parse_route_reply(message.kind, message.payload)
                {
                    each(index, route);
                }
            }
        }
        Ok(())
    }
}

/// Dumps objects of the calling thread's namespace to `each`, by a socket of its own, which ends a
/// dump that is too long. None if there are more than `max`; false if some changed meanwhile.
pub(super) fn dump_at_most(
    max: usize,
    kind: u16,
    header: &[u8],
    mut each: impl FnMut(&[u8]),
) -> io::Result<Option<bool>> {
    const NLMSG_ERROR: u16 = 2;
    const NLMSG_DONE: u16 = 3;
    const NLM_F_DUMP_INTR: u16 = 0x10;
    let mut socket = NetlinkSocket::open(NETLINK_ROUTE)?;
    let sequence = socket.queue(kind, NLM_F_DUMP, header);
    socket.send()?;
    let (mut count, mut is_consistent) = (0, true);
    while count <= max {
        let Some(messages) = socket.receive()? else {
            return Err(io::Error::other("the netlink reply does not end"));
        };
        for message in messages.filter(|message| message.sequence == sequence) {
            is_consistent &= message.flags & NLM_F_DUMP_INTR == 0;
            match message.kind {
                NLMSG_DONE => return Ok(Some(is_consistent)),
                NLMSG_ERROR => return Err(io::Error::other("the kernel refuses the dump")),
                _ if count < max => each(message.payload),
                _ => {}
            }
            count += 1;
        }
    }
    Ok(None)
}

/// `struct rtmsg` and its attributes.
fn route_request(question: &RouteQuery) -> Vec<u8> {
    const RTA_DST: u16 = 1;
    const RTA_SRC: u16 = 2;
    const RTA_OIF: u16 = 4;
    const RTA_IP_PROTO: u16 = 27;
    const AF_INET: u8 = 2;
    const AF_INET6: u8 = 10;
    let bytes = |ip| match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let (family, bits) = if question.peer.is_ipv4() { (AF_INET, 32) } else { (AF_INET6, 128) };
    let attrs = Attrs::default()
        .bytes(RTA_DST, &bytes(question.peer))
        .bytes(RTA_SRC, &bytes(question.local))
        .bytes(RTA_IP_PROTO, &[IPPROTO_UDP]);
    let attrs = question.device.into_iter().fold(attrs, |attrs, device| attrs.u32(RTA_OIF, device));
    [&[family, bits, bits][..], &[0; 9], attrs.as_bytes()].concat()
}
