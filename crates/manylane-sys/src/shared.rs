//! Memory that processes share through an unnamed file: fixed size, zeroed, made of atomics.
//!
//! The files are sealed against shrinking, so that no access to a mapping of them can fail
//! (`SIGBUS`). A file from another process is checked for that before it is mapped.

use std::ffi::CStr;
use std::io;
use std::marker::PhantomData;
use std::ops::Deref;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use rustix::fs::{self, FallocateFlags, MemfdFlags, SealFlags};

use crate::map::{Mapping, READ_WRITE, SharedWords};

/// Types whose values may be in memory that other processes write. [`atomics!`](crate::atomics)
/// declares structs of them.
///
/// # Safety
/// The type is an atomic integer, or an array or struct of such: any bytes are valid, and other
/// processes may write them at any time.
pub unsafe trait Atomics: Sized + Sync {}

// SAFETY: an atomic integer.
unsafe impl Atomics for AtomicU8 {}
// SAFETY: an atomic integer.
unsafe impl Atomics for AtomicU16 {}
// SAFETY: an atomic integer.
unsafe impl Atomics for AtomicU32 {}
// SAFETY: an atomic integer.
unsafe impl Atomics for AtomicU64 {}
// SAFETY: an array of what the element's type promises to be.
unsafe impl<T: Atomics, const N: usize> Atomics for [T; N] {}

