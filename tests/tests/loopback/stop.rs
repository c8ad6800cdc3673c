//! Stopping under load: with threads that keep every CPU busy, lanes that are added and removed,
//! and traffic.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use manylane::SteeringBackend::{ClassicBpf, Ebpf, Kernel};
use manylane::{Batch, Builder, ErrorKind, Handle, LaneCounters, Outbox};
use manylane_sys::mmsg::{RecvOptions, RecvRing, Wait};
use manylane_sys::{cpu, sock};
use manylane_test_support::wait_for;
use manylane_tests::{Client, Serving, TEST_TIMEOUT, backends, on_every_engine};

/// Threads that spin.
const SPINNING_THREADS: usize = 8;
/// Number of lane changes before the stop.
const CHANGES: u64 = 8;

/// Adds and removes a lane until the socket stops; counts in `changes`.
fn churn(handle: &Handle, changes: &AtomicU64) {
    loop {
        let id = match handle.add_lane() {
            Ok(id) => id,
            Err(err) => return assert_eq!(err.kind(), ErrorKind::State, "{err}"),
        };
        changes.fetch_add(1, Ordering::Relaxed);
        if let Err(err) = handle.remove_lane(id) {
            // The stop was faster: the lane is closed, or the only one that has not stopped yet.
            let kind = err.kind();
            return assert!(kind == ErrorKind::State || kind == ErrorKind::LastLane, "{err}");
        }
    }
}

/// Sends windows of datagrams and receives the replies, until `end`.
fn talk(server: SocketAddr, end: &AtomicBool) {
    let client = Client::to(server);
    client.socket.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
    let mut buffer = [0; 64];
    while !end.load(Ordering::Relaxed) {
        for _ in 0..32 {
            // Refused, once the port is closed.
            let _ = client.socket.send(&[1; 40]);
        }
        while client.socket.recv(&mut buffer).is_ok_and(|len| len == 40) {}
    }
}

/// Sets the flag even if a test fails.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn keep_busy<'scope>(scope: &'scope Scope<'scope, '_>, end: &'scope AtomicBool) {
    for _ in 0..SPINNING_THREADS {
        scope.spawn(|| {
            while !end.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
    }
}

/// The wake-up of a sleeping lane is not delivered as a datagram, even if one arrives at the same
/// moment.
#[test]
fn loopback_uring_wakeups_deliver_only_datagrams() {
    const ROUNDS: u32 = 4000;
    let any = "127.0.0.1:0".parse().unwrap();
    let sender = UdpSocket::bind(any).unwrap();
    let from = sender.local_addr().unwrap();
    let (give, given) = mpsc::sync_channel::<OwnedFd>(0);
    let (done, ended) = mpsc::channel();
    thread::scope(|scope| {
        let cpus = cpu::affinity().unwrap();
        scope.spawn(move || {
            // At the same time as the other, if there are two CPUs.
            cpu::pin(cpus[0]).unwrap();
            let mut ring = RecvRing::new(RecvOptions { batch: 8, buffer: 64, control: false }).unwrap();
            for fd in given {
                let count = ring.recv(fd.as_fd(), Wait::First).unwrap();
                let wrong = (0..count).any(|index| {
                    let message = ring.message(index);
                    message.data != b"some" || message.peer.to_std() != Some(from)
                });
                done.send((fd, wrong)).unwrap();
            }
        });
        cpu::pin(*cpu::affinity().unwrap().last().unwrap()).unwrap();
        for round in 0..ROUNDS {
            let fd = sock::open(&any).unwrap();
            sock::bind(fd.as_fd(), &any).unwrap();
            sock::set_recv_timeout(fd.as_fd(), TEST_TIMEOUT).unwrap();
            let to = sock::local_addr(fd.as_fd()).unwrap();
            let other = fd.try_clone().unwrap();
            give.send(fd).unwrap();
            let pause = |micros: u32| {
                let start = Instant::now();
                while start.elapsed() < Duration::from_micros(micros.into()) {
                    std::hint::spin_loop();
                }
            };
            // By then it sleeps, most often.
            pause(30);
            sock::wake(other.as_fd());
            pause(round % 12);
            sender.send_to(b"some", to).unwrap();
            let (_, wrong) = ended.recv_timeout(TEST_TIMEOUT).unwrap();
            assert!(!wrong, "round {round}");
        }
        drop(give);
    });
}

/// A panic while a lane's closure is created ends serve as one in the closure does.
#[test]
fn loopback_a_panic_in_the_handler_factory_ends_serve() {
    for good in 0..3 {
        let socket = Builder::new("127.0.0.1:0").unwrap().lanes(3).open().unwrap();
        let mut made = 0;
        let serving = Serving::start_with(socket, move |_| {
            assert!(made < good, "no more than {good}");
            made += 1;
            |_: Batch<'_>, _: &mut Outbox<'_>| {}
        });
        let handle = serving.handle.clone();
        let err = serving.outcome().unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Panicked);
        assert!(err.to_string().contains(&format!("no more than {good}")), "{err}");
        assert!(handle.lane_ids().is_empty());
    }
}

