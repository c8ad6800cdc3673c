//! Serving: threads, closures, panics, the end.

use std::collections::BTreeSet;
use std::sync::mpsc;
use std::time::Duration;

use manylane::{Builder, Engine, ErrorKind, Lane, LaneInfo, Placement, Received, Steering, SteeringBackend};
use manylane_sys::cpu;
use manylane_sys::epoll::Epoll;
use manylane_tests::{
    Client, LaneDriver, Serving, SlowServer, TEST_TIMEOUT, backends, need_uring, on_every_engine,
    on_every_variant, pattern, record_counters, send_and_wait,
};

/// A lane is Send but not Sync, or this would not compile.
#[allow(dead_code, reason = "it has only to compile")]
mod lanes_are_send_and_not_sync {
    use super::Lane;

    trait UnlessSync<Which> {
        fn holds() {}
    }
    struct IsSync;
    impl<T: ?Sized> UnlessSync<()> for T {}
    impl<T: ?Sized + Sync> UnlessSync<IsSync> for T {}

    fn assert_send<T: Send>() {}

    fn assertions() {
        assert_send::<Lane>();
        assert_send::<manylane::Socket>();
        assert_send::<manylane::Handle>();
        // Two candidates, and so ambiguous, were a lane Sync.
        <Lane as UnlessSync<_>>::holds();
    }
}

on_every_variant! {
    fn serve_replies_to_every_client(variant) {
        for lanes in [1, 2, 8] {
            let serving = Serving::echo(variant.builder("127.0.0.1:0").lanes(lanes).open().unwrap());
            let clients: Vec<_> = (0..16).map(|_| Client::to(serving.addr)).collect();
            for round in 0..20 {
                clients.iter().for_each(|client| client.send(&pattern(round, round * 50)));
                clients.iter().for_each(|client| client.expect(&pattern(round, round * 50)));
            }
            let counters = serving.stop().unwrap();
            let total = counters.total();
            assert_eq!((total.delivered, total.sent, total.lost(), total.kernel_dropped), (321, 321, 0, 0));
            assert_eq!((total.discarded, total.abandoned), (0, 0));
        }
    }

    /// Datagrams that are queued at the stop are still handled and answered.
    fn stop_drains_queued_datagrams(variant) {
        let (entered, enter) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        let mut released = Some(released);
        let socket = variant.builder("127.0.0.1:0").lanes(1).batch(16).open().unwrap();
        let serving = Serving::start_with(socket, move |_| {
            let (entered, released) = (entered.clone(), released.take());
            move |batch: manylane::Batch<'_>, out: &mut manylane::Outbox<'_>| {
                let first = batch.len();
                for datagram in batch {
                    out.reply(&datagram, datagram.payload());
                }
                if entered.send(first).is_ok() {
                    let _ = released.as_ref().unwrap().recv_timeout(TEST_TIMEOUT);
                }
            }
        });
        let client = Client::to(serving.addr);
        client.send(&pattern(0, 60));
        assert_eq!(enter.recv_timeout(TEST_TIMEOUT).unwrap(), 1);
        send_and_wait(|| (1..101).for_each(|number| client.send(&pattern(number, 60))));
        serving.handle.stop();
        drop((release, enter));
        let total = serving.outcome().unwrap().total();
        // In any order, because a client that moves to another CPU meanwhile sends through
        // another queue.
        let mut due: Vec<_> = (0..101).map(|number| pattern(number, 60)).collect();
        let mut got: Vec<_> = due.iter().map(|_| client.recv()).collect();
        due.sort_unstable();
        got.sort_unstable();
        assert!(got == due, "other replies than were due");
        assert_eq!((total.delivered, total.sent, total.discarded, total.kernel_dropped), (101, 101, 0, 0));
    }

    /// A panic ends serve with an error that has its message. No lane continues or hangs.
    fn a_panic_ends_serve_with_an_error(variant) {
        let serving = Serving::start(variant.builder("127.0.0.1:0").lanes(3).open().unwrap(), |batch, out| {
            for datagram in batch {
                out.reply(&datagram, datagram.payload());
                out.reply(&datagram, datagram.payload());
                assert_ne!(datagram.payload(), b"bad luck", "this one is bad");
            }
        });
        let clients: Vec<_> = (0..8).map(|_| Client::to(serving.addr)).collect();
        for client in &clients {
            client.send(b"ping");
            client.expect(b"ping");
            client.expect(b"ping");
        }
        let handle = serving.handle.clone();
        clients[0].send(b"bad luck");
        let err = serving.outcome().unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Panicked);
        assert!(err.to_string().contains("panicked: ") && err.to_string().contains("this one is bad"), "{err}");
        let total = handle.counters().total();
        assert_eq!((total.delivered, total.sent, total.abandoned, total.lost()), (9, 16, 2, 2));
        assert!(handle.lane_ids().is_empty() && clients[0].is_idle());
        assert_eq!(handle.add_lane().unwrap_err().kind(), ErrorKind::State);
    }
}

