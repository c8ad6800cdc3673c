//! Runs of `manylane lab`, and their rows.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

pub(crate) fn lab(words: &[&str], out: &PathBuf) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_manylane"));
    command.arg("lab").args(words).arg("--out").arg(out).stdin(Stdio::null());
    command
}

pub(crate) fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    folder
}

/// The rows of a run that succeeds.
pub(crate) fn rows(name: &str, words: &[&str]) -> Vec<Value> {
    let out = folder(name);
    let done = lab(&[words, &["--json"]].concat(), &out).output().unwrap();
    assert!(done.status.success(), "{}", stderr(&done));
    let document: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(document["schema"], "manylane.lab.v1");
    assert!(document["machine"]["kernel"].is_string() && document["settings"]["scale"]["quick"] == true);
    let page = fs::read_to_string(out.join(format!("lab-{}.html", words[0]))).unwrap();
    assert!(page.trim_end().ends_with("</html>"));
    document["rows"].as_array().unwrap().clone()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The rows of one table. Each row must have a value or a reason.
pub(crate) fn in_table<'a>(rows: &'a [Value], table: &str) -> Vec<&'a Value> {
    let own: Vec<&Value> = rows.iter().filter(|row| row["table"] == table).collect();
    for row in &own {
        assert!(row["value"].is_f64() != row["why_not"].is_string(), "{row}");
        assert_eq!(row["value"].is_f64(), !row["samples"].as_array().unwrap().is_empty(), "{row}");
    }
    own
}
