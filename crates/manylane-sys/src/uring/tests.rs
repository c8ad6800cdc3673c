//! Tests of the ring and its receive against the kernel, over loopback.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::net::UdpSocket;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use manylane_test_support::seccomp::{self, Syscall};
use manylane_test_support::{fence_loopback, is_kernel};

use super::{BareMultishot, BareOneshot, BareOptions, BareSender, UringOptions, UringRecv};
use crate::cpu;
use crate::epoll::Epoll;
use crate::mmsg::{RecvOptions, RecvRing, Wait};
use crate::send_burst::{self, SendBurst};
use crate::sock::{self, Buffer, Flag};

/// Longer than any test takes.
const TIMEOUT: Duration = Duration::from_secs(30);
const OPTIONS: UringOptions =
    UringOptions { batch: 16, buffer: 256, buffers: 48, control: false, sqarray: false };

/// A server with a buffer for all that a test sends, and a client connected to it.
fn pair() -> (UdpSocket, UdpSocket) {
    let (server, client) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
    sock::set_buffer(server.as_fd(), Buffer::Receive, 4 << 20).unwrap();
    client.connect(server.local_addr().unwrap()).unwrap();
    (server, client)
}

/// True if io_uring is available. Reports the skip of `test` if not.
fn need_uring(test: &str) -> bool {
    manylane_test_support::need_uring(test, UringRecv::new(OPTIONS).map(drop))
}

fn ring(options: UringOptions) -> UringRecv {
    UringRecv::new(options).unwrap()
}

/// Sends datagrams with the numbers of `range` as payload, and returns when they have arrived.
fn send(client: &UdpSocket, range: std::ops::Range<u32>) {
    let send = || {
        cpu::pin(cpu::affinity().unwrap()[0]).unwrap();
        range.for_each(|number| _ = client.send(&number.to_ne_bytes()).unwrap());
        fence_loopback();
    };
    // On a thread of its own, which alone is pinned.
    thread::scope(|scope| scope.spawn(send).join().unwrap());
}

fn number(payload: &[u8]) -> u32 {
    u32::from_ne_bytes(payload.try_into().unwrap())
}

/// The numbers of one batch.
fn batch(recv: &mut UringRecv, socket: BorrowedFd<'_>, wait: Option<Duration>) -> Vec<u32> {
    let count = recv.recv(socket, wait).unwrap();
    (0..count).map(|index| number(recv.message(index).data)).collect()
}

/// All queued numbers.
fn drain(recv: &mut UringRecv, socket: BorrowedFd<'_>) -> Vec<u32> {
    let mut all = Vec::new();
    loop {
        let some = batch(recv, socket, None);
        if some.is_empty() {
            return all;
        }
        all.extend(some);
    }
}

#[test]
fn batches_are_received_whole_and_in_order() {
    if !need_uring("batches_are_received_whole_and_in_order") {
        return;
    }
    for sqarray in [false, true] {
        let (server, client) = pair();
        let mut recv = ring(UringOptions { sqarray, ..OPTIONS });
        assert_eq!(recv.recv(server.as_fd(), None).unwrap(), 0);
        // Far more than there are buffers, so that all counters of the rings wrap.
        for round in 0..40 {
            let range = round * 100..(round + 1) * 100;
            send(&client, range.clone());
            assert_eq!(drain(&mut recv, server.as_fd()), range.collect::<Vec<_>>());
        }
        assert_eq!(recv.ring_replacements(), 0);
        // Linux 6.1 fills more buffers in one call.
        if is_kernel((6, 12)) {
            assert_eq!(recv.buffer_shortages(), 0);
        }
        send(&client, 7..8);
        assert_eq!(recv.recv(server.as_fd(), Some(TIMEOUT)).unwrap(), 1);
        let message = recv.message(0);
        assert_eq!(message.peer.to_std(), Some(client.local_addr().unwrap()));
        assert_eq!((message.full_len, message.has_ancillary()), (4, false));
    }
}

