//! The protocol between the two sides of a capture: lines of text in messages of a local socket.
//!
//! | request | reply |
//! |---|---|
//! | `manylane.capture 1 describe` | the socket: [`Description`] |
//! | `manylane.capture 1 start SNAPLEN BUFFER` | `ring LANE` for each lane, with the files of the ring; then `started` |
//! | | later: `ring LANE` for each new lane |
//! | anything | `refused WHY` |

use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;

/// Begins each request, and the name of a socket that answers: `manylane.capture.PID.N`.
pub const NAME_PREFIX: &str = "manylane.capture";
/// Version of the messages; the rings have their own.
const VERSION: u32 = 1;
/// Maximum size of a message, in bytes: a description with very many devices and lanes.
pub const MESSAGE_LEN_MAX: usize = 64 << 10;

/// A message of the side that captures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Asks for a [`Description`].
    Describe,
    /// Starts a capture.
    Start {
        /// Bytes kept of each frame.
        snaplen: usize,
        /// Bytes of each ring.
        buffer: usize,
    },
}

impl Request {
    /// The message.
    #[must_use]
    pub fn to_text(self) -> String {
        match self {
            Self::Describe => format!("{NAME_PREFIX} {VERSION} describe"),
            Self::Start { snaplen, buffer } => format!("{NAME_PREFIX} {VERSION} start {snaplen} {buffer}"),
        }
    }

    /// Parses a request.
    ///
    /// # Errors
    /// The reason for the refusal.
    pub fn parse(message: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(message).map_err(|_| "the request is not UTF-8".to_owned())?;
        let words: Vec<&str> = text.split_ascii_whitespace().collect();
        let (version, rest) = match words.as_slice() {
            [NAME_PREFIX, version, rest @ ..] => (*version, rest),
            _ => return Err("unknown request".into()),
        };
        if version.parse() != Ok(VERSION) {
            return Err(format!(
                "this process has version {VERSION} of captures: capture it with the manylane that it was built with"
            ));
        }
        let number = |word: &str| word.parse().map_err(|_| format!("invalid number {word:?}"));
        match rest {
            ["describe"] => Ok(Self::Describe),
            ["start", snaplen, buffer] => {
                Ok(Self::Start { snaplen: number(snaplen)?, buffer: number(buffer)? })
            }
            _ => Err("unknown request".into()),
        }
    }
}

/// Describes a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// The address that it is bound to.
    pub address: SocketAddr,
    /// Index and name of its devices.
    pub devices: Vec<(u32, String)>,
    /// Ids of its lanes.
    pub lanes: Vec<u64>,
    /// The process that is capturing it.
    pub captured_by: Option<u32>,
}

/// A message of the side with the lanes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The socket.
    Description(Description),
    /// The ring of a lane, with its files.
    Ring(u64),
    /// All lanes have been offered a ring.
    Started,
    /// The request was refused, for this reason.
    Refused(String),
}

impl Reply {
    /// The message.
    #[must_use]
    pub fn to_text(&self) -> String {
        match self {
            Self::Ring(lane) => format!("ring {lane}"),
            Self::Started => "started".into(),
            Self::Refused(why) => format!("refused {why}"),
            Self::Description(about) => {
                let mut text = format!("address {}\n", about.address);
                // Writing to a string does not fail.
                for (ifindex, name) in &about.devices {
                    _ = writeln!(text, "device {ifindex} {name}");
                }
                for lane in &about.lanes {
                    _ = writeln!(text, "lane {lane}");
                }
                if let Some(pid) = about.captured_by {
                    _ = writeln!(text, "captured {pid}");
                }
                text
            }
        }
    }

    /// Parses a reply.
    ///
    /// # Errors
    /// `InvalidData` if it is none.
    pub fn parse(message: &[u8]) -> io::Result<Self> {
        let wrong = || io::Error::new(io::ErrorKind::InvalidData, "unexpected reply");
        let text = std::str::from_utf8(message).map_err(|_| wrong())?;
        if let Some(why) = text.strip_prefix("refused ") {
            // Printed to a terminal: strip what another process may have injected.
            return Ok(Self::Refused(why.chars().filter(|c| !c.is_control()).take(400).collect()));
        }
        let mut about = None::<Description>;
        for line in text.lines() {
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            match (words.as_slice(), &mut about) {
                (["ring", lane], None) => return Ok(Self::Ring(lane.parse().map_err(|_| wrong())?)),
                (["started"], None) => return Ok(Self::Started),
                (["address", address], None) => {
                    let address = address.parse().map_err(|_| wrong())?;
                    about = Some(Description {
                        address,
                        devices: Vec::new(),
                        lanes: Vec::new(),
                        captured_by: None,
                    });
                }
                (["device", index, name], Some(about)) => {
                    let name = name.chars().filter(|c| !c.is_control()).collect();
                    about.devices.push((index.parse().map_err(|_| wrong())?, name));
                }
                (["lane", lane], Some(about)) => about.lanes.push(lane.parse().map_err(|_| wrong())?),
                (["captured", pid], Some(about)) => about.captured_by = pid.parse().ok(),
                // An unknown line, from a later version.
                (_, Some(_)) => {}
                (_, None) => return Err(wrong()),
            }
        }
        about.map(Self::Description).ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_responses_round_trip() {
        for ask in [Request::Describe, Request::Start { snaplen: 96, buffer: 1 << 20 }] {
            assert_eq!(Request::parse(ask.to_text().as_bytes()), Ok(ask));
        }
        let about = Description {
            address: "[fd77::1]:53".parse().unwrap(),
            devices: vec![(3, "eth0".into()), (9, "eth1.7".into())],
            lanes: vec![0, 12],
            captured_by: Some(77),
        };
        for answer in [
            Reply::Description(about.clone()),
            Reply::Description(Description {
                devices: Vec::new(),
                lanes: Vec::new(),
                captured_by: None,
                ..about
            }),
            Reply::Ring(7),
            Reply::Started,
            Reply::Refused("only root may".into()),
        ] {
            assert_eq!(Reply::parse(answer.to_text().as_bytes()).unwrap(), answer);
        }
    }

    #[test]
    fn invalid_messages_are_refused() {
        for bad in
            ["", "describe", "manylane.capture", "manylane.capture 1 stop", "manylane.capture 1 start 1 x"]
        {
            assert!(Request::parse(bad.as_bytes()).is_err(), "{bad:?}");
        }
        assert!(Request::parse(b"\xff").is_err());
        assert!(Request::parse(b"manylane.capture 2 describe").unwrap_err().contains("version 1"));
        for bad in ["", "ring", "ring x", "address x", "lane 1", "what", "address 1.2.3.4:5\nlane x"] {
            assert!(Reply::parse(bad.as_bytes()).is_err(), "{bad:?}");
        }
        assert_eq!(Reply::parse(b"refused \x1b[2Jno").unwrap(), Reply::Refused("[2Jno".into()));
    }
}
