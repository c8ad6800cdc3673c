//! Engine `xdp`: datagrams in flight while its program is attached to a device, and while it is
//! detached.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crate::netns_support::{RECV_BUFFER_BYTES, lane_driver, wait_until};
use crate::xdp_support::{PORT, ipv4_layout, programs, testbed, xdp, xdp_count};
use aya::programs::loaded_links;
use manylane::Builder;
use manylane_sys::sock;
use manylane_test_support::{bpf_link, wait_for};
use manylane_testbed::{Host, skip};
use manylane_tests::{LaneDriver, retry_eintr};

/// Number of datagrams before the next step.
const DATAGRAMS: u64 = 1000;
/// Entries of a ring. It has room for what the sender is ahead while the socket opens and as much
/// after that, so that a busy machine loses nothing.
const RING_ENTRIES: u32 = 8192;
const AHEAD_MAX: u64 = 4000;

/// State of a continuous sender: its counters, and its commands.
#[derive(Default)]
struct Sender {
    to_ours: AtomicU64,
    to_other: AtomicU64,
    /// The number that the first one is sent next to, at most; 0 for no limit.
    to_ours_max: AtomicU64,
    /// Stop sending to the first one; `has_left` when done.
    leave_ours: AtomicBool,
    has_left: AtomicBool,
    /// Stop sending; `ended` when done.
    end: AtomicBool,
    ended: AtomicBool,
}

impl Sender {
    /// Sends numbers to both, until stopped.
    fn run(&self, socket: &UdpSocket, ours: SocketAddr, other: SocketAddr) {
        let next = |count: &AtomicU64, to| {
            let number = count.load(Ordering::Relaxed);
            socket.send_to(&number.to_ne_bytes(), to).unwrap();
            count.store(number + 1, Ordering::Release);
        };
        while !self.end.load(Ordering::Relaxed) {
            next(&self.to_other, other);
            if self.leave_ours.load(Ordering::Relaxed) {
                self.has_left.store(true, Ordering::Release);
            } else if self.has_room() {
                next(&self.to_ours, ours);
            }
            thread::sleep(Duration::from_micros(100));
        }
        self.ended.store(true, Ordering::Release);
    }

    /// Lets it send to the first one until this number.
    fn limit_ours(&self, maximum: u64) {
        self.to_ours_max.fetch_max(maximum, Ordering::Relaxed);
    }

    fn has_room(&self) -> bool {
        let maximum = self.to_ours_max.load(Ordering::Relaxed);
        maximum == 0 || self.to_ours.load(Ordering::Relaxed) < maximum
    }

    /// Continues until this many more have been sent to the other one.
    fn send_more(&self, more: u64) {
        let due = self.to_other.load(Ordering::Relaxed) + more;
        wait_for(
            "datagrams to the other socket",
            || self.to_other.load(Ordering::Relaxed),
            |sent| *sent >= due,
        );
    }
}

/// Stops the sender, even if the test fails.
struct StopOnDrop<'a>(&'a Sender);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.end.store(true, Ordering::Relaxed);
    }
}

/// Receives the numbers from a kernel socket until the sender has ended: each exactly once.
fn recv_all(socket: &UdpSocket, sender: &Sender) {
    let mut number = [0; 8];
    let mut due = 0;
    let mut drain = || loop {
        match retry_eintr(|| socket.recv(&mut number)) {
            Ok(8) => assert_eq!(u64::from_ne_bytes(number), due, "of somebody else's"),
            Err(err) if err.kind() == ErrorKind::WouldBlock => return due,
            other => panic!("number {due} is due: {other:?}"),
        }
        due += 1;
    };
    while !sender.ended.load(Ordering::Acquire) {
        drain();
        thread::sleep(Duration::from_millis(1));
    }
    let all = sender.to_other.load(Ordering::Relaxed);
    wait_for(&format!("{all} datagrams"), drain, |due| *due == all);
}

/// Receives the queued numbers, which must all be new.
fn recv_new(driver: &mut LaneDriver, got: &mut BTreeSet<u64>) {
    for lane in &mut driver.lanes {
        for datagram in lane.recv().unwrap().batch {
            let number = u64::from_ne_bytes(datagram.payload().try_into().unwrap());
            assert!(got.insert(number), "number {number} has come twice");
        }
    }
}

/// Detaches the program from the first device of `host`, as another program.
fn detach_program(host: &Host) {
    let shown = programs(host);
    let number: u32 =
        shown.split_whitespace().skip_while(|word| *word != "id").nth(1).unwrap().parse().unwrap();
    let link = loaded_links().filter_map(Result::ok).find(|link| link.program_id() == number).unwrap();
    bpf_link::detach(link.id()).unwrap();
    assert_eq!(programs(host), "");
}

