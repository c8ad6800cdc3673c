//! Under overload, new arrivals are dropped (tail) or queued datagrams (head).

use manylane::{DropPolicy, LaneCounters};
use manylane_tests::{Client, SlowServer, TEST_TIMEOUT, Variant, on_every_variant, send_and_wait};

const BATCH: usize = 8;
/// More than the queue can hold: some hundreds in a kernel socket, the entries of a ring.
const OVERLOAD_DATAGRAMS: u32 = 3000;

/// The payload with a number. All have the same sum: generic XDP leaves to the kernel a datagram
/// whose checksum looks partial, as one in 65,535 does by chance, and that must be none of
/// these.
fn payload(number: u32) -> [u8; 8] {
    (u64::from(number) << 32 | u64::from(!number)).to_be_bytes()
}

/// The numbers of the datagrams that a lane handles and its counters, if it was busy with number 0
/// while 1 to `sent` arrived, and then one more.
fn handled(variant: &Variant, overload: DropPolicy, sent: u32) -> (Vec<u32>, LaneCounters) {
    let mut builder = variant.builder("127.0.0.1:0");
    builder.lanes(1).batch(BATCH).recv_buffer(200_000).xdp_ring(64).drop_policy(overload);
    let socket = builder.open().unwrap();
    let lane = socket.handle().lane_ids()[0];
    let number = |payload: &[u8]| u32::from_be_bytes(payload[..4].try_into().unwrap());
    let SlowServer { serving, entered, release, handled } = SlowServer::start(socket, lane, number);
    let client = Client::to(serving.addr);
    client.send(&payload(0));
    entered.recv_timeout(TEST_TIMEOUT).unwrap();
    send_and_wait(|| (1..=sent).for_each(|number| client.send(&payload(number))));
    let before = serving.handle.counters().total();
    let dropped = before.kernel_dropped + before.xsk_dropped;
    // A full queue drops new arrivals: all queued datagrams are older.
    let last = sent - u32::try_from(dropped).unwrap();
    drop(release);
    let mut numbers = Vec::new();
    let next = || match handled.recv_timeout(TEST_TIMEOUT) {
        Ok((_, number)) => number,
        Err(err) => panic!("{err} of {sent}: {:?}", serving.handle.counters().total()),
    };
    while numbers.last() != Some(&last) {
        numbers.push(next());
    }
    // The lane has caught up with either policy.
    client.send(&payload(sent + 1));
    assert_eq!(next(), sent + 1);
    let total = serving.stop().unwrap().total();
    assert_eq!(total.kernel_dropped + total.xsk_dropped, dropped, "{total:?}");
    assert_eq!(total.arrived(), u64::from(sent) + 2, "{total:?}");
    assert_eq!(total.delivered, numbers.len() as u64 + 1, "{total:?}");
    assert_eq!(total.delivered + total.dropped_stale + dropped, total.arrived(), "{total:?}");
    (numbers, total)
}

/// The first datagram, and the last batch of the `queued` ones, in order.
fn expected_head_drop(queued: u32) -> Vec<u32> {
    let batch = BATCH as u32;
    [0].into_iter().chain((queued - 1) / batch * batch + 1..=queued).collect()
}

on_every_variant! {
    fn overload_drops_tail_or_head(variant, 1 queue) {
        let (numbers, total) = handled(variant, DropPolicy::Tail, OVERLOAD_DATAGRAMS);
        let queued = *numbers.last().unwrap();
        assert!(numbers.iter().copied().eq(0..=queued), "{numbers:?}");
        assert!(queued > 6 * BATCH as u32 && queued < OVERLOAD_DATAGRAMS && total.dropped_stale == 0, "{total:?}");

        let (numbers, total) = handled(variant, DropPolicy::Head, OVERLOAD_DATAGRAMS);
        assert_eq!(numbers, expected_head_drop(queued), "{total:?}");

        // Three quarters: no arrival is dropped by the kernel, and the newest datagrams are
        // handled.
        let three_quarters = queued / 4 * 3;
        let (numbers, total) = handled(variant, DropPolicy::Head, three_quarters);
        assert_eq!((numbers, total.kernel_dropped + total.xsk_dropped), (expected_head_drop(three_quarters), 0));

        // A quarter is no overload.
        let few = queued / 4;
        let (numbers, total) = handled(variant, DropPolicy::Head, few);
        assert!(numbers.iter().copied().eq(0..=few) && total.dropped_stale == 0, "{numbers:?} {total:?}");
    }
}
