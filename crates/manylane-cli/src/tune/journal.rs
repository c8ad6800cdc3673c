//! The journal of `manylane tune`: changes with their previous values, in a file that survives a
//! crash at any point.
//!
//! An entry is written with the intended value before the change is made, and again after it. So
//! the entry identifies any value that is found later: the previous one, the one that was set, or
//! one that was set by others.
//!
//! A user that can write the journal could make root set any value. So neither the journal nor a
//! folder on the path to it may belong to another user, or be writable by others. In the journal's
//! own folder, no link is followed.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use manylane_sys::{fd, unix_socket};
use serde::{Deserialize, Serialize};

use super::settings::Settings;
use crate::doctor::change::Target;

const SCHEMA: &str = "manylane.tune-journal.v1";
/// Maximum size of a journal in bytes: far more than the settings of a machine need.
const JOURNAL_LEN_MAX: u64 = 16 << 20;

/// A setting that was changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    /// The finding that it was changed for.
    pub(super) finding: String,
    pub(super) target: Target,
    /// The value before the first change.
    pub(super) before: String,
    /// The value after the last change that is known to be done.
    pub(super) after: Option<String>,
    /// The intended value of a change that may or may not have been made.
    pub(super) intent: Option<String>,
    /// Id of that boot.
    pub(super) boot: String,
    /// Inode of the network namespace, for settings that are not machine-wide.
    pub(super) namespace: Option<u64>,
    /// Index of the device, for settings of a device.
    pub(super) index: Option<u32>,
}

impl Entry {
    /// True if the value is one that this program has set.
    pub(super) fn is_own(&self, value: &str) -> bool {
        [&self.after, &self.intent].into_iter().flatten().any(|ours| self.target.is_same(ours, value))
    }

    pub(super) fn is_original(&self, value: &str) -> bool {
        self.target.is_same(&self.before, value)
    }

    /// True if it belongs to another network namespace, as far as that is known: after a reboot,
    /// namespaces have other numbers.
    pub(super) fn is_other_namespace(&self, settings: &dyn Settings) -> bool {
        self.boot == settings.boot_id() && self.namespace.is_some() && self.namespace != settings.namespace()
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Document {
    schema: String,
    entries: Vec<Entry>,
}

/// The journal, locked by this process.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    /// Holds the lock; none if it is only read.
    lock: Option<File>,
    pub(super) entries: Vec<Entry>,
}

impl Drop for Journal {
    fn drop(&mut self) {
        if let Some(lock) = &self.lock {
            // Closing unlocks it in any case, but maybe not at once.
            _ = fd::unlock(lock);
        }
    }
}

impl Journal {
    /// Opens it for changes. The file and its folder need not exist yet.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let hint = || {
            format!(
                "cannot save old values in {}: run this as root, or name another file with --state",
                path.display()
            )
        };
        let path = resolve_path(path, true).with_context(hint)?;
        // A separate file, because the journal is replaced at each change.
        let lock = sibling_path(&path, ".lock").with_context(hint)?;
        let lock = open_options().write(true).create(true).mode(0o644).open(lock).with_context(hint)?;
        match fd::try_lock(&lock) {
            Ok(()) => {}
            Err(err) if err.kind() == ErrorKind::WouldBlock => {
                bail!("another manylane tune uses {}", path.display())
            }
            Err(err) => return Err(err).with_context(hint),
        }
        let entries = load(&path)?;
        Ok(Self { path, lock: Some(lock), entries })
    }

    /// Opens it for reading.
    pub(super) fn open_read_only(path: &Path) -> Result<Self> {
        let path = match fs::exists(parent_dir(path)) {
            Ok(false) => path.into(),
            _ => resolve_path(path, false).with_context(|| format!("cannot read {}", path.display()))?,
        };
        let entries = load(&path)?;
        Ok(Self { path, lock: None, entries })
    }

    /// The entry of a setting in this boot and namespace.
    pub(super) fn find(&self, target: &Target, settings: &dyn Settings) -> Option<usize> {
        self.entries.iter().position(|entry| entry.target == *target && !entry.is_other_namespace(settings))
    }

    /// Writes it to the disk. After this, it survives a crash.
    pub(super) fn save(&self) -> Result<()> {
        let hint = || format!("cannot write {}", self.path.display());
        let document = Document { schema: SCHEMA.into(), entries: self.entries.clone() };
        let text = crate::output::json(&document)?;
        let new = sibling_path(&self.path, ".new").with_context(hint)?;
        let cannot_create = || format!("cannot create {}", new.display());
        // A file that a crash has left.
        match fs::remove_file(&new) {
            Err(err) if err.kind() != ErrorKind::NotFound => return Err(err).with_context(cannot_create),
            _ => {}
        }
        let create = open_options().write(true).create_new(true).mode(0o644).open(&new);
        let mut file = create.with_context(cannot_create)?;
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).with_context(hint)?;
        fs::rename(&new, &self.path).with_context(hint)?;
        File::open(parent_dir(&self.path)).and_then(|folder| folder.sync_all()).with_context(hint)
    }
}

