//! Port ranges as text. `manylane run` checks those of `--ports` and passes them on in the
//! environment; the preload library parses them again.

use std::error::Error;
use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// The environment variable with the [`PortRanges`] whose sockets may have lanes.
pub const PORTS_ENV_VAR: &str = "MANYLANE_PORTS";
/// Maximum number of ranges: each bound socket is compared with all of them.
pub const RANGES_MAX: usize = 32;

/// Ports and ranges of ports, such as `53,8000-8010`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortRanges(Vec<RangeInclusive<u16>>);

impl PortRanges {
    /// True if one of the ranges has `port`.
    #[must_use]
    pub fn contains(&self, port: u16) -> bool {
        self.0.iter().any(|range| range.contains(&port))
    }
}

impl FromStr for PortRanges {
    type Err = PortRangesError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let count = text.split(',').count();
        if count > RANGES_MAX {
            return Err(PortRangesError::TooMany(count));
        }
        let ranges = text.split(',').map(parse_range).collect::<Option<_>>();
        ranges.map(Self).ok_or(PortRangesError::Invalid)
    }
}

/// A port or a range. Port 0 is none: the kernel replaces it by a free port.
fn parse_range(text: &str) -> Option<RangeInclusive<u16>> {
    let port = |text: &str| text.trim().parse().ok().filter(|port| *port > 0);
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let range = port(first)?..=port(last)?;
    (!range.is_empty()).then_some(range)
}

impl fmt::Display for PortRanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, range) in self.0.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            match (range.start(), range.end()) {
                (first, last) if first == last => write!(f, "{comma}{first}")?,
                (first, last) => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

/// The reason why a text is no [`PortRanges`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortRangesError {
    /// Not a list of ports and ranges.
    Invalid,
    /// More than [`RANGES_MAX`] ranges: this many.
    TooMany(usize),
}

impl fmt::Display for PortRangesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid => f.write_str("expected ports such as 53 or 53,8000-8010"),
            Self::TooMany(count) => write!(f, "expected at most {RANGES_MAX} ports and ranges, not {count}"),
        }
    }
}

impl Error for PortRangesError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_and_ranges_are_parsed_and_formatted() {
        let ranges: PortRanges = "53, 8000 - 8010,99-99,65535".parse().unwrap();
        assert_eq!(ranges.to_string(), "53,8000-8010,99,65535");
        assert_eq!(ranges.to_string().parse(), Ok(ranges.clone()));
        for (port, contained) in
            [(52, false), (53, true), (8000, true), (8010, true), (8011, false), (65535, true)]
        {
            assert_eq!(ranges.contains(port), contained, "{port}");
        }
    }

    #[test]
    fn invalid_ranges_are_rejected() {
        for text in ["", " ", "0", "0-9", "53,", "80-70", "70000", "domain", "1-2-3", "-1"] {
            assert_eq!(text.parse::<PortRanges>(), Err(PortRangesError::Invalid), "{text:?}");
        }
        let ports = |count: u16| (1..=count).map(|port| port.to_string()).collect::<Vec<_>>().join(",");
        assert!(ports(32).parse::<PortRanges>().is_ok());
        let error = ports(33).parse::<PortRanges>().unwrap_err();
        assert_eq!(error.to_string(), "expected at most 32 ports and ranges, not 33");
    }
}
