//! Engine `xdp` and the filter of a socket: limits, prefixes, changes while it serves, more
//! sources than buckets. Rates are so low that no tokens are added during a test, so that exactly
//! the burst passes.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use crate::netns_support::{client, echo, open, sink, wait_until};
use crate::xdp_support::{frame_to, two_queues, xdp_count};
use manylane::{Builder, Engine, Handle, Limit, Prefix};
use manylane_sys::packet::PacketSocket;
use manylane_testbed::Host;
use manylane_tests::{Client, pattern};
use manylane_wire::frame::UdpFrame;

/// Maximum number of frames in flight, so that no queue overflows.
const CHUNK_FRAMES: usize = 100;

fn limit(text: &str) -> Limit {
    text.parse().unwrap()
}

fn prefix(text: &str) -> Prefix {
    text.parse().unwrap()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// A sender of frames with forged addresses.
struct SpoofingSender<'a> {
    a: &'a Host,
    b: &'a Host,
    socket: PacketSocket,
    to: SocketAddr,
    handle: &'a Handle,
}

impl<'a> SpoofingSender<'a> {
    fn new(a: &'a Host, b: &'a Host, to: SocketAddr, handle: &'a Handle) -> Self {
        let socket = a.run(|| PacketSocket::open(a.device_index(0).unwrap())).unwrap();
        Self { a, b, socket, to, handle }
    }

    /// One datagram of each source, and the numbers of those admitted, denied and limited.
    fn send(&self, sources: impl IntoIterator<Item = IpAddr>) -> [u64; 3] {
        let before = outcome(self.handle);
        let mut sent = before.iter().sum::<u64>();
        let sources: Vec<IpAddr> = sources.into_iter().collect();
        for sources in sources.chunks(CHUNK_FRAMES) {
            for source in sources {
                let from = |plan: &mut UdpFrame<'_>| plan.source = SocketAddr::new(*source, 5353);
                self.socket.send(&frame_to(self.a, self.b, self.to, b"let me in", from)).unwrap();
            }
            sent += sources.len() as u64;
            wait_until("an outcome of each datagram", self.handle, || {
                outcome(self.handle).iter().sum::<u64>() >= sent
            });
        }
        let after = outcome(self.handle);
        assert_eq!(after.iter().sum::<u64>(), sent, "{:#?}", self.handle.counters());
        std::array::from_fn(|at| after[at] - before[at])
    }

    fn send_times(&self, source: &str, times: usize) -> [u64; 3] {
        self.send(std::iter::repeat_n(ip(source), times))
    }
}

/// Admitted, denied and limited so far.
fn outcome(handle: &Handle) -> [u64; 3] {
    let counters = handle.counters();
    [counters.total().arrived(), counters.filter_drops.denied, counters.filter_drops.limited]
}

fn with_xdp(builder: &mut Builder) -> &mut Builder {
    builder.engine(Engine::Xdp).lanes(2)
}

/// A burst passes, all other datagrams are dropped and counted, and other sources are not
/// affected. Addresses of an IPv6 /64 are one source.
#[test]
fn netns_xdp_limits_admit_a_burst_of_each_source() {
    let Some(testbed) = two_queues("netns_xdp_limits_admit_a_burst_of_each_source") else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    for ipv6 in [false, true] {
        let socket = open(b, b.ip(0, ipv6), |builder| _ = with_xdp(builder).limit(limit("0.001/5")));
        let serving = sink(b, socket);
        let spoofer = SpoofingSender::new(a, b, serving.addr, &serving.handle);
        let (one, same, other) =
            if ipv6 { ("fd99::1", "fd99::2", "fd99:0:0:1::1") } else { ("10.7.0.1", "10.7.0.1", "10.7.0.2") };
        assert_eq!(spoofer.send_times(one, 20), [5, 0, 15]);
        assert_eq!(spoofer.send_times(same, 7), [0, 0, 7]);
        assert_eq!(spoofer.send_times(other, 6), [5, 0, 1]);
        assert_eq!(
            (xdp_count(&serving.handle, "limited"), xdp_count(&serving.handle, "redirected")),
            (23, 10)
        );
        let counters = serving.stop().unwrap();
        let total = counters.total();
        assert_eq!(
            (total.delivered, total.delivered_by_bypass, counters.filter_drops.limited),
            (10, 10, 23),
            "{total:#?}"
        );
    }
}

