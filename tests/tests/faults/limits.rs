//! Limits of the process: descriptors, memory, threads. Each is an error that names it; nothing
//! leaks.

use std::collections::BTreeSet;
use std::thread;

use crate::faults_support::{Child, Resource, fill_gaps, is_child, open_fds, set_limit, status, unique_uid};
use manylane::{Builder, Engine, Error, ErrorKind, Placement, SteeringBackend};
use manylane_test_support::wait_for;
use manylane_testbed::skip;
use manylane_tests::{Client, LaneDriver, Serving, backends, need_uring};

/// With a named engine, because `auto` might select another one that needs fewer resources.
fn open_by(engine: Engine, lanes: usize, by: SteeringBackend) -> Result<manylane::Socket, Error> {
    Builder::new("127.0.0.1:0").unwrap().engine(engine).lanes(lanes).steering_backend(by).open()
}

fn open(lanes: usize, by: SteeringBackend) -> Result<manylane::Socket, Error> {
    open_by(Engine::Mmsg, lanes, by)
}

fn assert_works(socket: manylane::Socket) {
    let mut driver = LaneDriver::new(socket);
    let client = Client::to(driver.addr());
    client.send(b"still here");
    driver.echo(1);
    client.expect(b"still here");
}

#[test]
#[ignore = "started by loopback_fault_too_few_descriptors_is_a_limit"]
fn child_has_few_descriptors() {
    if !is_child("child_has_few_descriptors") {
        return;
    }
    let test = "loopback_fault_too_few_descriptors_is_a_limit";
    let all = [SteeringBackend::Kernel, SteeringBackend::ClassicBpf, SteeringBackend::Ebpf];
    for by in backends(test, &all) {
        check_fd_limit(Engine::Mmsg, by);
    }
    if need_uring(test) {
        check_fd_limit(Engine::Uring, SteeringBackend::Kernel);
    }
}

fn check_fd_limit(engine: Engine, by: SteeringBackend) {
    let open = |lanes| open_by(engine, lanes, by);
    let what = format!("{engine}, {by}");
    // Descriptors that are kept after first use are not leaks.
    drop(open(2));
    fill_gaps();
    let before = open_fds();
    let whole = open(4).map(|socket| (open_fds(), socket)).unwrap().0 - before;
    // From none to all but one, so that each step of opening reaches the limit once.
    let mut refused = 0;
    for room in 0..whole + 8 {
        set_limit(Resource::Nofile, Some((before + room) as u64));
        let result = open(4).map(drop);
        set_limit(Resource::Nofile, None);
        assert_eq!(open_fds(), before, "{what}: a descriptor leaked with room for {room}");
        match result {
            Ok(()) => assert!(room >= whole, "{what}: {whole} descriptors fit into {room}"),
            Err(err) => {
                refused += 1;
                let text = err.to_string();
                assert_eq!(err.kind(), ErrorKind::Limit, "{what}, room for {room}: {err:?}");
                assert!(text.contains("ulimit -n"), "{what}, room for {room}: {text}");
            }
        }
    }
    assert!(refused >= whole, "{what}");

    // Fewer lanes fit, in the same process, under the limit that was too low.
    let few = open(1).map(|socket| (open_fds(), socket)).unwrap().0 - before;
    set_limit(Resource::Nofile, Some((before + few + 4) as u64));
    assert_eq!(open(64).map(drop).unwrap_err().kind(), ErrorKind::Limit, "{what}");
    assert_works(open(1).unwrap());
    set_limit(Resource::Nofile, None);
}

/// Takes 5 s: four lanes are opened once for each descriptor that they need, by four ways.
#[test]
fn loopback_fault_too_few_descriptors_is_a_limit() {
    Child::run("child_has_few_descriptors", None);
}

