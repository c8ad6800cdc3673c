//! `libmanylane_preload.so`: gives an unmodified UDP server lanes. See docs/run.md and ARCHITECTURE.md, "The shim".

#![allow(dead_code)]

mod settings;
mod sock {
    pub(crate) const MAX_LANES: usize = 64;
}
mod steer;
