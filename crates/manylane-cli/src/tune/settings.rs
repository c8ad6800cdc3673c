//! The machine whose settings are changed; in tests, one that crashes on request.

use std::fs;
use std::os::unix::fs::MetadataExt;

use anyhow::Result;
use manylane_sys::netns;

use crate::doctor::change::Target;

/// Settings that can be read and set.
pub(super) trait Settings {
    fn read(&self, target: &Target) -> Result<String>;
    fn write(&self, target: &Target, value: &str) -> Result<()>;
    /// Index of a device, if there is one of this name.
    fn device_index(&self, name: &str) -> Option<u32>;
    /// An id that changes at each boot.
    fn boot_id(&self) -> String;
    /// Inode of the network namespace.
    fn namespace(&self) -> Option<u64>;
}

/// This machine.
#[derive(Debug)]
pub(super) struct LocalMachine;

impl Settings for LocalMachine {
    fn read(&self, target: &Target) -> Result<String> {
        target.read()
    }

    fn write(&self, target: &Target, value: &str) -> Result<()> {
        target.write(value)
    }

    fn device_index(&self, name: &str) -> Option<u32> {
        netns::device_index(name).ok()
    }

    fn boot_id(&self) -> String {
        let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        id.trim().to_owned()
    }

    fn namespace(&self) -> Option<u64> {
        Some(fs::metadata("/proc/self/ns/net").ok()?.ino())
    }
}
