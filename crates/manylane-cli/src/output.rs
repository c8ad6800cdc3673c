//! Output: results to standard output, everything else to standard error. A closed pipe is not an
//! error.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use anyhow::{Context, Result};
use manylane_sys::fd::open_at;
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

/// Flags of a file that is created or replaced.
const CREATE: libc::c_int = libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC;
/// Flags of an existing file that is read and continued.
#[cfg(any(feature = "bench", test))]
const CONTINUE: libc::c_int = libc::O_RDWR | libc::O_APPEND;

/// Creates a file for a result; `-` is standard output.
pub(crate) fn create(path: &Path) -> Result<Box<dyn Write>> {
    if path == Path::new("-") {
        return Ok(Box::new(io::stdout()));
    }
    Ok(Box::new(open(path, CREATE)?))
}

/// Opens an earlier result, to read and continue it.
#[cfg(feature = "bench")]
pub(crate) fn open_existing(path: &Path) -> Result<File> {
    open(path, CONTINUE)
}

/// Opens a file. For root, it follows no link, and opens no file of another user, in a folder such
/// as /tmp that others may write to.
fn open(path: &Path, flags: libc::c_int) -> Result<File> {
    open_checked(path, flags).with_context(|| format!("cannot open {}", path.display()))
}

/// Opens a file in the folder that was checked, whatever its path leads to by then.
fn open_checked(path: &Path, flags: libc::c_int) -> io::Result<File> {
    let (folder, name) = split_path(path)?;
    let folder = OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_DIRECTORY).open(folder)?;
    let about = folder.metadata()?;
    let is_shared = about.uid() != 0 || about.mode() & 0o022 != 0;
    if effective_uid() == 0 && is_shared {
        return open_in(&folder, name, flags);
    }
    open_at(folder.as_fd(), name, flags).map(File::from)
}

/// The folder and the name of a file. [`Path::file_name`] ignores a trailing slash.
fn split_path(path: &Path) -> io::Result<(&Path, &OsStr)> {
    let bytes = path.as_os_str().as_bytes();
    let start = bytes.iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1);
    let (folder, name) = bytes.split_at(start);
    if [&b""[..], b".", b".."].contains(&name) {
        return Err(io::Error::new(ErrorKind::IsADirectory, "it is a folder: name a file"));
    }
    let folder = if folder.is_empty() { &b"."[..] } else { folder };
    Ok((Path::new(OsStr::from_bytes(folder)), OsStr::from_bytes(name)))
}

/// Opens a file in a folder that others may write to.
fn open_in(folder: &File, name: &OsStr, flags: libc::c_int) -> io::Result<File> {
    let open = |flags| open_at(folder.as_fd(), name, flags).map(File::from);
    if flags & libc::O_CREAT != 0 {
        match open(flags | libc::O_EXCL) {
            Err(err) if err.kind() == ErrorKind::AlreadyExists => {}
            created => return created,
        }
    }
    // Without opening it, which blocks for a FIFO.
    let found = open(libc::O_PATH | libc::O_NOFOLLOW)?.metadata()?;
    let is_foreign = ![folder.metadata()?.uid(), effective_uid()].contains(&found.uid());
    let refused = || {
        let why = "it is a link or belongs to another user, in a folder that other users can write to: name another file";
        io::Error::new(ErrorKind::PermissionDenied, why)
    };
    if found.is_symlink() || found.nlink() > 1 || is_foreign {
        return Err(refused());
    }
    // A FIFO that has replaced a regular file since then does not block it.
    let nonblocking = if found.is_file() { libc::O_NONBLOCK } else { 0 };
    let existing = flags & !(libc::O_CREAT | libc::O_TRUNC);
    let file = open(existing | libc::O_NOFOLLOW | nonblocking)?;
    let opened = file.metadata()?;
    if (opened.dev(), opened.ino()) != (found.dev(), found.ino()) {
        return Err(refused());
    }
    // Only now, because it could have been another file.
    if flags & libc::O_TRUNC != 0 && opened.is_file() {
        file.set_len(0)?;
    }
    Ok(file)
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
        let open = |name: &str, flags| open_in(&File::open(&folder).unwrap(), OsStr::new(name), flags);
        let create = |name: &str| open(name, CREATE);
        create("new").unwrap().write_all(b"longer").unwrap();
        create("new").unwrap().write_all(b"short").unwrap();
        assert_eq!(fs::read(file("new")).unwrap(), b"short");
        open("new", CONTINUE).unwrap().write_all(b"er").unwrap();
        assert_eq!(fs::read(file("new")).unwrap(), b"shorter");
        assert_eq!(open("missing", CONTINUE).unwrap_err().kind(), ErrorKind::NotFound);
        symlink(file("new"), file("link")).unwrap();
        symlink(file("missing"), file("dangling")).unwrap();
        fs::hard_link(file("new"), file("second")).unwrap();
        for name in ["link", "dangling", "second", "new"] {
            for flags in [CREATE, CONTINUE] {
                let err = open(name, flags).unwrap_err();
                assert_eq!(err.kind(), ErrorKind::PermissionDenied, "{name}, {flags:#o}");
            }
        }
        assert_eq!(fs::read(file("new")).unwrap(), b"shorter");
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
            assert_eq!(fs::read(file("new")).unwrap(), b"");
            let said = format!("{:#}", super::create(&file("new/")).err().unwrap());
            assert!(said.ends_with("new/: it is a folder: name a file"), "{said}");
        }
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_path_is_split_as_the_kernel_resolves_it() {
        let split =
            |path| split_path(Path::new(path)).map(|(folder, name)| (folder.to_owned(), name.to_owned()));
        for (path, folder, name) in
            [("a", ".", "a"), ("/a", "/", "a"), ("a//b", "a//", "b"), ("../a", "../", "a")]
        {
            assert_eq!(split(path).unwrap(), (folder.into(), name.into()), "{path}");
        }
        for path in ["", "/", "a/", "a/.", ".."] {
            assert_eq!(split(path).unwrap_err().kind(), ErrorKind::IsADirectory, "{path}");
        }
    }

    #[test]
    fn a_closed_pipe_is_found_under_its_context() {
        let closed = anyhow::Error::new(io::Error::from(ErrorKind::BrokenPipe)).context("writing");
        assert!(is_broken_pipe(&closed));
        let other = anyhow::Error::new(io::Error::from(ErrorKind::NotFound)).context("writing");
        assert!(!is_broken_pipe(&other));
    }
}
