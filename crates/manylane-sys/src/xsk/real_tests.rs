//! The queue on the real kernel: on the loopback device of a network namespace of its own.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::net::UdpSocket;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::time::{Duration, Instant};

use super::queue::{Queue, Step};
use super::{Mode, QueueOptions};
use crate::netns::{NetNs, device_index};

/// Says that a test cannot run here, past the harness and in the list of skips.
fn skip(name: &str, why: &dyn std::fmt::Display) {
    let line = format!("SKIP {name}: {why}\n");
    // A skip that cannot be told is not worth a failure.
    let _ = io::stderr().write_all(line.as_bytes());
    if let Some(path) = std::env::var_os("MANYLANE_SKIPS") {
        let file = OpenOptions::new().create(true).append(true).open(path);
        let _ = file.and_then(|mut file| file.write_all(line.as_bytes()));
    }
}

/// Runs `test` on a thread in a namespace of its own, whose loopback device is up.
fn in_namespace(name: &str, test: impl FnOnce(u32) + Send) {
    let namespace = match NetNs::create() {
        Ok(namespace) => namespace,
        Err(err) => return skip(name, &format_args!("no network namespace: {err}")),
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            namespace.enter().unwrap();
            set_up("lo");
            test(device_index("lo").unwrap());
        });
    });
}

fn set_up(device: &str) {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    // SAFETY: `ifreq` is plain integers and a pointer that may be null: all zeroes is a value of it.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = libc::IFF_UP as libc::c_short;
    // SAFETY: SIOCSIFFLAGS reads an `ifreq`, which lives across the call.
    let ret = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const request) };
    crate::check(ret).unwrap();
}

fn options(ifindex: u32) -> QueueOptions {
    QueueOptions {
        ifindex,
        queue: 0,
        frames: 128,
        frame_size: 2048,
        ring: 64,
        tx_ring: 64,
        batch: 32,
        mode: Mode::Copy,
    }
}

/// The device, once the kernel has let go of a queue that was closed.
fn reopen(options: &QueueOptions) -> Queue {
    let start = Instant::now();
    loop {
        match Queue::open(options) {
            Ok(queue) => return queue,
            Err(err) if start.elapsed() > Duration::from_secs(5) => panic!("{err}"),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

#[test]
fn netns_a_queue_of_a_device_has_one_owner() {
    in_namespace("netns_a_queue_of_a_device_has_one_owner", |ifindex| {
        let options = options(ifindex);
        let mut queue = Queue::open(&options).unwrap();
        assert!(!queue.is_zero_copy() && !queue.has_received());
        assert_eq!(queue.receive(32), 0);
        let census = queue.census();
        assert_eq!((census.free, census.filling, census.total(), census.invalid), (64, 64, 128, 0));
        assert_eq!(queue.statistics().unwrap(), super::Statistics::default());
        let failed = |options: QueueOptions| {
            let err = Queue::open(&options).unwrap_err();
            (err.step, err.source.raw_os_error().unwrap_or(0))
        };
        assert_eq!(failed(options), (Step::Bind, libc::EBUSY));
        assert_eq!(failed(QueueOptions { queue: 7, ..options }), (Step::Bind, libc::EINVAL));
        assert_eq!(failed(QueueOptions { ifindex: 999, ..options }), (Step::Bind, libc::ENODEV));
        drop(queue);
        assert!(!reopen(&QueueOptions { mode: Mode::Auto, ..options }).is_zero_copy());
        let zero_copy = QueueOptions { mode: Mode::ZeroCopy, ..options };
        let start = Instant::now();
        let mut last = failed(zero_copy);
        while last == (Step::Bind, libc::EBUSY) && start.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(5));
            last = failed(zero_copy);
        }
        assert_eq!(last, (Step::Bind, libc::EOPNOTSUPP));
    });
}

/// An Ethernet frame for the loopback device, to this port.
fn datagram(frame: &mut [u8], port: u16, payload: &[u8]) -> usize {
    let udp = (8 + payload.len()) as u16;
    frame[..12].fill(0);
    frame[12..14].copy_from_slice(&[0x08, 0x00]);
    let ip = &mut frame[14..34];
    ip.copy_from_slice(&[0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 127, 0, 0, 1, 127, 0, 0, 1]);
    ip[2..4].copy_from_slice(&(20 + udp).to_be_bytes());
    let sum: u32 = ip.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    frame[34..36].copy_from_slice(&9_u16.to_be_bytes());
    frame[36..38].copy_from_slice(&port.to_be_bytes());
    frame[38..40].copy_from_slice(&udp.to_be_bytes());
    // No checksum, which UDP over IPv4 allows.
    frame[40..42].fill(0);
    frame[42..42 + payload.len()].copy_from_slice(payload);
    42 + payload.len()
}

#[test]
fn netns_what_is_sent_arrives_and_its_frames_come_back() {
    in_namespace("netns_what_is_sent_arrives_and_its_frames_come_back", |ifindex| {
        // Packets that come from a device, not from a route: with loopback addresses those are suspicious.
        for setting in ["route_localnet", "accept_local"] {
            std::fs::write(format!("/proc/sys/net/ipv4/conf/lo/{setting}"), "1").unwrap();
        }
        let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
        receiver.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let port = receiver.local_addr().unwrap().port();
        let mut queue = Queue::open(&options(ifindex)).unwrap();
        for round in 0..20_u8 {
            let mut sender = queue.sender();
            for number in 0..50 {
                let mut fresh = sender.take().unwrap();
                let len = datagram(sender.fresh_mut(&mut fresh), port, &[round, number]);
                sender.send_fresh(fresh, len).unwrap();
            }
            assert_eq!(sender.flush().unwrap(), 0);
            for number in 0..50 {
                let mut got = [0; 16];
                let len = receiver.recv(&mut got).unwrap();
                assert_eq!(got[..len], [round, number]);
            }
            // The kernel completes a packet when the receiver has let go of it, which may be a moment later.
            let start = Instant::now();
            while queue.census().sending > 0 && start.elapsed() < Duration::from_secs(5) {
                queue.receive(0);
            }
            let census = queue.census();
            assert_eq!((census.free, census.filling, census.invalid), (64, 64, 0), "{census:?}");
        }
        assert_eq!(queue.statistics().unwrap().tx_invalid_descs, 0);
        queue.busy_poll(20, 64).unwrap();
        assert_eq!(queue.receive(32), 0);
        queue.busy_poll(0, 0).unwrap();
        assert!(queue.as_fd().as_raw_fd() > 0);
    });
}