/// Each lane's closure gets the lane's id and CPU, and runs there, also for a lane that is added
/// later.
#[test]
fn loopback_serve_with_passes_lane_id_and_cpu() {
    let cpus = cpu::affinity().unwrap();
    for placement in [Placement::Spread, Placement::Pack, Placement::List(cpus.clone()), Placement::None] {
        let socket =
            Builder::new("127.0.0.1:0").unwrap().lanes(5).placement(placement.clone()).open().unwrap();
        let ids = socket.handle().lane_ids();
        let (tell, told) = mpsc::channel::<LaneInfo>();
        let (ran, runs) = mpsc::channel();
        let serving = Serving::start_with(socket, move |info| {
            tell.send(info).unwrap();
            let ran = ran.clone();
            move |batch: manylane::Batch<'_>, out: &mut manylane::Outbox<'_>| {
                ran.send((info.id, cpu::affinity().unwrap())).unwrap();
                batch.for_each(|datagram| out.reply(&datagram, datagram.payload()));
            }
        });
        let mut infos: Vec<_> = (0..5).map(|_| told.recv_timeout(TEST_TIMEOUT).unwrap()).collect();
        assert_eq!(infos.iter().map(|info| info.id).collect::<Vec<_>>(), ids);
        assert_eq!(serving.handle.add_lane().unwrap(), {
            infos.push(told.recv_timeout(TEST_TIMEOUT).unwrap());
            infos[5].id
        });
        let given: Vec<_> = infos.iter().map(|info| info.cpu).collect();
        if placement == Placement::None {
            assert_eq!(given, [None; 6]);
        } else {
            // More lanes than CPUs start over: none is used twice before all are used once.
            let round: BTreeSet<_> = given.iter().take(cpus.len()).collect();
            assert_eq!(round.len(), cpus.len().min(6));
            assert!(given.iter().zip(given.iter().skip(cpus.len())).all(|(one, two)| one == two));
        }
        for _ in 0..64 {
            Client::to(serving.addr).ping();
            let (id, pinned) = runs.recv_timeout(TEST_TIMEOUT).unwrap();
            let info = infos.iter().find(|info| info.id == id).unwrap();
            assert_eq!(pinned, info.cpu.map_or(cpus.clone(), |cpu| vec![cpu]));
        }
        serving.stop().unwrap();
    }
}

/// Datagrams queue for a lane whose closure is busy, and other lanes go on.
#[test]
fn loopback_a_busy_lane_delays_no_other_lane() {
    const TEST: &str = "loopback_a_busy_lane_delays_no_other_lane";
    let mut engines = vec![Engine::Mmsg];
    if need_uring(TEST) {
        engines.push(Engine::Uring);
    }
    let backends = backends(TEST, &[SteeringBackend::Ebpf, SteeringBackend::ClassicBpf]);
    for (engine, by) in engines.iter().flat_map(|engine| backends.iter().map(move |by| (*engine, *by))) {
        let mut builder = Builder::new("127.0.0.1:0").unwrap();
        builder.engine(engine).lanes(2).steering(Steering::Key { offset: 0, len: 4 }).steering_backend(by);
        let [key, other] = keys_of_two_lanes(&builder);
        let socket = builder.open().unwrap();
        let busy = socket.handle().lane_ids()[0];
        let SlowServer { serving, entered, release, handled } =
            SlowServer::start(socket, busy, |payload| payload[4]);
        let client = Client::to(serving.addr);
        let send = |key: [u8; 4], number: u8| client.send(&[&key[..], &[number]].concat());
        let next = || handled.recv_timeout(TEST_TIMEOUT).unwrap();
        send(key, 0);
        entered.recv_timeout(TEST_TIMEOUT).unwrap();
        for number in 1..=50 {
            send_and_wait(|| send(key, number));
            send(other, 100 + number);
            let (lane, handled) = next();
            assert!(lane != busy && handled == 100 + number, "{engine}, {by}: {handled}");
        }
        assert!(handled.try_recv().is_err(), "{engine}, {by}");
        drop(release);
        (0..=50).for_each(|number| assert_eq!(next(), (busy, number), "{engine}, {by}"));
        let total = serving.stop().unwrap().total();
        assert_eq!((total.delivered, total.arrived()), (101, 101), "{engine}, {by}");
    }
}

