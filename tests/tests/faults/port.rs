//! A port that another process has: its owner, and which processes may share it.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::{env, fs, process, thread};

use crate::faults_support::{Child, NOBODY, is_child, is_root, report, wait_for_parent};
use manylane::{Builder, Error, ErrorKind, Handle, SteeringBackend};
use manylane_sys::sock::{self, Flag};
use manylane_test_support::wait_for;
use manylane_testbed::skip;
use manylane_tests::{Client, LaneDriver, backends, need_ipv6, send_and_wait};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::thread::gettid;

fn open(addr: SocketAddr) -> Result<manylane::Socket, Error> {
    Builder::new(addr).unwrap().lanes(2).open()
}

/// The error of opening `addr`, which must be "in use".
fn open_error(addr: SocketAddr) -> String {
    let err = open(addr).map(|_| ()).unwrap_err();
    assert_eq!(err.kind(), ErrorKind::InUse, "{err}");
    let text = err.to_string();
    assert!(text.starts_with(&format!("{addr} is in use")), "{text}");
    text
}

fn process_name(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).unwrap().trim().to_owned()
}

/// A plain socket with SO_REUSEPORT.
fn open_reuse_port(addr: SocketAddr) -> std::io::Result<OwnedFd> {
    let fd = sock::open(&addr)?;
    sock::set_flag(fd.as_fd(), Flag::ReusePort, true)?;
    sock::bind(fd.as_fd(), &addr)?;
    Ok(fd)
}

fn loopback_addr() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

/// The child that has a port: `MANYLANE_TEST_HOLD` is the address, with the prefix "joinable " for
/// SO_REUSEPORT.
#[test]
#[ignore = "started by other tests"]
fn child_holds_a_port() {
    if !is_child("child_holds_a_port") {
        return;
    }
    let wanted = env::var("MANYLANE_TEST_HOLD").unwrap_or_else(|_| "127.0.0.1:0".into());
    let fd: OwnedFd = UdpSocket::bind(wanted).unwrap().into();
    report(&sock::local_addr(fd.as_fd()).unwrap().to_string());
    wait_for_parent();
}

/// The child that has a port with SO_REUSEPORT.
#[test]
#[ignore = "started by other tests"]
fn child_holds_a_reuseport_port() {
    if !is_child("child_holds_a_reuseport_port") {
        return;
    }
    let fd = open_reuse_port(loopback_addr()).unwrap();
    report(&sock::local_addr(fd.as_fd()).unwrap().to_string());
    wait_for_parent();
}

/// The child that opens the port given in its environment.
#[test]
#[ignore = "started by other tests"]
fn child_binds_a_port() {
    if !is_child("child_binds_a_port") {
        return;
    }
    // The parent has exactly one socket of UDP on this address. The kernel omits entries of a table
    // that changes meanwhile.
    let port = (0..100).find_map(|_| {
        let table = fs::read_to_string("/proc/self/net/udp").unwrap();
        table.lines().find_map(|line| {
            let port = line.split_whitespace().nth(1)?.strip_prefix("4D59007F:")?;
            u16::from_str_radix(port, 16).ok()
        })
    });
    let text = open_error((MONITORED_ADDR, port.unwrap()).into());
    report(&text);
    wait_for_parent();
}

/// An address of the loopback network that only one test uses: as a number it is 0x7F00594D.
const MONITORED_ADDR: Ipv4Addr = Ipv4Addr::new(127, 0, 0x59, 0x4D);

#[test]
fn loopback_fault_port_of_this_process_names_it() {
    let socket = UdpSocket::bind(loopback_addr()).unwrap();
    let text = open_error(socket.local_addr().unwrap());
    let me = process::id();
    assert!(text.contains(&format!("process {me} ({})", process_name(me))), "{text}");
}

#[test]
fn loopback_fault_port_of_another_process_names_it() {
    for role in ["child_holds_a_port", "child_holds_a_reuseport_port"] {
        let child = Child::start(role, None);
        let addr = child.line().parse().unwrap();
        let text = open_error(addr);
        let pid = child.pid();
        assert!(text.contains(&format!("process {pid} ({})", process_name(pid))), "{role}: {text}");
        // When the other one has ended, the port is free.
        child.finish();
        open(addr).unwrap();
    }
}

/// As after the kill of a process, whose sockets the kernel closes one after the other.
#[test]
fn loopback_fault_port_of_no_process_is_waited_for() {
    let name = "loopback_fault_port_of_no_process_is_waited_for";
    if skip::need(name, is_root(), "only root sees the files of all processes") {
        Child::run("child_binds_a_port_of_no_process", None);
    }
}

/// In a process of its own that starts no children, because these would have its sockets for a
/// moment.
#[test]
#[ignore = "started by loopback_fault_port_of_no_process_is_waited_for"]
fn child_binds_a_port_of_no_process() {
    if !is_child("child_binds_a_port_of_no_process") {
        return;
    }
    // Again, as long as a thread had no CPU for the second in which the port is waited for.
    wait_for("an opening that waits for the port", open_port_of_no_process, Result::is_ok).unwrap();
}

