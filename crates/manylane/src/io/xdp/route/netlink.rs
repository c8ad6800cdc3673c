//! Netlink sockets: one for queries, and one for events.
//!
//! Nothing here needs a privilege.
//!
//! This client is for the thread that keeps next hops current: it never waits, sends many queries
//! in one call, and detects lost events and inconsistent dumps. The doctor of the command line has
//! its own, which waits for each reply: the two share only the split of a datagram into messages,
//! six lines that this crate would have to export.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};

use manylane_sys::errno::{EINTR, ENOBUFS};
use manylane_sys::sock::{self, Buffer};
use netlink_packet_core::{
    NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NetlinkHeader, NetlinkMessage,
    parse_i32,
};
use netlink_packet_route::address::AddressMessage;
use netlink_packet_route::link::LinkMessage;
use netlink_packet_route::neighbour::NeighbourMessage;
use netlink_packet_route::route::{RouteAttribute, RouteMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};

use super::rtnetlink::{KernelUpdate, Route, decode, messages, parse_route_reply, parse_xdp_program};

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
/// Larger than any datagram of the kernel (at most 32 KiB, in a dump).
const DATAGRAM_SIZE_MAX: usize = 64 << 10;
/// Maximum number of datagrams of a dump, in case it has no end.
const DUMP_DATAGRAMS_MAX: usize = 1 << 16;
/// Maximum number of queries per call. Their answers fit into a receive buffer of the default
/// size.
pub(super) const QUERIES_MAX: usize = 16;

/// MSG_TRUNC of linux/socket.h: a receive returns the full length, so that truncation is detected.
const MSG_TRUNC: i32 = 0x20;
const IPPROTO_UDP: u8 = 17;

/// A route query. The kernel decides as for a datagram of this host: by tables, rules and weights.
#[derive(Clone, Copy, Debug)]
pub(super) struct RouteQuery {
    pub(super) local: IpAddr,
    pub(super) peer: IpAddr,
    /// The outgoing device, for addresses that are valid only on one.
    pub(super) device: Option<u32>,
}

/// A netlink socket with a receive buffer.
struct NetlinkSocket {
    socket: Socket,
    buffer: Vec<u8>,
}

impl NetlinkSocket {
    /// A socket in the namespace of the calling thread.
    fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.set_non_blocking(true)?;
        Ok(Self { socket, buffer: Vec::with_capacity(DATAGRAM_SIZE_MAX) })
    }

    /// Receives the next datagram of the kernel; false if there is none.
    fn receive(&mut self) -> io::Result<bool> {
        self.buffer.clear();
        match self.socket.recv_from(&mut self.buffer, MSG_TRUNC) {
            Ok((length, _)) if length > self.buffer.len() => Err(io::Error::from_raw_os_error(ENOBUFS)),
            Ok((_, from)) => {
                // Ignore processes with CAP_NET_ADMIN, which can write to this socket too.
                if from.port_number() != 0 {
                    self.buffer.clear();
                }
                Ok(true)
            }
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(err) if err.raw_os_error() == Some(EINTR) => {
                self.buffer.clear();
                Ok(true)
            }
            Err(err) => Err(err),
        }
    }
}

/// The socket for events.
pub(super) struct EventSocket(NetlinkSocket);

impl EventSocket {
    /// Subscribes to events of the calling thread's namespace.
    pub(super) fn subscribe() -> io::Result<Self> {
        let line = NetlinkSocket::open()?;
        // As large as allowed without privileges. If it is smaller, events are only lost earlier.
        let _ = sock::set_buffer(line.socket.as_fd(), Buffer::Receive, EVENT_BUFFER_BYTES);
        for group in GROUPS {
            line.socket.add_membership(group)?;
        }
        // Optional: the kernel reports routes that use next hop objects anyway.
        let _ = line.socket.add_membership(RTNLGRP_NEXTHOP);
        Ok(Self(line))
    }

    /// Reads at most `most` datagrams of events; true if there may be more. `ENOBUFS`: events were
    /// lost.
    pub(super) fn read(&mut self, most: usize, mut each: impl FnMut(KernelUpdate)) -> io::Result<bool> {
        for _ in 0..most {
            if !self.0.receive()? {
                return Ok(false);
            }
            for message in messages(&self.0.buffer) {
                if let Some(fact) = decode(message.message_type(), message.payload()) {
                    each(fact);
                }
            }
        }
        Ok(true)
    }
}

impl AsFd for EventSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.socket.as_fd()
    }
}

/// The socket for queries.
///
/// The kernel answers within the call that sends, so nothing here waits.
pub(super) struct QuerySocket {
    netlink: NetlinkSocket,
    seq: u32,
    request: Vec<u8>,
}

impl QuerySocket {
    pub(super) fn open() -> io::Result<Self> {
        Ok(Self { netlink: NetlinkSocket::open()?, seq: 0, request: Vec::new() })
    }

