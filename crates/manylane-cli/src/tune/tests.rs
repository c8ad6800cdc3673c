//! Changes on a machine that crashes on request, with a journal on the disk.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use super::apply::{Outcome, apply, undo};
use super::journal::Journal;
use super::settings::Settings;
use crate::doctor::change::{Change, Target};

/// The point at which the machine crashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Crash {
    Never,
    BeforeWriting,
    AfterWriting,
}

/// Settings in memory.
struct Fake {
    values: RefCell<BTreeMap<Target, String>>,
    crash: Crash,
    refuses: bool,
    ignores: bool,
    boot: &'static str,
    namespace: u64,
    device: Option<u32>,
}

impl Settings for Fake {
    fn read(&self, target: &Target) -> Result<String> {
        self.values.borrow().get(target).cloned().context("no such setting")
    }

    fn write(&self, target: &Target, value: &str) -> Result<()> {
        assert!(self.crash != Crash::BeforeWriting, "down");
        if self.refuses {
            bail!("EINVAL");
        }
        if !self.ignores {
            self.values.borrow_mut().insert(target.clone(), value.into());
        }
        assert!(self.crash != Crash::AfterWriting, "down");
        Ok(())
    }

    fn device_index(&self, _: &str) -> Option<u32> {
        self.device
    }

    fn boot_id(&self) -> String {
        self.boot.into()
    }

    fn namespace(&self) -> Option<u64> {
        Some(self.namespace)
    }
}

fn sysctl() -> Target {
    Target::Sysctl { name: "net.core.rmem_max".into() }
}

fn ring() -> Target {
    Target::ReceiveRing { device: "eth0".into() }
}

fn fake() -> Fake {
    let values = BTreeMap::from([(sysctl(), "100".to_owned()), (ring(), "256".to_owned())]);
    Fake {
        values: RefCell::new(values),
        crash: Crash::Never,
        refuses: false,
        ignores: false,
        boot: "first",
        namespace: 1,
        device: Some(7),
    }
}

impl Fake {
    fn value(&self, target: &Target) -> String {
        self.read(target).unwrap()
    }

    fn set(&self, target: &Target, value: &str) {
        self.values.borrow_mut().insert(target.clone(), value.into());
    }
}

/// A journal in a folder of this test, opened again for each use, as by a new process.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn open(&self) -> Journal {
        Journal::open(&self.0.path().join("deep").join("tune.json")).unwrap()
    }

    fn apply(&self, fake: &Fake, target: &Target, value: &str) -> Result<Outcome> {
        apply(fake, &mut self.open(), "a-finding", &Change::new(target.clone(), value))
    }

    /// Reverts all changes, the last one first.
    fn undo(&self, fake: &Fake) -> Vec<Outcome> {
        let mut journal = self.open();
        (0..journal.entries.len()).rev().map(|at| undo(fake, &mut journal, at).unwrap().0).collect()
    }
}

#[test]
fn untrusted_journals_are_rejected() {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    let place = Place::new();
    let (folder, deep) = (place.0.path().to_owned(), place.0.path().join("deep"));
    let path = deep.join("tune.json");
    let open = || Journal::open(&path).map(drop).map_err(|err| format!("{err:#}"));
    let refused = |why: &str| {
        let said = open().unwrap_err();
        assert!(said.contains(why), "{said}");
    };
    open().unwrap();
    // Links that other users created before.
    let target = folder.join("target");
    for ending in ["tune.json.lock", "tune.json"] {
        let link = deep.join(ending);
        _ = fs::remove_file(&link);
        symlink(&target, &link).unwrap();
        refused("symbolic links");
        fs::remove_file(&link).unwrap();
    }
    symlink(&target, deep.join("tune.json.new")).unwrap();
    Journal::open(&path).unwrap().save().unwrap();
    assert!(!target.exists(), "it was written through a link");
    // Folders and files that others may write to.
    let modes =
        [(&deep, 0o775, 0o755), (&deep, 0o1777, 0o755), (&folder, 0o757, 0o755), (&path, 0o666, 0o644)];
    for (what, wrong, right) in modes {
        fs::set_permissions(what, Permissions::from_mode(wrong)).unwrap();
        refused(&format!("other users may write to {}: name another file with --state", what.display()));
        assert!(what != &path || Journal::open_read_only(&path).is_err());
        fs::set_permissions(what, Permissions::from_mode(right)).unwrap();
    }
    open().unwrap();
    // Links to the folder: one that others may replace, and one that they may not.
    let shared = folder.join("shared");
    fs::create_dir(&shared).unwrap();
    symlink("../deep/..", shared.join("link")).unwrap();
    fs::set_permissions(&shared, Permissions::from_mode(0o777)).unwrap();
    let said = Journal::open(&shared.join("link/new/tune.json")).unwrap_err();
    assert!(format!("{said:#}").contains("other users may write to"), "{said:#}");
    assert!(!folder.join("new").exists());
    symlink("deep/..", folder.join("link")).unwrap();
    Journal::open(&folder.join("link/new/tune.json")).unwrap();
    assert!(folder.join("new/tune.json.lock").exists());
    // Only root can change the owner.
    if chown(&path, Some(65533), None).is_ok() {
        refused("belongs to user 65533, who could change it: name another file with --state");
    }
}

