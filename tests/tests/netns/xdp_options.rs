//! Engine `xdp`: lanes that do not sleep at once, and engine `auto` with and without XDP.

use std::fs;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use crate::faults_support::{Child, is_child, report};
use crate::netns_support::{RECV_BUFFER_BYTES, client, echo, open};
use crate::xdp_support::{
    assert_all_by_xdp, assert_replies_by_xdp, ipv4_layout, ping_until_sent_by_xdp, testbed,
};
use aya::EbpfLoader;
use aya::programs::{Xdp, XdpMode};
use manylane::{Builder, Engine, ErrorKind, Socket, Steering, WaitPolicy};
use manylane_sys::errno::ENOTTY;
use manylane_test_support::seccomp::{self, Syscall};
use manylane_test_support::wait_for;
use manylane_testbed::{Host, skip};
use manylane_tests::TEST_TIMEOUT;
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

const ENGINES: [Engine; 2] = [Engine::Xdp, Engine::Mmsg];

#[test]
fn netns_xdp_polling_lanes_reply_to_every_request() {
    const PINGS: u64 = 500;
    let Some(testbed) = testbed("netns_xdp_polling_lanes_reply_to_every_request", &ipv4_layout(4)) else {
        return;
    };
    let (a, b) = (testbed.host(0), testbed.host(1));
    for engine in ENGINES {
        let socket = open(b, b.ip4(0).into(), |builder| {
            builder.engine(engine).lanes(2).wait(WaitPolicy::Spin(Duration::from_millis(5)));
        });
        let serving = echo(b, socket);
        let one = client(a, a.ip4(0).into(), serving.addr);
        let first = if engine == Engine::Xdp { ping_until_sent_by_xdp(&one, &serving.handle) } else { 0 };
        for _ in 0..5 {
            let one = client(a, a.ip4(0).into(), serving.addr);
            (0..PINGS / 5).for_each(|_| one.ping());
        }
        let total = serving.stop().unwrap().total();
        if engine == Engine::Xdp {
            assert_all_by_xdp(&total, PINGS + first);
            assert_replies_by_xdp(&total, first);
        } else {
            assert_eq!((total.arrived(), total.delivered, total.sent), (PINGS, PINGS, PINGS), "{total:#?}");
        }
    }
}

/// Number of voluntary context switches of the calling thread.
fn sleeps() -> u64 {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
    line.trim().parse().unwrap()
}

#[test]
fn netns_xdp_a_spinning_lane_sleeps_after_its_time() {
    let name = "netns_xdp_a_spinning_lane_sleeps_after_its_time";
    let Some(testbed) = testbed(name, &ipv4_layout(1)) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    for engine in ENGINES {
        let socket = open(b, b.ip4(0).into(), |builder| {
            builder.engine(engine).lanes(1).wait(WaitPolicy::Spin(Duration::from_millis(5)));
        });
        let (handle, server) = (socket.handle(), socket.local_addr());
        let mut lane = socket.into_lanes().remove(0);
        let (tell, told) = mpsc::channel();
        let receiver = thread::spawn(move || {
            // No datagrams: it sleeps at least once, and less often than it polls.
            let before = sleeps();
            assert!(lane.recv_timeout(Duration::from_millis(100)).unwrap().batch.is_empty());
            let slept = sleeps() - before;
            assert!((1..1000).contains(&slept), "{slept} sleeps");
            tell.send(()).unwrap();
            // Datagrams are received while it polls and while it sleeps.
            let mut seen_count = 0;
            while seen_count < 2 {
                seen_count += lane.recv_timeout(TEST_TIMEOUT).unwrap().batch.len();
                tell.send(()).unwrap();
            }
        });
        told.recv_timeout(TEST_TIMEOUT).unwrap();
        let client = client(a, a.ip4(0).into(), server);
        for _ in 0..2 {
            client.send(b"taken");
            told.recv_timeout(TEST_TIMEOUT).unwrap();
        }
        receiver.join().unwrap();
        let total = handle.counters().total();
        assert_eq!(
            (total.delivered, total.delivered_by_bypass),
            (2, if engine == Engine::Xdp { 2 } else { 0 })
        );
    }
}

