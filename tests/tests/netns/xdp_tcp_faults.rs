//! Faults of lanes of TCP: a process that is killed, queues that are added, many connections.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;

use manylane::tcp::{Levels, TcpBuilder, TcpLane};
use manylane_sys::process;
use manylane_test_support::{set_queues, wait_for};
use manylane_testbed::{Host, Layout, skip};
use manylane_tests::TEST_TIMEOUT;
use manylane_tests::tcp_peer::{exchange, exchange_during, pattern};

use crate::faults_support::{Child, Signal, is_child, report};
use crate::xdp_support::{add_queue, programs, testbed_of_one_queue};
use crate::xdp_tcp_support::{Lanes, TICK, echo, echo_until, tcp_testbed, without_segmentation};

const PORT: u16 = 4281;

fn connect(host: &Host, server: SocketAddr) -> TcpStream {
    let stream = host.run(|| TcpStream::connect(server).unwrap());
    stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    stream
}

#[test]
#[ignore = "started by netns_tcp_lanes_that_are_killed_leave_nothing"]
fn child_serves_tcp() {
    if !is_child("child_serves_tcp") {
        return;
    }
    let mut lanes = TcpBuilder::new().listen(("0.0.0.0", PORT)).unwrap().lanes(1).open().unwrap();
    report("serving");
    // Until it is killed.
    echo(&mut lanes[0], &AtomicBool::new(false));
}

/// Clients with data in flight get a reset, and the next process has the address at once.
#[test]
fn netns_tcp_lanes_that_are_killed_leave_nothing() {
    let name = "netns_tcp_lanes_that_are_killed_leave_nothing";
    let Some(testbed) = tcp_testbed(name, &Layout { queues: 1, ..Layout::default() }) else { return };
    let (linux, host) = (testbed.host(0), testbed.host(1));
    let server = SocketAddr::new(host.ip(0, false), PORT);
    let child = Child::start_in(host, "child_serves_tcp");
    assert_eq!(child.line(), "serving");
    let streams: Vec<_> = (0..4).map(|_| connect(linux, server)).collect();
    let (flows, is_flowing) = channel();
    // Until an error, of which one of both gets the reason.
    let write = |mut stream: &TcpStream| {
        let bytes = pattern(1, 1 << 16);
        loop {
            if let Err(err) = stream.write_all(&bytes) {
                break err.kind();
            }
        }
    };
    let read = |mut stream: &TcpStream| {
        let mut bytes = vec![0; 1 << 16];
        loop {
            match stream.read(&mut bytes) {
                Ok(0) => break None,
                Ok(_) => _ = flows.send(()),
                Err(err) => break Some(err.kind()),
            }
        }
    };
    thread::scope(|scope| {
        let ends = streams.iter().map(|stream| (scope.spawn(|| write(stream)), scope.spawn(|| read(stream))));
        let ends: Vec<_> = ends.collect();
        (0..100).for_each(|_| is_flowing.recv_timeout(TEST_TIMEOUT).unwrap());
        child.signal(Signal::KILL);
        child.kill();
        wait_for("the end of all programs", || programs(host), String::is_empty);
        for (write, read) in ends {
            let (write, read) = (write.join().unwrap(), read.join().unwrap());
            assert!([Some(write), read].contains(&Some(ErrorKind::ConnectionReset)), "{write:?} {read:?}");
        }
    });
    let lanes = Lanes::start(host, |builder| _ = builder.listen(server).unwrap(), echo);
    exchange(connect(linux, server), 1, 100_000);
    assert_eq!(lanes.stop()[0].stack.accepted, 1);
}

/// Queues that are added while lanes serve: a lane gets them, and connections live on. Queues in
/// use cannot be removed.
#[test]
fn netns_tcp_lanes_serve_added_queues() {
    let name = "netns_tcp_lanes_serve_added_queues";
    let Some(testbed) = testbed_of_one_queue(name).map(without_segmentation) else { return };
    let (linux, host) = (testbed.host(0), testbed.host(1));
    let server = SocketAddr::new(host.ip(0, false), PORT);
    let lanes = Lanes::start(host, |builder| _ = builder.listen(server).unwrap().lanes(1), echo);
    let before = connect(linux, server);
    exchange_during(connect(linux, server), || add_queue(linux, host));
    // Over both queues: the flow's hash says which.
    for connection in 0..16 {
        exchange(connect(linux, server), connection, 20_000);
    }
    exchange(before, 1, 200_000);
    linux.run(|| set_queues(linux.device(0), 2, 1)).unwrap();
    host.run(|| set_queues(host.device(0), 1, 2)).unwrap_err();
    exchange(connect(linux, server), 1, 200_000);
    let counters = lanes.stop();
    assert_eq!(counters[0].stack.accepted, 19, "{counters:#?}");
}

/// Lanes that tell what they have at the moment.
fn observed(lanes: &Arc<Mutex<Levels>>) -> impl Fn(&mut TcpLane, &AtomicBool) + Clone + use<> {
    let seen = Arc::clone(lanes);
    move |lane, end| {
        echo_until(lane, end, |lane| {
            lane.wait(TICK).unwrap();
            *seen.lock().unwrap() = lane.levels();
        });
    }
}

/// Ten thousand connections that send a byte now and then: they have buffers for a moment, and hold
/// up no one.
#[test]
fn netns_tcp_trickling_connections_give_their_buffers_back() {
    const CONNECTIONS: usize = 10_000;
    const AT_A_TIME: usize = 1000;
    const ROUNDS: u8 = 2;
    let name = "netns_tcp_trickling_connections_give_their_buffers_back";
    let descriptors = process::raise_descriptor_limit();
    if !skip::need(name, descriptors > CONNECTIONS as u64 + 2000, "descriptors: raise ulimit -Hn") {
        return;
    }
    let Some(testbed) = tcp_testbed(name, &Layout { queues: 1, ..Layout::default() }) else { return };
    let (linux, host) = (testbed.host(0), testbed.host(1));
    let server = SocketAddr::new(host.ip(0, false), PORT);
    let levels = Arc::default();
    let lanes = Lanes::start(host, |builder| _ = builder.listen(server).unwrap(), observed(&levels));
    let mut streams: Vec<_> =
        linux.run(|| (0..CONNECTIONS).map(|_| TcpStream::connect(server).unwrap()).collect());
    streams.iter().for_each(|stream| stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap());
    let now = || *levels.lock().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| exchange(connect(linux, server), 1, 2_000_000));
        for round in 0..ROUNDS {
            for streams in streams.chunks_mut(AT_A_TIME) {
                streams.iter_mut().for_each(|stream| stream.write_all(&[round]).unwrap());
                for stream in streams {
                    let mut byte = [0];
                    stream.read_exact(&mut byte).unwrap();
                    assert_eq!(byte, [round]);
                }
            }
        }
    });
    let idle = wait_for("no buffers in use", now, |levels| levels.buffers_used == 0);
    assert!(idle.buffers <= CONNECTIONS + 1, "{idle:?}");
    assert_eq!((idle.connections, idle.backlog), (CONNECTIONS, 0), "{idle:?}");
    drop(streams);
    wait_for("no connections", now, |levels| levels.connections == 0);
    let counters = lanes.stop().remove(0).stack;
    assert_eq!(counters.accepted, CONNECTIONS as u64 + 1, "{counters:#?}");
    // Unless the lane was held up, sent something again, and got the answer when the connection
    // was over.
    assert!(counters.resets_sent <= 2 * counters.retransmitted, "{counters:#?}");
}
