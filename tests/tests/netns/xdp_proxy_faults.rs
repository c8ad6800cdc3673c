//! Faults that connections through the proxy on TCP lanes survive.

use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::thread;

use manylane_proxy::Options;
use manylane_sys::packet::PacketSocket;
use manylane_sys::sock;
use manylane_testbed::{Host, Layout, Testbed, tcp_frame};
use manylane_tests::TEST_TIMEOUT;
use manylane_tests::proxy_suite::ProxyBed;
use manylane_tests::tcp_peer::{echo, exchange, exchange_during};
use manylane_wire::ethernet::Ethernet;
use manylane_wire::packet::Packet;
use manylane_wire::tcp::{self, Flags, Tcp, TcpHeader};

use crate::xdp_support::{add_queue, testbed_of_one_queue};
use crate::xdp_tcp_support::{change_mac, take_link_down, tcp_testbed, without_segmentation};

fn bed(name: &str) -> Option<Testbed> {
    tcp_testbed(name, &Layout { queues: 1, ipv6: false, ..Layout::default() })
}

/// Runs a connection with data in flight, on both sides of the proxy, through something that
/// happens to the network.
fn survive(testbed: Option<Testbed>, happen: impl FnOnce(&Host, &Host)) {
    let Some(testbed) = testbed else { return };
    let (linux, host) = (testbed.host(0).clone(), testbed.host(1).clone());
    let bed = ProxyBed::Netns(testbed);
    let listener = bed.listen();
    let proxy = bed.start(Options::default(), &[listener.local_addr().unwrap()]);
    let server = echo(listener, 2);
    exchange_during(bed.connect(&proxy), || happen(&linux, &host));
    exchange(bed.connect(&proxy), 1, 10_000);
    server.join().unwrap();
    let total = proxy.stop();
    assert_eq!((total.accepted, total.connected, total.finished), (2, 2, 2), "{total:#?}");
    assert_eq!(total.bytes_to_servers, total.bytes_to_clients, "{total:#?}");
}

#[test]
fn netns_proxy_survives_a_link_that_is_down() {
    survive(bed("netns_proxy_survives_a_link_that_is_down"), take_link_down);
}

#[test]
fn netns_proxy_survives_a_new_mac_of_the_next_hop() {
    survive(bed("netns_proxy_survives_a_new_mac_of_the_next_hop"), change_mac);
}

/// The kernel must not get what arrives while the lanes' addresses are not known again: it would
/// reset connections to servers.
#[test]
fn netns_proxy_survives_a_device_that_is_set_down() {
    survive(bed("netns_proxy_survives_a_device_that_is_set_down"), |linux, host| {
        host.set_link(0, false).unwrap();
        host.set_link(0, true).unwrap();
        host.wait_for_carrier(0).unwrap();
        linux.wait_for_carrier(0).unwrap();
    });
}

#[test]
fn netns_proxy_survives_added_queues() {
    let testbed = testbed_of_one_queue("netns_proxy_survives_added_queues");
    survive(testbed.map(without_segmentation), add_queue);
}

/// One end of a connection to the proxy, as a third host on the link sees it.
struct Intruder<'a> {
    hosts: (&'a Host, &'a Host),
    socket: PacketSocket,
    /// Whose segments it forges, and to whom.
    ends: (SocketAddr, SocketAddr),
    /// The number that the proxy expects, and the one that it sends next.
    expected: u32,
    sent: u32,
}

impl<'a> Intruder<'a> {
    /// Listens to a connection, until `talk` has made the proxy send data over it.
    fn new(hosts: (&'a Host, &'a Host), ends: (SocketAddr, SocketAddr), talk: impl FnOnce()) -> Self {
        let socket = hosts.0.run(|| PacketSocket::listen(hosts.0.device_index(0).unwrap())).unwrap();
        sock::set_recv_timeout(socket.as_fd(), TEST_TIMEOUT).unwrap();
        let mut intruder = Self { hosts, socket, ends, expected: 0, sent: 0 };
        talk();
        let (expected, sent) = intruder.wait_for(|tcp| {
            let sent = tcp.sequence.wrapping_add(tcp.payload.len() as u32);
            (!tcp.payload.is_empty()).then_some((tcp.acknowledgment, sent))
        });
        (intruder.expected, intruder.sent) = (expected, sent);
        intruder
    }

