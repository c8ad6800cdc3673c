//! UDP sockets: their losses, the processes that have them, the number of threads that wait on
//! them.
//!
//! All tables of open files are searched once. A thread waits on a socket if it is in a receive
//! call on it, or waits on an epoll instance that contains it. Both are visible to users that may
//! trace the process.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, ErrorKind};

use manylane_sys::process::{BlockedOn, parse_blocked_on};
use manylane_sys::udp_table::Entry;

use super::super::facts::{Facts, Program, Socket};
use super::files::FileTree;
use crate::loadable;
use crate::output;

/// The scope that the user asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Scope {
    pub(crate) pid: Option<u32>,
    pub(crate) port: Option<u16>,
}

/// Adds the requested sockets, or all with losses, and the processes that have them.
pub(crate) fn collect(files: &FileTree, asked: Scope, facts: &mut Facts) {
    facts.asked = asked != Scope::default();
    let mut all = Vec::new();
    for table in ["proc/net/udp", "proc/net/udp6"] {
        match files.text(table) {
            Some(text) => all.extend(text.lines().filter_map(parse_socket)),
            None if table.ends_with('6') => {}
            None => facts.note_gap("sockets", format!("/{table} cannot be read")),
        }
    }
    let of_pid: Option<BTreeSet<u64>> = asked.pid.map(|pid| match descriptors(files, pid) {
        Ok(found) => found.into_values().collect(),
        Err(err) => {
            let why = match err.kind() {
                ErrorKind::PermissionDenied if is_root(facts) => "cannot see its open files".into(),
                ErrorKind::PermissionDenied => {
                    "cannot see its open files: run this as root, or as its user".into()
                }
                _ if is_over(&err) => format!("there is no process {pid}"),
                _ => format!("cannot see its open files: {err}"),
            };
            facts.note_gap("processes", why);
            BTreeSet::new()
        }
    });
    let keep = |socket: &Socket| {
        of_pid.as_ref().is_none_or(|inodes| inodes.contains(&socket.inode))
            && asked.port.is_none_or(|port| socket.local.port() == port)
    };
    all.retain(|socket| keep(socket));
    // With --duration, a socket without losses may still have some later. The caller removes it
    // otherwise.
    facts.sockets = all;
    programs(files, facts);
}

/// A line of the socket tables.
fn parse_socket(line: &str) -> Option<Socket> {
    let entry = Entry::parse(line)?;
    Some(Socket {
        local: entry.local,
        peer: (entry.peer.port() != 0).then_some(entry.peer),
        inode: entry.inode,
        drops: entry.drops,
        queued: entry.queued,
        buffer: None,
    })
}

/// Inode of each socket that a process has open, by descriptor.
fn descriptors(files: &FileTree, pid: u32) -> io::Result<BTreeMap<i32, u64>> {
    let folder = format!("proc/{pid}/fd");
    fs::read_dir(files.path(&folder))?;
    let socket = |name: String| {
        let link = files.link_name(&format!("{folder}/{name}"))?;
        let inode = link.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()?;
        Some((name.parse().ok()?, inode))
    };
    Ok(files.names(&folder).into_iter().filter_map(socket).collect())
}

/// True if the process has ended.
fn is_over(err: &io::Error) -> bool {
    err.kind() == ErrorKind::NotFound || err.raw_os_error() == Some(libc::ESRCH)
}

fn is_root(facts: &Facts) -> bool {
    facts.privileges.uid == Some(0)
}

/// Finds the processes of the wanted sockets.
fn programs(files: &FileTree, facts: &mut Facts) {
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
        let open = match descriptors(files, pid) {
            Ok(open) => open,
            Err(err) => {
                hidden += u32::from(!is_over(&err));
                continue;
            }
        };
        let open: BTreeMap<i32, u64> = open.into_iter().filter(|(_, inode)| wanted.contains(inode)).collect();
        if !open.is_empty() {
            facts.programs.push(program(files, pid, &open));
        }
    }
    if hidden > 0 {
        let advice = if is_root(facts) { "" } else { ": run this as root" };
        let why = format!("cannot see the open files of {hidden} processes{advice}");
        facts.gaps.entry("processes".into()).or_insert(why);
    }
}

fn program(files: &FileTree, pid: u32, open: &BTreeMap<i32, u64>) -> Program {
    let base = format!("proc/{pid}");
    let threads = files.names(&format!("{base}/task"));
    let mut waiting = BTreeMap::new();
    for thread in &threads {
        let call = files.text(&format!("{base}/task/{thread}/syscall")).unwrap_or_default();
        for inode in awaited_sockets(files, &base, open, parse_blocked_on(&call)) {
            *waiting.entry(inode).or_insert(0) += 1;
        }
    }
    let exe = files.path(&format!("{base}/exe"));
    // The link is text of another user's choice: it is shown, and never opened.
    let named = fs::read_link(&exe).unwrap_or_else(|_| exe.clone());
    Program {
        pid,
        name: output::strip_control(&files.text(&format!("{base}/comm")).unwrap_or_default()),
        threads: threads.len() as u32,
        sockets: open.values().copied().collect::<BTreeSet<_>>().into_iter().collect(),
        waiting,
        on_lanes: files
            .text(&format!("{base}/maps"))
            .is_some_and(|maps| maps.contains("libmanylane_preload.so")),
        beyond: loadable::check(&exe)
            .err()
            .map(|beyond| output::strip_control(&beyond.with_file(named).message())),
    }
}

/// The sockets among `open` that the system call waits for.
fn awaited_sockets(
    files: &FileTree,
    base: &str,
    open: &BTreeMap<i32, u64>,
    call: Option<BlockedOn>,
) -> BTreeSet<u64> {
    let fds: Vec<i32> = match call {
        Some(BlockedOn::Receive(fd)) => vec![fd],
        Some(BlockedOn::Epoll(epoll)) => {
            let info = files.text(&format!("{base}/fdinfo/{epoll}")).unwrap_or_default();
            let fd = |line: &str| line.strip_prefix("tfd:")?.split_whitespace().next()?.parse().ok();
            info.lines().filter_map(fd).collect()
        }
        None => Vec::new(),
    };
    fds.iter().filter_map(|fd| open.get(fd)).copied().collect()
}
