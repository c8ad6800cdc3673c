//! Support for tests on the real kernel: namespaces, veth pairs, and an XDP program that redirects
//! frames to queues.

use std::io;
use std::net::UdpSocket;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use manylane_test_support::{need, wait_for};

use crate::check;
use crate::netns::{NetNs, device_index, is_device_running};
use crate::process::run_isolated;
use crate::xsk::open::OpenError;
use crate::xsk::queue::Queue;
use crate::xsk::{Mode, QueueOptions};

/// Runs `test` on a thread in a namespace of its own, whose loopback device is up.
pub(super) fn in_namespace(name: &str, test: impl FnOnce(u32) + Send) {
    let namespace = match NetNs::create() {
        Ok(namespace) => namespace,
        Err(err) => {
            _ = need(name, false, &format!("no network namespace: {err}"));
            return;
        }
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
    // SAFETY: `ifreq` is plain integers and a pointer that may be null: all zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = libc::IFF_UP as libc::c_short;
    // SAFETY: SIOCSIFFLAGS reads an `ifreq`, which lives across the call.
    let ret = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const request) };
    check(ret).unwrap();
}

fn ip(words: &str) {
    // Isolated, so that sockets that other tests close meanwhile are really closed.
    let args: Vec<&str> = words.split_whitespace().collect();
    let done = run_isolated(None, "ip", &args, &[]).unwrap();
    assert!(done.status.success(), "ip {words}: {}", String::from_utf8_lossy(&done.stderr));
}

/// A pair of devices in a namespace of its own: frames sent from `far` arrive at the queues of
/// `near`.
pub(super) struct Pair {
    pub(super) near: u32,
    pub(super) far: u32,
}

/// MAC address of the far end. That of the near one ends in 0, so the program redirects to member
/// 0.
pub(super) const FAR_MAC: [u8; 6] = [2, 0, 0, 0, 1, 99];

/// Runs `test` with a pair of devices; the far one has the address 192.0.2.2.
pub(super) fn with_pair(name: &str, mtu: u32, test: impl FnOnce(Pair) + Send) {
    in_namespace(name, |_| {
        ip(&format!("link add near mtu {mtu} type veth peer name far mtu {mtu}"));
        ip("link set near address 02:00:00:00:01:00");
        ip("link set far address 02:00:00:00:01:63");
        ip("addr add 192.0.2.2/24 dev far");
        ip("link set near up");
        ip("link set far up");
        let running = || ["near", "far"].map(|device| is_device_running(device).unwrap());
        wait_for("the pair to run (near, far)", running, |running| *running == [true; 2]);
        test(Pair { near: device_index("near").unwrap(), far: device_index("far").unwrap() });
    });
}

pub(super) fn options(ifindex: u32) -> QueueOptions {
    QueueOptions {
        ifindex,
        queue: 0,
        frames: 128,
        frame_size: 2048,
        ring: 64,
        tx_ring: 64,
        batch: 32,
        mode: Mode::Copy,
        multi_buffer: false,
    }
}

/// Opens a queue again, once the kernel has released it.
pub(super) fn reopen(options: &QueueOptions) -> Queue {
    eventually(|| Queue::open(options))
}

/// Retries until it works.
pub(super) fn eventually(open: impl Fn() -> Result<Queue, OpenError>) -> Queue {
    wait_for("a queue that opens", open, Result::is_ok).unwrap()
}

/// Writes an Ethernet frame for the loopback device, to this port.
pub(super) fn datagram(frame: &mut [u8], port: u16, payload: &[u8]) -> usize {
    let udp = (8 + payload.len()) as u16;
    frame[..12].fill(0);
    frame[12..14].copy_from_slice(&[0x08, 0x00]);
    head(&mut frame[14..34], [127, 0, 0, 1], [127, 0, 0, 1], 20 + udp);
    frame[34..36].copy_from_slice(&9_u16.to_be_bytes());
    frame[36..38].copy_from_slice(&port.to_be_bytes());
    frame[38..40].copy_from_slice(&udp.to_be_bytes());
    // No checksum, which UDP over IPv4 allows.
    frame[40..42].fill(0);
    frame[42..42 + payload.len()].copy_from_slice(payload);
    42 + payload.len()
}

/// Writes the headers of a datagram for the far end, with only the pseudo header's sum as
/// checksum.
pub(super) fn partial_head(frame: &mut [u8], port: u16, payload: usize) {
    let (from, to, udp) = ([192, 0, 2, 9], [192, 0, 2, 2], (8 + payload) as u16);
    frame[..6].copy_from_slice(&FAR_MAC);
    frame[6..14].copy_from_slice(&[2, 0, 0, 0, 1, 0, 0x08, 0x00]);
    head(&mut frame[14..34], from, to, 20 + udp);
    frame[34..36].copy_from_slice(&9_u16.to_be_bytes());
    frame[36..38].copy_from_slice(&port.to_be_bytes());
    frame[38..40].copy_from_slice(&udp.to_be_bytes());
    let pseudo = [&from[..], &to[..], &[0, 17], &udp.to_be_bytes()].concat();
    frame[40..42].copy_from_slice(&sum(&pseudo).to_be_bytes());
}

