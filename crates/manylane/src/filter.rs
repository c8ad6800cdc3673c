//! Filter of a socket: limits per source, and prefixes that are allowed or denied. Values only:
//! the XDP program enforces them (`bpf/filter.h`), and `io/filter.rs` writes them to its maps.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use manylane_bpf::abi;

use crate::error::{Error, ErrorKind, Result};

const NANOS_PER_SEC: f64 = 1e9;
/// Range of datagrams per second. Above the maximum, whole nanoseconds are too coarse.
const RATE_MIN: f64 = 0.001;
const RATE_MAX: f64 = 10e6;
/// Maximum burst in datagrams.
const BURST_MAX: u32 = 1 << 24;

/// A limit per source: `rate` datagrams per second, and `burst` at once after an idle time. A
/// source is an address or, with [`per`](Self::per), a prefix.
///
/// As text: `RATE[/BURST][,per=LEN[:LEN]]`, such as `1000/50,per=24:56`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Nanoseconds per datagram.
    cost: u64,
    burst: u32,
    /// Prefix length of a source, for IPv4 and for IPv6.
    prefix_lens: [u8; 2],
}

impl Limit {
    /// A limit of `rate` datagrams per second (0.001 to 10 million, rounded to whole nanoseconds
    /// between two) for each IPv4 address and each IPv6 /64, the usual prefix of a host. The burst
    /// is the rate times 100 ms, and at least 10.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for any other rate.
    pub fn new(rate: f64) -> Result<Self> {
        if !(RATE_MIN..=RATE_MAX).contains(&rate) {
            return Err(config_error(format!(
                "limit: invalid rate {rate}: expected {RATE_MIN} to {RATE_MAX}"
            )));
        }
        // In range, so the casts lose only fractions.
        let burst = ((rate / 10.0) as u32).max(10);
        Ok(Self { cost: (NANOS_PER_SEC / rate).round() as u64, burst, prefix_lens: [32, 64] })
    }

    /// Sets the burst: 1 to 16,777,216 datagrams.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for any other number.
    pub fn burst(mut self, datagrams: u32) -> Result<Self> {
        if !(1..=BURST_MAX).contains(&datagrams) {
            return Err(config_error(format!("limit: invalid burst {datagrams}: expected 1 to {BURST_MAX}")));
        }
        self.burst = datagrams;
        Ok(self)
    }

    /// Sets the prefix length that makes a source: IPv4 0 to 32, IPv6 0 to 128. With 0, all
    /// addresses of the family are one source.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for any other length.
    pub fn per(mut self, ipv4: u8, ipv6: u8) -> Result<Self> {
        if ipv4 > 32 || ipv6 > 128 {
            return Err(config_error(format!(
                "limit: invalid prefix length {ipv4} (IPv6: {ipv6}): expected at most 32 (IPv6: 128)"
            )));
        }
        self.prefix_lens = [ipv4, ipv6];
        Ok(self)
    }

    /// Datagrams per second.
    #[must_use]
    pub fn rate(&self) -> f64 {
        NANOS_PER_SEC / self.cost as f64
    }

    /// The form that the XDP program reads.
    pub(crate) fn to_abi(self) -> abi::Limit {
        abi::Limit {
            cost: self.cost,
            room: self.cost.saturating_mul(self.burst.into()),
            mask: [mask(96 + self.prefix_lens[0]), mask(self.prefix_lens[1])],
        }
    }
}

impl FromStr for Limit {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let refuse = || {
            config_error(format!(
                "invalid limit {text:?}: expected RATE[/BURST][,per=LEN[:LEN]], such as 1000/50,per=24"
            ))
        };
        let (amount, per) = text.split_once(',').map_or((text, None), |(amount, per)| (amount, Some(per)));
        let (rate, burst) =
            amount.split_once('/').map_or((amount, None), |(rate, burst)| (rate, Some(burst)));
        let (number, factor) = match rate.as_bytes().last() {
            Some(b'k') => (&rate[..rate.len() - 1], 1e3),
            Some(b'M') => (&rate[..rate.len() - 1], 1e6),
            _ => (rate, 1.0),
        };
        let mut limit = Self::new(number.parse::<f64>().map_err(|_| refuse())? * factor)?;
        if let Some(burst) = burst {
            limit = limit.burst(burst.parse().map_err(|_| refuse())?)?;
        }
        if let Some(per) = per {
            let lens = per.strip_prefix("per=").ok_or_else(refuse)?;
            let (ipv4, ipv6) = lens.split_once(':').map_or((lens, None), |(four, six)| (four, Some(six)));
            let ipv4: u8 = ipv4.parse().map_err(|_| refuse())?;
            // The usual prefix lengths of a host, of a site, and of all addresses.
            let usual = match ipv4 {
                32 => 64,
                0 => 0,
                _ => 56,
            };
            limit = limit.per(ipv4, ipv6.map_or(Ok(usual), |len| len.parse().map_err(|_| refuse()))?)?;
        }
        Ok(limit)
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [ipv4, ipv6] = self.prefix_lens;
        // Stored in whole nanoseconds: three decimals restore the requested rate.
        let rate = (self.rate() * 1e3).round() / 1e3;
        write!(f, "{rate}/{},per={ipv4}:{ipv6}", self.burst)
    }
}