#[test]
#[ignore = "started by loopback_fault_a_parked_socket_survives_a_failed_lane"]
fn child_runs_out_of_fds_adding_a_lane() {
    if !is_child("child_runs_out_of_fds_adding_a_lane")
        || !need_uring("loopback_fault_a_parked_socket_survives_a_failed_lane")
    {
        return;
    }
    let mut driver = LaneDriver::new(open_by(Engine::Uring, 3, SteeringBackend::ClassicBpf).unwrap());
    let suffix = format!(":{:04X}", driver.addr().port());
    // Their inodes, of several reads: the kernel omits and repeats entries of a table that changes
    // meanwhile.
    let sockets = || {
        let tables = (0..10).map(|_| std::fs::read_to_string("/proc/self/net/udp").unwrap());
        let inodes = tables.flat_map(|table| {
            let lines = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
            let bound = lines.filter(|words| words.get(1).is_some_and(|at| at.ends_with(&suffix)));
            bound.map(|words| words[9].to_owned()).collect::<Vec<_>>()
        });
        inodes.collect::<BTreeSet<_>>().len()
    };
    driver.lanes[1].retire().unwrap();
    drop(driver.lanes.remove(1));
    assert_eq!(sockets(), 3, "the socket is parked");
    fill_gaps();
    set_limit(Resource::Nofile, Some(open_fds() as u64));
    let failed = driver.handle.open_lane().map(drop);
    set_limit(Resource::Nofile, None);
    assert_eq!(failed.unwrap_err().kind(), ErrorKind::Limit);
    // The kernel frees the rings of the lane that failed, and what they hold, some time later.
    wait_for("the socket of the failed lane to be freed (sockets)", &sockets, |count| *count <= 3);
    assert_eq!(sockets(), 3, "it stays parked");
    driver.open();
    assert_eq!(sockets(), 3, "the next lane has it");
}

#[test]
fn loopback_fault_a_parked_socket_survives_a_failed_lane() {
    Child::run("child_runs_out_of_fds_adding_a_lane", None);
}

#[test]
#[ignore = "started by loopback_fault_a_lane_beyond_the_fd_limit_keeps_the_others"]
fn child_adds_a_lane_beyond_the_fd_limit() {
    if !is_child("child_adds_a_lane_beyond_the_fd_limit") {
        return;
    }
    let all = [SteeringBackend::Kernel, SteeringBackend::ClassicBpf, SteeringBackend::Ebpf];
    for by in backends("loopback_fault_a_lane_beyond_the_fd_limit_keeps_the_others", &all) {
        let serving = Serving::echo(open(2, by).unwrap());
        let client = Client::to(serving.addr);
        fill_gaps();
        set_limit(Resource::Nofile, Some(open_fds() as u64));
        let err = serving.handle.add_lane().unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Limit, "{by}: {err}");
        client.ping();
        set_limit(Resource::Nofile, None);
        assert_eq!(serving.handle.lane_ids().len(), 2);
        serving.handle.add_lane().unwrap();
        client.ping();
        let counters = serving.stop().unwrap();
        assert_eq!(counters.total().kernel_dropped + counters.total().discarded, 0);
    }
}

#[test]
fn loopback_fault_a_lane_beyond_the_fd_limit_keeps_the_others() {
    Child::run("child_adds_a_lane_beyond_the_fd_limit", None);
}

#[test]
#[ignore = "started by loopback_fault_too_little_memory_is_a_limit"]
fn child_has_little_memory() {
    if !is_child("child_has_little_memory") {
        return;
    }
    let large = || {
        let mut builder = Builder::new("127.0.0.1:0").unwrap();
        builder.lanes(256).batch(1024).steering_backend(SteeringBackend::ClassicBpf);
        builder
    };
    let before = open_fds();
    // 256 lanes of 64 MiB each do not fit. It fails at a different point each time.
    for gigabytes in [1, 2, 3] {
        set_limit(Resource::As, Some(status("VmSize") * 1024 + (gigabytes << 30)));
        let err = large().open().map(drop).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Limit, "{err}");
        let text = err.to_string();
        assert!(text.contains("lane") && text.contains("ulimit -v") && text.contains("batch()"), "{text}");
        assert_eq!(open_fds(), before);
        assert_works(open(2, SteeringBackend::ClassicBpf).unwrap());
    }
}

