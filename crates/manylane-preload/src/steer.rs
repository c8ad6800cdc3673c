//! Steering: which lane of a group a datagram goes to, as a classic BPF program, which needs no privilege.
//!
//! The program returns the index of a socket in its group. The kernel counts them in the order of binding, the
//! program's own socket first; no socket of a group closes before the last one does, so that indices stay. An index
//! that does not exist would mean the kernel's own hash.

use std::ptr;

use libc::sock_filter;

/// The rule that picks the lane of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    /// A hash of both addresses and ports: the datagrams of one flow stay in one lane, and in order.
    Flow,
    /// The lane of the core that took the interrupt.
    Cpu,
    /// A random lane.
    Random,
}

impl Policy {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "flow" => Self::Flow,
            "cpu" => Self::Cpu,
            // Classic BPF keeps no count and sees no queue: a random lane is the nearest to both.
            "random" | "round-robin" | "least-loaded" => Self::Random,
            _ => return None,
        })
    }
}

const LD_W_ABS: u16 = 0x20;

const LD_B_ABS: u16 = 0x30;
const LD_W_IND: u16 = 0x40;
const LDX_MSH: u16 = 0xb1;
const LD_MEM: u16 = 0x60;
const LDX_MEM: u16 = 0x61;
const LD_IMM: u16 = 0x00;
const ST: u16 = 0x02;
const TAX: u16 = 0x07;
const MUL_K: u16 = 0x24;
const MOD_K: u16 = 0x94;
const AND_K: u16 = 0x54;
const RSH_K: u16 = 0x74;
const XOR_X: u16 = 0xac;
const JA: u16 = 0x05;
const JEQ_K: u16 = 0x15;
const RET_K: u16 = 0x06;
/// Ancillary loads, and the start of the network header (`linux/filter.h`).
const SKF_AD_OFF: u32 = -0x1000_i32 as u32;
const AD_PKTTYPE: u32 = SKF_AD_OFF + 4;
const AD_CPU: u32 = SKF_AD_OFF + 36;
const AD_RANDOM: u32 = SKF_AD_OFF + 56;
const SKF_NET_OFF: u32 = -0x10_0000_i32 as u32;
/// An odd constant that spreads bits: 2^32 divided by the golden ratio.
const MIX_MULTIPLIER: u32 = 0x9e37_79b1;
/// Another one, for the last round.
const MIX_FINAL: u32 = 0x85eb_ca6b;

fn op(code: u16, k: u32) -> sock_filter {
    sock_filter { code, jt: 0, jf: 0, k }
}

fn jeq(k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: JEQ_K, jt, jf, k }
}

/// Longest program that is made here: the hash of a flow, and two instructions for each lane.
const PROGRAM_LEN_MAX: usize = 256;
const PROGRAM_BYTES: usize = PROGRAM_LEN_MAX * size_of::<sock_filter>();

/// A program being put together, without the heap, and in a mapping: steering changes while a thread ends or a signal is
/// handled, which may be on a small stack.
pub(crate) struct Program {
    code: &'static mut [sock_filter],
    len: usize,
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the mapping of that size from `new`, which ends with this.
        unsafe { libc::munmap(self.code.as_mut_ptr().cast(), PROGRAM_BYTES) };
    }
}

impl Program {
    /// None without memory.
    fn new() -> Option<Self> {
        let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let at = unsafe { libc::mmap(ptr::null_mut(), PROGRAM_BYTES, rights, kind, -1, 0) };
        if at == libc::MAP_FAILED {
            return None;
        }
        // SAFETY: a mapping of so many, which are plain numbers, and nothing else refers to it.
        Some(Self { code: unsafe { std::slice::from_raw_parts_mut(at.cast(), PROGRAM_LEN_MAX) }, len: 0 })
    }

    fn push(&mut self, insn: sock_filter) {
        if let Some(slot) = self.code.get_mut(self.len) {
            *slot = insn;
            self.len += 1;
        }
    }

    /// The instructions.
    pub(crate) fn code(&self) -> &[sock_filter] {
        &self.code[..self.len]
    }

    /// Scratch word 0 = mixed with A.
    fn mix(&mut self) {
        for insn in
            [op(LDX_MEM, 0), op(XOR_X, 0), op(MUL_K, MIX_MULTIPLIER), op(TAX, 0), op(RSH_K, 15), op(XOR_X, 0)]
        {
            self.push(insn);
        }
        self.push(op(ST, 0));
    }

