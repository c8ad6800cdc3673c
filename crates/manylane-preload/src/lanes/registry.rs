//! New descriptors: their entries in the table. If the table still has one for such a number, the
//! old descriptor was closed past the library.

use libc::{c_int, msghdr};

use crate::base::quiesce;
use crate::fds::hidden_fds;
use crate::fds::table::{self, Entry};
use crate::lanes::entries;
use crate::lanes::fallback;
use crate::shared::thread;

/// A new descriptor means `entry`. If its number has an entry, the old one was closed unseen.
pub(crate) fn register(fd: c_int, entry: Entry) {
    if thread::is_own_process() {
        release_replaced(fd, entry, table::set(fd, entry));
    }
}

/// `fd` now means `entry`. `before` is its old entry; none if the table has no room for it.
pub(crate) fn release_replaced(fd: c_int, entry: Entry, before: Option<Entry>) {
    match before {
        Some(Entry::Hidden) => {
            hidden_fds::handle_lost_fd(fd);
            fallback::handle_lost_fd(fd);
        }
        Some(before) => entries::release(before),
        None => entries::release(entry),
    }
}

/// `fd` is new and not tracked: removes a stale entry.
#[inline]
pub(crate) fn clear_stale(fd: c_int) -> c_int {
    if fd >= 0 && table::entry(fd) != Entry::None {
        quiesce::run_inside(|| register(fd, Entry::None));
    }
    fd
}

/// A message was received on a socket that is not UDP: it may carry new descriptors (SCM_RIGHTS).
pub(crate) unsafe fn clear_passed_fds(message: *const msghdr) {
    // SAFETY: program arguments.
    unsafe { for_each_fd(message, |fd| _ = clear_stale(fd)) };
}

/// Calls `of` with each descriptor that a message of the program carries.
pub(crate) unsafe fn for_each_fd(message: *const msghdr, mut of: impl FnMut(c_int)) {
    // SAFETY: program arguments; the macros stay within the control buffer.
    unsafe {
        let Some(message) = message.as_ref() else { return };
        if message.msg_control.is_null() || message.msg_controllen < size_of::<libc::cmsghdr>() {
            return;
        }
        let mut at = libc::CMSG_FIRSTHDR(message);
        while let Some(control) = at.as_ref() {
            if (control.cmsg_level, control.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let bytes = control.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                let fds = libc::CMSG_DATA(control).cast::<c_int>();
                for nth in 0..(bytes / size_of::<c_int>()).min(253) {
                    of(fds.add(nth).read_unaligned());
                }
            }
            at = libc::CMSG_NXTHDR(message, control);
        }
    }
}