#[test]
fn loopback_fault_too_little_memory_is_a_limit() {
    Child::run("child_has_little_memory", None);
}

#[test]
#[ignore = "started by loopback_fault_out_of_memory_never_aborts"]
fn child_runs_out_of_memory_anywhere() {
    if !is_child("child_runs_out_of_memory_anywhere") {
        return;
    }
    let two = || {
        let mut builder = Builder::new("127.0.0.1:0").unwrap();
        builder
            .lanes(2)
            .batch(1024)
            .gro(false)
            .datagram_size(64)
            .steering_backend(SteeringBackend::ClassicBpf);
        builder
    };
    drop(two().open().unwrap());
    // A lane needs about a megabyte in several allocations. Each of them fails once.
    let mut outcomes = [0, 0];
    for pages in (0..1024).step_by(5) {
        set_limit(Resource::As, Some(status("VmSize") * 1024 + (256 << 10) + (pages << 12)));
        let result = two().open().map(drop);
        set_limit(Resource::As, None);
        match result {
            Ok(()) => outcomes[0] += 1,
            Err(err) => {
                assert_eq!(err.kind(), ErrorKind::Limit, "{err}");
                outcomes[1] += 1;
            }
        }
    }
    assert!(outcomes.iter().all(|count| *count > 0), "{outcomes:?}");
}

/// Takes 6 s: two lanes are opened 205 times.
#[test]
fn loopback_fault_out_of_memory_never_aborts() {
    Child::run("child_runs_out_of_memory_anywhere", None);
}

#[test]
#[ignore = "started by netns_fault_too_few_threads_is_a_limit"]
fn child_has_few_threads() {
    if !is_child("child_has_few_threads") {
        return;
    }
    for lanes in [8, 2] {
        let socket = open(lanes, SteeringBackend::ClassicBpf).unwrap();
        let (before, addr) = (open_fds() - lanes, socket.local_addr());
        let handle = socket.handle();
        // Room for three lanes: the limit counts every thread of the user, which has no other
        // process.
        set_limit(Resource::Nproc, Some(status("Threads") + 3));
        if lanes == 8 {
            let err = socket.serve(|_, _| {}).unwrap_err();
            assert_eq!(err.kind(), ErrorKind::Limit, "{err}");
            assert!(err.to_string().contains("ulimit -u"), "{err}");
            assert_eq!(handle.lane_ids().len(), 0);
            drop(handle);
            assert_eq!(open_fds(), before);
            // The port is free again.
            open(1, SteeringBackend::Kernel).unwrap();
            Builder::new(addr).unwrap().lanes(1).open().unwrap();
        } else {
            thread::scope(|scope| {
                let stopper = handle.clone();
                let client = Client::to(addr);
                scope.spawn(move || {
                    client.ping();
                    stopper.stop();
                });
                let counters = socket.serve(|batch, out| {
                    for datagram in batch {
                        out.reply(&datagram, datagram.payload());
                    }
                });
                assert_eq!(counters.unwrap().total().delivered, 1);
            });
        }
        set_limit(Resource::Nproc, None);
    }
}

#[test]
fn netns_fault_too_few_threads_is_a_limit() {
    // The kernel does not count the threads of root.
    if !skip::need_root("netns_fault_too_few_threads_is_a_limit") {
        return;
    }
    Child::run("child_has_few_threads", Some(unique_uid()));
}

#[test]
fn loopback_fault_threads_may_outnumber_cores() {
    let mut builder = Builder::new("127.0.0.1:0").unwrap();
    let socket = builder.lanes(256).batch(1).placement(Placement::Spread).open().unwrap();
    let serving = Serving::echo(socket);
    assert_eq!(serving.handle.lane_ids().len(), 256);
    (0..100).for_each(|_| Client::to(serving.addr).ping());
    let total = serving.stop().unwrap().total();
    assert_eq!((total.delivered, total.sent, total.lost()), (101, 101, 0));
}
