//! Layouts shared with the eBPF programs: the Rust side of `abi/manylane_abi.h`.

use std::mem::{offset_of, size_of};

/// Slots of the socket array: the maximum number of open lanes.
pub const LANES_MAX: usize = 256;
/// Entries of the steering table.
pub const TABLE_SIZE: usize = 1024;
/// Maximum number of payload bytes of a key.
pub const KEY_MAX: usize = 64;

/// Index of the counter of messages shorter than the key, which are steered by flow.
pub const STEER_SHORT: u32 = 0;
/// Index of the counter of messages left to the kernel's choice, because there is no such lane.
pub const STEER_KERNEL: u32 = 1;

/// The steering table (`struct ml_table`).
#[derive(Clone, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Table {
    /// Entries in use, 1 to [`TABLE_SIZE`].
    pub size: u32,
    /// Slot of the socket array for each entry. All entries are always valid.
    pub lane: [u32; TABLE_SIZE],
    /// Keeps the size a multiple of eight.
    pub pad: u32,
}

/// Index of `steered` in the 64-bit words of a load (`struct ml_load`).
pub const LOAD_STEERED: usize = 0;
/// Index of `received` in the 64-bit words of a load.
pub const LOAD_RECEIVED: usize = 8;
/// 64-bit words of one load.
pub const LOAD_WORDS: usize = 16;

const _: () = assert!(size_of::<Table>() == 8 + 4 * TABLE_SIZE);
const _: () = assert!(offset_of!(Table, lane) == 4);
const _: () = assert!(TABLE_SIZE.is_power_of_two());

/// Maximum number of queues of a device.
pub const QUEUES_MAX: u32 = 128;
/// Maximum number of sockets that share a device.
pub const SOCKETS_MAX: u32 = 16;

/// A bound address and port (`struct ml_port`), as bytes: mapped IPv6 address, port in network
/// order, protocol, 1 for a block of ports.
pub type PortKey = [u8; 20];
/// UDP in a [`PortKey`] (`IPPROTO_UDP`).
pub const PROTOCOL_UDP: u8 = 17;
/// TCP in a [`PortKey`] (`IPPROTO_TCP`).
pub const PROTOCOL_TCP: u8 = 6;
/// Ports of a block; the first is a multiple of this.
pub const PORT_BLOCK: u16 = 256;
/// An address (`struct ml_addr`); IPv4 is mapped.
pub type AddrKey = [u8; 16];
/// Words of the Bloom filter of a device.
const LOCAL_WORDS: usize = 4;
/// Factor of its hash.
const LOCAL_FACTOR: u32 = 0x9e37_79b1;

/// The device of an XDP program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// Hardware address.
    pub mac: [u8; 6],
    /// A port of TCP is bound.
    pub takes_tcp: bool,
    /// Bytes of the longest frame that an XSK receives.
    pub longest: u32,
    /// A Bloom filter of the addresses in `ml_locals`.
    pub locals: [u64; LOCAL_WORDS],
}

/// A [`Device`] as the value of a map (`struct ml_device`).
pub type DeviceWords = [u64; 2 + LOCAL_WORDS];

impl Device {
    /// Adds an address to the Bloom filter.
    pub fn add_local(&mut self, address: &AddrKey) {
        let words = address.as_chunks().0.iter().map(|word| u32::from_ne_bytes(*word));
        let bit = words.fold(0, |all, word| all ^ word).wrapping_mul(LOCAL_FACTOR) >> 24;
        self.locals[bit as usize / 64] |= 1 << (bit % 64);
    }

    /// The value for the map.
    #[must_use]
    pub fn to_words(&self) -> DeviceWords {
        let ([a, b, c, d, e, f], [g, h, i, j]) = (self.mac, self.longest.to_ne_bytes());
        let [tcp0, tcp1] = u16::from(self.takes_tcp).to_ne_bytes();
        let head = [[a, b, c, d, e, f, tcp0, tcp1], [g, h, i, j, 0, 0, 0, 0]].map(u64::from_ne_bytes);
        let mut words = [0; size_of::<DeviceWords>() / 8];
        words[..2].copy_from_slice(&head);
        words[2..].copy_from_slice(&self.locals);
        words
    }
}

const _: () = assert!(size_of::<DeviceWords>() == 48);

/// Maximum number of limits of a socket.
pub const LIMITS_MAX: usize = 2;
/// Maximum number of prefixes of all sockets on a device.
pub const RULES_MAX: usize = 16_384;
/// Bits of a rule's key before the address: number of the socket, family, padding.
pub const RULE_HEADER_BITS: u32 = 32;
/// Verdict of a rule (`enum ml_rule_value`): admitted past all limits.
pub const ALLOW: u32 = 1;
/// Verdict of a rule: dropped.
pub const DENY: u32 = 2;

