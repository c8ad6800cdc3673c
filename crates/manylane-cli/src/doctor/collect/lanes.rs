//! Lanes of running programs, their wait policy, and the CPUs that their threads may run on:
//! from the programs' control sockets ([`manylane::control`]), and from the kernel.

use std::collections::BTreeMap;

use manylane::{ErrorKind, control};

use super::super::facts::{Facts, Lane};
use super::files::FileTree;
use crate::top::prometheus::{ROWS_MAX, parse_samples};

/// Queries all programs whose control socket this user may use.
pub(crate) fn collect(files: &FileTree, facts: &mut Facts) {
    let clients = match control::find_control_sockets(None) {
        Ok(clients) => clients,
        Err(err) => return facts.note_gap("lanes", err.to_string()),
    };
    let mut notes = BTreeMap::new();
    for (client, reply) in clients.iter().zip(control::fetch_metrics(&clients)) {
        match reply {
            Ok(page) => {
                let pid = client.pid();
                let found = lanes(files, pid, &page);
                if found.len() == ROWS_MAX {
                    notes.insert(pid, format!("only {ROWS_MAX} lanes of process {pid} are checked"));
                }
                facts.lanes.extend(found);
            }
            // The process has ended meanwhile.
            Err(err) if err.kind() == ErrorKind::State => {}
            Err(err) => _ = notes.insert(client.pid(), err.to_string()),
        }
    }
    let mut notes = notes.into_values();
    if let Some(first) = notes.next() {
        let more = match notes.len() {
            0 => String::new(),
            more => format!(" (and {more} more)"),
        };
        facts.note_gap("lanes", first + &more);
    }
}

/// The lanes with a thread on a page of metrics, at most [`ROWS_MAX`].
pub(crate) fn lanes(files: &FileTree, pid: u32, page: &str) -> Vec<Lane> {
    let mut waiting = BTreeMap::new();
    // Process, thread, and socket. A thread of a program under `manylane run` has a line for each
    // counter.
    let mut threads = BTreeMap::new();
    for sample in parse_samples(page) {
        let socket = sample.label("socket").to_owned();
        match sample.name {
            "manylane_waiting" if waiting.len() < ROWS_MAX => {
                waiting.insert(socket, sample.label("policy").to_owned());
            }
            "manylane_lane_thread" if threads.len() < ROWS_MAX => {
                threads.entry((pid, sample.value, socket)).or_insert_with(|| sample.label("lane").to_owned());
            }
            "manylane_run_delivered_total" if threads.len() < ROWS_MAX => {
                let number = |label| sample.label(label).parse().ok();
                if let (Some(of), Some(tid)) = (number("pid"), number("tid")) {
                    let pid = u32::try_from(of).unwrap_or(0);
                    threads.entry((pid, tid, socket)).or_insert_with(|| sample.label("lane").to_owned());
                }
            }
            _ => {}
        }
    }
    let lane = |((pid, thread, socket), lane): ((u32, u64, String), String)| Lane {
        pid,
        thread,
        wait: waiting.get(&socket).cloned(),
        cpus: files.allowed_cpus(&format!("proc/{pid}/task/{thread}/status")).unwrap_or_default(),
        socket,
        lane,
    };
    threads.into_iter().map(lane).collect()
}
