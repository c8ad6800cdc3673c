//! Decisions that the library and the preload library share.
//!
//! A decision follows from numbers that the caller passes: sizes of batches, lanes, CPUs. The
//! caller acts on it and counts its effects. Nothing here uses the heap, because the preload
//! library also decides in signal handlers. The only system calls are those of `manylane-sys`, to
//! measure the machine once.
//!
//! | module | decides |
//! |---|---|
//! | [`cpu_load`] | how busy CPUs are |
//! | [`rx_coalesce`] | whether and how long a lane delays for a larger batch |

#![forbid(unsafe_code)]

pub mod cpu_load;
pub mod rx_coalesce;
