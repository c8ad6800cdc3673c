//! Segments as scripts write them: `P. 1:101(100) ack 1 win 512 <TS 5 *>`.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};

use manylane_wire::checksum::Sum;
use manylane_wire::ipv4::{self, Ipv4, Ipv4Header};
use manylane_wire::ipv6::{self, Ipv6, Ipv6Header};
use manylane_wire::tcp::{CHECKSUM_OFFSET, Flags, Options, PROTOCOL, Tcp, TcpHeader};

use crate::output::pattern;

const FLAGS: [(char, Flags); 8] = [
    ('F', Flags::FIN),
    ('S', Flags::SYN),
    ('R', Flags::RST),
    ('P', Flags::PSH),
    ('U', Flags::URG),
    ('E', Flags::ECE),
    ('C', Flags::CWR),
    ('.', Flags::ACK),
];

/// A segment. Numbers are relative to the initial ones. In an expectation, fields that are `None`
/// match all values.
#[derive(Clone, Debug, Default)]
pub(super) struct Packet {
    pub(super) flags: Flags,
    pub(super) sequence: u32,
    pub(super) payload: usize,
    pub(super) acknowledgment: Option<u32>,
    pub(super) window: Option<u16>,
    pub(super) options: Option<Options>,
    /// The time stamp, and the one that it echoes, match all values.
    any_timestamps: (bool, bool),
    urgent: u16,
    source: Option<IpAddr>,
    /// Bytes that are overwritten: of the IP packet or from the TCP header on.
    patches: Vec<(bool, usize, u8)>,
    has_wrong_checksum: bool,
    length: Option<usize>,
}

/// What a packet is sent between: addresses and initial sequence numbers of sender and receiver. A
/// number of zero is not known yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Path {
    pub(super) source: (SocketAddr, u32),
    pub(super) destination: (SocketAddr, u32),
}

impl Packet {
    /// Reads a segment. `own_mss`: what `mss own` stands for.
    pub(super) fn read(text: &str, own_mss: u16) -> Result<Packet, String> {
        let mut packet = Packet::default();
        let mut fields = text.to_owned();
        if let Some((before, rest)) = text.split_once('<') {
            let (options, behind) = rest.split_once('>').ok_or("options without '>'")?;
            packet.read_options(options, own_mss)?;
            fields = format!("{before} {behind}");
        }
        let mut words = fields.split_whitespace();
        for letter in words.next().ok_or("no flags")?.chars() {
            let (_, flag) = FLAGS.iter().find(|(name, _)| *name == letter).ok_or("unknown flag")?;
            packet.flags = packet.flags.with(*flag);
        }
        packet.read_numbers(words.next().ok_or("no numbers")?).ok_or("expected 'first:end(length)'")?;
        while let Some(word) = words.next() {
            if word == "badsum" {
                packet.has_wrong_checksum = true;
            } else if let Some((place, value)) = word.strip_suffix(']').unwrap_or(word).split_once("]=") {
                let (layer, at) = place.split_once('[').ok_or("expected 'ip[N]=V' or 'tcp[N]=V'")?;
                packet.patches.push((layer == "tcp", number(at)?, number(value)?));
            } else {
                let value = words.next().ok_or_else(|| format!("{word}: no value"))?;
                match word {
                    "ack" => packet.acknowledgment = Some(relative(value).ok_or("ack: not a number")?),
                    "win" => packet.window = Some(number(value)?),
                    "urg" => packet.urgent = number(value)?,
                    "cut" => packet.length = Some(number(value)?),
                    "source" => packet.source = Some(value.parse().map_err(|_| "source: no address")?),
                    _ => return Err(format!("unknown field {word}")),
                }
            }
        }
        Ok(packet)
    }

    fn read_numbers(&mut self, text: &str) -> Option<()> {
        let (first, rest) = text.split_once(':')?;
        let (end, length) = rest.strip_suffix(')')?.split_once('(')?;
        self.sequence = relative(first)?;
        self.payload = length.parse().ok()?;
        (relative(end)? == self.sequence.wrapping_add(u32::try_from(self.payload).ok()?)).then_some(())
    }

