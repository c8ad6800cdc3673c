//! Waiting of idle lanes: sleeps and polls are counted, with each policy and engine.

use std::time::Duration;

use manylane::{Builder, Engine, Handle, Lane, WaitPolicy};
use manylane_sys::cpu;
use manylane_sys::errno::EINVAL;
use manylane_test_support::seccomp::{self, Syscall};
use manylane_tests::{Client, Serving, TEST_TIMEOUT, Variant, need_uring, on_every_engine, record_counters};

const MILLISECOND: Duration = Duration::from_millis(1);

/// The only lane of a socket with this wait policy.
fn lane(variant: &Variant, policy: WaitPolicy) -> (Handle, Lane) {
    let socket = variant.builder("127.0.0.1:0").lanes(1).wait(policy).open().unwrap();
    assert_eq!(socket.waiting().policy, policy);
    (socket.handle(), socket.into_lanes().remove(0))
}

/// Sleeps and polls so far.
fn sleeps_and_polls(handle: &Handle) -> (u64, u64) {
    let total = handle.counters().total();
    (total.sleeps, total.empty_polls)
}

/// Answers one ping, for which the lane has to wait or not.
fn reply_once(lane: &mut Lane) {
    loop {
        let received = lane.recv_timeout(TEST_TIMEOUT).unwrap();
        let (batch, mut out) = (received.batch, received.out);
        // A queue that moves to another lane also wakes its lane.
        let some = !batch.is_empty();
        batch.for_each(|datagram| out.reply(&datagram, datagram.payload()));
        if some {
            return;
        }
    }
}

on_every_engine! {
    fn an_idle_adaptive_lane_sleeps_without_polling(variant, 1 queue) {
        const WAITS: u64 = 50;
        let (handle, mut lane) = lane(variant, WaitPolicy::Adaptive);
        for _ in 0..WAITS {
            assert!(lane.recv_timeout(MILLISECOND).unwrap().batch.is_empty());
        }
        assert_eq!(sleeps_and_polls(&handle), (WAITS, 0));
        // After traffic, at most once more.
        let client = Client::to(lane.local_addr());
        for _ in 0..100 {
            client.send(b"ping");
            reply_once(&mut lane);
            client.expect(b"ping");
        }
        assert!(lane.recv_timeout(MILLISECOND).unwrap().batch.is_empty());
        let (sleeps, poll_count) = sleeps_and_polls(&handle);
        for _ in 0..WAITS {
            assert!(lane.recv_timeout(MILLISECOND).unwrap().batch.is_empty());
        }
        assert_eq!(sleeps_and_polls(&handle), (sleeps + WAITS, poll_count));
        record_counters(&handle.counters().total());
    }

    fn a_spinning_lane_polls_and_then_sleeps(variant, 1 queue) {
        let (handle, mut lane) = lane(variant, WaitPolicy::Spin(MILLISECOND));
        assert!(lane.recv_timeout(20 * MILLISECOND).unwrap().batch.is_empty());
        let (sleeps, poll_count) = sleeps_and_polls(&handle);
        assert!(sleeps == 1 && poll_count >= 8, "{sleeps} sleeps, {poll_count} looks");
        // Not longer than the wait itself.
        assert!(lane.recv_timeout(MILLISECOND / 2).unwrap().batch.is_empty());
        assert_eq!(sleeps_and_polls(&handle).0, sleeps);
        // Queued datagrams are received at once.
        let client = Client::to(lane.local_addr());
        client.send(b"ping");
        reply_once(&mut lane);
        client.expect(b"ping");
        record_counters(&handle.counters().total());
    }

    fn sleep_and_busy_poll_lanes_do_not_poll_themselves(variant, 1 queue) {
        for policy in [WaitPolicy::Sleep, WaitPolicy::BusyPoll(MILLISECOND)] {
            let socket = variant.builder("127.0.0.1:0").lanes(1).wait(policy).open().unwrap();
            let waiting = socket.waiting();
            if waiting.policy != policy {
                let why = waiting.reason.unwrap();
                assert!(policy != WaitPolicy::Sleep && !why.is_empty());
                assert_eq!(waiting.policy, WaitPolicy::Spin(MILLISECOND), "{why}");
                continue;
            }
            let (handle, mut lane) = (socket.handle(), socket.into_lanes().remove(0));
            let client = Client::to(lane.local_addr());
            for _ in 0..20 {
                client.send(b"ping");
                reply_once(&mut lane);
                client.expect(b"ping");
                assert!(lane.recv_timeout(MILLISECOND).unwrap().batch.is_empty());
            }
            let (sleeps, poll_count) = sleeps_and_polls(&handle);
            assert!(sleeps >= 20 && poll_count == 0, "{policy}: {sleeps} sleeps, {poll_count} looks");
            record_counters(&handle.counters().total());
        }
    }

    fn a_stop_ends_every_wait(variant, 1 queue) {
        for policy in ["sleep", "busy-poll:1000000", "spin:1000000", "adaptive"] {
            let policy = policy.parse().unwrap();
            let serving = Serving::echo(variant.builder("127.0.0.1:0").lanes(1).wait(policy).open().unwrap());
            let client = Client::to(serving.addr);
            // So that an adaptive lane spins, where that pays.
            (0..50).for_each(|_| client.ping());
            let total = serving.stop().unwrap().total();
            assert_eq!((total.delivered, total.sent, total.discarded), (51, 51, 0), "{policy}: {total:#?}");
        }
    }

    fn added_lanes_use_the_wait_policy(variant) {
        for policy in ["busy-poll", "spin:200", "adaptive"] {
            let socket = variant.builder("127.0.0.1:0").lanes(1).wait(policy.parse().unwrap()).open().unwrap();
            let serving = Serving::echo(socket);
            for _ in 0..3 {
                let added = serving.handle.add_lane().unwrap();
                for _ in 0..10 {
                    Client::to(serving.addr).ping();
                }
                serving.handle.remove_lane(added).unwrap();
            }
            let total = serving.stop().unwrap().total();
            assert_eq!((total.delivered, total.sent, total.discarded), (31, 31, 0), "{policy}: {total:#?}");
        }
    }
}

