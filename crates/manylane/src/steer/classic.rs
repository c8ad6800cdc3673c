//! Steering by classic BPF: the table compiled into a program that returns the index of a socket.
//!
//! The kernel numbers the sockets of a group in the order of binding, and renumbers when one closes. The socket
//! therefore closes none while it steers this way (it parks them for the next lane), so that a slot is an index.
//!
//! The program sees the payload of the datagram, and the network header at a negative offset; a load outside of
//! the packet would end it with index 0, which is why keys are checked against the length first.

use std::io;
use std::os::fd::BorrowedFd;

use manylane_bpf::abi::TABLE_SIZE;
use manylane_sys::sock::{self, ClassicInsn};

use super::table::{BUCKET_SHIFT, KEY_LAST, KEY_SEED, KEY_WORD, Layout};
use super::{Slot, Steering};

// Operation codes of linux/bpf_common.h, as far as they are used here.
const LD_W_ABS: u16 = 0x20;
const LD_H_ABS: u16 = 0x28;
const LD_B_ABS: u16 = 0x30;
const LD_W_IND: u16 = 0x40;
const LD_LEN: u16 = 0x80;
const LD_IMM: u16 = 0x00;
const LD_MEM: u16 = 0x60;
const LDX_MSH: u16 = 0xb1;
const LDX_MEM: u16 = 0x61;
const ST: u16 = 0x02;
const ALU_MUL_K: u16 = 0x24;
const ALU_AND_K: u16 = 0x54;
const ALU_OR_X: u16 = 0x4c;
const ALU_LSH_K: u16 = 0x64;
const ALU_RSH_K: u16 = 0x74;
const ALU_MOD_K: u16 = 0x94;
const ALU_XOR_X: u16 = 0xac;
const JA: u16 = 0x05;
const JEQ_K: u16 = 0x15;
const JGE_K: u16 = 0x35;
const RET_K: u16 = 0x06;
const TAX: u16 = 0x07;

// Ancillary loads of linux/filter.h.
const AD: u32 = -0x1000_i32 as u32;
const AD_CPU: u32 = AD + 36;
const AD_RANDOM: u32 = AD + 56;
/// Start of the network header.
const NET: u32 = -0x10_0000_i32 as u32;

/// Longest program that the kernel takes (`BPF_MAXINSNS`).
const MAX_INSNS: usize = 4096;

/// Steering by classic BPF.
pub(super) struct ClassicSteer {
    policy: Steering,
}

impl ClassicSteer {
    pub(super) fn new(policy: Steering) -> Self {
        let policy = match policy {
            Steering::RoundRobin | Steering::LeastLoaded => Steering::Random,
            other => other,
        };
        Self { policy }
    }

    /// The policy that classic BPF enforces in place of the one asked for.
    pub(super) fn policy(&self) -> Steering {
        self.policy
    }

    pub(super) fn attach(&self, fd: BorrowedFd<'_>, layout: &Layout) -> io::Result<()> {
        match sock::attach_reuseport_cbpf(fd, &compile(self.policy, layout)) {
            // The group forms with the second socket; before that there is nothing to steer.
            Err(err) if layout.lanes() == 1 && err.kind() == io::ErrorKind::InvalidInput => Ok(()),
            done => done,
        }
    }
}

fn insn(code: u16, k: u32) -> ClassicInsn {
    ClassicInsn { code, jt: 0, jf: 0, k }
}

fn jump(code: u16, k: u32, jt: u8, jf: u8) -> ClassicInsn {
    ClassicInsn { code, jt, jf, k }
}

/// The program for `policy` over the table.
fn compile(policy: Steering, layout: &Layout) -> Vec<ClassicInsn> {
    let mut code = Vec::new();
    match policy {
        Steering::Cpu => {
            code.push(insn(LD_W_ABS, AD_CPU));
            code.push(insn(ALU_AND_K, TABLE_SIZE as u32 - 1));
        }
        Steering::Key { offset, len } => {
            let hash = key_hash(u32::from(offset), u32::from(len));
            let flow = flow_hash();
            // Too short for the key: by flow. The flow's hash stands behind the key's and a jump over it.
            code.push(insn(LD_LEN, 0));
            code.push(jump(JGE_K, u32::from(offset) + u32::from(len), 1, 0));
            code.push(insn(JA, hash.len() as u32 + 1));
            code.extend(hash);
            code.push(insn(JA, flow.len() as u32));
            code.extend(flow);
            code.push(insn(ALU_RSH_K, BUCKET_SHIFT));
        }
        Steering::Flow => {
            code.extend(flow_hash());
            code.push(insn(ALU_RSH_K, BUCKET_SHIFT));
        }
        _ => {
            code.push(insn(LD_W_ABS, AD_RANDOM));
            code.push(insn(ALU_MOD_K, layout.size() as u32));
        }
    }
    let runs = runs(layout);
    select(&mut code, &runs);
    debug_assert!(code.len() <= MAX_INSNS);
    code
}

/// The table as (first entry, slot) of each run of equal entries.
fn runs(layout: &Layout) -> Vec<(u32, Slot)> {
    let mut runs: Vec<(u32, Slot)> = Vec::new();
    for at in 0..layout.size() {
        let slot = layout.entry(at);
        if runs.last().is_none_or(|(_, last)| *last != slot) {
            runs.push((at as u32, slot));
        }
    }
    runs
}

