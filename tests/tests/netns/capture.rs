//! Captures of frames that lanes of engine `xdp` receive and send: all frames are in them, exactly
//! once, and a capture never disturbs the lanes.

use std::fs;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::faults_support::{Child, NOBODY, is_child, report, wait_for_parent};
use crate::netns_support::{client, echo, open, wait_for_arrived, wait_until};
use manylane::capture::{Capture, Direction, SNAPLEN_MAX, Target, Targets, find_targets};
use manylane::{Builder, Engine, ErrorKind, LaneId};
use manylane_sys::packet::PacketSocket;
use manylane_test_support::wait_for;
use manylane_testbed::skip;
use manylane_testbed::{Host, Layout, Testbed};
use manylane_tests::{Client, Serving, pattern};
use manylane_wire::ethernet::Mac;
use manylane_wire::frame::{Frame, UdpFrame};
use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;

/// Memory for each lane.
const BUFFER_BYTES: usize = 4 << 20;
/// Bytes before the payload of a frame.
const HEADERS_BYTES: usize = 14 + 20 + 8;

/// A testbed for a test that runs alone in this process, so that all mappings are its own.
fn testbed(name: &str, queues: u32) -> Option<(Testbed, MutexGuard<'static, ()>)> {
    static LOCK: Mutex<()> = Mutex::new(());
    let layout = Layout { queues, ipv6: false, ..Layout::default() };
    skip::need_root(name).then(|| {
        // The lock may be poisoned by a failed test; it guards no data.
        let alone = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        (Testbed::new(&layout).unwrap(), alone)
    })
}

/// Echo on host `b`, with a client on `a` whose next hop is resolved, so that its replies leave
/// past the stack.
fn start_echo(a: &Host, b: &Host, change: impl FnOnce(&mut Builder) + Send) -> (Serving, Client) {
    let serving = echo(b, open(b, b.ip4(0).into(), |builder| change(builder.engine(Engine::Xdp).lanes(2))));
    let client = client(a, a.ip4(0).into(), serving.addr);
    wait_until("a reply by XDP", &serving.handle, || {
        client.ping();
        serving.handle.counters().total().sent_by_bypass > 0
    });
    (serving, client)
}

/// Again, as long as a process has not replied in the time that it has for it.
fn capture_points(host: &Host) -> Targets {
    wait_for(
        "replies in time",
        || host.run(|| find_targets(None)).unwrap(),
        |found| !found.refused.iter().any(|(_, why)| why.contains("no reply")),
    )
}

/// Starts the capture of the only socket; again, as long as it has not replied in time.
fn start(host: &Host, snaplen: usize, buffer_bytes: usize) -> Capture {
    let start = || Capture::start(only_point(host), snaplen, buffer_bytes);
    wait_for("a capture", start, Result::is_ok).unwrap()
}

fn only_point(host: &Host) -> Vec<Target> {
    let found = capture_points(host);
    assert_eq!((found.targets.len(), found.refused.len()), (1, 0), "{found:?}");
    found.targets
}

/// A captured frame.
#[derive(Debug)]
struct CapturedFrame {
    time: u64,
    device: String,
    queue: u32,
    lane: LaneId,
    direction: Direction,
    len: usize,
    bytes: Vec<u8>,
}

/// All captured frames.
fn drain(capture: &mut Capture) -> Vec<CapturedFrame> {
    let mut all = Vec::new();
    while let Some(frame) = capture.next_frame() {
        let (device, bytes) = (frame.device_name.to_owned(), frame.bytes.to_vec());
        let (time, queue, lane, direction, len) =
            (frame.time, frame.queue, frame.lane, frame.direction, frame.len);
        all.push(CapturedFrame { time, device, queue, lane, direction, len, bytes });
    }
    all
}

/// True if memory of a capture is mapped in this process, in addition to the reader's.
fn is_mapped() -> bool {
    fs::read_to_string("/proc/self/maps").unwrap().contains("memfd:manylane-capture")
}