    fn read_options(&mut self, text: &str, own_mss: u16) -> Result<(), String> {
        let options = self.options.insert(Options::default());
        for option in text.split(',') {
            match *option.split_whitespace().collect::<Vec<_>>().as_slice() {
                [] => {}
                ["mss", "own"] => options.mss = Some(own_mss),
                ["mss", mss] => options.mss = Some(number(mss)?),
                ["wscale", shift] => options.window_scale = Some(number(shift)?),
                ["sackOK"] => options.sack_permitted = true,
                ["sack", ref blocks @ ..] => {
                    for (place, block) in options.sack.iter_mut().zip(blocks) {
                        let (first, end) = block.split_once(':').ok_or("sack: expected 'first:end'")?;
                        *place = Some((number(first)?, number(end)?));
                    }
                }
                ["TS", value, echo] => {
                    self.any_timestamps = (value == "*", echo == "*");
                    let parse = |text| if text == "*" { Ok(0) } else { number(text) };
                    options.timestamps = Some((parse(value)?, parse(echo)?));
                }
                _ => return Err(format!("unknown option {option}")),
            }
        }
        Ok(())
    }

    /// The bytes of the packet.
    pub(super) fn build(&self, path: &Path) -> Vec<u8> {
        let mut options = self.options.unwrap_or_default();
        for (first, end) in options.sack.iter_mut().flatten() {
            *first = first.wrapping_add(path.destination.1);
            *end = end.wrapping_add(path.destination.1);
        }
        let header = TcpHeader {
            source: path.source.0,
            destination: path.destination.0,
            sequence: path.source.1.wrapping_add(self.sequence),
            acknowledgment: self.acknowledgment.map_or(0, |number| path.destination.1.wrapping_add(number)),
            flags: self.flags,
            window: self.window.unwrap_or(u16::MAX),
            urgent: self.urgent,
            options,
        };
        let payload: Vec<u8> = numbers(self.sequence).take(self.payload).map(pattern).collect();
        let behind = header.encoded_len().unwrap() + payload.len();
        let ip = if path.source.0.is_ipv4() { ipv4::HEADER_LEN } else { ipv6::HEADER_LEN };
        let mut bytes = vec![0; ip + behind];
        let (mut source, destination) = (path.source.0.ip(), path.destination.0.ip());
        source = self.source.unwrap_or(source);
        match (source, destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let (traffic_class, id, dont_fragment, ttl, protocol) = (0, 7, true, 64, PROTOCOL);
                Ipv4Header { traffic_class, id, dont_fragment, ttl, protocol, source, destination }
                    .write(&mut bytes, behind)
                    .unwrap();
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let (traffic_class, flow_label, next_header, hop_limit) = (0, 9, PROTOCOL, 64);
                Ipv6Header { traffic_class, flow_label, next_header, hop_limit, source, destination }
                    .write(&mut bytes, behind)
                    .unwrap();
            }
            _ => panic!("addresses of two families"),
        }
        let (head, data) = bytes[ip..].split_at_mut(behind - payload.len());
        data.copy_from_slice(&payload);
        header.write(head, &payload).unwrap();
        self.damage(&mut bytes, ip, (source, destination));
        bytes
    }

    /// Applies patches, with valid checksums if not stated otherwise.
    fn damage(&self, bytes: &mut Vec<u8>, ip: usize, addresses: (IpAddr, IpAddr)) {
        for (is_tcp, at, value) in &self.patches {
            bytes[if *is_tcp { ip + at } else { *at }] = *value;
        }
        if !self.patches.is_empty() {
            if ip == ipv4::HEADER_LEN && !self.patches.iter().any(|patch| matches!(patch, (false, 10, _))) {
                bytes[10..12].fill(0);
                let sum = Sum::default().add_bytes(&bytes[..ip]).finish();
                bytes[10..12].copy_from_slice(&sum.to_be_bytes());
            }
            let length = u16::try_from(bytes.len() - ip).unwrap();
            let pseudo = match addresses {
                (IpAddr::V4(source), IpAddr::V4(destination)) => {
                    Sum::pseudo_v4(source, destination, PROTOCOL, length)
                }
                (IpAddr::V6(source), IpAddr::V6(destination)) => {
                    Sum::pseudo_v6(source, destination, PROTOCOL, length.into())
                }
                _ => unreachable!("checked when the header was written"),
            };
            let at = ip + CHECKSUM_OFFSET;
            bytes[at..at + 2].fill(0);
            let sum = pseudo.add_bytes(&bytes[ip..]).finish();
            bytes[at..at + 2].copy_from_slice(&sum.to_be_bytes());
        }
        if self.has_wrong_checksum {
            bytes[ip + CHECKSUM_OFFSET] ^= 1;
        }
        bytes.truncate(self.length.unwrap_or(usize::MAX));
    }

    /// Reads a packet that the stack has sent, and verifies all that needs no expectation. `path`
    /// is the one on which it has to be; a SYN sets the number of its source.
    pub(super) fn parse(bytes: &[u8], path: &mut Path) -> Result<Packet, String> {
        let text = |error: manylane_wire::Error| error.to_string();
        let (source, destination, segment, length) = if bytes[0] >> 4 == 4 {
            let ip = Ipv4::parse(bytes).map_err(text)?;
            if !ip.has_valid_checksum() || !ip.dont_fragment || ip.is_fragment() {
                return Err("wrong IPv4 header".into());
            }
            (ip.source.into(), ip.destination.into(), ip.payload, ip.header.len() + ip.payload.len())
        } else {
            let ip = Ipv6::parse(bytes).map_err(text)?;
            (ip.source.into(), ip.destination.into(), ip.payload, ipv6::HEADER_LEN + ip.payload.len())
        };
        let tcp = Tcp::parse(segment).map_err(text)?;
        if length != bytes.len() || !tcp.has_valid_checksum(source, destination) {
            return Err("wrong length or checksum".into());
        }
        let ends = (SocketAddr::new(source, tcp.source), SocketAddr::new(destination, tcp.destination));
        if ends != (path.source.0, path.destination.0) {
            return Err(format!("sent from {} to {}", ends.0, ends.1));
        }
        if tcp.flags.contains(Flags::SYN) && path.source.1 == 0 {
            path.source.1 = tcp.sequence;
        }
        let sequence = tcp.sequence.wrapping_sub(path.source.1);
        if let Some(at) =
            numbers(sequence).zip(tcp.payload).position(|(number, byte)| pattern(number) != *byte)
        {
            return Err(format!("byte {at} of the payload from {sequence} on is wrong"));
        }
        let mut options = Options::parse(tcp.options, tcp.flags.contains(Flags::SYN));
        for (first, end) in options.sack.iter_mut().flatten() {
            *first = first.wrapping_sub(path.destination.1);
            *end = end.wrapping_sub(path.destination.1);
        }
        Ok(Packet {
            flags: tcp.flags,
            sequence,
            payload: tcp.payload.len(),
            acknowledgment: tcp
                .flags
                .contains(Flags::ACK)
                .then(|| tcp.acknowledgment.wrapping_sub(path.destination.1)),
            window: Some(tcp.window),
            options: Some(options),
            ..Packet::default()
        })
    }

    /// True if a sent packet is the expected one.
    pub(super) fn matches(&self, sent: &Packet) -> bool {
        let options = self.options.is_none_or(|mut expected| {
            let sent = sent.options.unwrap_or_default();
            if let (Some(expected), Some(sent)) = (&mut expected.timestamps, sent.timestamps) {
                let (any_value, any_echo) = self.any_timestamps;
                expected.0 = if any_value { sent.0 } else { expected.0 };
                expected.1 = if any_echo { sent.1 } else { expected.1 };
            }
            expected == sent
        });
        (self.flags, self.sequence, self.payload) == (sent.flags, sent.sequence, sent.payload)
            && self.acknowledgment == sent.acknowledgment
            && self.window.is_none_or(|window| Some(window) == sent.window)
            && options
    }
}