/// A datagram has to be within both limits, and a rejected one uses no tokens.
#[test]
fn netns_xdp_address_and_prefix_limits_combine() {
    let Some(testbed) = two_queues("netns_xdp_address_and_prefix_limits_combine") else {
        return;
    };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let limits =
        |builder: &mut Builder| _ = with_xdp(builder).limit(limit("0.001/3")).limit(limit("0.001/10,per=24"));
    let serving = sink(b, open(b, b.ip4(0).into(), limits));
    let spoofer = SpoofingSender::new(a, b, serving.addr, &serving.handle);
    // Of an address.
    assert_eq!(spoofer.send_times("10.7.0.1", 9), [3, 0, 6]);
    // Seven are left for the prefix, from any of its addresses.
    assert_eq!(spoofer.send((2..250).map(|host| Ipv4Addr::new(10, 7, 0, host).into())), [7, 0, 241]);
    // The next prefix has its own.
    assert_eq!(spoofer.send((1..9).map(|host| Ipv4Addr::new(10, 7, 1, host).into())), [8, 0, 0]);
    assert_eq!(spoofer.send_times("10.7.1.1", 5), [2, 0, 3]);
}

/// The longest prefix decides, for each family separately. Allowed sources are not limited.
#[test]
fn netns_xdp_allowed_sources_have_no_limit_by_longest_prefix() {
    let Some(testbed) = two_queues("netns_xdp_allowed_sources_have_no_limit_by_longest_prefix") else {
        return;
    };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let rules = |builder: &mut Builder| {
        with_xdp(builder).limit(limit("0.001/2"));
        for denied in ["10.7.0.0/16", "10.7.1.7", "::/0", "fd99:0:0:1::7"] {
            builder.deny(prefix(denied));
        }
        for allowed in ["10.7.1.0/24", "fd99:0:0:1::/64"] {
            builder.allow(prefix(allowed));
        }
    };
    let serving = sink(b, open(b, ip("::"), rules));
    for ipv6 in [false, true] {
        let to = SocketAddr::new(b.ip(0, ipv6), serving.addr.port());
        let spoofer = SpoofingSender::new(a, b, to, &serving.handle);
        let [far, denied, allowed, but] = if ipv6 {
            ["fd98::1", "fd99::1", "fd99:0:0:1::1", "fd99:0:0:1::7"]
        } else {
            ["10.8.0.1", "10.7.0.1", "10.7.1.1", "10.7.1.7"]
        };
        // All of IPv6 is denied, which does not affect IPv4.
        assert_eq!(spoofer.send_times(far, 5), if ipv6 { [0, 5, 0] } else { [2, 0, 3] });
        assert_eq!(spoofer.send_times(denied, 4), [0, 4, 0]);
        assert_eq!(spoofer.send_times(allowed, 50), [50, 0, 0]);
        assert_eq!(spoofer.send_times(but, 3), [0, 3, 0]);
    }
    assert_eq!((xdp_count(&serving.handle, "denied"), xdp_count(&serving.handle, "limited")), (19, 3));
}

