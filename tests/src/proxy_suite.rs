//! The suite of the TCP proxy: what it does for clients and servers, on each stack.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::thread;
use std::time::Duration;

use manylane_proxy::{Balance, Options, ProxyHeader};
use manylane_test_support::wait_for;

use crate::TEST_TIMEOUT;
pub use crate::proxy_bed::{ProxyBed, RunningProxy};
use crate::tcp_peer::{echo, exchange, pattern};

/// Fails as a connection that was reset.
fn assert_reset(stream: &mut TcpStream) {
    let mut bytes = [0; 64];
    let err = loop {
        match stream.read(&mut bytes) {
            Ok(read) => assert_ne!(read, 0, "an end in order"),
            Err(err) => break err,
        }
    };
    assert_eq!(err.kind(), ErrorKind::ConnectionReset);
}

/// The proxy resets a new connection, maybe before `connect` returns.
fn assert_refused(bed: &ProxyBed, proxy: &RunningProxy) {
    let address = proxy.address;
    match bed.run(|| TcpStream::connect(address)) {
        Ok(mut stream) => assert_reset(&mut stream),
        Err(err) => assert_eq!(err.kind(), ErrorKind::ConnectionReset),
    }
}

/// Every byte arrives once and in order, in both directions, over many connections.
pub fn bytes_go_both_ways(bed: &ProxyBed) {
    const CONNECTIONS: usize = 16;
    const LENGTH: usize = 150_000;
    let listener = bed.listen();
    let proxy = bed.start(Options::default(), &[listener.local_addr().unwrap()]);
    let server = echo(listener, CONNECTIONS);
    let streams: Vec<_> = (0..CONNECTIONS).map(|_| bed.connect(&proxy)).collect();
    thread::scope(|scope| {
        streams.into_iter().for_each(|stream| _ = scope.spawn(|| exchange(stream, 1, LENGTH)));
    });
    server.join().unwrap();
    let total = proxy.stop();
    let count = CONNECTIONS as u64;
    assert_eq!((total.accepted, total.connected, total.finished), (count, count, count), "{total:#?}");
    let bytes = count * LENGTH as u64;
    assert_eq!((total.bytes_to_servers, total.bytes_to_clients), (bytes, bytes), "{total:#?}");
}

/// Servers take turns.
pub fn servers_take_turns(bed: &ProxyBed) {
    let listeners = [bed.listen(), bed.listen(), bed.listen()];
    let addresses = listeners.each_ref().map(|listener| listener.local_addr().unwrap());
    let options = Options { balance: Balance::LeastConnections, ..Options::default() };
    let proxy = bed.start(options, &addresses);
    let servers = listeners.map(|listener| echo(listener, 4));
    // All open at the same time: each server gets a third. One after the other, because two lanes
    // that choose at once may choose the same server.
    let connect = || {
        let mut stream = bed.connect(&proxy);
        stream.write_all(b"x").unwrap();
        stream.read_exact(&mut [0]).unwrap();
        stream
    };
    let streams: Vec<_> = (0..12).map(|_| connect()).collect();
    let connections: Vec<u32> =
        proxy.shared.settings().servers.all().iter().map(|server| server.connections()).collect();
    assert_eq!(connections, [4, 4, 4]);
    drop(streams);
    servers.into_iter().for_each(|server| server.join().unwrap());
    assert_eq!(proxy.stop().connected, 12);
}

/// A server that refuses is passed over. Without one that accepts, clients are reset at once.
pub fn servers_that_refuse_are_passed_over(bed: &ProxyBed) {
    let closed = bed.listen().local_addr().unwrap();
    let listener = bed.listen();
    let proxy = bed.start(Options::default(), &[closed, listener.local_addr().unwrap()]);
    let server = echo(listener, 4);
    (0..4).for_each(|_| exchange(bed.connect(&proxy), 1, 1000));
    server.join().unwrap();
    // The listener is closed by now.
    assert_refused(bed, &proxy);
    let total = proxy.stop();
    assert_eq!((total.finished, total.no_server), (4, 1), "{total:#?}");
    assert!(total.connect_failed >= 2, "{total:#?}");
}

/// The end of one direction leaves the other one open.
pub fn half_closed_connections_go_on(bed: &ProxyBed) {
    let listener = bed.listen();
    let proxy = bed.start(Options::default(), &[listener.local_addr().unwrap()]);
    let mut client = bed.connect(&proxy);
    let (mut server, _) = listener.accept().unwrap();
    client.write_all(b"question").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut question = Vec::new();
    server.read_to_end(&mut question).unwrap();
    assert_eq!(question, b"question");
    server.write_all(&pattern(1, 100_000)).unwrap();
    drop(server);
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).unwrap();
    assert!(answer == pattern(1, 100_000));
    assert_eq!(proxy.stop().finished, 1);
}

