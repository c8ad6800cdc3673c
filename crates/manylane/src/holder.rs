//! Who has a port: for the error that says it is in use. Read from `/proc`, as far as that is readable.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The tables of bound UDP sockets, of the network namespace of the calling thread.
const TABLES: [&str; 2] = ["/proc/thread-self/net/udp", "/proc/thread-self/net/udp6"];

/// Says who holds a UDP port that conflicts with `addr`: process, command and user, as far as they can be seen.
pub(crate) fn of(addr: &SocketAddr, only_v6: bool) -> Option<String> {
    let entries: Vec<Entry> = entries().filter(|entry| entry.conflicts(addr, only_v6)).collect();
    // The very same address explains most.
    let entry = entries.iter().find(|entry| entry.addr == *addr).or_else(|| entries.first())?;
    Some(entry.owner())
}

/// A socket that is bound to exactly this address and is none of `ours` (inodes), if one can be seen.
pub(crate) fn stranger(addr: &SocketAddr, ours: &[u64]) -> Option<String> {
    let table = fs::read_to_string(TABLES[usize::from(addr.is_ipv6())]).ok()?;
    // The kernel prints a table that changes meanwhile: an entry may be missing, or be there twice.
    let same = |entry: &Entry| entry.addr.ip() == addr.ip() && entry.addr.port() == addr.port();
    let found =
        table.lines().filter_map(Entry::parse).find(|entry| same(entry) && !ours.contains(&entry.inode))?;
    Some(found.owner())
}

fn entries() -> impl Iterator<Item = Entry> {
    let tables = TABLES.iter().filter_map(|table| fs::read_to_string(table).ok());
    tables.flat_map(|table| table.lines().filter_map(Entry::parse).collect::<Vec<_>>())
}

/// A bound socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    addr: SocketAddr,
    inode: u64,
    uid: u32,
}

impl Entry {
    /// Reads a line of `/proc/net/udp`.
    fn parse(line: &str) -> Option<Self> {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let (ip, port) = fields.get(1)?.split_once(':')?;
        let addr = SocketAddr::new(parse_ip(ip)?, u16::from_str_radix(port, 16).ok()?);
        Some(Self { addr, inode: fields.get(9)?.parse().ok()?, uid: fields.get(7)?.parse().ok()? })
    }

    /// Who has it: process, command and user, as far as they can be seen.
    fn owner(&self) -> String {
        match process_of(self.inode) {
            Some((pid, command)) => format!("process {pid} ({command}) of user {}", self.uid),
            None => format!("a process of user {} that this one may not see", self.uid),
        }
    }

    /// Whether the kernel would refuse `wanted` because of this socket.
    fn conflicts(&self, wanted: &SocketAddr, only_v6: bool) -> bool {
        let clash = match (self.addr.ip(), wanted.ip()) {
            (IpAddr::V4(_), IpAddr::V6(ip)) => match ip.to_ipv4_mapped() {
                Some(ip) => IpAddr::V4(ip) == self.addr.ip() || self.addr.ip().is_unspecified(),
                None => ip.is_unspecified() && !only_v6,
            },
            // Whether the other's wildcard takes IPv4 as well is not in the table; it does by default.
            (IpAddr::V6(ip), IpAddr::V4(_)) => ip.is_unspecified(),
            (one, two) => one == two || one.is_unspecified() || two.is_unspecified(),
        };
        self.addr.port() == wanted.port() && clash
    }
}

/// An address as the kernel prints it: words in the byte order of the machine, in hexadecimal.
fn parse_ip(hex: &str) -> Option<IpAddr> {
    let mut bytes = Vec::with_capacity(16);
    for at in (0..hex.len()).step_by(8) {
        bytes.extend(u32::from_str_radix(hex.get(at..at + 8)?, 16).ok()?.to_ne_bytes());
    }
    match bytes.len() {
        4 => Some(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?).into()),
        16 => Some(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).into()),
        _ => None,
    }
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
    fn lines_that_are_cut_off_are_passed_over() {
        for line in ["", "1:", "1: 0100007F", "1: 0100007F:0035", "1: zz:0035 0 0 0 0 0 0 0 0"] {
            assert_eq!(Entry::parse(line), None);
        }
    }

    #[test]
    fn conflicts_are_the_kernels() {
        let clash = |held: &str, wanted: &str, only_v6| {
            let entry = Entry { addr: held.parse().unwrap(), inode: 0, uid: 0 };
            entry.conflicts(&wanted.parse().unwrap(), only_v6)
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
