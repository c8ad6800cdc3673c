//! Runs the program and reads what it prints.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

pub(crate) fn manylane(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_manylane"));
    command.args(words).stdin(Stdio::null());
    command
}

pub(crate) fn run(words: &[&str]) -> Output {
    manylane(words).output().unwrap()
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The one document on standard output, and nothing else.
pub(crate) fn document(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|err| panic!("{err} in:\n{text}"))
}

/// A folder that does not exist yet.
pub(crate) fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    folder
}
