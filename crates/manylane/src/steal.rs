//! Stealing: an idle lane looks for one that has more than it gets done.
//!
//! Nothing of this is on the hot path: a lane looks only when a receive timed out, and a victim does nothing for
//! it. A lane is a victim if datagrams wait in its queue and, since the thief looked last, it has not come back
//! for them (its thread is busy with a batch) or has filled whole batches (it is behind).

use std::os::fd::AsFd;
use std::sync::Arc;

use manylane_sys::sock;

use crate::counters::{Count, LaneId};
use crate::lane::LaneShared;
use crate::socket::Shared;

/// What a thief saw of the others when it looked last.
#[derive(Debug, Default)]
pub(crate) struct Thief {
    seen: Vec<(LaneId, u64, u64)>,
}

impl Thief {
    /// The lane to take a batch from now, if any.
    pub(crate) fn pick(&mut self, shared: &Shared, me: &LaneShared) -> Option<Arc<LaneShared>> {
        let mut victim: Option<(u32, Arc<LaneShared>)> = None;
        let mut now = Vec::new();
        for lane in shared.lanes() {
            if lane.id == me.id || !lane.is_open() {
                continue;
            }
            let (batches, full) = (lane.cells.get(Count::Batches), lane.cells.get(Count::FullBatches));
            let behind = self.seen.iter().any(|(id, b, f)| *id == lane.id && (*b == batches || *f != full));
            let queued = sock::queue_state(lane.fd.as_fd()).map_or(0, |state| state.queued_bytes);
            now.push((lane.id, batches, full));
            if behind && queued > victim.as_ref().map_or(0, |(most, _)| *most) {
                victim = Some((queued, lane));
            }
        }
        self.seen = now;
        victim.map(|(_, lane)| lane)
    }
}