    /// A = a hash of addresses and ports.
    fn hash_flow(&mut self) {
        self.push(op(LD_IMM, MIX_MULTIPLIER));
        self.push(op(ST, 0));
        self.push(op(LD_B_ABS, SKF_NET_OFF));
        self.push(op(RSH_K, 4));
        let branch = self.len;
        self.push(jeq(4, 0, 0));
        for word in [12, 16] {
            self.push(op(LD_W_ABS, SKF_NET_OFF.wrapping_add(word)));
            self.mix();
        }
        self.push(op(LDX_MSH, SKF_NET_OFF));
        self.push(op(LD_W_IND, SKF_NET_OFF));
        self.mix();
        let end_of_v4 = self.len;
        self.push(op(JA, 0));
        self.code[branch].jf = (self.len - branch - 1) as u8;
        for word in [8, 12, 16, 20, 24, 28, 32, 36] {
            self.push(op(LD_W_ABS, SKF_NET_OFF.wrapping_add(word)));
            self.mix();
        }
        // Behind an extension header the ports are not where they would be: the addresses have to do.
        self.push(op(LD_B_ABS, SKF_NET_OFF.wrapping_add(6)));
        let no_ports = self.len;
        self.push(jeq(17, 0, 0));
        self.push(op(LD_W_ABS, SKF_NET_OFF.wrapping_add(40)));
        self.mix();
        self.code[no_ports].jf = (self.len - no_ports - 1) as u8;
        self.code[end_of_v4].k = (self.len - end_of_v4 - 1) as u32;
        // Once more for the last word, whose upper half has only met few bits; the upper bits of a product are the
        // better mixed ones.
        for insn in [
            op(LD_MEM, 0),
            op(MUL_K, MIX_FINAL),
            op(TAX, 0),
            op(RSH_K, 13),
            op(XOR_X, 0),
            op(MUL_K, MIX_MULTIPLIER),
        ] {
            self.push(insn);
        }
        self.push(op(RSH_K, 16));
    }
}

/// Steers to the lanes whose bits are set, of which there are several. None without memory.
pub(crate) fn program(policy: Policy, lanes: u64) -> Option<Program> {
    let mut to = Program::new()?;
    match policy {
        Policy::Flow => to.hash_flow(),
        Policy::Cpu => to.push(op(LD_W_ABS, AD_CPU)),
        Policy::Random => to.push(op(LD_W_ABS, AD_RANDOM)),
    }
    let count = lanes.count_ones();
    to.push(op(MOD_K, count));
    let mut left = lanes;
    for at in 1..count {
        to.push(jeq(at - 1, 0, 1));
        to.push(op(RET_K, left.trailing_zeros()));
        left &= left - 1;
    }
    to.push(op(RET_K, left.trailing_zeros()));
    Some(to)
}

/// Steers to the one lane whose bit is set; to lane 0 if none is.
pub(crate) fn single_lane(lanes: u64) -> [sock_filter; 1] {
    [op(RET_K, if lanes == 0 { 0 } else { lanes.trailing_zeros() })]
}

/// What a lane beside the program's own socket refuses: broadcasts and multicasts, of which the kernel gives every
/// socket of a group a copy. The first one gets them, and the program gets them once.
/// None without memory.
pub(crate) fn unicast_only() -> Option<Program> {
    let mut to = Program::new()?;
    // The packet type of what a device took, or looped back.
    to.push(op(LD_W_ABS, AD_PKTTYPE));
    to.push(op(AND_K, 7));
    let to_host = to.len;
    to.push(jeq(0, 0, 0));
    to.push(op(LD_B_ABS, SKF_NET_OFF));
    to.push(op(RSH_K, 4));
    let branch = to.len;
    to.push(jeq(4, 0, 0));
    // 224.0.0.0/4, 255.255.255.255, and the loopback network's broadcast.
    to.push(op(LD_B_ABS, SKF_NET_OFF.wrapping_add(16)));
    to.push(op(AND_K, 0xf0));
    let multicast = to.len;
    to.push(jeq(0xe0, 0, 0));
    to.push(op(LD_W_ABS, SKF_NET_OFF.wrapping_add(16)));
    let everybody = to.len;
    to.push(jeq(u32::MAX, 0, 0));
    let loopback = to.len;
    to.push(jeq(0x7fff_ffff, 0, 0));
    to.push(op(RET_K, u32::MAX));
    to.code[branch].jf = (to.len - branch - 1) as u8;
    to.push(op(LD_B_ABS, SKF_NET_OFF.wrapping_add(24)));
    let v6_multicast = to.len;
    to.push(jeq(0xff, 0, 0));
    to.push(op(RET_K, u32::MAX));
    let refuse = to.len;
    to.push(op(RET_K, 0));
    to.code[to_host].jf = (refuse - to_host - 1) as u8;
    for at in [multicast, everybody, loopback, v6_multicast] {
        to.code[at].jt = (refuse - at - 1) as u8;
    }
    Some(to)
}

/// Refuses everything: the filter of a lane that only hands out what it still holds.
pub(crate) static DROP_ALL: [sock_filter; 1] = [sock_filter { code: RET_K, jt: 0, jf: 0, k: 0 }];

