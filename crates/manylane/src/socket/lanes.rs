//! Opening of one lane.

use std::sync::Arc;

use crate::error::Result;
use crate::group::{LaneParts, Shared};
use crate::lane::Lane;

/// Opens one more lane of a socket.
pub(super) fn open_lane(shared: &Arc<Shared>) -> Result<Lane> {
    let lane = make_lane(shared, shared.open_lane()?)?;
    shared.engine.lane_added();
    Ok(lane)
}

/// Makes a lane from its parts. A lane that was not admitted to steering is closed again.
pub(super) fn make_lane(shared: &Arc<Shared>, (parts, admitted): (LaneParts, Result<()>)) -> Result<Lane> {
    let LaneParts { lane_shared, io } = parts;
    let lane = Lane::new(Arc::clone(shared), lane_shared, io);
    admitted.map(|()| lane)
}
