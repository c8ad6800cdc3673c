//! Stealing: an idle lane helps a slow one when asked to, and keeps off when not.

use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Instant;
use std::{fs, mem, thread};

use manylane::SteeringBackend::{ClassicBpf, Ebpf};
use manylane::{Batch, Builder, Engine, LaneId, Outbox, Steering, SteeringBackend, key_hash};
use manylane_sys::seccomp::{self, Syscall};
use manylane_tests::{Client, LaneDriver, Serving, SlowServer, TEST_TIMEOUT, backends, need_uring};

const KEY: Steering = Steering::Key { offset: 0, len: 4 };

fn builder((engine, by): (Engine, SteeringBackend), stealing: bool) -> Builder {
    let mut builder = Builder::new("127.0.0.1:0").unwrap();
    builder.engine(engine).lanes(2).steering(KEY).steering_backend(by).stealing(stealing);
    builder
}

/// A key for each of the two lanes of such a socket: they share the buckets in the same way each
/// time.
fn keys(by: (Engine, SteeringBackend)) -> [[u8; 4]; 2] {
    let mut hands = LaneDriver::new(builder(by, false).open().unwrap());
    let client = Client::to(hands.addr());
    let mut keys = [None; 2];
    for key in (0_u32..).map(u32::to_be_bytes) {
        client.send(&key);
        let lane = hands.recv_lane_id();
        let at = hands.lanes.iter().position(|other| other.id() == lane).unwrap();
        keys[at].get_or_insert(key);
        if let [Some(one), Some(two)] = keys {
            assert_ne!(key_hash(&one) >> 22, key_hash(&two) >> 22);
            return [one, two];
        }
    }
    unreachable!("some key falls on each lane")
}

/// Each engine with each means of steering that can be had here.
fn variants(test: &str) -> Vec<(Engine, SteeringBackend)> {
    let engines = [Engine::Mmsg, Engine::Uring]
        .into_iter()
        .filter(|engine| *engine == Engine::Mmsg || need_uring(test));
    let by = backends(test, &[Ebpf, ClassicBpf]);
    engines.flat_map(|engine| by.iter().map(move |by| (engine, *by)).collect::<Vec<_>>()).collect()
}

/// A server of two lanes, of which the first is slow: it, and with the last byte of each datagram
/// what is handled.
fn serve(by: (Engine, SteeringBackend), stealing: bool) -> (LaneId, SlowServer<u8>) {
    let socket = builder(by, stealing).open().unwrap();
    let slow = socket.handle().lane_ids()[0];
    (slow, SlowServer::start(socket, slow, |payload| payload[4]))
}

#[test]
fn loopback_stealing_empties_the_queue_of_a_slow_lane() {
    for by in variants("loopback_stealing_empties_the_queue_of_a_slow_lane") {
        let [key, _] = keys(by);
        let (slow, SlowServer { serving, entered, release, handled }) = serve(by, true);
        let client = Client::to(serving.addr);
        let send = |number: u8| client.send(&[&key[..], &[number]].concat());
        // Until the slow lane is at work. The idle one may be faster, also for what was not meant
        // for it.
        let mut early = 0;
        loop {
            send(0);
            early += 1;
            let stolen = loop {
                if entered.try_recv().is_ok() {
                    break false;
                }
                if handled.try_recv().is_ok() {
                    break true;
                }
                thread::yield_now();
            };
            if !stolen {
                break;
            }
        }
        // All of these are for the slow lane, which cannot take them.
        (1..=100).for_each(send);
        let mut seen: Vec<_> =
            (1..=100).map(|_| handled.recv_timeout(TEST_TIMEOUT).expect("stolen")).collect();
        seen.sort_unstable();
        let first = seen.first().unwrap().0;
        assert_ne!(first, slow);
        assert!(seen.iter().copied().eq((1..=100).map(|number| (first, number))), "{by:?}: {seen:?}");
        drop(release);
        assert_eq!(handled.recv_timeout(TEST_TIMEOUT).unwrap(), (slow, 0));
        let counters = serving.stop().unwrap();
        let total = counters.total();
        assert_eq!((total.delivered, total.stolen), (100 + early, 100 + early - 1));
        assert_eq!((total.arrived(), total.kernel_dropped, total.discarded), (100 + early, 0, 0));
    }
}

