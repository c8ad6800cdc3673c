//! Classic BPF programs for sockets: an assembler, and a flow hash.
//!
//! A program is assembled in the caller's memory, without the heap, because the preload library
//! does so while a thread ends or a signal is handled. A program sees the payload of the datagram,
//! and the network header at negative offsets. A load outside the packet ends it with 0
//! (Documentation/networking/filter.rst).

/// One instruction (`struct sock_filter`).
pub type Insn = libc::sock_filter;

/// Maximum number of instructions of a program (`BPF_MAXINSNS`).
pub const INSNS_MAX: usize = 4096;

// Operation codes of linux/bpf_common.h.
/// A = 32 bits of the packet.
pub const LD_W_ABS: u16 = 0x20;
/// A = 16 bits of the packet.
pub const LD_H_ABS: u16 = 0x28;
/// A = 8 bits of the packet.
pub const LD_B_ABS: u16 = 0x30;
/// A = 32 bits of the packet, at X + k.
pub const LD_W_IND: u16 = 0x40;
/// A = length of the packet.
pub const LD_LEN: u16 = 0x80;
/// A = k.
pub const LD_IMM: u16 = 0x00;
/// A = scratch word k.
pub const LD_MEM: u16 = 0x60;
/// X = length of the IPv4 header at k.
pub const LDX_MSH: u16 = 0xb1;
/// X = scratch word k.
pub const LDX_MEM: u16 = 0x61;
/// Scratch word k = A.
pub const ST: u16 = 0x02;
/// A *= k.
pub const MUL_K: u16 = 0x24;
/// A &= k.
pub const AND_K: u16 = 0x54;
/// A |= X.
pub const OR_X: u16 = 0x4c;
/// A <<= k.
pub const LSH_K: u16 = 0x64;
/// A >>= k.
pub const RSH_K: u16 = 0x74;
/// A >>= X.
pub const RSH_X: u16 = 0x7c;
/// A %= k.
pub const MOD_K: u16 = 0x94;
/// A ^= X.
pub const XOR_X: u16 = 0xac;
/// Skips k instructions.
pub const JA: u16 = 0x05;
/// Skips jt instructions if A == k, else jf.
pub const JEQ_K: u16 = 0x15;
/// Skips jt instructions if A >= k, else jf.
pub const JGE_K: u16 = 0x35;
/// Returns k.
pub const RET_K: u16 = 0x06;
/// Returns A.
pub const RET_A: u16 = 0x16;
/// X = A.
pub const TAX: u16 = 0x07;

// Negative offsets of linux/filter.h.
const SKF_AD_OFF: u32 = -0x1000_i32 as u32;
/// Type of the packet, as set by its device or the loopback (`PACKET_HOST` is 0).
pub const AD_PKTTYPE: u32 = SKF_AD_OFF + 4;
/// Number of the CPU that the program runs on.
pub const AD_CPU: u32 = SKF_AD_OFF + 36;
/// A random number.
pub const AD_RANDOM: u32 = SKF_AD_OFF + 56;
/// Start of the network header.
pub const NET: u32 = -0x10_0000_i32 as u32;

/// Odd constants that mix bits: from the golden ratio, and from murmur3's finaliser.
const MIX: u32 = 0x9e37_79b1;
const MIX_LAST: u32 = 0x85eb_ca6b;

/// One instruction without a jump.
#[must_use]
pub const fn insn(code: u16, k: u32) -> Insn {
    Insn { code, jt: 0, jf: 0, k }
}

/// Assembles a program from the first instruction to the last. Jumps are forward: a branch is
/// appended first, and its target is set later.
pub struct Assembler<'a> {
    code: &'a mut [Insn],
    len: usize,
    fits: bool,
}

impl<'a> Assembler<'a> {
    /// Starts at the beginning of `code`.
    pub fn new(code: &'a mut [Insn]) -> Self {
        Self { code, len: 0, fits: true }
    }