/// If one side is reset, so is the other.
pub fn resets_are_passed_on(bed: &ProxyBed) {
    let listener = bed.listen();
    let proxy = bed.start(Options::default(), &[listener.local_addr().unwrap()]);
    let mut client = bed.connect(&proxy);
    let (mut server, _) = listener.accept().unwrap();
    // In the middle of a transfer: unread bytes make the kernel reset it.
    client.write_all(b"some").unwrap();
    server.read_exact(&mut [0; 1]).unwrap();
    drop(server);
    assert_reset(&mut client);
    let mut client = bed.connect(&proxy);
    let (mut server, _) = listener.accept().unwrap();
    server.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    server.write_all(b"some").unwrap();
    client.read_exact(&mut [0; 1]).unwrap();
    drop(client);
    assert_reset(&mut server);
    let total = proxy.stop();
    assert_eq!((total.server_gone, total.client_gone), (1, 1), "{total:#?}");
}

/// A client that does not read stops its server, and no bytes pile up in between.
pub fn clients_that_do_not_read_stop_their_servers(bed: &ProxyBed) {
    const LENGTH: usize = 64 << 20;
    let listener = bed.listen();
    let proxy = bed.start(Options::default(), &[listener.local_addr().unwrap()]);
    let mut client = bed.connect(&proxy);
    let (mut server, _) = listener.accept().unwrap();
    server.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
    let bytes = pattern(1, 1 << 20);
    let mut sent = 0;
    let err = loop {
        match server.write(&bytes[sent % bytes.len()..]) {
            Ok(written) => sent += written,
            Err(err) => break err,
        }
        assert!(sent < LENGTH, "{sent} bytes are on the way");
    };
    assert_eq!(err.kind(), ErrorKind::WouldBlock);
    // What was accepted arrives once the client reads.
    server.shutdown(Shutdown::Write).unwrap();
    let mut received = vec![0; bytes.len()];
    let mut count = 0;
    loop {
        let want = bytes.len() - count % bytes.len();
        let read = client.read(&mut received[..want]).unwrap();
        if read == 0 {
            break;
        }
        assert!(received[..read] == bytes[count % bytes.len()..][..read]);
        count += read;
    }
    assert_eq!(count, sent);
    drop(client);
    assert_eq!(server.read(&mut [0]).unwrap(), 0);
    assert_eq!(proxy.stop().bytes_to_clients, sent as u64);
}

/// Clients that do not read take no more memory than the proxy may buffer. Meanwhile another one is
/// served, and no byte is lost.
pub fn memory_is_bounded(bed: &ProxyBed) {
    const STALLED: usize = 6;
    const LENGTH: usize = 24 << 20;
    // Kernel sockets: enough for one session of a lane. TCP lanes: for all sessions on one of two
    // lanes. Each has two pairs of buffers, and what is received gets some only while less than a
    // third of them is in use.
    let memory = match bed {
        ProxyBed::Loopback => 2 * (64 << 10),
        ProxyBed::Netns(_) => 2 * 3 * 2 * (STALLED + 1) * (128 << 10),
    };
    let listener = bed.listen();
    let proxy = bed.start_within(memory, Options::default(), &[listener.local_addr().unwrap()]);
    let sessions: Vec<_> =
        (0..STALLED).map(|_| (bed.connect(&proxy), listener.accept().unwrap().0)).collect();
    thread::scope(|scope| {
        let (clients, servers): (Vec<_>, Vec<_>) = sessions.into_iter().unzip();
        for mut server in servers {
            scope.spawn(move || server.write_all(&pattern(1, LENGTH)).unwrap());
        }
        let mut before = 0;
        let is_stalled = || {
            thread::sleep(Duration::from_millis(300));
            let moved = proxy.counters().bytes_to_clients;
            std::mem::replace(&mut before, moved) == moved && moved > 0
        };
        wait_for("stalled sessions", is_stalled, |is_stalled| *is_stalled);
        if matches!(bed, ProxyBed::Loopback) {
            let full = || proxy.stack_stats("memory_full").iter().sum::<u64>();
            wait_for("a lane without memory", full, |full| *full > 0);
        }
        let echo = echo(listener, 1);
        exchange(bed.connect(&proxy), 1, 1 << 20);
        echo.join().unwrap();
        let (used, max) = (proxy.stack_stats("memory_used_bytes"), proxy.stack_stats("memory_max_bytes"));
        assert!(used.iter().zip(&max).all(|(used, max)| used <= max), "{used:?} of {max:?}");
        assert!(
            used.iter().sum::<u64>() > 0 && max.iter().sum::<u64>() <= memory as u64,
            "{used:?} of {max:?}"
        );
        for mut client in clients {
            scope.spawn(move || {
                let mut bytes = Vec::new();
                client.read_to_end(&mut bytes).unwrap();
                assert!(bytes == pattern(1, LENGTH));
            });
        }
    });
    wait_for(
        "memory that is free again",
        || proxy.stack_stats("memory_used_bytes"),
        |used| used.iter().sum::<u64>() == 0,
    );
    let total = proxy.stop();
    assert_eq!(total.bytes_to_clients, (STALLED * LENGTH + (1 << 20)) as u64, "{total:#?}");
}

