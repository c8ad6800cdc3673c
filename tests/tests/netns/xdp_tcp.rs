//! Lanes of TCP on the queues of a device, against the kernel's TCP at the other end of the link.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use manylane::tcp::congestion::{Algorithm, NewController};
use manylane::tcp::{Reason, TcpBuilder, TcpCounters, What};
use manylane::{Builder, Engine, ErrorKind, Received};
use manylane_sys::epoll::Epoll;
use manylane_sys::packet::PacketSocket;
use manylane_sys::sock;
use manylane_testbed::{Host, Layout, tcp_frame};
use manylane_tests::tcp_peer::{self, exchange, exchange_during};
use manylane_wire::ethernet::{Ethernet, Vlan, ether_type};
use manylane_wire::packet::Packet;
use manylane_wire::tcp::{Flags, Options, Tcp, TcpHeader};

use crate::netns_support::client;
use crate::tcp_support::kernel_clients;
use crate::xdp_tcp_support::{Lanes, TICK, ask, change_mac, echo, echo_until, take_link_down, tcp_testbed};

const PORT: u16 = 4280;

fn sum(lanes: &[TcpCounters], of: impl Fn(&TcpCounters) -> u64) -> u64 {
    lanes.iter().map(of).sum()
}

/// No packet was refused, and none was answered by a reset: unless a lane was held up, sent
/// something again, and got the answer to that when the connection was over.
fn assert_clean(lanes: &[TcpCounters]) {
    let bad = |lane: &TcpCounters| {
        lane.stack.dropped_malformed + lane.stack.dropped_checksum + lane.malformed + lane.unsent
    };
    assert_eq!(sum(lanes, bad), 0, "{lanes:#?}");
    let late = sum(lanes, |lane| lane.stack.retransmitted);
    assert!(sum(lanes, |lane| lane.stack.resets_sent + lane.stack.dropped_unknown) <= 2 * late, "{lanes:#?}");
}

/// Clients of the kernel against an echo server on lanes.
fn serve(name: &str, queues: u32, ipv6: bool, clients: (usize, usize, usize)) {
    serve_by(name, queues, ipv6, clients, |_| {});
}

fn serve_by(
    name: &str,
    queues: u32,
    ipv6: bool,
    clients: (usize, usize, usize),
    change: impl FnOnce(&mut TcpBuilder) + Send,
) {
    let Some(testbed) = tcp_testbed(name, &Layout { queues, ..Layout::default() }) else { return };
    let (linux, host) = (testbed.host(0), testbed.host(1));
    let server = SocketAddr::new(host.ip(0, ipv6), PORT);
    let listen = |builder: &mut TcpBuilder| change(builder.lanes(queues as usize).listen(server).unwrap());
    let lanes = Lanes::start(host, listen, echo);
    let (threads, each, length) = clients;
    kernel_clients(linux, server, threads, each, length);
    let counters = lanes.stop();
    assert_eq!(counters.len(), queues as usize);
    assert_eq!(sum(&counters, |lane| lane.stack.accepted), (threads * each) as u64, "{counters:#?}");
    assert_clean(&counters);
}

#[test]
fn netns_tcp_lane_serves_a_thousand_connections() {
    serve("netns_tcp_lane_serves_a_thousand_connections", 1, false, (20, 50, 2000));
}

#[test]
fn netns_tcp_lane_moves_bulk_data() {
    serve("netns_tcp_lane_moves_bulk_data", 1, true, (4, 1, 5_000_000));
}

#[test]
fn netns_tcp_lane_serves_in_spite_of_delays() {
    let delay = |builder: &mut TcpBuilder| _ = builder.rx_coalesce(Duration::from_micros(500));
    serve_by("netns_tcp_lane_serves_in_spite_of_delays", 1, false, (10, 20, 20_000), delay);
}

#[test]
fn netns_tcp_lanes_of_two_queues_serve_linux() {
    serve("netns_tcp_lanes_of_two_queues_serve_linux", 2, false, (16, 4, 200_000));
}

