//! Identifies the process at the other end of a connection.

use std::io;
use std::os::fd::{BorrowedFd, FromRawFd as _, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process;

use crate::{check, sock};

/// Credentials of the peer of a connection, from the kernel, as of its connect or listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCred {
    /// Process id as this process sees it; 0 if it is not visible.
    pub pid: u32,
    /// Effective user as this process sees it.
    pub uid: u32,
}

impl PeerCred {
    /// True if the peer certainly belongs to the user `uid`. All users that a user namespace does
    /// not map share one number (`kernel.overflowuid`), so that number identifies no user.
    #[must_use]
    pub fn is_user(&self, uid: u32) -> bool {
        self.uid == uid && overflow_uid() != Some(uid)
    }
}

/// The number of all users that this process's user namespace does not map; none if it maps all.
fn overflow_uid() -> Option<u32> {
    (!maps_all(&read_text("/proc/thread-self/uid_map"))).then(overflow_number)
}

/// A number that never identifies a user to this process: the number of users that are not mapped
/// in its user namespace, or in one that it may enter. None if it is certainly this process's own.
#[must_use]
pub fn ambiguous_uid() -> Option<u32> {
    let number = overflow_number();
    let is_own = effective_uid() == number && overflow_uid().is_none();
    (!is_own).then_some(number)
}

fn overflow_number() -> u32 {
    /// The kernel's default, if `/proc` is not readable.
    const DEFAULT: u32 = 65534;
    read_text("/proc/sys/kernel/overflowuid").trim().parse().unwrap_or(DEFAULT)
}

fn read_text(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// True if a uid map (first number inside, first number outside, count) has all users except -1,
/// which is no user.
fn maps_all(map: &str) -> bool {
    let counts = map.lines().filter_map(|line| line.split_ascii_whitespace().nth(2)?.parse::<u64>().ok());
    counts.fold(0, u64::saturating_add) >= u64::from(u32::MAX)
}

/// The credentials of the peer (`SO_PEERCRED`).
///
/// # Errors
/// Those of `getsockopt(2)`.
pub fn peer_cred(fd: BorrowedFd<'_>) -> io::Result<PeerCred> {
    let [pid, uid, _gid]: [u32; 3] = sock::get(fd, libc::SOL_SOCKET, libc::SO_PEERCRED)?;
    Ok(PeerCred { pid, uid })
}

/// A connected process, which cannot be confused with any other.
#[derive(Debug)]
pub struct PeerProcess {
    /// Its credentials when it connected.
    pub cred: PeerCred,
    pidfd: OwnedFd,
}

impl PeerProcess {
    /// The peer of an accepted connection.
    ///
    /// # Errors
    /// `ESRCH` if it has ended; before Linux 6.5 also `EINVAL` if it is not visible.
    pub fn from_socket(fd: BorrowedFd<'_>) -> io::Result<Self> {
        /// Defined in asm-generic/socket.h, since Linux 6.5.
        const SO_PEERPIDFD: libc::c_int = 77;
        let peer = peer_cred(fd)?;
        let requested = sock::get(fd, libc::SOL_SOCKET, SO_PEERPIDFD);
        let raw: libc::c_int = match requested {
            Err(err) if err.raw_os_error() == Some(libc::ENOPROTOOPT) => {
                // By pid, which another process could have by now. A peer that delays until its
                // pid is reused can only be mistaken for a process that connects, too.
                // SAFETY: pidfd_open(2), since Linux 5.3, takes two numbers.
                check(unsafe { libc::syscall(libc::SYS_pidfd_open, peer.pid, 0) } as libc::c_int)?
            }
            requested => requested?,
        };
        // SAFETY: the descriptor is new, and this value is its only owner.
        Ok(Self { cred: peer, pidfd: unsafe { OwnedFd::from_raw_fd(raw) } })
    }

    /// True if it has not ended.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&now)) == Ok(0)
    }

    /// True if both are certainly the same living process, and its user is unchanged.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        // A pid is reused only after its process has ended. All processes that are not visible
        // share pid 0.
        let is_one = self.cred.pid != 0 && self.cred == other.cred;
        (std::ptr::eq(self, other) || is_one) && self.is_alive() && other.is_alive()
    }
}

/// The effective user of this process.
#[must_use]
pub fn effective_uid() -> u32 {
    process::geteuid().as_raw()
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn an_invisible_process_is_the_same_as_none() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let with_pid = |pid| {
            let process = PeerProcess::from_socket(ours.as_fd()).unwrap();
            PeerProcess { cred: PeerCred { pid, ..process.cred }, ..process }
        };
        let own = std::process::id();
        assert!(with_pid(own).is_same(&with_pid(own)));
        assert!(!with_pid(0).is_same(&with_pid(0)));
    }

    #[test]
    fn an_ambiguous_uid_identifies_no_user() {
        for (map, all) in [
            ("         0          0 4294967295\n", true),
            ("0 0 1000\n1000 100000 4294966295\n", true),
            ("         0       1000          1\n", false),
            ("0 100000 65536\n", false),
            ("", false),
        ] {
            assert_eq!(maps_all(map), all, "{map}");
        }
        let own = effective_uid();
        let is_certain = overflow_uid() != Some(own);
        assert_eq!(PeerCred { pid: 1, uid: own }.is_user(own), is_certain);
        assert!(!PeerCred { pid: 1, uid: own.wrapping_add(1) }.is_user(own));
    }
}