#[test]
fn netns_capture_contains_every_request_and_reply() {
    let Some((testbed, _alone)) = testbed("netns_capture_contains_every_request_and_reply", 4) else {
        return;
    };
    const CLIENTS: usize = 5;
    const DATAGRAMS_EACH: usize = 40;
    let (a, b) = (testbed.host(0), testbed.host(1));
    let socket = open(b, b.ip4(0).into(), |builder| _ = builder.engine(Engine::Xdp).lanes(2));
    let queues = socket.device_queues();
    let serving = echo(b, socket);
    let clients: Vec<Client> = (0..CLIENTS).map(|_| client(a, a.ip4(0).into(), serving.addr)).collect();
    // Every lane has a next hop.
    for client in &clients {
        wait_until("another reply by XDP", &serving.handle, || {
            let before = serving.handle.counters().total().sent_by_bypass;
            client.ping();
            serving.handle.counters().total().sent_by_bypass > before
        });
    }
    let points = only_point(b);
    let point = &points[0];
    assert_eq!((point.pid(), point.address(), point.captured_by()), (std::process::id(), serving.addr, None));
    assert_eq!(point.devices().collect::<Vec<_>>(), [b.device(0)]);
    assert_eq!(point.lanes(), serving.handle.lane_ids());
    let mut capture = start(b, SNAPLEN_MAX, BUFFER_BYTES);
    let before = serving.handle.counters().total();
    for n in 0..DATAGRAMS_EACH {
        for (flow, client) in clients.iter().enumerate() {
            let payload = pattern(flow, n * 30);
            client.send(&payload);
            client.expect(&payload);
        }
    }
    let count = (CLIENTS * DATAGRAMS_EACH) as u64;
    // The last reply may arrive before the lane has counted it.
    wait_until("all replies by XDP", &serving.handle, || {
        serving.handle.counters().total().sent_by_bypass >= before.sent_by_bypass + count
    });
    let after = serving.handle.counters().total();
    assert_eq!(
        (
            after.delivered_by_bypass - before.delivered_by_bypass,
            after.sent_by_bypass - before.sent_by_bypass
        ),
        (count, count)
    );
    let seen = drain(&mut capture);
    assert_eq!(seen.len() as u64, 2 * count);
    for direction in [Direction::In, Direction::Out] {
        for (flow, client) in clients.iter().enumerate() {
            let ends = match direction {
                Direction::In => (client.addr(), serving.addr),
                Direction::Out => (serving.addr, client.addr()),
            };
            let of_flow: Vec<&CapturedFrame> = seen
                .iter()
                .filter(|seen| seen.direction == direction)
                .filter(|seen| Frame::parse(&seen.bytes).unwrap().endpoints() == Some(ends))
                .collect();
            assert_eq!(of_flow.len(), DATAGRAMS_EACH);
            for (n, seen) in of_flow.iter().enumerate() {
                assert_eq!(seen.len, seen.bytes.len());
                assert_eq!(Frame::parse(&seen.bytes).unwrap().udp().unwrap().payload, pattern(flow, n * 30));
                assert_eq!(seen.device, b.device(0));
                let serves = |at: &&manylane::DeviceQueue| (at.queue, at.lane) == (seen.queue, seen.lane);
                assert_eq!(queues.iter().filter(serves).count(), 1, "{seen:?}");
                let (to, from) = if direction == Direction::In { (b, a) } else { (a, b) };
                assert_eq!((&seen.bytes[..6], &seen.bytes[6..12]), (&to.mac(0)[..], &from.mac(0)[..]));
            }
        }
    }
    // With one lane, requests and replies are in order.
    assert!(seen.windows(2).all(|pair| pair[0].time <= pair[1].time));
    assert_eq!(capture.dropped(), [(0, 0)]);
    // Frames can be truncated, and captures can follow each other.
    drop(capture);
    let mut capture = restart(b, 20);
    clients[0].ping();
    let seen = drain(&mut capture);
    let shapes: Vec<_> = seen.iter().map(|seen| (seen.direction, seen.len, seen.bytes.len())).collect();
    assert_eq!(shapes, [(Direction::In, HEADERS_BYTES + 4, 20), (Direction::Out, HEADERS_BYTES + 4, 20)]);
    // When it has ended, no memory is left.
    drop(capture);
    wait_for("the memory of the capture to be unmapped", is_mapped, |is_mapped| !is_mapped);
    serving.stop().unwrap();
}

