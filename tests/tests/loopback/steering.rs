//! Steering: with each policy and each backend, each datagram gets to the promised lane.

use std::collections::HashMap;
use std::thread;

use manylane::SteeringBackend::{Auto, ClassicBpf, Ebpf, Kernel};
use manylane::{Builder, LaneId, Placement, Steering, SteeringBackend};
use manylane_sys::cpu;
use manylane_testbed::skip::{self, Forced};
use manylane_tests::{Client, LaneDriver, backends, need_ebpf, need_ipv6, send_and_wait};

fn open(addr: &str, lanes: usize, steering: Steering, by: SteeringBackend) -> LaneDriver {
    let mut builder = Builder::new(addr).unwrap();
    LaneDriver::new(builder.lanes(lanes).steering(steering).steering_backend(by).open().unwrap())
}

/// Delivered datagrams of each lane, in order of ids.
fn delivered(driver: &LaneDriver) -> Vec<u64> {
    driver.handle.counters().lanes.iter().map(|(_, lane)| lane.delivered).collect()
}

/// Every pair of policy and backend: the effective policy is reported, with the reason for a
/// fallback.
#[test]
fn loopback_effective_steering_is_reported() {
    use Steering::{Cpu, Flow, Key, LeastLoaded, Random, RoundRobin};
    let key = Key { offset: 2, len: 4 };
    let table = [
        (ClassicBpf, [Flow, Random, Cpu, Random, Random, key]),
        (Kernel, [Flow; 6]),
        (Ebpf, [Flow, RoundRobin, Cpu, Random, LeastLoaded, key]),
    ];
    let by = backends("loopback_effective_steering_is_reported", &[ClassicBpf, Kernel, Ebpf]);
    for (by, in_force) in table.into_iter().filter(|(asked, _)| by.contains(asked)) {
        for (asked, policy) in [Flow, RoundRobin, Cpu, Random, LeastLoaded, key].into_iter().zip(in_force) {
            let mut builder = Builder::new("127.0.0.1:0").unwrap();
            let socket = builder.lanes(2).steering(asked).steering_backend(by).open().unwrap();
            let in_force = socket.steering();
            assert_eq!((in_force.policy, in_force.backend), (policy, by), "{asked} by {by}");
            assert_eq!(in_force.reason.as_deref(), (by != Ebpf).then_some("requested"), "{asked} by {by}");
            assert!(in_force.to_string().starts_with(&format!("{policy} by {by}")), "{in_force}");
            assert_eq!(socket.handle().steering(), in_force);
        }
    }
}

/// By default, a socket selects the best available backend, and reports a reason if that is not
/// eBPF.
#[test]
fn loopback_steering_uses_the_best_backend() {
    let mut driver = open("127.0.0.1:0", 2, Steering::Random, Auto);
    let in_force = driver.handle.steering();
    match manylane::probe().ebpf {
        Ok(()) => assert_eq!((in_force.backend, in_force.reason), (Ebpf, None)),
        Err(_) => {
            assert_eq!(in_force.backend, ClassicBpf);
            assert!(in_force.reason.unwrap().starts_with("no eBPF: "));
        }
    }
    assert_eq!(in_force.policy, Steering::Random);
    Client::to(driver.addr()).send(b"x");
    driver.echo(1);
}

/// n datagrams of one sender on k lanes differ by at most one, wherever the sender runs.
#[test]
fn loopback_round_robin_is_exact() {
    if !need_ebpf("loopback_round_robin_is_exact") {
        return;
    }
    let cpus = cpu::affinity().unwrap();
    for lanes in [1, 2, 3, 5, 8] {
        for total in 1000..=1003 {
            let mut driver = open("127.0.0.1:0", lanes, Steering::RoundRobin, Ebpf);
            let client = Client::to(driver.addr());
            thread::scope(|scope| {
                scope.spawn(|| {
                    for number in 0..total {
                        if number % 50 == 0 {
                            cpu::pin(cpus[number / 50 % cpus.len()]).unwrap();
                            driver.receive(number.min(50), |_, _, _| {});
                        }
                        client.send(&number.to_be_bytes());
                    }
                });
            });
            driver.receive(if total == 1000 { 50 } else { total - 1000 }, |_, _, _| {});
            let each = delivered(&driver);
            let (min, max) = (each.iter().min().unwrap(), each.iter().max().unwrap());
            assert!(max - min <= 1, "{total} on {lanes} lanes: {each:?}");
            assert_eq!(each.iter().sum::<u64>(), total as u64);
            assert!(driver.is_idle());
        }
    }
}