/// An address prefix, such as `192.0.2.0/24`, `2001:db8::/32`, or a single address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Prefix {
    ip: IpAddr,
    len: u8,
}

impl Prefix {
    /// The first `len` bits of `ip`; the other bits have to be zero. An IPv4-mapped address
    /// becomes IPv4.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for more bits than an address has, or if other bits are not zero.
    pub fn new(ip: IpAddr, len: u8) -> Result<Self> {
        let (prefix_max, bits) = match ip {
            IpAddr::V4(ip) => (32, u128::from(ip.to_bits()) << 96),
            IpAddr::V6(ip) if ip.to_ipv4_mapped().is_some() && len >= 96 => {
                return Self::new(ip.to_canonical(), len - 96);
            }
            IpAddr::V6(ip) => (128, ip.to_bits()),
        };
        if len > prefix_max {
            return Err(config_error(format!(
                "invalid prefix {ip}/{len}: expected a length of at most {prefix_max}"
            )));
        }
        let kept = bits & u128::MAX.checked_shl(128 - u32::from(len)).unwrap_or(0);
        if kept != bits {
            let first: IpAddr = match ip {
                IpAddr::V4(_) => Ipv4Addr::from_bits((kept >> 96) as u32).into(),
                IpAddr::V6(_) => Ipv6Addr::from_bits(kept).into(),
            };
            return Err(config_error(format!("invalid prefix {ip}/{len}: expected {first}/{len}")));
        }
        Ok(Self { ip, len })
    }

    /// The key in the XDP program's map: the number of bits, and the bytes that they are the first
    /// of.
    pub(crate) fn to_abi(self, socket: u32) -> (u32, abi::RuleKey) {
        let mut key = [0; size_of::<abi::RuleKey>()];
        let (family, before, octets) = match self.ip {
            IpAddr::V4(ip) => (0, 96, ip.to_ipv6_mapped().octets()),
            IpAddr::V6(ip) => (1, 0, ip.octets()),
        };
        // There are at most 16 sockets.
        (key[0], key[1]) = (socket as u8, family);
        key[4..].copy_from_slice(&octets);
        (abi::RULE_HEADER_BITS + before + u32::from(self.len), key)
    }
}

impl FromStr for Prefix {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let refuse = || {
            config_error(format!(
                "invalid prefix {text:?}: expected an address or network such as 192.0.2.0/24, 2001:db8::/32 or 192.0.2.7"
            ))
        };
        let (ip, len) = text.split_once('/').map_or((text, None), |(ip, len)| (ip, Some(len)));
        let ip: IpAddr = ip.parse().map_err(|_| refuse())?;
        let whole = if ip.is_ipv4() { 32 } else { 128 };
        Self::new(ip, len.map_or(Ok(whole), |len| len.parse().map_err(|_| refuse()))?)
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.ip, self.len)
    }
}

/// Verdict on datagrams from a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// They are accepted, exempt from all limits.
    Allow,
    /// They are dropped.
    Deny,
}

/// Limits and prefix rules of a socket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    limits: Vec<Limit>,
    rules: BTreeMap<Prefix, Rule>,
}

impl Filter {
    /// The limits, with the widest sources first.
    #[must_use]
    pub fn limits(&self) -> &[Limit] {
        &self.limits
    }

    /// The prefixes.
    pub fn rules(&self) -> impl Iterator<Item = (Prefix, Rule)> + '_ {
        self.rules.iter().map(|(prefix, rule)| (*prefix, *rule))
    }

    /// True if it accepts everything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.limits.is_empty() && self.rules.is_empty()
    }

    /// Replaces the limits, at most two. A datagram has to be within all of them.
    ///
    /// # Errors
    /// [`ErrorKind::Limit`] for more than two.
    pub fn set_limits(&mut self, limits: &[Limit]) -> Result<()> {
        if limits.len() > abi::LIMITS_MAX {
            return Err(Error::new(
                ErrorKind::Limit,
                format!("a socket has at most {} limits", abi::LIMITS_MAX),
            ));
        }
        self.limits = limits.to_vec();
        self.limits.sort_by_key(|limit| limit.prefix_lens);
        Ok(())
    }

    /// Sets the rule of `prefix`, or removes it if none. The longest matching prefix decides about
    /// a datagram.
    ///
    /// # Errors
    /// [`ErrorKind::Limit`] for more than 16,384 prefixes.
    pub fn set_rule(&mut self, prefix: Prefix, rule: Option<Rule>) -> Result<()> {
        match rule {
            None => _ = self.rules.remove(&prefix),
            Some(_) if self.rules.len() >= abi::RULES_MAX && !self.rules.contains_key(&prefix) => {
                let message = format!("a socket has at most {} prefixes", abi::RULES_MAX);
                return Err(Error::new(ErrorKind::Limit, message));
            }
            Some(rule) => _ = self.rules.insert(prefix, rule),
        }
        Ok(())
    }
}

