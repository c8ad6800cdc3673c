//! Engine `xdp` and the bytes of its replies: with every method of sending, the headers are the
//! expected ones, and the next hop is the kernel's.

use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;

use crate::netns_support::{client, wait_until};
use crate::xdp_support::{any_port, frame, ping_until_sent_by_xdp, two_queues, xdp};
use manylane::{Batch, Outbox};
use manylane_sys::packet::PacketSocket;
use manylane_sys::sock;
use manylane_test_support::wait_for;
use manylane_testbed::Host;
use manylane_tests::{Serving, TEST_TIMEOUT, pattern};
use manylane_wire::checksum::Sum;
use manylane_wire::ethernet::{Mac, Vlan, ether_type};
use manylane_wire::frame::{Frame, UdpFrame};

/// Longer than a request.
const SUFFIX: &[u8] = b" and more than was asked for";

/// The VLAN tags of a frame, the outer one first.
type VlanTags = [Option<Vlan>; 2];

/// Handling of a request, selected by the first byte of its payload.
#[derive(Clone, Copy, Debug)]
enum ReplyMode {
    /// Sends the payload back in place.
    Whole = b'=' as isize,
    /// Sends a part of it back in place.
    Part = b'<' as isize,
    /// Sends a copy of it.
    Copy = b'c' as isize,
    /// Sends it with more bytes appended.
    Longer = b'>' as isize,
    /// Builds the reply in the lane's buffer.
    Built = b'b' as isize,
    /// Sends a part of it, and then all of it, both in place, and then more.
    Triple = b'3' as isize,
    /// Sends an empty datagram.
    Empty = b'0' as isize,
}

const REPLY_MODES: [ReplyMode; 7] = [
    ReplyMode::Whole,
    ReplyMode::Part,
    ReplyMode::Copy,
    ReplyMode::Longer,
    ReplyMode::Built,
    ReplyMode::Triple,
    ReplyMode::Empty,
];

impl ReplyMode {
    fn from_payload(payload: &[u8]) -> Self {
        REPLY_MODES.into_iter().find(|how| payload.first() == Some(&(*how as u8))).unwrap_or(Self::Whole)
    }

    /// A request of `len` bytes, at least one.
    fn request(self, len: usize) -> Vec<u8> {
        let mut payload = pattern(len, len.max(1));
        payload[0] = self as u8;
        payload
    }

    /// The expected replies.
    fn replies(self, payload: &[u8]) -> Vec<Vec<u8>> {
        let part = payload[..payload.len() / 2].to_vec();
        let longer = [payload, SUFFIX].concat();
        match self {
            Self::Whole | Self::Copy => vec![payload.to_vec()],
            Self::Part => vec![part],
            Self::Longer | Self::Built => vec![longer],
            Self::Triple => vec![part, payload.to_vec(), longer],
            Self::Empty => vec![Vec::new()],
        }
    }
}

fn send_replies<'a>(batch: Batch<'a>, out: &mut Outbox<'a>) {
    for datagram in batch {
        let payload = datagram.payload();
        let (part, longer) = (&payload[..payload.len() / 2], [payload, SUFFIX].concat());
        match ReplyMode::from_payload(payload) {
            ReplyMode::Whole => out.reply_borrowed(&datagram, payload),
            ReplyMode::Part => out.reply_borrowed(&datagram, part),
            ReplyMode::Copy => out.reply(&datagram, payload),
            ReplyMode::Longer => out.reply(&datagram, &longer),
            ReplyMode::Built => out.reply_with(&datagram, longer.len() + 9, |space| {
                space[..longer.len()].copy_from_slice(&longer);
                longer.len()
            }),
            ReplyMode::Triple => {
                out.reply_borrowed(&datagram, part);
                out.reply_borrowed(&datagram, payload);
                out.reply(&datagram, &longer);
            }
            ReplyMode::Empty => out.reply(&datagram, &[]),
        }
    }
}

/// A peer that sends and receives frames, and its server.
struct FramePeer<'t> {
    a: &'t Host,
    b: &'t Host,
    serving: Serving,
    socket: PacketSocket,
    /// A socket for the port, so that the kernel does not answer replies by ICMP.
    port_holder: UdpSocket,
}

