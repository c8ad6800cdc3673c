//! Local sockets for requests of other processes: their names, `PREFIX.PID.N` in the abstract
//! namespace, verification of the process behind one, and its network namespace.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use std::{fs, io, panic, thread};

use manylane_sys::netns::NetNs;
use manylane_sys::unix_socket::{self, PeerCred};
use manylane_sys::{process, sock};

use crate::connection::Listener;
use crate::error::{Error, ErrorKind, Result};

/// Maximum number of names that [`listen`] tries.
const NAME_ATTEMPTS_MAX: u32 = 1024;

/// Time limit of a [`Scan`].
pub(crate) const SCAN_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of sockets of a process that a scan queries.
pub(crate) const SCAN_SOCKETS_OF_PROCESS_MAX: u32 = 64;
/// Maximum number of sockets of a user that a scan queries. A scan keeps its connections open until
/// their replies, and this is a quarter of the usual limit of open files.
const SCAN_SOCKETS_OF_USER_MAX: u32 = 256;

/// A query of many sockets. Any user may have some that never reply: connecting does not block, all
/// requests are sent before the first reply is awaited, and one deadline holds for all replies.
#[derive(Debug)]
pub(crate) struct Scan {
    pub(crate) until: Instant,
    /// Connections by process and by user.
    of_processes: HashMap<u32, u32>,
    of_users: HashMap<u32, u32>,
}

impl Scan {
    pub(crate) fn start() -> Self {
        let until = Instant::now() + SCAN_TIMEOUT;
        Self { until, of_processes: HashMap::new(), of_users: HashMap::new() }
    }