    /// The program, unless the memory was too small or a jump too far.
    #[must_use]
    pub fn finish(self) -> Option<&'a [Insn]> {
        let Self { code, len, fits } = self;
        fits.then(|| &code[..len])
    }

    /// Appends one instruction.
    pub fn push(&mut self, code: u16, k: u32) {
        match self.code.get_mut(self.len) {
            Some(slot) => *slot = insn(code, k),
            None => self.fits = false,
        }
        self.len += 1;
    }

    /// Appends several instructions.
    pub fn extend<const N: usize>(&mut self, insns: [(u16, u32); N]) {
        insns.into_iter().for_each(|(code, k)| self.push(code, k));
    }

    /// Appends a jump. Both of its targets are the next instruction until they are set.
    pub fn branch(&mut self, code: u16, k: u32) -> Branch {
        self.push(code, k);
        Branch(self.len - 1)
    }

    /// Sets the target if A meets the branch's condition to the next instruction, at most 255
    /// after it.
    pub fn land_if(&mut self, branch: &Branch) {
        self.land(branch, |insn, distance| u8::try_from(distance).map(|short| insn.jt = short).is_ok());
    }

    /// Sets the target if A does not meet the branch's condition to the next instruction, at most
    /// 255 after it.
    pub fn land_else(&mut self, branch: &Branch) {
        self.land(branch, |insn, distance| u8::try_from(distance).map(|short| insn.jf = short).is_ok());
    }

    /// Sets the target of a [`JA`] to the next instruction.
    pub fn land_always(&mut self, branch: &Branch) {
        self.land(branch, |insn, distance| u32::try_from(distance).map(|k| insn.k = k).is_ok());
    }

    fn land(&mut self, &Branch(at): &Branch, set: impl Fn(&mut Insn, usize) -> bool) {
        let distance = self.len - at - 1;
        self.fits &= self.code.get_mut(at).is_some_and(|insn| set(insn, distance));
    }

    /// Leaves a hash of addresses and ports in A, best mixed in its upper half; behind an IPv6
    /// extension header, a hash of the addresses. Overwrites X and scratch word 0.
    ///
    /// Classic BPF has no access to the kernel's flow hash.
    pub fn flow_hash(&mut self) {
        self.extend([(LD_IMM, MIX), (ST, 0), (LD_B_ABS, NET), (RSH_K, 4)]);
        let version = self.branch(JEQ_K, 4);
        for word in [12, 16] {
            self.push(LD_W_ABS, NET.wrapping_add(word));
            self.mix();
        }
        self.extend([(LDX_MSH, NET), (LD_W_IND, NET)]);
        self.mix();
        let end_of_ipv4 = self.branch(JA, 0);
        self.land_else(&version);
        for word in [8, 12, 16, 20, 24, 28, 32, 36] {
            self.push(LD_W_ABS, NET.wrapping_add(word));
            self.mix();
        }
        self.push(LD_B_ABS, NET.wrapping_add(6));
        let is_udp = self.branch(JEQ_K, 17);
        self.push(LD_W_ABS, NET.wrapping_add(40));
        self.mix();
        self.land_else(&is_udp);
        self.land_always(&end_of_ipv4);
        // Mix the last word once more: its upper half has met few bits so far.
        self.extend([(LD_MEM, 0), (MUL_K, MIX_LAST), (TAX, 0), (RSH_K, 13), (XOR_X, 0), (MUL_K, MIX)]);
    }

    /// Mixes A into scratch word 0.
    fn mix(&mut self) {
        self.extend([(LDX_MEM, 0), (XOR_X, 0), (MUL_K, MIX), (TAX, 0), (RSH_K, 15), (XOR_X, 0), (ST, 0)]);
    }
}

/// A jump without a target yet.
#[must_use]
pub struct Branch(usize);

#[cfg(test)]
mod tests {
    use manylane_test_support::interpret;

    use super::*;

    #[test]
    fn branches_reach_their_labels() {
        let mut code = [insn(0, 0); 8];
        let mut to = Assembler::new(&mut code);
        to.push(LD_W_ABS, AD_CPU);
        let is_five = to.branch(JEQ_K, 5);
        to.push(RET_K, 1);
        to.land_if(&is_five);
        let over = to.branch(JA, 0);
        to.push(RET_K, 2);
        to.land_always(&over);
        to.push(RET_K, 3);
        let code = to.finish().unwrap();
        assert_eq!((interpret(code, &[], 5), interpret(code, &[], 4)), (3, 1));
    }

    #[test]
    fn an_oversized_cbpf_program_is_refused() {
        let mut code = [insn(0, 0); 2];
        let mut to = Assembler::new(&mut code);
        to.extend([(LD_IMM, 1), (ST, 0), (RET_K, 0)]);
        assert!(to.finish().is_none());

        let mut code = [insn(0, 0); 300];
        for (distance, fits) in [(255, true), (256, false)] {
            let mut to = Assembler::new(&mut code);
            let branch = to.branch(JEQ_K, 0);
            (0..distance).for_each(|_| to.push(ST, 0));
            to.land_else(&branch);
            assert_eq!(to.finish().is_some(), fits, "{distance}");
        }
    }

    #[test]
    fn every_word_of_an_ipv6_address_counts() {
        let mut code = [insn(0, 0); 256];
        let mut to = Assembler::new(&mut code);
        to.flow_hash();
        let mut code = to.finish().unwrap().to_vec();
        // A is not returned directly: test one bit at a time.
        let hash = |code: &mut Vec<Insn>, packet: &[u8]| {
            (0..32).fold(0_u32, |hash, bit| {
                code.extend([insn(RSH_K, bit), insn(AND_K, 1)]);
                code.push(Insn { code: JEQ_K, jt: 0, jf: 1, k: 1 });
                code.extend([insn(RET_K, 1), insn(RET_K, 0)]);
                let set = interpret(code, packet, 0);
                code.truncate(code.len() - 5);
                hash | set << bit
            })
        };
        let mut packet = vec![0x60, 0, 0, 0, 0, 8, 17, 64];
        packet.extend([0x20; 36]);
        let plain = hash(&mut code, &packet);
        for at in 8..44 {
            packet[at] ^= 1;
            assert_ne!(hash(&mut code, &packet), plain, "byte {at}");
            packet[at] ^= 1;
        }
        assert_eq!(hash(&mut code, &packet), plain);
    }
}