on_every_engine! {
    fn stop_ends_serve_while_lanes_are_added_and_removed(variant) {
        let test = variant.test;
        for by in backends(test, &[Ebpf, ClassicBpf, Kernel]) {
            for round in 0..if variant.is_xdp() { 1 } else { 2 } {
                let mut builder = variant.builder("127.0.0.1:0");
                let socket = builder.lanes(8).steering_backend(by).open().unwrap();
                let serving = Serving::echo(socket);
                let (handle, addr) = (serving.handle.clone(), serving.addr);
                let (end, changes) = (AtomicBool::new(false), AtomicU64::new(0));
                let counters = thread::scope(|scope| {
                    let _ends = StopOnDrop(&end);
                    keep_busy(scope, &end);
                    (0..2).for_each(|_| drop(scope.spawn(|| churn(&handle, &changes))));
                    (0..2).for_each(|_| drop(scope.spawn(|| talk(addr, &end))));
                    // Each waits for grace periods of the kernel, and other tests keep the machine
                    // busy, too.
                    // No panic in here: without a stop, the threads would not end.
                    let start = Instant::now();
                    while changes.load(Ordering::Relaxed) < CHANGES && start.elapsed() < 4 * TEST_TIMEOUT {
                        thread::sleep(Duration::from_millis(1));
                    }
                    serving.stop().unwrap()
                });
                let changes = changes.into_inner();
                assert!(changes >= CHANGES, "{changes} changes, {by}, round {round}: {counters:#?}");
                let total = counters.total();
                assert_eq!(total.offered, total.sent + total.lost(), "{by}, round {round}: {total:?}");
                assert_eq!((total.offered, total.recv_errors), (total.delivered, 0), "{by}, round {round}");
                // Only the counters are left.
                assert!(handle.lane_ids().is_empty() && handle.counters().lanes.is_empty());
                assert_eq!(handle.add_lane().unwrap_err().kind(), ErrorKind::State);
                drop(UdpSocket::bind(addr).expect("the port is free"));
            }
        }
    }

    /// If the kernel selects the lane, it continues to select one that is being removed. If more
    /// arrives than the lane can handle, its queue is never empty.
    fn lanes_are_removed_and_stopped_under_overload(variant) {
        for by in backends(variant.test, &[Ebpf, ClassicBpf, Kernel]) {
            let mut builder = variant.builder("127.0.0.1:0");
            let socket = builder.lanes(3).steering_backend(by).xdp_ring(64).open().unwrap();
            let serving = Serving::start(socket, |batch, _| {
                batch.for_each(|_| thread::sleep(Duration::from_micros(500)));
            });
            let (handle, addr, end) = (serving.handle.clone(), serving.addr, AtomicBool::new(false));
            thread::scope(|scope| {
                let _ends = StopOnDrop(&end);
                scope.spawn(|| {
                    // So many that each lane has flows.
                    let clients: Vec<_> = (0..64).map(|_| Client::to(addr)).collect();
                    while !end.load(Ordering::Relaxed) {
                        clients.iter().for_each(|client| _ = client.socket.send(&[1; 40]));
                        thread::sleep(Duration::from_micros(50));
                    }
                });
                let lost = |lane: &LaneCounters| lane.kernel_dropped + lane.xsk_dropped;
                wait_for("drops of each lane", || handle.counters(), |counters| {
                    counters.lanes.iter().all(|(_, lane)| lost(lane) > 0)
                });
                let [one, two, _] = handle.lane_ids()[..] else { panic!("three lanes") };
                handle.remove_lane(one).unwrap();
                // A stop in the middle of the next removal.
                let remover = handle.clone();
                let removal = scope.spawn(move || remover.remove_lane(two));
                while handle.lane_ids().contains(&two) {
                    thread::yield_now();
                }
                let total = serving.stop().unwrap().total();
                assert!(total.delivered > 0 && lost(&total) > 0);
                removal.join().unwrap().unwrap();
            });
        }
    }
}