/// A sender sends all the time. The socket opens, and then either its program is detached by
/// another program, so that it serves through its companions, or it closes, which detaches the
/// program.
///
/// True if datagrams also came while the socket was there without its program: the sender may have
/// had no CPU in that short time.
fn check_open_close(a: &Host, b: &Host, generic: bool, by_force: bool) -> bool {
    let ours = SocketAddr::new(b.ip4(0).into(), PORT);
    let other = b.run(|| UdpSocket::bind((b.ip4(0), 0)).unwrap());
    sock::set_buffer(other.as_fd(), sock::Buffer::Receive, RECV_BUFFER_BYTES).unwrap();
    other.set_nonblocking(true).unwrap();
    let to_other = other.local_addr().unwrap();
    // Not connected, so that it gets no error while the port is closed.
    let socket = a.run(|| UdpSocket::bind((a.ip4(0), 0)).unwrap());
    let sender = Sender::default();
    thread::scope(|scope| {
        scope.spawn(|| sender.run(&socket, ours, to_other));
        let others = scope.spawn(|| recv_all(&other, &sender));
        let ending = StopOnDrop(&sender);
        sender.send_more(DATAGRAMS);
        let open = |builder: &mut Builder| _ = builder.xdp_ring(RING_ENTRIES).xdp_generic(generic);
        let limit = || sender.limit_ours(sender.to_ours.load(Ordering::Relaxed) + AHEAD_MAX);
        limit();
        let mut driver = lane_driver(b, xdp(b, ours, open));
        limit();
        let handle = driver.handle.clone();
        let total = || handle.counters().total();
        let by_companion = || total().delivered - total().delivered_by_bypass;
        let mut got = BTreeSet::new();
        let mut take_until = |what: &str, done: &dyn Fn(&BTreeSet<u64>) -> bool| {
            let receive = || {
                recv_new(&mut driver, &mut got);
                // Whatever was sent before the first one that came was for nobody.
                if let Some(first) = got.first() {
                    sender.limit_ours(first + got.len() as u64 + AHEAD_MAX);
                }
                (done(&got), got.first().copied(), got.last().copied(), got.len(), total())
            };
            wait_for(&format!("{what} (done, first, last, number)"), receive, |(done, ..)| *done);
        };
        take_until("the program takes them", &|_| total().delivered_by_bypass >= DATAGRAMS);
        let before = by_companion();
        if by_force {
            detach_program(b);
            take_until("they come through companions", &|_| by_companion() >= before + DATAGRAMS);
        }
        sender.leave_ours.store(true, Ordering::Relaxed);
        wait_until("the end of the sender", &handle, || sender.has_left.load(Ordering::Acquire));
        let all = sender.to_ours.load(Ordering::Acquire);
        take_until("all have come", &|got| {
            let first = got.first().copied().unwrap_or(all);
            got.contains(&(all - 1)) && got.len() as u64 == all - first
        });
        assert!(got.first().is_some_and(|first| *first > 0), "they were on their way before: {got:?}");
        let total = total();
        assert_eq!((total.arrived(), total.delivered), (total.delivered, got.len() as u64), "{total:#?}");
        drop(driver);
        // A handle that reads its counters does not keep it attached.
        wait_for("the program to be detached", || programs(b), |all| all.is_empty());
        assert_eq!(
            (xdp_count(&handle, "redirected"), handle.counters().total().delivered_by_bypass),
            (total.delivered_by_bypass, total.delivered_by_bypass)
        );
        sender.send_more(DATAGRAMS);
        drop(ending);
        others.join().unwrap();
        before > 0
    })
}

/// From the socket's first datagram on, each arrives once, through the companion or by XDP.
/// Datagrams for the other socket always arrive.
#[test]
fn netns_xdp_attach_and_detach_lose_nothing() {
    let name = "netns_xdp_attach_and_detach_lose_nothing";
    // Seen on Linux 5.10: one in 4,000, of a socket that has nothing to do with the program.
    if !skip::need_kernel(name, (5, 13), "veth devices that lose nothing as a program comes and goes") {
        return;
    }
    let Some(testbed) = testbed(name, &ipv4_layout(2)) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    for generic in [false, true] {
        // Behind the driver, possible GSO messages are left to the kernel.
        a.set_checksums(0, !generic).unwrap();
        for by_force in [false, true] {
            let seen = (0..10).any(|_| check_open_close(a, b, generic, by_force));
            assert!(seen, "no datagram came before the program, generic {generic}, by force {by_force}");
        }
    }
}