#[test]
fn a_wait_ends_with_a_datagram_or_its_timeout() {
    if !need_uring("a_wait_ends_with_a_datagram_or_its_timeout") {
        return;
    }
    let (server, client) = pair();
    let mut recv = ring(OPTIONS);
    assert_eq!(recv.recv(server.as_fd(), Some(Duration::from_millis(5))).unwrap(), 0);
    let sender = thread::spawn(move || send(&client, 0..1));
    assert_eq!(batch(&mut recv, server.as_fd(), Some(TIMEOUT)), [0]);
    sender.join().unwrap();
    assert_eq!(recv.recv(server.as_fd(), Some(Duration::from_millis(5))).unwrap(), 0);
}

#[test]
fn an_empty_datagram_ends_the_receive_and_is_one() {
    if !need_uring("an_empty_datagram_ends_the_receive_and_is_one") {
        return;
    }
    let (server, client) = pair();
    let mut recv = ring(OPTIONS);
    for _ in 0..50 {
        for payload in [&b"one"[..], b"", b"", b"two"] {
            client.send(payload).unwrap();
        }
        let mut got = Vec::new();
        while got.len() < 4 {
            let count = recv.recv(server.as_fd(), Some(TIMEOUT)).unwrap();
            assert_ne!(count, 0);
            got.extend((0..count).map(|index| recv.message(index).data.to_vec()));
        }
        assert_eq!(got, [&b"one"[..], b"", b"", b"two"]);
    }
}

#[test]
fn oversized_datagrams_are_truncated_and_flagged() {
    if !need_uring("oversized_datagrams_are_truncated_and_flagged") {
        return;
    }
    let (server, client) = pair();
    let mut recv = ring(UringOptions { buffer: 10, ..OPTIONS });
    client.send(b"0123456789").unwrap();
    client.send(b"0123456789abc").unwrap();
    assert_eq!(recv.recv(server.as_fd(), Some(TIMEOUT)).unwrap(), 2);
    let (fits, cut) = (recv.message(0), recv.message(1));
    assert_eq!((fits.data, fits.full_len), (&b"0123456789"[..], 10));
    assert_eq!((cut.data, cut.full_len), (&b"0123456789"[..], 13));
}

#[test]
fn a_gro_message_is_received_with_its_segment_size() {
    if !need_uring("a_gro_message_is_received_with_its_segment_size") {
        return;
    }
    let (server, client) = pair();
    sock::set_flag(server.as_fd(), Flag::Gro, true).unwrap();
    send_burst::set_segment_size(client.as_fd(), 1000).unwrap();
    let mut recv = ring(UringOptions { buffer: 65_535, control: true, ..OPTIONS });
    for _ in 0..100 {
        assert_eq!(SendBurst::new(&[7; 1000], 1, true).send(client.as_fd(), 60).unwrap(), 60);
        assert_eq!(recv.recv(server.as_fd(), Some(TIMEOUT)).unwrap(), 1);
        let message = recv.message(0);
        assert_eq!((message.data.len(), message.ancillary().segment_size), (60_000, 1000));
        assert!(message.data.iter().all(|byte| *byte == 7) && message.full_len == message.data.len());
    }
}

#[test]
fn control_messages_carry_the_destination_address() {
    if !need_uring("control_messages_carry_the_destination_address") {
        return;
    }
    for ip in ["127.0.0.9", "::1"] {
        let wildcard = if ip.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
        let Ok(server) = UdpSocket::bind(wildcard) else { continue };
        let flag = if ip.contains(':') { Flag::PktInfoV6 } else { Flag::PktInfoV4 };
        sock::set_flag(server.as_fd(), flag, true).unwrap();
        let client = UdpSocket::bind(wildcard).unwrap();
        let to: std::net::IpAddr = ip.parse().unwrap();
        if client.send_to(b"x", (to, server.local_addr().unwrap().port())).is_err() {
            continue;
        }
        let mut recv = ring(UringOptions { control: true, ..OPTIONS });
        assert_eq!(recv.recv(server.as_fd(), Some(TIMEOUT)).unwrap(), 1);
        assert_eq!(recv.message(0).ancillary().local.unwrap().ip, to);
        assert_eq!(recv.message(0).peer.to_std().unwrap().port(), client.local_addr().unwrap().port());
    }
}

