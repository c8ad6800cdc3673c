//! Lanes of TCP do not allocate for a request, once connections have their buffers and the next hop
//! is known. One test, because the counter is that of the process.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::alloc::System;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use manylane::tcp::{TcpBuilder, TcpLane, What};
use manylane_testbed::{Layout, Testbed, skip};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Number of measured requests, and of earlier ones.
const COUNTED: usize = 10_000;
const WARMUP: usize = 2_000;
const CLIENTS: usize = 8;

const REQUEST: [u8; 100] = [7; 100];
/// Times that allocations are counted until there are none: the kernel's tables may change, at
/// first and while a slow machine needs seconds for the requests.
const ATTEMPTS_MAX: usize = 10;

/// Number of allocations of the process so far.
fn allocations() -> usize {
    let stats = ALLOCATOR.stats();
    stats.allocations + stats.reallocations
}

fn echo(lane: &mut TcpLane, end: &AtomicBool) {
    let mut bytes = [0; 1024];
    while !end.load(Ordering::Acquire) {
        lane.wait(Duration::from_millis(20)).unwrap();
        while let Some(event) = lane.event() {
            if event.what != What::Readable {
                continue;
            }
            let mut stream = lane.stream(event.id);
            loop {
                let read = stream.read(|more| {
                    let len = more.len().min(bytes.len());
                    bytes[..len].copy_from_slice(&more[..len]);
                    len
                });
                if read == 0 {
                    break;
                }
                assert_eq!(stream.write(&bytes[..read]), read);
            }
        }
    }
}

fn exchange(clients: &mut [TcpStream], requests: usize) {
    let mut answer = [0; REQUEST.len()];
    for _ in 0..requests.div_ceil(CLIENTS) {
        for client in &mut *clients {
            client.write_all(&REQUEST).unwrap();
        }
        for client in &mut *clients {
            client.read_exact(&mut answer).unwrap();
        }
    }
}

#[test]
fn netns_tcp_lane_allocates_nothing_for_a_request() {
    if !skip::need_root("netns_tcp_lane_allocates_nothing_for_a_request") {
        return;
    }
    let testbed = Testbed::new(&Layout { queues: 1, ..Layout::default() }).unwrap();
    let (linux, host) = (testbed.host(0), testbed.host(1));
    let server = SocketAddr::new(host.ip(0, false), 4280);
    let mut lane = host.run(|| TcpBuilder::new().listen(server).unwrap().open().unwrap().remove(0));
    let end = Arc::new(AtomicBool::new(false));
    let thread = {
        let end = Arc::clone(&end);
        host.spawn("lane", move || {
            echo(&mut lane, &end);
            lane.counters()
        })
        .unwrap()
    };
    let mut clients: Vec<TcpStream> =
        (0..CLIENTS).map(|_| linux.run(|| TcpStream::connect(server).unwrap())).collect();
    for client in &clients {
        client.set_nodelay(true).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(100))).unwrap();
    }
    let before = allocations();
    drop(std::hint::black_box(Box::new(1)));
    assert!(allocations() > before, "the counter counts");
    exchange(&mut clients, WARMUP);
    let counts: Vec<usize> = (0..ATTEMPTS_MAX)
        .map(|_| {
            let before = allocations();
            exchange(&mut clients, COUNTED);
            allocations() - before
        })
        .take_while(|count| *count != 0)
        .collect();
    assert!(counts.len() < ATTEMPTS_MAX, "allocations, each time: {counts:?}");
    end.store(true, Ordering::Release);
    let counters = thread.join().unwrap();
    assert!(counters.stack.segments_in >= (WARMUP + COUNTED) as u64, "{counters:#?}");
    assert_eq!((counters.stack.resets_sent, counters.unsent), (0, 0), "{counters:#?}");
}
