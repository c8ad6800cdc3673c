//! The end of a socket.

use std::sync::atomic::Ordering;

use crate::batching::outbox::Outbox;
use crate::batching::prefetch::Prefetch;
use crate::batching::send_batch;
use crate::fds::hidden_fds;
use crate::fds::sock_fds::group_fd;
use crate::group::leasing;
use crate::group::owners::remove_member_locked;
use crate::group::recovery;
use crate::shared::sock::Sock;
use crate::shared::{processes, thread};

/// The process closes the socket: frees the member slots of its threads. `has_placeholder`: an
/// epoll instance may contain the descriptor that is always readable.
pub(crate) fn close(sock: &Sock, has_placeholder: bool) {
    let guard = sock.shared().and_then(|shared| recovery::lock(sock, shared, true));
    if let (Some(shared), Some(guard)) = (sock.shared(), &guard) {
        // No other process has it: the next socket bound to the port must get every new datagram.
        // The lessor would see the end of the lease a moment too late.
        if shared.forked.load(Ordering::Relaxed) == 0 {
            leasing::close(sock, shared);
        }
        let fd = group_fd(sock);
        send_batch::flush_all(sock, shared, fd);
        let process = u64::from(processes::number());
        for (at, member) in shared.joined_members().iter().enumerate() {
            if member.thread_id.load(Ordering::Relaxed) >> 32 == process {
                remove_member_locked(shared, fd, at, guard);
            }
        }
    }
    close_lanes(sock);
    leasing::release(sock);
    drop(guard);
    let holds_fds = |sock: &Sock| sock.lane_fds().next().is_some() || sock.lease().is_some();
    if !Sock::in_use().any(holds_fds) && !has_placeholder {
        hidden_fds::close_readable_fd();
    }
    release_slot(sock);
}

/// Under the lock, so that no lane moves meanwhile because the program wants its number.
fn close_lanes(sock: &Sock) {
    let _numbers = hidden_fds::lock();
    for (lane, fd) in sock.lane_fds() {
        if sock.replace_lane_fd(lane, fd, None) {
            hidden_fds::close_locked(fd);
        }
    }
}

/// Releases the slot of a socket, and empties what the next one in it uses again.
pub(crate) fn release_slot(sock: &Sock) {
    sock.release(|shared| {
        let mine = thread::holder_token();
        let prefetches = sock.prefetches().unwrap_or_default();
        let outboxes = sock.outboxes().unwrap_or_default();
        let is_free = prefetches.iter().all(|prefetch| prefetch.reset(mine))
            && outboxes.iter().all(|outbox| outbox.reset(mine));
        shared.reset();
        if is_free {
            prefetches.iter().for_each(Prefetch::reopen);
            outboxes.iter().for_each(Outbox::reopen);
        }
        is_free
    });
}
