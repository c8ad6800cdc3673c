//! What tells sessions apart: addresses, or bytes of the payload.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use manylane::Steering;

use crate::maglev::Lookup;

/// Bytes of a key at most, as in steering by a key.
const KEY_LEN_MAX: usize = 64;

/// The place of a key in the payload of datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PayloadKey {
    offset: u16,
    len: u16,
}

impl PayloadKey {
    /// The steering that gives all datagrams with one key to one lane.
    #[must_use]
    pub fn steering(self) -> Steering {
        Steering::Key { offset: self.offset, len: self.len }
    }

    /// The key of a payload; none if it is too short.
    fn find(self, payload: &[u8]) -> Option<&[u8]> {
        payload.get(usize::from(self.offset)..)?.get(..self.len.into())
    }
}

impl FromStr for PayloadKey {
    type Err = String;

    /// `OFFSET:LENGTH`, as in steering by a key.
    fn from_str(text: &str) -> Result<PayloadKey, String> {
        match format!("key {text}").parse() {
            Ok(Steering::Key { offset, len }) => Ok(PayloadKey { offset, len }),
            _ => Err(format!("expected OFFSET:LENGTH, with a length of 1 to {KEY_LEN_MAX}, such as 1:8")),
        }
    }
}

impl fmt::Display for PayloadKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.offset, self.len)
    }
}

/// Where a client's datagram came from, and where answers to it go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Route {
    /// Index of the lane that has received it.
    pub(super) lane: usize,
    pub(super) client: SocketAddr,
    /// The local address that it was sent to; none if the lane has only one.
    pub(super) local: Option<SocketAddr>,
}

/// The identity of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum SessionKey {
    /// By both addresses and ports.
    Flow(Route),
    /// By a key in the payload: its length and bytes.
    Payload(u8, [u8; KEY_LEN_MAX]),
}

impl SessionKey {
    /// The session of a datagram; none if it is too short for the key.
    #[inline]
    pub(super) fn new(key: Option<PayloadKey>, route: Route, payload: &[u8]) -> Option<SessionKey> {
        let Some(key) = key else { return Some(SessionKey::Flow(route)) };
        let found = key.find(payload)?;
        let mut bytes = [0; KEY_LEN_MAX];
        bytes.get_mut(..found.len())?.copy_from_slice(found);
        Some(SessionKey::Payload(found.len() as u8, bytes))
    }

    /// What its server is chosen by.
    pub(super) fn lookup(&self) -> Lookup<'_> {
        match self {
            SessionKey::Flow(route) => Lookup::Client(route.client),
            SessionKey::Payload(len, bytes) => Lookup::Payload(bytes.get(..(*len).into()).unwrap_or(bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(port: u16) -> Route {
        Route { lane: 0, client: ([10, 0, 0, 1], port).into(), local: None }
    }

    #[test]
    fn keys_are_read_as_they_are_written() {
        let key: PayloadKey = "1:8".parse().unwrap();
        assert_eq!((key.to_string().as_str(), key.steering()), ("1:8", Steering::Key { offset: 1, len: 8 }));
        for text in ["", "1", "1:0", "1:65", "-1:4", "x:4"] {
            assert!(text.parse::<PayloadKey>().unwrap_err().contains("OFFSET:LENGTH"), "{text}");
        }
    }

    #[test]
    fn a_key_is_a_session_whatever_the_address() {
        let key = Some("2:3".parse().unwrap());
        let session = |port, payload: &[u8]| SessionKey::new(key, route(port), payload);
        assert_eq!(session(1, b"..abc."), session(2, b"xyabc"));
        assert_ne!(session(1, b"..abc"), session(1, b"..abd"));
        assert_eq!(session(1, b"..ab"), None);
        assert_eq!(session(1, b""), None);
        assert!(matches!(session(1, b"..abc").unwrap().lookup(), Lookup::Payload(b"abc")));
        assert!("65535:64".parse::<PayloadKey>().unwrap().find(&[0; 65_527]).is_none());
    }

    #[test]
    fn without_a_key_addresses_tell_sessions_apart() {
        let session = |port| SessionKey::new(None, route(port), b"").unwrap();
        assert_eq!(session(1), session(1));
        assert_ne!(session(1), session(2));
    }
}