/// Opens the port of a socket that is on its way, which arrives meanwhile.
fn open_port_of_no_process() -> Result<(), String> {
    let socket = UdpSocket::bind(loopback_addr()).unwrap();
    let addr = socket.local_addr().unwrap();
    let on_its_way = in_flight(&socket);
    drop(socket);
    // The port is not released during the wait: the kernel has it, or an invisible process.
    let text = open_error(addr);
    assert!(text.ends_with("by a socket of user 0 that no visible process has open"), "{text}");
    let (told, tid) = std::sync::mpsc::channel();
    let next = thread::spawn(move || {
        told.send(gettid()).unwrap();
        open(addr).map(drop)
    });
    let stat = format!("/proc/self/task/{}/stat", tid.recv().unwrap().as_raw_nonzero());
    // It sleeps between two reads of the table.
    while fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") S ")) {
        thread::yield_now();
    }
    let is_early = next.is_finished();
    drop(on_its_way);
    let opened = next.join().unwrap().map_err(|err| err.to_string());
    assert!(!is_early || opened.is_err(), "the port was not released yet");
    opened
}

/// Sends a socket over a local socket that is never read. The kernel has it as long as the
/// returned value lives.
fn in_flight(socket: &UdpSocket) -> (UnixStream, UnixStream) {
    let (from, to) = UnixStream::pair().unwrap();
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    let fds = [socket.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(&from, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap();
    (from, to)
}

#[test]
fn loopback_fault_wildcards_and_addresses_clash() {
    let any = |port: u16| SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
    let socket = UdpSocket::bind(any(0)).unwrap();
    let port = socket.local_addr().unwrap().port();
    let me = format!("process {} (", process::id());
    assert!(open_error((Ipv4Addr::LOCALHOST, port).into()).contains(&me));
    assert!(open_error(any(port)).contains(&me));
    drop(socket);

    let socket = UdpSocket::bind(loopback_addr()).unwrap();
    let port = socket.local_addr().unwrap().port();
    assert!(open_error(any(port)).contains(&me));
    // Another address of the machine does not conflict.
    open((Ipv4Addr::new(127, 0, 0, 2), port).into()).unwrap();
}

#[test]
fn loopback_fault_an_ipv6_wildcard_clashes_unless_v6only() {
    if !need_ipv6("loopback_fault_an_ipv6_wildcard_clashes_unless_v6only") {
        return;
    }
    let socket = UdpSocket::bind(loopback_addr()).unwrap();
    let any: SocketAddr = (Ipv6Addr::UNSPECIFIED, socket.local_addr().unwrap().port()).into();
    let text = open_error(any);
    assert!(text.contains(&format!("process {} (", process::id())), "{text}");
    let only_v6 = Builder::new(any).unwrap().lanes(2).only_v6(true).open().unwrap();
    // And vice versa: an IPv4 address with an IPv6 wildcard of ours.
    drop(socket);
    open((Ipv4Addr::LOCALHOST, any.port()).into()).unwrap();
    drop(only_v6);
}

#[test]
fn loopback_fault_the_error_names_the_conflicting_owner() {
    if !need_ipv6("loopback_fault_the_error_names_the_conflicting_owner") {
        return;
    }
    // The same port over IPv4 belongs to this process and is not in the way.
    // Again, as long as another test has that one.
    let mut children = (0..10).map(|_| {
        let child = Child::start("child_holds_a_port_v6", None);
        let addr: SocketAddr = child.line().parse().unwrap();
        (child, addr, UdpSocket::bind((Ipv4Addr::UNSPECIFIED, addr.port())))
    });
    let (child, addr, bystander) =
        children.find(|(_, _, bystander)| bystander.is_ok()).expect("a port that is free over IPv4");
    let text = open_error(addr);
    assert!(text.contains(&format!("process {} (", child.pid())), "{text}");
    drop(bystander);
}

/// The child that has a port over IPv6 only.
#[test]
#[ignore = "started by other tests"]
fn child_holds_a_port_v6() {
    if !is_child("child_holds_a_port_v6") {
        return;
    }
    let socket = UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).unwrap();
    report(&socket.local_addr().unwrap().to_string());
    wait_for_parent();
}

#[test]
fn loopback_fault_port_of_another_user_names_the_user() {
    let name = "loopback_fault_port_of_another_user_names_the_user";
    if !skip::need(name, is_root(), "only root can start a process of another user") {
        return;
    }
    // Root sees the process of the other user.
    let child = Child::start("child_holds_a_port", Some(NOBODY));
    let text = open_error(child.line().parse().unwrap());
    let pid = child.pid();
    assert!(text.ends_with(&format!("by process {pid} ({}) of user {NOBODY}", process_name(pid))), "{text}");
    // Sockets of another user cannot be joined even with SO_REUSEPORT: the kernel requires the
    // same user.
    let child = Child::start("child_holds_a_reuseport_port", Some(NOBODY));
    let addr: SocketAddr = child.line().parse().unwrap();
    let err = Builder::new(addr).unwrap().lanes(2).reuse_port(true).open().map(|_| ()).unwrap_err();
    assert_eq!(err.kind(), ErrorKind::InUse);
    assert!(err.to_string().contains(&format!("of user {NOBODY}")), "{err}");
    // The other user cannot see our process, but the error names its user.
    let socket = UdpSocket::bind((MONITORED_ADDR, 0)).unwrap();
    let text = Child::start("child_binds_a_port", Some(NOBODY)).line();
    assert!(text.ends_with("by a process of user 0, not visible to this one"), "{text}");
    drop(socket);
}

#[test]
fn loopback_fault_reuse_port_is_off_by_default() {
    let child = Child::start("child_holds_a_reuseport_port", None);
    let addr: SocketAddr = child.line().parse().unwrap();
    open_error(addr);
    let socket = Builder::new(addr).unwrap().lanes(2).reuse_port(true).open().unwrap();
    let steering = socket.steering();
    assert_eq!(steering.backend, SteeringBackend::Kernel);
    assert!(steering.reason.as_ref().is_some_and(|why| why.contains("reuse_port")), "{steering}");
    drop(socket);
    child.finish();
}

#[test]
fn loopback_fault_reuse_port_shares_the_traffic() {
    const FLOWS: u64 = 400;
    let other = open_reuse_port(loopback_addr()).unwrap();
    let addr = sock::local_addr(other.as_fd()).unwrap();
    let socket = Builder::new(addr).unwrap().lanes(3).reuse_port(true).open().unwrap();
    let mut driver = LaneDriver::new(socket);
    send_and_wait(|| (0..FLOWS).for_each(|_| Client::to(addr).send(b"whose?")));
    let other = UdpSocket::from(other);
    other.set_nonblocking(true).unwrap();
    let by_other = std::iter::from_fn(|| other.recv(&mut [0; 8]).ok()).count() as u64;
    driver.recv_all((FLOWS - by_other) as usize);
    let counters = driver.handle.counters();
    assert_eq!(counters.total().delivered + by_other, FLOWS);
    // Each lane should get about a quarter. The chance that one gets none is negligible.
    assert!(
        by_other > 0 && counters.lanes.iter().all(|(_, lane)| lane.delivered > 0),
        "{by_other} {counters:?}"
    );
    assert!(driver.is_idle());
}

#[test]
fn loopback_fault_a_single_lane_cannot_be_joined() {
    let all = [SteeringBackend::Ebpf, SteeringBackend::ClassicBpf, SteeringBackend::Kernel];
    for by in backends("loopback_fault_a_single_lane_cannot_be_joined", &all) {
        let socket = Builder::new(loopback_addr()).unwrap().lanes(1).steering_backend(by).open().unwrap();
        let addr = socket.local_addr();
        assert_eq!(open_reuse_port(addr).unwrap_err().kind(), std::io::ErrorKind::AddrInUse, "{by}");
        let any = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), addr.port());
        assert_eq!(open_reuse_port(any).unwrap_err().kind(), std::io::ErrorKind::AddrInUse, "{by}");
        drop(socket);
        open_reuse_port(addr).unwrap();
    }
}

