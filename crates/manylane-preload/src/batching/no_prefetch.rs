//! Why a socket has no prefetches, although they are wanted.

use std::sync::atomic::Ordering;

use libc::c_int;
use manylane_ipc::report::Reason;

use crate::base::settings::Settings;
use crate::base::state;
use crate::fds::lane_socket;
use crate::shared::report;
use crate::shared::sock::{MULTI_LANE, Shared};
use crate::xdp::queues;

/// Stops prefetching for the socket.
pub(crate) fn disable(shared: &Shared, fd: c_int, why: Reason) {
    shared.prefetch_off.fetch_or(reason_bit(why), Ordering::SeqCst);
    count_reasons(shared, fd);
}

/// Counts why wanted batches are not possible: each reason once for a socket.
pub(crate) fn count_reasons(shared: &Shared, fd: c_int) {
    let with_queues = queues::is_open(shared);
    let has_any = shared.mode() == MULTI_LANE || with_queues;
    let unasked = |settings: &Settings| settings.batch <= 1 || settings.batch_when_limited;
    if !has_any || state::settings().is_none_or(unasked) {
        return;
    }
    let mut all = shared.prefetch_off.load(Ordering::SeqCst);
    if shared.oversubscribed.load(Ordering::Relaxed) != 0 {
        all |= reason_bit(Reason::NoPrefetchShared);
    }
    if with_queues {
        all |= reason_bit(Reason::NoPrefetchQueues);
    }
    let fresh = all & !shared.counted_reasons.fetch_or(all, Ordering::AcqRel);
    for why in Reason::ALL.into_iter().filter(|why| fresh & reason_bit(*why) != 0) {
        report::count_reason(why, lane_socket::local_addr(fd));
    }
}

fn reason_bit(why: Reason) -> u32 {
    1 << why as u32
}
