//! Engine `xdp` on a device that is full: frames that it has not taken leave when there is room.

use std::net::SocketAddr;
use std::os::fd::AsFd as _;

use manylane::Socket;
use manylane_sys::{cpu, sock};
use manylane_testbed::{Host, Testbed, skip};
use manylane_tests::{Client, Serving};

use crate::netns_support::{RECV_BUFFER_BYTES, client, lane_driver};
use crate::xdp_support::{any_port, ipv4_layout, ping_until_sent_by_xdp, testbed, xdp};

/// More than the 256 of the ring of a veth device.
const REPLIES: u32 = 1000;

/// Makes `receiver` receive what `sender` sends in a kernel thread on `cpu`, scheduled by `policy`
/// (an option of chrt), and the device of `sender` say when it is full, instead of dropping frames.
fn receive_late(receiver: &Host, sender: &Host, cpu: usize, policy: &str) {
    let run = |host: &Host, program, args: &str| {
        let args: Vec<&str> = args.split_whitespace().collect();
        let done = host.output(program, &args).unwrap();
        assert!(done.status.success(), "{done:?}");
    };
    // A veth device queues frames for its other end if that has GRO, and this one no TSO.
    run(receiver, "ethtool", &format!("-K {} gro on", receiver.device(0)));
    run(sender, "ethtool", &format!("-K {} tso off", sender.device(0)));
    for thread in receiver.enable_threaded_napi(0, cpu).unwrap() {
        run(receiver, "chrt", &format!("{policy} --pid 0 {thread}"));
    }
    run(sender, "tc", &format!("qdisc replace dev {} root pfifo", sender.device(0)));
}

/// Two hosts, of which the first receives late what the second sends from the returned CPU.
fn full_device(name: &str, policy: &str) -> Option<(Testbed, usize)> {
    if !skip::need_kernel(name, (6, 16), "veth devices that are full") {
        return None;
    }
    let testbed = testbed(name, &ipv4_layout(1))?;
    let cpu = cpu::affinity().unwrap()[0];
    receive_late(testbed.host(0), testbed.host(1), cpu, policy);
    Some((testbed, cpu))
}

/// One lane with a ring and a batch for all replies.
fn one_lane(host: &Host, wait: &str) -> Socket {
    let wait = wait.parse().unwrap();
    xdp(host, any_port(host), |builder| _ = builder.lanes(1).wait(wait).xdp_ring(2048).batch(1024))
}

/// A client with room for all replies.
fn patient_client(host: &Host, server: SocketAddr) -> Client {
    let client = client(host, host.ip4(0).into(), server);
    sock::set_buffer(client.socket.as_fd(), sock::Buffer::Receive, RECV_BUFFER_BYTES).unwrap();
    client
}

fn expect_replies(client: &Client) {
    (0..REPLIES).for_each(|number| client.expect(&number.to_be_bytes()));
}

/// The lane has nothing to receive after the request: no later batch sends what the device has
/// left.
fn replies_leave(name: &str, wait: &str) {
    let Some((testbed, cpu)) = full_device(name, "--idle") else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let socket = one_lane(b, wait);
    let serving = b.run(|| {
        Serving::start(socket, move |batch, out| {
            cpu::pin(cpu).unwrap();
            for request in batch {
                if request.payload() == b"many" {
                    (0..REPLIES).for_each(|number| out.reply(&request, &number.to_be_bytes()));
                } else {
                    out.reply(&request, request.payload());
                }
            }
        })
    });
    let client = patient_client(a, serving.addr);
    let pings = ping_until_sent_by_xdp(&client, &serving.handle);
    client.send(b"many");
    expect_replies(&client);
    let total = serving.stop().unwrap().total();
    assert_eq!((total.sent, total.lost()), (u64::from(REPLIES) + pings, 0), "{total:?}");
    assert!(total.sent_by_bypass > 256, "{total:?}");
}

#[test]
fn netns_xdp_replies_leave_when_a_full_device_has_room() {
    replies_leave("netns_xdp_replies_leave_when_a_full_device_has_room", "sleep");
}

#[test]
fn netns_xdp_replies_of_a_spinning_lane_leave_when_a_full_device_has_room() {
    replies_leave("netns_xdp_replies_of_a_spinning_lane_leave_when_a_full_device_has_room", "busy-poll");
}

#[test]
fn netns_xdp_a_closing_lane_sends_what_a_full_device_left() {
    let name = "netns_xdp_a_closing_lane_sends_what_a_full_device_left";
    // The lane waits for a fraction of a second: an idle thread may get no time meanwhile.
    let Some((testbed, cpu)) = full_device(name, "--batch") else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let mut driver = lane_driver(b, one_lane(b, "sleep"));
    let client = patient_client(a, driver.addr());
    let handle = driver.handle.clone();
    let mut pings = 0;
    while handle.counters().total().sent_by_bypass == 0 {
        client.send(b"ping");
        driver.echo(1);
        client.expect(b"ping");
        pings += 1;
    }
    client.send(b"many");
    std::thread::scope(|scope| {
        scope.spawn(move || {
            cpu::pin(cpu).unwrap();
            driver.receive(1, |_, request, out| {
                (0..REPLIES).for_each(|number| out.reply(&request, &number.to_be_bytes()));
            });
        });
    });
    expect_replies(&client);
    let total = handle.counters().total();
    assert_eq!((total.sent, total.lost()), (u64::from(REPLIES) + pings, 0), "{total:?}");
    assert!(total.sent_by_bypass > 256, "{total:?}");
}
