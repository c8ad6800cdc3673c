//! Stealing: an idle lane looks for one that has more than it gets done.
//!
//! Nothing of this is on the hot path: a lane looks only when a receive timed out, and a victim
//! does nothing for it. A lane is a victim if datagrams wait in its queue and, since the thief
//! looked last, it has not come back for them (its thread is busy with a batch) or has filled whole
//! batches (it is behind).

use std::os::fd::AsFd;
use std::sync::Arc;

use manylane_sys::sock;

use crate::counters::{Count, LaneId};
use crate::lane::LaneShared;
use crate::socket::Shared;

/// What a thief saw of the others: id, batches, full batches.
type LaneSample = (LaneId, u64, u64);

/// What a thief saw when it looked last, and room for what it sees now: a look allocates nothing.
#[derive(Debug)]
pub(crate) struct Stealer {
    previous: Vec<LaneSample>,
    current: Vec<LaneSample>,
}

impl Stealer {
    /// One that can look at up to `lanes` others.
    pub(crate) fn new(lanes: usize) -> Self {
        Self { previous: Vec::with_capacity(lanes), current: Vec::with_capacity(lanes) }
    }

    /// The lane to take a batch from now, if any.
    pub(crate) fn pick_victim(&mut self, shared: &Shared, me: &LaneShared) -> Option<Arc<LaneShared>> {
        let Self { previous: seen, current: now } = self;
        now.clear();
        let victim = shared.try_with_lanes(|lanes| {
            let mut victim: Option<(u32, &Arc<LaneShared>)> = None;
            for lane in lanes.iter().filter(|lane| lane.id != me.id && lane.is_open()) {
                let (batches, full) = (lane.cells.get(Count::Batches), lane.cells.get(Count::FullBatches));
                let behind = seen.iter().any(|(id, b, f)| *id == lane.id && (*b == batches || *f != full));
                let queued = sock::queue_state(lane.fd.as_fd()).map_or(0, |state| state.queued_bytes);
                now.push((lane.id, batches, full));
                if behind && queued > victim.map_or(0, |(most, _)| most) {
                    victim = Some((queued, lane));
                }
            }
            victim.map(|(_, lane)| Arc::clone(lane))
        })?;
        std::mem::swap(seen, now);
        victim
    }
}
