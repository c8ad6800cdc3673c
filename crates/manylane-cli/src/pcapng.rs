//! Writes capture files in pcapng format, as far as captures of lanes need it.
//!
//! There are four kinds of blocks, each with some numbers and options. No crate is used, because
//! `pcap-file` allocates for each option of each packet, and using it would take more code than
//! this. The tests read the files with `pcap-parser`, an independent implementation.
//!
//! The format: <https://datatracker.ietf.org/doc/draft-ietf-opsawg-pcapng/>. All numbers are
//! little-endian.

use std::io::{self, Write};

const SECTION: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const STATISTICS: u32 = 5;
const PACKET: u32 = 6;

/// Identifies the byte order.
const BYTE_ORDER_MAGIC: u32 = 0x1a2b_3c4d;
/// `LINKTYPE_ETHERNET`
const LINKTYPE_ETHERNET: u16 = 1;

/// Option codes. Each kind of block has its own.
const COMMENT: u16 = 1;
const SECTION_PROGRAM: u16 = 4;
const INTERFACE_NAME: u16 = 2;
const INTERFACE_DESCRIPTION: u16 = 3;
const INTERFACE_TSRESOL: u16 = 9;
const PACKET_FLAGS: u16 = 2;
const PACKET_QUEUE: u16 = 6;
const STATISTICS_START: u16 = 2;
const STATISTICS_END: u16 = 3;
const STATISTICS_RECEIVED: u16 = 4;
const STATISTICS_DROPPED: u16 = 5;
const STATISTICS_DELIVERED: u16 = 8;

/// Time stamps count 10^-9 seconds.
const TSRESOL_NANOSECONDS: u8 = 9;

/// One packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packet<'a> {
    /// The number of its interface; the first one written is 0.
    pub(crate) interface: u32,
    /// Nanoseconds since 1970.
    pub(crate) time: u64,
    pub(crate) is_sent: bool,
    pub(crate) queue: u32,
    pub(crate) comment: &'a str,
    /// Original length in bytes.
    pub(crate) len: u32,
    pub(crate) bytes: &'a [u8],
}

/// Statistics of an interface, written at the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Statistics {
    /// Nanoseconds since 1970.
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// Packets captured.
    pub(crate) captured: u64,
    /// Packets lost by the capture.
    pub(crate) dropped: u64,
}

/// The writer of a file.
pub(crate) struct Writer<W> {
    out: W,
    snaplen: u32,
    /// The block that is being built.
    block: Vec<u8>,
}

impl<W: Write> Writer<W> {
    /// Begins a file whose packets have at most `snaplen` bytes.
    pub(crate) fn new(to: W, snaplen: u32) -> io::Result<Self> {
        let mut writer = Self { out: to, snaplen, block: Vec::with_capacity(2048) };
        writer.write_u32(BYTE_ORDER_MAGIC);
        writer.block.extend_from_slice(&[1, 0, 0, 0]); // version 1.0
        writer.block.extend_from_slice(&[0xff; 8]); // of a length that is not known
        writer.write_option(SECTION_PROGRAM, concat!("manylane ", env!("CARGO_PKG_VERSION")).as_bytes());
        writer.finish_block(SECTION)?;
        Ok(writer)
    }

    /// Announces an interface.
    pub(crate) fn write_interface(&mut self, name: &str, description: &str) -> io::Result<()> {
        self.write_u32(u32::from(LINKTYPE_ETHERNET));
        self.write_u32(self.snaplen);
        self.write_option(INTERFACE_NAME, name.as_bytes());
        self.write_option(INTERFACE_DESCRIPTION, description.as_bytes());
        self.write_option(INTERFACE_TSRESOL, &[TSRESOL_NANOSECONDS]);
        self.finish_block(INTERFACE)
    }

    /// Writes a packet.
    pub(crate) fn write_packet(&mut self, packet: &Packet<'_>) -> io::Result<()> {
        self.write_u32(packet.interface);
        self.write_timestamp(packet.time);
        self.write_u32(packet.bytes.len() as u32);
        self.write_u32(packet.len);
        self.write_padded(packet.bytes);
        self.write_option(PACKET_FLAGS, &if packet.is_sent { 2_u32 } else { 1 }.to_le_bytes());
        self.write_option(PACKET_QUEUE, &packet.queue.to_le_bytes());
        self.write_option(COMMENT, packet.comment.as_bytes());
        self.finish_block(PACKET)
    }

    /// Writes the statistics of an interface.
    pub(crate) fn write_statistics(&mut self, interface: u32, known: &Statistics) -> io::Result<()> {
        self.write_u32(interface);
        self.write_timestamp(known.end);
        for (code, time) in [(STATISTICS_START, known.start), (STATISTICS_END, known.end)] {
            let halves = [((time >> 32) as u32).to_le_bytes(), (time as u32).to_le_bytes()];
            self.write_option(code, halves.as_flattened());
        }
        for (code, count) in [
            // The captured process counts what was dropped.
            (STATISTICS_RECEIVED, known.captured.saturating_add(known.dropped)),
            (STATISTICS_DROPPED, known.dropped),
            (STATISTICS_DELIVERED, known.captured),
        ] {
            self.write_option(code, &count.to_le_bytes());
        }
        self.finish_block(STATISTICS)
    }

