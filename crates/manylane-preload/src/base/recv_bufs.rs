//! The program's buffers: a datagram that the library has is written into them as the kernel would
//! have written it.
//!
//! [`RecvBufs`] describes the buffers of a call. A [`DatagramRef`] is written into it as
//! `recvfrom(2)` and the like say: as many bytes as there is room for, the sender's address,
//! `MSG_TRUNC`.

use std::marker::PhantomData;
use std::ptr;

use libc::{EFAULT, EINVAL, MSG_CMSG_CLOEXEC, MSG_CTRUNC, MSG_TRUNC};
use libc::{c_int, c_void, iovec, mmsghdr, msghdr, sockaddr, socklen_t};

use crate::base::real;

/// Max iovecs that the kernel accepts for one message.
const IOVECS_MAX: usize = 1024;
/// Set only by the kernel, for calls of 32-bit programs.
const MSG_CMSG_COMPAT: c_int = 1 << 31;

/// The program's buffers for one receive call, during which the value may be used.
#[derive(Clone, Copy)]
pub(crate) struct RecvBufs<'call> {
    kind: Kind,
    call: PhantomData<&'call mut [u8]>,
}

#[derive(Clone, Copy)]
enum Kind {
    /// A buffer, and an address, which may be null.
    Bytes { to: iovec, from: *mut sockaddr, fromlen: *mut socklen_t },
    /// Iovecs without an address.
    Iovecs { to: *const iovec, count: usize },
    /// A message.
    Message(*mut msghdr),
    /// Messages, one for each datagram.
    Messages { to: *mut mmsghdr, count: usize },
}

/// A datagram in the library's memory.
#[derive(Clone, Copy)]
pub(crate) struct DatagramRef<'a> {
    /// The sender's address, as the kernel writes it.
    pub(crate) name: &'a [u8],
    /// Two parts, one after the other.
    pub(crate) payload: [&'a [u8]; 2],
    /// Control messages, as the kernel writes them.
    pub(crate) control: &'a [u8],
}

impl DatagramRef<'_> {
    fn len(&self) -> usize {
        self.payload[0].len() + self.payload[1].len()
    }

    /// Copies at most `len_max` bytes from offset `from`.
    ///
    /// # Safety
    /// `to` must have room for them.
    unsafe fn copy(&self, from: usize, to: *mut u8, len_max: usize) -> usize {
        let [near, far] = self.payload;
        let first = near.get(from..).unwrap_or_default();
        let first = &first[..first.len().min(len_max)];
        let rest = far.get(from.saturating_sub(near.len())..).unwrap_or_default();
        let rest = &rest[..rest.len().min(len_max - first.len())];
        // SAFETY: the caller has room for `len_max`, and both parts together are not longer.
        unsafe {
            ptr::copy_nonoverlapping(first.as_ptr(), to, first.len());
            ptr::copy_nonoverlapping(rest.as_ptr(), to.wrapping_add(first.len()), rest.len());
        }
        first.len() + rest.len()
    }
}

