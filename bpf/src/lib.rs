//! The eBPF programs of Manylane, compiled (`bpf/objects`, by `make bpf`), and the layouts that
//! they share with Rust (`abi/manylane_abi.h`; both sides assert every offset).

// Numbers here are those of the eBPF programs: no cast may change them silently.
#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_possible_wrap)
)]

pub mod abi;

/// The object of `bpf/NAME.bpf.c`, with the alignment that an ELF parser needs.
macro_rules! object {
    ($name:literal) => {{
        #[repr(align(16))]
        struct Aligned<T: ?Sized>(T);
        static OBJECT: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!("../objects/", $name, ".bpf.o")));
        &OBJECT.0
    }};
}

/// Steering: which lane of a reuseport group a datagram goes to.
pub static STEER: &[u8] = object!("steer");
/// Engine `xdp`: which frames go to lanes.
pub static XDP: &[u8] = object!("xdp");
/// Of benchmarks: takes every frame of a queue to an XSK.
pub static REDIRECT: &[u8] = object!("redirect");
/// Of benchmarks: sends frames.
pub static GENERATOR: &[u8] = object!("generator");
/// Of benchmarks: counts replies.
pub static REPLIES: &[u8] = object!("replies");
/// Of benchmarks: counts what contends for locks of the kernel.
pub static LOCKS: &[u8] = object!("locks");