/// Limits and prefixes change while the socket serves. An invalid change has no effect.
#[test]
fn netns_xdp_limits_change_while_lanes_serve() {
    let Some(testbed) = two_queues("netns_xdp_limits_change_while_lanes_serve") else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let serving = sink(b, open(b, b.ip4(0).into(), |builder| _ = with_xdp(builder)));
    let filter = serving.handle.filter().unwrap();
    let spoofer = SpoofingSender::new(a, b, serving.addr, &serving.handle);
    assert_eq!(spoofer.send_times("10.7.0.1", 10), [10, 0, 0]);
    filter.set_limits(&[limit("0.001/4")]).unwrap();
    assert_eq!(spoofer.send_times("10.7.0.1", 10), [4, 0, 6]);
    // Setting the same limit again keeps its buckets.
    filter.set_limits(&[limit("0.001/4")]).unwrap();
    assert_eq!(spoofer.send_times("10.7.0.1", 10), [0, 0, 10]);
    // Another limit starts with full buckets.
    filter.set_limits(&[limit("0.002/7")]).unwrap();
    assert_eq!(spoofer.send_times("10.7.0.1", 10), [7, 0, 3]);
    filter.deny(prefix("10.7.0.0/24")).unwrap();
    filter.allow(prefix("10.7.0.1")).unwrap();
    assert_eq!(spoofer.send_times("10.7.0.2", 10), [0, 10, 0]);
    assert_eq!(spoofer.send_times("10.7.0.1", 10), [10, 0, 0]);
    filter.deny(prefix("10.7.0.1")).unwrap();
    assert_eq!(spoofer.send_times("10.7.0.1", 10), [0, 10, 0]);
    filter.remove(prefix("10.7.0.0/24")).unwrap();
    assert_eq!(spoofer.send_times("10.7.0.2", 10), [7, 0, 3]);
    let before = filter.current();
    filter.set_limits(&[limit("1"), limit("2"), limit("3")]).unwrap_err();
    let several = filter.change(|filter| {
        filter.set_rule(prefix("10.7.0.1"), None)?;
        filter.set_limits(&[limit("1"), limit("2"), limit("3")])
    });
    assert!(several.is_err() && filter.current() == before);
    assert_eq!(spoofer.send_times("10.7.0.1", 10), [0, 10, 0]);
    filter.remove(prefix("10.7.0.1")).unwrap();
    filter.set_limits(&[]).unwrap();
    assert!(filter.current().is_empty());
    assert_eq!(spoofer.send_times("10.7.0.1", 100), [100, 0, 0]);
}

/// More sources than buckets: no source that sends little is rejected, and one that floods
/// meanwhile gets one burst only.
#[test]
fn netns_xdp_limits_hold_with_more_sources_than_buckets() {
    let Some(testbed) = two_queues("netns_xdp_limits_hold_with_more_sources_than_buckets") else {
        return;
    };
    const OTHER_SOURCES: u32 = 20_000;
    let (a, b) = (testbed.host(0), testbed.host(1));
    let limits = |builder: &mut Builder| _ = with_xdp(builder).limit_sources(1024).limit(limit("0.001/5"));
    let serving = sink(b, open(b, b.ip4(0).into(), limits));
    let spoofer = SpoofingSender::new(a, b, serving.addr, &serving.handle);
    let flooder = Ipv4Addr::new(10, 7, 255, 255);
    let others = |at| Ipv4Addr::from_bits(0x0b00_0000 + at);
    let all = (0..OTHER_SOURCES).flat_map(|at| [others(at), flooder]);
    let [let_in, denied, limited] = spoofer.send(all.map(IpAddr::from));
    assert_eq!((let_in, denied, limited), (u64::from(OTHER_SOURCES) + 5, 0, u64::from(OTHER_SOURCES) - 5));
    // A source that appears when the maps are full is limited, too.
    assert_eq!(spoofer.send_times("10.9.0.1", 20), [5, 0, 15]);
}

