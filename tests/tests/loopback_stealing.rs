//! Stealing: an idle lane helps a slow one when asked to, and keeps off when not.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use manylane::SteeringBy::{ClassicBpf, Ebpf};
use manylane::{Builder, Engine, LaneId, Steering, SteeringBy, key_hash};
use manylane_tests::{Client, Hands, PATIENCE, Slow, backends, need_uring};

const KEY: Steering = Steering::Key { offset: 0, len: 4 };

fn builder((engine, by): (Engine, SteeringBy), stealing: bool) -> Builder {
    let mut builder = Builder::new("127.0.0.1:0").unwrap();
    builder.engine(engine).lanes(2).steering(KEY).steering_by(by).stealing(stealing);
    builder
}

/// A key for each of the two lanes of such a socket: they share the buckets in the same way each time.
fn keys(by: (Engine, SteeringBy)) -> [[u8; 4]; 2] {
    let mut hands = Hands::new(builder(by, false).open().unwrap());
    let client = Client::to(hands.addr());
    let mut keys = [None; 2];
    for key in (0_u32..).map(u32::to_be_bytes) {
        client.send(&key);
        let lane = hands.lane_of_next();
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
fn variants(test: &str) -> Vec<(Engine, SteeringBy)> {
    let engines = [Engine::Mmsg, Engine::Uring]
        .into_iter()
        .filter(|engine| *engine == Engine::Mmsg || need_uring(test));
    let by = backends(test, &[Ebpf, ClassicBpf]);
    engines.flat_map(|engine| by.iter().map(move |by| (engine, *by)).collect::<Vec<_>>()).collect()
}

/// A server of two lanes, of which the first is slow: it, and with the last byte of each datagram what is handled.
fn serve(by: (Engine, SteeringBy), stealing: bool) -> (LaneId, Slow<u8>) {
    let socket = builder(by, stealing).open().unwrap();
    let slow = socket.handle().lane_ids()[0];
    (slow, Slow::start(socket, slow, |payload| payload[4]))
}

#[test]
fn loopback_stealing_empties_the_queue_of_a_slow_lane() {
    for by in variants("loopback_stealing_empties_the_queue_of_a_slow_lane") {
        let [key, _] = keys(by);
        let (slow, Slow { serving, entered, release, handled }) = serve(by, true);
        let client = Client::to(serving.addr);
        let send = |number: u8| client.send(&[&key[..], &[number]].concat());
        // Until the slow lane is at work. The idle one may be faster, also for what was not meant for it.
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
                std::thread::yield_now();
            };
            if !stolen {
                break;
            }
        }
        // All of these are for the slow lane, which cannot take them.
        (1..=100).for_each(send);
        let mut seen: Vec<_> = (1..=100).map(|_| handled.recv_timeout(PATIENCE).expect("stolen")).collect();
        seen.sort_unstable();
        let first = seen.first().unwrap().0;
        assert_ne!(first, slow);
        assert!(seen.iter().copied().eq((1..=100).map(|number| (first, number))), "{by:?}: {seen:?}");
        drop(release);
        assert_eq!(handled.recv_timeout(PATIENCE).unwrap(), (slow, 0));
        let counters = serving.stop().unwrap();
        let total = counters.total();
        assert_eq!((total.delivered, total.stolen), (100 + early, 100 + early - 1));
        assert_eq!((total.arrived(), total.kernel_dropped, total.discarded), (100 + early, 0, 0));
    }
}

#[test]
fn loopback_without_stealing_a_slow_lane_keeps_its_queue() {
    for by in variants("loopback_without_stealing_a_slow_lane_keeps_its_queue") {
        let [key, other] = keys(by);
        let (slow, Slow { serving, entered, release, handled }) = serve(by, false);
        let client = Client::to(serving.addr);
        let send = |key: [u8; 4], number: u8| client.send(&[&key[..], &[number]].concat());
        send(key, 0);
        entered.recv_timeout(PATIENCE).unwrap();
        for number in 1..=50 {
            send(key, number);
            send(other, 100 + number);
            let (lane, what) = handled.recv_timeout(PATIENCE).unwrap();
            assert!(lane != slow && what == 100 + number, "{by:?}");
        }
        assert!(handled.try_recv().is_err());
        drop(release);
        for number in 0..=50 {
            assert_eq!(handled.recv_timeout(PATIENCE).unwrap(), (slow, number));
        }
        let total = serving.stop().unwrap().total();
        assert_eq!((total.delivered, total.stolen, total.arrived()), (101, 0, 101));
    }
}
