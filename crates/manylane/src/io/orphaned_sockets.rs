//! Sockets that the kernel may hold for a moment after their lanes were closed.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use manylane_sys::sock;

use crate::port_owner;

/// Such sockets, by inode. The lanes of a socket share it, each as its last field: all else is
/// closed when the last one drops it. Drop waits until the kernel has released the sockets, or for
/// some seconds. So the port is free when the last lane is dropped.
#[derive(Debug, Default)]
pub(super) struct OrphanedSockets(Mutex<Vec<u64>>);

impl OrphanedSockets {
    /// That of the other lanes, or a new one for the first lane.
    pub(super) fn of_lanes(lanes: &Mutex<Weak<Self>>) -> Arc<Self> {
        let mut lanes = lock(lanes);
        let shared = lanes.upgrade().unwrap_or_default();
        *lanes = Arc::downgrade(&shared);
        shared
    }

    /// Adds the socket of a lane that is about to close.
    pub(super) fn add(&self, socket: BorrowedFd<'_>) {
        lock(&self.0).extend(sock::inode(socket));
    }
}

impl Drop for OrphanedSockets {
    fn drop(&mut self) {
        let sockets = lock(&self.0);
        if !sockets.is_empty() && !port_owner::wait_unbound(&sockets) {
            log::warn!("the kernel has not released the sockets of closed lanes yet");
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
