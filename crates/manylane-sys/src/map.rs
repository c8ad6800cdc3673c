//! Mappings: buffers from the kernel, and arrays shared with eBPF programs.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

/// Minimum size of a mapping that requests huge pages: one of them.
const HUGE_PAGE_SIZE: usize = 2 << 20;

/// Anonymous memory from the kernel: zeroed, page aligned, allocated when touched.
///
/// Unlike the allocator it fails with an error at a memory limit.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// The whole mapping; `base` and `len` are within it.
    map: NonNull<u8>,
    map_len: usize,
}

// SAFETY: a mapping is plain memory that this value alone owns.
unsafe impl Send for Mapping {}
// SAFETY: shared access goes through `&self` methods that only hand out pointers.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes (at least one), with huge pages if that is worth it and the system allows.
    ///
    /// # Errors
    /// `ENOMEM` at the address space limit (`RLIMIT_AS`), or because of the overcommit policy.
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        let len = len.max(1);
        // A huge page starts at a multiple of its size, so leave room to align.
        let mapped = if len >= HUGE_PAGE_SIZE { len + HUGE_PAGE_SIZE } else { len };
        // SAFETY: a new private anonymous mapping at an address of the kernel's choice touches no
        // memory of ours.
        let map = unsafe {
            libc::mmap(
                ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mut base = map.cast::<u8>();
        if len >= HUGE_PAGE_SIZE {
            base = base.wrapping_add(base.align_offset(HUGE_PAGE_SIZE));
            // SAFETY: advice on a part of the mapping made above; it changes no contents. A
            // failure only costs speed.
            unsafe { libc::madvise(base.cast(), len, libc::MADV_HUGEPAGE) };
        }
        let (Some(map), Some(base)) = (NonNull::new(map.cast()), NonNull::new(base)) else {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        };
        Ok(Self { base, len, map, map_len: mapped })
    }

    /// Start of the memory.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Length in bytes.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: start and length are those of the mmap in `new`; this value owned it alone.
        unsafe { libc::munmap(self.map.as_ptr().cast(), self.map_len) };
    }
}

/// A slice at a fixed address whose elements the kernel reads and writes through raw pointers.
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
        let slice: &'static mut [T] = Box::leak(vec![value; len].into_boxed_slice());
        Self { base: NonNull::from(slice).cast(), len }
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
        let slice = ptr::slice_from_raw_parts_mut(self.base.as_ptr(), self.len);
        // SAFETY: this is the box leaked in `new`, with its length, and it is dropped once.
        drop(unsafe { Box::from_raw(slice) });
    }
}

/// The start of a file, mapped shared; others may have mapped it, too.
#[derive(Debug)]
pub(crate) struct FileMapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is plain memory, of which this value hands out only the address.
unsafe impl Send for FileMapping {}
// SAFETY: as above.
unsafe impl Sync for FileMapping {}

impl FileMapping {
    /// Maps the first `len` bytes of `fd`, at least one, for reading and writing.
    ///
    /// # Errors
    /// Those of `mmap(2)`.
    pub(crate) fn new(fd: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        Self::with(fd, len, libc::PROT_READ | libc::PROT_WRITE, 0)
    }

    /// As [`new`](Self::new), with this access, and further flags of `mmap(2)`.
    pub(crate) fn with(
        fd: BorrowedFd<'_>,
        len: usize,
        access: libc::c_int,
        flags: libc::c_int,
    ) -> io::Result<Self> {
        let flags = libc::MAP_SHARED | flags;
        // SAFETY: a new shared mapping at an address of the kernel's choice touches no memory of
        // ours.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, access, flags, fd.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        Ok(Self { base, len })
    }

    /// Start of the memory, page aligned.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mmap in `new`; nothing borrowed from `self`
        // outlives it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// 64-bit words mapped into this process, which eBPF programs or other processes access, too: loads
/// and stores need no system call.
#[derive(Debug)]
pub struct SharedWords {
    memory: FileMapping,
    words: usize,
}

impl SharedWords {
    /// Maps the first `words` words of the array map `fd` (made with `BPF_F_MMAPABLE`, Linux 5.5).
    ///
    /// # Errors
    /// Those of `mmap(2)`: `ENOTSUPP` or `EINVAL` for a map that is not mappable or is too short.
    pub fn new(fd: BorrowedFd<'_>, words: usize) -> io::Result<Self> {
        FileMapping::new(fd, words.max(1) * size_of::<u64>()).map(Self::from_mapping)
    }

    /// All whole words of a mapping that is writable.
    pub(crate) fn from_mapping(memory: FileMapping) -> Self {
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