/// All datagrams of a flow go to one lane, in order.
#[test]
fn loopback_flow_keeps_flows_together_and_in_order() {
    let test = "loopback_flow_keeps_flows_together_and_in_order";
    let v6 = need_ipv6(test);
    for by in backends(test, &[Ebpf, ClassicBpf, Kernel]) {
        for addr in ["127.0.0.1:0", "[::1]:0"].into_iter().filter(|addr| v6 || !addr.starts_with('[')) {
            let mut driver = open(addr, 3, Steering::Flow, by);
            let clients: Vec<_> = (0..200).map(|_| Client::to(driver.addr())).collect();
            let mut seen: HashMap<_, (LaneId, u8)> = HashMap::new();
            // Half a round at a time fits into the smallest default buffer, even if all go to one
            // lane.
            for round in 0..8_u8 {
                for half in clients.chunks(100) {
                    half.iter().for_each(|client| client.send(&[round]));
                    driver.receive(100, |lane, datagram, _| {
                        let (first, next) = seen.entry(datagram.peer()).or_insert((lane, 0));
                        assert_eq!((*first, datagram.payload()), (lane, &[*next][..]), "{by} {addr}");
                        *next += 1;
                    });
                }
            }
            assert!(seen.len() == 200 && seen.values().all(|(_, next)| *next == 8));
            assert!(driver.is_idle());
        }
    }
}

/// Our own hash of flows, under classic BPF, uses every lane.
#[test]
fn loopback_flow_spreads() {
    let test = "loopback_flow_spreads";
    let v6 = need_ipv6(test);
    for by in backends(test, &[Ebpf, ClassicBpf, Kernel]) {
        for addr in
            ["127.0.0.1:0", "[::1]:0", "[::]:0"].into_iter().filter(|addr| v6 || !addr.starts_with('['))
        {
            let mut driver = open(addr, 4, Steering::Flow, by);
            let port = driver.addr().port();
            let ip = if addr == "[::1]:0" { "::1" } else { "127.0.0.1" };
            // With 400 ports, the chance that one of four lanes gets none is 4 * (3/4)^400, or
            // 1e-49.
            for _ in 0..400 {
                Client::to(std::net::SocketAddr::new(ip.parse().unwrap(), port)).send(b"flow");
                driver.receive(1, |_, _, _| {});
            }
            let each = delivered(&driver);
            assert!(each.len() == 4 && each.iter().all(|lane| *lane > 0), "{by} {addr}: {each:?}");
            assert_eq!(each.iter().sum::<u64>(), 400);
        }
    }
}

/// The lane of a datagram is the one of the CPU that received it: over loopback, the sender's.
#[test]
fn loopback_cpu_finds_the_lane_of_the_cpu() {
    let test = "loopback_cpu_finds_the_lane_of_the_cpu";
    let cpus = cpu::affinity().unwrap();
    if !skip::need_unless_forced(test, cpus.len() > 1, Forced::Cpus, "needs two CPUs") {
        return;
    }
    // Not the order of the placement `spread`.
    let list: Vec<_> = cpus.iter().rev().take(8).copied().collect();
    for by in backends(test, &[Ebpf, ClassicBpf]) {
        let mut builder = Builder::new("127.0.0.1:0").unwrap();
        builder
            .lanes(list.len())
            .steering(Steering::Cpu)
            .steering_backend(by)
            .placement(Placement::List(list.clone()));
        let mut driver = LaneDriver::new(builder.open().unwrap());
        let in_force: Vec<_> = driver.lanes.iter().map(|lane| lane.cpu().unwrap()).collect();
        assert_eq!(in_force, list);
        let client = Client::to(driver.addr());
        for round in 0..20 {
            for (at, cpu) in list.iter().enumerate() {
                thread::scope(|scope| {
                    scope.spawn(|| {
                        cpu::pin(*cpu).unwrap();
                        client.send(b"from here");
                    });
                });
                assert_eq!(driver.recv_lane_id(), driver.lanes[at].id(), "{by}, CPU {cpu}, round {round}");
            }
        }
    }
}

