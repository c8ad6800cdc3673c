//! Errors of calls.

use std::fmt;
use std::net::SocketAddr;

/// Result of a call.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Error {
    /// A setting is out of its range: which, and what is expected.
    Config(&'static str),
    /// A port is zero.
    NoPort,
    /// One address is IPv4, the other one IPv6.
    Families,
    /// The address has a listener, or a connection to the same peer, or one of a moment ago.
    InUse(SocketAddr),
    /// There are as many connections as `Config::connections_max`.
    TooMany,
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Config(what) => formatter.write_str(what),
            Error::NoPort => formatter.write_str("a port is zero"),
            Error::Families => formatter.write_str("one address is IPv4, the other one IPv6"),
            Error::InUse(address) => write!(formatter, "{address} is in use"),
            Error::TooMany => formatter.write_str("there are as many connections as connections_max"),
        }
    }
}

impl std::error::Error for Error {}
