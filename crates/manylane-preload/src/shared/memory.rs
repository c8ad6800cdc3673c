//! Memory of the library's own: mapped, never unmapped. Nothing here uses the program's heap, whose
//! lock the thread of a signal handler may hold.

use std::cell::UnsafeCell;
use std::mem::size_of;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::c_void;
use manylane_sys::shared::Atomics;

use crate::base::settings::LANES_MAX;
use crate::base::state;

/// All mappings are aligned to it.
const PAGE_SIZE_MIN: usize = 4096;

/// Marks types for which all zeroes, as in a fresh mapping, are a valid value, and which threads
/// may share.
///
/// # Safety
/// All zeroes are a value of the type. Each field is an atomic, an array or a struct of such, or in
/// a cell whose access the type's atomics order.
pub(crate) unsafe trait Zeroed: Sized + Sync {}

// SAFETY: all bytes are valid for atomics, and any thread may write them (contract of `Atomics`).
unsafe impl<T: Atomics> Zeroed for T {}

/// Maps `count` values, all zero; none if the system is out of memory. A `shared` mapping is one
/// memory for a process and all that it forks later.
pub(crate) fn map<T: Zeroed>(count: usize, shared: bool) -> Option<&'static [T]> {
    let kind = if shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
    let spare = align_of::<T>().saturating_sub(PAGE_SIZE_MIN);
    // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
    let at = unsafe {
        libc::mmap(
            ptr::null_mut(),
            count * size_of::<T>() + spare,
            libc::PROT_READ | libc::PROT_WRITE,
            kind | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if at == libc::MAP_FAILED {
        return None;
    }
    let at = at.wrapping_byte_add(at.align_offset(align_of::<T>()));
    // SAFETY: the mapping has room for `count` values from its first aligned address on, is zero,
    // and never unmapped; Zeroed says that zeroes are values and that threads may share them.
    Some(unsafe { std::slice::from_raw_parts(at.cast::<T>(), count) })
}

/// The part of a shared value that no other process can write: pointers, above all, because the
/// kernel follows those that a call is given. A fork copies it. It has pages of its own, on the
/// machines with the largest pages.
#[repr(C, align(65536))]
pub(crate) struct ProcessOwned<T>(UnsafeCell<T>);

impl<T> ProcessOwned<T> {
    /// Makes it this process's own; all zero. Must be called before the value is used. False if the
    /// system is out of memory: then it must never be used.
    pub(crate) fn detach(&self) -> bool {
        let at = self.get().cast::<c_void>();
        // SAFETY: the pages that are replaced have this value and nothing else, and no thread uses
        // it yet.
        let own = unsafe {
            libc::mmap(
                at,
                size_of::<Self>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        own == at
    }

    /// The value. Its access is ordered as for a cell.
    #[inline]
    pub(crate) fn get(&self) -> *mut T {
        self.0.get()
    }
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
    /// if the system is out of memory, or `init` failed.
    pub(crate) fn map<T: Zeroed + 'static>(&self, init: impl Fn(&T) -> bool) -> bool {
        let Some(all) = map::<T>(lane_count(), true).filter(|all| all.iter().all(init)) else { return false };
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
    state::settings().map_or(0, |settings| settings.lanes.min(LANES_MAX))
}