/// Starts the capture of the only socket, after the end of the previous one has been noticed.
fn restart(host: &Host, snaplen: usize) -> Capture {
    wait_for("the end of the last capture", || only_point(host)[0].captured_by(), Option::is_none);
    start(host, snaplen, BUFFER_BYTES)
}

#[test]
fn netns_capture_contains_refused_frames() {
    let Some((testbed, _alone)) = testbed("netns_capture_contains_refused_frames", 1) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let (serving, _client) = start_echo(a, b, |_| ());
    let mut capture = start(b, SNAPLEN_MAX, BUFFER_BYTES);
    let from = SocketAddr::new(a.ip4(0).into(), 4444);
    let plan =
        UdpFrame { payload: b"broken", ..UdpFrame::new(Mac(a.mac(0)), Mac(b.mac(0)), from, serving.addr) };
    let mut good = vec![0; plan.len()];
    plan.write(&mut good).unwrap();
    let mut checksum = good.clone();
    *checksum.last_mut().unwrap() ^= 1;
    let mut long_udp = good.clone();
    long_udp[38..40].copy_from_slice(&100_u16.to_be_bytes());
    let before = serving.handle.counters().total();
    let socket = a.run(|| PacketSocket::open(a.device_index(0).unwrap())).unwrap();
    for frame in [&checksum, &long_udp] {
        socket.send(frame).unwrap();
    }
    wait_for_arrived(&serving.handle, before.arrived() + 2);
    let total = serving.handle.counters().total();
    assert_eq!((total.bad_checksum, total.malformed, total.delivered), (1, 1, before.delivered));
    let seen = drain(&mut capture);
    let bytes: Vec<_> = seen.iter().map(|seen| (seen.direction, &seen.bytes)).collect();
    assert_eq!(bytes, [(Direction::In, &checksum), (Direction::In, &long_udp)]);
    serving.stop().unwrap();
}

/// Frames of one size fill a ring that is not read, to the last word.
#[test]
fn netns_capture_counts_drops_of_a_full_ring() {
    let Some((testbed, _alone)) = testbed("netns_capture_counts_drops_of_a_full_ring", 1) else {
        return;
    };
    /// The smallest buffer: a power of two that the longest frame fits into.
    const CAPTURE_LEN_MIN: u64 = 128 << 10;
    const PINGS: u64 = 100;
    let (a, b) = (testbed.host(0), testbed.host(1));
    let (serving, client) = start_echo(a, b, |builder| _ = builder.lanes(1));
    let mut capture = start(b, SNAPLEN_MAX, 0);
    let payload = pattern(7, 1400);
    for _ in 0..PINGS {
        client.send(&payload);
        client.expect(&payload);
    }
    // Three words and the frame, in words of eight bytes; requests and replies alternate.
    let fit = CAPTURE_LEN_MIN / 8 / (3 + (HEADERS_BYTES as u64 + 1400).div_ceil(8));
    let (received, sent) = (fit.div_ceil(2), fit / 2);
    assert!(fit < 2 * PINGS);
    assert_eq!(capture.dropped(), [(PINGS - received, PINGS - sent)]);
    let seen = drain(&mut capture);
    let count = |direction| seen.iter().filter(|seen| seen.direction == direction).count() as u64;
    assert_eq!((count(Direction::In), count(Direction::Out)), (received, sent));
    assert!(seen.iter().all(|seen| seen.bytes[HEADERS_BYTES..] == payload));
    // There is room again.
    client.ping();
    assert_eq!(drain(&mut capture).len(), 2);
    assert_eq!(capture.dropped(), [(PINGS - received, PINGS - sent)]);
    let total = serving.stop().unwrap().total();
    assert_eq!((total.delivered, total.lost()), (total.sent, 0), "{total:#?}");
    // The other side reports the end, and keeps its counters.
    let end = || {
        capture.wait(Duration::from_millis(1)).unwrap();
        (capture.is_finished(), capture.dropped())
    };
    wait_for("the end of the capture (and drops)", end, |(is_finished, _)| *is_finished);
    assert_eq!(capture.dropped(), [(PINGS - received, PINGS - sent)]);
}