#[test]
fn buffer_shortages_are_counted_without_loss() {
    if !need_uring("buffer_shortages_are_counted_without_loss") {
        return;
    }
    for (buffers, batch) in [(1, 1), (1, 16), (3, 16), (16, 16)] {
        let (server, client) = pair();
        let mut recv = ring(UringOptions { buffers, batch, ..OPTIONS });
        send(&client, 0..500);
        assert_eq!(drain(&mut recv, server.as_fd()), (0..500).collect::<Vec<_>>(), "{buffers} buffers");
        // Each shortage follows after all buffers were filled; the last one may be missing.
        assert!((1..=501).contains(&recv.buffer_shortages()), "{}", recv.buffer_shortages());
        send(&client, 500..501);
        assert_eq!(super::tests::batch(&mut recv, server.as_fd(), Some(TIMEOUT)), [500]);
    }
}

#[test]
fn alternating_threads_lose_nothing() {
    if !need_uring("alternating_threads_lose_nothing") {
        return;
    }
    let (server, client) = pair();
    let mut recv = ring(UringOptions { batch: 4, ..OPTIONS });
    let mut got = Vec::new();
    for round in 0..6 {
        send(&client, round * 50..(round + 1) * 50);
        // Each takes some messages and leaves the others, some of which were taken out of the
        // socket.
        let (next, some) = thread::scope(|scope| {
            let server = &server;
            let receiver = scope.spawn(move || {
                let some =
                    (0..3).flat_map(|_| batch(&mut recv, server.as_fd(), Some(TIMEOUT))).collect::<Vec<_>>();
                (recv, some)
            });
            receiver.join().unwrap()
        });
        recv = next;
        got.extend(some);
    }
    got.extend(drain(&mut recv, server.as_fd()));
    assert_eq!(got, (0..300).collect::<Vec<_>>());
    // A thread for which the messages taken already suffice needs no ring.
    assert!((1..=6).contains(&recv.ring_replacements()));
}

