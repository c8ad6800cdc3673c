//! Engine `xdp` and other traffic of the machine: packets for other sockets pass the program
//! unchanged, and are not counted.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, Ipv6Addr, Shutdown, SocketAddr, TcpStream, UdpSocket};
use std::thread;

use crate::netns_support::{client, echo};
use crate::xdp_support::{PORT, testbed, xdp, xdp_count};
use manylane_test_support::wait_for;
use manylane_testbed::{Host, Layout};
use manylane_tests::{TEST_TIMEOUT, pattern, retry_eintr};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

/// Bytes in each direction of a TCP connection, not a multiple of any block size.
const STREAM_BYTES: usize = 3_000_017;
/// Window of a connection: it shares queues of 256 frames with datagrams that are not
/// retransmitted.
const WINDOW_BYTES: usize = 16 << 10;
/// ICMP echo requests of each family.
const ECHO_REQUESTS: u16 = 300;
/// Datagrams to each port of another program.
const FOREIGN_DATAGRAMS: usize = 2000;
/// Number of pings of each of our own clients.
const OWN_PINGS: u64 = 300;
const FAMILIES: [bool; 2] = [false, true];

/// Sends and receives `STREAM_BYTES` bytes at the same time, and compares them.
fn exchange(stream: &TcpStream, mine: usize, theirs: usize) {
    stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut to = stream;
            to.write_all(&pattern(mine, STREAM_BYTES)).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
        });
        let mut got = Vec::new();
        let mut from = stream;
        _ = from.read_to_end(&mut got).unwrap();
        assert_eq!(got.len(), STREAM_BYTES);
        assert!(got == pattern(theirs, STREAM_BYTES), "other bytes than were sent");
    });
}

/// A TCP connection to the same port number as our socket.
fn tcp(a: &Host, b: &Host, v6: bool) {
    let domain = if v6 { Domain::IPV6 } else { Domain::IPV4 };
    let at = SockAddr::from(SocketAddr::new(b.ip(0, v6), PORT));
    let open = |host: &Host| {
        let socket = host.run(|| Socket::new(domain, Type::STREAM, None).unwrap());
        socket.set_recv_buffer_size(WINDOW_BYTES).unwrap();
        socket
    };
    let listener = open(b);
    listener.set_reuse_address(true).unwrap();
    listener.bind(&at).unwrap();
    listener.listen(1).unwrap();
    listener.set_nonblocking(true).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let far = wait_for("a connection", || listener.accept(), Result::is_ok).unwrap().0;
            let far = TcpStream::from(far);
            far.set_nonblocking(false).unwrap();
            exchange(&far, 1, 2);
        });
        let near = open(a);
        near.connect_timeout(&at, TEST_TIMEOUT).unwrap();
        exchange(&TcpStream::from(near), 2, 1);
    });
}

