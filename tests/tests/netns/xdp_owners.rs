//! Engine `xdp` when the device, the queue or the memory is in use: an error that names the owner
//! or the reason, and nothing left behind.

use std::net::UdpSocket;

use crate::faults_support::{Child, Resource, is_child, report, set_limit, wait_for_parent};
use crate::netns_support::{client, echo};
use crate::xdp_support::{PORT, programs, two_queues, xdp_builder};
use aya::programs::{Xdp, XdpMode};
use aya::{Ebpf, EbpfLoader};
use manylane::{Builder, Engine, Error, ErrorKind};
use manylane_sys::xsk::{self, RawXsk};
use manylane_test_support::wait_for;
use manylane_testbed::{Host, skip};
use manylane_tests::TEST_TIMEOUT;
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use socket2::{Domain, Protocol, Socket, Type};

/// Opening fails with "in use", and names the device. The port is free afterwards.
fn open_error(host: &Host) -> Error {
    let err = host.run(|| xdp_builder(host).open().map(drop)).unwrap_err();
    assert_eq!(err.kind(), ErrorKind::InUse, "{err}");
    assert!(err.to_string().contains(host.device(0)), "{err}");
    host.run(|| drop(UdpSocket::bind((host.ip4(0), PORT)).expect("the port is free")));
    err
}

/// Opens, serves a peer past the stack, and ends.
fn check_echo(a: &Host, b: &Host) {
    let serving = echo(b, b.run(|| xdp_builder(b).open().unwrap()));
    client(a, a.ip4(0).into(), serving.addr).ping();
    let total = serving.stop().unwrap().total();
    assert_eq!((total.delivered, total.delivered_by_bypass), (1, 1), "{total:#?}");
    wait_for("the end of all programs", || programs(b), String::is_empty);
}

/// Binds a queue as soon as the kernel has released it, which is some time after its last owner
/// has closed it.
fn open_queue(host: &Host, index: u32, queue: u32) -> RawXsk {
    let mut bound = None;
    let open = || host.run(|| RawXsk::open(index, queue, 64, false)).map(|xsk| bound = Some(xsk));
    wait_for(&format!("the release of queue {queue}"), open, Result::is_ok).unwrap();
    bound.unwrap()
}

/// Another AF_XDP socket on one of the queues, without a program: the other queues are released,
/// too.
#[test]
fn netns_xdp_a_bound_queue_is_refused() {
    let name = "netns_xdp_a_bound_queue_is_refused";
    for queue in [0, 1] {
        // A new device each time: for a queue that this process has served before, the refusal
        // waits until the kernel must have released it, for 30 s.
        let Some(testbed) = two_queues(name) else { return };
        let (a, b) = (testbed.host(0), testbed.host(1));
        let index = b.device_index(0).unwrap();
        let other = open_queue(b, index, queue);
        let err = open_error(b);
        assert!(err.to_string().contains(&format!("queue {queue}")), "{err}");
        wait_for("the end of all programs", || programs(b), String::is_empty);
        // The other queue is free again.
        drop(open_queue(b, index, 1 - queue));
        drop(other);
        check_echo(a, b);
    }
}

#[test]
#[ignore = "started by netns_xdp_a_queue_bound_by_another_process_names_it"]
fn child_binds_a_queue() {
    if !is_child("child_binds_a_queue") {
        return;
    }
    let index = manylane_sys::netns::device_index("link0").unwrap();
    let queue = RawXsk::open(index, 1, 64, false).unwrap();
    report("taken");
    wait_for_parent();
    drop(queue);
}

/// Of another process: its PID and name, if the kernel reports the owner of a queue; else a hint
/// how to find it.
#[test]
fn netns_xdp_a_queue_bound_by_another_process_names_it() {
    let Some(testbed) = two_queues("netns_xdp_a_queue_bound_by_another_process_names_it") else {
        return;
    };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let child = Child::start_in(b, "child_binds_a_queue");
    assert_eq!(child.line(), "taken");
    let index = b.device_index(0).unwrap();
    let owner_text = match b.run(|| xsk::owners(index, 1)) {
        Ok(owners) => {
            assert_eq!(owners.len(), 1);
            let name = std::fs::read_to_string(format!("/proc/{}/comm", child.pid())).unwrap();
            format!("process {} ({})", child.pid(), name.trim())
        }
        // CONFIG_XDP_SOCKETS_DIAG is not set.
        Err(_) => "another process (see 'ss --xdp -p')".to_owned(),
    };
    let message = format!("{} queue 1 belongs to an AF_XDP socket of {owner_text}", b.device(0));
    let err = open_error(b);
    assert!(err.to_string().contains(&message), "{message}: {err}");
    wait_for("the end of all programs", || programs(b), String::is_empty);
    child.finish();
    // As soon as the kernel has released the queue.
    drop(open_queue(b, index, 1));
    check_echo(a, b);
}

/// The error has the program's name in the kernel, and its id, which `ip` shows.
fn assert_names_program(err: &Error, shown: &str) {
    let number = shown.split_whitespace().skip_while(|word| *word != "id").nth(1).unwrap();
    let message = format!("the XDP program ml_take (number {number}) is already attached");
    assert!(err.to_string().contains(&message), "{message}: {err}");
}

/// Another XDP program: our own, without addresses.
fn other_program() -> Ebpf {
    let mut program = EbpfLoader::new().btf(None).load(manylane_bpf::XDP).unwrap();
    xdp(&mut program).load().unwrap();
    program
}