#[test]
fn several_threads_with_a_ring_each_share_a_socket() {
    if !need_uring("several_threads_with_a_ring_each_share_a_socket") {
        return;
    }
    let (server, client) = pair();
    const MESSAGES: usize = 2000;
    let taken = AtomicUsize::new(0);
    let mut all: Vec<u32> = thread::scope(|scope| {
        let take = || {
            let mut recv = ring(OPTIONS);
            let mut got = Vec::new();
            while taken.load(Ordering::Relaxed) < MESSAGES {
                let some = batch(&mut recv, server.as_fd(), Some(Duration::from_millis(20)));
                taken.fetch_add(some.len(), Ordering::Relaxed);
                got.extend(some);
            }
            got
        };
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(take)).collect();
        send(&client, 0..MESSAGES as u32);
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    all.sort_unstable();
    assert_eq!(all, (0..MESSAGES as u32).collect::<Vec<_>>());
}

#[test]
fn a_plain_receive_beside_multishot_shares_the_queue() {
    if !need_uring("a_plain_receive_beside_multishot_shares_the_queue") {
        return;
    }
    let (server, client) = pair();
    let mut recv = ring(OPTIONS);
    assert_eq!(recv.recv(server.as_fd(), None).unwrap(), 0);
    let mut plain = RecvRing::new(RecvOptions { batch: 8, buffer: 64, control: false }).unwrap();
    for round in 0..100 {
        let range = round * 40..(round + 1) * 40;
        send(&client, range.clone());
        // The ring takes nothing out of the socket between calls: the first reader gets all.
        let count = plain.recv(server.as_fd(), Wait::Never).unwrap();
        let mut got: Vec<u32> = (0..count).map(|index| number(plain.message(index).data)).collect();
        assert_eq!(got.len(), 8);
        got.extend(drain(&mut recv, server.as_fd()));
        assert_eq!(got, range.collect::<Vec<_>>());
        assert_eq!(plain.recv(server.as_fd(), Wait::Never).unwrap(), 0);
    }
    // Nor does the ring keep a wake-up for a message that another reader has taken.
    send(&client, 0..1);
    assert_eq!(plain.recv(server.as_fd(), Wait::Never).unwrap(), 1);
    assert_eq!(recv.recv(server.as_fd(), None).unwrap(), 0);
    send(&client, 1..2);
    assert_eq!(batch(&mut recv, server.as_fd(), Some(TIMEOUT)), [1]);
}

#[test]
fn ring_and_socket_readiness_combine() {
    if !need_uring("ring_and_socket_readiness_combine") {
        return;
    }
    let (server, client) = pair();
    let mut recv = ring(UringOptions { batch: 4, ..OPTIONS });
    assert_eq!(recv.recv(server.as_fd(), None).unwrap(), 0);
    let mut watch = Epoll::new(2).unwrap();
    watch.add(&recv, 1).unwrap();
    watch.add(&server, 2).unwrap();
    // What the kernel has to do for the ring ends a wait, as a signal does.
    let mut is_ready = |time| {
        let end = Instant::now() + time;
        loop {
            let is_ready = watch.wait(time).unwrap().count() > 0;
            if is_ready || Instant::now() >= end {
                break is_ready;
            }
        }
    };
    assert!(!is_ready(Duration::ZERO));
    for _ in 0..20 {
        send(&client, 0..10);
        let mut got = 0;
        while got < 10 {
            assert!(is_ready(TIMEOUT), "{got} of 10");
            got += recv.recv(server.as_fd(), None).unwrap();
        }
        assert!(!is_ready(Duration::ZERO));
    }
    let sender = thread::spawn(move || send(&client, 0..1));
    assert!(is_ready(TIMEOUT));
    sender.join().unwrap();
}

#[test]
fn a_shutdown_wakes_and_keeps_queued_messages() {
    if !need_uring("a_shutdown_wakes_and_keeps_queued_messages") {
        return;
    }
    /// Far longer than any test waits for the sleeper.
    const SLEEP_TIMEOUT: Duration = Duration::from_secs(3600);
    let (server, client) = pair();
    let server = Arc::new(server);
    // On a thread that is never joined: if it does not wake up, the test reports that.
    let sleep = |mut recv: UringRecv| {
        let (tell, told) = mpsc::channel();
        let server = Arc::clone(&server);
        thread::spawn(move || {
            let got = recv.recv(server.as_fd(), Some(SLEEP_TIMEOUT)).unwrap();
            _ = tell.send((recv, got));
        });
        told
    };
    let told = sleep(ring(OPTIONS));
    // Whether it sleeps already or not: a wake-up before the sleep ends it, too.
    sock::wake(server.as_fd());
    let (mut recv, got) = told.recv_timeout(TIMEOUT).expect("woken");
    assert_eq!(got, 0);
    send(&client, 0..40);
    assert_eq!(drain(&mut recv, server.as_fd()), (0..40).collect::<Vec<_>>());
    assert_eq!(sleep(recv).recv_timeout(TIMEOUT).expect("awake for good").1, 0);
}

#[test]
fn stop_delivers_completed_messages_and_leaves_the_rest_queued() {
    if !need_uring("stop_delivers_completed_messages_and_leaves_the_rest_queued") {
        return;
    }
    let (server, client) = pair();
    let mut recv = ring(UringOptions { batch: 4, ..OPTIONS });
    send(&client, 0..200);
    let mut got = batch(&mut recv, server.as_fd(), None);
    recv.stop();
    got.extend(drain(&mut recv, server.as_fd()));
    assert!(got.len() < 200, "the ring has taken all");
    drop(recv);
    let mut plain = RecvRing::new(RecvOptions { batch: 256, buffer: 64, control: false }).unwrap();
    let left = plain.recv(server.as_fd(), Wait::Never).unwrap();
    got.extend((0..left).map(|index| number(plain.message(index).data)));
    assert_eq!(got, (0..200).collect::<Vec<_>>());
}

#[test]
fn the_port_is_free_as_soon_as_ring_and_socket_are_closed() {
    if !need_uring("the_port_is_free_as_soon_as_ring_and_socket_are_closed") {
        return;
    }
    let mut taken = 0;
    for receives in [false, true] {
        for _ in 0..20 {
            let (server, client) = pair();
            let addr = server.local_addr().unwrap();
            let mut recv = ring(OPTIONS);
            if receives {
                send(&client, 0..1);
                assert_eq!(recv.recv(server.as_fd(), Some(TIMEOUT)).unwrap(), 1);
            }
            drop(recv);
            drop(server);
            taken += u32::from(UdpSocket::bind(addr).is_err());
        }
    }
    // Another test may have the port by now, or start a program that has a copy of the socket until
    // it executes: now and then, and not each time.
    assert!(taken <= 4, "{taken} of 40 ports were not free");
}

#[test]
fn forbidden_calls_are_reported_without_loss() {
    if !need_uring("forbidden_calls_are_reported_without_loss") {
        return;
    }
    let (server, client) = pair();
    let mut recv = ring(UringOptions { batch: 4, ..OPTIONS });
    send(&client, 0..100);
    let got = thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            let mut got = batch(&mut recv, server.as_fd(), None);
            seccomp::forbid(Syscall::UringSetup).unwrap();
            seccomp::forbid(Syscall::UringEnter).unwrap();
            let refused = UringRecv::new(OPTIONS).map(drop).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::EPERM));
            let err = loop {
                match recv.recv(server.as_fd(), None) {
                    Ok(count) => got.extend((0..count).map(|index| number(recv.message(index).data))),
                    Err(err) => break err,
                }
            };
            assert_eq!(err.raw_os_error(), Some(libc::EPERM));
            drop(recv);
            got
        });
        receiver.join().unwrap()
    });
    let mut plain = RecvRing::new(RecvOptions { batch: 256, buffer: 64, control: false }).unwrap();
    let left = plain.recv(server.as_fd(), Wait::Never).unwrap();
    let left = (0..left).map(|index| number(plain.message(index).data));
    assert_eq!(got.into_iter().chain(left).collect::<Vec<_>>(), (0..100).collect::<Vec<_>>());
}