#[test]
#[ignore = "started by netns_killing_a_capture_leaves_nothing"]
fn child_captures() {
    if !is_child("child_captures") {
        return;
    }
    let targets = || find_targets(None).unwrap().targets;
    let found = || wait_for("the socket", targets, |found| !found.is_empty());
    let start = || Capture::start(found(), SNAPLEN_MAX, 0);
    let mut capture = wait_for("a capture", start, Result::is_ok).unwrap();
    while capture.next_frame().is_none() {}
    report("capturing");
    wait_for_parent();
}

#[test]
fn netns_killing_a_capture_leaves_nothing() {
    let Some((testbed, _alone)) = testbed("netns_killing_a_capture_leaves_nothing", 2) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let (serving, client) = start_echo(a, b, |_| ());
    let child = Child::start_in(b, "child_captures");
    wait_for("the capture", || only_point(b)[0].captured_by(), |by| *by == Some(child.pid()));
    for _ in 0..200 {
        client.ping();
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(child.line(), "capturing");
    assert!(is_mapped());
    // A second one gets an error with the process of the first.
    let err = Capture::start(only_point(b), SNAPLEN_MAX, BUFFER_BYTES).unwrap_err();
    assert_eq!(err.kind(), ErrorKind::InUse, "{err}");
    assert!(err.to_string().contains(&format!("process {}", child.pid())), "{err}");
    child.kill();
    for _ in 0..200 {
        client.ping();
    }
    wait_for("the memory of the killed capture to be unmapped", is_mapped, |is_mapped| !is_mapped);
    let mut capture = restart(b, SNAPLEN_MAX);
    client.ping();
    assert_eq!(drain(&mut capture).len(), 2);
    let total = serving.stop().unwrap().total();
    assert_eq!((total.delivered, total.lost()), (total.sent, 0), "{total:#?}");
}

#[test]
fn netns_capture_continues_when_a_lane_is_removed() {
    let Some((testbed, _alone)) = testbed("netns_capture_continues_when_a_lane_is_removed", 2) else {
        return;
    };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let (serving, client) = start_echo(a, b, |_| ());
    let mut capture = start(b, SNAPLEN_MAX, BUFFER_BYTES);
    client.ping();
    let seen = drain(&mut capture);
    assert_eq!(seen.len(), 2);
    let other = serving.handle.lane_ids().into_iter().find(|id| *id != seen[0].lane).unwrap();
    serving.handle.remove_lane(other).unwrap();
    capture.wait(Duration::from_millis(1)).unwrap();
    client.ping();
    assert_eq!(drain(&mut capture).len(), 2);
    assert!(!capture.is_finished());
    assert_eq!(only_point(b)[0].lanes(), [seen[0].lane]);
    serving.stop().unwrap();
}

#[test]
fn netns_capture_needs_root_or_the_same_user() {
    let Some((testbed, _alone)) = testbed("netns_capture_needs_root_or_the_same_user", 1) else {
        return;
    };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let (serving, client) = start_echo(a, b, |_| ());
    // Another user, of this thread alone.
    let found_by_nobody = b.run(|| {
        let nobody = Uid::from_raw(NOBODY);
        set_thread_res_uid(nobody, nobody, nobody).unwrap();
        find_targets(None).unwrap()
    });
    assert!(found_by_nobody.targets.is_empty());
    let [(pid, why)] = found_by_nobody.refused.as_slice() else { panic!("{found_by_nobody:?}") };
    assert_eq!(*pid, std::process::id());
    assert!(why.contains("root") && why.contains("user 0"), "{why}");
    // From another namespace, by PID only.
    assert!(capture_points(a).targets.is_empty());
    let here = find_targets(Some(std::process::id())).unwrap();
    assert!(here.targets.iter().all(|point| point.address() != serving.addr), "it is in another namespace");
    assert_eq!(find_targets(Some(u32::MAX >> 1)).unwrap_err().kind(), ErrorKind::State);
    client.ping();
    serving.stop().unwrap();
    let (serving, _client) = start_echo(a, b, |builder| _ = builder.capture(false));
    let found = capture_points(b);
    assert!(found.targets.is_empty() && found.refused.is_empty(), "{found:?}");
    serving.stop().unwrap();
}
