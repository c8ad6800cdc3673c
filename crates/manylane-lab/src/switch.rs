//! Switches of the kernel, such as sysctls, that have another value during a measurement.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// A switch that was changed. It gets its value back when this is dropped.
#[derive(Debug)]
pub(crate) struct SwitchGuard {
    path: PathBuf,
    value_before: String,
}

impl SwitchGuard {
    /// Sets the switch; none if it has that value already.
    ///
    /// # Errors
    /// Fails without root, and if the kernel has no such switch.
    pub(crate) fn set(path: &Path, value: &str) -> Result<Option<Self>> {
        let before = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        if before.trim() == value {
            return Ok(None);
        }
        fs::write(path, format!("{value}\n"))
            .with_context(|| format!("writing {value} to {} (needs root)", path.display()))?;
        Ok(Some(Self { path: path.into(), value_before: before }))
    }
}

impl Drop for SwitchGuard {
    fn drop(&mut self) {
        // An error cannot be reported here. The next run finds the changed value, and keeps it.
        let _ = fs::write(&self.path, &self.value_before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_gets_its_value_back() {
        let folder = tempfile::TempDir::new().unwrap();
        let path = folder.path().join("switch");
        let value = || fs::read_to_string(&path).unwrap();
        fs::write(&path, "Y\n").unwrap();
        let guard = SwitchGuard::set(&path, "N").unwrap().unwrap();
        assert_eq!(value(), "N\n");
        assert!(SwitchGuard::set(&path, "N").unwrap().is_none(), "nothing to change, nor to restore");
        assert_eq!(value(), "N\n");
        drop(guard);
        assert_eq!(value(), "Y\n");
        let err = SwitchGuard::set(&folder.path().join("none"), "N").unwrap_err();
        assert!(err.to_string().contains("none"), "{err:#}");
    }
}
