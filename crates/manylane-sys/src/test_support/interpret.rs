//! An interpreter of classic BPF.

use crate::cbpf::{
    AND_K, Insn, JA, JEQ_K, JGE_K, LD_B_ABS, LD_IMM, LD_MEM, LD_W_ABS, LD_W_IND, LDX_MEM, LDX_MSH, MOD_K,
    MUL_K, NET, RET_K, RSH_K, SKF_AD_OFF, ST, TAX, XOR_X,
};

/// Runs a program on an IP packet; ancillary loads return `ancillary`.
///
/// # Panics
/// On an operation that it does not know, or a load outside the packet.
#[must_use]
pub fn interpret(code: &[Insn], packet: &[u8], ancillary: u32) -> u32 {
    let (mut a, mut x, mut mem, mut at) = (0_u32, 0_u32, [0_u32; 16], 0);
    let load = |offset: u32, size: usize| -> u32 {
        if (SKF_AD_OFF..SKF_AD_OFF + 64).contains(&offset) {
            return ancillary;
        }
        let from = offset.wrapping_sub(NET) as usize;
        packet[from..from + size].iter().fold(0, |word, byte| word << 8 | u32::from(*byte))
    };
    loop {
        let Insn { code: op, jt, jf, k } = code[at];
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
            JGE_K => at += usize::from(if a >= k { jt } else { jf }),
            RET_K => return k,
            other => panic!("operation {other:#x}"),
        }
    }
}
