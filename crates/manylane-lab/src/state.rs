//! The state of a run in a file: a line of JSON about machine and settings, then a line for each
//! finished part. A part is recorded completely or not at all: a line that was truncated by the
//! end of the program is removed. A failed part is recorded, too, but not done. A resumed run
//! tries it again, and its last line counts.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use manylane_measure::Machine;
use serde::{Deserialize, Serialize};

use crate::row::{FAILED_TABLE, Row};
use crate::settings::LabSettings;

/// Identifies the first line.
const SCHEMA: &str = "manylane.lab.state.v2";

#[derive(Debug, Serialize, Deserialize)]
struct Header {
    schema: String,
    machine: Machine,
    settings: LabSettings,
}

#[derive(Debug, Serialize, Deserialize)]
struct PartRecord {
    part: String,
    /// Duration of the part.
    #[serde(default)]
    seconds: f64,
    rows: Vec<Row>,
}

impl PartRecord {
    fn has_failed(&self) -> bool {
        self.rows.iter().any(|row| row.table == FAILED_TABLE)
    }
}

/// The finished parts, and their file.
#[derive(Debug)]
pub struct State {
    path: PathBuf,
    file: File,
    header: Header,
    completed: HashSet<String>,
    rows: Vec<Row>,
    seconds: f64,
    /// Number of parts that failed before the run is resumed.
    failed_parts: usize,
}

impl State {
    /// A new run. An existing file is kept, with the suffix `.old`.
    pub fn create(path: &Path, settings: LabSettings) -> Result<Self> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).with_context(|| {
                format!("cannot create {}: name another folder with --out", folder.display())
            })?;
        }
        if path.exists() {
            let mut old = path.as_os_str().to_owned();
            old.push(".old");
            fs::rename(path, &old).with_context(|| format!("cannot rename {}", path.display()))?;
        }
        // None is there: nor does it follow a link.
        let file = File::create_new(path).with_context(|| format!("cannot write {}", path.display()))?;
        let head = Header { schema: SCHEMA.into(), machine: Machine::read(), settings };
        let mut state = Self {
            path: path.into(),
            file,
            header: head,
            completed: HashSet::new(),
            rows: Vec::new(),
            seconds: 0.0,
            failed_parts: 0,
        };
        let line = serde_json::to_string(&state.header)?;
        state.write(&line)?;
        Ok(state)
    }

    /// Resumes the run in `file`, which is open for reading and appending, on the same machine and
    /// with the same settings. Only the command line may differ.
    ///
    /// # Errors
    /// Fails if the file is of another machine or of other settings, or is not a state.
    pub fn resume(path: &Path, mut file: File, settings: &LabSettings) -> Result<Self> {
        let mut text = String::new();
        file.read_to_string(&mut text).with_context(|| format!("cannot read {}", path.display()))?;
        let mut lines = text.split_inclusive('\n');
        let first = lines.next().unwrap_or_default();
        let head: Header = serde_json::from_str(first)
            .ok()
            .filter(|head: &Header| head.schema == SCHEMA)
            .with_context(|| format!("{} is not the state of a lab run", path.display()))?;
        ensure_same_machine(path, &head.machine, &Machine::read())?;
        ensure_same_settings(path, &head.settings, settings)?;
        let mut whole = first.len();
        let mut parts: Vec<PartRecord> = Vec::new();
        for line in lines {
            let read: Option<PartRecord> =
                line.ends_with('\n').then(|| serde_json::from_str(line).ok()).flatten();
            // Text after a broken line was not written by this program.
            let Some(part) = read else { break };
            whole += line.len();
            parts.retain(|known| known.part != part.part);
            parts.push(part);
        }
        let all = parts.len();
        parts.retain(|part| !part.has_failed());
        file.set_len(whole as u64).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self {
            path: path.into(),
            file,
            header: head,
            failed_parts: all - parts.len(),
            seconds: parts.iter().map(|part| part.seconds).sum(),
            completed: parts.iter().map(|part| part.part.clone()).collect(),
            rows: parts.into_iter().flat_map(|part| part.rows).collect(),
        })
    }

    /// Path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The settings of the run.
    #[must_use]
    pub fn settings(&self) -> &LabSettings {
        &self.header.settings
    }

    /// The machine of the run.
    pub(crate) fn machine(&self) -> &Machine {
        &self.header.machine
    }

    /// True if a part is done.
    pub(crate) fn has(&self, part: &str) -> bool {
        self.completed.contains(part)
    }

    /// Number of failed parts that are tried again.
    #[must_use]
    pub fn failed_parts(&self) -> usize {
        self.failed_parts
    }

    /// Total duration of its parts in seconds.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.seconds
    }

    /// Number of parts that are done.
    #[must_use]
    pub fn done_parts(&self) -> usize {
        self.completed.len()
    }

    /// The rows of all finished parts, in the order in which they were finished.
    pub(crate) fn rows(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter()
    }

    /// Records a part as done, with its duration. It is in the file when this returns.
    pub(crate) fn record_part(&mut self, part: &str, seconds: f64, rows: Vec<Row>) -> Result<()> {
        let done = PartRecord { part: part.into(), seconds, rows };
        let line = serde_json::to_string(&done)?;
        self.write(&line)?;
        self.seconds += seconds;
        self.completed.insert(done.part);
        self.rows.extend(done.rows);
        Ok(())
    }

    fn write(&mut self, line: &str) -> Result<()> {
        let written =
            self.file.write_all(format!("{line}\n").as_bytes()).and_then(|()| self.file.sync_data());
        written.with_context(|| format!("cannot write {}", self.path.display()))
    }
}

