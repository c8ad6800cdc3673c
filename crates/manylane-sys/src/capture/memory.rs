//! The memory of a ring: two unnamed files, one for what the producer writes, one for the
//! consumer's counter.
//!
//! Both are sealed against shrinking and growing, so that no access of either process can fail
//! (`SIGBUS`). Once the first is mapped here, it is also sealed against being mapped writable
//! later (`F_SEAL_FUTURE_WRITE`, Linux 5.1). All pages are allocated before a lane touches them,
//! and charged to the process with the lanes. The other process checks that, because it would pay
//! for pages that it is the first to touch.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

use super::ring::{Consumer, Producer, ring_words};
use crate::check;

/// Size of the largest ring that is mapped.
const RING_BYTES_MAX: usize = 1 << 30;
/// Size of the consumer's part.
const COUNTER_BYTES: usize = 4096;

/// A mapped file of words, which other processes may have mapped, too.
#[derive(Debug)]
pub struct Region {
    base: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: every access is an atomic load or store of a word, in memory that stays mapped as long as
// the value.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl AsRef<[AtomicU64]> for Region {
    fn as_ref(&self) -> &[AtomicU64] {
        // SAFETY: `words` words are mapped, page aligned, as long as `self`; the file has them and
        // cannot shrink (`map_sealed` checks its seals). Here they are accessed as atomics only. A
        // write of any other kind by another process changes values and nothing else, because all
        // values are valid. Where the mapping is read-only the words are only loaded, relaxed
        // (contract of `map`).
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.words) }
    }
}

impl Region {
    /// Maps the whole of `fd`. Unless the mapping is `writable`, the words may only be loaded,
    /// relaxed.
    fn map(fd: BorrowedFd<'_>, writable: bool) -> io::Result<Self> {
        Self::map_sealed(fd, writable, RING_BYTES_MAX, libc::F_SEAL_SHRINK)
    }

    /// The same for a file that has at most this many bytes, these seals, and all of its pages.
    fn map_sealed(
        fd: BorrowedFd<'_>,
        writable: bool,
        longest: usize,
        wanted: libc::c_int,
    ) -> io::Result<Self> {
        let wrong = || io::Error::new(io::ErrorKind::InvalidData, "no memory of a ring of frames");
        // SAFETY: takes no pointer.
        let seals = check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) })?;
        if seals & wanted != wanted {
            return Err(wrong());
        }
        // SAFETY: a C struct of plain integers, for which all zeros are valid.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes `stat`, which lives across the call.
        check(unsafe { libc::fstat(fd.as_raw_fd(), &raw mut stat) })?;
        let bytes = usize::try_from(stat.st_size).map_err(|_| wrong())?;
        if bytes == 0 || bytes > longest || !bytes.is_multiple_of(size_of::<u64>()) {
            return Err(wrong());
        }
        // In units of 512 bytes, whatever the page size. If the file is sealed against writing,
        // none can be removed later.
        if (stat.st_blocks as u64).saturating_mul(512) < bytes as u64 {
            return Err(wrong());
        }
        let access = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                bytes,
                access,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                fd.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(wrong)?;
        Ok(Self { base, words: bytes / size_of::<u64>() })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mmap in `map`; nothing borrowed from `self`
        // outlives it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.words * size_of::<u64>()) };
    }
}

/// An unnamed file of zeros, which cannot shrink or grow.
fn sealed_memfd(name: &CStr, bytes: usize) -> io::Result<OwnedFd> {
    // SAFETY: the name is terminated and lives across the call.
    let raw =
        check(unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) })?;
    // SAFETY: the descriptor is new, and this value is its only owner.
    let fd = unsafe { OwnedFd::from_raw_fd(raw) };
    let len = libc::off_t::try_from(bytes).map_err(io::Error::other)?;
    // Allocates now: without memory it fails here, and not by a signal later.
    // SAFETY: takes no pointer.
    check(unsafe { libc::fallocate(fd.as_raw_fd(), 0, 0, len) })?;
    seal(fd.as_fd(), libc::F_SEAL_SHRINK | libc::F_SEAL_GROW)?;
    Ok(fd)
}

fn seal(fd: BorrowedFd<'_>, seals: libc::c_int) -> io::Result<()> {
    // SAFETY: takes no pointer.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) })?;
    Ok(())
}

/// Makes a ring with counters for `devices` and room for `bytes` of records (rounded up; at least
/// for the longest frame). Also returns the files with which another process can [`open`] it.
///
/// # Errors
/// `ENOMEM`, `ENOSPC` or `EMFILE` at a limit; `EINVAL` before Linux 5.1.
pub fn create(devices: &[u32], bytes: usize) -> io::Result<(Producer<Region>, [OwnedFd; 2])> {
    let words = ring_words(devices.len(), bytes.min(RING_BYTES_MAX / 2));
    let data = sealed_memfd(c"manylane-capture", words * size_of::<u64>())?;
    let taken = sealed_memfd(c"manylane-capture-taken", COUNTER_BYTES)?;
    let ours = Region::map(data.as_fd(), true)?;
    seal(data.as_fd(), libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SEAL)?;
    seal(taken.as_fd(), libc::F_SEAL_SEAL)?;
    // We only load from it, but acquire loads need writable memory: see the ring.
    let theirs = Region::map(taken.as_fd(), true)?;
    Ok((Producer::new(ours, theirs, devices), [data, taken]))
}

