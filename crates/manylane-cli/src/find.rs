//! Finds the program as a shell would, and the preload library beside our own program.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

/// Overrides the path of the library.
pub(crate) const LIBRARY_OVERRIDE: &str = "MANYLANE_PRELOAD";
const LIBRARY: &str = "libmanylane_preload.so";
/// The default for a missing `PATH`.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin";

/// The reason why a program cannot be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Missing {
    /// There is no program of that name.
    NotFound,
    /// The program may not be executed.
    NotExecutable,
}

impl Missing {
    /// The exit code of shells, `env` and `nohup` for it.
    pub(crate) fn exit_code(self) -> u8 {
        match self {
            Self::NotFound => 127,
            Self::NotExecutable => 126,
        }
    }

    /// In words.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::NotFound => "no such program",
            Self::NotExecutable => "not executable: permission denied",
        }
    }
}

/// The file that `execvp(3)` would start for `name`, with our `PATH`.
pub(crate) fn program(name: &OsStr) -> Result<PathBuf, Missing> {
    let path = env::var_os("PATH").filter(|path| !path.is_empty()).unwrap_or_else(|| DEFAULT_PATH.into());
    program_in(name, &path)
}

fn program_in(name: &OsStr, path: &OsStr) -> Result<PathBuf, Missing> {
    if name.is_empty() {
        return Err(Missing::NotFound);
    }
    if name.as_bytes().contains(&b'/') {
        return is_executable(Path::new(name)).map(|()| name.into());
    }
    let mut worst = Missing::NotFound;
    for folder in env::split_paths(path) {
        let file = folder.join(name);
        match is_executable(&file) {
            Ok(()) => return Ok(file),
            Err(Missing::NotExecutable) => worst = Missing::NotExecutable,
            Err(Missing::NotFound) => {}
        }
    }
    Err(worst)
}

fn is_executable(file: &Path) -> Result<(), Missing> {
    match fs::metadata(file) {
        // Root may execute a file if any user may. For other users, the kernel is asked.
        Ok(about) if about.is_file() && about.permissions().mode() & 0o111 != 0 => Ok(()),
        Ok(_) => Err(Missing::NotExecutable),
        Err(err) if err.kind() == std::io::ErrorKind::PermissionDenied => Err(Missing::NotExecutable),
        Err(_) => Err(Missing::NotFound),
    }
}

/// The preload library.
///
/// # Errors
/// If there is none (the error says what to install), or if its path cannot be put into
/// `LD_PRELOAD`.
pub(crate) fn library() -> Result<PathBuf> {
    let found = match env::var_os(LIBRARY_OVERRIDE).filter(|path| !path.is_empty()) {
        Some(path) if Path::new(&path).is_file() => fs::canonicalize(&path)?,
        Some(path) => {
            bail!(
                "{LIBRARY_OVERRIDE} is {}, which is not a file: unset it, or set it to the path of {LIBRARY}",
                Path::new(&path).display()
            )
        }
        None => find_library(&env::current_exe()?)?,
    };
    // The dynamic linker splits at both, and expands `$`.
    if found.as_os_str().as_bytes().iter().any(|byte| b" :$\t\n".contains(byte)) {
        bail!(
            "the path of the library, {}, contains a space, a colon or a $, which LD_PRELOAD does not allow: install it elsewhere, or set {LIBRARY_OVERRIDE} to a symbolic link to it",
            found.display()
        );
    }
    Ok(found)
}

/// Candidates for the library, relative to our own program: installed, or as built by cargo. A
/// build for tests is only in the folder for dependencies, and is newer than one beside the
/// program.
const LIBRARY_DIRS: [&str; 4] = ["../lib/manylane", "../lib64/manylane", "deps", "."];

fn find_library(exe: &Path) -> Result<PathBuf> {
    // Links to the program are followed, because the library is beside the program and not beside
    // the link.
    let exe = fs::canonicalize(exe)?;
    let folder = exe.parent().unwrap_or(Path::new("/"));
    let found = LIBRARY_DIRS.iter().map(|place| folder.join(place).join(LIBRARY)).find(|file| file.is_file());
    match found {
        Some(found) => Ok(fs::canonicalize(found)?),
        None => bail!(
            "cannot find {LIBRARY} at {}: run 'make install' or 'cargo build -p manylane-preload', or set {LIBRARY_OVERRIDE} to its path",
            folder.join(LIBRARY_DIRS[0]).display()
        ),
    }
}

/// `LD_PRELOAD` with our library after the user's, because some libraries (such as a sanitizer's)
/// must be the first.
pub(crate) fn ld_preload(users: Option<OsString>, library: &Path) -> OsString {
    let mut all = users.unwrap_or_default();
    let has_it =
        all.as_bytes().split(|byte| b" :".contains(byte)).any(|one| one == library.as_os_str().as_bytes());
    if has_it {
        return all;
    }
    if !all.is_empty() {
        all.push(":");
    }
    all.push(library);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_as_by_a_shell() {
        let path = OsStr::new("/nowhere:/usr/bin:/bin");
        assert!(program_in("sh".as_ref(), path).unwrap().ends_with("sh"));
        assert_eq!(program_in("/bin/sh".as_ref(), path), Ok("/bin/sh".into()));
        for (name, why) in [
            ("no-such-program", Missing::NotFound),
            ("", Missing::NotFound),
            ("/etc/passwd", Missing::NotExecutable),
            ("/etc", Missing::NotExecutable),
            ("/nowhere/sh", Missing::NotFound),
        ] {
            assert_eq!(program_in(name.as_ref(), path), Err(why), "{name}");
        }
        assert_eq!(program_in("passwd".as_ref(), "/etc".as_ref()), Err(Missing::NotExecutable));
    }

    #[test]
    fn user_preloads_come_first() {
        let ours = Path::new("/lib/ours.so");
        assert_eq!(ld_preload(None, ours), "/lib/ours.so");
        assert_eq!(ld_preload(Some("a.so b.so".into()), ours), "a.so b.so:/lib/ours.so");
        assert_eq!(ld_preload(Some("/lib/ours.so".into()), ours), "/lib/ours.so");
    }

    #[test]
    fn a_missing_library_error_names_the_remedy() {
        let text = find_library(Path::new("/bin/sh")).unwrap_err().to_string();
        assert!(text.contains("make install") && text.contains(LIBRARY_OVERRIDE), "{text}");
    }
}
