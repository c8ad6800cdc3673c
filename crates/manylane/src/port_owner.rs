//! The owner of a port, for the error that the port is in use. Read from `/proc`, as far as it is
//! readable.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use manylane_sys::bound_sockets::BoundSockets;
use manylane_sys::udp_table::Entry;

/// The tables of bound UDP sockets in the network namespace of the calling thread.
const UDP_TABLES: [&str; 2] = ["/proc/thread-self/net/udp", "/proc/thread-self/net/udp6"];

/// Maximum wait for the kernel to close a socket. Takes up to 100 ms, and many seconds if other
/// threads keep all CPUs busy: RCU callbacks are then late, too.
const UNBIND_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum time for the kernel to release what a dead process held: its port, queue or XDP
/// attachment.
pub(crate) const HANDOVER_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum time for the kernel to release a queue that no process has open any more: an RCU grace
/// period and the RTNL lock, which take more than ten seconds on a machine that is very busy.
pub(crate) const RELEASE_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum number of reads of a table: the kernel omits entries of a table that changes meanwhile.
const SCAN_ATTEMPTS_MAX: u32 = 5;

/// The owner of a socket.
#[derive(Debug, PartialEq)]
enum Owner {
    /// A process: its id and its command.
    Process(u32, String),
    /// No process that is visible in `/proc`: the owner has ended, or belongs to another
    /// container.
    NoProcess,
    /// Unknown: `/proc` is unreadable, or the files of some processes are not visible to this one.
    Unknown,
}

/// The socket that keeps an address from being bound.
#[derive(Debug, Default)]
pub(crate) struct PortOwner {
    /// Process, command and user, as far as they are visible.
    pub(crate) description: Option<String>,
    /// True if no visible process owns the sockets: they probably belonged to a process that was
    /// killed, and the kernel closes them one by one. AF_XDP sockets take some 10 ms, and the port
    /// is released after them.
    pub(crate) is_exiting: bool,
}

/// The owner of a UDP port that conflicts with `addr`.
pub(crate) fn find_owner(addr: &SocketAddr, only_v6: bool) -> PortOwner {
    if !Path::new(UDP_TABLES[0]).exists() {
        return PortOwner::default();
    }
    let list = |_| entries().filter(|entry| conflicts(&entry.local, addr, only_v6)).collect::<Vec<_>>();
    let entries = (0..SCAN_ATTEMPTS_MAX).map(list).find(|found| !found.is_empty()).unwrap_or_default();
    let owners: Vec<Owner> = entries.iter().map(|entry| socket_owner(entry.inode)).collect();
    // Prefer the entry with exactly this address.
    let at = entries.iter().position(|entry| entry.local == *addr).unwrap_or(0);
    let first_owner = entries.get(at).map(|entry| describe(entry.uid, &owners[at]));
    PortOwner { description: first_owner, is_exiting: owners.iter().all(|owner| *owner == Owner::NoProcess) }
}

/// A socket that is bound to exactly this address and is none of `ours` (inodes), if one is
/// visible.
pub(crate) fn find_foreign(addr: &SocketAddr, ours: &[u64]) -> Option<String> {
    let (uid, inode) = match BoundSockets::default().find_by_port(addr.port()) {
        Ok(all) => {
            let found = all.iter().find(|bound| bound.ip == addr.ip() && !ours.contains(&bound.inode))?;
            (found.uid, found.inode)
        }
        // The kernel has no `CONFIG_INET_UDP_DIAG`, or netlink is not permitted.
        Err(_) => scan_foreign(addr, ours)?,
    };
    Some(describe(uid, &socket_owner(inode)))
}

/// User and inode of such a socket, from the tables of all sockets.
fn scan_foreign(addr: &SocketAddr, ours: &[u64]) -> Option<(u32, u64)> {
    let table = UDP_TABLES[usize::from(addr.is_ipv6())];
    let same = |entry: &Entry| entry.local.ip() == addr.ip() && entry.local.port() == addr.port();
    let foreign = |entry: &Entry| same(entry) && !ours.contains(&entry.inode);
    let scan = |_| fs::read_to_string(table).ok()?.lines().filter_map(Entry::parse).find(foreign);
    let found = (0..SCAN_ATTEMPTS_MAX).find_map(scan)?;
    Some((found.uid, found.inode))
}

