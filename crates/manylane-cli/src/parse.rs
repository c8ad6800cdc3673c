//! Parsers of option values with units: `250k`, `1.5M`, `500ms`, `4MiB`, `0-3,6`.

use std::time::Duration;

/// Datagrams per second, or as many as possible (`max`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Rate {
    /// This rate.
    Pps(f64),
    /// No limit.
    Max,
}

impl Rate {
    /// The number; `None` without a limit.
    pub(crate) fn pps(self) -> Option<f64> {
        match self {
            Self::Pps(pps) => Some(pps),
            Self::Max => None,
        }
    }
}

/// `250k`, `1.5M`, `1000`, or `max`.
pub(crate) fn rate(text: &str) -> Result<Rate, String> {
    if text == "max" {
        return Ok(Rate::Max);
    }
    pps(text).map(Rate::Pps).map_err(|err| format!("{err}, or max"))
}

/// `250k`, `1.5M`, `1000`.
pub(crate) fn pps(text: &str) -> Result<f64, String> {
    let pps = scaled(text).filter(|pps| *pps > 0.0);
    pps.ok_or_else(|| "expected datagrams per second above 0, such as 1000, 250k or 1.5M".into())
}

/// A number of datagrams: `1000`, `250k`, `1.5M`.
pub(crate) fn count(text: &str) -> Result<u64, String> {
    scaled(text)
        .filter(|count| *count >= 1.0 && count.fract() == 0.0 && *count <= 1e15)
        .map(|count| count as u64)
        .ok_or("expected a whole number above 0, such as 1000, 250k or 1.5M".into())
}

/// `10`, `10s`, `500ms`, `2m`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let time = duration_or_zero(text)?;
    if time.is_zero() { Err("the time must be above 0".into()) } else { Ok(time) }
}

/// As [`duration`], or `0`.
pub(crate) fn duration_or_zero(text: &str) -> Result<Duration, String> {
    let (number, unit) = split(text);
    let scale = match unit {
        "" | "s" => 1.0,
        "ms" => 1e-3,
        "us" => 1e-6,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err(format!("unknown unit of time {unit:?}: expected us, ms, s, m or h")),
    };
    let seconds: f64 = number.parse().map_err(|_| "expected a time such as 10s, 500ms or 2m".to_owned())?;
    Duration::try_from_secs_f64(seconds * scale).map_err(|err| err.to_string())
}

/// `4M`, `4MiB`, `212992`: bytes, in powers of 1024.
pub(crate) fn bytes(text: &str) -> Result<usize, String> {
    let (number, unit) = split(text);
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        _ => return Err(format!("unknown unit of size {unit:?}: expected K, M or G")),
    };
    let number: usize = number.parse().map_err(|_| "expected bytes such as 65536, 256K or 4M".to_owned())?;
    number.checked_mul(1 << shift).filter(|bytes| *bytes > 0).ok_or("expected a size above 0".into())
}

/// A list of CPUs: `0-3,6`.
#[cfg(any(test, feature = "bench"))]
pub(crate) fn cpus(text: &str) -> Result<Vec<usize>, String> {
    manylane_sys::cpu::parse_list(text).ok_or_else(|| "expected CPUs such as 0-3,6".into())
}

fn scaled(text: &str) -> Option<f64> {
    let (number, unit) = split(text);
    let scale = match unit {
        "" => 1.0,
        "k" | "K" => 1e3,
        "m" | "M" => 1e6,
        _ => return None,
    };
    let value = number.parse::<f64>().ok()? * scale;
    value.is_finite().then_some(value)
}

/// The number, and the unit after it.
fn split(text: &str) -> (&str, &str) {
    let at = text.find(|c: char| c.is_alphabetic()).unwrap_or(text.len());
    (text[..at].trim(), text[at..].trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_counts_are_formatted() {
        assert_eq!(rate("1000"), Ok(Rate::Pps(1000.0)));
        assert_eq!(rate("250k"), Ok(Rate::Pps(250_000.0)));
        assert_eq!(rate("1.5M"), Ok(Rate::Pps(1_500_000.0)));
        assert_eq!(rate("max"), Ok(Rate::Max));
        for bad in ["", "fast", "0", "-1", "5x", "inf", "nan"] {
            assert!(rate(bad).is_err(), "{bad}");
        }
        assert!(pps("max").is_err());
        assert_eq!(count("10k"), Ok(10_000));
        for bad in ["0", "1.5", "-3", "1e99"] {
            assert!(count(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn times() {
        assert_eq!(duration("10"), Ok(Duration::from_secs(10)));
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("1.5 s"), Ok(Duration::from_millis(1500)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        for bad in ["", "s", "-1s", "3 parsecs", "1e300h"] {
            assert!(duration(bad).is_err() && duration_or_zero(bad).is_err(), "{bad}");
        }
        for zero in ["0", "0s", "0.0 ms"] {
            assert!(duration(zero).is_err() && duration_or_zero(zero) == Ok(Duration::ZERO), "{zero}");
        }
    }

    #[test]
    fn sizes_and_cpus_are_parsed() {
        assert_eq!(bytes("212992"), Ok(212_992));
        assert_eq!(bytes("4M"), Ok(4 << 20));
        assert_eq!(bytes("4MiB"), Ok(4 << 20));
        assert!(bytes("4 furlongs").is_err() && bytes("0").is_err());
        assert_eq!(cpus("0-2,5"), Ok(vec![0, 1, 2, 5]));
        assert!(cpus("0-").is_err() && cpus("a").is_err() && cpus("3-1").is_err());
    }
}
