//! Errors of loading programs and writing maps.

use std::io;

use manylane_sys::errno::{EACCES, EMFILE, ENOMEM, EPERM};

use crate::error::{Error, ErrorKind, errno_of};

/// The error of an eBPF step, with the kind for its number.
pub(super) fn bpf_error<E: std::error::Error + Send + Sync + 'static>(
    name: &str,
    what: &str,
    err: E,
) -> Error {
    let kind = match errno_of(&err) {
        Some(EPERM | EACCES) => ErrorKind::Permission,
        Some(number @ (ENOMEM | EMFILE)) => {
            return Error::system(format!("{name}: {what}"), io::Error::from_raw_os_error(number));
        }
        _ => ErrorKind::Unsupported,
    };
    Error::with(kind, format!("{name}: {what}"), err)
}