#[test]
fn changes_are_reverted_once() {
    let (place, fake) = (Place::new(), fake());
    assert_eq!(place.apply(&fake, &sysctl(), "200").unwrap(), Outcome::Done);
    assert_eq!(place.apply(&fake, &ring(), "512").unwrap(), Outcome::Done);
    // Applying it again does nothing. Another value keeps the first previous value.
    assert_eq!(place.apply(&fake, &sysctl(), "200").unwrap(), Outcome::Already);
    assert_eq!(place.apply(&fake, &sysctl(), "300").unwrap(), Outcome::Done);
    assert_eq!(place.open().entries.len(), 2);
    assert_eq!(place.undo(&fake), [Outcome::Done, Outcome::Done]);
    assert_eq!((fake.value(&sysctl()), fake.value(&ring())), ("100".into(), "256".into()));
    assert!(place.undo(&fake).is_empty());
}

#[test]
fn a_latency_limit_is_restored_for_each_cpu() {
    // No limit, and a limit: the value that is read is the value to write.
    let place = Place::new();
    let target = |cpu| Target::CpuFile { cpu, file: "power/pm_qos_resume_latency_us".into() };
    let fake = fake();
    fake.set(&target(0), "0");
    fake.set(&target(1), "55");
    assert_eq!(place.apply(&fake, &target(0), "n/a").unwrap(), Outcome::Done);
    assert_eq!(place.apply(&fake, &target(1), "n/a").unwrap(), Outcome::Done);
    assert_eq!(place.apply(&fake, &target(1), "n/a").unwrap(), Outcome::Already);
    assert_eq!(place.undo(&fake), [Outcome::Done, Outcome::Done]);
    assert_eq!((fake.value(&target(0)), fake.value(&target(1))), ("0".into(), "55".into()));
    // No limit is not the same as no latency at all.
    place.apply(&fake, &target(0), "10").unwrap();
    fake.set(&target(0), "n/a");
    assert_eq!(place.undo(&fake), [Outcome::Foreign]);
    assert_eq!(fake.value(&target(0)), "n/a");
}

#[test]
fn unchanged_settings_are_not_reverted() {
    let (place, fake) = (Place::new(), fake());
    assert_eq!(place.apply(&fake, &sysctl(), "100").unwrap(), Outcome::Already);
    assert!(place.open().entries.is_empty());
}

#[test]
fn a_crash_at_any_point_can_be_reverted() {
    for crash in [Crash::BeforeWriting, Crash::AfterWriting] {
        for first in [false, true] {
            let place = Place::new();
            let mut fake = fake();
            // Also where an earlier change is in force.
            if first {
                place.apply(&fake, &sysctl(), "150").unwrap();
            }
            fake.crash = crash;
            catch_unwind(AssertUnwindSafe(|| place.apply(&fake, &sysctl(), "200"))).unwrap_err();
            fake.crash = Crash::Never;
            let is_set = crash == Crash::AfterWriting;
            assert_eq!(
                fake.value(&sysctl()),
                if is_set {
                    "200"
                } else if first {
                    "150"
                } else {
                    "100"
                }
            );
            let expected = if is_set || first { Outcome::Done } else { Outcome::Already };
            assert_eq!(place.undo(&fake), [expected], "{crash:?} {first}");
            assert_eq!(fake.value(&sysctl()), "100");
            assert!(place.undo(&fake).is_empty());
        }
    }
}

