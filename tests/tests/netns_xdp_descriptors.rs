//! A socket of engine xdp that is dropped leaves nothing open: no descriptor, no port, no program, no thread. A program
//! of its own with one test, since descriptors belong to the process.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::net::UdpSocket;
use std::time::{Duration, Instant};
use std::{fs, thread};

use manylane::{Engine, Placement};
use manylane_tests::{Client, PATIENCE, Serving, Variant};

/// What is open, but for the folder that says so, and the number of threads.
fn held() -> (Vec<String>, usize) {
    let links =
        fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    let mut links: Vec<_> = links.map(|link| link.to_string_lossy().into_owned()).collect();
    links.retain(|link| !link.contains("/fd"));
    // The numbers of sockets differ from one to the next.
    for link in &mut links {
        link.truncate(link.find('[').unwrap_or(link.len()));
    }
    links.sort();
    (links, fs::read_dir("/proc/self/task").unwrap().count())
}

/// The thread that follows the kernel's routes ends a moment after its socket.
fn comes_back_to(before: &(Vec<String>, usize)) {
    let start = Instant::now();
    while held() != *before {
        assert!(start.elapsed() < PATIENCE, "{:#?}\nbefore: {before:#?}", held());
        thread::sleep(Duration::from_millis(1));
    }
}

fn check(variant: &Variant) {
    let mut builder = variant.builder("127.0.0.1:0");
    builder.lanes(3);
    // What a first socket makes for good is none of the others'.
    drop(builder.open().unwrap());
    let settled = Instant::now();
    while held().1 > 3 && settled.elapsed() < PATIENCE {
        thread::sleep(Duration::from_millis(1));
    }
    let before = held();

    // Dropped as it is; two at once, which share the device.
    let (one, two) = (builder.open().unwrap(), builder.open().unwrap());
    let addrs = [one.local_addr(), two.local_addr()];
    assert!(held().0.len() >= before.0.len() + 6 + 4);
    drop((one, two));
    comes_back_to(&before);
    addrs.iter().for_each(|addr| drop(UdpSocket::bind(addr).expect("the port is free")));

    // By hand, with lanes that come and go, and a handle that outlives them.
    let socket = builder.open().unwrap();
    let (handle, addr) = (socket.handle(), socket.local_addr());
    let mut lanes = socket.into_lanes();
    for at in [0, 2, 1] {
        drop(lanes.remove(at));
        lanes.push(handle.open_lane().unwrap());
    }
    drop(lanes);
    drop(UdpSocket::bind(addr).expect("the port is free"));
    drop(handle);
    comes_back_to(&before);

    // Served.
    let serving = Serving::echo(builder.open().unwrap());
    let (handle, addr) = (serving.handle.clone(), serving.addr);
    let came = handle.add_lane().unwrap();
    handle.remove_lane(handle.lane_ids()[1]).unwrap();
    handle.remove_lane(came).unwrap();
    Client::to(addr).ping();
    serving.stop().unwrap();
    drop(handle);
    comes_back_to(&before);
    drop(UdpSocket::bind(addr).expect("the port is free"));

    // Opens that fail: half-way through the lanes, and half-way through the queues.
    assert!(builder.placement(Placement::List(vec![5000])).open().is_err());
    builder.placement(Placement::Spread);
    assert!(builder.lanes(9).xdp_surplus_lanes(false).open().is_err());
    comes_back_to(&before);
}

#[test]
fn netns_xdp_a_dropped_socket_leaves_nothing_open() {
    Variant::of("netns_xdp_a_dropped_socket_leaves_nothing_open", Engine::Xdp, 4).run(check);
}
