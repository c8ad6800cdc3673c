//! UDP sockets: what they lost, which processes have them, how many threads wait on them.
//!
//! All tables of open files are looked through once. A thread waits on a socket when it is in a receive call on it, or on
//! an epoll instance that has it; both are seen by whoever may trace the process.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use manylane_sys::process::{Awaited, awaited};

use super::super::facts::{Facts, Program, Socket};
use super::Asked;
use super::files::Files;
use crate::run::reach;

/// Adds the sockets that were asked for, or all that lost something, and the processes that have them.
pub(crate) fn gather(files: &Files, asked: Asked, facts: &mut Facts) {
    facts.asked = asked != Asked::default();
    let mut all = Vec::new();
    for table in ["proc/net/udp", "proc/net/udp6"] {
        match files.text(table) {
            Some(text) => all.extend(text.lines().filter_map(parse)),
            None if table.ends_with('6') => {}
            None => {
                facts.gaps.insert("sockets".into(), format!("/{table} cannot be read"));
            }
        }
    }
    let by_pid = asked.pid.map(|pid| descriptors(files, pid).map(|found| found.into_values().collect()));
    let of_pid: Option<BTreeSet<u64>> = match by_pid {
        Some(None) => {
            let why = "its open files cannot be seen: run this as root, or as its user".into();
            facts.gaps.insert("processes".into(), why);
            Some(BTreeSet::new())
        }
        Some(found) => found,
        None => None,
    };
    let keep = |socket: &Socket| {
        of_pid.as_ref().is_none_or(|inodes| inodes.contains(&socket.inode))
            && asked.port.is_none_or(|port| socket.local.port() == port)
    };
    all.retain(|socket| keep(socket));
    // With a watch, one that has lost nothing yet may do so; the caller forgets it then.
    facts.sockets = all;
    programs(files, facts);
}

/// A line of `/proc/net/udp`.
fn parse(line: &str) -> Option<Socket> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let address = |field: &str| {
        let (ip, port) = field.split_once(':')?;
        Some(SocketAddr::new(parse_ip(ip)?, u16::from_str_radix(port, 16).ok()?))
    };
    let (local, peer) = (address(fields.get(1)?)?, address(fields.get(2)?)?);
    let (_, queued) = fields.get(4)?.split_once(':')?;
    Some(Socket {
        local,
        peer: (peer.port() != 0).then_some(peer),
        inode: fields.get(9)?.parse().ok()?,
        drops: fields.get(12)?.parse().ok()?,
        queued: u64::from_str_radix(queued, 16).ok()?,
        buffer: None,
    })
}

/// Words in the byte order of the machine, in hexadecimal.
pub(crate) fn parse_ip(hex: &str) -> Option<IpAddr> {
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

/// Inode of each socket that a process has open, by descriptor.
fn descriptors(files: &Files, pid: u32) -> Option<BTreeMap<i32, u64>> {
    let folder = format!("proc/{pid}/fd");
    std::fs::read_dir(files.path(&folder)).ok()?;
    let socket = |name: String| {
        let link = files.link_name(&format!("{folder}/{name}"))?;
        let inode = link.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()?;
        Some((name.parse().ok()?, inode))
    };
    Some(files.names(&folder).into_iter().filter_map(socket).collect())
}

/// Finds the processes of the sockets that are wanted.
fn programs(files: &Files, facts: &mut Facts) {
    let wanted: BTreeSet<u64> = facts
        .sockets
        .iter()
        .filter(|socket| socket.inode != 0 && (facts.asked || socket.drops > 0))
        .map(|socket| socket.inode)
        .collect();
    if wanted.is_empty() {
        return;
    }
    let mut hidden = 0;
    for pid in files.names("proc").into_iter().filter_map(|name| name.parse().ok()) {
        let Some(open) = descriptors(files, pid) else {
            hidden += 1;
            continue;
        };
        let open: BTreeMap<i32, u64> = open.into_iter().filter(|(_, inode)| wanted.contains(inode)).collect();
        if !open.is_empty() {
            facts.programs.push(program(files, pid, &open));
        }
    }
    if hidden > 0 {
        let why = format!("the open files of {hidden} processes cannot be seen: run this as root");
        facts.gaps.entry("processes".into()).or_insert(why);
    }
}

fn program(files: &Files, pid: u32, open: &BTreeMap<i32, u64>) -> Program {
    let base = format!("proc/{pid}");
    let threads = files.names(&format!("{base}/task"));
    let mut waiting = BTreeMap::new();
    for thread in &threads {
        let call = files.text(&format!("{base}/task/{thread}/syscall")).unwrap_or_default();
        for inode in waits_on(files, &base, open, awaited(&call)) {
            *waiting.entry(inode).or_insert(0) += 1;
        }
    }
    let exe = files.path(&format!("{base}/exe"));
    // By its own name where that is still the same file, for whoever reads the reason.
    let named = std::fs::read_link(&exe).ok().filter(|path| path.exists());
    Program {
        pid,
        name: files.text(&format!("{base}/comm")).unwrap_or_default(),
        threads: threads.len() as u32,
        sockets: open.values().copied().collect::<BTreeSet<_>>().into_iter().collect(),
        waiting,
        on_lanes: files
            .text(&format!("{base}/maps"))
            .is_some_and(|maps| maps.contains("libmanylane_preload.so")),
        beyond: reach::judge(&named.unwrap_or(exe)).err().map(|beyond| beyond.line()),
    }
}

/// The sockets among `open` that a call waits for.
fn waits_on(files: &Files, base: &str, open: &BTreeMap<i32, u64>, call: Option<Awaited>) -> BTreeSet<u64> {
    let fds: Vec<i32> = match call {
        Some(Awaited::Receive(fd)) => vec![fd],
        Some(Awaited::Epoll(epoll)) => {
            let info = files.text(&format!("{base}/fdinfo/{epoll}")).unwrap_or_default();
            let fd = |line: &str| line.strip_prefix("tfd:")?.split_whitespace().next()?.parse().ok();
            info.lines().filter_map(fd).collect()
        }
        None => Vec::new(),
    };
    fds.iter().filter_map(|fd| open.get(fd)).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_tables() {
        let line = "  412: 0100007F:0035 0200007F:1F90 01 00000000:00000B00 00:00000000 00000000     0        0 5151 2 0000000000000000 17";
        let socket = parse(line).unwrap();
        if cfg!(target_endian = "little") {
            assert_eq!(socket.local, "127.0.0.1:53".parse().unwrap());
            assert_eq!(socket.peer, Some("127.0.0.2:8080".parse().unwrap()));
        }
        assert_eq!((socket.inode, socket.drops, socket.queued), (5151, 17, 0xb00));
        let line = "1: 00000000000000000000000001000000:0035 00000000000000000000000000000000:0000 07 0:0 0:0 0 0 0 1 2 0 3";
        let socket = parse(line).unwrap();
        assert!(socket.local.is_ipv6() && socket.peer.is_none() && socket.drops == 3);
        let header = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops";
        for bad in [header, "", "1: 0100007F:0035", "1: zz:0035 0:0 0 0:0 0 0 0 0 0 1 2 3 4"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
