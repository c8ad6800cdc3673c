//! Reasons that the report counts: why a socket has no lanes, or not all that lanes can have.

/// Generates [`Reason`]. A row has the variant, its number, one word, and the description.
macro_rules! reasons {
    ($($reason:ident = $number:literal, $name:literal, $description:literal;)*) => {
        /// The reason why a socket is, or became again, a plain one. The numbers are indices of
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
    Connect = 0, "connect", "the program connected the socket to one peer";
    Reuseport = 1, "reuseport", "the program shares the port itself (SO_REUSEPORT)";
    Option = 2, "option", "the program set a socket option that lanes do not support";
    Multicast = 3, "multicast", "the socket joined a multicast group, of which each lane would get a copy";
    ErrorQueue = 4, "error-queue", "the program asks for errors (IP_RECVERR), which reach one lane only";
    Passed = 5, "passed", "the program sent the descriptor to another process (SCM_RIGHTS)";
    Exec = 6, "exec", "a program that it started inherited the descriptor";
    Pattern = 7, "pattern", "a thread waits for the socket without receiving from it";
    SharedEpoll = 8, "shared-epoll", "several threads or processes wait on one epoll instance";
    NestedEpoll = 9, "nested-epoll", "the socket is in a nested epoll instance";
    Events = 10, "events", "the program uses EPOLLONESHOT, or polls too many descriptors at once";
    Signals = 11, "signals",
        "the program has signal handlers with and without SA_RESTART, and receives that block";
    NoSocket = 12, "no-socket", "cannot open or bind the socket of a lane (open files, privileges)";
    Full = 13, "full", "a table of the library is full, or the limit of open files is too low for lanes";
    Address = 14, "address", "the socket is bound to a multicast or broadcast address";
    Ioctl = 15, "ioctl", "the program used an ioctl or fcntl that lanes do not support";
    Shutdown = 16, "shutdown", "the program shut the socket down";
    NoQueue = 17, "no-queue", "engine xdp: no device in use has its address, or has a free queue";
    Control = 18, "control",
        "engine xdp: the program set options that only kernel sockets support (control messages, TOS, marks)";
    NoLease = 19, "no-lease",
        "engine xdp: the launcher leased no queues (it has ended, or has no free descriptors)";
    Forked = 20, "forked",
        "the program forked before it bound the socket, or before the socket had lanes and after it had bound thousands of others";
    ReplyFailed = 21, "reply-failed", "a reply in a batch failed; the program's next send returns the error";
    Namespace = 22, "namespace", "its receivers are in another network namespace than the socket";
    Inherited = 23, "inherited", "the socket was bound before the program started";
    Seccomp = 24, "seccomp", "the program installed a seccomp filter";
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
