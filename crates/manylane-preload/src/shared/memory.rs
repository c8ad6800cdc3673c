//! Memory of the library's own: mapped, never unmapped. Nothing here uses the program's heap, whose
//! lock the thread of a signal handler may hold.

use std::mem::size_of;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::c_void;

use crate::base::settings::MAX_LANES;
use crate::base::state;

/// Marks types for which all zeroes, as in a fresh mapping, are a valid value, and which threads
/// may share.
///
/// # Safety
/// All zeroes are a value of the type. Each field is an atomic, an array or a struct of such, or in
/// a cell whose access the type's atomics order.
pub(crate) unsafe trait Zeroed: Sized + Sync {}

/// Maps `count` values, all zero; none if the system is out of memory. A `shared` mapping is one
/// memory for a process and all that it forks later.
pub(crate) fn map<T: Zeroed>(count: usize, shared: bool) -> Option<&'static [T]> {
    let kind = if shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
    // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
    let at = unsafe {
        libc::mmap(
            ptr::null_mut(),
            count * size_of::<T>(),
            libc::PROT_READ | libc::PROT_WRITE,
            kind | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if at == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the mapping has room for `count` values, is page-aligned, zero, and never unmapped;
    // Zeroed says that zeroes are values and that threads may share them.
    Some(unsafe { std::slice::from_raw_parts(at.cast::<T>(), count) })
}

/// A value for each possible lane, in a mapping; none while it is null. Only one module knows the
/// type, that of a layer below.
pub(crate) struct PerLane(AtomicPtr<c_void>);

impl PerLane {
    /// # Safety
    /// `T` is the type that was [`map`](Self::map)ped.
    #[inline]
    pub(crate) unsafe fn load<T: Zeroed>(&self) -> Option<&'static [T]> {
        let at = self.0.load(Ordering::Acquire).cast::<T>();
        if at.is_null() {
            return None;
        }
        // SAFETY: the slice that `map` made, of the type that the caller knows: `lane_count` never
        // changes, and the mapping is never unmapped.
        Some(unsafe { std::slice::from_raw_parts(at, lane_count()) })
    }

    /// Maps them, for this process and all that it forks later, and sets them after `init`. False
    /// if the system is out of memory.
    pub(crate) fn map<T: Zeroed + 'static>(&self, init: impl Fn(&T)) -> bool {
        let Some(all) = map::<T>(lane_count(), true) else { return false };
        all.iter().for_each(init);
        self.0.store(all.as_ptr().cast_mut().cast(), Ordering::Release);
        true
    }

    pub(crate) fn clear(&self) {
        self.0.store(ptr::null_mut(), Ordering::Relaxed);
    }
}

/// Lanes that a socket can have.
#[inline]
fn lane_count() -> usize {
    state::settings().map_or(0, |settings| settings.lanes.min(MAX_LANES))
}