/// The descriptor of the socket of this process at `port` that has something queued.
fn queued_at(port: u16) -> RawFd {
    let table = fs::read_to_string("/proc/thread-self/net/udp").unwrap();
    let entries = table.lines().map(|line| line.split_ascii_whitespace().collect::<Vec<_>>());
    let queued = |fields: &Vec<&str>| {
        fields[1].ends_with(&format!(":{port:04X}")) && !fields[4].ends_with(":00000000")
    };
    let inode = entries.skip(1).find(queued).unwrap()[9].to_owned();
    let fds = fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let is_it = |path: &PathBuf| {
        fs::read_link(path).is_ok_and(|link| link.as_os_str() == format!("socket:[{inode}]").as_str())
    };
    fds.into_iter().find(is_it).unwrap().file_name().unwrap().to_str().unwrap().parse().unwrap()
}

#[test]
fn loopback_stealing_that_fails_leaves_the_datagrams_where_they_are() {
    const TEST: &str = "loopback_stealing_that_fails_leaves_the_datagrams_where_they_are";
    for by in backends(TEST, &[Ebpf, ClassicBpf]) {
        let by = (Engine::Mmsg, by);
        let [key, other] = keys(by);
        let socket = builder(by, true).open().unwrap();
        let slow = socket.handle().lane_ids()[0];
        let client = Client::to(socket.local_addr());
        let send = |key: [u8; 4], number: u8| client.send(&[&key[..], &[number]].concat());
        send(key, 0);
        let victim = queued_at(socket.local_addr().port());
        let (tell, handled) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        let mut released = Some(released);
        let serving = Serving::start_with(socket, move |info| {
            let tell = tell.clone();
            let mut gate = if info.id == slow { released.take() } else { None };
            let mut forbid = info.id != slow;
            move |batch: Batch<'_>, _: &mut Outbox<'_>| {
                if mem::take(&mut forbid) {
                    // Each lane has a thread of its own, so that only this one is forbidden to
                    // steal.
                    seccomp::forbid(Syscall::ReceiveFrom(victim)).unwrap();
                }
                batch.for_each(|datagram| tell.send((info.id, datagram.payload()[4])).unwrap());
                if let Some(gate) = gate.take() {
                    let _ = gate.recv_timeout(TEST_TIMEOUT);
                }
            }
        });
        // Whoever was first: from now on one is forbidden to steal, and the other is at work.
        send(other, 1);
        let mut first: Vec<_> = (0..2).map(|_| handled.recv_timeout(TEST_TIMEOUT).unwrap()).collect();
        first.sort_unstable_by_key(|(_, number)| *number);
        if first[0].0 != slow {
            // The idle lane has stolen even the first one: the slow lane has to be at work.
            send(key, 2);
            assert_eq!(handled.recv_timeout(TEST_TIMEOUT).unwrap(), (slow, 2));
        }
        (10..20).for_each(|number| send(key, number));
        let asked = Instant::now();
        while serving.handle.counters().total().recv_errors < 3 {
            assert!(asked.elapsed() < TEST_TIMEOUT, "the idle lane tries no more");
            thread::yield_now();
        }
        assert!(handled.try_recv().is_err());
        drop(release);
        for number in 10..20 {
            assert_eq!(handled.recv_timeout(TEST_TIMEOUT).unwrap(), (slow, number));
        }
        let total = serving.stop().unwrap().total();
        assert_eq!((total.kernel_dropped, total.discarded), (0, 0));
        assert_eq!(total.delivered, total.arrived());
    }
}

#[test]
fn loopback_without_stealing_a_slow_lane_keeps_its_queue() {
    for by in variants("loopback_without_stealing_a_slow_lane_keeps_its_queue") {
        let [key, other] = keys(by);
        let (slow, SlowServer { serving, entered, release, handled }) = serve(by, false);
        let client = Client::to(serving.addr);
        let send = |key: [u8; 4], number: u8| client.send(&[&key[..], &[number]].concat());
        send(key, 0);
        entered.recv_timeout(TEST_TIMEOUT).unwrap();
        for number in 1..=50 {
            send(key, number);
            send(other, 100 + number);
            let (lane, what) = handled.recv_timeout(TEST_TIMEOUT).unwrap();
            assert!(lane != slow && what == 100 + number, "{by:?}");
        }
        assert!(handled.try_recv().is_err());
        drop(release);
        for number in 0..=50 {
            assert_eq!(handled.recv_timeout(TEST_TIMEOUT).unwrap(), (slow, number));
        }
        let total = serving.stop().unwrap().total();
        assert_eq!((total.delivered, total.stolen, total.arrived()), (101, 0, 101));
    }
}