#[test]
fn loopback_lanes_sharing_cores_sleep_by_default() {
    let cpus = cpu::affinity().unwrap().len();
    let open = |lanes: usize, policy| {
        let mut builder = Builder::new("127.0.0.1:0").unwrap();
        builder.lanes(lanes).wait(policy).open().unwrap().waiting()
    };
    assert_eq!(open(cpus, WaitPolicy::Adaptive).policy, WaitPolicy::Adaptive);
    let crowded = open(cpus + 1, WaitPolicy::Adaptive);
    assert_eq!(crowded.policy, WaitPolicy::Sleep);
    assert!(crowded.reason.unwrap().contains("share"));
    let spin = WaitPolicy::Spin(MILLISECOND);
    assert_eq!(open(cpus + 1, spin).policy, spin);
}

#[test]
fn loopback_uring_busy_poll_survives_a_thread_change() {
    const NAME: &str = "loopback_uring_busy_poll_survives_a_thread_change";
    if !need_uring(NAME) || manylane::probe().uring_napi.is_err() {
        return;
    }
    let mut builder = Builder::new("127.0.0.1:0").unwrap();
    let policy = WaitPolicy::BusyPoll(Duration::from_micros(50));
    let socket = builder.engine(Engine::Uring).lanes(1).wait(policy).open().unwrap();
    let mut lane = socket.into_lanes().remove(0);
    let client = Client::to(lane.local_addr());
    for _ in 0..3 {
        client.send(b"ping");
        lane = std::thread::spawn(move || {
            reply_once(&mut lane);
            lane
        })
        .join()
        .unwrap();
        client.expect(b"ping");
    }
}

/// As with a kernel whose rings cannot busy-poll devices.
#[test]
fn loopback_uring_without_busy_poll_falls_back_to_spin() {
    /// `IORING_REGISTER_NAPI` of linux/io_uring.h.
    const REGISTER_NAPI: u32 = 27;
    if !need_uring("loopback_uring_without_busy_poll_falls_back_to_spin") {
        return;
    }
    let in_vain = || {
        // The kernel's error for an unknown operation.
        seccomp::forbid_with_errno(Syscall::UringRegister(REGISTER_NAPI), EINVAL).unwrap();
        assert!(manylane::probe().uring_napi.is_err() && manylane::probe().uring.is_ok());
        let time = Duration::from_micros(50);
        let mut builder = Builder::new("127.0.0.1:0").unwrap();
        builder.engine(Engine::Uring).lanes(1).wait(WaitPolicy::BusyPoll(time));
        let socket = builder.open().unwrap();
        assert_eq!((socket.engine(), socket.waiting().policy), (Engine::Uring, WaitPolicy::Spin(time)));
        let why = socket.waiting().reason.unwrap();
        assert!(why.contains("IORING_REGISTER_NAPI") && why.contains("6.9"), "{why}");
        let mut lane = socket.into_lanes().remove(0);
        let client = Client::to(lane.local_addr());
        client.send(b"ping");
        reply_once(&mut lane);
        client.expect(b"ping");
    };
    // Seccomp filters are permanent for a thread.
    std::thread::spawn(in_vain).join().unwrap();
}