/// The constructors have the contract *program arguments* (`functions.rs`).
impl RecvBufs<'_> {
    fn new(kind: Kind) -> Self {
        Self { kind, call: PhantomData }
    }

    /// Of recv(2) and recvfrom(2).
    pub(crate) unsafe fn bytes(
        to: *mut c_void,
        len: usize,
        from: *mut sockaddr,
        fromlen: *mut socklen_t,
    ) -> Self {
        Self::new(Kind::Bytes { to: iovec { iov_base: to, iov_len: len }, from, fromlen })
    }

    /// Of readv(2).
    pub(crate) unsafe fn iovecs(to: *const iovec, count: usize) -> Self {
        Self::new(Kind::Iovecs { to, count })
    }

    /// Of recvmsg(2).
    pub(crate) unsafe fn message(to: *mut msghdr) -> Self {
        Self::new(Kind::Message(to))
    }

    /// Of recvmmsg(2).
    pub(crate) unsafe fn messages(to: *mut mmsghdr, count: usize) -> Self {
        Self::new(Kind::Messages { to, count })
    }

    /// Max datagrams that fit.
    pub(crate) fn capacity(&self) -> usize {
        match self.kind {
            Kind::Messages { count, .. } => count,
            _ => 1,
        }
    }

    /// True if the call returns the number of datagrams, not the length of one.
    pub(crate) fn is_mmsg(&self) -> bool {
        matches!(self.kind, Kind::Messages { .. })
    }

    /// True if the kernel refuses the call because of its arguments alone, without taking a
    /// datagram: then the kernel reports the error. `nth`: the next one of several messages.
    pub(crate) fn is_invalid(&self, nth: usize, flags: c_int) -> bool {
        // SAFETY: program arguments.
        unsafe {
            match self.kind {
                Kind::Bytes { .. } => false,
                Kind::Iovecs { to, count } => is_iov_invalid(to, count),
                Kind::Message(message) => is_msghdr_invalid(message, flags),
                Kind::Messages { to, count } => {
                    nth >= count
                        || to.is_null()
                        || is_msghdr_invalid(&raw const (*to.wrapping_add(nth)).msg_hdr, flags)
                }
            }
        }
    }

    /// Writes datagram `nth` of the call into the program's buffers. Returns what the call would
    /// return for it, or -1 where the kernel would have taken the datagram and lost it over an
    /// error found then.
    pub(crate) fn write(&self, nth: usize, datagram: &DatagramRef<'_>, flags: c_int) -> isize {
        // SAFETY: program arguments.
        let kept = unsafe {
            match self.kind {
                Kind::Bytes { to, from, fromlen } => scatter(datagram, &raw const to, 1)
                    .and_then(|kept| write_addr(from, fromlen, datagram.name).map(|()| kept)),
                Kind::Iovecs { to, count } => scatter(datagram, to, count),
                Kind::Message(message) => write_message(message, datagram, flags),
                Kind::Messages { to, count } if nth < count && !to.is_null() => {
                    let message = to.wrapping_add(nth);
                    let kept = write_message(&raw mut (*message).msg_hdr, datagram, flags);
                    if let Ok(kept) = kept {
                        let len = if flags & MSG_TRUNC == 0 { kept } else { datagram.len() };
                        (*message).msg_len = len as u32;
                    }
                    kept
                }
                Kind::Messages { .. } => Err(EFAULT),
            }
        };
        match kept {
            Ok(kept) if flags & MSG_TRUNC == 0 => kept as isize,
            Ok(_) => datagram.len() as isize,
            Err(errno) => real::fail_with_errno(errno),
        }
    }
}

/// True if recvmsg(2) refuses the program's message.
unsafe fn is_msghdr_invalid(message: *const msghdr, flags: c_int) -> bool {
    // SAFETY: program arguments.
    unsafe {
        let Some(message) = message.as_ref() else { return true };
        let name = c_int::try_from(message.msg_namelen);
        flags & MSG_CMSG_COMPAT != 0
            || !message.msg_name.is_null() && name.is_err()
            || is_iov_invalid(message.msg_iov, message.msg_iovlen)
    }
}

/// True if the kernel refuses an array of iovecs.
unsafe fn is_iov_invalid(pieces: *const iovec, count: usize) -> bool {
    // SAFETY: program arguments; called if not null.
    let is_long = |nth| unsafe { (*pieces.wrapping_add(nth)).iov_len > isize::MAX as usize };
    count > IOVECS_MAX || count > 0 && (pieces.is_null() || (0..count).any(is_long))
}

/// Writes as much of the sender's address as there is room for.
unsafe fn write_addr(to: *mut sockaddr, len: *mut socklen_t, name: &[u8]) -> Result<(), c_int> {
    if to.is_null() {
        return Ok(());
    }
    if len.is_null() {
        return Err(EFAULT);
    }
    // SAFETY: program arguments.
    let room = unsafe { *len };
    if c_int::try_from(room).is_err() {
        return Err(EINVAL);
    }
    // SAFETY: program arguments: there is room for as many bytes as the length says.
    unsafe {
        ptr::copy_nonoverlapping(name.as_ptr(), to.cast::<u8>(), name.len().min(room as usize));
        *len = name.len() as socklen_t;
    }
    Ok(())
}

/// Fills one message. Returns the bytes of the payload that fitted.
unsafe fn write_message(
    message: *mut msghdr,
    datagram: &DatagramRef<'_>,
    flags: c_int,
) -> Result<usize, c_int> {
    // SAFETY: program arguments; the library has no other reference to the message.
    unsafe {
        let Some(message) = message.as_mut() else { return Err(EFAULT) };
        let kept = scatter(datagram, message.msg_iov, message.msg_iovlen)?;
        write_addr(message.msg_name.cast(), &raw mut message.msg_namelen, datagram.name)?;
        message.msg_flags = flags & MSG_CMSG_CLOEXEC | if kept < datagram.len() { MSG_TRUNC } else { 0 };
        write_control(message, datagram.control);
        Ok(kept)
    }
}

