//! Limits on connections, of all lanes together. They are touched when a connection begins and
//! when it ends.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Why a connection is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// There are as many as there may be.
    Limit,
    /// Its source has as many as it may have.
    SourceLimit,
}

/// The connections that there are.
#[derive(Debug)]
pub(crate) struct Limits {
    max: AtomicU64,
    /// Zero: not limited.
    max_per_source: AtomicU32,
    open: AtomicU64,
    sources: Mutex<HashMap<IpAddr, u32>>,
}

impl Limits {
    pub(crate) fn new(max: u64, max_per_source: Option<u32>) -> Limits {
        let limits = Limits {
            max: AtomicU64::new(0),
            max_per_source: AtomicU32::new(0),
            open: AtomicU64::new(0),
            sources: Mutex::default(),
        };
        limits.set(max, max_per_source);
        limits
    }

    /// Changes the limits: for connections that come.
    pub(crate) fn set(&self, max: u64, max_per_source: Option<u32>) {
        self.max.store(max, Ordering::Relaxed);
        self.max_per_source.store(max_per_source.unwrap_or(0), Ordering::Relaxed);
    }

    /// Counts a connection, if it is within the limits.
    pub(crate) fn admit(&self, source: IpAddr) -> Result<(), Refused> {
        if self.open.fetch_add(1, Ordering::Relaxed) >= self.max.load(Ordering::Relaxed) {
            self.open.fetch_sub(1, Ordering::Relaxed);
            return Err(Refused::Limit);
        }
        let max = self.max_per_source.load(Ordering::Relaxed);
        let mut sources = self.sources();
        let count = sources.entry(source).or_default();
        if max > 0 && *count >= max {
            drop(sources);
            self.open.fetch_sub(1, Ordering::Relaxed);
            return Err(Refused::SourceLimit);
        }
        *count += 1;
        Ok(())
    }

    /// A connection that was admitted has ended.
    pub(crate) fn release(&self, source: IpAddr) {
        self.open.fetch_sub(1, Ordering::Relaxed);
        let mut sources = self.sources();
        if let Some(count) = sources.get_mut(&source) {
            *count -= 1;
            if *count == 0 {
                sources.remove(&source);
            }
        }
    }

    fn sources(&self) -> MutexGuard<'_, HashMap<IpAddr, u32>> {
        // Every critical section leaves valid counts, so a poisoned lock can be used.
        self.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    #[test]
    fn connections_in_all_and_of_a_source_are_limited() {
        let limits = Limits::new(3, Some(2));
        assert_eq!(limits.admit(source(1)), Ok(()));
        assert_eq!(limits.admit(source(1)), Ok(()));
        assert_eq!(limits.admit(source(1)), Err(Refused::SourceLimit));
        assert_eq!(limits.admit(source(2)), Ok(()));
        assert_eq!(limits.admit(source(3)), Err(Refused::Limit));
        limits.release(source(1));
        assert_eq!(limits.admit(source(3)), Ok(()));
        for last in [1, 2, 3] {
            limits.release(source(last));
        }
        limits.set(1, None);
        assert_eq!(limits.admit(source(1)), Ok(()));
        assert_eq!(limits.admit(source(1)), Err(Refused::Limit));
        limits.release(source(1));
        assert_eq!(limits.open.load(Ordering::Relaxed), 0);
        assert!(limits.sources().is_empty(), "sources without connections take no memory");
    }
}