/// Emits a binary search for the run that A falls into, which returns its slot. There is at least one run; at
/// most 1024 runs make 3070 instructions.
fn select(code: &mut Vec<ClassicInsn>, runs: &[(u32, Slot)]) {
    match runs {
        [] => {}
        [(_, slot)] => code.push(insn(RET_K, *slot)),
        _ => {
            let (low, high) = runs.split_at(runs.len() / 2);
            // Conditional jumps reach 255 instructions only, so that the far side is reached by a plain one.
            code.push(jump(JGE_K, high[0].0, 0, 1));
            let far = code.len();
            code.push(insn(JA, 0));
            select(code, low);
            code[far].k = (code.len() - far - 1) as u32;
            select(code, high);
        }
    }
}

/// A ^= A >> bits; X and scratch 15 are overwritten.
fn fold(code: &mut Vec<ClassicInsn>, bits: u32) {
    code.extend([insn(TAX, 0), insn(ALU_RSH_K, bits), insn(ALU_XOR_X, 0)]);
}

/// Leaves the key's hash in A: see [`super::key_hash`].
fn key_hash(offset: u32, len: u32) -> Vec<ClassicInsn> {
    let mut code = vec![insn(LD_IMM, KEY_SEED ^ len), insn(ST, 0)];
    for at in (0..len).step_by(4) {
        let from = offset + at;
        match len - at {
            1 => code.extend([insn(LD_B_ABS, from), insn(ALU_LSH_K, 24)]),
            2 => code.extend([insn(LD_H_ABS, from), insn(ALU_LSH_K, 16)]),
            3 => code.extend([
                insn(LD_B_ABS, from + 2),
                insn(ALU_LSH_K, 8),
                insn(ST, 1),
                insn(LD_H_ABS, from),
                insn(ALU_LSH_K, 16),
                insn(LDX_MEM, 1),
                insn(ALU_OR_X, 0),
            ]),
            _ => code.push(insn(LD_W_ABS, from)),
        }
        code.extend([insn(LDX_MEM, 0), insn(ALU_XOR_X, 0), insn(ALU_MUL_K, KEY_WORD)]);
        fold(&mut code, 13);
        code.push(insn(ST, 0));
    }
    code.extend([insn(LD_MEM, 0), insn(ALU_MUL_K, KEY_LAST)]);
    fold(&mut code, 16);
    code
}

/// Leaves a hash of addresses and ports in A: our own, since the kernel's is not to be had from here.
fn flow_hash() -> Vec<ClassicInsn> {
    let mix = |code: &mut Vec<ClassicInsn>| {
        code.extend([insn(LDX_MEM, 0), insn(ALU_XOR_X, 0), insn(ALU_MUL_K, KEY_WORD)]);
        fold(code, 13);
        code.push(insn(ST, 0));
    };
    // IPv4: source, destination, then the ports behind a header of any length.
    let mut v4 = Vec::new();
    for word in [12, 16] {
        v4.push(insn(LD_W_ABS, NET.wrapping_add(word)));
        mix(&mut v4);
    }
    v4.push(insn(LDX_MSH, NET));
    v4.push(insn(LD_W_IND, NET));
    mix(&mut v4);
    // IPv6: source, the end of the destination, and the ports if no extension header stands in between (protocol
    // number 17); behind one the addresses have to do.
    let mut v6 = Vec::new();
    for word in [8, 12, 16, 20, 36] {
        v6.push(insn(LD_W_ABS, NET.wrapping_add(word)));
        mix(&mut v6);
    }
    let mut ports = vec![insn(LD_W_ABS, NET.wrapping_add(40))];
    mix(&mut ports);
    v6.push(insn(LD_B_ABS, NET.wrapping_add(6)));
    v6.push(jump(JEQ_K, 17, 0, ports.len() as u8));
    v6.extend(ports);

    let mut code = vec![insn(LD_IMM, KEY_SEED), insn(ST, 0)];
    code.extend([insn(LD_B_ABS, NET), insn(ALU_RSH_K, 4)]);
    code.push(jump(JEQ_K, 4, 0, v4.len() as u8 + 1));
    code.extend(v4);
    code.push(insn(JA, v6.len() as u32));
    code.extend(v6);
    code.extend([insn(LD_MEM, 0), insn(ALU_MUL_K, KEY_LAST)]);
    fold(&mut code, 16);
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the part of a program that `select` makes.
    fn run(code: &[ClassicInsn], a: u32) -> u32 {
        let mut at = 0;
        loop {
            let ClassicInsn { code: op, jt, jf, k } = code[at];
            at += 1;
            match op {
                RET_K => return k,
                JA => at += k as usize,
                JGE_K => at += usize::from(if a >= k { jt } else { jf }),
                _ => panic!("operation {op:#x}"),
            }
        }
    }

    #[test]
    fn the_search_finds_the_slot_of_every_entry() {
        let mut layout = Layout::new(Steering::Flow);
        for slot in 0..64 {
            layout.admit(slot, None);
        }
        for slot in [3, 60, 7, 31] {
            layout.retire(slot);
        }
        let mut code = Vec::new();
        select(&mut code, &runs(&layout));
        for at in 0..TABLE_SIZE {
            assert_eq!(run(&code, at as u32), layout.entry(at), "entry {at}");
        }
    }

    #[test]
    fn the_worst_table_fits_into_a_program() {
        let runs: Vec<_> = (0..TABLE_SIZE as u32).map(|at| (at, at % 251)).collect();
        let mut code = Vec::new();
        select(&mut code, &runs);
        let key = Steering::Key { offset: 0, len: 63 };
        let mut layout = Layout::new(key);
        layout.admit(0, None);
        assert!(code.len() + compile(key, &layout).len() <= MAX_INSNS);
        for (at, slot) in &runs {
            assert_eq!(run(&code, *at), *slot);
        }
    }

    #[test]
    fn short_jumps_stay_in_reach() {
        assert!(flow_hash().len() < 255);
    }
}