#[test]
fn loopback_fault_foreign_sockets_of_a_group_get_nothing() {
    const FLOWS: u64 = 200;
    let steered = [SteeringBackend::Ebpf, SteeringBackend::ClassicBpf];
    for by in backends("loopback_fault_foreign_sockets_of_a_group_get_nothing", &steered) {
        let socket = Builder::new(loopback_addr()).unwrap().lanes(2).steering_backend(by).open().unwrap();
        let mut driver = LaneDriver::new(socket);
        let addr = driver.addr();
        // The kernel lets a socket of the same user join, which cannot be prevented. Steering does
        // not use it.
        let intruder = UdpSocket::from(open_reuse_port(addr).unwrap());
        intruder.set_nonblocking(true).unwrap();
        let all_come = |driver: &mut LaneDriver| {
            send_and_wait(|| (0..FLOWS).for_each(|_| Client::to(addr).send(b"ours")));
            driver.recv_all(FLOWS as usize);
            assert!(intruder.recv(&mut [0; 8]).is_err(), "{by}");
        };
        all_come(&mut driver);
        // A lane that is added after it has another number in the kernel's group than its slot,
        // which classic BPF uses. So it is refused, with the process as reason.
        if by == SteeringBackend::ClassicBpf {
            let err = driver.handle.open_lane().map(drop).unwrap_err();
            assert_eq!(err.kind(), ErrorKind::InUse);
            let text = err.to_string();
            assert!(
                text.contains(&format!("process {} (", process::id())) && text.contains("eBPF"),
                "{text}"
            );
        } else {
            driver.open();
        }
        all_come(&mut driver);
        assert_eq!(total_lost(&driver.handle), 0);
        // When the other socket is closed, a lane can be added again.
        drop(intruder);
        driver.open();
        send_and_wait(|| (0..FLOWS).for_each(|_| Client::to(addr).send(b"ours")));
        driver.recv_all(FLOWS as usize);
        assert_eq!(total_lost(&driver.handle), 0);
    }
}

fn total_lost(handle: &Handle) -> u64 {
    let total = handle.counters().total();
    total.kernel_dropped + total.discarded
}
