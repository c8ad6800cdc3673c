//! The threads that receive on a socket: how each joins, and leaves when it ends.

use std::sync::atomic::{AtomicU32, Ordering};

use libc::{c_int, c_void};
use manylane_ipc::report::Reason;

use crate::base::signals::SignalMask;
use crate::base::{pollfds, quiesce};
use crate::batching::send_batch;
use crate::fds::{lane_socket, sock_fds};
use crate::group::recovery;
use crate::lanes::entries;
use crate::lanes::fallback;
use crate::shared::sock::{BUSY, Member, OBSERVING, SINGLE, Shared, Sock};
use crate::shared::thread::{self, id, liveness};
use crate::shared::{failpoint, report};
use crate::xdp::queues;

/// The thread-specific key whose destructor runs when a thread ends, plus 1; 0 before it exists.
static KEY: AtomicU32 = AtomicU32::new(0);

/// Runs once, at start.
pub(crate) fn start() {
    let mut key = 0;
    // SAFETY: `key` is written before it is read; the destructor is our function and accepts any
    // argument.
    if unsafe { libc::pthread_key_create(&raw mut key, Some(on_thread_exit)) } == 0 {
        KEY.store(key + 1, Ordering::Relaxed);
    }
}

/// The calling thread's member in `sock`; it joins if it has none. None if all slots are taken
/// (then the socket falls back), or if `fd` is not the socket's any more.
#[inline]
pub(crate) fn member<'a>(sock: &'static Sock, shared: &'a Shared, fd: c_int) -> Option<&'a Member> {
    thread::member(sock, shared).or_else(|| join(sock, shared, fd))
}

#[cold]
fn join<'a>(sock: &'static Sock, shared: &'a Shared, fd: c_int) -> Option<&'a Member> {
    let thread_id = id();
    // Checked before the thread joins: the number may have come to mean something else.
    if !entries::revalidate(sock, fd) {
        return None;
    }
    let place = shared.members.iter().position(|member| {
        member.thread_id.compare_exchange(0, thread_id, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    });
    let Some(at) = place else {
        fallback::fall_back(sock, fd, Reason::Full);
        return None;
    };
    let member = &shared.members[at];
    member.state.store(BUSY, Ordering::Relaxed);
    member.receives.store(0, Ordering::Relaxed);
    member.kind.store(0, Ordering::Relaxed);
    member.found_in_other_lanes.store(0, Ordering::Relaxed);
    member.is_sampled.store(0, Ordering::Relaxed);
    member.polled_at_ms.store(0, Ordering::Relaxed);
    member.lane.store(-1, Ordering::Relaxed);
    member.pid.store(std::process::id(), Ordering::Relaxed);
    let signal_mask = SignalMask::new();
    member.liveness.store(liveness(), Ordering::Release);
    drop(signal_mask);
    let slot = report::claim_slot(thread_id as u32, lane_socket::local_addr(fd), shared.inode_of(0));
    member.slot.store(slot, Ordering::Relaxed);
    shared.joined.fetch_max(at as u32 + 1, Ordering::AcqRel);
    // The second receiver: every wait gets a bound. The mode changes only after the bound is
    // set.
    if !shared.is_single_receiver(&shared.members[at]) && shared.mode() == SINGLE {
        sock_fds::set_wait_bound(shared, fd);
        failpoint::hit("waits bounded");
        _ = shared.mode.compare_exchange(SINGLE, OBSERVING, Ordering::SeqCst, Ordering::Relaxed);
    }
    let key = KEY.load(Ordering::Relaxed);
    if key != 0 {
        // SAFETY: the key is ours; any value but null makes the destructor run when the thread
        // ends.
        unsafe { libc::pthread_setspecific(key - 1, std::ptr::from_ref(sock).cast::<c_void>()) };
    }
    thread::cache_member(sock, at);
    shared.members.get(at)
}

/// A thread ends: its lanes are taken out of steering, and the other threads drain them.
extern "C" fn on_thread_exit(_: *mut c_void) {
    quiesce::run_inside(leave_all);
}

fn leave_all() {
    queues::flush();
    send_batch::flush();
    pollfds::free_cached();
    let thread_id = id();
    for sock in Sock::in_use() {
        let Some(shared) = sock.shared() else { continue };
        for (at, member) in shared.members.iter().enumerate() {
            if member.thread_id.load(Ordering::Relaxed) == thread_id {
                recovery::remove_member(sock, shared, at);
            }
        }
    }
}