#[test]
fn invalid_sizes_are_refused() {
    for (batch, buffers) in [(0, 1), (1025, 1), (1, 0), (1, 1 << 16)] {
        let err = UringRecv::new(UringOptions { batch, buffers, ..OPTIONS }).map(drop).unwrap_err();
        assert_eq!(err.raw_os_error(), Some(libc::EINVAL));
    }
}

#[test]
fn a_socket_error_ends_the_receive_without_loss() {
    if !need_uring("a_socket_error_ends_the_receive_without_loss") {
        return;
    }
    let (server, client) = pair();
    let mut recv = ring(OPTIONS);
    assert_eq!(recv.recv(server.as_fd(), None).unwrap(), 0);
    for round in 0..10 {
        // No socket is bound there: the kernel reports the refusal to the next call on the socket,
        // of whichever kind.
        let unused = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        server.connect(unused).unwrap();
        server.send(b"anybody?").unwrap();
        server.connect(client.local_addr().unwrap()).unwrap();
        let range = round * 50..(round + 1) * 50;
        send(&client, range.clone());
        let mut got = Vec::new();
        while got.len() < range.len() {
            let some = batch(&mut recv, server.as_fd(), Some(TIMEOUT));
            assert!(!some.is_empty(), "round {round}: {} came", got.len());
            got.extend(some);
        }
        assert_eq!(got, range.collect::<Vec<_>>());
    }
    assert!(!recv.is_broken());
    // Nor is it mistaken for a shutdown, after which no call would sleep.
    let sender = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        send(&client, 0..1);
        client
    });
    assert_eq!(batch(&mut recv, server.as_fd(), Some(TIMEOUT)), [0]);
    let _client = sender.join().unwrap();
    // A shutdown is noticed, even after errors.
    sock::wake(server.as_fd());
    let (tell, told) = mpsc::channel();
    thread::spawn(move || _ = tell.send(recv.recv(server.as_fd(), Some(Duration::from_secs(3600)))));
    assert_eq!(told.recv_timeout(TIMEOUT).expect("woken").unwrap(), 0);
}

