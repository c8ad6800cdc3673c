//! The eBPF programs of Manylane, compiled by this crate's build script, and the layouts that they
//! share with Rust (`abi/manylane_abi.h`; both sides assert every offset).

pub mod abi;

/// Includes a file with the alignment that an ELF parser needs.
macro_rules! aligned {
    ($path:expr) => {{
        #[repr(align(16))]
        struct Aligned<T: ?Sized>(T);
        static OBJECT: &Aligned<[u8]> = &Aligned(*include_bytes!($path));
        &OBJECT.0
    }};
}

include!(concat!(env!("OUT_DIR"), "/objects.rs"));

/// The compiled object of `bpf/NAME.bpf.c`.
///
/// # Errors
/// The reason why it is not there: this build had no clang, or there is no such program.
pub fn object(name: &str) -> Result<&'static [u8], String> {
    compiled(name).ok_or_else(|| match WHY_MISSING {
        Some(why) => format!("this build has no eBPF programs: {}", why.lines().next().unwrap_or(why)),
        None => format!("there is no eBPF program called {name}"),
    })
}
