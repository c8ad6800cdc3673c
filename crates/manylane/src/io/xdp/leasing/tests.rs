//! Tests of the lessor, message by message, with the test in place of a program.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, Shutdown, UdpSocket};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use manylane_ipc::lease::{Fds, Message};
use manylane_sys::errno::ENODEV;
use manylane_sys::netns::{NetNs, device_index};
use manylane_sys::unix_socket;
use manylane_test_support::{need, need_kernel, need_leases, wait_for};

use super::Lessor;
use crate::config::LIMIT_SOURCES_DEFAULT;
use crate::io::xdp::checks::BlockedSources;
use crate::io::xdp::device::{AttachMode, Device};
use crate::io::xdp::ports::udp_key;
use crate::io::xdp::route::tests::{can_make_namespaces, run, set_sysctl, try_ip};
use crate::io::xdp::route::xdp_program_id;
use crate::vlan::Vlan;

/// True if a lessor can be opened: the kernel has cookies of network namespaces. Reports the skip
/// of test `name` if not.
fn can_open_lessor(name: &str) -> bool {
    can_make_namespaces(name) && need_kernel(name, (5, 14), "SO_NETNS_COOKIE")
}

/// True if this process can lease queues. Reports the skip of test `name` if not.
fn can_lease(name: &str) -> bool {
    can_make_namespaces(name) && need_leases(name)
}

/// A namespace with the device `near`.
fn create_device() -> NetNs {
    let ours = NetNs::create().unwrap();
    let lines = "link set lo up\nlink add near type veth peer name far\n\
        address add 10.9.0.1/24 dev near\nlink set near up\nlink set far up\n";
    assert!(try_ip(&ours, lines));
    ours
}

/// Requests queues for a socket bound to this port; returns the client's end of the lease, the
/// socket, and the answer.
fn request(lessor: &mut Lessor, port: u16) -> (OwnedFd, UdpSocket, Option<Message>) {
    let socket = UdpSocket::bind(("0.0.0.0", port)).unwrap();
    let end = unix_socket::socket().unwrap();
    lessor.clients.lease_token.connect(end.as_fd(), Duration::from_secs(120)).unwrap();
    Message::Request(lessor.clients.lease_token.secret).send(end.as_fd(), &[socket.as_fd()]).unwrap();
    lessor.clients.accept(lessor.table.leases.len());
    lessor.clients.handle_pending(0);
    let pending = || {
        lessor.clients.take_received();
        lessor.clients.find_pending(lessor.clients.last_token).is_some()
    };
    wait_for("the request", pending, |is| *is);
    lessor.clients.grant_pending(&mut lessor.table);
    let answer = Message::receive(end.as_fd(), &mut Fds::default()).unwrap();
    (end, socket, answer)
}

/// Leases queues to a socket bound to this port; returns the client's end of the lease, and the
/// socket.
fn request_lease(lessor: &mut Lessor, port: u16) -> (OwnedFd, UdpSocket) {
    let (end, socket, answer) = request(lessor, port);
    let Some(Message::Granted(queues)) = answer else { panic!("{answer:?}") };
    for _ in 0..queues {
        let message = Message::receive(end.as_fd(), &mut Fds::default()).unwrap();
        assert!(matches!(message, Some(Message::Queue(_))), "{message:?}");
    }
    (end, socket)
}

/// The memory of the first device's queues that are open, as inode numbers.
fn open_queues(lessor: &Lessor) -> Vec<u64> {
    let device = &lessor.table.devices[0];
    let inode =
        |file: BorrowedFd<'_>| File::from(file.try_clone_to_owned().unwrap()).metadata().unwrap().ino();
    (0..device.device.queues()).filter_map(|queue| device.file(queue)).map(inode).collect()
}

/// Ends a connection. A program that another test starts may have a copy until it executes.
fn end(client: OwnedFd) {
    UnixStream::from(client).shutdown(Shutdown::Both).unwrap();
}

/// Sends a command to the lease at that index; true if the lessor accepts it.
fn send_command(lessor: &mut Lessor, at: usize, end: &OwnedFd, order: Message) -> bool {
    order.send(end.as_fd(), &[]).unwrap();
    lessor.table.handle_request(at);
    order.await_reply(end.as_fd()).unwrap()
}

/// Number of addresses that lead to the lease at that index.
fn bound_count(lessor: &Lessor, at: usize) -> usize {
    let [(_, number)] = lessor.table.leases[at].socket_indexes[..] else { panic!("one device") };
    lessor.table.devices[0].device.bound_count(number)
}

