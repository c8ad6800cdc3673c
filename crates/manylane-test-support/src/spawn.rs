//! Programs that keep running and never have descriptors of this process beyond the first three.
//! The reason is in manylane-sys, `process/isolated.rs`, whose programs run to their end. Benches
//! need those too, and this crate is for tests alone: neither file can use the other.
//!
//! ```text
//! thread of the caller ─► thread with a table of its own (0, 1, 2) ─► the program
//!                             │ its pipes are in that table only
//!                             └► threads that read and write them, and share the table
//! ```

use std::io::{self, BufRead as _, BufReader};
use std::os::fd::BorrowedFd;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// ThreadSanitizer knows only one descriptor table per process, as told there.
const SINGLE_FD_TABLE: bool = cfg!(manylane_tsan);

/// A program started by [`spawn_isolated`]. Threads of their own have its pipes, not this value.
#[derive(Debug)]
pub struct IsolatedChild {
    /// The process.
    pub process: Child,
    /// Lines of its standard output, without their ends.
    pub lines: Receiver<String>,
    /// Its standard input stays open as long as this lives.
    pub stdin_guard: StdinGuard,
}

/// See [`IsolatedChild::stdin_guard`].
#[derive(Debug)]
pub struct StdinGuard(#[expect(dead_code, reason = "lives: that is all")] Sender<std::convert::Infallible>);

/// Starts `program`, in the network namespace `namespace` if there is one, with `variables` added
/// to the environment, and as `user` if there is one. The child never has descriptors of this
/// process beyond the first three.
///
/// # Errors
/// If there is no such program, no thread or no descriptor, or this process may not enter the
/// namespace.
pub fn spawn_isolated(
    namespace: Option<BorrowedFd<'_>>,
    program: &str,
    args: &[&str],
    variables: &[(&str, &str)],
    user: Option<u32>,
) -> io::Result<IsolatedChild> {
    let work = || {
        if let Some(namespace) = namespace {
            move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))?;
        }
        if !SINGLE_FD_TABLE {
            let [first, last] = [3, libc::c_uint::MAX];
            // SAFETY: takes numbers and no pointer. The thread gets a table of its own, with
            // copies of only the descriptors below `first`; those of the process stay open. From
            // here on, this closure uses only strings and the pipes that it opens. They stay in
            // threads with that table: without them, the `Child` that leaves is only a number.
            unsafe { libc::syscall(libc::SYS_close_range, first, last, libc::CLOSE_RANGE_UNSHARE) };
        }
        let mut command = Command::new(program);
        command.args(args).envs(variables.iter().copied()).stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some(user) = user {
            command.uid(user).gid(user);
        }
        let mut process = command.spawn()?;
        let (input, output) = (process.stdin.take(), process.stdout.take());
        let ((keep, end), (sender, lines)) = (channel(), channel());
        // Threads started here share the table, and drop their values in it.
        let named = |name: &str| thread::Builder::new().name(name.into());
        named("manylane-stdin").spawn(move || {
            _ = end.recv();
            drop(input);
        })?;
        named("manylane-stdout").spawn(move || {
            let lines = output.into_iter().flat_map(|pipe| BufReader::new(pipe).lines());
            lines.map_while(Result::ok).try_for_each(|line| sender.send(line))
        })?;
        Ok(IsolatedChild { process, lines, stdin_guard: StdinGuard(keep) })
    };
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("manylane-program".into()).spawn_scoped(scope, work)?;
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread that ran it panicked")))
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd as _;

    use super::*;

    #[test]
    fn an_isolated_child_talks_until_released() {
        let why = "ThreadSanitizer knows one table of descriptors in a process";
        if !crate::need("an_isolated_child_talks_until_released", !SINGLE_FD_TABLE, why) {
            return;
        }
        // Without close-on-exec, so that a copy would be visible after the exec.
        let socket = rustix::io::dup(UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap();
        let ours = fs::read_link(format!("/proc/self/fd/{}", socket.as_raw_fd())).unwrap();
        let ours = ours.to_str().unwrap();
        let script = "ls -l /proc/$$/fd; echo word $WORD; cat; echo over; exit 3";
        let IsolatedChild { mut process, lines, stdin_guard: keep } =
            spawn_isolated(None, "sh", &["-c", script], &[("WORD", "of honour")], None).unwrap();
        let told: Vec<String> = lines.iter().take_while(|line| line != "word of honour").collect();
        assert!(told.iter().any(|line| line.contains("pipe:")), "{told:?}");
        assert!(!told.iter().any(|line| line.contains(ours)), "{told:?}");
        // It reads until then.
        assert_eq!(lines.try_recv().ok(), None);
        drop(keep);
        assert_eq!(lines.iter().collect::<Vec<_>>(), ["over"]);
        assert_eq!(process.wait().unwrap().code(), Some(3));
        let missing = spawn_isolated(None, "no-such-program", &[], &[], None);
        assert_eq!(missing.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
