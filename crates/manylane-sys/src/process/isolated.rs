//! Programs that never have descriptors of this process beyond the first three.
//!
//! Close-on-exec is not enough: a child has copies of all descriptors until its exec completes,
//! which takes some tenths of a second on a busy machine. Descriptors that another thread closes
//! meanwhile stay open that long, and the port of a socket stays taken. Before Linux 5.9 that
//! happens here, too.
//!
//! ```text
//! thread of the caller ─► thread with a table of its own (0, 1, 2) ─► the program
//!                             │ its pipes are in that table only
//!                             └► threads that read and write them, and share the table
//! ```

use std::io::{self, Write as _};
use std::process::{Command, Output, Stdio};
use std::thread;

use crate::netns::NetNs;

/// ThreadSanitizer knows only one descriptor table per process. With a second one it treats the
/// same number in two tables as one object, and writes its report to a descriptor that is another
/// file in this thread.
const SINGLE_FD_TABLE: bool = cfg!(manylane_tsan);

/// Runs `work`, in `namespace` if there is one, on a thread that has only the first three
/// descriptors.
///
/// # Safety
/// Neither `work` nor its result may own or use a descriptor that it has not opened itself: the
/// number is invalid, or another file.
pub(crate) unsafe fn run_on_isolated_thread<T: Send>(
    namespace: Option<&NetNs>,
    work: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    let work = || {
        namespace.map_or(Ok(()), NetNs::enter)?;
        if !SINGLE_FD_TABLE {
            let [first, last] = [3, libc::c_uint::MAX];
            // SAFETY: takes numbers and no pointer. The thread gets a table of its own, with
            // copies of only the descriptors below `first`; those of the process stay open. The
            // caller ensures that no value here owns one.
            unsafe { libc::syscall(libc::SYS_close_range, first, last, libc::CLOSE_RANGE_UNSHARE) };
        }
        work()
    };
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("manylane-program".into()).spawn_scoped(scope, work)?;
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread that ran it panicked")))
    })
}

/// Runs `program` to its end, with `input` as standard input, in `namespace` if there is one, and
/// returns its output. The child never has descriptors of this process beyond the first three.
///
/// # Errors
/// If there is no such program, no thread or no descriptor, or this process may not enter the
/// namespace.
pub fn run_isolated(
    namespace: Option<&NetNs>,
    program: &str,
    args: &[&str],
    input: &[u8],
) -> io::Result<Output> {
    let work = || {
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        if let Some(mut pipe) = child.stdin.take() {
            // If the program ended early, its own message is more useful.
            _ = pipe.write_all(input);
        }
        child.wait_with_output()
    };
    // SAFETY: `work` owns strings, bytes, and the pipes that it opens and closes.
    unsafe { run_on_isolated_thread(namespace, work) }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// True if the test `name` can run.
    pub(crate) fn can_unshare_fds(name: &str) -> bool {
        if SINGLE_FD_TABLE {
            crate::skip(name, &"ThreadSanitizer knows one table of descriptors in a process");
        }
        !SINGLE_FD_TABLE
    }

    /// A socket without close-on-exec, so that a copy would be visible after the exec, with its
    /// inode.
    pub(crate) fn socket() -> (std::os::fd::OwnedFd, String) {
        use std::os::fd::AsFd as _;
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let inode = crate::sock::inode(socket.as_fd()).unwrap();
        (rustix::io::dup(&socket).unwrap(), format!("socket:[{inode}]"))
    }

    #[test]
    fn an_isolated_program_inherits_no_descriptors() {
        if !can_unshare_fds("an_isolated_program_inherits_no_descriptors") {
            return;
        }
        let (_socket, ours) = socket();
        let list = ["-c", "cat; ls -l /proc/$$/fd; echo said >&2; exit 3"];
        let done = run_isolated(None, "sh", &list, b"read").unwrap();
        let printed = String::from_utf8(done.stdout).unwrap();
        assert!(
            printed.starts_with("read") && printed.contains("pipe:") && !printed.contains(&ours),
            "{printed}"
        );
        assert_eq!((done.stderr.as_slice(), done.status.code()), (b"said\n".as_slice(), Some(3)));
        // Any other child has it; nothing was closed here.
        let done = Command::new("sh").args(list).stdin(Stdio::null()).output().unwrap();
        assert!(String::from_utf8(done.stdout).unwrap().contains(&ours));
        assert_eq!(
            run_isolated(None, "no-such-program", &[], b"").unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
    }
}
