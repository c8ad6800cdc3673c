//! Memory of the library's own: mapped, never unmapped. Nothing here uses the program's heap, whose
//! lock the thread of a signal handler may hold.

use std::mem::size_of;
use std::ptr;

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