/// Idle connections are cut, those with bytes are not.
pub fn idle_connections_are_reset(bed: &ProxyBed) {
    let listener = bed.listen();
    let options = Options { idle_timeout: Duration::from_millis(300), ..Options::default() };
    let proxy = bed.start(options, &[listener.local_addr().unwrap()]);
    let mut client = bed.connect(&proxy);
    let (mut server, _) = listener.accept().unwrap();
    server.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    assert_reset(&mut client);
    assert_reset(&mut server);
    assert_eq!(proxy.stop().idle, 1);
}

/// Limits on connections, in all and of a source.
pub fn connections_are_limited(bed: &ProxyBed) {
    for (in_all, of_source) in [(2, None), (100, Some(2))] {
        let listener = bed.listen();
        let options =
            Options { connections_max: in_all, connections_max_per_source: of_source, ..Options::default() };
        let proxy = bed.start(options, &[listener.local_addr().unwrap()]);
        let accepted: Vec<_> = (0..2).map(|_| bed.connect(&proxy)).collect();
        let servers: Vec<_> = (0..2).map(|_| listener.accept().unwrap().0).collect();
        assert_refused(bed, &proxy);
        drop((accepted, servers));
        let total = proxy.stop();
        let refused = if of_source.is_some() { (0, 1) } else { (1, 0) };
        assert_eq!((total.over_limit, total.over_source_limit), refused, "{total:#?}");
        assert_eq!(total.accepted, 3);
    }
}

/// Servers get the client's address by the PROXY protocol.
pub fn servers_learn_the_address_of_the_client(bed: &ProxyBed) {
    for header in [ProxyHeader::V1, ProxyHeader::V2] {
        let listener = bed.listen();
        let options = Options { header: Some(header), ..Options::default() };
        let proxy = bed.start(options, &[listener.local_addr().unwrap()]);
        let mut client = bed.connect(&proxy);
        client.write_all(b"rest").unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let mut expected = header.encode(client.local_addr().unwrap(), proxy.address);
        expected.extend_from_slice(b"rest");
        let mut received = vec![0; expected.len()];
        server.read_exact(&mut received).unwrap();
        assert_eq!(received, expected);
        drop((client, server));
        _ = proxy.stop();
    }
}

/// New settings are for new connections, and close none.
pub fn servers_change_without_closing_connections(bed: &ProxyBed) {
    let listeners = [bed.listen(), bed.listen()];
    let addresses = listeners.each_ref().map(|listener| listener.local_addr().unwrap());
    let proxy = bed.start(Options::default(), &addresses[..1]);
    let before = bed.connect(&proxy);
    let [first, second] = listeners;
    let (server, _) = first.accept().unwrap();
    proxy.shared.reload(Options::default(), &addresses[1..]);
    // A lane may not have noticed yet: it finds no one at the first server.
    drop(first);
    second.set_nonblocking(true).unwrap();
    let address = proxy.address;
    let is_new = || {
        _ = bed.run(|| TcpStream::connect(address));
        second.accept().is_ok()
    };
    wait_for("a connection to the new server", is_new, |is_new| *is_new);
    // Resets those that no one has accepted.
    drop(second);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut bytes = Vec::new();
            (&server).read_to_end(&mut bytes).unwrap();
            (&server).write_all(&bytes).unwrap();
            server.shutdown(Shutdown::Write).unwrap();
        });
        exchange(before, 1, 100_000);
    });
    let total = proxy.stop();
    assert!(total.finished > 0 && total.bytes_to_clients >= 100_000, "{total:#?}");
}

/// A proxy that is stopped accepts no more connections, and lets those that there are end.
pub fn connections_end_before_the_proxy(bed: &ProxyBed) {
    let listener = bed.listen();
    let proxy = bed.start(Options::default(), &[listener.local_addr().unwrap()]);
    let client = bed.connect(&proxy);
    let server = echo(listener, 1);
    wait_for("a connection to the server", || proxy.counters(), |counters| counters.connected == 1);
    proxy.shared.stop();
    let address = proxy.address;
    let is_refused = || bed.run(|| TcpStream::connect(address).map_err(|err| err.kind()).err());
    wait_for("a refused connection", is_refused, |err| *err == Some(ErrorKind::ConnectionRefused));
    exchange(client, 1, 100_000);
    server.join().unwrap();
    let total = proxy.stop();
    // Some of those above may have been accepted before it noticed.
    assert!(total.finished > 0 && total.cut_off == 0, "{total:#?}");
}

