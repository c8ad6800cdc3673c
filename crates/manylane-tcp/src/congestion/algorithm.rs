//! The controllers of this crate by name.

use std::fmt;
use std::str::FromStr;

use super::bbr::Bbr;
use super::controller::{Controller, NewController};
use super::cubic::Cubic;
use super::new_reno::NewReno;

/// A controller of this crate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// `new-reno`: see [`NewReno`].
    NewReno,
    /// `cubic`: see [`Cubic`]. The default, as in Linux.
    #[default]
    Cubic,
    /// `bbr`: see [`Bbr`].
    Bbr,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Algorithm; 3] = [Algorithm::NewReno, Algorithm::Cubic, Algorithm::Bbr];

    /// The name, as users write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::NewReno => "new-reno",
            Algorithm::Cubic => "cubic",
            Algorithm::Bbr => "bbr",
        }
    }

    /// The name that Linux has for its own (`net.ipv4.tcp_available_congestion_control`).
    #[must_use]
    pub const fn kernel_name(self) -> &'static str {
        match self {
            Algorithm::NewReno => "reno",
            other => other.name(),
        }
    }

    /// What makes its controllers.
    #[must_use]
    pub fn new_controller(self) -> NewController {
        match self {
            Algorithm::NewReno => |mss| Algorithm::NewReno.controller(mss),
            Algorithm::Cubic => |mss| Algorithm::Cubic.controller(mss),
            Algorithm::Bbr => |mss| Algorithm::Bbr.controller(mss),
        }
    }

    /// Creates the controller of a connection.
    #[must_use]
    pub fn controller(self, mss: u16) -> Box<dyn Controller> {
        match self {
            Algorithm::NewReno => Box::new(NewReno::new(mss)),
            Algorithm::Cubic => Box::new(Cubic::new(mss)),
            Algorithm::Bbr => Box::new(Bbr::new(mss)),
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = UnknownAlgorithm;

    fn from_str(name: &str) -> Result<Algorithm, UnknownAlgorithm> {
        let found = Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == name);
        found.ok_or_else(|| UnknownAlgorithm(name.into()))
    }
}

/// The name of no [`Algorithm`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownAlgorithm(Box<str>);

impl fmt::Display for UnknownAlgorithm {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "unknown congestion control {:?}: expected new-reno, cubic or bbr", self.0)
    }
}

impl std::error::Error for UnknownAlgorithm {}