/// Opens a ring that another, untrusted process [made](create) for this number of devices and
/// bytes.
///
/// # Errors
/// `InvalidData` if it is no ring, has another version, or is larger than requested; errors of
/// `mmap(2)`.
pub fn open(files: &[OwnedFd; 2], devices: usize, bytes: usize) -> io::Result<Consumer<Region>> {
    let [data, taken] = files;
    let longest = ring_words(devices, bytes.min(RING_BYTES_MAX / 2)) * size_of::<u64>();
    let broken = |err| io::Error::new(io::ErrorKind::InvalidData, err);
    let sealed = libc::F_SEAL_SHRINK | libc::F_SEAL_FUTURE_WRITE;
    let data = Region::map_sealed(data.as_fd(), false, longest, sealed)?;
    let taken = Region::map_sealed(taken.as_fd(), true, COUNTER_BYTES, libc::F_SEAL_SHRINK)?;
    Consumer::new(data, taken).map_err(broken)
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::super::{Direction, RecordHeader};
    use super::*;

    fn head(len: usize) -> RecordHeader {
        RecordHeader { time: 7, ifindex: 3, queue: 1, direction: Direction::Out, len: len as u32 }
    }

    #[test]
    fn a_ring_is_passed_on_by_its_files() {
        let (mut producer, files) = create(&[3], 1 << 20).unwrap();
        let mut consumer = open(&files, 1, 1 << 20).unwrap();
        drop(files);
        producer.record(&head(5), b"hello");
        let mut bytes = Vec::new();
        assert_eq!(consumer.pop(&mut bytes).unwrap(), Some(head(5)));
        assert_eq!(bytes, b"hello");
        // The remaining frames can be read after the producer is gone.
        producer.record(&head(4), b"last");
        assert!(!consumer.is_finished().unwrap());
        drop(producer);
        assert!(!consumer.is_finished().unwrap());
        assert_eq!(consumer.pop(&mut bytes).unwrap(), Some(head(4)));
        assert!(consumer.is_finished().unwrap());
    }

    #[test]
    fn who_opens_a_ring_can_neither_write_to_it_nor_change_its_size() {
        let (_producer, [data, taken]) = create(&[3], 0).unwrap();
        assert!(Region::map(data.as_fd(), true).is_err(), "mapped for writing");
        let [data, taken] = [data, taken].map(File::from);
        assert!(data.write_at(b"x", 0).is_err());
        for file in [&data, &taken] {
            assert!(file.set_len(0).is_err() && file.set_len(1 << 24).is_err());
        }
        // SAFETY: takes no pointer.
        let holed = unsafe {
            libc::fallocate(data.as_raw_fd(), libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, 0, 4096)
        };
        assert_eq!(holed, -1, "a hole was made");
    }

    #[test]
    fn a_ring_that_is_not_what_was_asked_for_is_not_mapped() {
        let refused = |files: &[OwnedFd; 2], devices, bytes| {
            open(files, devices, bytes).err().map(|err| err.kind()) == Some(io::ErrorKind::InvalidData)
        };
        let (_producer, files) = create(&[3, 4], 1 << 20).unwrap();
        assert!(!refused(&files, 2, 1 << 20));
        assert!(refused(&files, 2, 1 << 19), "it is longer");
        // Its reader would allocate the pages.
        // SAFETY: the name is terminated and lives across the call.
        let raw =
            unsafe { libc::memfd_create(c"sparse".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        // SAFETY: the descriptor is new, and this value is its only owner.
        let sparse = unsafe { OwnedFd::from_raw_fd(raw) };
        let [data, taken] = files.map(File::from);
        let len = data.metadata().unwrap().len();
        let mut head = [0; 4096];
        data.read_exact_at(&mut head, 0).unwrap();
        let copy = File::from(sparse);
        copy.set_len(len).unwrap();
        copy.write_all_at(&head, 0).unwrap();
        seal(copy.as_fd(), libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_FUTURE_WRITE).unwrap();
        assert!(refused(&[copy.into(), taken.into()], 2, 1 << 20));
    }

    #[test]
    fn what_is_no_ring_is_refused() {
        let zeroes = || sealed_memfd(c"zeroes", 4096).unwrap();
        assert_eq!(open(&[zeroes(), zeroes()], 1, 0).unwrap_err().kind(), io::ErrorKind::InvalidData);
        // Its maker could shrink it while it is mapped.
        // SAFETY: the name is terminated and lives across the call.
        let raw =
            unsafe { libc::memfd_create(c"open".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        // SAFETY: the descriptor is new, and this value is its only owner.
        let loose = unsafe { OwnedFd::from_raw_fd(raw) };
        File::from(loose.try_clone().unwrap()).set_len(4096).unwrap();
        assert_eq!(open(&[loose, zeroes()], 1, 0).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let plain = File::open("/proc/self/exe").unwrap().into();
        assert!(open(&[plain, zeroes()], 1, 0).is_err());
    }
}