    /// Dumps all devices, then addresses, then neighbours of the namespace to `each`. False if
    /// some changed meanwhile: the dump may then be inconsistent.
    pub(super) fn dump(&mut self, mut each: impl FnMut(KernelUpdate)) -> io::Result<bool> {
        let mut whole = true;
        for what in [
            RouteNetlinkMessage::GetLink(LinkMessage::default()),
            RouteNetlinkMessage::GetAddress(AddressMessage::default()),
            RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default()),
        ] {
            whole &= self.dump_one(what, &mut each)?;
        }
        Ok(whole)
    }

    fn dump_one(
        &mut self,
        what: RouteNetlinkMessage,
        each: &mut impl FnMut(KernelUpdate),
    ) -> io::Result<bool> {
        self.dump_raw(what, &mut |kind, payload| match decode(kind, payload) {
            None | Some(KernelUpdate::Malformed) => {}
            Some(fact) => each(fact),
        })
    }

    /// The id of the XDP program on a device, if there is one.
    pub(super) fn xdp_program_id(&mut self, ifindex: u32) -> io::Result<Option<u32>> {
        let mut found = None;
        self.dump_raw(RouteNetlinkMessage::GetLink(LinkMessage::default()), &mut |_, payload| {
            found = found.or(parse_xdp_program(ifindex, payload));
        })?;
        Ok(found)
    }

    fn dump_raw(&mut self, what: RouteNetlinkMessage, each: &mut impl FnMut(u16, &[u8])) -> io::Result<bool> {
        self.discard();
        let sequence = self.write(what, NLM_F_DUMP);
        self.send()?;
        let mut whole = true;
        for _ in 0..DUMP_DATAGRAMS_MAX {
            if !self.netlink.receive()? {
                break;
            }
            for message in
                messages(&self.netlink.buffer).filter(|message| message.sequence_number() == sequence)
            {
                whole &= message.flags() & NLM_F_DUMP_INTR == 0;
                match message.message_type() {
                    NLMSG_DONE => return Ok(whole),
                    NLMSG_ERROR => {
                        let code = message.payload().get(..4).and_then(|code| parse_i32(code).ok());
                        return Err(io::Error::from_raw_os_error(code.unwrap_or(0).saturating_abs()));
                    }
                    kind => each(kind, message.payload()),
                }
            }
        }
        Err(io::Error::other("the kernel's dump of its tables is incomplete"))
    }

    /// Queries routes, at most [`QUERIES_MAX`] at a time. Calls `each` with the index of each
    /// query that has a route, and the route. Any other decision of the kernel is no route.
    pub(super) fn routes<'a>(
        &mut self,
        questions: impl Iterator<Item = &'a RouteQuery>,
        mut each: impl FnMut(usize, Route),
    ) -> io::Result<()> {
        let first = self.seq.wrapping_add(1);
        for question in questions.take(QUERIES_MAX) {
            self.write(route_request(question), 0);
        }
        let asked = self.seq.wrapping_add(1).wrapping_sub(first) as usize;
        if asked == 0 {
            return Ok(());
        }
        self.send()?;
        // One answer each, and as many again in case answers of an earlier call are left.
        for _ in 0..2 * asked {
            if !self.netlink.receive()? {
                break;
            }
            for message in messages(&self.netlink.buffer) {
                let index = message.sequence_number().wrapping_sub(first) as usize;
                if index < asked
                    && let Some(route) = parse_route_reply(message.message_type(), message.payload())
                {
                    each(index, route);
                }
            }
        }
        Ok(())
    }

    /// Discards answers of earlier queries.
    fn discard(&mut self) {
        for _ in 0..DUMP_DATAGRAMS_MAX {
            if matches!(self.netlink.receive(), Ok(false)) {
                break;
            }
        }
    }

    /// Appends a request to those that are sent next; returns its number.
    fn write(&mut self, request: RouteNetlinkMessage, flags: u16) -> u32 {
        self.seq = self.seq.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.seq;
        let mut message = NetlinkMessage::new(header, request.into());
        message.finalize();
        let start = self.request.len();
        self.request.resize(start + message.buffer_len().next_multiple_of(4), 0);
        message.serialize(&mut self.request[start..]);
        self.seq
    }

    fn send(&mut self) -> io::Result<()> {
        let sent = self.netlink.socket.send_to(&self.request, &SocketAddr::new(0, 0), 0);
        self.request.clear();
        sent.map(|_| ())
    }
}

fn route_request(question: &RouteQuery) -> RouteNetlinkMessage {
    let (family, length) = match question.peer {
        IpAddr::V4(_) => (AddressFamily::Inet, 32),
        IpAddr::V6(_) => (AddressFamily::Inet6, 128),
    };
    let mut request = RouteMessage::default();
    request.header.address_family = family;
    request.header.destination_prefix_length = length;
    request.header.source_prefix_length = length;
    request.attributes = vec![
        RouteAttribute::Destination(question.peer.into()),
        RouteAttribute::Source(question.local.into()),
        RouteAttribute::IpProto(IPPROTO_UDP),
    ];
    request.attributes.extend(question.device.map(RouteAttribute::Oif));
    RouteNetlinkMessage::GetRoute(request)
}