fn internet_checksum(bytes: &[u8]) -> u16 {
    let words =
        bytes.chunks(2).map(|two| u32::from(two[0]) << 8 | u32::from(two.get(1).copied().unwrap_or(0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !sum as u16
}

/// As ping(8), with varying lengths. Every request gets one identical reply.
fn icmp(a: &Host, b: &Host, v6: bool) {
    const IDENT: u16 = 0x4d4c;
    let (domain, protocol, request, reply) =
        if v6 { (Domain::IPV6, Protocol::ICMPV6, 128, 129) } else { (Domain::IPV4, Protocol::ICMPV4, 8, 0) };
    let socket = a.run(|| Socket::new(domain, Type::RAW, Some(protocol)).unwrap());
    socket.connect(&SockAddr::from(SocketAddr::new(b.ip(0, v6), 0))).unwrap();
    socket.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    // IPv4 gives the packet with its header, IPv6 without.
    let header = if v6 { 0 } else { 20 };
    let mut buffer = [0; 2048];
    let mut next = || -> Option<Vec<u8>> {
        loop {
            match retry_eintr(|| (&socket).read(&mut buffer)) {
                // Other messages are neighbour discovery.
                Ok(len) if buffer[header] == reply => return Some(buffer[header..len].to_vec()),
                Ok(_) => {}
                Err(err) if err.kind() == ErrorKind::WouldBlock => return None,
                Err(err) => panic!("{err}"),
            }
        }
    };
    for number in 0..ECHO_REQUESTS {
        let mut message = vec![request, 0, 0, 0];
        message.extend(IDENT.to_be_bytes());
        message.extend(number.to_be_bytes());
        message.extend(pattern(number.into(), usize::from(number) * 4));
        // The kernel computes the checksum of ICMPv6.
        let sum = if v6 { 0 } else { internet_checksum(&message) };
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        assert_eq!((&socket).write(&message).unwrap(), message.len());
        let answer = next().unwrap_or_else(|| panic!("no answer to {number}"));
        assert!(answer[4..] == message[4..], "another answer than to {number}");
    }
    socket.set_nonblocking(true).unwrap();
    assert_eq!(next(), None, "answered twice");
}

/// Another program's UDP: `port` receives numbers, each exactly once and in order, and sends them
/// back.
fn udp(a: &Host, b: &Host, v6: bool, port: u16) {
    /// As many as every buffer on the path can hold.
    const BURST_DATAGRAMS: usize = 10;
    let server = b.run(|| UdpSocket::bind((b.ip(0, v6), port)).unwrap());
    server.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    let to = server.local_addr().unwrap();
    let near = a.run(|| UdpSocket::bind((a.ip(0, v6), 0)).unwrap());
    near.connect(to).unwrap();
    near.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    // From 8 bytes to what an Ethernet frame holds.
    let numbered = |number: usize| {
        let mut payload = number.to_ne_bytes().to_vec();
        payload.extend(pattern(number, number * 7 % 1440));
        payload
    };
    let mut buffer = [0; 2048];
    for first in (0..FOREIGN_DATAGRAMS).step_by(BURST_DATAGRAMS) {
        for number in first..first + BURST_DATAGRAMS {
            near.send(&numbered(number)).unwrap();
        }
        for number in first..first + BURST_DATAGRAMS {
            let (len, peer) = retry_eintr(|| server.recv_from(&mut buffer)).unwrap();
            assert!(buffer[..len] == numbered(number), "port {port}: not number {number}");
            server.send_to(&buffer[..len], peer).unwrap();
        }
        for number in first..first + BURST_DATAGRAMS {
            let len = retry_eintr(|| near.recv(&mut buffer)).unwrap();
            assert!(buffer[..len] == numbered(number), "port {port}: not the answer to {number}");
        }
    }
    for socket in [server, near] {
        socket.set_nonblocking(true).unwrap();
        let more = socket.recv(&mut buffer).map_err(|err| err.kind());
        assert_eq!(more, Err(ErrorKind::WouldBlock), "port {port}: something came twice");
    }
}

/// All at the same time, on one device and one address, in driver and generic mode, with and
/// without checksum offload.
#[test]
fn netns_xdp_foreign_frames_pass_unchanged() {
    let layout = Layout { queues: 2, ..Layout::default() };
    let Some(testbed) = testbed("netns_xdp_foreign_frames_pass_unchanged", &layout) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    for (generic, partial) in [(false, false), (false, true), (true, false), (true, true)] {
        a.set_checksums(0, partial).unwrap();
        let all = SocketAddr::from((Ipv6Addr::UNSPECIFIED, PORT));
        let serving = echo(b, xdp(b, all, |builder| _ = builder.xdp_generic(generic)));
        thread::scope(|scope| {
            for v6 in FAMILIES {
                scope.spawn(move || tcp(a, b, v6));
                scope.spawn(move || icmp(a, b, v6));
                // The ports beside ours, and one far away.
                for port in [PORT - 1, PORT + 1, PORT ^ 0x5555] {
                    scope.spawn(move || udp(a, b, v6, port));
                }
                for _ in 0..2 {
                    scope.spawn(move || {
                        let at: IpAddr = b.ip(0, v6);
                        let client = client(a, a.ip(0, v6), SocketAddr::new(at, PORT));
                        (0..OWN_PINGS).for_each(|_| client.ping());
                    });
                }
            }
        });
        let count = |what: &str| xdp_count(&serving.handle, what);
        let (redirected, passed) = (count("redirected"), count("partial_checksum"));
        let total = serving.stop().unwrap().total();
        // Behind the driver, possible GSO messages are left to the kernel. One finished checksum in
        // 65,535 looks like that of one.
        let ours = 4 * OWN_PINGS;
        match (generic, partial) {
            (true, true) => assert_eq!(passed, ours),
            (true, false) => assert!(passed < 10, "{passed}"),
            (false, _) => assert_eq!(passed, 0),
        }
        let past = ours - passed;
        assert_eq!((total.arrived(), total.delivered, total.sent), (ours, ours, ours), "{total:#?}");
        assert_eq!((total.delivered_by_bypass, redirected), (past, past), "generic {generic}: {total:#?}");
    }
}
