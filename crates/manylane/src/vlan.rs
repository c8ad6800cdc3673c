//! VLAN tags of a frame.

use std::fmt;
use std::str::FromStr;

use manylane_wire::ethernet::{self, ether_type};

use crate::error::{Error, ErrorKind, Result};

/// One VLAN tag (IEEE 802.1Q), or two (802.1ad).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Vlan {
    outer: u16,
    inner: Option<u16>,
}

impl Vlan {
    /// The VLAN with this id, 1 to 4094.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for any other number.
    pub fn new(id: u16) -> Result<Self> {
        Ok(Self { outer: check_id(id)?, inner: None })
    }

    /// The VLAN `inner` within the VLAN `outer`.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn stacked(outer: u16, inner: u16) -> Result<Self> {
        Ok(Self { outer: check_id(outer)?, inner: Some(check_id(inner)?) })
    }

    /// The key of the VLAN in the XDP program.
    pub(crate) fn key(self) -> u32 {
        match self.inner {
            Some(inner) => u32::from(self.outer) << 16 | u32::from(inner),
            None => self.outer.into(),
        }
    }

    /// The tags of a frame in it: of IEEE 802.1ad, if there are two.
    pub(crate) fn tags(self) -> [Option<ethernet::Vlan>; 2] {
        let tag = |ether_type, tci| Some(ethernet::Vlan { ether_type, tci });
        match self.inner {
            Some(inner) => [tag(ether_type::SERVICE_VLAN, self.outer), tag(ether_type::VLAN, inner)],
            None => [tag(ether_type::VLAN, self.outer), None],
        }
    }
}

fn check_id(id: u16) -> Result<u16> {
    match id {
        1..=4094 => Ok(id),
        _ => Err(Error::new(ErrorKind::Config, format!("invalid VLAN {id}: expected 1 to 4094"))),
    }
}

impl FromStr for Vlan {
    type Err = Error;

    /// `5`, or `100.5` for VLAN 5 within VLAN 100.
    fn from_str(text: &str) -> Result<Self> {
        let number = |text: &str| {
            text.parse().map_err(|err| {
                Error::with(
                    ErrorKind::Config,
                    format!("invalid VLAN {text:?}: expected ID or OUTER.INNER, such as 5 or 100.5"),
                    err,
                )
            })
        };
        match text.split_once('.') {
            Some((outer, inner)) => Self::stacked(number(outer)?, number(inner)?),
            None => Self::new(number(text)?),
        }
    }
}

impl fmt::Display for Vlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.inner {
            Some(inner) => write!(f, "{}.{inner}", self.outer),
            None => self.outer.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_and_two_vlan_tags_round_trip() {
        for (text, key) in [("1", 1), ("4094", 4094), ("100.5", 100 << 16 | 5)] {
            let vlan: Vlan = text.parse().unwrap();
            assert_eq!((vlan.key(), vlan.to_string().as_str()), (key, text));
        }
        for wrong in ["", "0", "4095", "5.", ".5", "1.0", "5.5.5", "x", "-1", "70000"] {
            assert_eq!(wrong.parse::<Vlan>().unwrap_err().kind(), ErrorKind::Config, "{wrong}");
        }
    }
}
