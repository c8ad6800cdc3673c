//! Steering by key: the lane of a datagram follows from `key_hash`, and is the same under eBPF and
//! classic BPF.

use manylane::SteeringBackend::{ClassicBpf, Ebpf};
use manylane::{Builder, Steering, SteeringBackend, key_hash};
use manylane_tests::{Client, LaneDriver, backends, need_ipv6, pattern};

const LANES: usize = 3;
/// Buckets of the steering table; the ten top bits of a key's hash are its bucket.
const BUCKETS: usize = 1024;

fn open(addr: &str, offset: u16, len: u16, by: SteeringBackend) -> LaneDriver {
    let mut builder = Builder::new(addr).unwrap();
    let builder = builder.lanes(LANES).steering(Steering::Key { offset, len }).steering_backend(by);
    LaneDriver::new(builder.open().unwrap())
}

fn bucket(key: &[u8]) -> usize {
    key_hash(key) as usize >> 22
}

/// The lane (as a number from 0) of each bucket, determined with keys of four bytes.
fn layout(by: SteeringBackend) -> Vec<usize> {
    let mut driver = open("127.0.0.1:0", 0, 4, by);
    let client = Client::to(driver.addr());
    let mut keys = vec![None; BUCKETS];
    let mut missing = BUCKETS;
    for key in (0_u32..).map(u32::to_be_bytes) {
        let slot = &mut keys[bucket(&key)];
        missing -= usize::from(slot.is_none());
        *slot = Some(key);
        if missing == 0 {
            break;
        }
    }
    let ids: Vec<_> = driver.lanes.iter().map(manylane::Lane::id).collect();
    keys.iter()
        .map(|key| {
            client.send(&key.unwrap());
            let lane = driver.recv_lane_id();
            ids.iter().position(|id| *id == lane).unwrap()
        })
        .collect()
}

#[test]
fn loopback_key_buckets_are_spread_evenly() {
    let by = backends("loopback_key_buckets_are_spread_evenly", &[Ebpf, ClassicBpf]);
    let layouts: Vec<_> = by.iter().map(|by| layout(*by)).collect();
    for layout in &layouts {
        let mut shares = [0; LANES];
        layout.iter().for_each(|lane| shares[*lane] += 1);
        shares.sort_unstable();
        assert_eq!(shares, [341, 341, 342]);
        assert!(layout == &layouts[0], "eBPF and classic BPF differ");
    }
}

/// Keys of every length that is handled in its own way, at offsets even and odd, in datagrams of
/// any size.
#[test]
fn loopback_key_predicts_the_lane() {
    let test = "loopback_key_predicts_the_lane";
    let v6 = need_ipv6(test);
    for by in backends(test, &[Ebpf, ClassicBpf]) {
        let layout = layout(by);
        for len in [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 20, 63, 64_usize] {
            for (offset, addr) in [(0, "127.0.0.1:0"), (3, if v6 { "[::1]:0" } else { "127.0.0.1:0" })] {
                let mut driver = open(addr, offset as u16, len as u16, by);
                // Different senders: only the key counts.
                let clients = [Client::to(driver.addr()), Client::to(driver.addr())];
                for number in 0..60 {
                    let rest = [0, 1, 3, 1400, 9000, 20_000][number % 6];
                    let payload = pattern(number, offset + len + rest);
                    let lane = driver.lanes[layout[bucket(&payload[offset..offset + len])]].id();
                    for client in &clients {
                        client.send(&payload);
                        assert_eq!(
                            driver.recv_lane_id(),
                            lane,
                            "{by} {addr}: key {offset}:{len}, payload {}",
                            payload.len()
                        );
                    }
                }
                let counters = driver.handle.counters();
                assert_eq!((counters.steered_short, counters.steered_by_kernel), (0, 0));
            }
        }
    }
}

/// Datagrams that are too short for the key are steered by flow, all to one lane, and counted (by
/// eBPF).
#[test]
fn loopback_key_short_datagrams_are_steered_by_flow() {
    for by in backends("loopback_key_short_datagrams_are_steered_by_flow", &[Ebpf, ClassicBpf]) {
        let mut driver = open("127.0.0.1:0", 3, 8, by);
        let clients: Vec<_> = (0..30).map(|_| Client::to(driver.addr())).collect();
        let mut lanes = Vec::new();
        for client in &clients {
            client.send(b"");
            let lane = driver.recv_lane_id();
            for len in 1..11 {
                client.send(&pattern(len, len));
                assert_eq!(driver.recv_lane_id(), lane, "{by}: {len} bytes");
            }
            lanes.push(lane);
        }
        // The chance that 30 flows all go to one lane is 3^-29.
        assert!(lanes.iter().any(|lane| *lane != lanes[0]));
        assert_eq!(driver.handle.counters().steered_short, if by == Ebpf { 330 } else { 0 });
        // Just long enough is not short.
        clients[0].send(&[7; 11]);
        let lane = driver.recv_lane_id();
        clients[1].send(&[7; 11]);
        assert_eq!(driver.recv_lane_id(), lane);
        assert_eq!(driver.handle.counters().steered_short, if by == Ebpf { 330 } else { 0 });
    }
}

/// A key beyond the end of any datagram: all are steered by flow.
#[test]
fn loopback_key_at_the_largest_offset() {
    for by in backends("loopback_key_at_the_largest_offset", &[Ebpf, ClassicBpf]) {
        let mut driver = open("127.0.0.1:0", u16::MAX, 64, by);
        let client = Client::to(driver.addr());
        client.send(b"short");
        let lane = driver.recv_lane_id();
        client.send(&pattern(1, 65_507));
        assert_eq!(driver.recv_lane_id(), lane);
        assert_eq!(driver.handle.counters().steered_short, if by == Ebpf { 2 } else { 0 });
    }
}
