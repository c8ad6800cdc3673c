//! Layouts shared with the eBPF programs: the Rust side of `abi/manylane_abi.h`.

use std::mem::{offset_of, size_of};

/// Slots of the socket array: lanes that can be open at one time.
pub const MAX_LANES: usize = 256;
/// Entries of the steering table.
pub const TABLE_SIZE: usize = 1024;
/// Bytes of payload that a key can span.
pub const MAX_KEY: usize = 64;

/// Index of the counter "payload shorter than the key: steered by flow".
pub const STEER_SHORT: u32 = 0;
/// Index of the counter "left to the kernel's choice: no such lane".
pub const STEER_KERNEL: u32 = 1;

/// The steering table (`struct ml_table`).
#[derive(Clone, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Table {
    /// Entries in use, 1 to [`TABLE_SIZE`].
    pub size: u32,
    /// Entry to slot of the socket array; all of them are always filled.
    pub lane: [u32; TABLE_SIZE],
    /// Keeps the size a multiple of eight.
    pub pad: u32,
}

/// Load of one lane (`struct ml_load`), in 64-bit words: index of `steered`.
pub const LOAD_STEERED: usize = 0;
/// Index of `taken` in the 64-bit words of a load.
pub const LOAD_TAKEN: usize = 8;
/// 64-bit words of one load.
pub const LOAD_WORDS: usize = 16;

const _: () = assert!(size_of::<Table>() == 8 + 4 * TABLE_SIZE);
const _: () = assert!(offset_of!(Table, lane) == 4);
const _: () = assert!(TABLE_SIZE.is_power_of_two());

/// Queues of one device that XDP serves.
pub const MAX_QUEUES: u32 = 128;
/// Sockets that may share a device.
pub const MAX_SOCKETS: u32 = 16;

/// A bound address and port (`struct ml_port`), as bytes: mapped IPv6 address, port in network order, zeroes.
pub type PortKey = [u8; 20];
/// An address (`struct ml_addr`); IPv4 is mapped.
pub type AddrKey = [u8; 16];
/// What the XDP program knows of its device (`struct ml_device`): hardware address, and the longest frame in bytes.
pub type DeviceWords = [u8; 12];

/// Why the XDP program left a frame to the kernel, or that it did not: indices of its counters.
pub const XDP_COUNTS: [&str; 9] =
    ["redirected", "other_mac", "vlan", "not_udp", "complex", "no_port", "source", "long", "no_lane"];
