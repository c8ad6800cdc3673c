//! Output: results to standard output, everything else to standard error. A closed pipe is not an
//! error.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

/// Writes a result. If the reader has closed the pipe, [`is_broken_pipe`] recognizes the error,
/// and the program ends without a failure.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("cannot write to standard output")
}

/// Writes a result as one JSON document.
pub(crate) fn print_json(document: &impl Serialize) -> Result<()> {
    print(&json(document)?)
}

/// A JSON document as text, with a newline.
pub(crate) fn json(document: &impl Serialize) -> Result<String> {
    Ok(serde_json::to_string_pretty(document).context("cannot write JSON")? + "\n")
}

/// Creates a file for a result; `-` is standard output.
pub(crate) fn create(path: &Path) -> Result<Box<dyn Write>> {
    if path == Path::new("-") {
        return Ok(Box::new(io::stdout()));
    }
    let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(Box::new(file))
}

/// Creates the folder of a report (`--out`).
#[cfg(feature = "bench")]
pub(crate) fn create_folder(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path)
        .with_context(|| format!("cannot make {} (--out names another)", path.display()))
}

/// Writes a line to standard error. If standard error is closed, the line is dropped.
pub(crate) fn eprint_line(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// The command line with quoted arguments, to copy into a shell.
pub(crate) fn command_line() -> String {
    let words = std::env::args().enumerate().map(|(at, word)| match at {
        0 => "manylane".into(),
        _ if word.chars().all(|c| c.is_alphanumeric() || "-_./,:=@%+[]".contains(c)) && !word.is_empty() => {
            word
        }
        _ => format!("'{}'", word.replace('\'', "'\\''")),
    });
    words.collect::<Vec<String>>().join(" ")
}

/// Escapes text from other processes, such as a process name, for a terminal.
pub(crate) fn strip_control(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

/// An invalid request, with a hint. The program exits with 2, as for an unknown flag.
#[derive(Debug)]
pub(crate) struct UsageError(pub(crate) String);

impl std::fmt::Display for UsageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

/// A failure that has been reported already. The program exits with 1 and prints nothing more.
#[derive(Debug)]
pub(crate) struct AlreadyReported;

impl std::fmt::Display for AlreadyReported {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("something is wrong")
    }
}

impl std::error::Error for AlreadyReported {}

/// True if the failure is that the reader of standard output closed the pipe.
pub(crate) fn is_broken_pipe(err: &anyhow::Error) -> bool {
    err.chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_pipe_is_found_under_its_context() {
        let closed = anyhow::Error::new(io::Error::from(ErrorKind::BrokenPipe)).context("writing");
        assert!(is_broken_pipe(&closed));
        let other = anyhow::Error::new(io::Error::from(ErrorKind::NotFound)).context("writing");
        assert!(!is_broken_pipe(&other));
    }
}
