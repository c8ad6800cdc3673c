//! Stopping in the thick of it: beside threads that keep every CPU busy, lanes that come and go, and traffic.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use manylane::SteeringBy::{ClassicBpf, Ebpf, Kernel};
use manylane::{Builder, ErrorKind, Handle};
use manylane_tests::{Client, PATIENCE, Serving, backends};

/// Threads that do nothing, as fast as they can.
const BUSY: usize = 8;
/// Lanes that have come and gone when the stop comes.
const CHANGES: u64 = 8;

/// Adds a lane and removes it again, until the socket stops; counts in `changes`.
fn churn(handle: &Handle, changes: &AtomicU64) {
    loop {
        let id = match handle.add_lane() {
            Ok(id) => id,
            Err(err) => return assert_eq!(err.kind(), ErrorKind::State, "{err}"),
        };
        changes.fetch_add(1, Ordering::Relaxed);
        if let Err(err) = handle.remove_lane(id) {
            // The stop was faster: the lane is gone, or the only one that did not know of it yet.
            let kind = err.kind();
            return assert!(kind == ErrorKind::State || kind == ErrorKind::LastLane, "{err}");
        }
    }
}

/// Sends windows of datagrams and takes what comes back, until `end`.
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

/// Ends what waits for the flag, also when a test fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn keep_busy<'scope>(scope: &'scope Scope<'scope, '_>, end: &'scope AtomicBool) {
    for _ in 0..BUSY {
        scope.spawn(|| {
            while !end.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
    }
}

#[test]
fn loopback_stop_ends_serve_while_lanes_come_and_go_on_a_busy_machine() {
    let test = "loopback_stop_ends_serve_while_lanes_come_and_go_on_a_busy_machine";
    for by in backends(test, &[Ebpf, ClassicBpf, Kernel]) {
        for stealing in [false, true, false, true] {
            let mut builder = Builder::new("127.0.0.1:0").unwrap();
            let socket = builder.lanes(8).steering_by(by).stealing(stealing).open().unwrap();
            let serving = Serving::echo(socket);
            let (handle, addr) = (serving.handle.clone(), serving.addr);
            let (end, changes) = (AtomicBool::new(false), AtomicU64::new(0));
            let counters = thread::scope(|scope| {
                let _ends = Ends(&end);
                keep_busy(scope, &end);
                (0..2).for_each(|_| drop(scope.spawn(|| churn(&handle, &changes))));
                (0..2).for_each(|_| drop(scope.spawn(|| talk(addr, &end))));
                let start = Instant::now();
                while changes.load(Ordering::Relaxed) < CHANGES && start.elapsed() < PATIENCE {
                    thread::sleep(Duration::from_millis(1));
                }
                serving.stop().unwrap()
            });
            assert!(changes.load(Ordering::Relaxed) >= CHANGES, "{by}, stealing {stealing}");
            let total = counters.total();
            assert_eq!(total.offered, total.sent + total.lost(), "{by}, stealing {stealing}: {total:?}");
            assert_eq!((total.offered, total.recv_errors), (total.delivered, 0), "{by}, stealing {stealing}");
            // Nothing is left of it but the numbers.
            assert!(handle.lane_ids().is_empty() && handle.counters().lanes.is_empty());
            assert_eq!(handle.add_lane().unwrap_err().kind(), ErrorKind::State);
            drop(UdpSocket::bind(addr).expect("the port is free"));
        }
    }
}