impl<'t> FramePeer<'t> {
    /// With a next hop that is known.
    fn start(a: &'t Host, b: &'t Host, ipv6: bool) -> Self {
        let at = if ipv6 { SocketAddr::new(b.ip(0, true), 0) } else { any_port(b) };
        let socket = xdp(b, at, |builder| {
            _ = builder.xdp_vlan("5".parse().unwrap()).xdp_vlan("100.5".parse().unwrap());
        });
        let serving = b.run(|| Serving::start(socket, send_replies));
        ping_until_sent_by_xdp(&client(a, a.ip(0, ipv6), serving.addr), &serving.handle);
        let held = a.run(|| UdpSocket::bind((a.ip(0, ipv6), 0))).unwrap();
        let socket = a.run(|| PacketSocket::listen(a.device_index(0).unwrap())).unwrap();
        sock::set_recv_timeout(socket.as_fd(), TEST_TIMEOUT).unwrap();
        Self { a, b, serving, socket, port_holder: held }
    }

    fn from(&self) -> SocketAddr {
        self.port_holder.local_addr().unwrap()
    }

    /// A request from this peer.
    fn request(&self, tags: VlanTags, payload: &[u8]) -> Vec<u8> {
        frame((self.a, self.from()), (self.b, self.serving.addr), payload, |plan| {
            (plan.vlans, plan.traffic_class, plan.ttl) = (tags, 0x28, 9);
        })
    }

    /// The expected reply to it, to a next hop.
    fn reply(&self, hop: Mac, tags: VlanTags, payload: &[u8]) -> Vec<u8> {
        let plan = UdpFrame::new(Mac(self.b.mac(0)), hop, self.serving.addr, self.from());
        let plan = UdpFrame { vlans: tags, payload, ..plan };
        let mut bytes = vec![0; plan.len()];
        plan.write(&mut bytes).unwrap();
        bytes
    }

    /// Sends a request, and returns the `count` frames of its replies, and whether all of them
    /// passed the kernel by.
    fn exchange(&self, request: &[u8], count: usize) -> (Vec<Vec<u8>>, bool) {
        let before = self.serving.handle.counters().total();
        self.socket.send(request).unwrap();
        let replies = (0..count).map(|_| self.recv_frame()).collect();
        let sent = |total: &manylane::LaneCounters| total.sent - before.sent >= count as u64;
        wait_until("all replies sent", &self.serving.handle, || {
            sent(&self.serving.handle.counters().total())
        });
        let after = self.serving.handle.counters().total();
        (replies, after.sent_by_bypass - before.sent_by_bypass == count as u64)
    }

    /// The next frame from the server. The socket also receives our own frames and those of the
    /// kernels, which are skipped.
    fn recv_frame(&self) -> Vec<u8> {
        // After the process was stopped, the wait returns nothing, and is repeated.
        let mut in_vain = 0;
        loop {
            let got = match self.socket.receive() {
                Ok(got) => got,
                Err(err) if err.kind() == ErrorKind::Interrupted => continue,
                Err(err) if err.kind() == ErrorKind::WouldBlock && in_vain == 0 => {
                    in_vain += 1;
                    continue;
                }
                Err(err) => panic!("no reply: {err}, {:#?}", self.serving.handle.counters()),
            };
            let ends = Frame::parse(&got).ok().and_then(|frame| frame.endpoints());
            if ends == Some((self.serving.addr, self.from())) {
                return got;
            }
        }
    }

    /// The replies to a request, all past the kernel: again as long as it has to resolve the peer.
    fn exchange_by_xdp(&self, request: &[u8], count: usize) -> Vec<Vec<u8>> {
        let exchange = || self.exchange(request, count);
        wait_for("replies past the kernel", exchange, |(_, by_xdp)| *by_xdp).0
    }

    /// Sends a request with method `how`, and compares all replies.
    fn check(&self, how: ReplyMode, tags: VlanTags, len: usize) {
        let payload = how.request(len);
        self.compare(&self.request(tags, &payload), tags, &how.replies(&payload));
    }

    fn compare(&self, request: &[u8], tags: VlanTags, replies: &[Vec<u8>]) {
        let hop = Mac(self.a.mac(0));
        let expected: Vec<_> = replies.iter().map(|payload| self.reply(hop, tags, payload)).collect();
        assert_eq!(self.exchange_by_xdp(request, replies.len()), expected);
    }

    fn finish(self) {
        let total = self.serving.stop().unwrap().total();
        assert_eq!((total.lost(), total.recv_errors), (0, 0), "{total:#?}");
    }
}

fn tag(ether_type: u16, control: u16) -> Option<Vlan> {
    Some(Vlan { ether_type, tci: control })
}

