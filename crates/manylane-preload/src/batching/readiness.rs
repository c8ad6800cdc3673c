//! Readiness of lanes: the one check for a datagram that covers kernel sockets, queues and
//! prefetched datagrams.

use libc::{c_int, c_short, pollfd};

use crate::base::real;
use crate::base::settings::LANES_MAX;
use crate::batching::prefetch;
use crate::shared::sock::{Shared, Sock};
use crate::xdp::queues;

/// The ppoll(2) entries for the lanes of `mask`, in their order, and their number.
pub(crate) fn lane_pollfds(sock: &Sock, fd: c_int, mask: u64) -> ([pollfd; LANES_MAX], usize) {
    let mut fds = [pollfd { fd: -1, events: libc::POLLIN, revents: 0 }; LANES_MAX];
    let mut count = 0;
    for lane in (0..LANES_MAX).filter(|lane| mask & 1 << lane != 0) {
        fds[count].fd = sock.fd_of(lane, fd);
        count += 1;
    }
    (fds, count)
}

/// A bit for each lane of `mask` that has a datagram in memory: prefetched or in a queue.
#[inline]
pub(crate) fn ready_in_memory(sock: &'static Sock, shared: &Shared, mask: u64) -> u64 {
    queues::ready_lanes(sock, shared, mask) | prefetch::ready_lanes(sock, mask)
}

/// A bit for each lane of `mask` that has a datagram.
pub(crate) fn ready_lanes(sock: &'static Sock, shared: &Shared, fd: c_int, mask: u64) -> u64 {
    lanes_with(libc::POLLIN, sock, shared, fd, mask)
}

/// A bit for each lane of `mask` that has a datagram, or one of the poll(2) `events`. If the kernel
/// cannot be asked, each may have one: a lane that is taken to be empty may never be polled again.
pub(crate) fn lanes_with(events: c_short, sock: &'static Sock, shared: &Shared, fd: c_int, mask: u64) -> u64 {
    if mask == 0 {
        return 0;
    }
    let frames = ready_in_memory(sock, shared, mask);
    let (mut fds, count) = lane_pollfds(sock, fd, mask);
    let fds = &mut fds[..count];
    let mut answer = real::ppoll_raw(fds, real::NO_WAIT, None);
    while real::is_interrupted(answer) {
        answer = real::ppoll_raw(fds, real::NO_WAIT, None);
    }
    if answer < 0 {
        return mask;
    }
    let lanes = (0..LANES_MAX).filter(|lane| mask & 1 << lane != 0);
    let readable = lanes.zip(fds.iter()).filter(|(_, at)| at.revents & events != 0);
    readable.fold(frames, |all, (lane, _)| all | 1 << lane)
}