    /// Counts one more connection to `peer`, a verified one.
    ///
    /// # Errors
    /// `TimedOut` after the deadline. `QuotaExceeded` if its process or its user has too many, with
    /// a text that says what to do.
    pub(crate) fn admit(&mut self, peer: PeerCred) -> io::Result<()> {
        let refused = |why| Err(io::Error::new(io::ErrorKind::QuotaExceeded, why));
        if Instant::now() >= self.until {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // A process that has reached its limit does not use up that of its user's other processes.
        let of_process = self.of_processes.entry(peer.pid).or_insert(0);
        if *of_process >= SCAN_SOCKETS_OF_PROCESS_MAX {
            return refused(format!(
                "only {SCAN_SOCKETS_OF_PROCESS_MAX} of its sockets are queried: open fewer, or query the others one by one"
            ));
        }
        let of_user = self.of_users.entry(peer.uid).or_insert(0);
        if *of_user >= SCAN_SOCKETS_OF_USER_MAX {
            return refused(format!(
                "only {SCAN_SOCKETS_OF_USER_MAX} sockets of its user {} are queried: query this process alone",
                peer.uid
            ));
        }
        *of_process += 1;
        *of_user += 1;
        Ok(())
    }
}

/// Waits until a reply, or the end of the connection, can be read.
///
/// # Errors
/// `TimedOut` if there is neither at the deadline `until`.
pub(crate) fn wait_for_reply(connection: &impl AsFd, until: Instant) -> io::Result<()> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if sock::wait_readable(connection.as_fd(), left) {
            return Ok(());
        }
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

/// Listens under the next free name. A name may be in use, because a process in another PID
/// namespace may have the same number as this one.
pub(crate) fn listen(prefix: &str) -> io::Result<Listener> {
    static NEXT_NUMBER: AtomicU32 = AtomicU32::new(0);
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for _ in 0..NAME_ATTEMPTS_MAX {
        let number = NEXT_NUMBER.fetch_add(1, Ordering::Relaxed);
        match unix_socket::listen_without_fds(&format!("{prefix}.{}.{number}", std::process::id())) {
            Err(err) if err.kind() == io::ErrorKind::AddrInUse => last = err,
            other => return other.map(Listener::new),
        }
    }
    Err(last)
}

/// Process and name of each socket with this prefix that listens in the network namespace of the
/// calling thread; only those of process `of`, if given.
pub(crate) fn find_listeners(prefix: &str, of: Option<u32>) -> Result<Vec<(u32, String)>> {
    let listed = fs::read("/proc/thread-self/net/unix")
        .map_err(|err| Error::system("reading the list of local sockets (/proc/net/unix)", err))?;
    // Any process may use any bytes as a name.
    let mut found = parse_listeners(&String::from_utf8_lossy(&listed), prefix);
    // A name has the number of the process in the process's own PID namespace. The peer is verified
    // with each request.
    if let Some(pid) = of {
        let own = inner_pid(pid);
        found.retain(|(named, _)| *named == pid || own == Some(*named));
        found.iter_mut().for_each(|socket| socket.0 = pid);
    }
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// Parses /proc/net/unix: number, references, protocol, flags, type, state, inode, path.
fn parse_listeners(listed: &str, prefix: &str) -> Vec<(u32, String)> {
    /// `__SO_ACCEPTCON`: a listening socket.
    const SO_ACCEPTCON: u32 = 0x10000;
    let parse = |line: &str| {
        let flags = u32::from_str_radix(line.split_ascii_whitespace().nth(3)?, 16).ok()?;
        let name = line.rsplit(' ').next()?.strip_prefix('@').filter(|_| flags & SO_ACCEPTCON != 0)?;
        let (pid, _) = name.strip_prefix(prefix)?.strip_prefix('.')?.split_once('.')?;
        Some((pid.parse().ok()?, name.to_owned()))
    };
    listed.lines().filter_map(parse).collect()
}

/// Checks that the peer of a control or capture socket is the process in the socket's name, and
/// runs as a user that user `own` trusts.
pub(crate) fn verify_peer(peer: PeerCred, pid: u32, own: u32) -> std::result::Result<(), String> {
    let behind = peer.pid;
    if behind == 0 {
        return Err("a process outside this PID namespace owns the socket with its name: not queried".into());
    }
    if behind != pid {
        let has_other_numbers = inner_pid(behind).is_some_and(|own| own == pid);
        let how = match has_other_numbers {
            true => format!(", which is {pid} in its own PID namespace: query {behind}"),
            false => format!(" of user {}, not to that process: not queried", peer.uid),
        };
        return Err(format!("the socket with its name belongs to process {behind}{how}"));
    }
    if own != 0 && !peer.is_user(own) && !peer.is_user(0) {
        return Err(format!("only root and the user {} of this process may query it", peer.uid));
    }
    Ok(())
}

/// The id of a process in its innermost PID namespace (`NSpid`, Linux 4.1).
fn inner_pid(pid: u32) -> Option<u32> {
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
        .map_err(|err| Error::system(format!("reading the network namespace of process {pid}"), err))?;
    match fs::metadata(&path) {
        Ok(theirs) if (theirs.dev(), theirs.ino()) != (ours.dev(), ours.ino()) => {}
        // The namespace may be the same even if this process may not inspect it.
        _ => return work(),
    }
    let refused = |err| {
        let message = format!(
            "process {pid} is in another network namespace: run this as root, or in its namespace ('nsenter -n -t {pid}')"
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
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixListener};

    use super::*;

    #[test]
    fn a_control_socket_must_belong_to_its_named_process() {
        let own_pid = std::process::id();
        let peer = |pid: u32, uid| PeerCred { pid, uid };
        for (pid, uid, own, wrong) in [
            (own_pid, 1000, 1000, None),
            (own_pid, 0, 1000, None),
            (own_pid, 1000, 0, None),
            (own_pid, 1001, 1000, Some("only root and the user 1001")),
            (1, 0, 0, Some("belongs to process 1 of user 0, not to that process")),
            (1, 1001, 0, Some("belongs to process 1 of user 1001")),
            (0, 0, 0, Some("outside this PID namespace")),
        ] {
            let judged = verify_peer(peer(pid, uid), own_pid, own);
            let is_right = match wrong {
                None => judged.is_ok(),
                Some(why) => judged.as_ref().is_err_and(|said| said.contains(why)),
            };
            assert!(is_right, "{pid} of {uid}, asked by {own}: {judged:?}");
        }
        assert_eq!(inner_pid(own_pid), Some(own_pid));
    }

    /// A scan that is not over if this thread has no CPU for a while.
    fn endless_scan() -> Scan {
        let mut scan = Scan::start();
        scan.until += Duration::from_secs(3600);
        scan
    }

    #[test]
    fn a_scan_queries_some_sockets_of_each_process() {
        let (mut scan, peer) = (endless_scan(), |pid| PeerCred { pid, uid: 1000 });
        assert!((0..SCAN_SOCKETS_OF_PROCESS_MAX).all(|_| scan.admit(peer(7)).is_ok()));
        let err = scan.admit(peer(7)).unwrap_err();
        assert_eq!(err.kind(), io::ErrorKind::QuotaExceeded);
        assert!(err.to_string().contains("one by one"), "{err}");
        scan.admit(peer(8)).unwrap();
        scan.until = Instant::now();
        assert_eq!(scan.admit(peer(9)).unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn processes_of_one_user_do_not_exhaust_the_scan() {
        let mut scan = endless_scan();
        // One process with too many, and many processes with one.
        let own = (0..1000).map(|_| 1).chain(2..1000).map(|pid| PeerCred { pid, uid: 1000 });
        let results: Vec<io::Result<()>> = own.map(|peer| scan.admit(peer)).collect();
        let admitted = results.iter().filter(|result| result.is_ok()).count();
        assert_eq!(admitted, SCAN_SOCKETS_OF_USER_MAX as usize);
        assert!(results[1000].is_ok(), "the first process used up its own share only");
        let err = results.last().unwrap().as_ref().unwrap_err();
        assert_eq!(err.kind(), io::ErrorKind::QuotaExceeded);
        assert!(err.to_string().contains("user 1000") && err.to_string().contains("alone"), "{err}");
        for uid in [0, 1001] {
            scan.admit(PeerCred { pid: 2000 + uid, uid }).unwrap();
        }
    }

    #[test]
    fn loopback_a_non_utf8_socket_name_hides_no_other() {
        let pid = std::process::id();
        let odd = [b"manylane.odd.".as_slice(), pid.to_string().as_bytes(), b"\xff\n"].concat();
        let _odd = UnixListener::bind_addr(&SocketAddr::from_abstract_name(odd).unwrap()).unwrap();
        let name = format!("manylane.plain.{pid}.0");
        let _plain = unix_socket::listen(&name).unwrap();
        assert_eq!(find_listeners("manylane.plain", Some(pid)).unwrap(), [(pid, name)]);
    }

    #[test]
    fn only_listening_sockets_with_the_prefix_are_found() {
        let listed = "Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0005 01 20543 @manylane.capture.77.0
0000000000000000: 00000003 00000000 00000000 0005 03 20544 @manylane.capture.77.0
0000000000000000: 00000003 00000000 00000000 0005 03 20545 @manylane.capture.78.0
0000000000000000: 00000002 00000000 00010000 0005 01 20546 /run/manylane.capture.79.0
0000000000000000: 00000002 00000000 00010000 0005 01 20547
0000000000000000: 00000002 00000000 00010000 0005 01 20548 @manylane.captured
0000000000000000: 00000002 00000000 00010000 0005 01 20549 @manylane.capture.8.1
0000000000000000: 00000002 00000000 00010000 0005 01 20550 @manylane.capture.x.1
";
        let expected = [(77, "manylane.capture.77.0".to_owned()), (8, "manylane.capture.8.1".to_owned())];
        assert_eq!(parse_listeners(listed, "manylane.capture"), expected);
    }
}
