//! Who wins when more comes than a lane gets done: the oldest data, or the newest.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, ErrorKind, Result};

/// What is given up when more comes than a lane gets done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Overload {
    /// What comes, while the queue is full: what is queued is handled in its order, however old it is by then.
    #[default]
    Oldest,
    /// What is queued, when it is more than half of what the queue can hold: it is thrown away unread, up to the newest, and
    /// counted in [`LaneCounters::overtaken`](crate::LaneCounters::overtaken). A lane looks at its queue after each full batch;
    /// for kernel sockets that is one more system call. Before Linux 4.12 these are never found to be full.
    Newest,
}

impl fmt::Display for Overload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Oldest => "oldest",
            Self::Newest => "newest",
        })
    }
}

impl FromStr for Overload {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "oldest" => Ok(Self::Oldest),
            "newest" => Ok(Self::Newest),
            _ => Err(Error::new(ErrorKind::Config, format!("overload {text:?} is none of oldest, newest"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_said_as_it_is_shown() {
        assert_eq!(Overload::default(), Overload::Oldest);
        for overload in [Overload::Oldest, Overload::Newest] {
            assert_eq!(overload.to_string().parse::<Overload>().unwrap(), overload);
        }
        assert_eq!("newest".parse::<Overload>().unwrap(), Overload::Newest);
        for text in ["", "Newest", "newest ", "latest"] {
            let err = text.parse::<Overload>().unwrap_err();
            assert_eq!(err.kind(), ErrorKind::Config);
            assert!(err.to_string().contains("oldest, newest"), "{err}");
        }
    }
}