#[test]
fn netns_xdp_a_stop_ends_polling() {
    let Some(testbed) = testbed("netns_xdp_a_stop_ends_polling", &ipv4_layout(2)) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    for engine in ENGINES {
        let socket = open(b, b.ip4(0).into(), |builder| {
            builder.engine(engine).lanes(2).wait(WaitPolicy::Spin(Duration::from_secs(1)));
        });
        let serving = echo(b, socket);
        client(a, a.ip4(0).into(), serving.addr).ping();
        let total = serving.stop().unwrap().total();
        assert_eq!((total.delivered, total.sent, total.discarded), (1, 1, 0), "{total:#?}");
    }
}

/// As with a kernel whose epoll cannot busy-poll devices.
#[test]
fn netns_xdp_epoll_without_busy_poll_falls_back_to_spin() {
    /// `EPIOCSPARAMS` of linux/eventpoll.h.
    const SET_PARAMS: u32 = 0x4008_8a01;
    let name = "netns_xdp_epoll_without_busy_poll_falls_back_to_spin";
    let Some(testbed) = testbed(name, &ipv4_layout(1)) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let time = Duration::from_micros(50);
    let is_supported = skip::is_kernel((6, 9));
    for is_refused in [!is_supported, true] {
        let open = || {
            if is_refused && is_supported {
                // For this thread, which ends with the closure.
                // The kernel's error for an unknown request.
                seccomp::forbid_with_errno(Syscall::Ioctl(SET_PARAMS), ENOTTY).unwrap();
            }
            assert_eq!(manylane::probe().epoll_busy_poll.is_err(), is_refused);
            let mut builder = Builder::new((b.ip4(0), 0)).unwrap();
            builder
                .engine(Engine::Xdp)
                .lanes(1)
                .recv_buffer(RECV_BUFFER_BYTES)
                .wait(WaitPolicy::BusyPoll(time));
            builder.open().unwrap()
        };
        let socket = b.run(open);
        let waiting = socket.waiting();
        if is_refused {
            assert_eq!(waiting.policy, WaitPolicy::Spin(time));
            let why = waiting.reason.unwrap();
            assert!(why.contains("EPIOCSPARAMS") && why.contains("6.9"), "{why}");
        } else {
            assert_eq!((waiting.policy, waiting.reason), (WaitPolicy::BusyPoll(time), None));
        }
        let serving = echo(b, socket);
        let client = client(a, a.ip4(0).into(), serving.addr);
        let first = ping_until_sent_by_xdp(&client, &serving.handle);
        (0..10).for_each(|_| client.ping());
        let total = serving.stop().unwrap().total();
        assert_all_by_xdp(&total, 10 + first);
    }
}

/// Engine `auto` with the device of `host`.
fn auto(host: &Host, change: impl FnOnce(&mut Builder) + Send) -> manylane::Result<Socket> {
    host.run(|| {
        let mut builder = Builder::new((host.ip4(0), 0)).unwrap();
        builder.lanes(2).recv_buffer(RECV_BUFFER_BYTES).xdp_devices([host.device(0)]);
        change(&mut builder);
        builder.open()
    })
}

/// The reason for the fallback to engine `mmsg`, which works.
fn fallback(a: &Host, b: &Host, socket: Socket) -> String {
    assert_eq!(socket.engine(), Engine::Mmsg);
    assert_eq!(socket.device_queues().len(), 0);
    let why = socket.fallback().unwrap().to_owned();
    let serving = echo(b, socket);
    let client = client(a, a.ip4(0).into(), serving.addr);
    (0..10).for_each(|_| client.ping());
    let total = serving.stop().unwrap().total();
    assert_eq!((total.delivered, total.sent, total.delivered_by_bypass), (10, 10, 0), "{total:#?}");
    why
}

