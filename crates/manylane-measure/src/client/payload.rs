//! Requests of a client, and the replies that it expects.

use std::fmt;
use std::fs;
use std::str::FromStr;

/// The largest payload of a UDP datagram over IPv4, in bytes.
pub const PAYLOAD_LEN_MAX: usize = 65_507;

/// Bytes given by the user: `text:HELLO`, `hex:00ff`, `file:PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Payload {
    bytes: Vec<u8>,
}

impl Payload {
    /// The bytes themselves.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl FromStr for Payload {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bytes = match text.split_once(':') {
            Some(("text", text)) => text.as_bytes().to_vec(),
            Some(("hex", digits)) => parse_hex(digits)?,
            Some(("file", path)) => fs::read(path).map_err(|err| format!("cannot read {path}: {err}"))?,
            _ => return Err("expected text:..., hex:... or file:PATH".into()),
        };
        if bytes.len() > PAYLOAD_LEN_MAX {
            return Err(format!(
                "{} bytes do not fit into a datagram: expected at most {PAYLOAD_LEN_MAX}",
                bytes.len()
            ));
        }
        Ok(Self { bytes })
    }
}

/// The expected reply of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expect {
    /// None: replies are not read.
    Nothing,
    /// The bytes of the request.
    Echo,
    /// The same bytes always.
    Bytes(Pattern),
}

/// Bytes with wildcards: as a [`Payload`], and in `hex:` also `??`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern {
    bytes: Vec<u8>,
    /// A mask: zero for a wildcard byte; empty without wildcards.
    mask: Vec<u8>,
}

impl Pattern {
    /// Exactly these bytes.
    pub fn exact(bytes: &[u8]) -> Self {
        Self { bytes: bytes.to_vec(), mask: Vec::new() }
    }

    /// True if a reply matches.
    pub fn matches(&self, answer: &[u8]) -> bool {
        if self.mask.is_empty() || answer.len() != self.bytes.len() {
            return answer == self.bytes;
        }
        let wanted = self.bytes.iter().zip(&self.mask);
        answer.iter().zip(wanted).all(|(byte, (wanted, mask))| byte & mask == *wanted)
    }
}

impl FromStr for Pattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some(digits) = text.strip_prefix("hex:").filter(|digits| digits.contains('?')) else {
            return text.parse().map(|payload: Payload| Self::exact(&payload.bytes));
        };
        // 0 and f mark where the question marks were.
        let bytes = format!("hex:{}", digits.replace('?', "0")).parse::<Payload>()?.bytes;
        let mask =
            parse_hex(&digits.replace(|digit: char| digit.is_ascii_hexdigit(), "f").replace('?', "0"))?;
        match mask.iter().find(|mask| !matches!(mask, 0 | 0xff)) {
            Some(_) => Err("a byte with any value is ??, two question marks".into()),
            None => Ok(Self { bytes, mask }),
        }
    }
}

impl FromStr for Expect {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::Nothing),
            "echo" => Ok(Self::Echo),
            _ => text.parse().map(Self::Bytes).map_err(|err| {
                err.strip_prefix("expected ")
                    .map_or(err.clone(), |forms| format!("expected echo, none, {forms}"))
            }),
        }
    }
}

impl fmt::Display for Expect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("none"),
            Self::Echo => f.write_str("echo"),
            Self::Bytes(pattern) => write!(f, "{} given bytes", pattern.bytes.len()),
        }
    }
}