/// Declares structs with the layout of C that are [`Atomics`]: the compiler checks that each field
/// is.
///
/// ```
/// use std::sync::atomic::AtomicU32;
///
/// manylane_sys::atomics! {
///     /// Counts of a lane.
///     pub struct Counts {
///         pub received: AtomicU32,
///         pub lost: [AtomicU32; 3],
///     }
/// }
/// let (counts, file) = manylane_sys::shared::Shared::<Counts>::create(c"counts").unwrap();
/// # let _ = (&counts.received, file);
/// ```
///
/// ```compile_fail
/// manylane_sys::atomics! {
///     pub struct Name {
///         pub bytes: [u8; 16],
///     }
/// }
/// ```
#[macro_export]
macro_rules! atomics {
    ($(
        $(#[$attr:meta])*
        $vis:vis struct $name:ident {
            $($(#[$field_attr:meta])* $field_vis:vis $field:ident: $type:ty,)*
        }
    )*) => {$(
        $(#[$attr])*
        #[repr(C)]
        $vis struct $name {
            $($(#[$field_attr])* $field_vis $field: $type,)*
        }

        // SAFETY: a struct whose fields are Atomics, as the function below compiles only then.
        unsafe impl $crate::shared::Atomics for $name {}
        const _: () = {
            const fn check<T: $crate::shared::Atomics>() {}
            $(check::<$type>();)*
        };
    )*};
}

/// Makes an unnamed file of `bytes` zeros, which cannot shrink or grow (`memfd_create(2)`, Linux
/// 3.17).
///
/// # Errors
/// `ENOMEM`, `ENOSPC` or `EMFILE` at a limit.
pub fn sealed_memfd(name: &CStr, bytes: usize) -> io::Result<OwnedFd> {
    let fd = memfd(name, bytes)?;
    fs::fcntl_add_seals(&fd, SealFlags::SEAL)?;
    Ok(fd)
}

/// The same, but further seals are possible.
fn memfd(name: &CStr, bytes: usize) -> io::Result<OwnedFd> {
    let fd = fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    // Allocates now: without memory it fails here, and not by a signal later.
    fs::fallocate(&fd, FallocateFlags::empty(), 0, bytes as u64)?;
    fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(fd)
}

/// The size of a file that has these seals.
fn sealed_size(fd: BorrowedFd<'_>, seals: SealFlags) -> io::Result<usize> {
    let size = usize::try_from(fs::fstat(fd)?.st_size);
    if !fs::fcntl_get_seals(fd)?.contains(seals) || size == Ok(0) {
        return Err(invalid());
    }
    size.map_err(|_| invalid())
}

/// The error for a file that cannot be mapped. It has no text: the preload library maps before a
/// fork, where it must not use the heap.
fn invalid() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

/// Discards the content of a file that [`sealed_memfd()`] made, even in processes that still have
/// it mapped. The file then reads as zeros, and processes that write to it pay for the pages.
pub fn discard(fd: BorrowedFd<'_>, bytes: usize) {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    // If it fails, the memory stays allocated while it is mapped.
    _ = fs::fallocate(fd, mode, 0, bytes as u64);
}

/// Maps all of `fd`, which has to be a file of `len` bytes made by [`sealed_memfd()`] in any
/// process.
///
/// # Errors
/// `InvalidData` if it has another size, or could shrink; errors of `mmap(2)`.
pub(crate) fn map_sealed(fd: BorrowedFd<'_>, len: usize) -> io::Result<Mapping> {
    if sealed_size(fd, SealFlags::SHRINK)? != len {
        return Err(invalid());
    }
    Mapping::shared(fd, len)
}

/// One value in memory shared by processes.
#[derive(Debug)]
pub struct Shared<T> {
    bytes: Mapping,
    value: PhantomData<T>,
}

impl<T: Atomics> Shared<T> {
    /// Makes one, all zero, and the file by which others [`open`](Self::open) it.
    ///
    /// # Errors
    /// Those of [`sealed_memfd()`] and of `mmap(2)`.
    pub fn create(name: &CStr) -> io::Result<(Self, OwnedFd)> {
        let fd = sealed_memfd(name, size_of::<T>())?;
        let this = Self::open(fd.as_fd())?;
        Ok((this, fd))
    }

    /// Opens a value that another process made.
    ///
    /// # Errors
    /// `InvalidData` if the file has another size, or could shrink; errors of `mmap(2)`.
    pub fn open(fd: BorrowedFd<'_>) -> io::Result<Self> {
        const { assert!(align_of::<T>() <= 4096) };
        Ok(Self { bytes: map_sealed(fd, size_of::<T>())?, value: PhantomData })
    }

    /// Keeps it mapped for the life of the process.
    #[must_use]
    pub fn leak(self) -> &'static T {
        let value = &raw const *self;
        std::mem::forget(self);
        // SAFETY: as in `deref`; the forgotten value is never unmapped.
        unsafe { &*value }
    }
}

impl<T: Atomics> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: `size_of::<T>()` bytes are mapped as long as `self`, page aligned, from a file
        // that cannot shrink. Any bytes are a valid T, and other processes may write to them at
        // any time (contract of `Atomics`).
        unsafe { &*self.bytes.as_ptr().cast::<T>() }
    }
}

/// Makes a file of `bytes` zeros like [`sealed_memfd()`], and maps it. Other processes can only map
/// it for reading (`F_SEAL_FUTURE_WRITE`, Linux 5.1). All pages are allocated.
///
/// # Errors
/// As for [`sealed_memfd()`]; `EINVAL` before Linux 5.1.
pub fn create_read_only_for_others(name: &CStr, bytes: usize) -> io::Result<(SharedWords, OwnedFd)> {
    let fd = memfd(name, bytes)?;
    let words = map_words(fd.as_fd(), bytes)?;
    fs::fcntl_add_seals(&fd, SealFlags::FUTURE_WRITE | SealFlags::SEAL)?;
    Ok((words, fd))
}

/// Maps all of `fd`, a file that cannot shrink, of at most `bytes_max` bytes.
///
/// # Errors
/// `InvalidData` if it is another file, or not all of its pages are allocated; errors of `mmap(2)`.
pub fn map_words(fd: BorrowedFd<'_>, bytes_max: usize) -> io::Result<SharedWords> {
    map_populated(fd, bytes_max, SealFlags::SHRINK, READ_WRITE).map(SharedWords::from_mapping)
}

/// Words that another process writes, and this one cannot.
#[derive(Debug)]
pub struct ReadOnlyWords(Mapping);

impl ReadOnlyWords {
    /// Maps all of `fd`, a file of [`create_read_only_for_others()`] of at most `bytes_max` bytes.
    ///
    /// # Errors
    /// As for [`map_words()`].
    pub fn map(fd: BorrowedFd<'_>, bytes_max: usize) -> io::Result<Self> {
        let seals = SealFlags::SHRINK | SealFlags::FUTURE_WRITE;
        map_populated(fd, bytes_max, seals, libc::PROT_READ).map(Self)
    }

    /// Number of words.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> usize {
        self.0.len() / size_of::<u64>()
    }

    /// Reads word `index`, relaxed.
    #[must_use]
    pub fn load(&self, index: usize) -> u64 {
        assert!(index < self.len());
        // SAFETY: the index was checked; the mapping is page aligned and lives as long as `self`,
        // and the file cannot shrink. Of all atomic operations, a relaxed load of a word is
        // allowed on memory that is mapped read-only.
        unsafe { (*self.0.as_ptr().cast::<AtomicU64>().add(index)).load(Ordering::Relaxed) }
    }
}

/// Maps a file of whole words that has these seals, and all of its pages: the process that is the
/// first to touch a page pays for it.
fn map_populated(
    fd: BorrowedFd<'_>,
    bytes_max: usize,
    seals: SealFlags,
    access: libc::c_int,
) -> io::Result<Mapping> {
    let bytes = sealed_size(fd, seals)?;
    // In units of 512 bytes, whatever the page size. If the file is sealed against writing, none
    // can be removed later.
    let allocated = (fs::fstat(fd)?.st_blocks as u64).saturating_mul(512);
    if bytes > bytes_max || !bytes.is_multiple_of(size_of::<u64>()) || allocated < bytes as u64 {
        return Err(invalid());
    }
    Mapping::populated(fd, 0, bytes, access)
}