#[test]
fn netns_only_clients_without_a_request_time_out() {
    if !can_open_lessor("netns_only_clients_without_a_request_time_out") {
        return;
    }
    run(&create_device(), || {
        let mut lessor = Lessor::open(Some(&["near".into()]), |_| None).unwrap();
        let end = unix_socket::socket().unwrap();
        lessor.clients.lease_token.connect(end.as_fd(), Duration::from_secs(120)).unwrap();
        // Clients left after a minute in which this thread had no CPU.
        let left = |lessor: &mut Lessor| {
            lessor.clients.accept(lessor.table.leases.len());
            lessor.clients.pending[0].since -= Duration::from_secs(60);
            lessor.clients.grant_pending(&mut lessor.table);
            lessor.clients.pending.len()
        };
        assert_eq!(left(&mut lessor), 0);
        let end = unix_socket::socket().unwrap();
        lessor.clients.lease_token.connect(end.as_fd(), Duration::from_secs(120)).unwrap();
        Message::Request(lessor.clients.lease_token.secret).send(end.as_fd(), &[end.as_fd()]).unwrap();
        assert_eq!(left(&mut lessor), 1);
    });
}

#[test]
fn netns_the_first_process_gets_queues_that_are_open() {
    if !can_lease("netns_the_first_process_gets_queues_that_are_open") {
        return;
    }
    run(&create_device(), || {
        let mut lessor = Lessor::open(Some(&["near".into()]), |_| None).unwrap();
        assert_eq!(open_queues(&lessor), []);
        lessor.table.open_in_advance();
        let queues = open_queues(&lessor);
        assert_eq!(queues.len(), lessor.table.devices[0].device.queues() as usize);
        // A queue without a lessee is not one whose lessee has exited.
        lessor.table.reclaim();
        let (_end, _socket) = request_lease(&mut lessor, 7001);
        assert_eq!(open_queues(&lessor), queues);
        assert_eq!(lessor.table.leases[0].members.len(), queues.len());
    });
}

#[test]
fn netns_no_port_is_redirected_to_a_closed_lease() {
    /// With this many addresses, two sockets exceed the map of ports. Twice as many addresses
    /// exceed the map of addresses.
    const ADDRESSES: usize = 2500;
    if !can_lease("netns_no_port_is_redirected_to_a_closed_lease") {
        return;
    }
    let ours = create_device();
    let add = |from: usize| {
        let mut lines = String::new();
        for n in from..from + ADDRESSES {
            writeln!(lines, "address add 10.10.{}.{}/32 dev lo", n / 250, n % 250 + 1).unwrap();
        }
        assert!(try_ip(&ours, &lines));
    };
    add(0);
    run(&ours, || {
        let mut lessor = Lessor::open(Some(&["near".into()]), |_| None).unwrap();
        let (first, _one) = request_lease(&mut lessor, 7001);
        let (second, other) = request_lease(&mut lessor, 7002);
        assert!(send_command(&mut lessor, 0, &first, Message::Open));
        let led = bound_count(&lessor, 0);
        assert!(led > ADDRESSES, "{led}");
        assert!(!send_command(&mut lessor, 1, &second, Message::Open));
        assert_eq!((bound_count(&lessor, 0), bound_count(&lessor, 1)), (led, 0));
        // A command is sent once. Room that becomes free in the map is for the next one.
        end(second);
        drop(other);
        lessor.table.handle_request(1);
        let (second, _other) = request_lease(&mut lessor, 7004);
        assert!(send_command(&mut lessor, 0, &first, Message::Close));
        assert!(send_command(&mut lessor, 1, &second, Message::Open));
        assert_eq!((bound_count(&lessor, 0), bound_count(&lessor, 1)), (0, led));
        add(ADDRESSES);
        let count = || lessor.table.routes.local_addresses().len();
        wait_for("the added addresses", count, |count| *count > 2 * ADDRESSES);
        assert!(send_command(&mut lessor, 1, &second, Message::Close));
        // The first lease ends, and the second one moves to its index.
        end(first);
        lessor.table.handle_request(0);
        let (third, _third) = request_lease(&mut lessor, 7003);
        assert!(!send_command(&mut lessor, 1, &third, Message::Open));
        assert_eq!((bound_count(&lessor, 0), bound_count(&lessor, 1)), (0, 0));
    });
}

