//! Room for the entries of a ppoll(2) call. A few are on the stack, which may be small
//! (`PTHREAD_STACK_MIN`, a handler's own). For more a thread has mappings, which it keeps until it
//! ends. A handler that waits while its thread does takes another one. Without memory for that,
//! the wait is not a wait for lanes.

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use libc::pollfd;
use manylane_ipc::lease::QUEUES_MAX;

/// Max entries of the program for a wait in slices.
pub(crate) const POLLFDS_MAX: usize = 1024;
/// Max entries that are on the stack.
pub(crate) const STACK_POLLFDS_MAX: usize = 64;
/// Mappings that a thread keeps: a select(2) takes two, and so does one in a signal handler.
const CACHED_MAPPINGS_MAX: usize = 4;
/// Entries of a mapping; those of queues follow the program's.
const MAPPING_POLLFDS: usize = POLLFDS_MAX + QUEUES_MAX;

/// An entry that ppoll(2) ignores.
pub(crate) const EMPTY_POLLFD: pollfd = pollfd { fd: -1, events: 0, revents: 0 };

struct CachedMapping {
    in_use: AtomicBool,
    ptr: AtomicPtr<pollfd>,
}

thread_local! {
    // Constant and without a destructor: needs neither the heap nor a registration.
    static CACHE: [CachedMapping; CACHED_MAPPINGS_MAX] = const {
        [const { CachedMapping { in_use: AtomicBool::new(false), ptr: AtomicPtr::new(ptr::null_mut()) } }; CACHED_MAPPINGS_MAX]
    };
}

/// Calls `with` with room for `count` entries of the program and those of all queues. None if
/// `count` is over [`POLLFDS_MAX`], or there is no memory.
#[inline]
pub(crate) fn with_pollfds<R>(count: usize, with: impl FnOnce(&mut [pollfd]) -> R) -> Option<R> {
    if count <= STACK_POLLFDS_MAX { Some(with_stack(with)) } else { with_mapping(count, with) }
}

/// A function of its own, so that the stack is used only while it runs.
#[inline(never)]
fn with_stack<R>(with: impl FnOnce(&mut [pollfd]) -> R) -> R {
    with(&mut [EMPTY_POLLFD; STACK_POLLFDS_MAX + QUEUES_MAX])
}

#[inline(never)]
fn with_mapping<R>(count: usize, with: impl FnOnce(&mut [pollfd]) -> R) -> Option<R> {
    if count > POLLFDS_MAX {
        return None;
    }
    let kept = CACHE.with(|mine| mine.iter().position(|kept| !kept.in_use.swap(true, Ordering::Relaxed)));
    let before = kept.map_or(ptr::null_mut(), |nth| CACHE.with(|mine| mine[nth].ptr.load(Ordering::Relaxed)));
    let at = if before.is_null() { map() } else { before };
    if let Some(nth) = kept {
        CACHE.with(|mine| mine[nth].ptr.store(at, Ordering::Relaxed));
    }
    // `Drop` does not give it back: a thread that is cancelled unwinds past it, and frees all when
    // it ends.
    let answer = (!at.is_null()).then(|| {
        // SAFETY: the mapping holds `MAPPING_POLLFDS` entries of plain integers, and this thread
        // is its only user: it is marked `in_use`, or new.
        with(unsafe { std::slice::from_raw_parts_mut(at, MAPPING_POLLFDS) })
    });
    match kept {
        Some(nth) => CACHE.with(|mine| mine[nth].in_use.store(false, Ordering::Relaxed)),
        // SAFETY: from `map`; `with` has returned, and no other thread has it.
        None => unsafe { unmap(at) },
    }
    answer
}

/// Frees the mappings of the calling thread, which ends.
pub(crate) fn free_cached() {
    // SAFETY: from `map`; the thread waits no more, and has taken them out of the cache.
    let free = |kept: &CachedMapping| unsafe { unmap(kept.ptr.swap(ptr::null_mut(), Ordering::Relaxed)) };
    CACHE.with(|mine| mine.iter().for_each(free));
}

/// Maps room for entries; null if there is no memory.
fn map() -> *mut pollfd {
    let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
    let at =
        unsafe { libc::mmap(ptr::null_mut(), MAPPING_POLLFDS * size_of::<pollfd>(), rights, kind, -1, 0) };
    if at == libc::MAP_FAILED { ptr::null_mut() } else { at.cast() }
}

/// # Safety
/// `at` must be null, or be from [`map`] and no longer used.
unsafe fn unmap(at: *mut pollfd) {
    if !at.is_null() {
        // SAFETY: a mapping of that size, as the caller promises.
        unsafe { libc::munmap(at.cast(), MAPPING_POLLFDS * size_of::<pollfd>()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_waits_have_their_own_buffers() {
        fn nested(depth: usize, seen: &mut Vec<usize>) {
            let answer = with_pollfds(STACK_POLLFDS_MAX + 1, |room| {
                assert_eq!(room.len(), MAPPING_POLLFDS);
                seen.push(room.as_ptr() as usize);
                if depth > 1 {
                    nested(depth - 1, seen);
                }
            });
            assert_eq!(answer, Some(()));
        }
        let (mut first, mut again) = (Vec::new(), Vec::new());
        nested(CACHED_MAPPINGS_MAX + 2, &mut first);
        nested(CACHED_MAPPINGS_MAX, &mut again);
        assert_eq!(again, first[..CACHED_MAPPINGS_MAX], "those that are kept");
        first.sort_unstable();
        first.dedup();
        assert_eq!(first.len(), CACHED_MAPPINGS_MAX + 2);
        free_cached();
    }

    #[test]
    fn the_table_has_a_fixed_capacity() {
        assert_eq!(with_pollfds(STACK_POLLFDS_MAX, |room| room.len()), Some(STACK_POLLFDS_MAX + QUEUES_MAX));
        assert_eq!(with_pollfds(POLLFDS_MAX, |room| room.len()), Some(MAPPING_POLLFDS));
        assert_eq!(with_pollfds(POLLFDS_MAX + 1, |_| ()), None);
        free_cached();
    }
}
