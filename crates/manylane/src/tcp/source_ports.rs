//! The source ports of connections to others: blocks that the kernel does not hand out.
//!
//! The kernel picks ports of `net.ipv4.ip_local_port_range` that are not in
//! `net.ipv4.ip_local_reserved_ports`. Blocks within that range are added to the reserved ports,
//! and removed when the lanes are closed. A process that is killed leaves them there, which costs
//! nothing but the ports. Nothing keeps a program from binding such a port by its number.

use std::fs;
use std::ops::RangeInclusive;

use manylane_bpf::abi::PORT_BLOCK;

use crate::error::{Error, ErrorKind, Result};

const PORT_RANGE: &str = "/proc/sys/net/ipv4/ip_local_port_range";
const RESERVED_PORTS: &str = "/proc/sys/net/ipv4/ip_local_reserved_ports";

/// Ports as the kernel writes them: ranges in order.
type Ranges = Vec<RangeInclusive<u16>>;

/// Blocks of ports that the kernel does not hand out.
#[derive(Debug, Default)]
pub(super) struct SourcePorts {
    /// The first port of each.
    pub(super) blocks: Vec<u16>,
    /// Those that were added to the reserved ports.
    added: Ranges,
}

impl SourcePorts {
    /// Reserves the whole blocks within `ports`.
    pub(super) fn reserve(ports: &RangeInclusive<u16>) -> Result<Self> {
        let blocks: Vec<u16> = (0..=u16::MAX / PORT_BLOCK)
            .map(|block| block * PORT_BLOCK)
            .filter(|first| ports.contains(first) && ports.contains(&(first + (PORT_BLOCK - 1))))
            .collect();
        let (Some(first), Some(last)) = (blocks.first(), blocks.last()) else {
            let message = format!(
                "source_ports {}-{}: expected {PORT_BLOCK} ports or more that begin at a multiple of {PORT_BLOCK}",
                ports.start(),
                ports.end()
            );
            return Err(Error::new(ErrorKind::Config, message));
        };
        let wanted = *first..=last + (PORT_BLOCK - 1);
        let read = |path: &str| {
            fs::read_to_string(path).map_err(|err| Error::system(format!("reading {path}"), err))
        };
        let reserved = parse_ranges(&read(RESERVED_PORTS)?);
        if !overlaps(&wanted, &read(PORT_RANGE)?) || reserved.iter().any(|range| has(range, &wanted)) {
            return Ok(Self { blocks, added: Vec::new() });
        }
        let more = reserved.iter().cloned().chain([wanted.clone()]).collect();
        fs::write(RESERVED_PORTS, format_ranges(&more)).map_err(|err| {
            let message = format!(
                "source_ports {0}-{1} are among those that the kernel hands out (net.ipv4.ip_local_port_range), and cannot be reserved: use other ports, or 'sysctl -w net.ipv4.ip_local_reserved_ports={0}-{1}'",
                wanted.start(),
                wanted.end()
            );
            Error::with(ErrorKind::Permission, message, err)
        })?;
        Ok(Self { blocks, added: vec![wanted] })
    }

    /// The blocks of one lane of `lanes`.
    pub(super) fn of_lane(&self, lane: usize, lanes: usize) -> Vec<u16> {
        self.blocks.iter().copied().skip(lane).step_by(lanes.max(1)).collect()
    }

    /// The lane that has the port, of `lanes`; none if it is in no block.
    pub(super) fn lane_of(blocks: &[u16], port: u16, lanes: usize) -> Option<usize> {
        let (first, last) = (*blocks.first()?, *blocks.last()?);
        let block = port - port % PORT_BLOCK;
        (first..=last).contains(&block).then(|| usize::from((block - first) / PORT_BLOCK) % lanes.max(1))
    }
}

impl Drop for SourcePorts {
    fn drop(&mut self) {
        if self.added.is_empty() {
            return;
        }
        let Ok(text) = fs::read_to_string(RESERVED_PORTS) else { return };
        let left = self.added.iter().fold(parse_ranges(&text), |ranges, added| without(&ranges, added));
        // The kernel takes an empty line for no ports.
        if let Err(err) = fs::write(RESERVED_PORTS, format_ranges(&left) + "\n") {
            log::warn!("ports stay in net.ipv4.ip_local_reserved_ports: {err}");
        }
    }
}

/// Reads the kernel's form: `1,3-5`.
fn parse_ranges(text: &str) -> Ranges {
    let range = |item: &str| {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    text.trim().split(',').filter_map(range).collect()
}

fn format_ranges(ranges: &Ranges) -> String {
    let items = ranges.iter().map(|range| format!("{}-{}", range.start(), range.end()));
    items.collect::<Vec<_>>().join(",")
}

/// True if ports are within the kernel's range, of the form `32768 60999`.
fn overlaps(ports: &RangeInclusive<u16>, range: &str) -> bool {
    let mut bounds = range.split_whitespace().filter_map(|word| word.parse::<u16>().ok());
    let (first, last) = (bounds.next().unwrap_or(0), bounds.next().unwrap_or(u16::MAX));
    *ports.start() <= last && first <= *ports.end()
}

fn has(range: &RangeInclusive<u16>, ports: &RangeInclusive<u16>) -> bool {
    range.contains(ports.start()) && range.contains(ports.end())
}

fn without(ranges: &Ranges, removed: &RangeInclusive<u16>) -> Ranges {
    let cut = |range: &RangeInclusive<u16>| {
        let before = removed.start().checked_sub(1).map(|end| *range.start()..=end.min(*range.end()));
        let behind = removed.end().checked_add(1).map(|start| start.max(*range.start())..=*range.end());
        [before, behind]
    };
    ranges.iter().flat_map(cut).flatten().filter(|range| !range.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_and_written_as_the_kernel_does() {
        assert_eq!(parse_ranges("\n"), [] as [RangeInclusive<u16>; 0]);
        let ranges = parse_ranges("7,10-12,65535\n");
        assert_eq!(ranges, [7..=7, 10..=12, 65_535..=65_535]);
        assert_eq!(format_ranges(&ranges), "7-7,10-12,65535-65535");
    }

    #[test]
    fn added_ports_are_removed_from_a_range_that_grew_around_them() {
        assert_eq!(without(&vec![1..=9], &(4..=5)), [1..=3, 6..=9]);
        assert_eq!(without(&vec![4..=5, 8..=8], &(4..=5)), [8..=8]);
        assert_eq!(without(&vec![0..=65_535], &(0..=65_535)), [] as [RangeInclusive<u16>; 0]);
    }

    #[test]
    fn only_ports_within_the_range_of_the_kernel_have_to_be_reserved() {
        assert!(!overlaps(&(61_184..=65_535), "32768\t60999\n"));
        assert!(overlaps(&(60_928..=61_439), "32768\t60999\n"));
    }

    #[test]
    fn each_block_has_one_lane() {
        let ports = SourcePorts { blocks: vec![61_184, 61_440, 61_696], added: Vec::new() };
        assert_eq!(ports.of_lane(0, 2), [61_184, 61_696]);
        assert_eq!(ports.of_lane(1, 2), [61_440]);
        let lane_of = |port| SourcePorts::lane_of(&ports.blocks, port, 2);
        assert_eq!(
            [61_183, 61_184, 61_439, 61_440, 61_951, 61_952].map(lane_of),
            [None, Some(0), Some(0), Some(1), Some(0), None]
        );
    }
}
