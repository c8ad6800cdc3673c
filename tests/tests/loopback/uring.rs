//! Cases of engine `uring` only: a system that forbids io_uring, lanes that move between threads.

use std::net::UdpSocket;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use manylane::{Builder, Engine, Lane, Socket};
use manylane_sys::epoll::Epoll;
use manylane_test_support::seccomp::{self, Syscall};
use manylane_tests::{Client, Serving, TEST_TIMEOUT, need_uring, send_and_wait};

fn builder() -> Builder {
    let mut builder = Builder::new("127.0.0.1:0").unwrap();
    builder.engine(Engine::Uring).lanes(1).gro(false).datagram_size(2048).recv_buffer(100_000);
    builder
}

/// The only lane of a socket.
fn lane(socket: Socket) -> Lane {
    socket.into_lanes().remove(0)
}

fn send(client: &Client, numbers: std::ops::Range<u32>) {
    send_and_wait(|| numbers.for_each(|number| client.send(&number.to_ne_bytes())));
}

/// Receives without waiting.
fn recv_available(lane: &mut Lane, got: &mut Vec<u32>) -> usize {
    let before = got.len();
    let received = lane.recv().unwrap();
    got.extend(received.batch.map(|datagram| u32::from_ne_bytes(datagram.payload().try_into().unwrap())));
    got.len() - before
}

fn drain(lane: &mut Lane, got: &mut Vec<u32>) {
    while recv_available(lane, got) > 0 {}
}

/// Runs `work` in a thread of its own, so that its seccomp filters end with it.
fn run_in_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| scope.spawn(work).join()).unwrap()
}

#[test]
fn loopback_uring_falls_back_to_mmsg_when_forbidden() {
    run_in_thread(|| {
        seccomp::forbid(Syscall::UringSetup).unwrap();
        assert!(manylane::probe().uring.is_err());
        let socket = builder().lanes(2).open().unwrap();
        assert_eq!(socket.engine(), Engine::Mmsg);
        let why = socket.fallback().unwrap();
        assert!(why.contains("io_uring") && why.contains("forbidden"), "{why}");
        let serving = Serving::echo(socket);
        Client::to(serving.addr).ping();
        assert_eq!(serving.stop().unwrap().total().delivered, 2);
    });
}

#[test]
fn loopback_uring_forbidden_later_falls_back_without_loss() {
    const TEST: &str = "loopback_uring_forbidden_later_falls_back_without_loss";
    if !need_uring(TEST) {
        return;
    }
    let socket = builder().batch(4).open().unwrap();
    assert_eq!((socket.engine(), socket.fallback()), (Engine::Uring, None));
    let handle = socket.handle();
    let mut lane = lane(socket);
    let client = Client::to(lane.local_addr());
    let fallbacks = || handle.counters().total().engine_fallbacks;
    let got = run_in_thread(|| {
        let (mut got, addr) = (Vec::new(), lane.local_addr());
        send(&client, 0..60);
        assert_eq!(recv_available(&mut lane, &mut got), 4);
        // As in an event loop, which does not see a failure.
        let mut watch = Epoll::new(1).unwrap();
        watch.add(&lane, 1).unwrap();
        let fd = lane.as_fd().as_raw_fd();
        // By now, more than a batch has been moved from the socket, but not all.
        seccomp::forbid(Syscall::UringEnter).unwrap();
        drain(&mut lane, &mut got);
        // The loop goes on with the descriptor that it has: ready while a datagram is queued, and
        // only then. The first one is received by the fallback, the others after it.
        for number in 60..63 {
            assert_eq!((watch.wait(Duration::ZERO).unwrap().count(), lane.as_fd().as_raw_fd()), (0, fd));
            assert_eq!(fallbacks(), u64::from(number > 60));
            send(&client, number..number + 1);
            assert_eq!((watch.wait(TEST_TIMEOUT).unwrap().count(), lane.as_fd().as_raw_fd()), (1, fd));
            let received = lane.recv_timeout(TEST_TIMEOUT).unwrap();
            got.extend(received.batch.map(|datagram| u32::from(datagram.payload()[0])));
        }
        // Pending operations of the ring cannot be cancelled here.
        drop(lane);
        drop(UdpSocket::bind(addr).expect("the port is free"));
        got
    });
    assert_eq!(got, (0..63).collect::<Vec<_>>());
    let total = handle.counters().total();
    assert_eq!((total.engine_fallbacks, total.recv_errors, total.delivered), (1, 0, 63));
    assert_eq!((total.kernel_dropped, total.discarded), (0, 0));
}

