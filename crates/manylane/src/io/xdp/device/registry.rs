//! The devices that are open in this process, for sockets that share one.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use manylane_sys::errno::ENOPROTOOPT;
use manylane_sys::netns;

use super::{AttachMode, Device};
use crate::error::{Error, Result};
use crate::io::xdp::checks;
use crate::io::xdp::route::LocalState;
use crate::port_owner;

/// Devices that are open in this process, and up to [`CLOSED_MAX`] that were: namespace, index,
/// device. A device that got the index of an earlier one in its namespace is
/// taken for that one: opening it may wait for a queue that another process has open.
static OPEN_DEVICES: Mutex<Vec<OpenDevice>> = Mutex::new(Vec::new());

/// Maximum number of closed devices that are remembered: their namespaces may be gone.
const CLOSED_MAX: usize = 64;

type OpenDevice = (Namespace, u32, Weak<Device>);

/// The identity of a network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Namespace {
    Cookie(u64),
    /// Before Linux 5.14. It is reused.
    Inode(u64),
}

impl Namespace {
    /// That of the calling thread.
    fn current() -> io::Result<Self> {
        let inode = || Ok(std::fs::metadata("/proc/thread-self/ns/net")?.ino());
        Self::from_cookie(netns::cookie(), inode)
    }

    fn from_cookie(cookie: io::Result<u64>, inode: impl Fn() -> io::Result<u64>) -> io::Result<Self> {
        match cookie {
            Err(err) if err.raw_os_error() == Some(ENOPROTOOPT) => inode().map(Self::Inode),
            cookie => cookie.map(Self::Cookie),
        }
    }
}

impl Device {
    /// The device `index` of the calling thread's namespace, with the program attached. `locals`
    /// is the namespace's local state, `longest` the longest frame that an XSK accepts, `sources`
    /// the number that limits keep state for. If `waits`, waits for an earlier program of this
    /// process to be detached; otherwise the device then counts as in use.
    pub(crate) fn open(
        index: u32,
        attach: AttachMode,
        locals: &LocalState,
        longest: u32,
        sources: u32,
        waits: bool,
    ) -> Result<Arc<Self>> {
        find_or_open(index, |was_open_before| {
            // A child process between fork and exec has a copy of the link's descriptor.
            let timeout =
                if waits && was_open_before { port_owner::HANDOVER_TIMEOUT } else { Duration::ZERO };
            checks::check_device(index, attach, locals)?;
            let device = Self::load(index, attach, longest, sources, timeout)?;
            Ok(Self { was_open_before, ..device })
        })
    }
}

/// The device `index` of the calling thread's namespace, if it is open in this process; otherwise
/// what `open` returns, which is told whether it was open before.
fn find_or_open(index: u32, open: impl FnOnce(bool) -> Result<Device>) -> Result<Arc<Device>> {
    let namespace =
        Namespace::current().map_err(|err| Error::system("identifying the network namespace", err))?;
    let mut all = OPEN_DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let known = all.iter().position(|(space, at, _)| (*space, *at) == (namespace, index));
    let there = known.and_then(|at| all[at].2.upgrade());
    if let Some(device) = there.filter(|device| !device.is_gone()) {
        return Ok(device);
    }
    let device = Arc::new(open(known.is_some())?);
    if let Some(at) = known {
        all.remove(at);
    }
    remember(&mut all, (namespace, index, Arc::downgrade(&device)));
    Ok(device)
}

/// Adds a device. If too many are closed, the one that was opened first is forgotten.
fn remember(open: &mut Vec<OpenDevice>, new: OpenDevice) {
    let mut closed = (0..open.len()).filter(|at| open[*at].2.strong_count() == 0);
    let first = closed.next();
    if let Some(first) = first.filter(|_| closed.count() + 1 >= CLOSED_MAX) {
        open.remove(first);
    }
    open.push(new);
}

#[cfg(test)]
mod tests {
    use manylane_sys::errno::EMFILE;

    use super::*;

    #[test]
    fn only_a_kernel_without_cookies_has_namespaces_with_inodes() {
        let failed = |errno| Err(io::Error::from_raw_os_error(errno));
        let inode = || Ok(7);
        assert_eq!(Namespace::from_cookie(Ok(7), inode).unwrap(), Namespace::Cookie(7));
        assert_eq!(Namespace::from_cookie(failed(ENOPROTOOPT), inode).unwrap(), Namespace::Inode(7));
        let err = Namespace::from_cookie(failed(EMFILE), inode).unwrap_err();
        assert_eq!(err.raw_os_error(), Some(EMFILE));
    }

    #[test]
    fn closed_devices_are_remembered_up_to_a_limit() {
        let mut open = Vec::new();
        for index in 0..=CLOSED_MAX as u32 + 1 {
            remember(&mut open, (Namespace::Cookie(u64::from(index % 3)), index, Weak::new()));
        }
        let left: Vec<u32> = open.iter().map(|(_, index, _)| *index).collect();
        assert_eq!(left, (2..=CLOSED_MAX as u32 + 1).collect::<Vec<_>>());
    }
}