impl std::fmt::Display for Packet {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let flags: String =
            FLAGS.iter().filter(|(_, flag)| self.flags.contains(*flag)).map(|(name, _)| name).collect();
        let first = self.sequence.cast_signed();
        write!(formatter, "{flags} {first}:{}({})", i64::from(first) + self.payload as i64, self.payload)?;
        if let Some(number) = self.acknowledgment {
            write!(formatter, " ack {}", number.cast_signed())?;
        }
        if let Some(window) = self.window {
            write!(formatter, " win {window}")?;
        }
        let Some(options) = self.options else { return Ok(()) };
        let mut text = String::new();
        let _ = options.mss.map_or(Ok(()), |mss| write!(text, "mss {mss},"));
        let _ = options.window_scale.map_or(Ok(()), |shift| write!(text, "wscale {shift},"));
        text += if options.sack_permitted { "sackOK," } else { "" };
        for (place, (first, end)) in options.sack.iter().flatten().enumerate() {
            let _ = write!(text, "{} {first}:{end}", if place == 0 { "sack" } else { "" });
        }
        if let Some((value, echo)) = options.timestamps {
            let _ = write!(text, ",TS {value} {echo}");
        }
        write!(formatter, " <{}>", text.trim_matches(','))
    }
}

/// Sequence numbers from one on; they wrap.
pub(super) fn numbers(first: u32) -> impl Iterator<Item = u32> {
    (0..).map(move |offset| first.wrapping_add(offset))
}

fn relative(text: &str) -> Option<u32> {
    let number: i64 = text.parse().ok()?;
    u32::try_from(number.rem_euclid(1 << 32)).ok()
}

pub(super) fn number<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    let value = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    value.ok().and_then(|value| value.try_into().ok()).ok_or_else(|| format!("not a number here: {text}"))
}