/// A key that is steered to each of the two lanes of `builder`, the same for every socket.
fn keys_of_two_lanes(builder: &Builder) -> [[u8; 4]; 2] {
    let mut driver = LaneDriver::new(builder.open().unwrap());
    let client = Client::to(driver.addr());
    let mut key_of = |lane: usize| {
        let id = driver.lanes[lane].id();
        let mut keys = (0_u32..).map(u32::to_be_bytes);
        keys.find(|key| {
            client.send(key);
            driver.recv_lane_id() == id
        })
        .unwrap()
    };
    [key_of(0), key_of(1)]
}

on_every_engine! {
    fn stop_before_serve_and_twice(variant) {
        let socket = variant.builder("127.0.0.1:0").lanes(2).open().unwrap();
        let (handle, client) = (socket.handle(), Client::to(socket.local_addr()));
        send_and_wait(|| (0..10).for_each(|_| client.send(b"early")));
        handle.stop();
        handle.stop();
        let serving = Serving::start(socket, |batch, out| {
            for datagram in batch {
                out.reply(&datagram, b"done");
            }
        });
        // Datagrams from before the stop are handled in this case, too.
        assert_eq!(serving.outcome().unwrap().total().delivered, 10);
        (0..10).for_each(|_| client.expect(b"done"));
        handle.stop();
        assert_eq!(handle.counters().total().sent, 10);
        assert_eq!(handle.add_lane().unwrap_err().kind(), ErrorKind::State);
        assert_eq!(handle.open_lane().err().unwrap().kind(), ErrorKind::State);
    }

    /// A lane is readable in an epoll exactly as long as something is queued.
    fn a_lane_is_readable_when_a_datagram_is_queued(variant) {
        for gro in [true, false] {
            let mut builder = variant.builder("127.0.0.1:0");
            let socket = builder.lanes(1).batch(4).gro(gro).open().unwrap();
            let handle = socket.handle();
            let mut lane = socket.into_lanes().remove(0);
            let client = Client::to(lane.local_addr());
            let mut watch = Epoll::new(4).unwrap();
            watch.add(&lane, 7).unwrap();
            for payload in [&b""[..], b"something"] {
                assert_eq!(watch.wait(Duration::ZERO).unwrap().next(), None);
                send_and_wait(|| (0..5).for_each(|_| client.send(payload)));
                assert_eq!(watch.wait(TEST_TIMEOUT).unwrap().collect::<Vec<_>>(), [7]);
                assert_eq!(lane.recv().unwrap().batch.len(), 4);
                assert_eq!(watch.wait(Duration::ZERO).unwrap().collect::<Vec<_>>(), [7]);
                assert_eq!(lane.recv_timeout(TEST_TIMEOUT).unwrap().batch.len(), 1);
            }
            assert_eq!(watch.wait(Duration::ZERO).unwrap().next(), None);
            assert_eq!(lane.recv_timeout(Duration::from_millis(1)).unwrap().batch.len(), 0);
            assert_eq!(lane.recv_timeout(Duration::ZERO).unwrap().batch.len(), 0);
            record_counters(&handle.counters().total());
        }
    }

    /// A lane that moves to another thread continues to work there.
    fn a_lane_moves_between_threads(variant) {
        let socket = variant.builder("127.0.0.1:0").lanes(1).open().unwrap();
        let handle = socket.handle();
        let mut lane = socket.into_lanes().remove(0);
        let client = Client::to(lane.local_addr());
        for round in 0..5 {
            client.send(&pattern(round, 20));
            lane = std::thread::spawn(move || {
                lane.pin().unwrap();
                assert_eq!(cpu::affinity().unwrap(), [lane.cpu().unwrap()]);
                let Received { batch, mut out } = lane.recv_timeout(TEST_TIMEOUT).unwrap();
                batch.for_each(|datagram| out.reply_borrowed(&datagram, datagram.payload()));
                drop(out);
                lane
            })
            .join()
            .unwrap();
            client.expect(&pattern(round, 20));
        }
        record_counters(&handle.counters().total());
    }
}