fn head(ip: &mut [u8], from: [u8; 4], to: [u8; 4], len: u16) {
    ip.copy_from_slice(&[0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    ip[2..4].copy_from_slice(&len.to_be_bytes());
    ip[12..16].copy_from_slice(&from);
    ip[16..20].copy_from_slice(&to);
    let sum = !sum(ip);
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
}

fn sum(bytes: &[u8]) -> u16 {
    let sum: u32 = bytes.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

/// An XDP program on a device. It redirects a frame to the queue whose number is the last byte of
/// the destination MAC, and passes it to the kernel if there is none. It is detached when this is
/// dropped.
pub(super) struct Program {
    map: OwnedFd,
    _program: OwnedFd,
    _link: OwnedFd,
}

/// A bpf(2) command with attributes as 32-bit words: a pointer is two of them.
fn bpf(command: libc::c_long, words: &[u32]) -> io::Result<libc::c_int> {
    let len = size_of_val(words);
    // SAFETY: the kernel reads `len` bytes of `words`; the callers ensure that what they point at
    // lives across the call.
    check(unsafe { libc::syscall(libc::SYS_bpf, command, words.as_ptr(), len) } as libc::c_int)
}

fn halves<T>(at: *const T) -> [u32; 2] {
    let at = at as u64;
    [at as u32, (at >> 32) as u32]
}

/// Takes ownership of a new descriptor.
fn owned(raw: libc::c_int) -> OwnedFd {
    // SAFETY: bpf(2) has just returned it (see the callers), so it has no other owner.
    unsafe { OwnedFd::from_raw_fd(raw) }
}

impl Program {
    pub(super) fn attach(ifindex: u32) -> io::Result<Self> {
        const MAP_CREATE: libc::c_long = 0;
        const PROG_LOAD: libc::c_long = 5;
        const LINK_CREATE: libc::c_long = 28;
        const XSKMAP: u32 = 17;
        const XDP: u32 = 6;
        /// `BPF_F_XDP_HAS_FRAGS`.
        const HAS_FRAGS: u32 = 1 << 5;
        /// `BPF_XDP`, and the driver's mode, not the generic one.
        const ATTACH_XDP: u32 = 37;
        const DRIVER: u32 = 1 << 2;
        let map = owned(bpf(MAP_CREATE, &[XSKMAP, 4, 4, 8])?);
        let insn = |code: u8, dst: u8, src: u8, off: i16, imm: i32| {
            u64::from(code)
                | u64::from(dst | src << 4) << 8
                | u64::from(off as u16) << 16
                | u64::from(imm as u32) << 32
        };
        let program = [
            insn(0x61, 2, 1, 0, 0),               // r2 = data
            insn(0x61, 3, 1, 4, 0),               // r3 = data_end
            insn(0xbf, 4, 2, 0, 0),               // r4 = r2
            insn(0x07, 4, 0, 0, 14),              // r4 += 14
            insn(0x2d, 4, 3, 6, 0),               // if r4 > r3: pass
            insn(0x71, 2, 2, 5, 0),               // r2 = the last byte of the destination
            insn(0x18, 1, 1, 0, map.as_raw_fd()), // r1 = the map
            0,                                    //
            insn(0xb7, 3, 0, 0, 2),               // r3 = XDP_PASS, if the map has nothing there
            insn(0x85, 0, 0, 0, 51),              // bpf_redirect_map
            insn(0x95, 0, 0, 0, 0),               // exit
            insn(0xb7, 0, 0, 0, 2),               // pass: r0 = XDP_PASS
            insn(0x95, 0, 0, 0, 0),               // exit
        ];
        let [insns, insns_high] = halves(program.as_ptr());
        let licence = c"Dual MIT/GPL";
        let [licence, licence_high] = halves(licence.as_ptr());
        let load = |flags| {
            let len = program.len() as u32;
            bpf(PROG_LOAD, &[XDP, len, insns, insns_high, licence, licence_high, 0, 0, 0, 0, 0, flags])
        };
        // Before Linux 5.18 the flag is unknown.
        let program = owned(load(HAS_FRAGS).or_else(|_| load(0))?);
        let link = owned(bpf(LINK_CREATE, &[program.as_raw_fd() as u32, ifindex, ATTACH_XDP, DRIVER])?);
        Ok(Self { map, _program: program, _link: link })
    }

    /// Redirects frames with this number to a queue.
    pub(super) fn lead(&self, number: u32, queue: BorrowedFd<'_>) {
        let value = queue.as_raw_fd() as u32;
        let ([key, key_high], [value, value_high]) = (halves(&raw const number), halves(&raw const value));
        bpf(2, &[self.map.as_raw_fd() as u32, 0, key, key_high, value, value_high, 0, 0]).unwrap();
    }

    /// Stops redirecting them.
    pub(super) fn leave(&self, number: u32) {
        let [key, key_high] = halves(&raw const number);
        bpf(3, &[self.map.as_raw_fd() as u32, 0, key, key_high]).unwrap();
    }
}