/// The filter of one socket does not apply to others on the device, nor to one that later has its
/// slot. Datagrams that XDP does not take are not filtered, as documented.
#[test]
fn netns_xdp_limits_are_per_socket() {
    let Some(testbed) = two_queues("netns_xdp_limits_are_per_socket") else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let one = echo(b, open(b, b.ip4(0).into(), |builder| _ = with_xdp(builder).xdp_sockets(2)));
    let two = echo(b, open(b, b.ip4(0).into(), |builder| _ = with_xdp(builder).xdp_sockets(2)));
    let (to_one, to_two) = (client(a, a.ip4(0).into(), one.addr), client(a, a.ip4(0).into(), two.addr));
    let near = b.run(|| Client::between(SocketAddr::new(b.ip4(0).into(), 0), one.addr));
    let filter = one.handle.filter().unwrap();
    filter.deny(prefix("0.0.0.0/0")).unwrap();
    filter.set_limits(&[limit("0.001/1")]).unwrap();
    for _ in 0..10 {
        to_one.send(b"denied");
        to_two.ping();
        near.ping();
    }
    // In fragments.
    to_one.send(&pattern(1, 3000));
    to_one.expect(&pattern(1, 3000));
    wait_until("10 denied datagrams", &one.handle, || one.handle.counters().filter_drops.denied == 10);
    assert!(to_one.is_idle());
    assert_eq!(two.handle.counters().filter_drops, manylane::FilterDrops::default());
    // Each has its own rule for the same prefix: the second one allows it past its limit, the
    // first one still denies it.
    let filter = two.handle.filter().unwrap();
    filter.allow(prefix("0.0.0.0/0")).unwrap();
    filter.set_limits(&[limit("0.001/1")]).unwrap();
    to_one.send(b"denied");
    wait_until("11 denied datagrams", &one.handle, || one.handle.counters().filter_drops.denied == 11);
    for _ in 0..3 {
        to_two.ping();
    }
    assert_eq!(two.handle.counters().filter_drops, manylane::FilterDrops::default());
    let counters = one.stop().unwrap();
    assert_eq!(
        (counters.total().arrived(), counters.filter_drops.denied, counters.filter_drops.limited),
        (11, 11, 0)
    );
    let next = echo(b, open(b, b.ip4(0).into(), |builder| _ = with_xdp(builder)));
    let to_next = client(a, a.ip4(0).into(), next.addr);
    for _ in 0..10 {
        to_next.ping();
        to_two.ping();
    }
    assert_eq!(outcome(&next.handle), [10, 0, 0]);
}

/// A flood from one prefix, with any number of addresses, does not affect sources outside of it.
#[test]
fn netns_xdp_limits_protect_others_from_a_flooding_prefix() {
    const ROUNDS: u32 = 40;
    let Some(testbed) = two_queues("netns_xdp_limits_protect_others_from_a_flooding_prefix") else {
        return;
    };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let limits = |builder: &mut Builder| {
        _ = with_xdp(builder).limit(limit("0.001/1000")).limit(limit("0.001/64,per=16"));
    };
    let serving = echo(b, open(b, b.ip4(0).into(), limits));
    serving.handle.filter().unwrap().allow(Prefix::new(a.ip4(0).into(), 32).unwrap()).unwrap();
    let honest = client(a, a.ip4(0).into(), serving.addr);
    let spoofer = SpoofingSender::new(a, b, serving.addr, &serving.handle);
    let mut limited = 0;
    for round in 0..ROUNDS {
        let flood = (0..500).map(|at| Ipv4Addr::from_bits(0x0a07_0000 + round * 500 + at).into());
        limited += spoofer.send(flood)[2];
        for _ in 0..10 {
            honest.ping();
        }
    }
    assert_eq!(limited, u64::from(ROUNDS) * 500 - 64);
    assert!(honest.is_idle());
}

/// Only frames can be filtered.
#[test]
fn netns_xdp_limits_are_refused_with_other_engines() {
    let Some(testbed) = two_queues("netns_xdp_limits_are_refused_with_other_engines") else { return };
    let b = testbed.host(1);
    let socket = open(b, b.ip4(0).into(), |builder| _ = builder.engine(Engine::Mmsg));
    assert!(socket.handle().filter().unwrap_err().to_string().contains("engine xdp"));
    // Auto with a missing device would be mmsg, which does not support it.
    let refused = b.run(|| {
        let mut builder = Builder::new("127.0.0.1:0").unwrap();
        builder.xdp_devices(["nowhere"]).limit(limit("5")).open().err().unwrap()
    });
    assert!(refused.to_string().contains("nowhere"), "{refused}");
}
