//! The memory of a ring: two unnamed files, one for what the producer writes, one for the
//! consumer's counter.
//!
//! Both are sealed against shrinking and growing, so that no access of either process can fail
//! (`SIGBUS`). Once the first is mapped here, it is also sealed against being mapped writable
//! later (`F_SEAL_FUTURE_WRITE`, Linux 5.1). All pages are allocated before a lane touches them,
//! and charged to the process with the lanes. The other process checks that, because it would pay
//! for pages that it is the first to touch.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use manylane_sys::map::SharedWords;
use manylane_sys::shared::{self, ReadOnlyWords};

use super::ring::{self, Words, ring_words};

/// Size of the largest ring that is mapped.
const RING_BYTES_MAX: usize = 1 << 30;
/// Size of the consumer's part.
const COUNTER_BYTES: usize = 4096;

/// The producer of a ring in shared memory.
pub type Producer = ring::Producer<SharedWords>;
/// The consumer of a ring in shared memory.
pub type Consumer = ring::Consumer<ReadOnlyWords, SharedWords>;

impl Words for ReadOnlyWords {
    fn len(&self) -> usize {
        self.len()
    }

    fn load(&self, index: usize) -> u64 {
        self.load(index)
    }
}

/// Makes a ring with counters for `devices` and room for `bytes` of records (rounded up; at least
/// for the longest frame). Also returns the files with which another process can [`open`] it.
///
/// # Errors
/// `ENOMEM`, `ENOSPC` or `EMFILE` at a limit; `EINVAL` before Linux 5.1.
pub fn create(devices: &[u32], bytes: usize) -> io::Result<(Producer, [OwnedFd; 2])> {
    let bytes = ring_bytes(devices.len(), bytes);
    let (ours, data) = shared::create_read_only_for_others(c"manylane-capture", bytes)?;
    let consumed = shared::sealed_memfd(c"manylane-capture-consumed", COUNTER_BYTES)?;
    // We only load from it, but acquire loads need writable memory: see the ring.
    let theirs = shared::map_words(consumed.as_fd(), COUNTER_BYTES)?;
    Ok((Producer::new(ours, theirs, devices), [data, consumed]))
}

/// Opens a ring that another, untrusted process [made](create) for this number of devices and
/// bytes.
///
/// # Errors
/// `InvalidData` if it is no ring, has another version, or is larger than requested; errors of
/// `mmap(2)`.
pub fn open(files: &[OwnedFd; 2], devices: usize, bytes: usize) -> io::Result<Consumer> {
    let [data, consumed] = files;
    let data = ReadOnlyWords::map(data.as_fd(), ring_bytes(devices, bytes))?;
    let consumed = shared::map_words(consumed.as_fd(), COUNTER_BYTES)?;
    Consumer::new(data, consumed).map_err(|err| io::Error::new(io::ErrorKind::InvalidData, err))
}

/// Size of the producer's part.
fn ring_bytes(devices: usize, bytes: usize) -> usize {
    ring_words(devices, bytes.min(RING_BYTES_MAX / 2)) * size_of::<u64>()
}

#[cfg(all(test, not(miri)))]
#[allow(clippy::unwrap_used, reason = "helpers of tests")]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use rustix::fs::{self, FallocateFlags, MemfdFlags, SealFlags};

    use super::super::{Direction, RecordHeader};
    use super::*;

    /// A file without seals.
    fn memfd() -> OwnedFd {
        fs::memfd_create(c"loose", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap()
    }

    fn head(len: usize) -> RecordHeader {
        RecordHeader { time: 7, ifindex: 3, queue: 1, direction: Direction::Out, len: len as u32 }
    }

    #[test]
    fn a_ring_is_shared_by_its_descriptors() {
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
    fn a_ring_is_read_only_and_sealed_for_its_reader() {
        let (_producer, [data, consumed]) = create(&[3], 0).unwrap();
        assert!(shared::map_words(data.as_fd(), 1 << 30).is_err(), "mapped for writing");
        let [data, consumed] = [data, consumed].map(File::from);
        assert!(data.write_at(b"x", 0).is_err());
        for file in [&data, &consumed] {
            assert!(file.set_len(0).is_err() && file.set_len(1 << 24).is_err());
        }
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert!(fs::fallocate(&data, mode, 0, 4096).is_err(), "a hole was made");
    }

    #[test]
    fn a_mismatched_ring_is_not_mapped() {
        let refused = |files: &[OwnedFd; 2], devices, bytes| {
            open(files, devices, bytes).err().map(|err| err.kind()) == Some(io::ErrorKind::InvalidData)
        };
        let (_producer, files) = create(&[3, 4], 1 << 20).unwrap();
        assert!(!refused(&files, 2, 1 << 20));
        assert!(refused(&files, 2, 1 << 19), "it is longer");
        // Its reader would allocate the pages.
        let [data, consumed] = files.map(File::from);
        let len = data.metadata().unwrap().len();
        let mut head = [0; 4096];
        data.read_exact_at(&mut head, 0).unwrap();
        let copy = File::from(memfd());
        copy.set_len(len).unwrap();
        copy.write_all_at(&head, 0).unwrap();
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE;
        fs::fcntl_add_seals(&copy, seals).unwrap();
        assert!(refused(&[copy.into(), consumed.into()], 2, 1 << 20));
    }

    #[test]
    fn files_other_than_rings_are_refused() {
        let zeroes = || shared::sealed_memfd(c"zeroes", 4096).unwrap();
        assert_eq!(open(&[zeroes(), zeroes()], 1, 0).unwrap_err().kind(), io::ErrorKind::InvalidData);
        // Its maker could shrink it while it is mapped.
        let loose = memfd();
        File::from(loose.try_clone().unwrap()).set_len(4096).unwrap();
        assert_eq!(open(&[loose, zeroes()], 1, 0).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let plain = File::open("/proc/self/exe").unwrap().into();
        assert!(open(&[plain, zeroes()], 1, 0).is_err());
    }
}
