//! Memory that processes share through an unnamed file: fixed size, zeroed, made of atomics.

use std::ffi::CStr;
use std::io;
use std::marker::PhantomData;
use std::ops::Deref;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{self, FallocateFlags, MemfdFlags, SealFlags};

use crate::map::FileMapping;

/// Types whose values may be in memory that other processes write.
///
/// # Safety
/// Every field is an atomic integer, or an array or struct of such: any bytes are valid, and other
/// processes may write them at any time.
pub unsafe trait Atomics: Sized + Sync {}

/// Makes an unnamed file of `bytes` zeros, which cannot shrink or grow (`memfd_create(2)`, Linux
/// 3.17).
///
/// # Errors
/// `ENOMEM`, `ENOSPC` or `EMFILE` at a limit.
pub fn sealed_memfd(name: &CStr, bytes: usize) -> io::Result<OwnedFd> {
    let fd = fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    // Allocates now: without memory it fails here, and not by a signal later.
    fs::fallocate(&fd, FallocateFlags::empty(), 0, bytes as u64)?;
    fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Discards the content of a file that [`sealed_memfd()`] made, even in processes that still have
/// it mapped. The file then reads as zeros, and processes that write to it pay for the pages.
pub fn discard(fd: BorrowedFd<'_>, bytes: usize) {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    // If it fails, the memory stays allocated while it is mapped.
    _ = fs::fallocate(fd, mode, 0, bytes as u64);
}

/// Bytes of a file, mapped shared until this is dropped.
#[derive(Debug)]
pub struct SharedMapping(FileMapping);

impl SharedMapping {
    /// Maps all of `fd`, which has to be a file of `len` bytes made by [`sealed_memfd()`] in any
    /// process.
    ///
    /// # Errors
    /// `InvalidData` if it has another size, or could shrink; errors of `mmap(2)`.
    pub fn map(fd: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        let is_fixed = fs::fcntl_get_seals(fd)?.contains(SealFlags::SHRINK);
        let size = fs::fstat(fd)?.st_size;
        if !is_fixed || len == 0 || usize::try_from(size) != Ok(len) {
            // No text: the preload library maps before a fork, where it must not use the heap.
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Self(FileMapping::new(fd, len)?))
    }

    /// Start of the mapping, page aligned.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.as_ptr()
    }

    /// Length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

/// One value in memory shared by processes.
#[derive(Debug)]
pub struct Shared<T> {
    bytes: SharedMapping,
    value: PhantomData<T>,
}

impl<T: Atomics> Shared<T> {
    /// Makes one, all zero, and the file by which others [`open`](Self::open) it.
    ///
    /// # Errors
    /// Those of [`sealed_memfd()`] and [`SharedMapping::map`].
    pub fn create(name: &CStr) -> io::Result<(Self, OwnedFd)> {
        let fd = sealed_memfd(name, size_of::<T>())?;
        let this = Self::open(std::os::fd::AsFd::as_fd(&fd))?;
        Ok((this, fd))
    }

    /// Opens a value that another process made.
    ///
    /// # Errors
    /// Those of [`SharedMapping::map`].
    pub fn open(fd: BorrowedFd<'_>) -> io::Result<Self> {
        const { assert!(align_of::<T>() <= 4096) };
        Ok(Self { bytes: SharedMapping::map(fd, size_of::<T>())?, value: PhantomData })
    }

    /// Keeps it mapped for the life of the process.
    pub(crate) fn leak(self) -> &'static T {
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
