//! Common code of the tests of engine `xdp`: sockets with a given port, frames, and counters.

use std::net::{IpAddr, SocketAddr};

use manylane::{Builder, Engine, Handle, LaneCounters, Socket};
use manylane_test_support::{set_queues, wait_for};
use manylane_testbed::{Host, Layout, Testbed, skip};
use manylane_tests::Client;
use manylane_wire::ethernet::Mac;
use manylane_wire::frame::UdpFrame;

use crate::netns_support::{RECV_BUFFER_BYTES, open_when_released};

/// The testbed of `layout`, for the test `name`.
pub(crate) fn testbed(name: &str, layout: &Layout) -> Option<Testbed> {
    skip::need_root(name).then(|| Testbed::new(layout).unwrap())
}

/// The same for a test with a `LiveSender`.
pub(crate) fn testbed_of_live_sender(name: &str, layout: &Layout) -> Option<Testbed> {
    skip::need_live_sender(name).then(|| Testbed::new(layout).unwrap())
}

/// Two hosts whose devices have two queues, for the test `name`.
pub(crate) fn two_queues(name: &str) -> Option<Testbed> {
    testbed(name, &Layout { queues: 2, ..Layout::default() })
}

/// Two hosts with IPv4 only, so that only the test sends.
pub(crate) fn ipv4_layout(queues: u32) -> Layout {
    Layout { ipv6: false, queues, ..Layout::default() }
}

/// Two hosts whose devices use one queue and can have another one, for the test `name`.
pub(crate) fn testbed_of_one_queue(name: &str) -> Option<Testbed> {
    if !skip::need_kernel(name, (5, 15), "veth devices that use fewer queues than they have") {
        return None;
    }
    let testbed = testbed(name, &ipv4_layout(2))?;
    let (a, b) = (testbed.host(0), testbed.host(1));
    a.run(|| set_queues(a.device(0), 2, 1)).unwrap();
    b.run(|| set_queues(b.device(0), 1, 2)).unwrap();
    a.wait_for_carrier(0).unwrap();
    b.wait_for_carrier(0).unwrap();
    Some(testbed)
}

/// Adds the other queue, while the link is down: a veth device applies the program to new queues
/// only when it is set up the next time, and until then the kernel would reset connections that it
/// does not know. It needs as many receive queues as its peer has send queues.
pub(crate) fn add_queue(a: &Host, b: &Host) {
    b.set_link(0, false).unwrap();
    b.run(|| set_queues(b.device(0), 2, 2)).unwrap();
    a.run(|| set_queues(a.device(0), 2, 2)).unwrap();
    b.set_link(0, true).unwrap();
    b.wait_for_carrier(0).unwrap();
    a.wait_for_carrier(0).unwrap();
}

/// Opens a socket of engine `xdp` with two lanes at `addr`.
pub(crate) fn xdp(
    host: &Host,
    addr: impl Into<SocketAddr>,
    change: impl FnOnce(&mut Builder) + Send,
) -> Socket {
    let addr = addr.into();
    host.run(move || {
        let mut builder = Builder::new(addr).unwrap();
        change(builder.engine(Engine::Xdp).lanes(2).recv_buffer(RECV_BUFFER_BYTES));
        open_when_released(&mut builder)
    })
}

/// A port that the next process binds again.
pub(crate) const PORT: u16 = 4242;

/// Two lanes of engine `xdp` at that port of `host`.
pub(crate) fn xdp_builder(host: &Host) -> Builder {
    let mut builder = Builder::new((host.ip4(0), PORT)).unwrap();
    builder.engine(Engine::Xdp).lanes(2);
    builder
}

/// The XDP programs on the first device of `host`, as `ip` shows them.
pub(crate) fn programs(host: &Host) -> String {
    let shown = host.output("ip", &["link", "show", "dev", host.device(0)]).unwrap();
    assert!(shown.status.success());
    let text = String::from_utf8_lossy(&shown.stdout).into_owned();
    text.lines().filter(|line| line.contains("prog/xdp")).collect()
}

