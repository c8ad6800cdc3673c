//! What `manylane tune` changed, and what was there before: a file that survives a crash at any point.
//!
//! An entry is written, with what is intended, before the change is made, and again when it is done. So whatever value
//! is found later, the entry says whose it is: what was there, what was set, or somebody else's.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use manylane_sys::flock;
use serde::{Deserialize, Serialize};

use super::settings::Settings;
use crate::doctor::change::Target;

const SCHEMA: &str = "manylane.tune-journal.v1";

/// A setting that was changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    /// The finding that it was changed for.
    pub(super) finding: String,
    pub(super) target: Target,
    /// What was there before the first change.
    pub(super) before: String,
    /// What it was after the last change that is known to be done.
    pub(super) after: Option<String>,
    /// What a change would make it that may or may not have been done.
    pub(super) intent: Option<String>,
    /// The boot in which that was.
    pub(super) boot: String,
    /// Inode of the network namespace, of what is not the machine's.
    pub(super) namespace: Option<u64>,
    /// Number of the device, of what is a device's.
    pub(super) index: Option<u32>,
}

impl Entry {
    /// Whether a value that was read is one that we have set.
    pub(super) fn is_ours(&self, value: &str) -> bool {
        [&self.after, &self.intent].into_iter().flatten().any(|ours| self.target.is_same(ours, value))
    }

    pub(super) fn is_as_before(&self, value: &str) -> bool {
        self.target.is_same(&self.before, value)
    }

    /// Whether it is of a network namespace that is not this one, as far as that can be told: after a restart of the
    /// machine, namespaces have other numbers.
    pub(super) fn is_elsewhere(&self, settings: &dyn Settings) -> bool {
        self.boot == settings.boot() && self.namespace.is_some() && self.namespace != settings.namespace()
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Document {
    schema: String,
    entries: Vec<Entry>,
}

/// The journal, for this process alone.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    /// Holds the lock; none for one that only looks.
    _lock: Option<File>,
    pub(super) entries: Vec<Entry>,
}

impl Journal {
    /// Opens it to change it. There need be no file yet, and no folder.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let hint = || {
            format!(
                "cannot keep what was there in {}: run this as root, or name another file by --state",
                path.display()
            )
        };
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::create_dir_all(folder).with_context(hint)?;
        let mut name = path.file_name().with_context(hint)?.to_owned();
        name.push(".lock");
        // Beside the journal, which is replaced at each change.
        let lock = File::options().write(true).create(true).truncate(false).open(path.with_file_name(name));
        let lock = lock.with_context(hint)?;
        match flock::try_lock(&lock) {
            Ok(()) => {}
            Err(err) if err.kind() == ErrorKind::WouldBlock => {
                bail!("another manylane tune is at work with {}", path.display())
            }
            Err(err) => return Err(err).with_context(hint),
        }
        Ok(Self { path: path.into(), _lock: Some(lock), entries: load(path)? })
    }

    /// Opens it to look.
    pub(super) fn look(path: &Path) -> Result<Self> {
        Ok(Self { path: path.into(), _lock: None, entries: load(path)? })
    }

    /// The entry of a setting as it is here and now.
    pub(super) fn find(&self, target: &Target, settings: &dyn Settings) -> Option<usize> {
        self.entries.iter().position(|entry| entry.target == *target && !entry.is_elsewhere(settings))
    }

    /// Puts it on the disk: after this, it is there whatever happens.
    pub(super) fn save(&self) -> Result<()> {
        let hint = || format!("cannot write {}", self.path.display());
        let document = Document { schema: SCHEMA.into(), entries: self.entries.clone() };
        let text = crate::output::json(&document)?;
        let mut name = self.path.file_name().with_context(hint)?.to_owned();
        name.push(".new");
        let new = self.path.with_file_name(name);
        let mut file = File::create(&new).with_context(hint)?;
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).with_context(hint)?;
        fs::rename(&new, &self.path).with_context(hint)?;
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all()).with_context(hint)
    }
}

fn load(path: &Path) -> Result<Vec<Entry>> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(err) if err.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(err) => return Err(err).with_context(|| format!("cannot read {}", path.display())),
    };
    let strange = || format!("{} is no journal of manylane tune: it is left as it is", path.display());
    let document: Document = serde_json::from_str(&text).with_context(strange)?;
    ensure!(document.schema == SCHEMA, "{} (schema {})", strange(), document.schema);
    Ok(document.entries)
}