#[test]
fn netns_xdp_auto_uses_xdp_on_named_devices() {
    let name = "netns_xdp_auto_uses_xdp_on_named_devices";
    let Some(testbed) = testbed(name, &ipv4_layout(2)) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let socket = auto(b, |_| ()).unwrap();
    assert_eq!((socket.engine(), socket.fallback(), socket.device_queues().len()), (Engine::Xdp, None, 2));
    let serving = echo(b, socket);
    let one = client(a, a.ip4(0).into(), serving.addr);
    let first = ping_until_sent_by_xdp(&one, &serving.handle);
    (0..10).for_each(|_| one.ping());

    // A port in use is an error with any engine.
    let seen_count = b.run(|| {
        let mut builder = Builder::new(serving.addr).unwrap();
        builder.lanes(2).xdp_devices([b.device(0)]).open().map(drop).unwrap_err()
    });
    assert_eq!(seen_count.kind(), ErrorKind::InUse, "{seen_count}");

    let total = serving.stop().unwrap().total();
    assert_all_by_xdp(&total, 10 + first);
    assert_replies_by_xdp(&total, first);

    // Without a named device, no program is attached.
    let socket = open(b, b.ip4(0).into(), |builder| _ = builder.lanes(2));
    assert_eq!((socket.engine(), socket.fallback()), (Engine::Mmsg, None));
}

#[test]
fn netns_xdp_auto_reports_why_it_falls_back() {
    let Some(testbed) = testbed("netns_xdp_auto_reports_why_it_falls_back", &ipv4_layout(2)) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let why = fallback(a, b, auto(b, |builder| _ = builder.steering(Steering::RoundRobin)).unwrap());
    assert!(why.contains("steering round-robin"), "{why}");
    let why = fallback(a, b, auto(b, |builder| _ = builder.xdp_devices(["nosuch0"])).unwrap());
    assert!(why.contains("nosuch0"), "{why}");
    let why = fallback(a, b, auto(b, |builder| _ = builder.lanes(9).xdp_surplus_lanes(false)).unwrap());
    assert!(why.contains("lanes()"), "{why}");

    // Another program, which passes everything.
    let mut other = EbpfLoader::new().load(manylane_bpf::XDP).unwrap();
    let program: &mut Xdp = other.program_mut("ml_take").unwrap().try_into().unwrap();
    program.load().unwrap();
    b.run(|| program.attach_to_if_index(b.device_index(0).unwrap(), XdpMode::Driver)).unwrap();
    let why = fallback(a, b, auto(b, |_| ()).unwrap());
    assert!(why.contains("the XDP program ml_take (number ") && why.contains(b.device(0)), "{why}");
    drop(other);
    // When it is detached, there is no obstacle.
    wait_for_xdp(b);
}

/// Wait until a detached program is freed.
fn wait_for_xdp(host: &Host) {
    let engine = || auto(host, |_| ()).unwrap().engine();
    wait_for("no program of another", engine, |engine| *engine == Engine::Xdp);
}

#[test]
#[ignore = "started by netns_xdp_auto_falls_back_without_privileges"]
fn child_is_auto_without_privileges() {
    if !is_child("child_is_auto_without_privileges") {
        return;
    }
    // CAP_SYS_ADMIN would be sufficient, too.
    let have = capabilities(None).unwrap();
    let left = have.effective - CapabilitySet::NET_ADMIN - CapabilitySet::SYS_ADMIN;
    let sets = CapabilitySets { effective: left, permitted: left, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets).unwrap();
    let mut builder = Builder::new("0.0.0.0:0").unwrap();
    let socket = builder.lanes(2).xdp_devices(["link0"]).open().unwrap();
    assert_ne!(socket.engine(), Engine::Xdp);
    let why = socket.fallback().unwrap();
    assert!(why.contains("CAP_NET_ADMIN"), "{why}");
    // With engine `xdp`, the error is the same.
    let err = builder.engine(Engine::Xdp).open().map(drop).unwrap_err();
    assert_eq!(err.kind(), ErrorKind::Permission, "{err}");
    report("done");
}

#[test]
fn netns_xdp_auto_falls_back_without_privileges() {
    let Some(testbed) = testbed("netns_xdp_auto_falls_back_without_privileges", &ipv4_layout(2)) else {
        return;
    };
    let b = testbed.host(1);
    let child = Child::start_in(b, "child_is_auto_without_privileges");
    assert_eq!(child.line(), "done");
    child.finish();
}
