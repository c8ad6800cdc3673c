//! Memory that processes share by passing a file without a name: of fixed size, zeroed, made of
//! atomics.

use std::ffi::CStr;
use std::io;
use std::marker::PhantomData;
use std::ops::Deref;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{self, FallocateFlags, MemfdFlags, SealFlags};

use crate::map::FileMapping;

/// Types whose values may lie in memory that other processes write.
///
/// # Safety
/// Every field is an atomic integer, or an array or struct of such: any bytes are a value, and
/// others may write it at any time.
pub unsafe trait Atomics: Sized + Sync {}

/// Makes a file of `bytes` zeroes without a name, which cannot become shorter or longer
/// (`memfd_create(2)`, Linux 3.17).
///
/// # Errors
/// `ENOMEM`, `ENOSPC` or `EMFILE` at a limit.
pub fn sealed_memfd(name: &CStr, bytes: usize) -> io::Result<OwnedFd> {
    let fd = fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    // Now, with an error, and not later with a signal, if there is no memory.
    fs::fallocate(&fd, FallocateFlags::empty(), 0, bytes as u64)?;
    fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Gives up what is in a file that [`sealed_memfd()`] made here, also for who still has it mapped:
/// from now on it is of zeroes, and takes memory of those who write to it.
pub fn discard(fd: BorrowedFd<'_>, bytes: usize) {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    // Where it cannot be, the memory stays for as long as it is mapped.
    _ = fs::fallocate(fd, mode, 0, bytes as u64);
}

/// Some bytes of a file, mapped shared until this is dropped.
#[derive(Debug)]
pub struct SharedMapping(FileMapping);

impl SharedMapping {
    /// Maps all of `fd`, which [`sealed_memfd()`] made in whatever process, and which has to have
    /// `len` bytes.
    ///
    /// # Errors
    /// `InvalidData` if it has not, or could become shorter; what `mmap(2)` reports.
    pub fn map(fd: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        let is_fixed = fs::fcntl_get_seals(fd)?.contains(SealFlags::SHRINK);
        let size = fs::fstat(fd)?.st_size;
        if !is_fixed || len == 0 || usize::try_from(size) != Ok(len) {
            // Without a text: the preload library maps before a fork, where the heap is not to be
            // touched.
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Self(FileMapping::new(fd, len)?))
    }

    /// Where they start: at a page.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.as_ptr()
    }

    /// How many there are.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

/// One value in memory that processes share.
#[derive(Debug)]
pub struct Shared<T> {
    bytes: SharedMapping,
    value: PhantomData<T>,
}

impl<T: Atomics> Shared<T> {
    /// Makes one, all zero, and the file by which others [`open`](Self::open) it.
    ///
    /// # Errors
    /// What [`sealed_memfd()`] and [`SharedMapping::map`] report.
    pub fn create(name: &CStr) -> io::Result<(Self, OwnedFd)> {
        let fd = sealed_memfd(name, size_of::<T>())?;
        let this = Self::open(std::os::fd::AsFd::as_fd(&fd))?;
        Ok((this, fd))
    }

    /// Opens what another process made.
    ///
    /// # Errors
    /// What [`SharedMapping::map`] reports.
    pub fn open(fd: BorrowedFd<'_>) -> io::Result<Self> {
        const { assert!(align_of::<T>() <= 4096) };
        Ok(Self { bytes: SharedMapping::map(fd, size_of::<T>())?, value: PhantomData })
    }

    /// Keeps it mapped for the life of the process.
    pub(crate) fn leak(self) -> &'static T {
        let value = &raw const *self;
        std::mem::forget(self);
        // SAFETY: as in `deref`, and what was forgotten is never unmapped.
        unsafe { &*value }
    }
}

impl<T: Atomics> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: as many bytes as a T has are mapped as long as `self`, aligned to a page, from a
        // file that cannot become shorter; any bytes are a T, and whoever else writes to them does
        // what atomics allow (`Atomics`).
        unsafe { &*self.bytes.as_ptr().cast::<T>() }
    }
}
