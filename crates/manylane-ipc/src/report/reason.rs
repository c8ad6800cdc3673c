//! Reasons that the report counts: why a socket has no lanes, or not all that lanes can have.

/// Why a socket is, or became again, a plain one. The numbers are indices of
/// [`Report::reasons`](super::Report::reasons).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs, reason = "description() says it")]
pub enum Reason {
    Connect = 0,
    Reuseport = 1,
    Option = 2,
    Multicast = 3,
    ErrorQueue = 4,
    Passed = 5,
    Exec = 6,
    Pattern = 7,
    SharedEpoll = 8,
    NestedEpoll = 9,
    Events = 10,
    Signals = 11,
    NoSocket = 12,
    Full = 13,
    Address = 14,
    Ioctl = 15,
    Shutdown = 16,
    NoQueue = 17,
    Control = 18,
    NoLease = 19,
    Forked = 20,
    ReplyFailed = 21,
    Namespace = 22,
    Inherited = 23,
    Seccomp = 24,
}

impl Reason {
    /// All reasons, in the order of their numbers.
    pub const ALL: [Self; 25] = [
        Self::Connect,
        Self::Reuseport,
        Self::Option,
        Self::Multicast,
        Self::ErrorQueue,
        Self::Passed,
        Self::Exec,
        Self::Pattern,
        Self::SharedEpoll,
        Self::NestedEpoll,
        Self::Events,
        Self::Signals,
        Self::NoSocket,
        Self::Full,
        Self::Address,
        Self::Ioctl,
        Self::Shutdown,
        Self::NoQueue,
        Self::Control,
        Self::NoLease,
        Self::Forked,
        Self::ReplyFailed,
        Self::Namespace,
        Self::Inherited,
        Self::Seccomp,
    ];

    /// One word, for tables and documentation.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.texts().0
    }

    /// The description for users.
    #[must_use]
    pub fn description(self) -> &'static str {
        self.texts().1
    }

    fn texts(self) -> (&'static str, &'static str) {
        match self {
            Self::Connect => ("connect", "the program connected the socket to one peer"),
            Self::Reuseport => ("reuseport", "the program shares the port itself (SO_REUSEPORT)"),
            Self::Option => ("option", "the program set a socket option that lanes do not support"),
            Self::Multicast => {
                ("multicast", "the socket joined a multicast group, of which each lane would get a copy")
            }
            Self::ErrorQueue => {
                ("error-queue", "the program asks for errors (IP_RECVERR), which reach one lane only")
            }
            Self::Passed => ("passed", "the program sent the descriptor to another process (SCM_RIGHTS)"),
            Self::Exec => ("exec", "a program that it started inherited the descriptor"),
            Self::Pattern => ("pattern", "a thread waits for the socket without receiving from it"),
            Self::SharedEpoll => ("shared-epoll", "several threads or processes wait on one epoll instance"),
            Self::NestedEpoll => ("nested-epoll", "the socket is in a nested epoll instance"),
            Self::Events => {
                ("events", "the program uses EPOLLONESHOT, or polls too many descriptors at once")
            }
            Self::Signals => (
                "signals",
                "the program has signal handlers with and without SA_RESTART, and receives that block",
            ),
            Self::NoSocket => {
                ("no-socket", "cannot open or bind the socket of a lane (open files, privileges)")
            }
            Self::Full => {
                ("full", "a table of the library is full, or the limit of open files is too low for lanes")
            }
            Self::Address => ("address", "the socket is bound to a multicast or broadcast address"),
            Self::Ioctl => ("ioctl", "the program used an ioctl or fcntl that lanes do not support"),
            Self::Shutdown => ("shutdown", "the program shut the socket down"),
            Self::NoQueue => {
                ("no-queue", "engine xdp: no device in use has its address, or has a free queue")
            }
            Self::Control => (
                "control",
                "engine xdp: the program set options that only kernel sockets support (control messages, TOS, marks)",
            ),
            Self::NoLease => (
                "no-lease",
                "engine xdp: the launcher leased no queues (it has ended, or has no free descriptors)",
            ),
            Self::Forked => (
                "forked",
                "the program forked before it bound the socket, or before the socket had lanes and after it had bound thousands of others",
            ),
            Self::ReplyFailed => {
                ("reply-failed", "a reply in a batch failed; the program's next send returns the error")
            }
            Self::Namespace => {
                ("namespace", "its receivers are in another network namespace than the socket")
            }
            Self::Inherited => ("inherited", "the socket was bound before the program started"),
            Self::Seccomp => ("seccomp", "the program installed a seccomp filter"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_have_their_numbers_and_names_of_their_own() {
        for (at, reason) in Reason::ALL.iter().enumerate() {
            assert_eq!(*reason as usize, at);
            assert!(Reason::ALL[..at].iter().all(|other| other.name() != reason.name()));
        }
    }
}
