//! `manylane echo` with engine `xdp` in a testbed: named devices, and VLANs.

use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd as _;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use manylane_sys::packet::PacketSocket;
use manylane_sys::sock;
use manylane_testbed::{Layout, Testbed, skip};
use manylane_wire::ethernet::{Mac, Vlan, ether_type};
use manylane_wire::frame::{Frame, UdpFrame};
use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_manylane");

/// The running program; killed when the test fails.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Both ends on engine xdp, sleeping and polling: no request is lost, and none is answered twice.
#[test]
fn netns_send_by_lanes_of_engine_xdp_checks_every_reply() {
    if !skip::need_root("netns_send_by_lanes_of_engine_xdp_checks_every_reply") {
        return;
    }
    let testbed = Testbed::new(&Layout { ipv6: false, queues: 2, ..Layout::default() }).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    let mut command = b.command(PROGRAM).unwrap();
    let addr = format!("{}:0", b.ip4(0));
    command.args(["echo", &addr, "--lanes", "1", "--engine", "xdp", "--interval", "0"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut running = Running(command.spawn().unwrap());
    let mut lines = BufReader::new(running.0.stderr.take().unwrap()).lines();
    let to = lines.next().unwrap().unwrap().strip_prefix("listening on ").unwrap().to_owned();
    thread::spawn(move || lines.for_each(drop));
    let send = |options: &[&str]| {
        let mut command = a.command(PROGRAM).unwrap();
        command.args([
            "send",
            &to,
            "--expect",
            "echo",
            "--count",
            "2000",
            "--rate",
            "4k",
            "--timeout",
            "120s",
        ]);
        command.args(["--engine", "xdp", "--json"]).args(options);
        command.output().unwrap()
    };
    let all = [&["--flows", "2"][..], &["--flows", "2", "--busy-poll", "--interface", a.device(0)]];
    // Waits that poll a device: since Linux 6.9.
    let some = if skip::is_kernel((6, 9)) { &all[..] } else { &all[..1] };
    for options in some {
        let output = send(options);
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let sent: Value = serde_json::from_slice(&output.stdout).unwrap();
        let row = &sent["rows"][0];
        for (name, value) in [("asked", 2000), ("answered", 2000), ("duplicates", 0), ("unexpected", 0)] {
            assert_eq!(row[name], value, "{name} of {row}");
        }
        assert_eq!(row["latency_ns"]["count"], 2000);
    }
    // No other engine takes its place.
    let output = send(&["--interface", "none0"]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && message.contains("none0"), "{message}");
}

#[test]
fn netns_echo_answers_on_the_configured_vlans() {
    const FRAMES_EACH: u64 = 10;
    if !skip::need_root("netns_echo_answers_on_the_configured_vlans") {
        return;
    }
    let testbed = Testbed::new(&Layout { ipv6: false, queues: 2, ..Layout::default() }).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    let addr = format!("{}:0", b.ip4(0));
    let mut command = b.command(PROGRAM).unwrap();
    // Engine auto, which selects xdp on a named device.
    command.args(["echo", &addr, "--lanes", "2", "--interface", b.device(0), "--json", "--interval", "0"]);
    command.args(["--xdp-vlan", "5", "--xdp-vlan", "100.5", "--wait", "busy-poll"]);
    // Each reply must be a frame of its own, even those that leave through the kernel.
    command.args(["--gso", "off"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = Running(command.spawn().unwrap());
    let child = &mut running.0;
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let to: SocketAddr =
        lines.next().unwrap().unwrap().strip_prefix("listening on ").unwrap().parse().unwrap();
    let how = lines.next().unwrap().unwrap();
    assert!(how.starts_with("2 lanes, engine xdp (queues link0:0 link0:1), "), "{how}");
    thread::spawn(move || lines.for_each(drop));

    // Kept open, so that the kernel does not answer replies with ICMP.
    let held = a.run(|| UdpSocket::bind((a.ip4(0), 0))).unwrap();
    let from = held.local_addr().unwrap();
    let socket = a.run(|| PacketSocket::listen(a.device_index(0).unwrap())).unwrap();
    sock::set_recv_timeout(socket.as_fd(), Duration::from_secs(100)).unwrap();
    let (vlan, service) = (ether_type::VLAN, ether_type::SERVICE_VLAN);
    let tag = |ether_type, control| Some(Vlan { ether_type, tci: control });
    for vlans in [[tag(vlan, 7), None], [tag(vlan, 5), None], [tag(service, 100), tag(vlan, 5)], [None, None]]
    {
        let plan = UdpFrame {
            payload: b"through the program",
            vlans,
            ..UdpFrame::new(Mac(a.mac(0)), Mac(b.mac(0)), from, to)
        };
        let mut bytes = vec![0; plan.len()];
        plan.write(&mut bytes).unwrap();
        (0..FRAMES_EACH).for_each(|_| socket.send(&bytes).unwrap());
    }
    let mut replies = 0;
    while replies < 3 * FRAMES_EACH {
        let got = socket.receive().unwrap();
        replies += u64::from(Frame::parse(&got).is_ok_and(|got| got.endpoints() == Some((to, from))));
    }
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-s", "TERM", &pid]).status().unwrap().success());
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let served: Value = serde_json::from_str(&text).unwrap();
    let total = served["rows"].as_array().unwrap().iter().find(|row| row["lane"] == "total").unwrap();
    for name in ["arrived", "delivered_by_bypass", "delivered", "sent"] {
        assert_eq!(total[name], 3 * FRAMES_EACH, "{name} of {total}");
    }
}
