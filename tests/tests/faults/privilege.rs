//! Without privileges: fallbacks, errors, and their messages.

use std::fs;
use std::time::Duration;

use crate::faults_support::{Child, NOBODY, is_child, is_root};
use manylane::{Builder, Engine, ErrorKind, Steering, SteeringBackend, WaitPolicy, probe};
use manylane_testbed::{Layout, Testbed, skip};
use manylane_tests::{Client, LaneDriver, send_and_wait};

fn builder() -> Builder {
    let mut builder = Builder::new("127.0.0.1:0").unwrap();
    builder.lanes(2);
    builder
}

/// The largest buffer that a process gets without a privilege.
fn buffer_max(sysctl: &str) -> usize {
    fs::read_to_string(format!("/proc/sys/net/core/{sysctl}")).unwrap().trim().parse().unwrap()
}

#[test]
#[ignore = "started by loopback_fault_steering_falls_back_to_classic_bpf"]
fn child_steers_without_ebpf() {
    if !is_child("child_steers_without_ebpf") {
        return;
    }
    assert_eq!(probe().ebpf.unwrap_err().kind(), ErrorKind::Permission);
    for (asked, in_force) in [
        (Steering::Flow, Steering::Flow),
        (Steering::Cpu, Steering::Cpu),
        (Steering::Random, Steering::Random),
        (Steering::RoundRobin, Steering::Random),
        (Steering::LeastLoaded, Steering::Random),
        (Steering::Key { offset: 1, len: 4 }, Steering::Key { offset: 1, len: 4 }),
    ] {
        let socket = builder().steering(asked).open().unwrap();
        let steering = socket.steering();
        let why = steering.reason.unwrap();
        let found = (steering.policy, steering.backend);
        assert_eq!(found, (in_force, SteeringBackend::ClassicBpf), "{asked}: {why}");
        assert!(why.starts_with("no eBPF: ") && why.contains("CAP_BPF"), "{why}");

        let mut driver = LaneDriver::new(socket);
        let addr = driver.addr();
        send_and_wait(|| (0..50).for_each(|_| Client::to(addr).send(b"all of them")));
        driver.recv_all(50);
        let total = driver.handle.counters().total();
        assert_eq!((total.delivered, total.kernel_dropped, total.steered), (50, 0, None));

        // If the backend is forced, the error names what is missing.
        let err =
            builder().steering(asked).steering_backend(SteeringBackend::Ebpf).open().map(|_| ()).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Permission);
        assert!(err.to_string().contains("CAP_BPF"), "{err}");
    }
}

#[test]
fn loopback_fault_steering_falls_back_to_classic_bpf() {
    // As root this is a process of another user, otherwise the same user.
    Child::run("child_steers_without_ebpf", Some(NOBODY));
}

#[test]
#[ignore = "started by loopback_fault_busy_poll_without_privileges_becomes_spin"]
fn child_enables_busy_poll() {
    if !is_child("child_enables_busy_poll") {
        return;
    }
    let time = Duration::from_micros(70);
    let socket = builder().engine(Engine::Mmsg).lanes(1).wait(WaitPolicy::BusyPoll(time)).open().unwrap();
    let waiting = socket.waiting();
    assert_eq!(waiting.policy, WaitPolicy::Spin(time));
    let why = waiting.reason.unwrap();
    assert!(why.contains("SO_BUSY_POLL") && why.contains("CAP_NET_ADMIN"), "{why}");
    let mut lane = socket.into_lanes().remove(0);
    Client::to(lane.local_addr()).send(b"comes");
    assert_eq!(lane.recv_timeout(Duration::from_secs(30)).unwrap().batch.len(), 1);
}

#[test]
fn loopback_fault_busy_poll_without_privileges_becomes_spin() {
    Child::run("child_enables_busy_poll", Some(NOBODY));
}