/// The first socket of a group gets everything.
pub(crate) static FIRST_SOCKET: [sock_filter; 1] = DROP_ALL;

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a program over an IP packet, with what the ancillary loads bring.
    fn run(code: &[sock_filter], packet: &[u8], ancillary: u32) -> u32 {
        let (mut a, mut x, mut mem, mut at) = (0_u32, 0_u32, [0_u32; 16], 0);
        let load = |offset: u32, size: usize| -> u32 {
            if (SKF_AD_OFF..SKF_AD_OFF + 64).contains(&offset) {
                return ancillary;
            }
            let from = offset.wrapping_sub(SKF_NET_OFF) as usize;
            packet[from..from + size].iter().fold(0, |word, byte| word << 8 | u32::from(*byte))
        };
        loop {
            let sock_filter { code: op, jt, jf, k } = code[at];
            at += 1;
            match op {
                LD_W_ABS => a = load(k, 4),
                LD_B_ABS => a = load(k, 1),
                LD_W_IND => a = load(k.wrapping_add(x), 4),
                LDX_MSH => x = (load(k, 1) & 15) * 4,
                LD_MEM => a = mem[k as usize],
                LDX_MEM => x = mem[k as usize],
                LD_IMM => a = k,
                ST => mem[k as usize] = a,
                TAX => x = a,
                MUL_K => a = a.wrapping_mul(k),
                MOD_K => a %= k,
                AND_K => a &= k,
                RSH_K => a >>= k,
                XOR_X => a ^= x,
                JA => at += k as usize,
                JEQ_K => at += usize::from(if a == k { jt } else { jf }),
                RET_K => return k,
                other => panic!("operation {other:#x}"),
            }
        }
    }

    fn v4(source: [u8; 4], dest: [u8; 4], port: u16) -> Vec<u8> {
        let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0];
        packet.extend(source);
        packet.extend(dest);
        packet.extend(port.to_be_bytes());
        packet.extend([0, 53, 0, 8, 0, 0]);
        packet
    }

    fn v6(dest: [u8; 16], port: u16) -> Vec<u8> {
        let mut packet = vec![0x60, 0, 0, 0, 0, 8, 17, 64];
        packet.extend([0x20; 16]);
        packet.extend(dest);
        packet.extend(port.to_be_bytes());
        packet.extend([0, 53, 0, 8, 0, 0]);
        packet
    }

    #[test]
    fn flows_spread_over_the_lanes_named_and_over_no_others() {
        let lanes = 0b1010_0101_u64;
        let made = program(Policy::Flow, lanes).unwrap();
        let mut counts = [0_usize; 64];
        for port in 1..=4000 {
            counts[run(made.code(), &v4([10, 0, 0, 1], [10, 0, 0, 2], port), 0) as usize] += 1;
            counts[run(made.code(), &v6([0x20; 16], port), 0) as usize] += 1;
        }
        for (lane, count) in counts.iter().enumerate() {
            assert_eq!(*count > 0, lanes & 1 << lane != 0, "lane {lane}: {count}");
            assert!(*count == 0 || (1600..2400).contains(count), "lane {lane}: {count}");
        }
    }

    #[test]
    fn a_few_neighbouring_ports_do_not_all_meet_in_one_lane() {
        let made = program(Policy::Flow, 0b1111).unwrap();
        for first in (32768..60000_u16).step_by(16) {
            for step in [1, 2] {
                let mut counts = [0_usize; 4];
                for nth in 0..32 {
                    let packet = v4([127, 0, 0, 1], [127, 0, 0, 1], first + nth * step);
                    counts[run(made.code(), &packet, 0) as usize] += 1;
                }
                assert!(counts.iter().all(|count| (1..=20).contains(count)), "{first}: {counts:?}");
            }
        }
    }

    #[test]
    fn all_64_lanes_fit() {
        let made = program(Policy::Flow, u64::MAX).unwrap();
        assert!(made.len < PROGRAM_LEN_MAX);
        let cpu = program(Policy::Cpu, u64::MAX).unwrap();
        for lane in 0..64 {
            assert_eq!(run(cpu.code(), &[], lane), lane);
        }
        assert_eq!(run(&single_lane(0), &[], 7), 0);
        assert_eq!(run(&single_lane(4), &[], 7), 2);
    }

    #[test]
    fn copies_are_refused_and_unicast_is_not() {
        let made = unicast_only().unwrap();
        let takes = |packet: &[u8], kind: u32| run(made.code(), packet, kind) != 0;
        assert!(takes(&v4([10, 0, 0, 1], [10, 0, 0, 2], 1), 0));
        assert!(takes(&v4([10, 0, 0, 1], [127, 0, 0, 1], 1), 0));
        assert!(!takes(&v4([10, 0, 0, 1], [10, 0, 0, 2], 1), 1));
        for dest in [[224, 0, 0, 1], [239, 1, 2, 3], [255, 255, 255, 255], [127, 255, 255, 255]] {
            assert!(!takes(&v4([10, 0, 0, 1], dest, 1), 0), "{dest:?}");
        }
        assert!(takes(&v6([0x20; 16], 1), 0));
        assert!(!takes(&v6([0xff; 16], 1), 0));
    }
}
