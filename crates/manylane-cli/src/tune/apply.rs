//! Makes changes and reverts them, each by its entry in the journal.
//!
//! ```text
//! apply:  read ─► entry with the intended value, on the disk ─► write ─► read ─► entry with the actual value
//! undo:   read ─► ours? write the previous value ─► read ─► no entry
//!              ├─ as before: no entry
//!              └─ changed by others: left as it is, named, no entry
//! ```

use anyhow::{Context, Result};
use serde::Serialize;

use super::journal::{Entry, Journal};
use super::settings::Settings;
use crate::doctor::change::Change;

/// The outcome of a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Outcome {
    /// It was made, or reverted.
    Done,
    /// It would be made, or reverted.
    Would,
    /// Nothing to do: it already has the value.
    Already,
    /// It was changed by others since then, and is left as it is.
    Foreign,
    /// The device does not exist any more.
    Gone,
    /// It belongs to another network namespace, and cannot be changed from here.
    Elsewhere,
    /// It could interrupt the user's connection.
    Refused,
    /// It failed.
    Failed,
}

impl Outcome {
    /// True if the setting does not have the requested value now.
    pub(super) fn is_failure(&self) -> bool {
        matches!(self, Self::Foreign | Self::Elsewhere | Self::Refused | Self::Failed)
    }
}

/// Makes a change.
pub(super) fn apply(
    settings: &dyn Settings,
    journal: &mut Journal,
    finding: &str,
    change: &Change,
) -> Result<Outcome> {
    let Change { target, value } = change;
    let current = settings.read(target)?;
    let at = journal.find(target, settings);
    if target.is_same(&current, value) {
        // A crash between the change and the second entry.
        if let Some(at) = at
            && journal.entries[at].intent.take().is_some()
        {
            journal.entries[at].after = Some(current);
            journal.save()?;
        }
        return Ok(Outcome::Already);
    }
    let saved = journal.entries.clone();
    let at = at.unwrap_or_else(|| {
        journal.entries.push(Entry {
            finding: finding.into(),
            target: target.clone(),
            before: current.clone(),
            after: None,
            intent: None,
            boot: String::new(),
            namespace: None,
            index: None,
        });
        journal.entries.len() - 1
    });
    let entry = &mut journal.entries[at];
    if !entry.is_own(&current) && !entry.is_original(&current) {
        // It was changed by others since then: this is the value to restore.
        entry.before.clone_from(&current);
        entry.after = None;
    }
    entry.intent = Some(value.clone());
    entry.boot = settings.boot_id();
    entry.namespace = (!target.is_machine_wide()).then(|| settings.namespace()).flatten();
    entry.index = target.device().and_then(|device| settings.device_index(device));
    journal.save()?;
    let written = settings.write(target, value);
    let now = settings.read(target);
    match (written, now) {
        (Ok(()), Ok(now)) if !target.is_same(&now, &current) => {
            // The kernel may have rounded it.
            let entry = &mut journal.entries[at];
            (entry.after, entry.intent) = (Some(now), None);
            journal.save()?;
            Ok(Outcome::Done)
        }
        (written, now) => {
            // If the value is unchanged, the entry is not needed; otherwise it stays as it is.
            if now.is_ok_and(|now| target.is_same(&now, &current)) {
                journal.entries = saved;
                journal.save()?;
            }
            written.and_then(|()| {
                Err(anyhow::anyhow!(
                    "the kernel accepted {value} for {target}, but the value is still {current}"
                ))
            })
        }
    }
}

/// The outcome of reverting entry `at`, without doing so, and the current value.
pub(super) fn plan_undo(settings: &dyn Settings, entry: &Entry) -> Result<(Outcome, String)> {
    if entry.is_other_namespace(settings) {
        return Ok((Outcome::Elsewhere, String::new()));
    }
    if let Some(device) = entry.target.device() {
        let index = settings.device_index(device);
        let is_another = entry.boot == settings.boot_id() && index != entry.index;
        if index.is_none() || is_another {
            return Ok((Outcome::Gone, String::new()));
        }
    }
    let current = settings.read(&entry.target)?;
    // First, because nothing was changed if both are the same.
    let outcome = if entry.is_original(&current) {
        Outcome::Already
    } else if entry.is_own(&current) {
        Outcome::Would
    } else {
        Outcome::Foreign
    };
    Ok((outcome, current))
}

/// Reverts entry `at`. The entry is then removed from the journal, unless it can be reverted
/// later.
pub(super) fn undo(settings: &dyn Settings, journal: &mut Journal, at: usize) -> Result<(Outcome, String)> {
    let entry = journal.entries[at].clone();
    let (planned, current) = plan_undo(settings, &entry)?;
    let outcome = match planned {
        Outcome::Elsewhere => return Ok((planned, current)),
        Outcome::Would => {
            settings.write(&entry.target, &entry.before)?;
            let now = settings.read(&entry.target)?;
            if !entry.is_original(&now) {
                let Entry { target, before, .. } = &entry;
                return Err(anyhow::anyhow!(
                    "the kernel took {before} for {target}, and it is {now} all the same"
                ));
            }
            Outcome::Done
        }
        other => other,
    };
    journal.entries.remove(at);
    journal.save().context("the change is reverted, but the journal still has it: run tune --undo again")?;
    Ok((outcome, current))
}