    /// Flushes the output.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    fn write_u32(&mut self, number: u32) {
        self.block.extend_from_slice(&number.to_le_bytes());
    }

    fn write_timestamp(&mut self, time: u64) {
        self.write_u32((time >> 32) as u32);
        self.write_u32(time as u32);
    }

    fn write_padded(&mut self, bytes: &[u8]) {
        self.block.extend_from_slice(bytes);
        self.block.resize(self.block.len().next_multiple_of(4), 0);
    }

    fn write_option(&mut self, code: u16, bytes: &[u8]) {
        let bytes = &bytes[..bytes.len().min(usize::from(u16::MAX))];
        self.block.extend_from_slice(&code.to_le_bytes());
        self.block.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
        self.write_padded(bytes);
    }

    /// Writes the block of type `kind`, with its length at both ends and the end-of-options
    /// marker.
    fn finish_block(&mut self, kind: u32) -> io::Result<()> {
        self.write_u32(0);
        let len = (self.block.len() as u32 + 12).to_le_bytes();
        let written = [&kind.to_le_bytes()[..], &len, &self.block, &len]
            .into_iter()
            .try_for_each(|part| self.out.write_all(part));
        self.block.clear();
        written
    }
}

#[cfg(test)]
#[path = "../tests/cli/blocks.rs"]
mod blocks;

#[cfg(test)]
mod tests {
    use pcap_parser::{Block, OptionCode, PcapNGOption};

    use super::*;

    fn option<'a>(options: &'a [PcapNGOption<'_>], code: u16) -> &'a [u8] {
        let found: Vec<_> = options.iter().filter(|option| option.code == OptionCode(code)).collect();
        assert_eq!(found.len(), 1, "option {code}");
        &found[0].value[..usize::from(found[0].len)]
    }

    /// A file as text, as read by another implementation.
    fn read(file: &[u8]) -> Vec<String> {
        let mut found = Vec::new();
        blocks::for_each(file, |block| {
            found.push(match block {
                Block::SectionHeader(block) => {
                    assert!(!block.big_endian());
                    let program = option(&block.options, SECTION_PROGRAM);
                    assert!(program.starts_with(b"manylane "));
                    format!("section {}.{}", block.major_version, block.minor_version)
                }
                Block::InterfaceDescription(block) => {
                    let name = String::from_utf8_lossy(option(&block.options, INTERFACE_NAME)).into_owned();
                    assert_eq!(option(&block.options, INTERFACE_DESCRIPTION), b"what it is");
                    assert_eq!(block.ts_resolution(), Some(1_000_000_000));
                    format!("interface {name} {} {}", block.linktype.0, block.snaplen)
                }
                Block::EnhancedPacket(block) => {
                    let time = u64::from(block.ts_high) << 32 | u64::from(block.ts_low);
                    let flags = option(&block.options, PACKET_FLAGS);
                    let queue = option(&block.options, PACKET_QUEUE);
                    let comment = String::from_utf8_lossy(option(&block.options, COMMENT)).into_owned();
                    let bytes = &block.data[..block.caplen as usize];
                    format!(
                        "packet {} {time} {flags:?} {queue:?} {comment} {} {bytes:?}",
                        block.if_id, block.origlen
                    )
                }
                Block::InterfaceStatistics(block) => {
                    let number = |code| u64::from_le_bytes(option(&block.options, code).try_into().unwrap());
                    let counts = [STATISTICS_RECEIVED, STATISTICS_DROPPED, STATISTICS_DELIVERED];
                    let time = u64::from(block.ts_high) << 32 | u64::from(block.ts_low);
                    assert_eq!(number(STATISTICS_END).rotate_left(32), time);
                    format!(
                        "statistics {} {time} {} {:?}",
                        block.if_id,
                        number(STATISTICS_START).rotate_left(32),
                        counts.map(number)
                    )
                }
                other => panic!("another block: {other:?}"),
            });
        });
        found
    }

    #[test]
    fn journal_entries_are_visible_to_other_readers() {
        let time = 1_700_000_000_123_456_789;
        let mut file = Vec::new();
        let mut writer = Writer::new(&mut file, 96).unwrap();
        writer.write_interface("eth0", "what it is").unwrap();
        writer.write_interface("a-longer-one", "what it is").unwrap();
        let packet = Packet {
            interface: 1,
            time,
            is_sent: false,
            queue: 3,
            comment: "lane 12",
            len: 70_000,
            bytes: b"\x01\x02\x03\x04\x05",
        };
        for len in 0..=4 {
            let bytes = &packet.bytes[..len];
            writer.write_packet(&Packet { is_sent: len % 2 == 1, bytes, ..packet }).unwrap();
        }
        let known = Statistics { start: time, end: time + 5, captured: 5, dropped: u64::from(u32::MAX) + 1 };
        writer.write_statistics(1, &known).unwrap();
        writer.write_statistics(1, &Statistics { dropped: u64::MAX, ..known }).unwrap();
        writer.flush().unwrap();
        let expected = [
            "section 1.0".into(),
            "interface eth0 1 96".into(),
            "interface a-longer-one 1 96".into(),
            format!("packet 1 {time} [1, 0, 0, 0] [3, 0, 0, 0] lane 12 70000 []"),
            format!("packet 1 {time} [2, 0, 0, 0] [3, 0, 0, 0] lane 12 70000 [1]"),
            format!("packet 1 {time} [1, 0, 0, 0] [3, 0, 0, 0] lane 12 70000 [1, 2]"),
            format!("packet 1 {time} [2, 0, 0, 0] [3, 0, 0, 0] lane 12 70000 [1, 2, 3]"),
            format!("packet 1 {time} [1, 0, 0, 0] [3, 0, 0, 0] lane 12 70000 [1, 2, 3, 4]"),
            format!("statistics 1 {} {time} [4294967301, 4294967296, 5]", time + 5),
            format!("statistics 1 {} {time} [{max}, {max}, 5]", time + 5, max = u64::MAX),
        ];
        assert_eq!(read(&file), expected);
    }
}
