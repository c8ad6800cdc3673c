//! The table of next hops: bounds, evictions, concurrent readers, and a map as its model.

use std::net::Ipv4Addr;

use proptest::prelude::*;

use super::*;

fn pair(local: &str, peer: &str) -> RouteKey {
    RouteKey::new(local.parse().unwrap(), peer.parse().unwrap()).unwrap()
}

fn nth(n: u32) -> RouteKey {
    RouteKey::new(Ipv4Addr::new(10, 0, 0, 1).into(), Ipv4Addr::from(0x0b00_0000 + n).into()).unwrap()
}

fn via(gateway: &str) -> NeighbourKey {
    NeighbourKey { ifindex: 3, address: gateway.parse().unwrap() }
}

fn new_entry(last: u8, epoch: u16) -> Entry {
    let next = NextHop { ifindex: 3, source_mac: [1; 6], mac: [2, 0, 0, 0, 0, last], mtu: 1500 };
    Entry { next, epoch, stale: false }
}

fn find(writer: &Writer, pair: &RouteKey) -> Option<Entry> {
    writer.table.find(pair, writer.table.hash(pair))
}

#[test]
fn inserted_entries_are_found_whole() {
    let mut writer = Writer::new();
    let (a, b) = (pair("10.0.0.1", "192.0.2.9"), pair("fd00::1", "2001:db8::9"));
    let next = NextHop { ifindex: u32::MAX, source_mac: [0xff; 6], mac: [0xfe; 6], mtu: 65_575 };
    let entry = Entry { next, epoch: u16::MAX, stale: true };
    writer.insert(&a, via("10.0.0.254"), &entry);
    assert_eq!(find(&writer, &a), Some(entry));
    assert_eq!(find(&writer, &b), None);
    writer.insert(&b, via("fe80::1"), &new_entry(7, 0));
    writer.insert(&a, via("10.0.0.254"), &new_entry(8, 1));
    assert_eq!((find(&writer, &a), find(&writer, &b)), (Some(new_entry(8, 1)), Some(new_entry(7, 0))));
    assert_eq!(writer.len(), 2);
    writer.clear();
    assert_eq!((find(&writer, &a), find(&writer, &b), writer.len()), (None, None, 0));
}

#[test]
fn the_table_is_bounded_and_forgets_the_oldest() {
    let mut writer = Writer::new();
    let peers = 4 * ENTRIES_MAX as u32;
    for n in 0..peers {
        writer.insert(&nth(n), via("10.0.0.254"), &new_entry(n as u8, 0));
        assert_eq!(find(&writer, &nth(n)), Some(new_entry(n as u8, 0)));
    }
    assert_eq!(writer.len(), ENTRIES_MAX);
    let known: Vec<u32> = (0..peers).filter(|n| find(&writer, &nth(*n)).is_some()).collect();
    assert_eq!(known.len(), ENTRIES_MAX);
    // Sets fill unevenly, but most known entries are recent ones.
    let recent = known.iter().filter(|n| **n >= peers - 2 * ENTRIES_MAX as u32).count();
    assert!(recent * 10 > ENTRIES_MAX * 9, "{recent} of {ENTRIES_MAX}");
}

#[test]
fn consecutive_peers_spread_over_all_sets() {
    let six = |n: u32| RouteKey([0xfd00 << 48, 1, 0x2001_0db8_0000_0000 + u64::from(n), 1]);
    // Many local addresses, each with the same peers.
    let square = |n: u32| {
        RouteKey([0, 0xffff_0a00_0000 + u64::from(n % 256), 0, 0xffff_0b00_0000 + u64::from(n / 256)])
    };
    let rows: [&dyn Fn(u32) -> RouteKey; 4] = [&nth, &|n| nth(n << 8), &six, &square];
    for _ in 0..if cfg!(miri) { 1 } else { 32 } {
        let table = Table::new();
        for (row, pair_of) in rows.iter().enumerate() {
            let mut sets = [0; SETS];
            (0..64 * SETS as u32).for_each(|n| sets[set_of(table.hash(&pair_of(n)))] += 1);
            let (min, max) = (sets.iter().min(), sets.iter().max());
            assert!(min > Some(&16) && max < Some(&128), "row {row}: {min:?} to {max:?}");
        }
    }
}

#[test]
fn a_renewed_entry_is_not_the_oldest() {
    let mut writer = Writer::new();
    let kept = nth(0);
    for n in 0..2 * ENTRIES_MAX as u32 {
        writer.insert(&nth(n), via("10.0.0.254"), &new_entry(0, 0));
        writer.insert(&kept, via("10.0.0.254"), &new_entry(1, 0));
    }
    assert_eq!(find(&writer, &kept), Some(new_entry(1, 0)));
}

#[test]
fn a_neighbour_changes_under_its_entries() {
    let mut writer = Writer::new();
    let (near, far, other) = (nth(1), nth(2), nth(3));
    writer.insert(&near, via("10.0.0.254"), &new_entry(1, 5));
    writer.insert(&far, via("10.0.0.254"), &new_entry(1, 6));
    writer.insert(&other, via("10.0.0.253"), &new_entry(9, 5));
    writer.set_mac(&via("10.0.0.254"), Some([2, 0, 0, 0, 0, 4]));
    assert_eq!(find(&writer, &near), Some(new_entry(4, 5)));
    assert_eq!(find(&writer, &far), Some(new_entry(4, 6)));
    assert_eq!(find(&writer, &other), Some(new_entry(9, 5)));
    writer.set_mac(&via("10.0.0.254"), None);
    assert_eq!((find(&writer, &near), find(&writer, &far)), (None, None));
    assert_eq!((find(&writer, &other), writer.len()), (Some(new_entry(9, 5)), 1));
}