/// A limit of each source (`struct ml_limit`): a token bucket, counted in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Limit {
    /// Nanoseconds that a datagram costs; 0 for no limit.
    pub cost: u64,
    /// Nanoseconds that a source may be ahead of the clock.
    pub room: u64,
    /// Masks that reduce an address to its source, in network order: of mapped IPv4, of IPv6.
    pub mask: [[u8; 16]; 2],
}

/// The filter of one socket (`struct ml_filter`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct FilterEntry {
    /// 1 if it has prefixes, else 0.
    pub rules: u32,
    /// Generation of its limits; each generation has its own buckets.
    pub generation: u32,
    /// The limits, that of the widest prefix first.
    pub limit: [Limit; LIMITS_MAX],
}

/// A [`FilterEntry`] as the value of a map.
pub type FilterWords = [u64; 1 + 6 * LIMITS_MAX];

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
        let mut words = [0; 1 + 6 * LIMITS_MAX];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        words
    }
}

/// The data of a rule's key (`struct ml_rule` behind its number of bits): socket, family, zeroes,
/// address.
pub type RuleKey = [u8; 20];
/// Datagrams of a socket that its filter dropped (`struct ml_filter_drops`): denied, limited.
pub type FilterDropWords = [u64; 2];

const _: () = assert!(size_of::<Limit>() == 48);
const _: () = assert!(offset_of!(Limit, mask) == 16);
const _: () = assert!(size_of::<FilterEntry>() == 8 + 48 * LIMITS_MAX);
const _: () = assert!(offset_of!(FilterEntry, limit) == 8);
const _: () = assert!(size_of::<FilterWords>() == size_of::<FilterEntry>());

/// Kind of a hint (`enum ml_rx_hint_kind`): the bit that every hint has.
pub const RX_HINT: u8 = 1;
/// Kind of a hint: bytes before the payload of an IPv4 frame.
pub const RX_HINT_V4: u8 = 42;
/// Kind of a hint: bytes before the payload of an IPv6 frame.
pub const RX_HINT_V6: u8 = 62;
/// Kind of a hint: the bits of [`RX_HINT_V4`] and [`RX_HINT_V6`].
pub const RX_HINT_HEADERS_MASK: u8 = 62;
/// Kind of a hint: the checksum is only that of the pseudo header.
pub const RX_HINT_PARTIAL: u8 = 64;
/// Bytes of a hint (`struct ml_rx_hint`).
pub const RX_HINT_LEN: usize = 4;
/// Length of the longest UDP datagram, with its header, that gets a hint.
pub const RX_HINT_UDP_MAX: u16 = 72;

/// The XDP program's counters (`enum ml_xdp_count`), by index: redirected frames, and reasons for
/// which frames were left to the kernel or dropped. Each has its name and its documentation.
pub const XDP_COUNTS: [(&str, &str); 12] = [
    ("redirected", "Redirected to the queue of a lane."),
    ("other_mac", "Left to the kernel: not to the device's own hardware address."),
    ("other_vlan", "Left to the kernel: a VLAN that the socket does not name."),
    ("not_udp", "Left to the kernel: not IP, not UDP (or TCP, if lanes take it), or headers cut off."),
    ("fragment_or_options", "Left to the kernel: a fragment, IPv4 options, or IPv6 extension headers."),
    ("partial_checksum", "Left to the kernel: the checksum looks partial, so it may be a GSO message."),
    ("no_port", "Left to the kernel: no socket has the address and port."),
    ("bad_source", "Left to the kernel: from an address that cannot be answered, or of this machine."),
    ("too_long", "Left to the kernel, or dropped if TCP: longer than a lane's queue receives."),
    ("no_lane", "Left to the kernel, or dropped if TCP: no lane serves the queue."),
    ("denied", "Dropped by the filter: from a denied prefix."),
    ("limited", "Dropped by the filter: over a limit."),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_written_as_the_program_reads_it() {
        let mut device =
            Device { mac: [1, 2, 3, 4, 5, 6], takes_tcp: true, longest: 0x0102_0304, ..Device::default() };
        let mut address: AddrKey = [0; 16];
        device.add_local(&address);
        assert_eq!(device.locals, [1, 0, 0, 0]);
        // The product is 0x9e3779b1, of which the upper byte is 158.
        address[..4].copy_from_slice(&1_u32.to_ne_bytes());
        device.add_local(&address);
        assert_eq!(device.locals, [1, 0, 1 << (158 - 128), 0]);
        let bytes = device.to_words().map(u64::to_ne_bytes).concat();
        assert_eq!(bytes[..6], [1, 2, 3, 4, 5, 6]);
        assert_eq!(bytes[6..8], 1_u16.to_ne_bytes());
        assert_eq!(bytes[8..12], 0x0102_0304_u32.to_ne_bytes());
        assert_eq!(bytes[16..24], 1_u64.to_ne_bytes());
    }
}
