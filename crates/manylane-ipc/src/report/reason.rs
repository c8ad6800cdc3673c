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
            Self::Connect => ("connect", "the socket was connected to one peer"),
            Self::Reuseport => ("reuseport", "the program shares the port by itself (SO_REUSEPORT)"),
            Self::Option => ("option", "a socket option was set that a lane cannot mirror"),
            Self::Multicast => ("multicast", "the socket joined a group: every lane would get a copy"),
            Self::ErrorQueue => {
                ("error-queue", "errors are asked for (IP_RECVERR): they reach one lane only")
            }
            Self::Passed => ("passed", "the descriptor was sent to another process (SCM_RIGHTS)"),
            Self::Exec => ("exec", "the descriptor stays open in a program that was started"),
            Self::Pattern => ("pattern", "not every thread that waits for the socket also receives"),
            Self::SharedEpoll => ("shared-epoll", "several threads or processes wait on one epoll instance"),
            Self::NestedEpoll => ("nested-epoll", "the socket is in an epoll instance inside another one"),
            Self::Events => {
                ("events", "EPOLLONESHOT, or a poll of more descriptors than can be looked through")
            }
            Self::Signals => {
                ("signals", "signal handlers with and without SA_RESTART, and blocking receives")
            }
            Self::NoSocket => {
                ("no-socket", "a lane's socket could not be opened or bound (descriptors, privileges)")
            }
            Self::Full => (
                "full",
                "a table of the library is full, or the limit of open files leaves no room for lanes",
            ),
            Self::Address => ("address", "bound to a multicast or broadcast address"),
            Self::Ioctl => ("ioctl", "an ioctl or fcntl was used that a lane cannot mirror"),
            Self::Shutdown => ("shutdown", "the socket was shut down"),
            Self::NoQueue => {
                ("no-queue", "engine xdp: no device in use has its address, or a queue to spare for it")
            }
            Self::Control => (
                "control",
                "engine xdp: options ask for what only the kernel's socket gives (control messages, TOS, marks)",
            ),
            Self::NoLease => (
                "no-lease",
                "engine xdp: the launcher leased no queues (it is gone, or has no descriptors left)",
            ),
            Self::Forked => (
                "forked",
                "the program forked before the socket was bound, or before it had lanes and after thousands of others",
            ),
            Self::ReplyFailed => {
                ("reply-failed", "a reply put together with others failed; the program's next send says why")
            }
            Self::Namespace => {
                ("namespace", "its receivers are in another network namespace than the socket")
            }
            Self::Inherited => ("inherited", "the socket was bound before the program was started"),
            Self::Seccomp => ("seccomp", "the program forbade itself system calls (seccomp)"),
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
