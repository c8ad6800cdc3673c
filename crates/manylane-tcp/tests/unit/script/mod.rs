//! The stack against scripts of segments: `tests/scripts/DIRECTORY/*.tcp`, one test a directory.
//!
//! A line is a segment or a call, with a time in seconds in front: since the start, or since the
//! line before (`+0.2`). Without a time, it follows at once. `#` begins a comment.
//!
//! | line | |
//! |---|---|
//! | `< S 0:0(0) win 65535 <mss 1460>` | comes from the peer; `<<`: the batch goes on |
//! | `> S. 0:0(0) ack 1` | is sent then, and is the next; fields that are absent match all values |
//! | `> nothing` | nothing is sent until then |
//! | `open`, `open win 512 <mss 536>` | a peer connects: four lines, 10 ms |
//! | `event accepted` | the next event; `none` if there is none |
//! | `write 100`, `read 100 -> 50` | calls, and how many bytes they take |
//! | `icmp too-big 1400`, `icmp unreachable` | about the last expected packet |
//! | `levels time_wait=1`, `counters accepted=1` | what there is, and was |
//! | `config backlog=1`, `family 4` | settings; `own_first`: our number; one family |
//! | `peer 5001`, `reopen 7` | another peer; its next connection, from this number |
//!
//! Numbers are relative to the initial ones. The payload follows from them, and is verified, as are
//! the checksums. What a script does not expect is an error: packets before the next one that comes
//! in, events at its end, and connections that are left when all are aborted then.

mod packet;
mod run;

use std::fs;
use std::path::{Path, PathBuf};

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts")
}

fn entries(path: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<_> = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    entries
}

/// Runs the scripts of a directory over both families, and names all lines that differ.
fn run(directory: &str) {
    let mut failures = Vec::new();
    for path in entries(&scripts().join(directory)) {
        let text = fs::read_to_string(&path).unwrap();
        for family in [4, 6] {
            if let Err(error) = run::run(&text, family) {
                let name = path.file_name().unwrap().to_string_lossy();
                failures.push(format!("{directory}/{name}:{error} (IPv{family})"));
            }
        }
    }
    assert!(failures.is_empty(), "{} scripts fail:\n{}", failures.len(), failures.join("\n"));
}

macro_rules! directories {
    ($($name:ident),+ $(,)?) => {
        $(
            #[test]
            fn $name() {
                run(stringify!($name));
            }
        )+

        /// Each directory has a test.
        #[test]
        fn all_directories_are_tested() {
            let there: Vec<_> = entries(&scripts()).iter().map(|path| path.file_name().unwrap().to_owned()).collect();
            assert_eq!(there, [$(stringify!($name)),+]);
        }
    };
}

directories!(close, data, handshake, icmp, idle, invalid, reset, retransmission, time_wait, window);
