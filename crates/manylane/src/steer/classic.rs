//! Steering by classic BPF: the table compiled into a program that returns the index of a socket.
//!
//! The kernel numbers the sockets of a group in the order of binding, and renumbers when one
//! closes. So no socket is closed while steering works this way (it is parked for the next lane),
//! and a slot is an index.
//!
//! The program sees the payload of the datagram, and the network header at a negative offset. A
//! load outside of the packet would end it with index 0, so the length is checked before a key is
//! read.

use std::io;
use std::os::fd::BorrowedFd;

use manylane_bpf::abi::TABLE_SIZE;
use manylane_sys::cbpf::{
    self, AD_CPU, AD_RANDOM, AND_K, Assembler, Branch, INSNS_MAX, Insn, JA, JEQ_K, JGE_K, LD_B_ABS, LD_H_ABS,
    LD_IMM, LD_LEN, LD_MEM, LD_W_ABS, LDX_MEM, LSH_K, MOD_K, MUL_K, OR_X, RET_A, RET_K, RSH_K, RSH_X, ST,
    TAX, XOR_X,
};
use manylane_sys::sock;

use super::policy::Steering;
use super::table::{BUCKET_SHIFT, KEY_LAST, KEY_SEED, KEY_WORD, Layout};

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

    /// The policy that classic BPF enforces in place of the requested one.
    pub(super) fn policy(&self) -> Steering {
        self.policy
    }

    /// # Errors
    /// Says what to change. The group then has no program, not even an earlier one.
    pub(super) fn attach(&self, fd: BorrowedFd<'_>, layout: &Layout) -> Result<(), String> {
        let program = compile(self.policy, layout);
        let Err(err) = sock::attach_reuseport_cbpf(fd, &program) else { return Ok(()) };
        // The group forms with the second socket. Before that there is nothing to steer.
        if layout.lanes() == 1 && err.kind() == io::ErrorKind::InvalidInput {
            return Ok(());
        }
        // An earlier one would leave new lanes without datagrams. There may be none.
        _ = sock::detach_reuseport_bpf(fd);
        let hint = if err.kind() == io::ErrorKind::OutOfMemory {
            format!(
                ": {} lanes need a program of {} instructions: raise net.core.optmem_max",
                layout.lanes(),
                program.len()
            )
        } else {
            String::new()
        };
        Err(format!("{err}{hint}"))
    }
}

/// The program for `policy` over the table.
fn compile(policy: Steering, layout: &Layout) -> Vec<Insn> {
    let mut code = vec![cbpf::insn(RET_K, 0); INSNS_MAX];
    let mut to = Assembler::new(&mut code);
    match policy {
        // Not by a search of the table: neighbours in it differ, and on older kernels a program
        // for all of its entries is too large (net.core.optmem_max).
        Steering::Cpu => {
            to.extend([(LD_W_ABS, AD_CPU), (AND_K, TABLE_SIZE as u32 - 1)]);
            for (cpu, slot) in layout.by_cpu() {
                let is_here = to.branch(JEQ_K, cpu as u32);
                to.push(RET_K, slot);
                to.land_else(&is_here);
            }
            to.push(MOD_K, layout.lanes() as u32);
            select_in_turn(&mut to, layout);
        }
        Steering::Key { offset, len } => {
            let (offset, len) = (u32::from(offset), u32::from(len));
            to.push(LD_LEN, 0);
            let is_long = to.branch(JGE_K, offset + len);
            key_hash(&mut to, offset, len);
            let done = to.branch(JA, 0);
            // Too short for the key: use the flow hash.
            to.land_else(&is_long);
            to.flow_hash();
            to.land_always(&done);
            to.push(RSH_K, BUCKET_SHIFT);
            select_bucket(&mut to, layout);
        }
        Steering::Flow => {
            to.flow_hash();
            to.push(RSH_K, BUCKET_SHIFT);
            select_bucket(&mut to, layout);
        }
        _ => {
            to.extend([(LD_W_ABS, AD_RANDOM), (MOD_K, layout.lanes() as u32)]);
            select_in_turn(&mut to, layout);
        }
    }
    let len = to.finish().map(<[Insn]>::len);
    debug_assert!(len.is_some(), "the longest key and the worst table fit");
    code.truncate(len.unwrap_or(0));
    code
}

/// Returns the slot of lane A, below the number of lanes.
fn select_in_turn(to: &mut Assembler<'_>, layout: &Layout) {
    let lanes: Vec<_> = (0..).zip(layout.in_turn()).collect();
    search(to, &lanes, &mut |to, slot| to.push(RET_K, slot));
}

/// Slots of the table in one word: they are below 256.
const SLOTS_IN_WORD: usize = 4;

/// Returns the slot of bucket A. Runs of equal buckets would make a shorter program at first, but
/// lanes that come and go leave as many runs as buckets, and older kernels refuse a program of so
/// many instructions (net.core.optmem_max). Of words, there are never more than 256.
fn select_bucket(to: &mut Assembler<'_>, layout: &Layout) {
    let word = |at: usize| {
        let slots = std::array::from_fn(|i| layout.entry(SLOTS_IN_WORD * at + i) as u8);
        u32::from_le_bytes(slots)
    };
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for at in 0..TABLE_SIZE / SLOTS_IN_WORD {
        if runs.last().is_none_or(|(_, last)| *last != word(at)) {
            runs.push((at as u32, word(at)));
        }
    }
    // X: the place of the slot in its word, in bits.
    to.extend([(ST, 0), (AND_K, 3), (LSH_K, 3), (TAX, 0), (LD_MEM, 0), (RSH_K, 2)]);
    let mut found: Vec<Branch> = Vec::new();
    search(to, &runs, &mut |to, word| {
        to.push(LD_IMM, word);
        found.push(to.branch(JA, 0));
    });
    found.iter().for_each(|branch| to.land_always(branch));
    to.extend([(RSH_X, 0), (AND_K, 0xff), (RET_A, 0)]);
}