#[test]
fn loopback_random_uses_all_lanes() {
    let test = "loopback_random_uses_all_lanes";
    for by in backends(test, &[Ebpf, ClassicBpf]) {
        let mut driver = open("127.0.0.1:0", 4, Steering::Random, by);
        let client = Client::to(driver.addr());
        for _ in 0..4 {
            (0..100).for_each(|_| client.send(b"any"));
            driver.receive(100, |_, _, _| {});
        }
        // The chance that one gets none is 4 * (3/4)^400, or 1e-49.
        let each = delivered(&driver);
        assert!(each.len() == 4 && each.iter().all(|lane| *lane > 0), "{by}: {each:?}");
        assert_eq!(each.iter().sum::<u64>(), 400);
        assert!(driver.is_idle());
    }
}

/// A lane with queued datagrams gets no more while the others are empty.
#[test]
fn loopback_least_loaded_avoids_the_busy_lane() {
    if !need_ebpf("loopback_least_loaded_avoids_the_busy_lane") {
        return;
    }
    for lanes in [2, 3, 5] {
        let mut driver = open("127.0.0.1:0", lanes, Steering::LeastLoaded, Ebpf);
        let client = Client::to(driver.addr());
        // Until the first lane has a datagram that it does not receive; the others receive theirs
        // at once.
        let mut busy = driver.lanes.remove(0);
        let mut others = 0;
        loop {
            send_and_wait(|| client.send(b"first"));
            let taken: usize = driver.lanes.iter_mut().map(|lane| lane.recv().unwrap().batch.len()).sum();
            if taken == 0 {
                break;
            }
            others += taken;
            assert!(others < 10_000, "the first lane never gets one");
        }
        for _ in 0..300 {
            send_and_wait(|| client.send(b"more"));
            let taken: usize = driver.lanes.iter_mut().map(|lane| lane.recv().unwrap().batch.len()).sum();
            others += taken;
        }
        assert_eq!(busy.recv().unwrap().batch.len(), 1, "{lanes} lanes");
        // Once it has caught up it gets its share again.
        loop {
            send_and_wait(|| client.send(b"again"));
            if busy.recv().unwrap().batch.len() == 1 {
                break;
            }
            let taken: usize = driver.lanes.iter_mut().map(|lane| lane.recv().unwrap().batch.len()).sum();
            others += taken;
            assert!(others < 10_000, "the first lane gets no more");
        }
        let total = driver.handle.counters().total();
        assert_eq!(total.delivered, others as u64 + 2);
        assert_eq!(total.steered, Some(total.delivered));
    }
}

/// Deep queues: the drops of one do not make it look busy for ever.
#[test]
fn loopback_least_loaded_forgets_drops() {
    if !need_ebpf("loopback_least_loaded_forgets_drops") {
        return;
    }
    let mut builder = Builder::new("127.0.0.1:0").unwrap();
    let builder = builder.lanes(2).steering(Steering::LeastLoaded).steering_backend(Ebpf).gro(false);
    let mut driver = LaneDriver::new(builder.recv_buffer(4096).open().unwrap());
    let client = Client::to(driver.addr());
    send_and_wait(|| (0..500).for_each(|_| client.send(&[0; 100])));
    driver.drain();
    let total = driver.handle.counters().total();
    assert!(total.kernel_dropped > 0 && total.arrived() == 500, "{total:?}");
    let before = delivered(&driver);
    for _ in 0..500 {
        client.send(b"x");
        driver.receive(1, |_, _, _| {});
    }
    let each: Vec<_> = delivered(&driver).iter().zip(&before).map(|(now, then)| now - then).collect();
    // Both are empty each time. The chance that one never gets any is 2^-499.
    assert!(each.iter().all(|lane| *lane > 0) && each.iter().sum::<u64>() == 500, "{each:?}");
}
