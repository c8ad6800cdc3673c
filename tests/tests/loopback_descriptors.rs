//! A socket that is dropped leaves nothing open. A program of its own with one test, since descriptors belong to
//! the process.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::fs;
use std::net::UdpSocket;

use manylane::SteeringBy::{ClassicBpf, Ebpf, Kernel};
use manylane::{Builder, Steering};
use manylane_tests::{Client, Serving, backends};

/// What is open, but for the folder that says so.
fn open_files() -> Vec<String> {
    let links =
        fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    let mut links: Vec<_> = links.map(|link| link.to_string_lossy().into_owned()).collect();
    links.retain(|link| !link.contains("/fd"));
    links.sort();
    links
}

#[test]
fn loopback_a_dropped_socket_frees_port_and_descriptors() {
    let by = backends("loopback_a_dropped_socket_frees_port_and_descriptors", &[Ebpf, ClassicBpf, Kernel]);
    for (by, steering) in by.iter().flat_map(|by| [(*by, Steering::Flow), (*by, Steering::LeastLoaded)]) {
        let before = open_files();
        let mut builder = Builder::new("127.0.0.1:0").unwrap();
        builder.lanes(3).steering(steering).steering_by(by);

        // Dropped as it is; two at once.
        let (one, two) = (builder.open().unwrap(), builder.open().unwrap());
        let addrs = [one.local_addr(), two.local_addr()];
        assert_ne!(addrs[0], addrs[1]);
        assert!(open_files().len() >= before.len() + 6);
        drop((one, two));
        assert_eq!(open_files(), before, "{by}");
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
        assert_eq!(open_files(), before, "{by}");

        // Served, with lanes that come and go.
        let serving = Serving::echo(builder.open().unwrap());
        let (handle, addr) = (serving.handle.clone(), serving.addr);
        let came = handle.add_lane().unwrap();
        handle.remove_lane(handle.lane_ids()[1]).unwrap();
        handle.remove_lane(came).unwrap();
        Client::to(addr).ping();
        serving.stop().unwrap();
        drop(handle);
        assert_eq!(open_files(), before, "{by}");
        drop(UdpSocket::bind(addr).expect("the port is free"));

        // An open that fails half-way: three CPUs that nobody has.
        builder.placement(manylane::Placement::List(vec![5000]));
        assert!(builder.open().is_err());
        assert_eq!(open_files(), before, "{by}");
    }
}