/// An echo server of the kernel, for this many connections.
fn kernel_echo(host: &Host, ipv6: bool, connections: usize) -> (SocketAddr, thread::JoinHandle<()>) {
    let listener = host.run(|| TcpListener::bind((host.ip(0, ipv6), 0)).unwrap());
    (listener.local_addr().unwrap(), tcp_peer::echo(listener, connections))
}

/// Lanes that connect to a server of the kernel.
fn connect(name: &str, queues: u32, ipv6: bool, (connections, length): (usize, usize)) {
    let Some(testbed) = tcp_testbed(name, &Layout { queues, ..Layout::default() }) else { return };
    let (linux, host) = (testbed.host(0), testbed.host(1));
    let (server, echo) = kernel_echo(linux, ipv6, connections * queues as usize);
    // A lane that has ended takes nothing from others.
    let done = Arc::new(AtomicU32::new(0));
    let change = |builder: &mut TcpBuilder| _ = builder.lanes(queues as usize).source_ports(61_184..=65_535);
    let lanes = Lanes::start(host, change, move |lane, _| {
        ask(lane, server, 0..connections, length);
        done.fetch_add(1, Ordering::AcqRel);
        while done.load(Ordering::Acquire) < queues {
            lane.wait(Duration::from_millis(1)).unwrap();
        }
    });
    let counters = lanes.wait();
    echo.join().unwrap();
    let connected = sum(&counters, |lane| lane.stack.connected);
    assert_eq!(connected, connections as u64 * u64::from(queues), "{counters:#?}");
    assert_clean(&counters);
    // At first the neighbour is not known, and the kernel sends.
    assert!(sum(&counters, |lane| lane.sent_by_kernel) > 0, "{counters:#?}");
}

#[test]
fn netns_tcp_lane_connects_to_linux() {
    connect("netns_tcp_lane_connects_to_linux", 1, false, (100, 20_000));
}

#[test]
fn netns_tcp_lanes_hand_answers_over() {
    connect("netns_tcp_lanes_hand_answers_over", 2, true, (20, 100_000));
}

/// Generic mode, behind the driver.
#[test]
fn netns_tcp_lane_in_generic_mode_serves_linux() {
    let name = "netns_tcp_lane_in_generic_mode_serves_linux";
    let Some(testbed) = tcp_testbed(name, &Layout { queues: 1, ..Layout::default() }) else { return };
    let (linux, host) = (testbed.host(0), testbed.host(1));
    let server = SocketAddr::new(host.ip(0, false), PORT);
    let change =
        |builder: &mut TcpBuilder| _ = builder.listen(server).unwrap().xdp(|xdp| _ = xdp.xdp_generic(true));
    let lanes = Lanes::start(host, change, echo);
    kernel_clients(linux, server, 4, 2, 200_000);
    let counters = lanes.stop();
    assert_eq!(sum(&counters, |lane| lane.stack.accepted), 8, "{counters:#?}");
    assert_clean(&counters);
}