/// Waits until none of these sockets (inodes) is bound; false after [`UNBIND_TIMEOUT`].
pub(crate) fn wait_unbound(sockets: &[u64]) -> bool {
    let start = Instant::now();
    while is_listed(sockets, || entries().map(|entry| entry.inode)) {
        if start.elapsed() > UNBIND_TIMEOUT {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
    true
}

/// True if one of these sockets is among those that `read` lists, which is read again if none is.
fn is_listed<I: Iterator<Item = u64>>(sockets: &[u64], read: impl Fn() -> I) -> bool {
    (0..SCAN_ATTEMPTS_MAX).any(|_| read().any(|inode| sockets.contains(&inode)))
}

fn entries() -> impl Iterator<Item = Entry> {
    let tables = UDP_TABLES.iter().filter_map(|table| fs::read_to_string(table).ok());
    tables.flat_map(|table| table.lines().filter_map(Entry::parse).collect::<Vec<_>>())
}

/// Describes the owner of a socket: process, command and user, as far as they are visible.
fn describe(uid: u32, owner: &Owner) -> String {
    match owner {
        Owner::Process(pid, command) => format!("process {pid} ({command}) of user {uid}"),
        Owner::NoProcess => format!("a socket of user {uid} that no visible process has open"),
        Owner::Unknown => format!("a process of user {uid}, not visible to this one"),
    }
}

/// True if the kernel would refuse `wanted` because of a socket that is bound to `held`.
fn conflicts(held: &SocketAddr, wanted: &SocketAddr, only_v6: bool) -> bool {
    let clash = match (held.ip(), wanted.ip()) {
        (IpAddr::V4(_), IpAddr::V6(ip)) => match ip.to_ipv4_mapped() {
            Some(ip) => IpAddr::V4(ip) == held.ip() || held.ip().is_unspecified(),
            None => ip.is_unspecified() && !only_v6,
        },
        // The table does not tell whether an IPv6 wildcard accepts IPv4; by default it does.
        (IpAddr::V6(ip), IpAddr::V4(_)) => ip.is_unspecified(),
        (one, two) => one == two || one.is_unspecified() || two.is_unspecified(),
    };
    held.port() == wanted.port() && clash
}

/// Whose sockets (inodes) these are, as far as that is visible, to follow "a socket".
pub(crate) fn describe_process(sockets: &[u64]) -> String {
    let owners: Vec<Owner> = sockets.iter().map(|inode| socket_owner(*inode)).collect();
    let process = owners.iter().find_map(|owner| match owner {
        Owner::Process(pid, command) => Some(format!("of process {pid} ({command})")),
        Owner::NoProcess | Owner::Unknown => None,
    });
    process.unwrap_or_else(|| {
        let is_unowned = owners.iter().all(|owner| *owner == Owner::NoProcess);
        if is_unowned { "that no visible process has open" } else { "of another process" }.to_owned()
    })
}

/// The process that has the socket with this inode open.
fn socket_owner(inode: u64) -> Owner {
    let wanted = format!("socket:[{inode}]");
    let Ok(processes) = fs::read_dir("/proc") else { return Owner::Unknown };
    let mut others = Owner::NoProcess;
    for process in processes.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let files = match fs::read_dir(process.path().join("fd")) {
            Ok(files) => files,
            Err(err) => {
                // A process that has ended meanwhile owns no sockets.
                if err.kind() == io::ErrorKind::PermissionDenied {
                    others = Owner::Unknown;
                }
                continue;
            }
        };
        let has = |file: fs::DirEntry| {
            fs::read_link(file.path()).is_ok_and(|link| link.as_os_str() == wanted.as_str())
        };
        if files.flatten().any(has) {
            let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            // A process may name itself anything, and this reaches terminals.
            return Owner::Process(pid, name.chars().filter(|c| !c.is_control()).collect());
        }
    }
    others
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::net::Ipv4Addr;

    use manylane_test_support::wait_for;

    use super::*;

    #[test]
    fn finds_this_process() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let addr = socket.local_addr().unwrap();
        let PortOwner { description: first_owner, is_exiting: is_leaving } = find_owner(&addr, false);
        let found = first_owner.unwrap();
        assert!(!is_leaving);
        assert!(found.starts_with(&format!("process {} (", std::process::id())), "{found}");
        let any = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), addr.port());
        assert!(find_owner(&any, false).description.is_some());
        let inode = manylane_sys::sock::inode(std::os::fd::AsFd::as_fd(&socket)).unwrap();
        assert_eq!(find_foreign(&addr, &[inode]), None);
        assert!(find_foreign(&addr, &[inode + 1]).is_some());
        let own_uid = manylane_sys::unix_socket::effective_uid();
        let scans = [&[inode][..], &[inode + 1]].map(|ours| scan_foreign(&addr, ours));
        assert_eq!(scans, [None, Some((own_uid, inode))]);
        drop(socket);
        // A program that another test starts has a copy until it executes.
        let is_gone = || {
            let PortOwner { description: owner, is_exiting } = find_owner(&addr, false);
            (owner, is_exiting)
        };
        wait_for("the socket to be gone", is_gone, |(owner, is_exiting)| owner.is_none() && *is_exiting);
        assert_eq!((find_foreign(&addr, &[]), scan_foreign(&addr, &[])), (None, None));
    }

    #[test]
    fn a_socket_is_of_a_visible_process_or_of_none() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let inode = manylane_sys::sock::inode(std::os::fd::AsFd::as_fd(&socket)).unwrap();
        let found = describe_process(&[u64::MAX, inode]);
        assert!(found.starts_with(&format!("of process {} (", std::process::id())), "{found}");
        // Only root sees the descriptors of all processes.
        let is_root = manylane_sys::unix_socket::effective_uid() == 0;
        let found = describe_process(&[u64::MAX]);
        assert!(
            found == "that no visible process has open" || !is_root && found == "of another process",
            "{found}"
        );
    }

    #[test]
    fn a_bound_socket_missing_from_the_kernels_table_stays_open() {
        let reads = Cell::new(0);
        let omitted_at_first = || {
            reads.set(reads.get() + 1);
            (reads.get() >= SCAN_ATTEMPTS_MAX).then_some(7).into_iter()
        };
        assert!(is_listed(&[6, 7], omitted_at_first));
        assert_eq!(reads.get(), SCAN_ATTEMPTS_MAX);
        assert!(!is_listed(&[8], omitted_at_first));
    }

    #[test]
    fn a_name_that_controls_a_terminal_does_not_reach_it() {
        let own_name = fs::read_to_string("/proc/self/comm").unwrap();
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        // The name of the process is the one of its first thread.
        fs::write("/proc/self/comm", "a\x1b[2J\x07b").unwrap();
        let found = find_owner(&socket.local_addr().unwrap(), false).description;
        fs::write("/proc/self/comm", own_name.trim()).unwrap();
        let found = found.unwrap();
        assert!(found.contains("(a[2Jb)"), "{found:?}");
    }

    #[test]
    fn port_conflicts_match_the_kernel() {
        let clash = |held: &str, wanted: &str, only_v6| {
            conflicts(&held.parse().unwrap(), &wanted.parse().unwrap(), only_v6)
        };
        assert!(clash("0.0.0.0:5", "127.0.0.1:5", false));
        assert!(clash("127.0.0.1:5", "[::]:5", false));
        assert!(clash("[::]:5", "127.0.0.1:5", false));
        assert!(clash("127.0.0.1:5", "[::ffff:127.0.0.1]:5", false));
        assert!(!clash("127.0.0.1:5", "[::]:5", true));
        assert!(!clash("0.0.0.0:5", "[::1]:5", false));
        assert!(!clash("127.0.0.1:5", "127.0.0.2:5", false));
        assert!(!clash("127.0.0.1:5", "127.0.0.1:6", false));
    }
}