/// A device whose map of ports is full does not keep others from following a change.
#[test]
fn netns_an_error_of_one_device_leaves_no_stale_address_on_another() {
    /// Entries of the map of ports.
    const PORTS_MAX: u32 = 4096;
    if !can_lease("netns_an_error_of_one_device_leaves_no_stale_address_on_another") {
        return;
    }
    let ours = create_device();
    let second = "link add second type veth peer name third\n\
        address add 10.9.1.1/24 dev second\nlink set second up\nlink set third up\n";
    assert!(try_ip(&ours, second));
    run(&ours, || {
        let mut lessor = Lessor::open(Some(&["near".into(), "second".into()]), |_| None).unwrap();
        let (end, _socket) = request_lease(&mut lessor, 7001);
        assert!(send_command(&mut lessor, 0, &end, Message::Open));
        let bound = || {
            let pairs = lessor.table.devices.iter().zip(&lessor.table.leases[0].socket_indexes);
            pairs.map(|(leased, (_, number))| leased.device.bound_count(*number)).collect::<Vec<_>>()
        };
        assert_eq!(bound(), [2, 2]);
        let full = &lessor.table.devices[0].device;
        let other = (0..PORTS_MAX).map(|n| udp_key(Ipv4Addr::from_bits(n).into(), 7001)).collect();
        full.bind(full.register(&[]).unwrap(), &other, &BlockedSources::default()).unwrap_err();
        // Three addresses are added, and there is room for the one that is removed.
        let lines: String = (1..4).map(|n| format!("address add 10.10.0.{n}/32 dev lo\n")).collect();
        assert!(try_ip(&ours, &format!("{lines}address del 10.9.1.1/24 dev second\n")));
        let removed = IpAddr::from([10, 9, 1, 1]);
        let all = || lessor.table.routes.local_addresses().into_iter().map(|(_, ip)| ip).collect::<Vec<_>>();
        wait_for("the removed address", all, |all| !all.contains(&removed));
        lessor.table.rebind_all();
        assert_eq!(bound(), [2, 4]);
    });
}

#[test]
fn netns_addresses_of_devices_that_are_down_make_room_for_others() {
    /// Entries of the map of addresses.
    const ADDRESSES_MAX: u32 = 4096;
    if !can_open_lessor("netns_addresses_of_devices_that_are_down_make_room_for_others") {
        return;
    }
    run(&create_device(), || {
        let lessor = Lessor::open(Some(&["near".into()]), |_| None).unwrap();
        let device = &lessor.table.devices[0].device;
        let number = device.register(&[]).unwrap();
        let ips = |first: u32, count| (first..first + count).map(|n| Ipv4Addr::from_bits(n).into()).collect();
        let bind = |up| {
            let down_addresses = ips(2 * ADDRESSES_MAX, 2 * ADDRESSES_MAX);
            device.bind(number, &HashSet::new(), &BlockedSources { addresses: ips(0, up), down_addresses })
        };
        bind(10).unwrap();
        bind(ADDRESSES_MAX).unwrap();
        bind(ADDRESSES_MAX + 1).unwrap_err();
        bind(10).unwrap();
    });
}

/// As after a program has waited for a stopped launcher for too long.
#[test]
fn netns_a_lease_whose_client_gave_up_is_not_opened() {
    if !can_lease("netns_a_lease_whose_client_gave_up_is_not_opened") {
        return;
    }
    run(&create_device(), || {
        let mut lessor = Lessor::open(Some(&["near".into()]), |_| None).unwrap();
        let (end, _socket) = request_lease(&mut lessor, 7001);
        for command in [Message::Open, Message::Close] {
            command.send(end.as_fd(), &[]).unwrap();
        }
        lessor.table.handle_request(0);
        assert!(lessor.table.leases.is_empty());
        assert_eq!(Message::receive(end.as_fd(), &mut Fds::default()).unwrap(), None);
        let (end, _other) = request_lease(&mut lessor, 7002);
        Message::Open.send(end.as_fd(), &[]).unwrap();
        // Not dropped: a program that another test starts has a copy until it executes.
        UnixStream::from(end).shutdown(Shutdown::Both).unwrap();
        lessor.table.handle_request(0);
        assert!(lessor.table.leases.is_empty());
    });
}

