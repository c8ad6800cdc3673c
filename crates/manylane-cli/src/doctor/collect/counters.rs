//! Losses in the kernel: its counters of UDP and of each CPU's receive work.

use std::collections::BTreeMap;

use super::super::facts::{Facts, Softnet, Udp};
use super::files::FileTree;

pub(crate) fn collect(files: &FileTree, facts: &mut Facts) {
    facts.losses.udp4 = files.text("proc/net/snmp").as_deref().and_then(udp4);
    facts.losses.udp6 = files.text("proc/net/snmp6").as_deref().and_then(udp6);
    if facts.losses.udp4.is_none() {
        facts.note_gap("udp", "/proc/net/snmp cannot be read");
    }
    match files.text("proc/net/softnet_stat") {
        Some(text) => facts.losses.softnet = softnet(&text),
        None => facts.note_gap("softnet", "/proc/net/softnet_stat cannot be read"),
    }
}

/// Parses two lines that begin with `Udp:`: names, then values.
fn udp4(text: &str) -> Option<Udp> {
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Udp:"));
    let (names, values) = (lines.next()?, lines.next()?);
    let fields: BTreeMap<&str, u64> = names
        .split_whitespace()
        .zip(values.split_whitespace().map(|value| value.parse().unwrap_or(0)))
        .collect();
    Some(udp(|name| fields.get(name).copied()))
}

/// A line for each counter.
fn udp6(text: &str) -> Option<Udp> {
    let fields: BTreeMap<&str, u64> = text
        .lines()
        .filter_map(|line| line.strip_prefix("Udp6")?.split_once(char::is_whitespace))
        .filter_map(|(name, value)| Some((name, value.trim().parse().ok()?)))
        .collect();
    (!fields.is_empty()).then(|| udp(|name| fields.get(name).copied()))
}

fn udp(field: impl Fn(&str) -> Option<u64>) -> Udp {
    let field = |name| field(name).unwrap_or(0);
    Udp {
        in_datagrams: field("InDatagrams"),
        in_errors: field("InErrors"),
        receive_buffer: field("RcvbufErrors"),
        checksum: field("InCsumErrors"),
        memory: field("MemErrors"),
    }
}

/// A row for each online CPU, in hexadecimal: processed, dropped, out of budget or time, ….
/// The 13th value is the CPU (Linux 5.10; on older kernels, rows are counted).
fn softnet(text: &str) -> Vec<Softnet> {
    let row = |(at, line): (usize, &str)| {
        let fields: Vec<u64> =
            line.split_whitespace().map_while(|field| u64::from_str_radix(field, 16).ok()).collect();
        let &[processed, dropped, squeezed, ..] = fields.as_slice() else { return None };
        let cpu = fields.get(12).map_or(at, |&cpu| cpu as usize);
        Some(Softnet { cpu, processed, dropped, squeezed })
    };
    text.lines().enumerate().filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_read_by_their_names() {
        let text = "Ip: Forwarding\nIp: 1\n\
            Udp: InDatagrams NoPorts InErrors OutDatagrams RcvbufErrors SndbufErrors InCsumErrors IgnoredMulti MemErrors\n\
            Udp: 100 1 10 200 7 0 2 0 1\nUdpLite: InDatagrams\nUdpLite: 0\n";
        let expected = Udp { in_datagrams: 100, in_errors: 10, receive_buffer: 7, checksum: 2, memory: 1 };
        assert_eq!(udp4(text), Some(expected));
        let text = "Ip6InReceives  \t1\nUdp6InDatagrams                 \t100\nUdp6InErrors \t10\n\
            Udp6RcvbufErrors\t7\nUdp6InCsumErrors 2\nUdp6MemErrors 1\nUdpLite6InDatagrams 3\n";
        assert_eq!(udp6(text), Some(expected));
        assert_eq!((udp4("Udp: A B"), udp4(""), udp6("Ip6InReceives 1")), (None, None, None));
        // Fewer values than names: an older kernel, or a truncated line.
        assert_eq!(udp4("Udp: InDatagrams RcvbufErrors\nUdp: 5").map(|udp| udp.in_datagrams), Some(5));
    }

    #[test]
    fn rows_of_cpus() {
        let text = "00000010 00000002 00000003 0 0 0 0 0 0 0 0 00000000 00000000 0 0\n\
                    000013cd 00000000 00000000 0 0 0 0 0 0 0 0 00000000 00000003 0 0\n";
        let rows = softnet(text);
        assert_eq!(rows[0], Softnet { cpu: 0, processed: 16, dropped: 2, squeezed: 3 });
        assert_eq!(rows[1], Softnet { cpu: 3, processed: 0x13cd, dropped: 0, squeezed: 0 });
        assert_eq!(softnet("1 2 3 4\n5 6 7 8\n").iter().map(|row| row.cpu).collect::<Vec<_>>(), [0, 1]);
        assert!(softnet("\nx\n1 2\n").is_empty());
    }
}
