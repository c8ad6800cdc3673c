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

/// A bound address and port (`struct ml_port`), as bytes: mapped IPv6 address, port in network
/// order, zeroes.
pub type PortKey = [u8; 20];
/// An address (`struct ml_addr`); IPv4 is mapped.
pub type AddrKey = [u8; 16];
/// What the XDP program knows of its device (`struct ml_device`): hardware address, and the longest
/// frame in bytes.
pub type DeviceBytes = [u8; 12];

/// Limits that one socket may have at a time.
pub const MAX_LIMITS: usize = 2;
/// Prefixes that the sockets of one device can have together.
pub const MAX_RULES: usize = 16_384;
/// Bits in front of the address in the key of a rule: number of the socket, family.
pub const RULE_HEADER_BITS: u32 = 32;
/// What a rule says (`enum ml_rule_value`).
pub const ALLOW: u32 = 1;
/// What a rule says: dropped.
pub const DENY: u32 = 2;

/// A limit (`struct ml_limit`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Limit {
    /// Nanoseconds that a datagram costs; 0 for no limit.
    pub cost: u64,
    /// How far a source may be ahead of its time.
    pub room: u64,
    /// What makes a source of an address, in network order: of IPv4, mapped, and of IPv6.
    pub mask: [[u8; 16]; 2],
}

/// What one socket lets in (`struct ml_filter`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct FilterEntry {
    /// Whether it has prefixes.
    pub rules: u32,
    /// Of its limits: those before had other buckets.
    pub generation: u32,
    /// The widest first.
    pub limit: [Limit; MAX_LIMITS],
}

/// A [`FilterEntry`] as the map takes it.
pub type FilterWords = [u64; 1 + 6 * MAX_LIMITS];

impl FilterEntry {
    /// The bytes of the C structure, as words.
    #[must_use]
    pub fn to_words(&self) -> FilterWords {
        let mut bytes = [0; size_of::<Self>()];
        bytes[..4].copy_from_slice(&self.rules.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.generation.to_ne_bytes());
        for (limit, at) in self.limit.iter().zip((8..).step_by(size_of::<Limit>())) {
            bytes[at..at + 8].copy_from_slice(&limit.cost.to_ne_bytes());
            bytes[at + 8..at + 16].copy_from_slice(&limit.room.to_ne_bytes());
            bytes[at + 16..at + 32].copy_from_slice(&limit.mask[0]);
            bytes[at + 32..at + 48].copy_from_slice(&limit.mask[1]);
        }
        let mut words = [0; 1 + 6 * MAX_LIMITS];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        words
    }
}

/// The data of a rule's key (`struct ml_rule` behind its number of bits): socket, family, zeroes,
/// address.
pub type RuleKey = [u8; 20];
/// What of a socket's was dropped (`struct ml_filter_drops`): denied, limited.
pub type FilterDropWords = [u64; 2];

const _: () = assert!(size_of::<Limit>() == 48);
const _: () = assert!(offset_of!(Limit, mask) == 16);
const _: () = assert!(size_of::<FilterEntry>() == 8 + 48 * MAX_LIMITS);
const _: () = assert!(offset_of!(FilterEntry, limit) == 8);
const _: () = assert!(size_of::<FilterWords>() == size_of::<FilterEntry>());

/// What the XDP program says of a frame (`enum ml_rx_hint_kind`): that it says something; how many
/// bytes of it are before the payload, by which IPv4 is told from IPv6; that its checksum is
/// unfinished.
pub const RX_HINT: u8 = 1;
/// See [`RX_HINT`].
pub const RX_HINT_V4: u8 = 42;
/// See [`RX_HINT`].
pub const RX_HINT_V6: u8 = 62;
/// See [`RX_HINT`]. The bits that such a number can have.
pub const RX_HINT_HEADERS_MASK: u8 = 62;
/// See [`RX_HINT`].
pub const RX_HINT_PARTIAL: u8 = 64;
/// Bytes of a hint (`struct ml_rx_hint`).
pub const RX_HINT_LEN: usize = 4;
/// The longest UDP datagram, with its header, of which something is said.
pub const RX_HINT_UDP_MAX: u16 = 72;

/// Why the XDP program left a frame to the kernel or dropped it, or that it did neither: indices of
/// its counters.
pub const XDP_COUNTS: [&str; 12] = [
    "redirected",
    "other_mac",
    "vlan",
    "not_udp",
    "complex",
    "unfinished",
    "no_port",
    "source",
    "long",
    "no_lane",
    "denied",
    "limited",
];
