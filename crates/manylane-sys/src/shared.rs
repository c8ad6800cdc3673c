//! A file of words that other processes write and this one reads.
//!
//! It has a name, so that processes of other users and other mount points of `/proc` find it; nobody who does not know
//! the name can find it out.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

/// The file, and its words mapped for reading. It goes when the value does; who has it mapped keeps it.
#[derive(Debug)]
pub struct SharedFile {
    path: PathBuf,
    base: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: every access is a relaxed load of a word, in memory that stays mapped as long as the value.
unsafe impl Send for SharedFile {}
// SAFETY: as above.
unsafe impl Sync for SharedFile {}

impl SharedFile {
    /// Makes a file of `bytes` zeroes (rounded up to whole words) that every user may write to, in a folder of its own
    /// below `folder` that nobody may list. Its memory is there from the start: no write can fail later (`SIGBUS`).
    ///
    /// # Errors
    /// `EACCES`, `EROFS` or `ENOSPC` where nothing can be written.
    pub fn create(folder: &Path, bytes: usize) -> io::Result<Self> {
        let words = bytes.div_ceil(size_of::<u64>()).max(1);
        let own = folder.join(format!("manylane-{}", random_name()?));
        DirBuilder::new().mode(0o711).create(&own)?;
        let path = own.join(random_name()?);
        let made = Self::fill(&path, words).and_then(|file| Self::map(&file, words));
        match made {
            Ok(base) => Ok(Self { path, base, words }),
            Err(err) => {
                // The error is the better thing to know.
                let _ = fs::remove_file(&path);
                let _ = fs::remove_dir(&own);
                Err(err)
            }
        }
    }

    fn fill(path: &Path, words: usize) -> io::Result<File> {
        let mut file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        file.write_all(&vec![0; words * size_of::<u64>()])?;
        // Past the umask.
        file.set_permissions(Permissions::from_mode(0o666))?;
        Ok(file)
    }

    fn map(file: &File, words: usize) -> io::Result<NonNull<AtomicU64>> {
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                words * size_of::<u64>(),
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(base.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
    }

    /// Where other processes find it.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The words. They may only be loaded, relaxed: the mapping is read-only.
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: so many words are mapped, page aligned, as long as `self`. The file has them, and nobody who was not
        // told its name can make it shorter. They are accessed as atomics only: whatever another process writes
        // changes values and nothing else, as all values are valid.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.words) }
    }
}

impl Drop for SharedFile {
    fn drop(&mut self) {
        // Somebody else may have tidied up.
        let _ = fs::remove_file(&self.path);
        if let Some(own) = self.path.parent() {
            let _ = fs::remove_dir(own);
        }
        // SAFETY: base and length are those of the mmap in `map`; nothing borrowed from `self` outlives it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.words * size_of::<u64>()) };
    }
}

/// 128 bits that nobody can guess.
fn random_name() -> io::Result<String> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn what_others_write_is_read_and_nothing_stays_behind() {
        let shared = SharedFile::create(&std::env::temp_dir(), 20).unwrap();
        assert_eq!(shared.words().len(), 3);
        let path = shared.path().to_owned();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&7_u64.to_ne_bytes(), 8).unwrap();
        assert_eq!(shared.words()[1].load(Ordering::Relaxed), 7);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
        drop(shared);
        assert!(!path.exists() && !path.parent().unwrap().exists());
    }

    #[test]
    fn a_folder_that_is_not_there_is_an_error() {
        let err = SharedFile::create(Path::new("/nowhere/at/all"), 8).unwrap_err();
        assert_eq!(err.kind(), io::ErrorKind::NotFound);
    }
}
