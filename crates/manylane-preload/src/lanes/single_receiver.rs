//! The single receiver of a socket: its calls are the C library's own.
//!
//! Such a socket has no lane that is steered to, no queues and no bound on a wait. The
//! library checks that this is so, marks that the thread may be in a wait without a bound, and
//! counts.

use std::sync::atomic::Ordering;

use crate::group::leasing;
use crate::shared::sock::{Member, PROVEN_RECEIVES_MIN, SINGLE, Shared, Sock, UNBOUNDED};
use crate::shared::thread;

/// Starts a wait of the calling thread by the program's own call. None unless it is the single
/// receiver, and is known to come back.
#[inline]
pub(crate) fn start_wait<'a>(sock: &Sock, shared: &'a Shared) -> Option<&'a Member> {
    if shared.mode() != SINGLE || leasing::may_have_queues(shared) {
        return None;
    }
    let member = thread::member(sock, shared)?;
    let is_proven = member.receives.load(Ordering::Relaxed) >= PROVEN_RECEIVES_MIN;
    (is_proven && start_wait_of(shared, member)).then_some(member)
}

/// Starts a wait without a bound of the calling thread, whose member this is. False if it is not
/// the single receiver.
#[inline]
pub(crate) fn start_wait_of(shared: &Shared, member: &Member) -> bool {
    if shared.mode() != SINGLE {
        return false;
    }
    // SeqCst, as where lanes are created: either this thread sees the changed mode, or the other
    // one sees this state.
    member.state.swap(UNBOUNDED, Ordering::SeqCst);
    let is_single = shared.mode.load(Ordering::SeqCst) == SINGLE;
    if !is_single {
        member.finish_wait();
    }
    is_single
}