/// All datagrams that arrived were delivered, and all arrived by XDP.
pub(crate) fn assert_all_by_xdp(total: &LaneCounters, arrived: u64) {
    assert_eq!(
        (total.arrived(), total.delivered, total.delivered_by_bypass),
        (arrived, arrived, arrived),
        "{total:#?}"
    );
}

/// All replies were sent, and all except `first` by XDP: before the next hop is known they leave
/// through the companion.
pub(crate) fn assert_replies_by_xdp(total: &LaneCounters, first: u64) {
    assert_eq!((total.sent, total.lost()), (total.delivered, 0), "{total:#?}");
    assert!(total.sent - total.sent_by_bypass <= first, "more than {first} replies past XDP: {total:#?}");
}

/// Sum of the counter `what` over the programs of all devices.
pub(crate) fn xdp_count(handle: &Handle, what: &str) -> u64 {
    handle.frame_counts().iter().filter(|(_, name, _)| *name == what).map(|(_, _, n)| n).sum()
}

/// Pings until a reply has left by XDP, and returns the number of pings.
pub(crate) fn ping_until_sent_by_xdp(client: &Client, handle: &Handle) -> u64 {
    pings_until(client, handle, |total| total.sent_by_bypass)
}

/// Pings until a request has arrived by XDP, and returns the number of pings.
pub(crate) fn ping_until_recv_by_xdp(client: &Client, handle: &Handle) -> u64 {
    pings_until(client, handle, |total| total.delivered_by_bypass)
}

fn pings_until(client: &Client, handle: &Handle, what: impl Fn(&LaneCounters) -> u64) -> u64 {
    let before = what(&handle.counters().total());
    let mut pings = 0;
    let ping = || {
        client.ping();
        pings += 1;
        handle.counters()
    };
    wait_for("a ping past the stack", ping, |counters| what(&counters.total()) > before);
    pings
}

/// A frame with a datagram from a device of `a` to one of `b`, both at the first link.
pub(crate) fn frame(
    (a, from): (&Host, SocketAddr),
    (b, to): (&Host, SocketAddr),
    payload: &[u8],
    change: impl FnOnce(&mut UdpFrame<'_>),
) -> Vec<u8> {
    let mut plan = UdpFrame { payload, ..UdpFrame::new(Mac(a.mac(0)), Mac(b.mac(0)), from, to) };
    change(&mut plan);
    let mut bytes = vec![0; plan.len()];
    plan.write(&mut bytes).unwrap();
    bytes
}

/// As [`frame`], from a closed port to an address of `b`.
pub(crate) fn frame_to(
    a: &Host,
    b: &Host,
    to: SocketAddr,
    payload: &[u8],
    change: impl FnOnce(&mut UdpFrame<'_>),
) -> Vec<u8> {
    frame((a, SocketAddr::new(a.ip(0, to.is_ipv6()), 4444)), (b, to), payload, change)
}

/// True if exactly the queues `queues` of `device` belong to open lanes, with numbers that differ
/// by at most one.
pub(crate) fn is_balanced(handle: &Handle, device: &str, queues: u32) -> bool {
    let served = handle.device_queues();
    let mut numbers: Vec<u32> =
        served.iter().filter(|queue| queue.device == device).map(|queue| queue.queue).collect();
    numbers.sort_unstable();
    let lanes = handle.lane_ids();
    let each: Vec<usize> =
        lanes.iter().map(|lane| served.iter().filter(|queue| queue.lane == *lane).count()).collect();
    numbers == (0..queues).collect::<Vec<_>>()
        && each.iter().sum::<usize>() == served.len()
        && each.iter().max().zip(each.iter().min()).is_some_and(|(max, min)| max - min <= 1)
}

/// The address of `host` on its first link, with a port selected by the kernel.
pub(crate) fn any_port(host: &Host) -> SocketAddr {
    SocketAddr::new(IpAddr::from(host.ip4(0)), 0)
}
