//! Engine `xdp` on a device that is full: frames that it has not taken leave when there is room.

use std::os::fd::AsFd as _;

use manylane_sys::{cpu, sock};
use manylane_testbed::{Host, skip};
use manylane_tests::Serving;

use crate::netns_support::{RECV_BUFFER_BYTES, client};
use crate::xdp_support::{any_port, ipv4_layout, testbed, xdp};

/// More than the 256 of the ring of a veth device.
const REPLIES: u32 = 1000;

/// Makes `receiver` receive what `sender` sends in a kernel thread, which gets no time of `cpu`
/// while another thread runs there, and the device of `sender` say when it is full, instead of
/// dropping frames.
fn receive_late(receiver: &Host, sender: &Host, cpu: usize) {
    let run = |host: &Host, program, args: &str| {
        let args: Vec<&str> = args.split_whitespace().collect();
        let done = host.output(program, &args).unwrap();
        assert!(done.status.success(), "{done:?}");
    };
    // A veth device queues frames for its other end if that has GRO, and this one no TSO.
    run(receiver, "ethtool", &format!("-K {} gro on", receiver.device(0)));
    run(sender, "ethtool", &format!("-K {} tso off", sender.device(0)));
    for thread in receiver.enable_threaded_napi(0, cpu).unwrap() {
        run(receiver, "chrt", &format!("--idle --pid 0 {thread}"));
    }
    run(sender, "tc", &format!("qdisc replace dev {} root pfifo", sender.device(0)));
}

/// The lane has nothing to receive after the request: no later batch sends what the device has
/// left.
fn replies_leave(name: &str, wait: &str) {
    if !skip::need_kernel(name, (6, 16), "veth devices that are full") {
        return;
    }
    let Some(testbed) = testbed(name, &ipv4_layout(1)) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let cpu = cpu::affinity().unwrap()[0];
    receive_late(a, b, cpu);
    let wait = wait.parse().unwrap();
    let socket = xdp(b, any_port(b), |builder| _ = builder.lanes(1).wait(wait).xdp_ring(2048).batch(1024));
    let serving = b.run(|| {
        Serving::start(socket, move |batch, out| {
            cpu::pin(cpu).unwrap();
            for request in batch {
                let replies = if request.payload() == b"many" { REPLIES } else { 1 };
                (0..replies).for_each(|number| out.reply(&request, &number.to_be_bytes()));
            }
        })
    });
    let client = client(a, a.ip4(0).into(), serving.addr);
    sock::set_buffer(client.socket.as_fd(), sock::Buffer::Receive, RECV_BUFFER_BYTES).unwrap();
    // The first leaves through the companion, which resolves the next hop.
    for _ in 0..2 {
        client.send(b"one");
        client.expect(&0_u32.to_be_bytes());
    }
    client.send(b"many");
    (0..REPLIES).for_each(|number| client.expect(&number.to_be_bytes()));
    let total = serving.stop().unwrap().total();
    assert_eq!((total.sent, total.lost()), (u64::from(REPLIES) + 2, 0), "{total:?}");
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