/// True if two machines are the same, as far as figures of both can be in one table.
fn is_same_machine(a: &Machine, b: &Machine) -> bool {
    let mut b = b.clone();
    b.memory_bytes = a.memory_bytes;
    *a == b
}

fn ensure_same_machine(path: &Path, then: &Machine, now: &Machine) -> Result<()> {
    if is_same_machine(then, now) {
        return Ok(());
    }
    let tell = |machine: &Machine| format!("{} × {}, Linux {}", machine.cpus, machine.model, machine.kernel);
    let (then_is, now_is) = (tell(then), tell(now));
    let what =
        if then_is == now_is { "changed settings of the kernel (mitigations, rmem_max)" } else { &now_is };
    bail!(
        "{} is from another machine: it was started on {then_is}, but this is: {what}. Start a new run, because a table has the figures of one machine",
        path.display()
    )
}

fn ensure_same_settings(path: &Path, then: &LabSettings, now: &LabSettings) -> Result<()> {
    let names = |settings: &LabSettings| {
        settings.papers.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    };
    ensure!(
        then.papers == now.papers,
        "{} is a run of {}, not of {}: repeat the command that started it",
        path.display(),
        names(then),
        names(now)
    );
    let same = then.scale == now.scale && then.parts == now.parts;
    ensure!(
        same,
        "{} has other settings: it was started with {:?} and parts {:?}, but now these are {:?} and {:?}; use the same options",
        path.display(),
        then.scale,
        then.parts,
        now.scale,
        now.parts
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    use crate::{Paper, Scale};

    fn settings() -> LabSettings {
        LabSettings::new("manylane lab rivera".into(), &[Paper::Rivera], Vec::new(), Scale::quick())
    }

    /// A folder that is deleted with this value, and the path of the state in it.
    fn temp_state() -> (TempDir, PathBuf) {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("state.jsonl");
        (folder, path)
    }

    fn resume(path: &Path, settings: &LabSettings) -> Result<State> {
        State::resume(path, File::options().read(true).append(true).open(path)?, settings)
    }

    fn row(value: f64) -> Row {
        Row::new("t", "a", "1", "s", vec![value])
    }

    #[test]
    fn finished_parts_are_restored() {
        let (_folder, path) = temp_state();
        let mut state = State::create(&path, settings()).unwrap();
        state.record_part("one", 1.5, vec![row(1.0)]).unwrap();
        state.record_part("two", 1.5, vec![row(2.5), row(3.0)]).unwrap();
        drop(state);
        let mut state = resume(&path, &settings()).unwrap();
        assert!(state.has("one") && state.has("two") && !state.has("three"));
        assert_eq!((state.done_parts(), state.rows().count()), (2, 3));
        state.record_part("three", 1.5, Vec::new()).unwrap();
        drop(state);
        assert_eq!(resume(&path, &settings()).unwrap().done_parts(), 3);
    }

    #[test]
    fn truncated_state_lines_are_ignored() {
        let (_folder, path) = temp_state();
        let mut state = State::create(&path, settings()).unwrap();
        state.record_part("one", 1.5, vec![row(1.0)]).unwrap();
        state.record_part("two", 1.5, vec![row(2.0)]).unwrap();
        drop(state);
        let text = fs::read_to_string(&path).unwrap();
        for cut in 1..40 {
            fs::write(&path, &text[..text.len() - cut]).unwrap();
            let mut state = resume(&path, &settings()).unwrap();
            assert!(state.has("one") && !state.has("two"), "{cut}");
            state.record_part("two", 1.5, vec![row(2.0)]).unwrap();
            drop(state);
            assert_eq!(fs::read_to_string(&path).unwrap(), text, "{cut}");
        }
    }

    #[test]
    fn a_failed_part_is_retried_and_its_last_line_counts() {
        let (_folder, path) = temp_state();
        let mut state = State::create(&path, settings()).unwrap();
        state.record_part("one", 1.5, vec![row(1.0)]).unwrap();
        state.record_part("two", 1.5, vec![row(7.0), Row::failed("two", "no device")]).unwrap();
        drop(state);
        let mut state = resume(&path, &settings()).unwrap();
        assert!(state.has("one") && !state.has("two"));
        assert_eq!((state.done_parts(), state.failed_parts(), state.seconds()), (1, 1, 1.5));
        assert_eq!(state.rows().map(|row| row.value).collect::<Vec<_>>(), [Some(1.0)]);
        // Fails first, then succeeds.
        state.record_part("two", 1.5, vec![Row::failed("two", "no device")]).unwrap();
        drop(state);
        let mut state = resume(&path, &settings()).unwrap();
        assert_eq!((state.done_parts(), state.failed_parts()), (1, 1));
        state.record_part("two", 2.5, vec![row(2.0)]).unwrap();
        drop(state);
        let state = resume(&path, &settings()).unwrap();
        assert!(state.has("two"));
        assert_eq!((state.done_parts(), state.failed_parts(), state.seconds()), (2, 0, 4.0));
        assert_eq!(state.rows().map(|row| row.value).collect::<Vec<_>>(), [Some(1.0), Some(2.0)]);
    }

    #[test]
    fn another_machine_and_other_settings_are_refused() {
        let (_folder, path) = temp_state();
        drop(State::create(&path, settings()).unwrap());
        let other = LabSettings { papers: vec![Paper::Sarma], ..settings() };
        let why = resume(&path, &other).unwrap_err().to_string();
        assert!(why.contains("a run of rivera, not of sarma"), "{why}");
        let other = LabSettings { scale: Scale::full(), ..settings() };
        let why = resume(&path, &other).unwrap_err().to_string();
        assert!(why.contains("other settings"), "{why}");
        let text = fs::read_to_string(&path).unwrap();
        let kernel = Machine::read().kernel;
        fs::write(&path, text.replace(&kernel, "2.6.0 i686")).unwrap();
        let why = resume(&path, &settings()).unwrap_err().to_string();
        assert!(why.contains("another machine") && why.contains("2.6.0 i686"), "{why}");
        fs::write(&path, "{}\n").unwrap();
        assert!(resume(&path, &settings()).unwrap_err().to_string().contains("not the state of a lab run"));
    }

    #[test]
    fn a_new_run_keeps_the_old_file() {
        let (_folder, path) = temp_state();
        State::create(&path, settings()).unwrap().record_part("one", 1.5, Vec::new()).unwrap();
        assert_eq!(State::create(&path, settings()).unwrap().done_parts(), 0);
        assert_eq!(fs::read_to_string(path.with_extension("jsonl.old")).unwrap().lines().count(), 2);
    }
}
