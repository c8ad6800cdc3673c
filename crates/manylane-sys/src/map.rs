//! Mappings: buffers, rings, and words shared with eBPF programs or other processes. By libc and
//! not by rustix, whose system calls Miri does not interpret.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::padded::padding;

/// The access that most mappings have.
pub(crate) const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
/// Minimum size of a mapping that requests huge pages: one of them.
const HUGE_PAGE_SIZE: usize = 2 << 20;

/// Mapped memory, page aligned, until this is dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// The whole mapping; `base` and `len` are within it.
    map: NonNull<u8>,
    map_len: usize,
}

// SAFETY: a mapping is plain memory that this value alone unmaps.
unsafe impl Send for Mapping {}
// SAFETY: shared access goes through `&self` methods that only hand out pointers.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes (at least one) of anonymous memory, zeroed and allocated when touched,
    /// with huge pages if that is worth it and the system allows. Unlike the allocator it fails
    /// with an error at a memory limit.
    ///
    /// # Errors
    /// `ENOMEM` at the address space limit (`RLIMIT_AS`), or because of the overcommit policy.
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        let len = len.max(1);
        // A huge page starts at a multiple of its size, so leave room to align.
        let mapped = if len >= HUGE_PAGE_SIZE { len + HUGE_PAGE_SIZE } else { len };
        let mut this = Self::map(-1, 0, mapped, READ_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)?;
        if len >= HUGE_PAGE_SIZE {
            let start = this.map.addr().get();
            let skip = start.next_multiple_of(HUGE_PAGE_SIZE) - start;
            // SAFETY: less than the size of a huge page, by which the mapping is longer. The
            // advice is for a part of it, and changes no contents; a failure only costs speed.
            unsafe {
                this.base = this.map.add(skip);
                libc::madvise(this.base.as_ptr().cast(), len, libc::MADV_HUGEPAGE);
            }
        }
        this.len = len;
        Ok(this)
    }

    /// Maps the first `len` bytes of a file, which others may have mapped, too.
    ///
    /// # Errors
    /// Those of `mmap(2)`.
    pub(crate) fn shared(fd: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        Self::map(fd.as_raw_fd(), 0, len, READ_WRITE, libc::MAP_SHARED)
    }

    /// The same from `offset` on, with all pages, and with this access.
    pub(crate) fn populated(
        fd: BorrowedFd<'_>,
        offset: libc::off_t,
        len: usize,
        access: libc::c_int,
    ) -> io::Result<Self> {
        Self::map(fd.as_raw_fd(), offset, len, access, libc::MAP_SHARED | libc::MAP_POPULATE)
    }

    fn map(
        fd: RawFd,
        offset: libc::off_t,
        len: usize,
        access: libc::c_int,
        flags: libc::c_int,
    ) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, access, flags, fd, offset) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        Ok(Self { base, len, map: base, map_len: len })
    }

    /// Start of the memory.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Address of `count` values of T at `offset`.
    ///
    /// # Errors
    /// `EPROTO` if they are not within the mapping, or not aligned: the other side has another
    /// layout.
    pub(crate) fn ptr_at<T>(&self, offset: usize, count: usize) -> io::Result<NonNull<T>> {
        let end = size_of::<T>().checked_mul(count).and_then(|bytes| bytes.checked_add(offset));
        if end.is_none_or(|end| end > self.len) || !offset.is_multiple_of(align_of::<T>()) {
            return Err(io::Error::from_raw_os_error(libc::EPROTO));
        }
        // SAFETY: inside the mapping, as was just checked.
        Ok(unsafe { self.base.add(offset).cast() })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: start and length are those of the mmap in `map`; this value alone unmaps it, and
        // nothing borrowed from it outlives it.
        unsafe { libc::munmap(self.map.as_ptr().cast(), self.map_len) };
    }
}

/// A slice at a fixed address whose elements the kernel reads and writes through raw pointers, on
/// cache lines of its own.
///
/// A `Box<[T]>` would assert on every move that no other pointers into it exist, but the message
/// headers are such.
#[derive(Debug)]
pub(crate) struct PinnedSlice<T> {
    base: NonNull<T>,
    len: usize,
}

// SAFETY: this value alone owns the elements, and T may cross threads.
unsafe impl<T: Send> Send for PinnedSlice<T> {}

impl<T: Copy + 'static> PinnedSlice<T> {
    pub(crate) fn new(value: T, len: usize) -> Self {
        let pad = padding::<T>();
        let padded: &'static mut [T] = Box::leak(vec![value; len + 2 * pad].into_boxed_slice());
        // SAFETY: within the slice, which has `pad` elements in front of the others.
        let base = unsafe { NonNull::from(padded).cast::<T>().add(pad) };
        Self { base, len }
    }

    /// Address of element `index`.
    pub(crate) fn ptr_at(&self, index: usize) -> *mut T {
        assert!(index < self.len);
        // SAFETY: the index was checked against the length of the allocation.
        unsafe { self.base.as_ptr().add(index) }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl<T> Drop for PinnedSlice<T> {
    fn drop(&mut self) {
        let pad = padding::<T>();
        // SAFETY: this is the box leaked in `new`, with its length, and it is dropped once. The
        // elements begin behind the padding.
        drop(unsafe {
            Box::from_raw(ptr::slice_from_raw_parts_mut(self.base.as_ptr().sub(pad), self.len + 2 * pad))
        });
    }
}

/// 64-bit words mapped into this process, which eBPF programs or other processes access, too: loads
/// and stores need no system call.
#[derive(Debug)]
pub struct SharedWords {
    memory: Mapping,
    words: usize,
}

impl SharedWords {
    /// Maps the first `words` words of the array map `fd` (made with `BPF_F_MMAPABLE`, Linux 5.5).
    ///
    /// # Errors
    /// Those of `mmap(2)`: `ENOTSUPP` or `EINVAL` for a map that is not mappable or is too short.
    pub fn new(fd: BorrowedFd<'_>, words: usize) -> io::Result<Self> {
        Mapping::shared(fd, words.max(1) * size_of::<u64>()).map(Self::from_mapping)
    }

    /// All whole words of a mapping that is writable.
    pub(crate) fn from_mapping(memory: Mapping) -> Self {
        Self { words: memory.len() / size_of::<u64>(), memory }
    }

    /// Reads word `index`.
    #[must_use]
    pub fn load(&self, index: usize) -> u64 {
        self.as_ref()[index].load(Ordering::Relaxed)
    }

    /// Writes word `index`. At most one thread may write a word.
    pub fn store(&self, index: usize, value: u64) {
        self.as_ref()[index].store(value, Ordering::Relaxed);
    }
}

impl AsRef<[AtomicU64]> for SharedWords {
    fn as_ref(&self) -> &[AtomicU64] {
        // SAFETY: `words` words are mapped, page aligned, as long as `self`, and the file cannot
        // shrink: an eBPF map has a fixed size, any other file is sealed (`shared::map_words`). In
        // this process the words are accessed as atomics only. A write of any other kind by an
        // eBPF program or another process changes values and nothing else, because all values are
        // valid.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast::<AtomicU64>(), self.words) }
    }
}
