//! Steering: a classic BPF program that picks the lane of a datagram. It needs no privilege.
//!
//! The program returns the index of a socket in its group. The kernel counts them in the order of
//! binding, the program's own socket first. No socket of a group closes before the last one does,
//! so that indices stay. For an index that does not exist, the kernel would use its own hash.

use std::ptr;

use manylane_sys::cbpf::{
    self, AD_CPU, AD_PKTTYPE, AD_RANDOM, AND_K, Assembler, Insn, JEQ_K, LD_B_ABS, LD_W_ABS, MOD_K, NET,
    RET_K, RSH_K,
};

/// The rule that picks the lane of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    /// A hash of both addresses and ports: the datagrams of one flow stay in one lane, and in
    /// order.
    Flow,
    /// The lane of the CPU that took the interrupt.
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

/// Max instructions of a program: the hash of a flow, and two instructions for each lane.
const PROGRAM_LEN_MAX: usize = 256;
const PROGRAM_BYTES: usize = PROGRAM_LEN_MAX * size_of::<Insn>();

/// A program under construction. It is in a mapping, not on the heap or the stack: steering
/// changes while a thread ends or in a signal handler, which may have a small stack.
pub(crate) struct Program {
    code: &'static mut [Insn],
    len: usize,
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the mapping of that size from `new`; nothing refers to it after this.
        unsafe { libc::munmap(self.code.as_mut_ptr().cast(), PROGRAM_BYTES) };
    }
}

impl Program {
    /// The program that `write` assembles. None if there is no memory, or it is too long.
    fn new(write: impl FnOnce(&mut Assembler<'_>)) -> Option<Self> {
        let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let at = unsafe { libc::mmap(ptr::null_mut(), PROGRAM_BYTES, rights, kind, -1, 0) };
        if at == libc::MAP_FAILED {
            return None;
        }
        // SAFETY: a mapping of so many instructions, plain numbers; nothing else refers to it.
        let code = unsafe { std::slice::from_raw_parts_mut(at.cast(), PROGRAM_LEN_MAX) };
        let mut made = Self { code, len: 0 };
        let mut to = Assembler::new(made.code);
        write(&mut to);
        made.len = to.finish()?.len();
        Some(made)
    }

    /// The instructions.
    pub(crate) fn code(&self) -> &[Insn] {
        &self.code[..self.len]
    }
}

/// Steers to the several lanes whose bits are set. None if there is no memory.
pub(crate) fn program(policy: Policy, lanes: u64) -> Option<Program> {
    Program::new(|to| {
        match policy {
            Policy::Flow => {
                to.flow_hash();
                to.push(RSH_K, 16);
            }
            Policy::Cpu => to.push(LD_W_ABS, AD_CPU),
            Policy::Random => to.push(LD_W_ABS, AD_RANDOM),
        }
        let count = lanes.count_ones();
        to.push(MOD_K, count);
        let mut left = lanes;
        for at in 1..count {
            let is_this = to.branch(JEQ_K, at - 1);
            to.push(RET_K, left.trailing_zeros());
            to.land_else(&is_this);
            left &= left - 1;
        }
        to.push(RET_K, left.trailing_zeros());
    })
}

/// Steers to the one lane whose bit is set; to lane 0 if none is.
pub(crate) fn single_lane(lanes: u64) -> [Insn; 1] {
    [cbpf::insn(RET_K, if lanes == 0 { 0 } else { lanes.trailing_zeros() })]
}

/// The filter of a lane other than lane 0: drops broadcasts and multicasts, which the kernel
/// copies to every socket of a group. Lane 0 gets them, so that the program gets them once. None
/// if there is no memory.
pub(crate) fn unicast_only() -> Option<Program> {
    Program::new(|to| {
        // The packet type: 0 for packets to this host.
        to.extend([(LD_W_ABS, AD_PKTTYPE), (AND_K, 7)]);
        let is_to_host = to.branch(JEQ_K, 0);
        to.extend([(LD_B_ABS, NET), (RSH_K, 4)]);
        let is_v4 = to.branch(JEQ_K, 4);
        // 224.0.0.0/4, 255.255.255.255, and the loopback network's broadcast.
        to.extend([(LD_B_ABS, NET.wrapping_add(16)), (AND_K, 0xf0)]);
        let is_multicast = to.branch(JEQ_K, 0xe0);
        to.push(LD_W_ABS, NET.wrapping_add(16));
        let is_broadcast = to.branch(JEQ_K, u32::MAX);
        let is_of_loopback = to.branch(JEQ_K, 0x7fff_ffff);
        to.push(RET_K, u32::MAX);
        to.land_else(&is_v4);
        to.push(LD_B_ABS, NET.wrapping_add(24));
        let is_v6_multicast = to.branch(JEQ_K, 0xff);
        to.push(RET_K, u32::MAX);
        to.land_else(&is_to_host);
        for refused in [is_multicast, is_broadcast, is_of_loopback, is_v6_multicast] {
            to.land_if(&refused);
        }
        to.push(RET_K, 0);
    })
}

/// Drops everything: the filter of a retired lane, which only holds queued datagrams.
pub(crate) static DROP_ALL: [Insn; 1] = [cbpf::insn(RET_K, 0)];

/// Steers everything to the first socket of a group.
pub(crate) static FIRST_SOCKET: [Insn; 1] = DROP_ALL;

#[cfg(test)]
mod tests {
    use manylane_test_support::interpret;

    use super::*;

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
            counts[interpret(made.code(), &v4([10, 0, 0, 1], [10, 0, 0, 2], port), 0) as usize] += 1;
            counts[interpret(made.code(), &v6([0x20; 16], port), 0) as usize] += 1;
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
                    counts[interpret(made.code(), &packet, 0) as usize] += 1;
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
            assert_eq!(interpret(cpu.code(), &[], lane), lane);
        }
        assert_eq!(interpret(&single_lane(0), &[], 7), 0);
        assert_eq!(interpret(&single_lane(4), &[], 7), 2);
    }

    #[test]
    fn multicast_and_broadcast_are_refused() {
        let made = unicast_only().unwrap();
        let takes = |packet: &[u8], kind: u32| interpret(made.code(), packet, kind) != 0;
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