/// Every kind of reply, to requests of all boundary lengths, with and without tags.
#[test]
fn netns_xdp_replies_match_the_header_writers_byte_for_byte() {
    let name = "netns_xdp_replies_match_the_header_writers_byte_for_byte";
    let Some(testbed) = two_queues(name) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    for ipv6 in [false, true] {
        let talk = FramePeer::start(a, b, ipv6);
        for tags in [
            [None, None],
            [tag(ether_type::VLAN, 0x6005), None],
            [tag(ether_type::SERVICE_VLAN, 100), tag(ether_type::VLAN, 5)],
        ] {
            for how in REPLY_MODES {
                for len in [1, 2, 3, 7, 8, 10, 17, 64, 255, 256, 400] {
                    talk.check(how, tags, len);
                }
            }
            // Long enough for checksum offload, if the device supported it.
            for len in [511, 512, 1001, 1400] {
                talk.check(ReplyMode::Whole, tags, len);
            }
        }
        talk.finish();
    }
}

/// Special checksums: none, a partial one, and zero.
#[test]
fn netns_xdp_replies_always_have_a_checksum() {
    let name = "netns_xdp_replies_always_have_a_checksum";
    let Some(testbed) = two_queues(name) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    for ipv6 in [false, true] {
        let talk = FramePeer::start(a, b, ipv6);
        let at = if ipv6 { 54 } else { 34 } + 6;
        for how in REPLY_MODES {
            let payload = how.request(33);
            let good = talk.request([None; 2], &payload);
            let with = |field: u16| {
                let mut changed = good.clone();
                changed[at..at + 2].copy_from_slice(&field.to_be_bytes());
                changed
            };
            let length = (8 + payload.len()) as u16;
            let pseudo = match (talk.from().ip(), talk.serving.addr.ip()) {
                (std::net::IpAddr::V4(from), std::net::IpAddr::V4(to)) => {
                    Sum::pseudo_v4(from, to, 17, length)
                }
                (std::net::IpAddr::V6(from), std::net::IpAddr::V6(to)) => {
                    Sum::pseudo_v6(from, to, 17, length.into())
                }
                _ => unreachable!("both are of one family"),
            };
            talk.compare(&with(pseudo.value()), [None; 2], &how.replies(&payload));
            if !ipv6 {
                talk.compare(&with(0), [None; 2], &how.replies(&payload));
            }
            // Two bytes that make the checksum zero, which is sent as 0xffff: some pair does.
            let zero = (0..=u16::MAX).find_map(|end| {
                let mut payload = how.request(32);
                payload[30..].copy_from_slice(&end.to_be_bytes());
                let request = talk.request([None; 2], &payload);
                (request[at..at + 2] == [0xff, 0xff]).then_some((request, payload))
            });
            let (request, payload) = zero.unwrap();
            talk.compare(&request, [None; 2], &how.replies(&payload));
        }
        talk.finish();
    }
}

/// The server's neighbour changes its hardware address: replies follow it, whatever the requests
/// contain, and follow it back.
#[test]
fn netns_xdp_replies_use_the_current_next_hop() {
    let Some(testbed) = two_queues("netns_xdp_replies_use_the_current_next_hop") else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    for ipv6 in [false, true] {
        let talk = FramePeer::start(a, b, ipv6);
        let other = Mac([2, 0xab, 0xcd, 1, 2, 3]);
        for hop in [other, Mac(a.mac(0)), other, Mac(a.mac(0))] {
            let neighbour = a.ip(0, ipv6).to_string();
            b.ip_batch(&format!(
                "neigh replace {neighbour} lladdr {hop} dev {} nud permanent\n",
                b.device(0)
            ))
            .unwrap();
            let payload = ReplyMode::Whole.request(20);
            let request = talk.request([None; 2], &payload);
            let reply = talk.reply(hop, [None; 2], &payload);
            // The lanes learn it by netlink, after a moment.
            let what = format!("a reply to {hop} (replies, by XDP)");
            wait_for(&what, || talk.exchange(&request, 1), |seen| *seen == (vec![reply.clone()], true));
            // Then all replies of each kind.
            for how in REPLY_MODES {
                let payload = how.request(21);
                let replies = how.replies(&payload);
                let expected: Vec<_> =
                    replies.iter().map(|payload| talk.reply(hop, [None; 2], payload)).collect();
                let request = talk.request([None; 2], &payload);
                assert_eq!(talk.exchange_by_xdp(&request, replies.len()), expected);
            }
        }
        talk.finish();
    }
}