fn parent_dir(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn sibling_path(path: &Path, ending: &str) -> Option<PathBuf> {
    let mut name = path.file_name()?.to_owned();
    name.push(ending);
    Some(path.with_file_name(name))
}

/// A link is not followed, and a pipe does not block.
fn open_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    options
}

/// Checks that only root and this user can change a file, a folder or a link. In a sticky folder,
/// others can add files.
fn check_permissions(path: &Path, of: &fs::Metadata, may_be_sticky: bool) -> Result<()> {
    const STICKY: u32 = 0o1000;
    // A link has no permissions of its own.
    let others = !of.is_symlink() && of.mode() & 0o022 != 0 && !(may_be_sticky && of.mode() & STICKY != 0);
    let (path, uid) = (path.display(), of.uid());
    // The path may be a home or /tmp, whose owner and mode are right for others.
    ensure!(
        [0, unix_socket::effective_uid()].contains(&uid),
        "{path} belongs to user {uid}, who could change it: name another file with --state"
    );
    ensure!(!others, "other users may write to {path}: name another file with --state");
    Ok(())
}

/// The path with all links to the folder resolved. Each folder and link on the way is checked
/// before it is used: only root and this user may replace it. With `create`, missing folders are
/// created.
fn resolve_path(path: &Path, create: bool) -> Result<PathBuf> {
    /// As in the kernel.
    const LINKS_MAX: u32 = 40;
    let name = path.file_name().context("the path names no file")?;
    let parts = |path: &Path| path.components().rev().map(|part| part.as_os_str().to_owned()).collect();
    let mut left: Vec<OsString> = parts(&std::path::absolute(parent_dir(path))?);
    let (mut folder, mut links) = (PathBuf::new(), 0);
    while let Some(part) = left.pop() {
        if part == "." {
            continue;
        }
        if part == ".." {
            folder.pop();
            continue;
        }
        let at = folder.join(part);
        let found = match fs::symlink_metadata(&at) {
            Err(err) if err.kind() == ErrorKind::NotFound && create => {
                match DirBuilder::new().mode(0o755).create(&at) {
                    // Another process was faster. It is checked below as any other.
                    Err(err) if err.kind() == ErrorKind::AlreadyExists => {}
                    created => created?,
                }
                fs::symlink_metadata(&at)?
            }
            found => found?,
        };
        check_permissions(&at, &found, true)?;
        if found.is_symlink() {
            links += 1;
            ensure!(links <= LINKS_MAX, "{} has too many symbolic links", path.display());
            left.extend::<Vec<_>>(parts(&fs::read_link(&at)?));
        } else {
            folder = at;
        }
    }
    check_permissions(&folder, &fs::symlink_metadata(&folder)?, false)?;
    Ok(folder.join(name))
}

fn load(path: &Path) -> Result<Vec<Entry>> {
    let failed = || format!("cannot read {}", path.display());
    let file = match open_options().read(true).open(path) {
        Ok(file) => file,
        Err(err) if err.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(err) => return Err(err).with_context(failed),
    };
    let metadata = file.metadata().with_context(failed)?;
    ensure!(metadata.is_file(), "{} is not a regular file", path.display());
    check_permissions(path, &metadata, false).with_context(failed)?;
    let mut text = String::new();
    file.take(JOURNAL_LEN_MAX).read_to_string(&mut text).with_context(failed)?;
    let strange = || format!("{} is not a journal of manylane tune, left unchanged", path.display());
    let document: Document = serde_json::from_str(&text).with_context(strange)?;
    ensure!(document.schema == SCHEMA, "{} (schema {})", strange(), document.schema);
    Ok(document.entries)
}