#[test]
#[ignore = "started by loopback_fault_a_buffer_above_the_sysctl_names_it"]
fn child_requests_large_buffers() {
    if !is_child("child_requests_large_buffers") {
        return;
    }
    for sysctl in ["rmem_max", "wmem_max"] {
        let open = |bytes: usize| {
            let mut builder = builder();
            let set =
                if sysctl == "rmem_max" { builder.recv_buffer(bytes) } else { builder.send_buffer(bytes) };
            set.open().map(|_| ())
        };
        open(buffer_max(sysctl)).unwrap();
        let err = open(buffer_max(sysctl) + 1).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Limit);
        let text = err.to_string();
        assert!(text.contains(&format!("net.core.{sysctl}")) && text.contains("CAP_NET_ADMIN"), "{text}");
        assert!(text.contains(&(buffer_max(sysctl) + 1).to_string()), "{text}");
    }
}

#[test]
fn loopback_fault_a_buffer_above_the_sysctl_names_it() {
    Child::run("child_requests_large_buffers", Some(NOBODY));
}

#[test]
fn loopback_fault_root_gets_a_buffer_above_the_sysctl() {
    if !skip::need("loopback_fault_root_gets_a_buffer_above_the_sysctl", is_root(), "needs CAP_NET_ADMIN") {
        return;
    }
    // More than the sysctl allows is queued, not only granted. Each byte counts more than once.
    let bytes = buffer_max("rmem_max") + (1 << 20);
    let datagrams = bytes / 65_507;
    let socket = builder().recv_buffer(bytes).send_buffer(buffer_max("wmem_max") + 1).open().unwrap();
    let mut driver = LaneDriver::new(socket);
    let client = Client::to(driver.addr());
    send_and_wait(|| (0..datagrams).for_each(|_| client.send(&[7; 65_507])));
    driver.recv_all(datagrams);
    let total = driver.handle.counters().total();
    assert_eq!((total.delivered, total.kernel_dropped), (datagrams as u64, 0));
}

#[test]
#[ignore = "started by netns_fault_a_privileged_port_names_the_capability"]
fn child_binds_port_53() {
    if !is_child("child_binds_port_53") {
        return;
    }
    for addr in ["127.0.0.1:53", "[::1]:53", "0.0.0.0:1023"] {
        let err = Builder::new(addr).unwrap().open().map(|_| ()).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Permission);
        let text = err.to_string();
        let expected = ["net.ipv4.ip_unprivileged_port_start", "CAP_NET_BIND_SERVICE", addr];
        assert!(expected.iter().all(|part| text.contains(part)), "{text}");
    }
    Builder::new("127.0.0.1:1024").unwrap().open().unwrap();
}

#[test]
fn netns_fault_a_privileged_port_names_the_capability() {
    if !skip::need_root("netns_fault_a_privileged_port_names_the_capability") {
        return;
    }
    // In a namespace of its own: elsewhere the administrator may have opened the ports to all.
    let testbed = Testbed::new(&Layout { hosts: 1, links: Vec::new(), ..Layout::default() }).unwrap();
    let host = testbed.host(0);
    host.set_sysctl("net.ipv4.ip_unprivileged_port_start", "1024").unwrap();
    host.run(|| {
        Child::run("child_binds_port_53", Some(NOBODY));
        Builder::new("127.0.0.1:53").unwrap().open().unwrap();
    });
}

#[test]
fn netns_fault_disabled_ipv6_is_reported() {
    if !skip::need_root("netns_fault_disabled_ipv6_is_reported") {
        return;
    }
    let testbed = Testbed::new(&Layout { hosts: 1, links: Vec::new(), ..Layout::default() }).unwrap();
    let host = testbed.host(0);
    host.set_sysctl("net.ipv6.conf.all.disable_ipv6", "1").unwrap();
    host.run(|| {
        let err = Builder::new("[::1]:0").unwrap().open().map(|_| ()).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Address);
        assert!(err.to_string().contains("binding [::1]:0"), "{err}");
        // A wildcard still takes IPv4.
        let mut driver = LaneDriver::new(Builder::new("[::]:0").unwrap().lanes(2).open().unwrap());
        let client = Client::to(([127, 0, 0, 1], driver.addr().port()).into());
        client.send(b"over IPv4");
        driver.echo(1);
        client.expect(b"over IPv4");
    });
}