/// Writes all control messages if they fit; else none, and sets the flag for that.
unsafe fn write_control(message: &mut msghdr, control: &[u8]) {
    let room = std::mem::replace(&mut message.msg_controllen, 0);
    if control.is_empty() {
        return;
    }
    if message.msg_control.is_null() || room < control.len() {
        message.msg_flags |= MSG_CTRUNC;
        return;
    }
    // SAFETY: program arguments: the buffer has room for them.
    unsafe { ptr::copy_nonoverlapping(control.as_ptr(), message.msg_control.cast(), control.len()) };
    message.msg_controllen = control.len();
}

/// Copies into the program's iovecs. Returns the bytes that fitted.
unsafe fn scatter(datagram: &DatagramRef<'_>, to: *const iovec, count: usize) -> Result<usize, c_int> {
    if to.is_null() && count > 0 {
        return Err(EFAULT);
    }
    let mut done = 0;
    for nth in 0..count {
        if done == datagram.len() {
            break;
        }
        // SAFETY: program arguments.
        let piece = unsafe { &*to.wrapping_add(nth) };
        if piece.iov_base.is_null() && piece.iov_len > 0 {
            return Err(EFAULT);
        }
        // SAFETY: program arguments: there is room for as many bytes.
        done += unsafe { datagram.copy(done, piece.iov_base.cast(), piece.iov_len) };
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn datagram_ref<'a>(name: &'a [u8], near: &'a [u8], far: &'a [u8]) -> DatagramRef<'a> {
        DatagramRef { name, payload: [near, far], control: &[] }
    }

    #[test]
    fn iovecs_receive_from_two_slices() {
        let whole: Vec<u8> = (0..20).collect();
        for cut in 0..=whole.len() {
            let datagram = datagram_ref(&[], &whole[..cut], &whole[cut..]);
            for room in 0..=24 {
                for first in 0..=room {
                    let mut bytes = [255_u8; 24];
                    let (one, two) = bytes.split_at_mut(first);
                    let pieces = [
                        iovec { iov_base: one.as_mut_ptr().cast(), iov_len: first },
                        iovec { iov_base: two.as_mut_ptr().cast(), iov_len: room - first },
                    ];
                    // SAFETY: two pieces of a local.
                    let kept = unsafe { scatter(&datagram, pieces.as_ptr(), 2) }.unwrap();
                    assert_eq!(kept, room.min(whole.len()));
                    assert_eq!(bytes[..kept], whole[..kept]);
                    assert!(bytes[kept..].iter().all(|byte| *byte == 255));
                }
            }
        }
    }

    #[test]
    fn truncated_datagrams_set_msg_trunc() {
        let name = [2, 0, 1, 2, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
        let datagram = datagram_ref(&name, b"hello", b" world");
        let mut bytes = [0_u8; 8];
        let mut from = [9_u8; 16];
        let mut len = 4;
        let at = from.as_mut_ptr().cast();
        // SAFETY: locals, of these lengths.
        let to = unsafe { RecvBufs::bytes(bytes.as_mut_ptr().cast(), 8, at, &raw mut len) };
        assert_eq!(to.write(0, &datagram, 0), 8);
        assert_eq!((&bytes, len), (b"hello wo", 16));
        assert_eq!(from[..6], [2, 0, 1, 2, 9, 9]);
        assert_eq!(to.write(0, &datagram, MSG_TRUNC), 11);
        let mut piece = iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: 3 };
        // SAFETY: zeroes are a value of a message.
        let mut message: mmsghdr = unsafe { std::mem::zeroed() };
        message.msg_hdr.msg_iov = &raw mut piece;
        message.msg_hdr.msg_iovlen = 1;
        message.msg_hdr.msg_controllen = 77;
        // SAFETY: one local message with a local piece.
        let to = unsafe { RecvBufs::messages(&raw mut message, 1) };
        assert_eq!(to.write(0, &datagram, 0), 3);
        assert_eq!((message.msg_len, message.msg_hdr.msg_flags), (3, MSG_TRUNC));
        assert_eq!(message.msg_hdr.msg_controllen, 0);
    }
    #[test]
    fn control_messages_are_written_whole_or_not_at_all() {
        let datagram = DatagramRef { control: b"control!", ..datagram_ref(&[], b"hello", &[]) };
        for (room, kept) in [(8, 8), (7, 0)] {
            let mut control = [0_u8; 8];
            // SAFETY: zeroes are a value of a message.
            let mut message: msghdr = unsafe { std::mem::zeroed() };
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = room;
            // SAFETY: a local message, without pieces.
            let to = unsafe { RecvBufs::message(&raw mut message) };
            assert_eq!(to.write(0, &datagram, 0), 0);
            assert_eq!(message.msg_controllen, kept);
            assert_eq!(message.msg_flags & MSG_CTRUNC != 0, kept == 0);
            assert_eq!(control, if kept == 8 { *b"control!" } else { [0; 8] });
        }
    }
}
