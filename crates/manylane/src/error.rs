//! Errors of set-up and control. Failures of single datagrams are [counters](crate::LaneCounters),
//! not errors.

use std::error::Error as StdError;
use std::{fmt, io};

use manylane_sys::errno::{
    EACCES, EADDRINUSE, EADDRNOTAVAIL, EAFNOSUPPORT, EMFILE, ENFILE, ENOBUFS, ENOMEM, ENOPROTOOPT, ENOSYS,
    EOPNOTSUPP, EPERM,
};

/// The kind of an error, for programs that react to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An option has an invalid value.
    Config,
    /// The address does not parse, resolve, or belong to this machine.
    Address,
    /// The port is in use.
    InUse,
    /// A privilege is missing.
    Permission,
    /// A limit was reached: descriptors, memory, buffer sizes, sockets of a process that are
    /// queried at once.
    Limit,
    /// The kernel does not support what was requested.
    Unsupported,
    /// The application's closure panicked.
    Panicked,
    /// The last lane of a socket cannot be removed.
    LastLane,
    /// No such lane, or the call is not valid in the socket's state.
    State,
    /// Any other error that the system reported.
    Io,
}

/// An error that says what to fix: the option, the capability, the limit or the sysctl.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// The result of a fallible call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    pub(crate) fn with(
        kind: ErrorKind,
        message: impl Into<String>,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        Self { kind, message: message.into(), source: Some(source.into()) }
    }

    /// A system error, with the kind and the advice for its number.
    pub(crate) fn system(doing: impl fmt::Display, err: io::Error) -> Self {
        let (kind, advice) = match err.raw_os_error() {
            Some(EMFILE) => (ErrorKind::Limit, ": raise the limit of open files (ulimit -n, LimitNOFILE=)"),
            Some(ENFILE) => (ErrorKind::Limit, ": raise the sysctl fs.file-max"),
            Some(ENOMEM | ENOBUFS) => (
                ErrorKind::Limit,
                ": raise the memory limit (ulimit -v, memory cgroup), or lower batch() or lanes()",
            ),
            Some(EPERM | EACCES) => (ErrorKind::Permission, ""),
            Some(EADDRINUSE) => (ErrorKind::InUse, ""),
            Some(EADDRNOTAVAIL) => (
                ErrorKind::Address,
                ": no interface of this machine has this address (or IPv6 is off: net.ipv6.conf.all.disable_ipv6)",
            ),
            Some(EAFNOSUPPORT) => (ErrorKind::Address, ": this kernel has no IPv6, or it is turned off"),
            Some(ENOPROTOOPT | EOPNOTSUPP | ENOSYS) => {
                (ErrorKind::Unsupported, ": this kernel does not support it")
            }
            _ => (ErrorKind::Io, ""),
        };
        Self::with(kind, format!("{doing}{advice}"), err)
    }

    /// The message with all its causes on one line, for logs and reasons. Of a long cause (the
    /// eBPF verifier's log) only the first line.
    pub(crate) fn chain(&self) -> String {
        let mut text = self.message.clone();
        let mut cause = self.source();
        while let Some(err) = cause {
            let cause_text = err.to_string();
            text = format!("{text}: {}", cause_text.lines().next().unwrap_or_default());
            cause = err.source();
        }
        text
    }

    /// The kind of this error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

impl From<Error> for io::Error {
    fn from(err: Error) -> Self {
        let kind = match err.kind {
            ErrorKind::Config => io::ErrorKind::InvalidInput,
            ErrorKind::Address => io::ErrorKind::AddrNotAvailable,
            ErrorKind::InUse => io::ErrorKind::AddrInUse,
            ErrorKind::Permission => io::ErrorKind::PermissionDenied,
            ErrorKind::Limit => io::ErrorKind::OutOfMemory,
            ErrorKind::Unsupported => io::ErrorKind::Unsupported,
            _ => io::ErrorKind::Other,
        };
        Self::new(kind, err)
    }
}

/// The system error number of `err` or of its causes, if there is one.
pub(crate) fn errno_of(err: &(dyn StdError + 'static)) -> Option<i32> {
    let mut cause = Some(err);
    let mut code = None;
    while let Some(err) = cause {
        code = err.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error).or(code);
        cause = err.source();
    }
    code
}