#[test]
fn a_crash_during_revert_can_be_reverted() {
    for crash in [Crash::BeforeWriting, Crash::AfterWriting] {
        let place = Place::new();
        let mut fake = fake();
        place.apply(&fake, &sysctl(), "200").unwrap();
        fake.crash = crash;
        catch_unwind(AssertUnwindSafe(|| place.undo(&fake))).unwrap_err();
        fake.crash = Crash::Never;
        let expected = if crash == Crash::AfterWriting { Outcome::Already } else { Outcome::Done };
        assert_eq!(place.undo(&fake), [expected]);
        assert_eq!(fake.value(&sysctl()), "100");
    }
}

#[test]
fn a_change_is_completed_after_a_crash() {
    let place = Place::new();
    let mut fake = fake();
    fake.crash = Crash::AfterWriting;
    catch_unwind(AssertUnwindSafe(|| place.apply(&fake, &sysctl(), "200"))).unwrap_err();
    fake.crash = Crash::Never;
    assert_eq!(place.apply(&fake, &sysctl(), "200").unwrap(), Outcome::Already);
    let journal = place.open();
    assert_eq!((journal.entries[0].after.as_deref(), &journal.entries[0].intent), (Some("200"), &None));
    drop(journal);
    assert_eq!(place.undo(&fake), [Outcome::Done]);
    assert_eq!(fake.value(&sysctl()), "100");
}

#[test]
fn settings_changed_by_others_are_kept() {
    let (place, fake) = (Place::new(), fake());
    place.apply(&fake, &sysctl(), "200").unwrap();
    fake.set(&sysctl(), "777");
    assert_eq!(place.undo(&fake), [Outcome::Foreign]);
    assert_eq!(fake.value(&sysctl()), "777");
    assert!(place.undo(&fake).is_empty());
    // If it is changed again after that, the value that others set is restored.
    place.apply(&fake, &sysctl(), "200").unwrap();
    fake.set(&sysctl(), "888");
    place.apply(&fake, &sysctl(), "200").unwrap();
    assert_eq!(place.undo(&fake), [Outcome::Done]);
    assert_eq!(fake.value(&sysctl()), "888");
}

#[test]
fn undo_handles_a_reboot() {
    let place = Place::new();
    let mut fake = fake();
    place.apply(&fake, &sysctl(), "200").unwrap();
    place.apply(&fake, &ring(), "512").unwrap();
    // One has its previous value, the other was set again by others; namespaces and devices have
    // other numbers.
    (fake.boot, fake.namespace, fake.device) = ("second", 2, Some(9));
    fake.set(&sysctl(), "100");
    assert_eq!(place.undo(&fake), [Outcome::Done, Outcome::Already]);
    assert_eq!((fake.value(&sysctl()), fake.value(&ring())), ("100".into(), "256".into()));
}

#[test]
fn devices_and_namespaces_are_distinguished() {
    let place = Place::new();
    let mut fake = fake();
    place.apply(&fake, &ring(), "512").unwrap();
    fake.namespace = 2;
    assert_eq!(place.undo(&fake), [Outcome::Elsewhere]);
    // The same setting in another namespace is a different one.
    place.apply(&fake, &ring(), "1024").unwrap();
    assert_eq!(place.open().entries.len(), 2);
    fake.namespace = 1;
    fake.device = Some(8);
    assert_eq!(place.undo(&fake), [Outcome::Elsewhere, Outcome::Gone]);
    assert_eq!(fake.value(&ring()), "1024");
}

#[test]
fn a_failed_change_is_reverted() {
    let place = Place::new();
    let mut fake = fake();
    fake.refuses = true;
    assert!(place.apply(&fake, &sysctl(), "200").unwrap_err().to_string().contains("EINVAL"));
    (fake.refuses, fake.ignores) = (false, true);
    assert!(place.apply(&fake, &sysctl(), "200").unwrap_err().to_string().contains("is still"));
    assert!(place.open().entries.is_empty());
}

#[test]
fn only_one_tune_runs_and_foreign_files_stay() {
    let place = Place::new();
    let first = place.open();
    let path = place.0.path().join("deep").join("tune.json");
    assert!(Journal::open(&path).unwrap_err().to_string().contains("another manylane tune"));
    assert!(Journal::open_read_only(&path).unwrap().entries.is_empty());
    drop(first);
    for text in ["{", "{\"schema\":\"manylane.tune-journal.v9\",\"entries\":[]}"] {
        std::fs::write(&path, text).unwrap();
        assert!(Journal::open(&path).is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    }
}
