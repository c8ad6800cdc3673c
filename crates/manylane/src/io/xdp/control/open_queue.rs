//! Opens a queue of a device for a socket.

use std::thread;
use std::time::{Duration, Instant};

use manylane_sys::errno::EBUSY;
use manylane_sys::xsk::{self, Queue, QueueOptions};

use super::super::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::port_owner;

/// Size of the longest frame that is received in several buffers, in bytes.
const FRAME_LEN_MAX: u32 = 65_535;

/// Opens a queue, or joins it if another socket of this process has it; none if it has and not
/// `may_join`. If `strict`, waits until the kernel has released a queue that an earlier owner had.
pub(super) fn open_queue(
    device: &Device,
    options: &QueueOptions,
    may_join: bool,
    busy_poll: Option<Duration>,
    strict: bool,
) -> Result<Option<Queue>> {
    let queue = options.queue;
    let start = Instant::now();
    let mut timeout = port_owner::HANDOVER_TIMEOUT;
    loop {
        if start.elapsed() > timeout && is_being_released(device, queue) {
            timeout = port_owner::RELEASE_TIMEOUT;
        }
        match device.open_queue(options, may_join) {
            Ok(None) => return Ok(None),
            Ok(Some(mut xsk)) => {
                if xsk.has_multi_buffer() {
                    device.set_frame_len_max(FRAME_LEN_MAX);
                }
                let micros = busy_poll.map_or(0, |time| u32::try_from(time.as_micros()).unwrap_or(u32::MAX));
                if micros > 0
                    && let Err(err) = xsk.busy_poll(micros, options.batch as u32)
                {
                    log::warn!("{} queue {queue} cannot busy-poll: {err}", device.name);
                }
                return Ok(Some(xsk));
            }
            // The kernel releases a queue some time after its last owner has closed it.
            Err(err) if strict && err.source.raw_os_error() == Some(EBUSY) && start.elapsed() < timeout => {
                thread::sleep(Duration::from_millis(5));
            }
            Err(err) => return Err(explain(device, queue, err)),
        }
    }
}

/// True if no process has the queue open, as far as the kernel tells, or if this process had.
fn is_being_released(device: &Device, queue: u32) -> bool {
    device.has_opened(queue) || xsk::owners(device.index, queue).is_ok_and(|owners| owners.is_empty())
}

/// The error of opening an XSK, with what to change.
fn explain(device: &Device, queue: u32, err: xsk::OpenError) -> Error {
    let at = format!("{} queue {queue}", device.name);
    match err.source.raw_os_error() {
        Some(EBUSY) => {
            // The owners are not always visible; an error here must not hide the original one.
            let owners = xsk::owners(device.index, queue);
            let message = match owners {
                Ok(owners) if owners.is_empty() => {
                    format!("{at}: the kernel has not released its last AF_XDP socket yet: try again")
                }
                Ok(owners) => format!(
                    "{at} belongs to an AF_XDP socket {} (see 'ss --xdp -p')",
                    port_owner::describe_process(&owners)
                ),
                Err(_) if device.has_opened(queue) => format!(
                    "{at}: the kernel has not released the AF_XDP socket that this process had, or another process has one now (see 'ss --xdp -p'): try again"
                ),
                Err(_) => format!("{at} belongs to an AF_XDP socket of another process (see 'ss --xdp -p')"),
            };
            Error::with(ErrorKind::InUse, message, err.source)
        }
        _ => Error::system(format!("{at}: {}", err.step), err.source),
    }
}