#[test]
fn bare_receives_match_the_engine() {
    if !need_uring("bare_receives_match_the_engine") {
        return;
    }
    let (server, client) = pair();
    let options = BareOptions { batch: 16, buffer: 64, control: false };
    let mut multishot = BareMultishot::new(server.as_fd(), options).unwrap();
    let mut shots = BareOneshot::new(server.as_fd(), options).unwrap();
    let (mut got, mut last) = (Vec::new(), 0);
    for round in 0..40 {
        send(&client, round * 100..(round + 1) * 100);
        let all = (round + 1) as usize * 100;
        let mut in_vain = 0;
        while got.len() < all && in_vain < 100 {
            last = if round % 2 == 0 { multishot.recv(None).unwrap() } else { shots.recv().unwrap() };
            let data = |index| {
                if round % 2 == 0 { multishot.message(index).data } else { shots.message(index).data }
            };
            got.extend((0..last).map(|index| number(data(index))));
            in_vain = if last == 0 { in_vain + 1 } else { 0 };
        }
    }
    assert!(last > 0);
    // Two receivers take turns, and each empties the socket; the multishot may have taken more
    // messages than it has returned.
    got.sort_unstable();
    assert_eq!(got, (0..4000).collect::<Vec<_>>());
}

#[test]
fn bare_sends_arrive() {
    if !need_uring("bare_sends_arrive") {
        return;
    }
    let (server, client) = pair();
    let peer = crate::addr::SockAddr::from(server.local_addr().unwrap());
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut plain = RecvRing::new(RecvOptions { batch: 64, buffer: 64, control: false }).unwrap();
    for zero_copy in [false, true] {
        let mut sends = BareSender::new(socket.as_fd(), 16, zero_copy).unwrap();
        let payloads: Vec<[u8; 4]> = (0..16_u32).map(u32::to_ne_bytes).collect();
        for _ in 0..20 {
            assert_eq!(sends.send(&peer, payloads.iter().map(|payload| &payload[..])).unwrap(), 16);
            assert_eq!(plain.recv(server.as_fd(), Wait::Never).unwrap(), 16);
            let got: Vec<u32> = (0..16).map(|index| number(plain.message(index).data)).collect();
            assert_eq!(got, (0..16).collect::<Vec<_>>());
        }
    }
    drop(client);
}

#[test]
fn missing_kernel_features_are_named() {
    const ENABLE: u32 = 12;
    const BUFFERS: u32 = 22;
    let refusals = [
        (Syscall::UringSetup, libc::ENOSYS),
        (Syscall::UringSetup, libc::EINVAL),
        (Syscall::UringSetup, libc::ENOMEM),
        (Syscall::UringRegister(BUFFERS), libc::EINVAL),
        (Syscall::UringRegister(ENABLE), libc::EINVAL),
    ];
    for (call, code) in refusals {
        let (server, client) = pair();
        send(&client, 0..10);
        thread::scope(|scope| {
            scope.spawn(|| {
                seccomp::forbid_with_errno(call, code).unwrap();
                let made = UringRecv::new(OPTIONS);
                let is_later = matches!(call, Syscall::UringRegister(ENABLE));
                let err = match made {
                    Ok(mut recv) => {
                        assert!(is_later, "{call:?}");
                        let err = recv.recv(server.as_fd(), None).unwrap_err();
                        assert!(recv.is_broken());
                        err
                    }
                    Err(err) => err,
                };
                assert_eq!(err.raw_os_error(), Some(code), "{call:?}");
            });
        });
        let mut plain = RecvRing::new(RecvOptions { batch: 16, buffer: 64, control: false }).unwrap();
        assert_eq!(plain.recv(server.as_fd(), Wait::Never).unwrap(), 10);
    }
}