/// Connections that do not end are cut off.
pub fn connections_are_cut_off_at_the_end(bed: &ProxyBed) {
    let listener = bed.listen();
    let options = Options { drain_timeout: Duration::from_millis(200), ..Options::default() };
    let proxy = bed.start(options, &[listener.local_addr().unwrap()]);
    let mut client = bed.connect(&proxy);
    let _server = listener.accept().unwrap();
    wait_for("a connection to the server", || proxy.counters(), |counters| counters.connected == 1);
    assert_eq!(proxy.stop().cut_off, 1);
    assert_reset(&mut client);
}

/// More connections with data than buffers: they take turns, and no byte that was accepted is lost.
pub fn more_connections_than_buffers_take_turns(bed: &ProxyBed) {
    const CONNECTIONS: usize = 12;
    const LENGTH: usize = 20_000;
    let listener = bed.listen();
    // Each session wants two pairs of buffers.
    let memory = CONNECTIONS * (128 << 10);
    let proxy = bed.start_within(memory, Options::default(), &[listener.local_addr().unwrap()]);
    let server = echo(listener, CONNECTIONS);
    let streams: Vec<_> = (0..CONNECTIONS).map(|_| bed.connect(&proxy)).collect();
    thread::scope(|scope| {
        for (nth, stream) in streams.into_iter().enumerate() {
            scope.spawn(move || exchange(stream, nth, LENGTH));
        }
    });
    server.join().unwrap();
    let total = proxy.stop();
    let bytes = (CONNECTIONS * LENGTH) as u64;
    assert_eq!(total.finished, CONNECTIONS as u64, "{total:#?}");
    assert_eq!((total.bytes_to_servers, total.bytes_to_clients), (bytes, bytes), "{total:#?}");
}

/// Many connections that send a byte now and then, and one that wants more.
pub fn trickling_connections_hold_no_one_up(bed: &ProxyBed) {
    const CONNECTIONS: usize = 1000;
    const ROUNDS: u8 = 5;
    let listener = bed.listen();
    let proxy = bed.start(Options::default(), &[listener.local_addr().unwrap()]);
    let mut clients: Vec<_> = Vec::with_capacity(CONNECTIONS);
    let mut servers: Vec<_> = Vec::with_capacity(CONNECTIONS);
    for _ in 0..CONNECTIONS {
        clients.push(bed.connect(&proxy));
        let (server, _) = listener.accept().unwrap();
        server.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        servers.push(server);
    }
    let beside = bed.connect(&proxy);
    let server = echo(listener, 1);
    thread::scope(|scope| {
        scope.spawn(|| {
            for server in std::iter::repeat_n(&servers, ROUNDS.into()).flatten() {
                let (mut server, mut byte) = (server, [0]);
                server.read_exact(&mut byte).unwrap();
                server.write_all(&byte).unwrap();
            }
        });
        scope.spawn(|| exchange(beside, 1, 1_000_000));
        for round in 0..ROUNDS {
            for mut client in &clients {
                client.write_all(&[round]).unwrap();
            }
            for mut client in &clients {
                let mut byte = [0];
                client.read_exact(&mut byte).unwrap();
                assert_eq!(byte, [round]);
            }
        }
    });
    server.join().unwrap();
    drop((clients, servers));
    let total = proxy.stop();
    let bytes = CONNECTIONS as u64 * u64::from(ROUNDS) + 1_000_000;
    assert_eq!(total.finished, CONNECTIONS as u64 + 1, "{total:#?}");
    assert_eq!((total.bytes_to_servers, total.bytes_to_clients), (bytes, bytes), "{total:#?}");
}

/// The suite as tests on one bed, which is made for each by its name.
#[macro_export]
macro_rules! proxy_suite {
    ($bed:expr) => {
        $crate::proxy_suite! {
            $bed;
            bytes_go_both_ways
            servers_take_turns
            servers_that_refuse_are_passed_over
            half_closed_connections_go_on
            resets_are_passed_on
            clients_that_do_not_read_stop_their_servers
            memory_is_bounded
            idle_connections_are_reset
            connections_are_limited
            servers_learn_the_address_of_the_client
            servers_change_without_closing_connections
            connections_end_before_the_proxy
            connections_are_cut_off_at_the_end
            more_connections_than_buffers_take_turns
            trickling_connections_hold_no_one_up
        }
    };
    ($bed:expr; $($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                let bed: Option<$crate::proxy_suite::ProxyBed> = ($bed)(stringify!($name));
                if let Some(bed) = bed {
                    $crate::proxy_suite::$name(&bed);
                }
            }
        )*
    };
}
