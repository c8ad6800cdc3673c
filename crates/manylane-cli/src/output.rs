//! Where output goes: results to standard output, the rest to standard error. A closed pipe is no
//! error.

use std::io::{self, ErrorKind, Write};

use anyhow::{Context, Result};
use serde::Serialize;

/// Writes a result. When the reader has gone, the error is one that [`is_broken_pipe`] knows: the
/// program ends, and has not failed.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("cannot write to standard output")
}

/// Writes a result as one JSON document.
pub(crate) fn print_json(document: &impl Serialize) -> Result<()> {
    print(&json(document)?)
}

/// A JSON document as text, with a line end.
pub(crate) fn json(document: &impl Serialize) -> Result<String> {
    Ok(serde_json::to_string_pretty(document).context("cannot write JSON")? + "\n")
}

/// Writes a line to standard error. Nobody may be reading there; that is nobody's failure.
pub(crate) fn eprint_line(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// What others have chosen, such as the name of a process, for a terminal.
pub(crate) fn strip_control(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

/// What was asked for cannot be, and how to ask: the program ends with 2, as for a flag that does
/// not exist.
#[derive(Debug)]
pub(crate) struct UsageError(pub(crate) String);

impl std::fmt::Display for UsageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

/// All has been said, and it was nothing good: the program ends with 1 and says no more.
#[derive(Debug)]
pub(crate) struct AlreadyReported;

impl std::fmt::Display for AlreadyReported {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("something is wrong")
    }
}

impl std::error::Error for AlreadyReported {}

/// Whether the reason of a failure is that the reader of standard output has gone.
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
