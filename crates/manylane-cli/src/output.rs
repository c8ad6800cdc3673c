//! Output: results to standard output, everything else to standard error. A closed pipe is not an
//! error.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use anyhow::{Context, Result};
use manylane_sys::unix_socket::effective_uid;
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

/// Creates a file for a result; `-` is standard output. For root, it follows no link, and opens no
/// file of another user, in a folder such as /tmp that others may write to.
pub(crate) fn create(path: &Path) -> Result<Box<dyn Write>> {
    if path == Path::new("-") {
        return Ok(Box::new(io::stdout()));
    }
    let failed = || format!("cannot write {}", path.display());
    let file = if effective_uid() == 0 { create_as_root(path) } else { File::create(path) };
    Ok(Box::new(file.with_context(failed)?))
}

/// Creates a file in the folder that was checked, whatever its path leads to by then.
fn create_as_root(path: &Path) -> io::Result<File> {
    let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
    let folder = OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_DIRECTORY).open(folder)?;
    let about = folder.metadata()?;
    let name = path.file_name().ok_or(ErrorKind::IsADirectory)?;
    let path = Path::new(&format!("/proc/self/fd/{}", folder.as_raw_fd())).join(name);
    let is_shared = about.uid() != 0 || about.mode() & 0o022 != 0;
    if is_shared { create_in(&about, &path) } else { File::create(path) }
}

/// Creates a file in a folder that others may write to.
fn create_in(folder: &Metadata, path: &Path) -> io::Result<File> {
    match File::create_new(path) {
        Err(err) if err.kind() == ErrorKind::AlreadyExists => {}
        created => return created,
    }
    // Without opening it, which blocks for a FIFO.
    let found = OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW).open(path)?;
    let about = found.metadata()?;
    let is_foreign = ![folder.uid(), effective_uid()].contains(&about.uid());
    if about.is_symlink() || about.nlink() > 1 || is_foreign {
        let why = "it is a link or belongs to another user, in a folder that other users can write to: name another file";
        return Err(io::Error::new(ErrorKind::PermissionDenied, why));
    }
    File::create(format!("/proc/self/fd/{}", found.as_raw_fd()))
}

/// Creates the folder of a report (`--out`).
#[cfg(feature = "bench")]
pub(crate) fn create_folder(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path)
        .with_context(|| format!("cannot create {}: name another folder with --out", path.display()))
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
        f.write_str("failed")
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
    use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
    use std::{fs, thread};

    use super::*;

    #[test]
    fn a_file_in_a_folder_of_others_is_no_link() {
        let folder = std::env::temp_dir().join(format!("manylane-output-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let file = |name: &str| folder.join(name);
        let create = |name: &str| create_in(&folder.metadata().unwrap(), &file(name));
        create("new").unwrap().write_all(b"longer").unwrap();
        create("new").unwrap().write_all(b"short").unwrap();
        assert_eq!(fs::read(file("new")).unwrap(), b"short");
        symlink(file("new"), file("link")).unwrap();
        symlink(file("missing"), file("dangling")).unwrap();
        fs::hard_link(file("new"), file("second")).unwrap();
        for name in ["link", "dangling", "second", "new"] {
            assert_eq!(create(name).unwrap_err().kind(), ErrorKind::PermissionDenied, "{name}");
        }
        assert_eq!(fs::read(file("new")).unwrap(), b"short");
        assert!(!file("missing").exists());
        let fifo = file("fifo");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        let reader = thread::spawn(move || fs::read(fifo).unwrap());
        create("fifo").unwrap().write_all(b"by a FIFO").unwrap();
        assert_eq!(reader.join().unwrap(), b"by a FIFO");
        if effective_uid() == 0 {
            chown(file("fifo"), Some(12345), None).unwrap();
            assert_eq!(create("fifo").unwrap_err().kind(), ErrorKind::PermissionDenied);
            // It is what callers get, where the folder is not root's alone.
            chown(&folder, Some(12345), None).unwrap();
            assert!(super::create(&file("link")).is_err());
            // In a folder of root's alone, such as /dev, links are followed.
            chown(&folder, Some(0), None).unwrap();
            fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
            super::create(&file("link")).unwrap();
        }
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_closed_pipe_is_found_under_its_context() {
        let closed = anyhow::Error::new(io::Error::from(ErrorKind::BrokenPipe)).context("writing");
        assert!(is_broken_pipe(&closed));
        let other = anyhow::Error::new(io::Error::from(ErrorKind::NotFound)).context("writing");
        assert!(!is_broken_pipe(&other));
    }
}