/// A lane of UDP and one of TCP have the same port and the same queue, and one thread.
#[test]
fn netns_tcp_lane_lives_beside_a_lane_of_udp() {
    let name = "netns_tcp_lane_lives_beside_a_lane_of_udp";
    let Some(testbed) = tcp_testbed(name, &Layout { queues: 1, ..Layout::default() }) else { return };
    let (linux, host) = (testbed.host(0), testbed.host(1));
    let server = SocketAddr::new(host.ip(0, false), PORT);
    let end = Arc::new(AtomicBool::new(false));
    let (opened, is_open) = channel();
    let stop = Arc::clone(&end);
    let thread = host.spawn("lanes", move || {
        let mut udp = Builder::new(server).unwrap();
        let udp = udp.engine(Engine::Xdp).lanes(1).xdp_sockets(2).open().unwrap();
        let mut tcp = TcpBuilder::new().listen(server).unwrap().open().unwrap().remove(0);
        let handle = udp.handle();
        let mut udp = udp.into_lanes().remove(0);
        let mut epoll = Epoll::new(2).unwrap();
        epoll.add(&udp, 0).unwrap();
        epoll.add(&tcp, 1).unwrap();
        opened.send(()).unwrap();
        echo_until(&mut tcp, &stop, |tcp| {
            _ = epoll.wait(tcp.next_timeout().min(TICK)).unwrap().count();
            let Received { batch, mut out } = udp.recv().unwrap();
            for datagram in batch {
                out.reply(&datagram, datagram.payload());
            }
            drop(out);
            tcp.wait(Duration::ZERO).unwrap();
        });
        drop(udp);
        (handle.counters().total(), tcp.counters())
    });
    let thread = thread.unwrap();
    is_open.recv().unwrap();
    let asker = client(linux, linux.ip(0, false), server);
    thread::scope(|scope| {
        scope.spawn(|| kernel_clients(linux, server, 2, 2, 200_000));
        (0..500).for_each(|_| asker.ping());
    });
    end.store(true, Ordering::Release);
    let (udp, tcp) = thread.join().unwrap();
    assert_eq!((udp.delivered, udp.delivered_by_bypass, udp.lost()), (500, 500, 0), "{udp:#?}");
    assert_eq!(tcp.stack.accepted, 4, "{tcp:#?}");
    assert_clean(&[tcp]);
}

/// A SYN from `port` of a host, in a frame with these tags.
fn syn(from: &Host, to: &Host, port: u16, vlans: [Option<Vlan>; 2]) -> Vec<u8> {
    let tcp = TcpHeader {
        source: (from.ip4(0), port).into(),
        destination: (to.ip4(0), PORT).into(),
        sequence: 1,
        acknowledgment: 0,
        flags: Flags::SYN,
        window: 1000,
        urgent: 0,
        options: Options::default(),
    };
    tcp_frame((from, to, 0), vlans, &tcp, &[]).unwrap()
}

/// A connection stays in the VLAN that its SYN came in.
#[test]
fn netns_tcp_lane_answers_in_the_vlan_of_the_peer() {
    let name = "netns_tcp_lane_answers_in_the_vlan_of_the_peer";
    let Some(testbed) = tcp_testbed(name, &Layout { queues: 1, ..Layout::default() }) else { return };
    let (linux, host) = (testbed.host(0), testbed.host(1));
    let server = SocketAddr::new(host.ip(0, false), PORT);
    let change = |builder: &mut TcpBuilder| {
        let vlans = |xdp: &mut Builder| {
            _ = xdp.xdp_vlan("5".parse().unwrap()).xdp_vlan("100.5".parse().unwrap());
        };
        builder.listen(server).unwrap().xdp(vlans);
    };
    let lanes = Lanes::start(host, change, echo);
    // From then on the next hop is known.
    kernel_clients(linux, server, 1, 1, 10);
    let socket = linux.run(|| PacketSocket::listen(linux.device_index(0).unwrap())).unwrap();
    sock::set_recv_timeout(socket.as_fd(), Duration::from_secs(100)).unwrap();
    let tag = |ether_type, tci| Some(Vlan { ether_type, tci });
    let single = [tag(ether_type::VLAN, 5), None];
    let double = [tag(ether_type::SERVICE_VLAN, 100), tag(ether_type::VLAN, 5)];
    // One port in three VLANs: three connections.
    for vlans in [[None, None], single, double] {
        socket.send(&syn(linux, host, 999, vlans)).unwrap();
        let answered = loop {
            let frame = socket.receive().unwrap();
            let (ethernet, packet) = Ethernet::parse(&frame).unwrap();
            let tcp = Packet::parse(packet).and_then(|ip| Tcp::parse(ip.payload).ok());
            if tcp.is_some_and(|tcp| tcp.destination == 999 && tcp.flags == Flags::SYN.with(Flags::ACK)) {
                break ethernet.vlans;
            }
        };
        assert_eq!(answered, vlans);
    }
    // The kernel resets the first one, which it has not asked for. It does not see the others.
    assert_clean(&lanes.stop());
}

