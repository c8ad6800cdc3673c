//! Who wins when more comes than a lane gets done: the oldest data, or the newest.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, ErrorKind, Result};

/// What is given up when more comes than a lane gets done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DropPolicy {
    /// What comes, while the queue is full: what is queued is handled in its order, however old it is by then.
    #[default]
    Tail,
    /// What is queued, when it is more than half of what the queue can hold: it is thrown away
    /// unread, up to the newest, and counted in
    /// [`LaneCounters::dropped_stale`](crate::LaneCounters::dropped_stale). A lane looks at its
    /// queue after each full batch; for kernel sockets that is one more system call. Before Linux
    /// 4.12 these are never found to be full.
    Head,
}

impl fmt::Display for DropPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Tail => "oldest",
            Self::Head => "newest",
        })
    }
}

impl FromStr for DropPolicy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "oldest" => Ok(Self::Tail),
            "newest" => Ok(Self::Head),
            _ => Err(Error::new(ErrorKind::Config, format!("overload {text:?} is none of oldest, newest"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_said_as_it_is_shown() {
        assert_eq!(DropPolicy::default(), DropPolicy::Tail);
        for overload in [DropPolicy::Tail, DropPolicy::Head] {
            assert_eq!(overload.to_string().parse::<DropPolicy>().unwrap(), overload);
        }
        assert_eq!("newest".parse::<DropPolicy>().unwrap(), DropPolicy::Head);
        for text in ["", "Newest", "newest ", "latest"] {
            let err = text.parse::<DropPolicy>().unwrap_err();
            assert_eq!(err.kind(), ErrorKind::Config);
            assert!(err.to_string().contains("oldest, newest"), "{err}");
        }
    }
}
