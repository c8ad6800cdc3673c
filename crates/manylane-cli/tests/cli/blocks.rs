//! Blocks of a capture, as another reader of the format finds them.

use pcap_parser::traits::PcapReaderIterator;
use pcap_parser::{Block, PcapBlockOwned, PcapError, PcapNGReader};

/// Hands each block of `file` to `each`, which has to be a whole capture.
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
