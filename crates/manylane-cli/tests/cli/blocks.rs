//! Blocks of a capture, read by an independent parser of the format.

use pcap_parser::traits::PcapReaderIterator;
use pcap_parser::{Block, PcapBlockOwned, PcapError, PcapNGReader};

/// Calls `each` with each block of `file`, which must be a complete capture.
pub(crate) fn for_each(file: &[u8], mut each: impl FnMut(Block<'_>)) {
    let mut reader = PcapNGReader::new(1 << 17, file).unwrap();
    loop {
        let offset = match reader.next() {
            Ok((offset, PcapBlockOwned::NG(block))) => {
                each(block);
                offset
            }
            Ok(_) => panic!("an older format"),
            Err(PcapError::Eof) => return,
            Err(PcapError::Incomplete(_)) => {
                reader.refill().unwrap();
                continue;
            }
            Err(err) => panic!("{err}"),
        };
        reader.consume(offset);
    }
}
