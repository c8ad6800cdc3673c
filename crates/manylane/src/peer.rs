//! Verifies the process behind a local socket, and enters its network namespace.

use std::os::unix::fs::MetadataExt;
use std::{fs, panic, thread};

use manylane_sys::netns::NetNs;
use manylane_sys::process;
use manylane_sys::unix_socket::PeerCred;

use crate::error::{Error, ErrorKind, Result};

/// Checks that the peer of a control or capture socket is the process in the socket's name, and
/// runs as a user that user `own` trusts.
pub(crate) fn verify_peer(peer: PeerCred, pid: u32, own: u32) -> std::result::Result<(), String> {
    let behind = peer.pid;
    if behind == 0 {
        return Err(
            "a process that cannot be seen from here has a socket in its name: nothing is asked there".into(),
        );
    }
    if behind != pid {
        let has_other_numbers = inner_pid(behind).is_some_and(|own| own == pid);
        let how = match has_other_numbers {
            true => format!(", which calls itself {pid} in a PID namespace of its own: ask for {behind}"),
            false => format!(" of the user {}, which is not that process: nothing is asked there", peer.uid),
        };
        return Err(format!("the socket in its name is one of process {behind}{how}"));
    }
    if own != 0 && !peer.is_user(own) && !peer.is_user(0) {
        return Err(format!("only root and the user {} of this process may ask", peer.uid));
    }
    Ok(())
}

/// The id of a process in its innermost PID namespace (`NSpid`, Linux 4.1).
pub(crate) fn inner_pid(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    numbers.split_ascii_whitespace().last()?.parse().ok()
}

/// Runs `work` in the network namespace of process `pid`.
pub(crate) fn run_in_netns<T: Send>(pid: u32, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    if !process::exists(pid) {
        return Err(Error::new(ErrorKind::State, format!("there is no process {pid}")));
    }
    let path = format!("/proc/{pid}/ns/net");
    let ours = fs::metadata("/proc/thread-self/ns/net")
        .map_err(|err| Error::system(format!("looking at the network namespace of process {pid}"), err))?;
    match fs::metadata(&path) {
        Ok(theirs) if (theirs.dev(), theirs.ino()) != (ours.dev(), ours.ino()) => {}
        // The namespace may be the same even if this process may not inspect it.
        _ => return work(),
    }
    let refused = |err| {
        let message = format!(
            "process {pid} is in another network namespace: ask as root, or from inside ('nsenter -n -t {pid}')"
        );
        Error::with(ErrorKind::Permission, message, err)
    };
    // On a thread of its own, because the caller must stay in its namespace. Connections stay in
    // the namespace in which they were made.
    thread::scope(|scope| {
        let working = scope.spawn(|| {
            NetNs::open(&path).and_then(|namespace| namespace.enter()).map_err(refused)?;
            work()
        });
        working.join().unwrap_or_else(|panicked| panic::resume_unwind(panicked))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_behind_a_door_has_to_be_whom_it_names() {
        let me = std::process::id();
        let peer = |pid: u32, uid| PeerCred { pid, uid };
        for (pid, uid, own, wrong) in [
            (me, 1000, 1000, None),
            (me, 0, 1000, None),
            (me, 1000, 0, None),
            (me, 1001, 1000, Some("only root and the user 1001")),
            (1, 0, 0, Some("is one of process 1 of the user 0, which is not that process")),
            (1, 1001, 0, Some("is one of process 1 of the user 1001")),
            (0, 0, 0, Some("cannot be seen from here")),
        ] {
            let judged = verify_peer(peer(pid, uid), me, own);
            let is_right = match wrong {
                None => judged.is_ok(),
                Some(why) => judged.as_ref().is_err_and(|said| said.contains(why)),
            };
            assert!(is_right, "{pid} of {uid}, asked by {own}: {judged:?}");
        }
        assert_eq!(inner_pid(me), Some(me));
    }
}
