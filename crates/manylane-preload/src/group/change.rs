//! The record of a change that the holder of the lock makes: `recovery.rs` finishes it if that
//! thread dies.

use std::sync::atomic::{AtomicU32, Ordering};

use manylane_ipc::report::Reason;

use crate::shared::lock::Guard;
use crate::shared::sock::Shared;

/// The owners of lanes change.
pub(crate) const OWNERS: u32 = 1;

/// The socket falls back, for the reason whose number is added.
pub(super) const FALLBACK: u32 = 0x100;

/// The report has counted the reason.
pub(super) const REASON_COUNTED: u32 = 0x200;

/// The record of a fallback for `reason`.
pub(crate) fn fallback_change(reason: Reason) -> u32 {
    FALLBACK + reason as u32
}

/// Records that the report has counted the reason for the fallback.
pub(crate) fn mark_counted(shared: &Shared, _guard: &Guard<'_>) {
    if shared.change.load(Ordering::Relaxed) & FALLBACK != 0 {
        shared.change.fetch_or(REASON_COUNTED, Ordering::AcqRel);
    }
}

/// Records a fallback that another thread is to make. It replaces a change of owners that a dead
/// thread has left: its steps take all lanes from their owners.
pub(crate) fn record_fallback(shared: &Shared, reason: Reason, _guard: &Guard<'_>) {
    if shared.change.load(Ordering::Acquire) & FALLBACK == 0 {
        shared.change.store(fallback_change(reason), Ordering::Release);
    }
}

/// A recorded change. Dropping it removes the record: the change is complete.
pub(crate) struct Change<'a>(Option<&'a AtomicU32>);

impl Drop for Change<'_> {
    fn drop(&mut self) {
        if let Some(word) = self.0 {
            word.store(0, Ordering::Release);
        }
    }
}

/// Records the change that is about to be made. A change within another one is part of that one.
pub(crate) fn start_change<'a>(shared: &'a Shared, what: u32, _guard: &Guard<'_>) -> Change<'a> {
    let fresh = shared.change.compare_exchange(0, what, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    Change(fresh.then_some(&shared.change))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::{lock, memory};

    #[test]
    fn a_recorded_fallback_replaces_a_change_of_owners() {
        let shared = &memory::map::<Shared>(1, true).unwrap()[0];
        let guard = lock::lock(&shared.lock, true).unwrap();
        std::mem::forget(start_change(shared, OWNERS, &guard));
        record_fallback(shared, Reason::Exec, &guard);
        assert_eq!(shared.change.load(Ordering::Relaxed), fallback_change(Reason::Exec));
        // The one that is left is for the reason that was first, which may have been counted.
        mark_counted(shared, &guard);
        record_fallback(shared, Reason::Option, &guard);
        assert_eq!(shared.change.load(Ordering::Relaxed), fallback_change(Reason::Exec) | REASON_COUNTED);
    }
}