/// The first `len` bits.
fn mask(len: u8) -> [u8; 16] {
    u128::MAX.checked_shl(128 - u32::from(len)).unwrap_or(0).to_be_bytes()
}

fn config_error(message: String) -> Error {
    Error::new(ErrorKind::Config, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_and_written() {
        for (text, shown, cost, room) in [
            ("1000", "1000/100,per=32:64", 1_000_000, 100_000_000),
            ("1k/50,per=24", "1000/50,per=24:56", 1_000_000, 50_000_000),
            ("2.5M/1,per=0", "2500000/1,per=0:0", 400, 400),
            ("0.001/3,per=32:128", "0.001/3,per=32:128", 1_000_000_000_000, 3_000_000_000_000),
            ("3", "3/10,per=32:64", 333_333_333, 3_333_333_330),
        ] {
            let limit: Limit = text.parse().unwrap();
            assert_eq!(limit.to_string(), shown);
            assert_eq!(shown.parse::<Limit>().unwrap().to_abi().mask, limit.to_abi().mask);
            assert_eq!((limit.to_abi().cost, limit.to_abi().room), (cost, room), "{text}");
        }
        for text in
            ["", "0", "-1", "NaN", "inf", "20M", "5/0", "5/x", "5,24", "5,per=33", "5,per=24:129", "5,per="]
        {
            assert_eq!(text.parse::<Limit>().unwrap_err().kind(), ErrorKind::Config, "{text}");
        }
    }

    #[test]
    fn masks_have_the_bits_of_a_source() {
        let of = |text: &str| text.parse::<Limit>().unwrap().to_abi().mask.map(u128::from_be_bytes);
        assert_eq!(of("1,per=32:128"), [u128::MAX, u128::MAX]);
        assert_eq!(of("1,per=24:56"), [!0xff, u128::MAX << 72]);
        // Keys of the two families differ: the IPv4-mapped prefix stays.
        assert_eq!(of("1,per=0:0"), [u128::MAX << 32, 0]);
    }

    #[test]
    fn prefixes_are_read_and_written() {
        for (text, shown, bits) in [
            ("192.0.2.7", "192.0.2.7/32", 160),
            ("0.0.0.0/0", "0.0.0.0/0", 128),
            ("192.0.2.0/24", "192.0.2.0/24", 152),
            ("::/0", "::/0", 32),
            ("2001:db8::/32", "2001:db8::/32", 64),
            ("::ffff:192.0.2.0/120", "192.0.2.0/24", 152),
        ] {
            let prefix: Prefix = text.parse().unwrap();
            assert_eq!((prefix.to_string().as_str(), prefix.to_abi(3).0), (shown, bits));
        }
        let (_, key) = "192.0.2.0/24".parse::<Prefix>().unwrap().to_abi(3);
        assert_eq!(key, [3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 192, 0, 2, 0]);
        let err = "192.0.2.7/24".parse::<Prefix>().unwrap_err().to_string();
        assert!(err.contains("192.0.2.0/24"), "{err}");
        for text in ["", "1.2.3", "1.2.3.4/33", "::/129", "::/x", "::/-1", "2001:db8::1/64"] {
            assert_eq!(text.parse::<Prefix>().unwrap_err().kind(), ErrorKind::Config, "{text}");
        }
    }

    #[test]
    fn a_filter_has_two_limits_and_a_prefix_bound() {
        let mut guard = Filter::default();
        let limit = |text: &str| text.parse::<Limit>().unwrap();
        guard.set_limits(&[limit("5"), limit("9,per=8")]).unwrap();
        assert_eq!(guard.limits(), [limit("9,per=8"), limit("5")], "the widest first");
        assert_eq!(guard.set_limits(&[limit("5"); 3]).unwrap_err().kind(), ErrorKind::Limit);
        for at in 0..abi::RULES_MAX as u32 {
            guard
                .set_rule(Prefix::new(Ipv4Addr::from_bits(at).into(), 32).unwrap(), Some(Rule::Deny))
                .unwrap();
        }
        let another = "10.0.0.0/8".parse().unwrap();
        assert_eq!(guard.set_rule(another, Some(Rule::Allow)).unwrap_err().kind(), ErrorKind::Limit);
        guard.set_rule("0.0.0.0".parse().unwrap(), Some(Rule::Allow)).unwrap();
        guard.set_rule("0.0.0.0".parse().unwrap(), None).unwrap();
        guard.set_rule(another, Some(Rule::Allow)).unwrap();
        assert_eq!(guard.rules().filter(|(_, rule)| *rule == Rule::Allow).count(), 1);
        assert!(!guard.is_empty() && Filter::default().is_empty());
    }
}
