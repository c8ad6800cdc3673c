//! An interpreter of classic BPF. It has the operations of linux/bpf_common.h from the C library,
//! not from the assembler that it tests.

use libc::{
    BPF_A, BPF_ABS, BPF_ALU, BPF_AND, BPF_B, BPF_IMM, BPF_IND, BPF_JA, BPF_JEQ, BPF_JGE, BPF_JMP, BPF_K,
    BPF_LD, BPF_LDX, BPF_LSH, BPF_MEM, BPF_MISC, BPF_MOD, BPF_MSH, BPF_MUL, BPF_RET, BPF_RSH, BPF_ST,
    BPF_TAX, BPF_W, BPF_X, BPF_XOR, SKF_AD_OFF, SKF_NET_OFF, sock_filter,
};

const LD_W_ABS: u32 = BPF_LD | BPF_W | BPF_ABS;
const LD_B_ABS: u32 = BPF_LD | BPF_B | BPF_ABS;
const LD_W_IND: u32 = BPF_LD | BPF_W | BPF_IND;
const LD_IMM: u32 = BPF_LD | BPF_W | BPF_IMM;
const LD_MEM: u32 = BPF_LD | BPF_W | BPF_MEM;
const LDX_MSH: u32 = BPF_LDX | BPF_B | BPF_MSH;
const LDX_MEM: u32 = BPF_LDX | BPF_W | BPF_MEM;
const TAX: u32 = BPF_MISC | BPF_TAX;
const MUL_K: u32 = BPF_ALU | BPF_MUL | BPF_K;
const MOD_K: u32 = BPF_ALU | BPF_MOD | BPF_K;
const AND_K: u32 = BPF_ALU | BPF_AND | BPF_K;
const LSH_K: u32 = BPF_ALU | BPF_LSH | BPF_K;
const RSH_K: u32 = BPF_ALU | BPF_RSH | BPF_K;
const RSH_X: u32 = BPF_ALU | BPF_RSH | BPF_X;
const XOR_X: u32 = BPF_ALU | BPF_XOR | BPF_X;
const JA: u32 = BPF_JMP | BPF_JA;
const JEQ_K: u32 = BPF_JMP | BPF_JEQ | BPF_K;
const JGE_K: u32 = BPF_JMP | BPF_JGE | BPF_K;
const RET_K: u32 = BPF_RET | BPF_K;
const RET_A: u32 = BPF_RET | BPF_A;

/// Runs a program on an IP packet; ancillary loads return `ancillary`.
///
/// # Panics
/// On an operation that it does not know, or a load outside the packet.
#[must_use]
pub fn interpret(code: &[sock_filter], packet: &[u8], ancillary: u32) -> u32 {
    let (mut a, mut x, mut mem, mut at) = (0_u32, 0_u32, [0_u32; 16], 0);
    let load = |offset: u32, size: usize| -> u32 {
        if (SKF_AD_OFF..SKF_AD_OFF + 64).contains(&(offset as i32)) {
            return ancillary;
        }
        let from = offset.wrapping_sub(SKF_NET_OFF as u32) as usize;
        packet[from..from + size].iter().fold(0, |word, byte| word << 8 | u32::from(*byte))
    };
    loop {
        let sock_filter { code: op, jt, jf, k } = code[at];
        at += 1;
        match op.into() {
            LD_W_ABS => a = load(k, 4),
            LD_B_ABS => a = load(k, 1),
            LD_W_IND => a = load(k.wrapping_add(x), 4),
            LDX_MSH => x = (load(k, 1) & 15) * 4,
            LD_MEM => a = mem[k as usize],
            LDX_MEM => x = mem[k as usize],
            LD_IMM => a = k,
            BPF_ST => mem[k as usize] = a,
            TAX => x = a,
            MUL_K => a = a.wrapping_mul(k),
            MOD_K => a %= k,
            AND_K => a &= k,
            LSH_K => a <<= k,
            RSH_K => a >>= k,
            RSH_X => a >>= x,
            XOR_X => a ^= x,
            JA => at += k as usize,
            JEQ_K => at += usize::from(if a == k { jt } else { jf }),
            JGE_K => at += usize::from(if a >= k { jt } else { jf }),
            RET_K => return k,
            RET_A => return a,
            other => panic!("operation {other:#x}"),
        }
    }
}
