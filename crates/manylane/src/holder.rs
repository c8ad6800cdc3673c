//! Who has a port: for the error that says it is in use. Read from `/proc`, as far as that is readable.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};
use std::{fs, thread};

use manylane_sys::udp_table::Entry;

/// The tables of bound UDP sockets, of the network namespace of the calling thread.
const TABLES: [&str; 2] = ["/proc/thread-self/net/udp", "/proc/thread-self/net/udp6"];

/// How long a socket is waited for that the kernel is about to close. It was seen to take up to 100 ms, and beside threads that
/// keep all processors busy up to 3 s.
const LONGEST: Duration = Duration::from_secs(10);

/// Says who holds a UDP port that conflicts with `addr`: process, command and user, as far as they can be seen.
pub(crate) fn of(addr: &SocketAddr, only_v6: bool) -> Option<String> {
    let entries: Vec<Entry> = entries().filter(|entry| conflict(&entry.local, addr, only_v6)).collect();
    // The very same address explains most.
    let entry = entries.iter().find(|entry| entry.local == *addr).or_else(|| entries.first())?;
    Some(owner(entry))
}

/// A socket that is bound to exactly this address and is none of `ours` (inodes), if one can be seen.
pub(crate) fn stranger(addr: &SocketAddr, ours: &[u64]) -> Option<String> {
    let table = fs::read_to_string(TABLES[usize::from(addr.is_ipv6())]).ok()?;
    // The kernel prints a table that changes meanwhile: an entry may be missing, or be there twice.
    let same = |entry: &Entry| entry.local.ip() == addr.ip() && entry.local.port() == addr.port();
    let found =
        table.lines().filter_map(Entry::parse).find(|entry| same(entry) && !ours.contains(&entry.inode))?;
    Some(owner(&found))
}

/// Waits until none of these sockets (inodes) is bound any more, as far as can be seen; false if that takes too long.
pub(crate) fn await_end_of(sockets: &[u64]) -> bool {
    let start = Instant::now();
    while entries().any(|entry| sockets.contains(&entry.inode)) {
        if start.elapsed() > LONGEST {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
    true
}

fn entries() -> impl Iterator<Item = Entry> {
    let tables = TABLES.iter().filter_map(|table| fs::read_to_string(table).ok());
    tables.flat_map(|table| table.lines().filter_map(Entry::parse).collect::<Vec<_>>())
}

/// Who has a socket: process, command and user, as far as they can be seen.
fn owner(entry: &Entry) -> String {
    match process_of(entry.inode) {
        Some((pid, command)) => format!("process {pid} ({command}) of user {}", entry.uid),
        None => format!("a process of user {} that this one may not see", entry.uid),
    }
}

/// Whether the kernel would refuse `wanted` because of a socket that is bound to `held`.
fn conflict(held: &SocketAddr, wanted: &SocketAddr, only_v6: bool) -> bool {
    let clash = match (held.ip(), wanted.ip()) {
        (IpAddr::V4(_), IpAddr::V6(ip)) => match ip.to_ipv4_mapped() {
            Some(ip) => IpAddr::V4(ip) == held.ip() || held.ip().is_unspecified(),
            None => ip.is_unspecified() && !only_v6,
        },
        // Whether the other's wildcard takes IPv4 as well is not in the table; it does by default.
        (IpAddr::V6(ip), IpAddr::V4(_)) => ip.is_unspecified(),
        (one, two) => one == two || one.is_unspecified() || two.is_unspecified(),
    };
    held.port() == wanted.port() && clash
}

/// A process that has one of these sockets (inodes) open, if one can be seen.
pub(crate) fn process_with(sockets: &[u64]) -> Option<String> {
    let (pid, command) = sockets.iter().find_map(|inode| process_of(*inode))?;
    Some(format!("process {pid} ({command})"))
}

/// The process that has the socket with this inode open: its id and name.
fn process_of(inode: u64) -> Option<(u32, String)> {
    let wanted = format!("socket:[{inode}]");
    for process in fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(files) = fs::read_dir(process.path().join("fd")) else { continue };
        let has = |file: fs::DirEntry| {
            fs::read_link(file.path()).is_ok_and(|link| link.as_os_str() == wanted.as_str())
        };
        if files.flatten().any(has) {
            let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            return Some((pid, name.trim().to_owned()));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn finds_this_process() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let addr = socket.local_addr().unwrap();
        let found = of(&addr, false).unwrap();
        assert!(found.starts_with(&format!("process {} (", std::process::id())), "{found}");
        let any = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), addr.port());
        assert!(of(&any, false).is_some());
        let inode = manylane_sys::sock::inode(std::os::fd::AsFd::as_fd(&socket)).unwrap();
        assert_eq!(stranger(&addr, &[inode]), None);
        assert!(stranger(&addr, &[inode + 1]).is_some());
        drop(socket);
        assert_eq!(of(&addr, false), None);
        assert_eq!(stranger(&addr, &[]), None);
    }

    #[test]
    fn conflicts_are_the_kernels() {
        let clash = |held: &str, wanted: &str, only_v6| {
            conflict(&held.parse().unwrap(), &wanted.parse().unwrap(), only_v6)
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