    /// Waits for a segment of the proxy.
    fn wait_for<T>(&self, mut wanted: impl FnMut(&Tcp<'_>) -> Option<T>) -> T {
        loop {
            let frame = self.socket.receive().unwrap();
            let Ok((_, packet)) = Ethernet::parse(&frame) else { continue };
            let Some(packet) = Packet::parse(packet) else { continue };
            let Ok(tcp) = Tcp::parse(packet.payload) else { continue };
            let (us, proxy) = self.ends;
            let is_of_it =
                (packet.source, tcp.source, tcp.destination) == (proxy.ip(), proxy.port(), us.port());
            if let Some(found) = wanted(&tcp).filter(|_| is_of_it) {
                return found;
            }
        }
    }

    /// Sends a segment whose number is this far behind the expected one.
    fn send(&self, ahead: u32, acknowledgment: u32, flags: Flags, payload: &[u8]) {
        let ((linux, host), (SocketAddr::V4(us), SocketAddr::V4(proxy))) = (self.hosts, self.ends) else {
            panic!("not IPv4")
        };
        let tcp = TcpHeader {
            source: us.into(),
            destination: proxy.into(),
            sequence: self.expected.wrapping_add(ahead),
            acknowledgment,
            flags,
            window: 1000,
            urgent: 0,
            options: tcp::Options::default(),
        };
        let frame = tcp_frame((linux, host, 0), [None; 2], &tcp, payload).unwrap();
        self.socket.send(&frame).unwrap();
    }

    /// Forges what must not end the connection, and waits until the proxy has answered all that it
    /// answers.
    fn intrude(&self) {
        const FAR: u32 = 1 << 24;
        let ack = Flags::ACK;
        let is_ack = |tcp: &Tcp<'_>| {
            let is_bare = tcp.payload.is_empty() && tcp.flags == ack;
            (is_bare && tcp.acknowledgment == self.expected).then_some(())
        };
        // Within the window, but not exact: a challenge ACK, of which there are not many.
        self.send(100, 0, Flags::RST, b"");
        self.wait_for(is_ack);
        self.send(1, 0, Flags::SYN, b"");
        // Of bytes that were never sent.
        self.send(0, self.sent.wrapping_add(FAR), ack, b"forged");
        // Outside of it: dropped.
        for ahead in [u32::MAX, FAR, FAR.wrapping_neg()] {
            self.send(ahead, 0, Flags::RST, b"");
            self.send(ahead, self.sent, Flags::RST.with(ack), b"");
        }
        // Data outside of the window is dropped, too. An ACK says what is expected.
        for ahead in [FAR, 2000_u32.wrapping_neg()] {
            self.send(ahead, self.sent, ack, b"forged");
            self.wait_for(is_ack);
        }
    }
}

/// Segments of an intruder, who knows the addresses and not the numbers, end no connection, and add
/// no byte.
#[test]
fn netns_proxy_survives_forged_segments() {
    let Some(testbed) = bed("netns_proxy_survives_forged_segments") else { return };
    let (linux, host) = (testbed.host(0).clone(), testbed.host(1).clone());
    let bed = ProxyBed::Netns(testbed);
    let listener = bed.listen();
    let proxy = bed.start(Options::default(), &[listener.local_addr().unwrap()]);
    let mut client = bed.connect(&proxy);
    let (mut server, _) = listener.accept().unwrap();
    server.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    let mut bytes = [0; 4];
    // Each before the other side says more, so that nothing else is acknowledged meanwhile.
    let (local, peer) = (server.local_addr().unwrap(), server.peer_addr().unwrap());
    let to_server = Intruder::new((&linux, &host), (local, peer), || {
        client.write_all(b"ask?").unwrap();
        server.read_exact(&mut bytes).unwrap();
    });
    assert_eq!(&bytes, b"ask?");
    to_server.intrude();
    let (local, peer) = (client.local_addr().unwrap(), client.peer_addr().unwrap());
    let to_client = Intruder::new((&linux, &host), (local, peer), || {
        server.write_all(b"yes!").unwrap();
        client.read_exact(&mut bytes).unwrap();
    });
    assert_eq!(&bytes, b"yes!");
    to_client.intrude();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut bytes = Vec::new();
            server.read_to_end(&mut bytes).unwrap();
            server.write_all(&bytes).unwrap();
            drop(server);
        });
        exchange(client, 1, 200_000);
    });
    let total = proxy.stop();
    assert_eq!((total.accepted, total.finished), (1, 1), "{total:#?}");
    assert_eq!((total.bytes_to_servers, total.bytes_to_clients), (200_004, 200_004), "{total:#?}");
}
