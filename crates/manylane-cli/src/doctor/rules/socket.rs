//! Sockets that threads share, and the effect of lanes.

use super::super::facts::{Facts, Program};
use super::super::finding::Severity;
use super::rule::{FindingSink, Rule, pluralize};

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "socket-shared",
        cost: 78,
        meaning: "Several threads or processes wait on one socket, and contend for its queue.",
        remedy: "`manylane run -- PROGRAM` gives each a lane. Or `SO_REUSEPORT`, if the program has a setting for it.",
        check: socket_shared,
    },
    Rule {
        id: "beyond-reach",
        cost: 3,
        meaning: "`manylane run` cannot give this program lanes: it is static, makes system calls itself, or its file is privileged.",
        remedy: "A dynamically linked build, its own setting for `SO_REUSEPORT`, or the library.",
        check: beyond_reach,
    },
];

fn socket_shared(facts: &Facts, found: &mut FindingSink<'_>) {
    if facts.sockets.is_empty() && !facts.asked {
        return;
    }
    if let Some(why) = facts.gaps.get("processes") {
        found.unknown(why);
    }
    for socket in facts.sockets.iter().filter(|socket| facts.asked || socket.drops > 0) {
        let owners: Vec<&Program> = facts.owners(socket.inode).filter(|owner| !owner.on_lanes).collect();
        let waiting: u32 = owners.iter().filter_map(|owner| owner.waiting.get(&socket.inode)).sum();
        let threads: u32 = owners.iter().map(|owner| owner.threads).sum();
        // After a fork the socket is open in all processes, even if only one uses it.
        if waiting < 2 && (waiting > 0 || threads < 2 || socket.drops == 0) {
            continue;
        }
        let Some(first) = owners.first() else { continue };
        let processes = pluralize(owners.len() as u64, "process").replace("processs", "processes");
        let (severity, who) = if waiting > 1 {
            (Severity::Wrong, format!("{waiting} threads of {processes} wait on it now"))
        } else {
            // Few or no threads wait: the others are busy, or do not receive.
            (Severity::Note, format!("{processes} with {threads} threads have it open"))
        };
        let finding = found.add(
            severity,
            format!("UDP socket {} ({}) is shared: {who}", socket.local, first.name),
            "All of them share one queue and its lock. Each datagram wakes one of them, and costs more the more there are.",
        );
        finding.subject(socket.local.to_string());
        match &first.beyond {
            None if waiting > 1 => finding.run(format!(
                "start {} with 'manylane run -- {} …': each of the {waiting} threads gets a lane",
                first.name, first.name
            )),
            None => finding.run(format!(
                "start {} with 'manylane run -- {} …': each thread that receives gets a lane",
                first.name, first.name
            )),
            Some(why) => finding.run(format!("manylane run cannot help: {why}")),
        };
    }
}

fn beyond_reach(facts: &Facts, found: &mut FindingSink<'_>) {
    // A long list of programs that the user did not ask about does not help.
    if !facts.asked {
        return;
    }
    for program in &facts.programs {
        if let Some(why) = &program.beyond {
            found
                .add(
                    Severity::Note,
                    format!("'manylane run' cannot give process {} ({}) lanes: {why}", program.pid, program.name),
                    "Lanes need a library that the dynamic linker loads into the program.",
                )
                .subject(program.name.clone())
                .run("a dynamically linked build of it; its own setting for SO_REUSEPORT; or the library, in its source");
        }
    }
}
