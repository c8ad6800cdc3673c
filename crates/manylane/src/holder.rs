//! Who has a port: for the error that says it is in use. Read from `/proc`, as far as that is readable.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Says who holds a UDP port that conflicts with `addr`: process, command and user, as far as they can be seen.
pub(crate) fn of(addr: &SocketAddr) -> Option<String> {
    let (inode, uid) = ["/proc/self/net/udp", "/proc/self/net/udp6"]
        .iter()
        .filter_map(|table| fs::read_to_string(table).ok())
        .find_map(|table| table.lines().skip(1).find_map(|line| holder_in(line, addr)))?;
    Some(match process_of(inode) {
        Some((pid, command)) => format!("process {pid} ({command}) of user {uid}"),
        None => format!("a process of user {uid} that this one may not see"),
    })
}

/// Inode and user of a line of `/proc/net/udp`, if its address conflicts.
fn holder_in(line: &str, wanted: &SocketAddr) -> Option<(u64, u32)> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let (ip, port) = fields.get(1)?.split_once(':')?;
    let ip = parse_ip(ip)?;
    let clashes = |one: IpAddr, two: IpAddr| one == two || one.is_unspecified() || two.is_unspecified();
    if u16::from_str_radix(port, 16).ok()? != wanted.port() || !clashes(ip, wanted.ip()) {
        return None;
    }
    Some((fields.get(9)?.parse().ok()?, fields.get(7)?.parse().ok()?))
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
        let found = of(&addr).unwrap();
        assert!(found.starts_with(&format!("process {} (", std::process::id())), "{found}");
        let any = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), addr.port());
        assert!(of(&any).is_some());
        drop(socket);
        assert_eq!(of(&addr), None);
    }

    #[test]
    fn lines_that_are_cut_off_are_passed_over() {
        let addr = "127.0.0.1:53".parse().unwrap();
        for line in ["", "1:", "1: 0100007F", "1: 0100007F:0035", "1: zz:0035 0 0 0 0 0 0 0 0"] {
            assert_eq!(holder_in(line, &addr), None);
        }
    }
}