/// The kernel's TCP on the same device goes on beside the lanes, and its ports are its own.
#[test]
fn netns_tcp_of_the_kernel_lives_beside_lanes() {
    let name = "netns_tcp_of_the_kernel_lives_beside_lanes";
    let Some(testbed) = tcp_testbed(name, &Layout { queues: 1, ..Layout::default() }) else { return };
    let (linux, host) = (testbed.host(0), testbed.host(1));
    let server = SocketAddr::new(host.ip(0, false), PORT);
    let lanes = Lanes::start(host, |builder| _ = builder.listen(server).unwrap(), echo);
    let (beside, accept) = kernel_echo(host, false, 1);
    linux.run(|| {
        let [ours, kernels] = [server, beside].map(|address| TcpStream::connect(address).unwrap());
        exchange(kernels, 1, 100_000);
        exchange(ours, 2, 100_000);
        let refused = TcpStream::connect(SocketAddr::new(server.ip(), PORT + 1)).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    });
    accept.join().unwrap();
    let counters = lanes.stop();
    assert_eq!(sum(&counters, |lane| lane.stack.accepted), 1, "{counters:#?}");
    assert_clean(&counters);
}

/// Connections have the congestion control of the address that they came to.
#[test]
fn netns_tcp_listeners_choose_congestion_controls() {
    static MADE: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];
    let name = "netns_tcp_listeners_choose_congestion_controls";
    let Some(testbed) = tcp_testbed(name, &Layout { queues: 1, ..Layout::default() }) else { return };
    let (linux, host) = (testbed.host(0), testbed.host(1));
    let servers = [PORT, PORT + 1].map(|port| SocketAddr::new(host.ip(0, false), port));
    let counting: [NewController; 2] = [
        |mss| {
            MADE[0].fetch_add(1, Ordering::Relaxed);
            Algorithm::NewReno.controller(mss)
        },
        |mss| {
            MADE[1].fetch_add(1, Ordering::Relaxed);
            Algorithm::Bbr.controller(mss)
        },
    ];
    let listen = |builder: &mut TcpBuilder| {
        for (server, controller) in servers.into_iter().zip(counting) {
            builder.listen_with(server, controller).unwrap();
        }
    };
    let lanes = Lanes::start(host, listen, echo);
    linux.run(|| {
        for server in [servers[0], servers[1], servers[1]] {
            exchange(TcpStream::connect(server).unwrap(), 1, 10_000);
        }
    });
    assert_clean(&lanes.stop());
    assert_eq!(MADE.each_ref().map(|made| made.load(Ordering::Relaxed)), [1, 2]);
}

/// No one else can have the addresses and ports of lanes while they are open.
#[test]
fn netns_tcp_lanes_hold_their_ports() {
    let name = "netns_tcp_lanes_hold_their_ports";
    let Some(testbed) = tcp_testbed(name, &Layout { queues: 1, ..Layout::default() }) else { return };
    let host = testbed.host(1);
    let server = SocketAddr::new(host.ip(0, false), PORT);
    host.run(|| {
        let reserved = || fs::read_to_string("/proc/sys/net/ipv4/ip_local_reserved_ports").unwrap();
        fs::write("/proc/sys/net/ipv4/ip_local_reserved_ports", "7,40000-40001").unwrap();
        let open = || TcpBuilder::new().listen(server).unwrap().source_ports(40_000..=41_000).open();
        let lanes = open().unwrap();
        assert!(lanes[0].listeners().eq([server]));
        assert_eq!(reserved().trim(), "7,40000-40001,40192-40959");
        let taken = TcpListener::bind(server).unwrap_err();
        assert_eq!(taken.kind(), std::io::ErrorKind::AddrInUse);
        let err = open().map(drop).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::InUse, "{err}");
        drop(lanes);
        assert_eq!(reserved().trim(), "7,40000-40001");
        // The kernel has the address again.
        drop(TcpListener::bind(server).unwrap());
    });
}