#[test]
fn prefixes_and_time_remove_covered_entries() {
    let mut writer = Writer::new();
    let inside = pair("10.0.0.1", "192.0.2.200");
    let outside = pair("10.0.0.1", "192.0.3.1");
    let six = pair("fd00::1", "2001:db8::1");
    let fill = |writer: &mut Writer| {
        for (pair, epoch) in [(&inside, 1), (&outside, 2), (&six, 3)] {
            writer.insert(pair, via("10.0.0.254"), &new_entry(0, epoch));
        }
    };
    let state = |writer: &Writer| [&inside, &outside, &six].map(|pair| find(writer, pair).is_some());
    let within = |text: &str, length| Prefix::new(text.parse().unwrap(), length);
    fill(&mut writer);
    writer.remove_prefix(&within("192.0.2.0", 24));
    assert_eq!(state(&writer), [false, true, true]);
    writer.remove_prefix(&within("192.0.3.1", 99));
    assert_eq!(state(&writer), [false, false, true]);
    fill(&mut writer);
    writer.remove_prefix(&within("0.0.0.0", 0));
    assert_eq!(state(&writer), [false, false, true]);
    writer.remove_prefix(&within("2001:db8::", 32));
    assert_eq!((state(&writer), writer.len()), ([false; 3], 0));
    fill(&mut writer);
    writer.expire(2 + ENTRY_EPOCHS_MAX);
    assert_eq!(state(&writer), [false, true, true]);
    writer.expire(2u16.wrapping_sub(1));
    assert_eq!(state(&writer), [false, false, false]);
}

#[test]
fn a_dropped_writer_leaves_no_entries() {
    let mut writer = Writer::new();
    let table = Arc::clone(writer.table());
    writer.insert(&nth(1), via("10.0.0.254"), &new_entry(1, 0));
    assert!(table.find(&nth(1), table.hash(&nth(1))).is_some());
    drop(writer);
    assert!(table.find(&nth(1), table.hash(&nth(1))).is_none());
}

#[test]
fn readers_never_see_half_an_entry() {
    let mut writer = Writer::new();
    let table = Arc::clone(writer.table());
    let done = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let rounds = if cfg!(miri) { 200 } else { 200_000 };
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let pair = nth(0);
                    if let Some(found) = table.find(&pair, table.hash(&pair)) {
                        let NextHop { ifindex, source_mac, mac, mtu } = found.next;
                        assert!(mac == [ifindex as u8; 6] && source_mac == mac && mtu == ifindex);
                    }
                }
            });
        }
        for round in 0..rounds {
            let byte = round as u8;
            let next =
                NextHop { ifindex: byte.into(), source_mac: [byte; 6], mac: [byte; 6], mtu: byte.into() };
            writer.insert(&nth(0), via("10.0.0.254"), &Entry { next, epoch: 0, stale: false });
        }
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_removed_entry_is_not_found_beside_another_with_its_tag() {
    let mut writer = Writer::new();
    // Both in one set, with the smallest tag, which differs from that of an empty slot by one bit.
    let hash = |n: u32| writer.table.hash(&nth(n));
    let set = set_of(hash(0));
    let mut pairs = (0..).filter(|n| set_of(hash(*n)) == set && tag_of(hash(*n)) == 1).map(nth);
    let (first, second) = (pairs.next().unwrap(), pairs.next().unwrap());
    writer.insert(&first, via("10.0.0.254"), &new_entry(1, 0));
    writer.insert(&second, via("10.0.0.254"), &new_entry(2, 0));
    writer.remove_pair(&second);
    assert_eq!(find(&writer, &second), None);
    assert_eq!(find(&writer, &first), Some(new_entry(1, 0)));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn equal_bytes_finds_exactly_the_matches(bytes in any::<[u8; 8]>(), nth in 0usize..8, flip in 0u8..2) {
        let byte = bytes[nth] ^ flip;
        let expected = bytes.map(|other| if other == byte { 0x80 } else { 0 });
        prop_assert_eq!(equal_bytes(u64::from_le_bytes(bytes), byte), u64::from_le_bytes(expected));
    }

    #[test]
    fn the_table_agrees_with_a_map(steps in proptest::collection::vec((0u32..64, 0u8..4, any::<u8>()), 0..200)) {
        let mut writer = Writer::new();
        let mut map = std::collections::HashMap::new();
        for (peer, step, value) in steps {
            let gateway = [via("10.0.0.252"), via("10.0.0.253")][usize::from(value % 2)];
            match step {
                0 | 1 => {
                    writer.insert(&nth(peer), gateway, &new_entry(value, 0));
                    map.insert(peer, (gateway, value));
                }
                2 => {
                    writer.set_mac(&gateway, Some(new_entry(value, 0).next.mac));
                    map.values_mut().filter(|(hop, _)| *hop == gateway).for_each(|(_, mac)| *mac = value);
                }
                _ => {
                    writer.remove_prefix(&Prefix::new(nth(peer).peer(), 30));
                    map.retain(|other, _| other >> 2 != peer >> 2);
                }
            }
            for peer in 0..64 {
                let expected = map.get(&peer).map(|(_, value)| new_entry(*value, 0));
                prop_assert_eq!(find(&writer, &nth(peer)), expected);
            }
            prop_assert_eq!(writer.len(), map.len());
        }
    }
}
