//! Reasons that the report counts: why a socket has no lanes, or not all that lanes can have.

/// Generates [`Reason`]. A row has the variant, its number, one word, and the description.
macro_rules! reasons {
    ($($reason:ident = $number:literal, $name:literal, $description:literal;)*) => {
        /// Why a socket is, or became again, a plain one. The numbers are indices of
        /// [`Report::reasons`](super::Report::reasons).
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        pub enum Reason {
            $(#[doc = $description] $reason = $number,)*
        }

        impl Reason {
            /// All reasons, in the order of their numbers.
            pub const ALL: [Self; [$($number,)*].len()] = [$(Self::$reason,)*];

            /// One word, for tables and documentation.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$reason => $name,)* }
            }

            /// The description for users.
            #[must_use]
            pub fn description(self) -> &'static str {
                match self { $(Self::$reason => $description,)* }
            }
        }
    };
}

reasons! {
    Connect = 0, "connect", "the socket was connected to one peer";
    Reuseport = 1, "reuseport", "the program shares the port by itself (SO_REUSEPORT)";
    Option = 2, "option", "a socket option was set that a lane cannot mirror";
    Multicast = 3, "multicast", "the socket joined a group: every lane would get a copy";
    ErrorQueue = 4, "error-queue", "errors are asked for (IP_RECVERR): they reach one lane only";
    Passed = 5, "passed", "the descriptor was sent to another process (SCM_RIGHTS)";
    Exec = 6, "exec", "the descriptor stays open in a program that was started";
    Pattern = 7, "pattern", "not every thread that waits for the socket also receives";
    SharedEpoll = 8, "shared-epoll", "several threads or processes wait on one epoll instance";
    NestedEpoll = 9, "nested-epoll", "the socket is in an epoll instance inside another one";
    Events = 10, "events", "EPOLLONESHOT, or a poll of more descriptors than can be looked through";
    Signals = 11, "signals", "signal handlers with and without SA_RESTART, and blocking receives";
    NoSocket = 12, "no-socket", "a lane's socket could not be opened or bound (descriptors, privileges)";
    Full = 13, "full", "a table of the library is full, or the limit of open files leaves no room for lanes";
    Address = 14, "address", "bound to a multicast or broadcast address";
    Ioctl = 15, "ioctl", "an ioctl or fcntl was used that a lane cannot mirror";
    Shutdown = 16, "shutdown", "the socket was shut down";
    NoQueue = 17, "no-queue", "engine xdp: no device in use has its address, or a queue to spare for it";
    Control = 18, "control",
        "engine xdp: options ask for what only the kernel's socket gives (control messages, TOS, marks)";
    NoLease = 19, "no-lease",
        "engine xdp: the launcher leased no queues (it is gone, or has no descriptors left)";
    Forked = 20, "forked",
        "the program forked before the socket was bound, or before it had lanes and after thousands of others";
    ReplyFailed = 21, "reply-failed",
        "a reply put together with others failed; the program's next send says why";
    Namespace = 22, "namespace", "its receivers are in another network namespace than the socket";
    Inherited = 23, "inherited", "the socket was bound before the program was started";
    Seccomp = 24, "seccomp", "the program forbade itself system calls (seccomp)";
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