/// Pairs of hexadecimal digits; spaces, colons and underscores between them are ignored.
fn parse_hex(text: &str) -> Result<Vec<u8>, String> {
    let mut digits = Vec::with_capacity(text.len());
    for character in text.chars().filter(|c| !matches!(c, ' ' | ':' | '_')) {
        let digit = character.to_digit(16).ok_or(format!("'{character}' is not a hexadecimal digit"))?;
        digits.push(digit as u8);
    }
    if !digits.len().is_multiple_of(2) {
        return Err(format!("{} hexadecimal digits: expected an even number", digits.len()));
    }
    Ok(digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

/// Length of the header of a numbered request.
pub const SEQ_HEADER_LEN: usize = 16;

/// A request with a number, so that its reply is recognized in any order: a mark of this run (8
/// bytes) and the number (8 bytes), both big-endian, and fixed bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeqPayload {
    /// A mark that is unique to this client, so that late replies to other clients are not
    /// counted.
    pub run_id: u64,
    /// Length of the request.
    pub size: usize,
}

impl SeqPayload {
    /// Writes request `number` into `out`, which becomes `size` bytes long.
    pub fn write(&self, number: u64, out: &mut Vec<u8>) {
        out.resize(self.size, 0);
        let (head, rest) = out.split_at_mut(SEQ_HEADER_LEN);
        head[..8].copy_from_slice(&self.run_id.to_be_bytes());
        head[8..].copy_from_slice(&number.to_be_bytes());
        for (at, byte) in rest.iter_mut().enumerate() {
            *byte = pattern_byte(at);
        }
    }

    /// The number of the request that `answer` echoes, and whether all bytes are equal; `None` if
    /// it is not a reply to a request of this run.
    pub fn read(&self, answer: &[u8]) -> Option<(u64, bool)> {
        let (mark, rest) = answer.split_first_chunk::<8>()?;
        let (number, rest) = rest.split_first_chunk::<8>()?;
        if u64::from_be_bytes(*mark) != self.run_id {
            return None;
        }
        let whole =
            answer.len() == self.size && rest.iter().enumerate().all(|(at, byte)| *byte == pattern_byte(at));
        Some((u64::from_be_bytes(*number), whole))
    }
}

/// `size` bytes in which any change is visible.
pub fn fill_pattern(size: usize) -> Vec<u8> {
    (0..size).map(pattern_byte).collect()
}

fn pattern_byte(at: usize) -> u8 {
    (at % 251) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_are_parsed() {
        assert_eq!("text:a:b".parse::<Payload>().unwrap().bytes(), b"a:b");
        assert_eq!("text:".parse::<Payload>().unwrap().bytes(), b"");
        assert_eq!("hex:00 fF_1:0".parse::<Payload>().unwrap().bytes(), [0, 0xff, 0x10]);
        assert!("hex:123".parse::<Payload>().unwrap_err().contains("even"));
        assert!("hex:zz".parse::<Payload>().unwrap_err().contains("'z'"));
        assert!("file:/nonexistent".parse::<Payload>().unwrap_err().contains("/nonexistent"));
        assert!("hello".parse::<Payload>().unwrap_err().contains("text:"));
        assert!(format!("text:{}", "x".repeat(70_000)).parse::<Payload>().is_err());
    }

    #[test]
    fn expectations_are_parsed() {
        assert_eq!("echo".parse(), Ok(Expect::Echo));
        assert_eq!("none".parse(), Ok(Expect::Nothing));
        assert!(matches!("text:pong".parse(), Ok(Expect::Bytes(_))));
        assert!("ping".parse::<Expect>().unwrap_err().contains("echo, none"));
    }

    #[test]
    fn wildcard_bytes_are_ignored() {
        let pattern = "hex:01 ?? fF".parse::<Pattern>().unwrap();
        assert!(pattern.matches(&[1, 0, 255]) && pattern.matches(&[1, 77, 255]));
        assert!(!pattern.matches(&[1, 77, 254]) && !pattern.matches(&[0, 77, 255]));
        assert!(!pattern.matches(&[1, 77]) && !pattern.matches(&[1, 77, 255, 0]));
        assert!("hex:???".parse::<Pattern>().unwrap_err().contains("even"));
        assert!("hex:01f?".parse::<Pattern>().unwrap_err().contains("two question marks"));
        let exact = "text:a?".parse::<Pattern>().unwrap();
        assert!(exact.matches(b"a?") && !exact.matches(b"ab"));
    }

    #[test]
    fn a_numbered_request_is_recognised_and_checked() {
        for size in [16, 17, 1000] {
            let form = SeqPayload { run_id: 77, size };
            let mut bytes = Vec::new();
            form.write(123_456, &mut bytes);
            assert_eq!(bytes.len(), size);
            assert_eq!(form.read(&bytes), Some((123_456, true)));
            assert_eq!(form.read(&bytes[..15]), None);
            assert_eq!(SeqPayload { run_id: 78, size }.read(&bytes), None);
            bytes.push(0);
            assert_eq!(form.read(&bytes), Some((123_456, false)));
        }
        let form = SeqPayload { run_id: 1, size: 20 };
        let mut bytes = Vec::new();
        form.write(5, &mut bytes);
        bytes[19] ^= 1;
        assert_eq!(form.read(&bytes), Some((5, false)));
    }
}
