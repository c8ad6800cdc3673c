//! Programs that keep running and never have descriptors of this process beyond the first three:
//! see `process/isolated.rs`.

use std::io::{self, BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use crate::netns::NetNs;
use crate::process::isolated::run_on_isolated_thread;

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

/// Starts `program`, in `namespace` if there is one, with `variables` added to the environment,
/// and as `user` if there is one. The child never has descriptors of this process beyond the first
/// three.
///
/// # Errors
/// As for [`run_isolated`](crate::process::run_isolated).
pub fn spawn_isolated(
    namespace: Option<&NetNs>,
    program: &str,
    args: &[&str],
    variables: &[(&str, &str)],
    user: Option<u32>,
) -> io::Result<IsolatedChild> {
    let work = || {
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
    // SAFETY: `work` owns strings, and the pipes that it opens, which stay in threads with that
    // table; without them a `Child` is only a number.
    unsafe { run_on_isolated_thread(namespace, work) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::isolated::tests::{can_unshare_fds, socket};

    #[test]
    fn an_isolated_child_talks_until_released() {
        if !can_unshare_fds("an_isolated_child_talks_until_released") {
            return;
        }
        let (_socket, ours) = socket();
        let script = "ls -l /proc/$$/fd; echo word $WORD; cat; echo over; exit 3";
        let IsolatedChild { mut process, lines, stdin_guard: keep } =
            spawn_isolated(None, "sh", &["-c", script], &[("WORD", "of honour")], None).unwrap();
        let told: Vec<String> = lines.iter().take_while(|line| line != "word of honour").collect();
        assert!(told.iter().any(|line| line.contains("pipe:")), "{told:?}");
        assert!(!told.iter().any(|line| line.contains(&ours)), "{told:?}");
        // It reads until then.
        assert_eq!(lines.try_recv().ok(), None);
        drop(keep);
        assert_eq!(lines.iter().collect::<Vec<_>>(), ["over"]);
        assert_eq!(process.wait().unwrap().code(), Some(3));
        let missing = spawn_isolated(None, "no-such-program", &[], &[], None);
        assert_eq!(missing.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
