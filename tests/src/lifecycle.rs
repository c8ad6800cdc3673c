//! Resources of a process, and sockets that are opened and closed in each possible way. Afterwards
//! the process must have the same resources as before.

use std::fs;
use std::net::UdpSocket;

use manylane::Socket;

use crate::{Client, Serving};

/// Open descriptors, without that of the folder that lists them.
#[must_use]
pub fn open_files() -> Vec<String> {
    let links =
        fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    let mut links: Vec<_> = links.map(|link| link.to_string_lossy().into_owned()).collect();
    links.retain(|link| !link.contains("/fd"));
    links.sort();
    links
}

/// Two sockets that are dropped without serving. `check` examines the resources while they exist,
/// and after them.
pub fn drop_unused(one: Socket, two: Socket, mut check: impl FnMut(bool)) {
    let addrs = [one.local_addr(), two.local_addr()];
    assert_ne!(addrs[0], addrs[1]);
    check(true);
    drop((one, two));
    check(false);
    addrs.iter().for_each(|addr| drop(UdpSocket::bind(addr).expect("the port is free")));
}

/// Three lanes by hand that are added and removed, and a handle that outlives them.
pub fn open_and_close_lanes(socket: Socket) {
    let (handle, addr) = (socket.handle(), socket.local_addr());
    let mut lanes = socket.into_lanes();
    for at in [0, 2, 1] {
        drop(lanes.remove(at));
        lanes.push(handle.open_lane().unwrap());
    }
    drop(lanes);
    drop(UdpSocket::bind(addr).expect("the port is free"));
    drop(handle);
}

/// Lanes that serve, and are added and removed. `check` examines the resources after them.
pub fn serve_lanes(socket: Socket, check: impl FnOnce()) {
    let serving = Serving::echo(socket);
    let (handle, addr) = (serving.handle.clone(), serving.addr);
    let added_id = handle.add_lane().unwrap();
    handle.remove_lane(handle.lane_ids()[1]).unwrap();
    handle.remove_lane(added_id).unwrap();
    Client::to(addr).ping();
    serving.stop().unwrap();
    drop(handle);
    check();
    drop(UdpSocket::bind(addr).expect("the port is free"));
}