fn xdp(program: &mut Ebpf) -> &mut Xdp {
    program.program_mut("ml_take").unwrap().try_into().unwrap()
}

/// Attaches a program without a link (`IFLA_XDP_FD`), or detaches it with a descriptor of -1. It
/// stays until it is detached, even when its process ends.
fn set_by_netlink(index: u32, fd: i32) {
    const RTM_SETLINK: u16 = 19;
    const REQUEST_AND_ACK: u16 = 1 | 4;
    const IFLA_XDP: u16 = 43 | 0x8000;
    let attribute = |kind: u16, value: &[u8]| {
        let mut bytes = (4 + value.len() as u16).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes
    };
    // IFLA_XDP_FD, and IFLA_XDP_FLAGS with XDP_FLAGS_DRV_MODE.
    let nested = [attribute(1, &fd.to_ne_bytes()), attribute(3, &4_u32.to_ne_bytes())].concat();
    // Family, type, index, flags, change.
    let mut body = [&[0_u8; 4][..], &index.to_ne_bytes(), &[0; 8]].concat();
    body.extend(attribute(IFLA_XDP, &nested));
    let mut message = (16 + body.len() as u32).to_ne_bytes().to_vec();
    message.extend(RTM_SETLINK.to_ne_bytes());
    message.extend(REQUEST_AND_ACK.to_ne_bytes());
    message.extend([1, 0, 0, 0, 0, 0, 0, 0]);
    message.extend(body);
    let netlink = Socket::new(Domain::from(16), Type::RAW, Some(Protocol::from(0))).unwrap();
    netlink.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    netlink.send(&message).unwrap();
    let mut answer = [0; 1024];
    let len = std::io::Read::read(&mut (&netlink), &mut answer).unwrap();
    assert!(len >= 20);
    let code = i32::from_ne_bytes(answer[16..20].try_into().unwrap());
    assert_eq!(code, 0, "{}", std::io::Error::from_raw_os_error(-code));
}

/// Without a link, by netlink.
#[test]
fn netns_xdp_a_netlink_attached_program_is_in_use() {
    let Some(testbed) = two_queues("netns_xdp_a_netlink_attached_program_is_in_use") else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let index = b.device_index(0).unwrap();
    let mut other = other_program();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&std::os::fd::AsFd::as_fd(xdp(&mut other).fd().unwrap()));
    b.run(|| set_by_netlink(index, fd));
    let before = programs(b);
    assert!(!before.is_empty());
    assert_names_program(&open_error(b), &before);
    assert_eq!(programs(b), before, "theirs, as it was");
    b.run(|| set_by_netlink(index, -1));
    check_echo(a, b);
}

#[test]
#[ignore = "started by netns_xdp_a_program_of_another_process_is_in_use"]
fn child_attaches_a_program() {
    if !is_child("child_attaches_a_program") {
        return;
    }
    let mut program = other_program();
    let index = manylane_sys::netns::device_index("link0").unwrap();
    let link = xdp(&mut program).attach_to_if_index(index, XdpMode::Driver).unwrap();
    report("attached");
    wait_for_parent();
    xdp(&mut program).detach(link).unwrap();
}

/// By a link of another process, as long as that process lives.
#[test]
fn netns_xdp_a_program_of_another_process_is_in_use() {
    let Some(testbed) = two_queues("netns_xdp_a_program_of_another_process_is_in_use") else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let child = Child::start_in(b, "child_attaches_a_program");
    assert_eq!(child.line(), "attached");
    let before = programs(b);
    assert_names_program(&open_error(b), &before);
    assert_eq!(programs(b), before, "theirs, as it was");
    child.finish();
    check_echo(a, b);
}

#[test]
#[ignore = "started by netns_xdp_locked_memory_is_a_limit"]
fn child_has_no_locked_memory() {
    if !is_child("child_has_no_locked_memory") {
        return;
    }
    let mut less = capabilities(None).unwrap();
    less.effective.remove(CapabilitySet::IPC_LOCK);
    set_capabilities(None, less).unwrap();
    let open = || Builder::new("0.0.0.0:4242").unwrap().engine(Engine::Xdp).lanes(2).open();
    set_limit(Resource::Memlock, Some(64 << 10));
    let err = open().map(drop).unwrap_err();
    assert_eq!(err.kind(), ErrorKind::Limit, "{err}");
    assert!(err.to_string().contains("link0"), "{err}");
    drop(UdpSocket::bind("0.0.0.0:4242").expect("the port is free"));
    report("refused");
    // Two queues of 2 * 64 frames of 2 KiB fit into this small limit.
    set_limit(Resource::Memlock, Some(1 << 20));
    let mut builder = Builder::new("0.0.0.0:4242").unwrap();
    builder.engine(Engine::Xdp).lanes(2).xdp_ring(64).open().map(drop).unwrap();
    report("opened");
}

#[test]
fn netns_xdp_locked_memory_is_a_limit() {
    let name = "netns_xdp_locked_memory_is_a_limit";
    // Before, the loader of eBPF programs raises it.
    if !skip::need_kernel(name, (5, 11), "eBPF memory that is not charged to RLIMIT_MEMLOCK") {
        return;
    }
    let Some(testbed) = two_queues(name) else { return };
    let b = testbed.host(1);
    let child = Child::start_in(b, "child_has_no_locked_memory");
    assert_eq!((child.line(), child.line()), ("refused".into(), "opened".into()));
    child.finish();
    wait_for("the end of all programs", || programs(b), String::is_empty);
}