#[test]
fn netns_tap_devices_are_used_only_if_named() {
    const TEST: &str = "netns_tap_devices_are_used_only_if_named";
    if !can_open_lessor(TEST) {
        return;
    }
    let ours = NetNs::create().unwrap();
    let tap = "tuntap add dev guest mode tap\naddress add 10.9.0.1/24 dev guest\nlink set guest up\n";
    if !need(TEST, try_ip(&ours, tap), "this kernel has no tap devices (CONFIG_TUN, /dev/net/tun)") {
        return;
    }
    run(&ours, || {
        let refused = Lessor::open(None, |_| None).map(|_| ()).unwrap_err().to_string();
        assert!(refused.contains("guest: it is a tap device"), "{refused}");
        let named = Lessor::open(Some(&["guest".into()]), |_| None).unwrap();
        assert_eq!(named.devices(), ["guest"]);
    });
}

/// From then on, the upper device decides about the frames.
#[test]
fn netns_an_enslaved_device_is_left_to_the_kernel() {
    const TEST: &str = "netns_an_enslaved_device_is_left_to_the_kernel";
    if !can_lease(TEST) {
        return;
    }
    let ours = create_device();
    let kinds = ["bridge", "vrf table 9", "bond"];
    let made = kinds.iter().any(|kind| try_ip(&ours, &format!("link add name upper type {kind}\n")));
    if !need(TEST, made, "this kernel has no bridges, VRFs and bonds (CONFIG_BRIDGE)") {
        return;
    }
    run(&ours, || {
        let mut lessor = Lessor::open(Some(&["near".into()]), |_| None).unwrap();
        let device = std::sync::Arc::clone(&lessor.table.devices[0].device);
        let (end, _socket) = request_lease(&mut lessor, 7001);
        assert!(send_command(&mut lessor, 0, &end, Message::Open));
        assert!(bound_count(&lessor, 0) > 0 && xdp_program_id(device.index).is_some());
        lessor.resync();
        assert_eq!(lessor.devices(), ["near"]);
        // A bond takes only devices that are down.
        assert!(try_ip(&ours, "link set near down\nlink set near master upper\nlink set near up\n"));
        let devices = || {
            lessor.resync();
            (device.is_gone(), lessor.devices().join(" "))
        };
        wait_for("the device to be given up", devices, |(is_gone, _)| *is_gone);
        wait_for("the program to be detached", || xdp_program_id(device.index), Option::is_none);
        assert!(lessor.devices().is_empty());
        // The program can still drain and close its queues, and no program gets new ones.
        assert!(send_command(&mut lessor, 0, &end, Message::Close));
        let (_end, _other, answer) = request(&mut lessor, 7002);
        assert!(matches!(answer, Some(Message::Refused(ENODEV))), "{answer:?}");
    });
}

/// As without /proc or descriptors: without the device, its filter cannot be read. The other one
/// has no IPv4 address, but could have routes.
#[test]
fn netns_an_unreadable_rp_filter_keeps_its_value() {
    if !can_open_lessor("netns_an_unreadable_rp_filter_keeps_its_value") {
        return;
    }
    for strict in [false, true] {
        let ours = create_device();
        set_sysctl(&ours, "ipv4/conf/all/rp_filter", "0");
        set_sysctl(&ours, "ipv4/conf/near/rp_filter", if strict { "1" } else { "0" });
        run(&ours, || {
            let lessor = Lessor::open(Some(&["near".into()]), |_| None).unwrap();
            let locals = lessor.table.routes.local_state();
            let near = &lessor.table.devices[0].device;
            let (index, sources) = (device_index("far").unwrap(), LIMIT_SOURCES_DEFAULT);
            let far = Device::open(index, AttachMode::Generic, &locals, 2048, sources, true).unwrap();
            assert_eq!(near.has_strict_rp_filter(&locals), strict);
            assert!(try_ip(&ours, "link del near\n"));
            assert_eq!(near.has_strict_rp_filter(&locals), strict);
            assert!(far.has_strict_rp_filter(&locals), "never read");
        });
    }
}

#[test]
fn netns_vlans_of_a_refused_socket_are_removed() {
    if !can_open_lessor("netns_vlans_of_a_refused_socket_are_removed") {
        return;
    }
    run(&create_device(), || {
        let lessor = Lessor::open(Some(&["near".into()]), |_| None).unwrap();
        let device = &lessor.table.devices[0].device;
        let vlan = |n: u16| Vlan::stacked(1 + n / 4000, 1 + n % 4000).unwrap();
        // One more than the map has room for.
        let many: Vec<Vlan> = (0..4097).map(vlan).collect();
        assert!(device.register(&many).is_err());
        let number = device.register(&many[..1]).unwrap();
        assert_eq!(device.vlan_count(number), 1);
    });
}