#[test]
fn netns_tcp_lanes_need_fitting_options() {
    let name = "netns_tcp_lanes_need_fitting_options";
    let Some(testbed) = tcp_testbed(name, &Layout { queues: 2, ..Layout::default() }) else { return };
    let host = testbed.host(1);
    let server = SocketAddr::new(host.ip(0, false), PORT);
    host.run(|| {
        let refused = |builder: &mut TcpBuilder, what: &str| {
            let err = builder.open().map(drop).unwrap_err();
            assert!(err.kind() == ErrorKind::Config && err.to_string().contains(what), "{err}");
        };
        refused(&mut TcpBuilder::new(), "need listen() or source_ports()");
        refused(TcpBuilder::new().listen(server).unwrap().lanes(3), "expected 1 to 2");
        refused(
            TcpBuilder::new().lanes(2).source_ports(61_184..=61_439),
            "1 blocks of 256 ports for 2 lanes",
        );
        refused(TcpBuilder::new().source_ports(61_000..=61_300), "multiple of 256");
        // More lanes than blocks, and lanes that do not connect.
        let mut lanes = TcpBuilder::new().listen(server).unwrap().lanes(2).open().unwrap();
        let err = lanes[0].connect(server).unwrap_err();
        assert!(err.to_string().contains("source_ports()"), "{err}");
    });
}

/// A router says that it has no way to the peer.
#[test]
fn netns_tcp_connection_ends_when_the_peer_is_unreachable() {
    let name = "netns_tcp_connection_ends_when_the_peer_is_unreachable";
    let Some(testbed) = tcp_testbed(name, &Layout { queues: 1, ..Layout::default() }) else { return };
    let (router, host) = (testbed.host(0), testbed.host(1));
    router.set_sysctl("net.ipv4.ip_forward", "1").unwrap();
    router.ip_batch("route add unreachable 10.99.0.0/24").unwrap();
    host.ip_batch(&format!("route add 10.99.0.0/24 via {}", router.ip4(0))).unwrap();
    let ask = |lane: &mut manylane::tcp::TcpLane, _: &_| {
        for _ in 0..3 {
            let id = lane.connect("10.99.0.7:80".parse().unwrap()).unwrap();
            let event = loop {
                lane.wait(Duration::from_secs(1)).unwrap();
                if let Some(event) = lane.event() {
                    break event;
                }
            };
            assert_eq!((event.id, event.what), (id, What::Closed(Reason::Unreachable)));
        }
    };
    let counters = Lanes::start(host, |builder| _ = builder.source_ports(61_184..=65_535), ask).wait();
    assert_eq!(sum(&counters, |lane| lane.icmp_errors), 3, "{counters:#?}");
}

/// Runs two connections through something that happens to the network: one that is idle then, and
/// one with data in flight.
fn survive(name: &str, happen: impl FnOnce(&Host, &Host)) {
    let Some(testbed) = tcp_testbed(name, &Layout { queues: 1, ..Layout::default() }) else { return };
    let (linux, host) = (testbed.host(0), testbed.host(1));
    let server = SocketAddr::new(host.ip(0, false), PORT);
    let lanes = Lanes::start(host, |builder| _ = builder.listen(server).unwrap(), echo);
    let mut stream = linux.run(|| TcpStream::connect(server).unwrap());
    stream.set_read_timeout(Some(Duration::from_secs(100))).unwrap();
    let mut ping = |text: &[u8; 4]| {
        stream.write_all(text).unwrap();
        let mut answer = [0; 4];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer, *text);
    };
    ping(b"one\n");
    let busy = linux.run(|| TcpStream::connect(server).unwrap());
    exchange_during(busy, || happen(linux, host));
    ping(b"two\n");
    exchange(stream, 3, 200_000);
    let counters = lanes.stop();
    assert_eq!(sum(&counters, |lane| lane.stack.accepted), 2, "{counters:#?}");
    assert_clean(&counters);
}

#[test]
fn netns_tcp_connection_survives_a_link_that_is_down() {
    survive("netns_tcp_connection_survives_a_link_that_is_down", take_link_down);
}

#[test]
fn netns_tcp_connection_survives_a_new_mac_of_the_next_hop() {
    survive("netns_tcp_connection_survives_a_new_mac_of_the_next_hop", change_mac);
}