#[test]
fn loopback_uring_lanes_change_threads_without_loss() {
    if !need_uring("loopback_uring_lanes_change_threads_without_loss") {
        return;
    }
    let socket = builder().batch(4).open().unwrap();
    let handle = socket.handle();
    let mut lane = lane(socket);
    let client = Client::to(lane.local_addr());
    let mut got = Vec::new();
    // The same descriptor all the time.
    let mut watch = Epoll::new(1).unwrap();
    watch.add(&lane, 1).unwrap();
    for round in 0..8 {
        send(&client, round * 60..(round + 1) * 60);
        assert_eq!(watch.wait(TEST_TIMEOUT).unwrap().count(), 1, "round {round}");
        let (got, lane) = (&mut got, &mut lane);
        run_in_thread(|| assert_eq!(recv_available(lane, got), 4));
        assert_eq!(watch.wait(TEST_TIMEOUT).unwrap().count(), 1, "round {round}");
        if round % 2 == 0 {
            run_in_thread(|| drain(lane, got));
        }
    }
    drain(&mut lane, &mut got);
    assert_eq!(got, (0..480).collect::<Vec<_>>());
    drop(lane);
    let total = handle.counters().total();
    assert_eq!((total.arrived(), total.delivered, total.engine_fallbacks), (480, 480, 0));
}

#[test]
fn loopback_uring_close_counts_undelivered_datagrams() {
    if !need_uring("loopback_uring_close_counts_undelivered_datagrams") {
        return;
    }
    for receives in [false, true] {
        let socket = builder().batch(4).open().unwrap();
        let (handle, addr) = (socket.handle(), socket.local_addr());
        let mut lane = lane(socket);
        send(&Client::to(addr), 0..60);
        let mut got = Vec::new();
        if receives {
            assert_eq!(recv_available(&mut lane, &mut got), 4);
        }
        drop(lane);
        let total = handle.counters().total();
        assert_eq!((total.delivered, total.discarded), (got.len() as u64, 60 - got.len() as u64));
        drop(handle);
        drop(UdpSocket::bind(addr).expect("the port is free"));
    }
}

/// After a lane is dropped by any thread, its port is free, even if the kernel ends the ring later
/// because its owner is another thread.
#[test]
fn loopback_uring_drop_in_another_thread_frees_the_port() {
    #[derive(Clone, Copy, Debug)]
    enum Owner {
        /// Ended before the lanes are dropped.
        Ended,
        /// Sleeps meanwhile, in a call other than io_uring's.
        Sleeps,
        /// The same, but the thread that drops the lanes has also received from them.
        HandedOver,
    }
    if !need_uring("loopback_uring_drop_in_another_thread_frees_the_port") {
        return;
    }
    for owner in [Owner::Ended, Owner::Sleeps, Owner::HandedOver] {
        for count in [1, 1, 1, 3, 3, 3] {
            let socket = builder().lanes(count).open().unwrap();
            let addr = socket.local_addr();
            let mut lanes = socket.into_lanes();
            let (end, ended) = mpsc::channel::<()>();
            let (give, given) = mpsc::channel();
            let first = thread::spawn(move || {
                lanes.iter_mut().for_each(|lane| assert_eq!(recv_available(lane, &mut Vec::new()), 0));
                give.send(lanes).unwrap();
                _ = ended.recv();
            });
            let mut lanes = given.recv().unwrap();
            let sleeper = match owner {
                Owner::Ended => {
                    drop(end);
                    first.join().unwrap();
                    None
                }
                Owner::Sleeps | Owner::HandedOver => Some((end, first)),
            };
            if let Owner::HandedOver = owner {
                lanes.iter_mut().for_each(|lane| assert_eq!(recv_available(lane, &mut Vec::new()), 0));
            }
            drop(lanes);
            let bound = UdpSocket::bind(addr);
            assert!(bound.is_ok(), "{owner:?}, {count} lanes: the port is free: {bound:?}");
            if let Some((end, first)) = sleeper {
                drop(end);
                first.join().unwrap();
            }
        }
    }
}