/// Emits a binary search for the last of the runs, each its begin and its value, that does not
/// begin after A. `leaf` emits what follows, with the value of the run.
fn search(to: &mut Assembler<'_>, runs: &[(u32, u32)], leaf: &mut impl FnMut(&mut Assembler<'_>, u32)) {
    match runs {
        [] => {}
        [(_, value)] => leaf(to, *value),
        _ => {
            let (low, high) = runs.split_at(runs.len() / 2);
            // Conditional jumps reach only 255 instructions; an unconditional one reaches the far
            // half.
            let is_high = to.branch(JGE_K, high[0].0);
            let far = to.branch(JA, 0);
            to.land_else(&is_high);
            search(to, low, leaf);
            to.land_always(&far);
            search(to, high, leaf);
        }
    }
}

/// A ^= A >> bits; X is overwritten.
fn fold(to: &mut Assembler<'_>, bits: u32) {
    to.extend([(TAX, 0), (RSH_K, bits), (XOR_X, 0)]);
}

/// Leaves the hash of the key in A: see [`super::key_hash`].
fn key_hash(to: &mut Assembler<'_>, offset: u32, len: u32) {
    to.extend([(LD_IMM, KEY_SEED ^ len), (ST, 0)]);
    for at in (0..len).step_by(4) {
        let from = offset + at;
        match len - at {
            1 => to.extend([(LD_B_ABS, from), (LSH_K, 24)]),
            2 => to.extend([(LD_H_ABS, from), (LSH_K, 16)]),
            3 => to.extend([
                (LD_B_ABS, from + 2),
                (LSH_K, 8),
                (ST, 1),
                (LD_H_ABS, from),
                (LSH_K, 16),
                (LDX_MEM, 1),
                (OR_X, 0),
            ]),
            _ => to.push(LD_W_ABS, from),
        }
        to.extend([(LDX_MEM, 0), (XOR_X, 0), (MUL_K, KEY_WORD)]);
        fold(to, 13);
        to.push(ST, 0);
    }
    to.extend([(LD_MEM, 0), (MUL_K, KEY_LAST)]);
    fold(to, 16);
}

#[cfg(test)]
mod tests {
    use manylane_test_support::interpret;

    use super::super::policy::Slot;

    use super::*;

    /// The slot that the search for a bucket finds.
    fn found(code: &[Insn], bucket: usize) -> Slot {
        interpret(code, &[], bucket as u32)
    }

    fn selection(layout: &Layout) -> Vec<Insn> {
        let mut code = vec![cbpf::insn(RET_K, 0); INSNS_MAX];
        let mut to = Assembler::new(&mut code);
        to.push(LD_W_ABS, AD_CPU);
        select_bucket(&mut to, layout);
        to.finish().unwrap().to_vec()
    }

    /// Lanes that come and go leave a table whose neighbours differ.
    #[test]
    fn the_search_finds_the_slot_of_every_bucket() {
        let mut layout = Layout::new(Steering::Flow);
        for slot in 0..=255 {
            layout.admit(slot, None);
        }
        for turn in 0..600 {
            let slot = turn * 7 % 256;
            layout.retire(slot);
            if turn % 3 > 0 {
                layout.admit(slot, None);
            }
        }
        let code = selection(&layout);
        for at in 0..TABLE_SIZE {
            assert_eq!(found(&code, at), layout.entry(at), "bucket {at}");
        }
    }

    #[test]
    fn the_lane_of_a_cpu_is_found_by_a_short_program() {
        let mut layout = Layout::new(Steering::Cpu);
        for slot in 0..32 {
            // Half of them are pinned, two of these to the same CPU.
            layout.admit(slot, slot.is_multiple_of(2).then_some(if slot == 4 { 2 } else { slot as usize }));
        }
        let code = compile(Steering::Cpu, &layout);
        for cpu in 0..TABLE_SIZE {
            assert_eq!(interpret(&code, &[], cpu as u32), layout.entry(cpu), "CPU {cpu}");
        }
        // Each becomes at most two of the kernel's own, of eight bytes, and 20 KB are allowed.
        assert!(code.len() < 200, "{}", code.len());
    }

    /// Linux 6.1 accepts 20 KB of its own instructions, of eight bytes. A load from the packet
    /// becomes up to ten of them, and any other instruction one.
    #[test]
    fn the_worst_table_is_small_enough_for_old_kernels() {
        let key = Steering::Key { offset: 0, len: 63 };
        let mut layout = Layout::new(key);
        (0..=255).for_each(|slot| layout.admit(slot, None));
        for turn in 0..200 {
            layout.retire(turn);
            layout.admit(turn, None);
        }
        let code = compile(key, &layout);
        let is_load = |insn: &&Insn| [LD_W_ABS, LD_H_ABS, LD_B_ABS].contains(&insn.code);
        let loads = code.iter().filter(is_load).count();
        assert!(8 * (code.len() + 9 * loads) < 16 << 10, "{}, of which {loads} load", code.len());
    }
}
