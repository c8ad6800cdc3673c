//! Installs the fast path (`fast_path.rs`) of a socket's single receiver.

use std::sync::atomic::Ordering;

use libc::c_int;

use crate::batching::send_batch;
use crate::fds::fast_path;
use crate::fds::table::{self, Entry};
use crate::group::leasing;
use crate::lanes::members;
use crate::shared::sock::{Member, PROVEN_RECEIVES_MIN, SINGLE, Shared, Sock};
use crate::shared::thread;
use crate::xdp::queues;

/// Sets the fast path of the calling thread, which has received on a socket in mode SINGLE, if it
/// receives there repeatedly and is the only receiver.
#[inline]
pub(crate) fn arm(sock: &'static Sock, shared: &Shared, member: &Member, fd: c_int) {
    let comes_back = member.receives.load(Ordering::Relaxed) >= PROVEN_RECEIVES_MIN;
    // A receive with some flags takes the slow path even if there is a fast path.
    let has_one = || fast_path::find_for(sock, fd).is_some();
    if comes_back && !has_one() && is_eligible(shared) {
        install(sock, shared, member, fd);
    }
}

fn is_eligible(shared: &Shared) -> bool {
    // A later receive may still request queues: it has to come to the library.
    if queues::is_open(shared) || leasing::is_pending(shared) {
        return false;
    }
    let joined = shared.joined.load(Ordering::SeqCst) as usize;
    let members =
        || shared.members.iter().take(joined).filter(|member| member.thread_id.load(Ordering::SeqCst) != 0);
    shared.mode.load(Ordering::SeqCst) == SINGLE
        && shared.forked.load(Ordering::SeqCst) == 0
        && members().nth(1).is_none()
}

#[cold]
fn install(sock: &'static Sock, shared: &Shared, member: &Member, fd: c_int) {
    // Batched replies of another socket must be sent first: `send_batch.rs`.
    if !members::has_exit_hook() || send_batch::has_queued() {
        return;
    }
    let entry = Entry::Sock(sock.index());
    // The slot and the number may belong to another socket by now, which the thread has not
    // joined.
    let is_member = || thread::cached_member(sock, shared).is_some();
    fast_path::install(sock, member, fd, || is_eligible(shared) && table::entry(fd) == entry && is_member());
}
