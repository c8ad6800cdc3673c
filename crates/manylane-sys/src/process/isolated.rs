//! A program that never has descriptors of this process beyond the first three.
//!
//! Close-on-exec is not enough: a child has copies of all descriptors until its exec completes,
//! which takes some tenths of a second on a busy machine. Descriptors that another thread closes
//! meanwhile stay open that long, and the port of a socket stays taken. Before Linux 5.9 that
//! happens here, too. So a thread with a table of its own starts the program.

use std::io::{self, Write as _};
use std::process::{Command, Output, Stdio};
use std::thread;

use crate::netns::NetNs;

/// ThreadSanitizer knows only one descriptor table per process. With a second one it treats the
/// same number in two tables as one object, and writes its report to a descriptor that is another
/// file in this thread.
const SINGLE_FD_TABLE: bool = cfg!(manylane_tsan);

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
        namespace.map_or(Ok(()), NetNs::enter)?;
        if !SINGLE_FD_TABLE {
            let [first, last] = [3, libc::c_uint::MAX];
            // SAFETY: takes numbers and no pointer. The thread gets a table of its own, with
            // copies of only the descriptors below `first`; those of the process stay open. From
            // here on, this closure uses only strings, bytes, and the pipes that it opens and
            // closes.
            unsafe { libc::syscall(libc::SYS_close_range, first, last, libc::CLOSE_RANGE_UNSHARE) };
        }
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        if let Some(mut pipe) = child.stdin.take() {
            // If the program ended early, its own message is more useful.
            _ = pipe.write_all(input);
        }
        child.wait_with_output()
    };
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("manylane-program".into()).spawn_scoped(scope, work)?;
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread that ran it panicked")))
    })
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsFd as _;

    use manylane_test_support::need;

    use super::*;

    #[test]
    fn an_isolated_program_inherits_no_descriptors() {
        let why = "ThreadSanitizer knows one table of descriptors in a process";
        if !need("an_isolated_program_inherits_no_descriptors", !SINGLE_FD_TABLE, why) {
            return;
        }
        // Without close-on-exec, so that a copy would be visible after the exec.
        let socket = rustix::io::dup(UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap();
        let ours = format!("socket:[{}]", crate::sock::inode(socket.as_fd()).unwrap());
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
